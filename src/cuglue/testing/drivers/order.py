"""Promises about order: streams, events, callbacks, and captures.

Owns these tests. Order that the driver was not asked for is not tested: it may be there by chance.
"""

from __future__ import annotations

import threading

from ...driver.protocol import CaptureMode, CaptureStatus, CopyKind
from ..latch import Latch
from .case import DriverCase, N


class OrderTests(DriverCase):
    """Streams, events, graphs."""

    def test_a_held_stream_holds_nobody_else(self) -> None:
        """Streams are independent until an event ties them."""
        driver, held, free, a, b = self.driver, self.stream(), self.stream(), self.memory(), self.memory()
        with Latch(held, driver=driver, device=self.device):
            driver.fill_async(a, 1, N, held)
            driver.fill_async(b, 2, N, free)
            driver.stream_synchronize(free)
            assert not driver.stream_query(held)
        driver.stream_synchronize(held)
        assert driver.stream_query(held)
        assert (self.get(a, N, held) == 1).all()

    def test_a_wait_orders_two_streams(self) -> None:
        """What the waiting stream does comes after what the event covers, also once the event is destroyed."""
        driver, first, second, a, b = self.driver, self.stream(), self.stream(), self.memory(), self.memory()
        driver.fill_async(a, 0, N, first)
        driver.stream_synchronize(first)
        event = driver.event_create(self.device)
        with Latch(first, driver=driver, device=self.device):
            driver.fill_async(a, 5, N, first)
            driver.event_record(event, first)
            driver.stream_wait_event(second, event)
            assert not driver.event_query(event)
            driver.event_destroy(event)
            driver.copy_async(b, a, N, CopyKind.D2D, second)
            assert not driver.stream_query(second)
        assert (self.get(b, N, second) == 5).all()

    def test_an_event_covers_what_came_before_it(self) -> None:
        """Later work of the stream does not hold it back; before it is recorded it is complete."""
        driver, stream, event = self.driver, self.stream(), self.event()
        assert driver.event_query(event)
        driver.event_synchronize(event)
        driver.event_record(event, stream)
        with Latch(stream, driver=driver, device=self.device):
            driver.event_synchronize(event)
            assert driver.event_query(event)
            driver.event_record(event, stream)
            assert not driver.event_query(event)
        driver.event_synchronize(event)

    def test_elapsed_time(self) -> None:
        """Between timing events, never negative; refused of others."""
        driver, stream, a = self.driver, self.stream(), self.memory()
        start, end, plain = self.event(timing=True), self.event(timing=True), self.event()
        driver.event_record(start, stream)
        driver.fill_async(a, 1, N, stream)
        driver.event_record(end, stream)
        driver.event_record(plain, stream)
        driver.event_synchronize(end)
        assert driver.event_elapsed(start, end) >= 0
        driver.stream_synchronize(stream)
        self.refused(lambda: driver.event_elapsed(plain, end), 400)

    def test_a_host_callback_runs_in_stream_order(self) -> None:
        """On another thread, after the work before it, before the work after it."""
        if not self.can.host_callbacks:
            return
        driver, stream, seen = self.driver, self.stream(), threading.Event()
        threads: list[int] = []

        def function() -> None:
            threads.append(threading.get_ident())
            seen.set()

        with Latch(stream, driver=driver, device=self.device):
            driver.stream_callback(stream, function)
            assert not driver.stream_query(stream)
            assert not seen.is_set()
        driver.stream_synchronize(stream)
        assert seen.is_set()
        assert threads != [threading.get_ident()]

    def test_context_events_cover_every_stream(self) -> None:
        """A record waits for all streams, a wait holds all streams."""
        if not self.can.context_events:
            return
        driver, held, other, event = self.driver, self.stream(), self.stream(), self.event()
        with Latch(held, driver=driver, device=self.device):
            driver.context_record(event, self.device)
            assert not driver.event_query(event)
        driver.event_synchronize(event)
        second = self.event()
        with Latch(held, driver=driver, device=self.device):
            driver.event_record(second, held)
            driver.context_wait(second, self.device)
            driver.fill_async(self.memory(), 1, N, other)
            assert not driver.stream_query(other)
        driver.stream_synchronize(other)

    def test_a_free_of_memory_from_outside_is_refused_in_a_capture(self) -> None:
        """Whatever stream records: the memory stays, and so does the capture."""
        if not (self.can.graphs and self.can.async_memory):
            return
        driver, stream, side = self.driver, self.stream(), self.stream()
        kept, touched = driver.malloc_async(N, stream, self.device), self.memory()
        driver.fill_async(kept, 7, N, stream)
        driver.stream_synchronize(stream)
        event = self.event()
        for mode in CaptureMode:
            driver.capture_begin(stream, mode)
            driver.event_record(event, stream)
            driver.stream_wait_event(side, event)
            for recording in stream, side:
                self.refused(lambda at=recording: driver.free_async(kept, at, self.device), 1)  # type: ignore[misc]
                assert driver.capture_status(recording) is CaptureStatus.ACTIVE
            driver.fill_async(touched, 3, N, side)
            driver.event_record(event, side)
            driver.stream_wait_event(stream, event)
            graph = driver.capture_end(stream)
            assert driver.graph_memory_nodes(graph) == 0
            driver.graph_destroy(graph)
        assert (self.get(kept, N, stream) == 7).all()
        driver.free_async(kept, stream, self.device)

    # --- graphs -------------------------------------------------------------------------------------------------
    def test_a_graph_runs_what_was_recorded(self) -> None:
        """Nothing runs while recording; each replay reads its inputs anew."""
        if not self.can.graphs:
            return
        driver, stream, a, b = self.driver, self.stream(), self.memory(), self.memory()
        driver.fill_async(b, 0, N, stream)
        driver.stream_synchronize(stream)
        driver.capture_begin(stream, CaptureMode.THREAD_LOCAL)
        assert driver.capture_status(stream) is CaptureStatus.ACTIVE
        driver.copy_async(b, a, N, CopyKind.D2D, stream)
        graph = driver.capture_end(stream)
        assert driver.capture_status(stream) is CaptureStatus.NONE
        assert driver.graph_memory_nodes(graph) == 0
        assert (self.get(b, N, stream) == 0).all()
        executable = driver.graph_instantiate(graph)
        driver.graph_destroy(graph)
        driver.graph_upload(executable, stream)
        for value in (3, 4):
            driver.fill_async(a, value, N, stream)
            driver.graph_launch(executable, stream)
            assert (self.get(b, N, stream) == value).all()
        driver.graph_exec_destroy(executable)

    def test_a_forked_capture_joins(self) -> None:
        """Another stream takes part through events."""
        if not self.can.graphs:
            return
        driver, origin, branch, event = self.driver, self.stream(), self.stream(), self.event()
        a, b = self.memory(), self.memory()
        driver.capture_begin(origin, CaptureMode.THREAD_LOCAL)
        driver.event_record(event, origin)
        driver.stream_wait_event(branch, event)
        driver.fill_async(a, 1, N, origin)
        driver.fill_async(b, 2, N, branch)
        assert driver.capture_status(branch) is CaptureStatus.ACTIVE
        driver.event_record(event, branch)
        driver.stream_wait_event(origin, event)
        driver.copy_async(a, b, N // 2, CopyKind.D2D, origin)
        graph = driver.capture_end(origin)
        executable = driver.graph_instantiate(graph)
        driver.graph_launch(executable, origin)
        assert self.get(a, N, origin)[[0, -1]].tolist() == [2, 1]
        driver.graph_exec_destroy(executable)
        driver.graph_destroy(graph)

    def test_a_wait_while_recording_is_refused_and_loses_the_capture(self) -> None:
        """The stream is an ordinary one again after the end."""
        if not self.can.graphs:
            return
        driver, stream, a = self.driver, self.stream(), self.memory()
        driver.capture_begin(stream, CaptureMode.THREAD_LOCAL)
        driver.fill_async(a, 1, N, stream)
        self.refused(lambda: driver.stream_synchronize(stream), 900)
        assert driver.capture_status(stream) is CaptureStatus.INVALIDATED
        self.refused(lambda: driver.capture_end(stream), 901)
        assert driver.capture_status(stream) is CaptureStatus.NONE
        driver.fill_async(a, 2, N, stream)
        assert (self.get(a, N, stream) == 2).all()
