"""Driver calls for streams and events.

Owns what an event stands for, and what a wait means for the clocks. Must not know what the queued work does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..protocol import CaptureStatus, DeviceStream
from . import codes
from .core import Core
from .hazards import call_site
from .queues import Handles, Mark, Queue, Record, Step, StillRunning
from .shadow import Clock, join
from .state import driver_call


@dataclass(eq=False, slots=True)
class Event:
    """An event; ``record`` is its newest record."""

    device: int
    timing: bool
    record: Record | None = None


class StreamCalls(Core):
    """Streams, events, and the waits that tie them."""

    _events: Handles[Event]

    # --- streams --------------------------------------------------------------------------------------------------
    @driver_call
    def stream_create(self, device: int) -> int:
        """Make a non-blocking stream; the handle destroyed last comes first."""
        own = self._device(device, "stream_create")
        handle = self._streams.reserve()
        self._streams.put(handle, self._new_queue(handle, own))
        return handle if len(self._devices) == 1 else DeviceStream(handle, device)

    @driver_call
    def stream_destroy(self, stream: int) -> None:
        """Destroy it; queued work still runs, a capture under way is lost."""
        if stream in (0, 1, 2):
            raise codes.refused(codes.INVALID_RESOURCE_HANDLE, "stream_destroy", "a default stream")
        self._queue(stream, "stream_destroy")
        self._forget_stream(stream)

    def _forget_stream(self, handle: int) -> None:
        queue = self._streams.get(handle)
        if queue is None:  # somebody destroyed it by its handle
            return
        if queue.capture is not None:
            self._lose_capture(queue.capture, queue)
        self._streams.pop(handle)
        self._scheduler.retire(queue)
        join(self._devices[queue.device].gone, queue.clock)

    @driver_call
    def stream_query(self, stream: int) -> bool:
        """Run one step of some stream, then answer."""
        queue = self._queue(stream, "stream_query")
        self._no_capture(queue, "stream_query")
        self._unsafe_in_capture("stream_query")
        mark, clock = Mark(queue), dict(queue.clock)
        return self._query(lambda: mark.reached, clock, queue.device, "stream_query")

    @driver_call
    def stream_synchronize(self, stream: int) -> None:
        """Run steps until all work queued before is done."""
        queue = self._queue(stream, "stream_synchronize")
        self._no_capture(queue, "stream_synchronize")
        self._unsafe_in_capture("stream_synchronize")
        mark, clock = Mark(queue), dict(queue.clock)
        self._run_until(lambda: mark.reached, "stream_synchronize")
        self._fence(clock, [queue.device], "stream_synchronize")

    @driver_call
    def device_synchronize(self, device: int) -> None:
        """Run steps until all work queued on the device is done."""
        self._device(device, "device_synchronize")
        queues = self._queues_of(device)
        for queue in queues:
            self._no_capture(queue, "device_synchronize")
        clock = self._joined(queues)
        join(clock, self._devices[device].gone)
        self._drain([device], "device_synchronize")
        self._fence(clock, [device], "device_synchronize")

    @driver_call
    def stream_wait_event(self, stream: int, event: int) -> None:
        """Later work waits for the last record of ``event``; of one never recorded, for nothing."""
        queue = self._queue(stream, "stream_wait_event")
        record = self._event(event, "stream_wait_event").record
        if record is None:
            return
        capture = queue.capture
        if record.capture is None:
            if capture is not None:
                raise self._refuse_capture(
                    capture,
                    codes.CAPTURE_ISOLATION,
                    "stream_wait_event",
                    "the event was recorded outside the capture",
                )
            self._wait_for(queue, record, "stream_wait_event", call_site())
            return
        if record.capture not in self._captures:
            raise codes.refused(
                codes.INVALID_VALUE, "stream_wait_event", "the event belongs to a capture that ended"
            )
        if record.capture.invalid:
            raise codes.refused(
                codes.CAPTURE_INVALIDATED, "stream_wait_event", "the event's capture was invalidated"
            )
        if capture is not None and capture is not record.capture:
            record.capture.invalid = True
            raise self._refuse_capture(
                capture, codes.CAPTURE_MERGE, "stream_wait_event", "two captures would merge"
            )
        record.capture.follow(queue, record.clock, record.tails)

    @driver_call
    def stream_callback(self, stream: int, function: Callable[[], None]) -> None:
        """Run ``function`` on a thread of its own once the work before it is done."""
        self._needs("host_callbacks", "stream_callback")
        queue = self._queue(stream, "stream_callback")
        self._submit(queue, "stream_callback", HostCall(function, self._callback_threads, self._changed))

    @driver_call
    def capture_status(self, stream: int) -> CaptureStatus:
        """Whether ``stream`` captures."""
        capture = self._queue(stream, "capture_status").capture
        if capture is None:
            return CaptureStatus.NONE
        return CaptureStatus.INVALIDATED if capture.invalid else CaptureStatus.ACTIVE

    # --- events ---------------------------------------------------------------------------------------------------
    @driver_call
    def event_create(self, device: int, timing: bool = False) -> int:
        """Make an event; the handle destroyed last comes first."""
        self._device(device, "event_create")
        return self._events.add(Event(device, timing))

    @driver_call
    def event_destroy(self, event: int) -> None:
        """Destroy it; waits already queued keep their meaning."""
        self._event(event, "event_destroy")
        self._events.pop(event)

    @driver_call
    def event_record(self, event: int, stream: int) -> None:
        """Stand for the work queued on ``stream`` so far."""
        own = self._event(event, "event_record")
        queue = self._queue(stream, "event_record", own.device)
        if queue.capture is not None:
            clock, tails = queue.capture.point(queue)
            own.record = Record((), clock, queue.capture, tails)
            return
        self._record(own, [queue], "event_record")

    @driver_call
    def event_query(self, event: int) -> bool:
        """Run one step of some stream, then answer; True of one never recorded."""
        own = self._event(event, "event_query")
        record = self._waitable(own, "event_query")
        if record is None:
            return True
        return self._query(lambda: record.reached, record.clock, own.device, "event_query")

    @driver_call
    def event_synchronize(self, event: int) -> None:
        """Run steps until complete."""
        own = self._event(event, "event_synchronize")
        record = self._waitable(own, "event_synchronize")
        if record is not None:
            self._run_until(lambda: record.reached, "event_synchronize")
            self._fence(record.clock, [own.device], "event_synchronize")

    @driver_call
    def event_elapsed(self, start: int, end: int) -> float:
        """Milliseconds of the virtual clock: a microsecond per operation run meanwhile."""
        times = []
        for handle in (start, end):
            event = self._event(handle, "event_elapsed")
            if not event.timing or event.record is None:
                raise codes.refused(
                    codes.INVALID_RESOURCE_HANDLE,
                    "event_elapsed",
                    "event",
                    expected="a recorded timing event",
                )
            if event.record.time is None:
                raise codes.refused(codes.NOT_READY, "event_elapsed", "event", expected="a completed event")
            times.append(event.record.time)
        return times[1] - times[0]

    @driver_call
    def context_record(self, event: int, device: int) -> None:
        """Stand for all work queued on the device so far."""
        self._needs("context_events", "context_record")
        self._device(device, "context_record")
        queues = self._queues_of(device)
        for queue in queues:
            self._no_capture(queue, "context_record")
        own = self._event(event, "context_record")
        self._record(own, queues, "context_record")
        if own.record is not None:
            join(own.record.clock, self._devices[device].gone)

    @driver_call
    def context_wait(self, event: int, device: int) -> None:
        """Later work of every stream of the device, also of streams made later, waits for ``event``."""
        self._needs("context_events", "context_wait")
        own = self._device(device, "context_wait")
        record = self._waitable(self._event(event, "context_wait"), "context_wait")
        if record is None:
            return
        queues = self._queues_of(device)
        for queue in queues:
            self._no_capture(queue, "context_wait")
        for queue in queues:
            self._wait_for(queue, record, "context_wait", call_site())
        own.context_waits.append(record)

    # --- shared ---------------------------------------------------------------------------------------------------
    def _event(self, handle: int, call: str) -> Event:
        event = self._events.get(handle)
        if event is None:
            raise codes.refused(codes.INVALID_RESOURCE_HANDLE, call, "event", got=f"{handle:#x}")
        if self._devices[event.device].fault is not None:
            self._device(event.device, call)
        return event

    def _waitable(self, event: Event, call: str) -> Record | None:
        """The record that the host may wait for; refused of a captured one, and where captures forbid it."""
        record = event.record
        if record is not None and record.capture is not None:
            if record.capture not in self._captures:
                raise codes.refused(codes.INVALID_VALUE, call, "the event belongs to a capture that ended")
            raise self._refuse_capture(
                record.capture,
                codes.CAPTURED_EVENT,
                call,
                "the event was last recorded in a capturing stream",
            )
        self._unsafe_in_capture(call)
        return record

    def _record(self, event: Event, queues: list[Queue], name: str) -> None:
        record = Record((), self._joined(queues))
        site = call_site()

        def run() -> None:
            record.time = self._scheduler.time

        for queue in queues:
            self._implicit_waits(queue, site)
            join(record.clock, queue.clock)
            queue.push(Step(name, site, run))
        record.marks = tuple(Mark(queue) for queue in queues)
        event.record = record

    def _query(self, done: Callable[[], bool], clock: Clock, device: int, call: str) -> bool:
        self._scheduler.step()
        if not done():
            return False
        self._learn(clock)
        self._reveal([device], call)
        return True

    @staticmethod
    def _joined(queues: Iterable[Queue]) -> Clock:
        clock: Clock = {}
        for queue in queues:
            join(clock, queue.clock)
        return clock


class HostCall:
    """A queued host function: started on its own thread when its turn comes, done when that thread is."""

    def __init__(self, function: Callable[[], None], threads: set[int], changed: threading.Condition) -> None:
        self._function = function
        self._threads = threads
        self._changed = changed
        self._state = "waiting"

    def __call__(self) -> None:
        if self._state == "done":
            self._state = "waiting"  # a graph may run it again
            return
        if self._state == "waiting":
            self._state = "running"
            threading.Thread(target=self._call, name="cuglue-sim-callback", daemon=True).start()
        raise StillRunning

    def _call(self) -> None:
        self._threads.add(threading.get_ident())
        try:
            self._function()
        finally:
            self._threads.discard(threading.get_ident())
            with self._changed:
                self._state = "done"
                self._changed.notify_all()
