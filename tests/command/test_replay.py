"""Replays: a graph that nobody came between costs one driver call, and whoever did come between is waited for."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from driver_calls import Calls
from interrupts import interrupted, interrupted_after
from sample_kernels import INCREMENT, SAXPY

import cuglue
from cuglue import Graph, In, InOut, Kernel, Out, Runtime
from cuglue.command.perform import Skipped
from cuglue.command.uses import Uses
from cuglue.driver.protocol import Access
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    CaptureError,
    ClosedError,
    DriverError,
    LaunchError,
    UnwrittenError,
    WrongThreadError,
)
from cuglue.testing.faults import fail

N = 64
ORDERING = ("event_create", "event_record", "stream_wait_event", "event_query", "capture_status")


class Doubling:
    """``b = 2 * a`` as a graph on a stream of its own, replayed once, and another stream."""

    def __init__(self, rt: Runtime) -> None:
        self.rt = rt
        self.home, self.other = rt.stream(0), rt.stream(1)
        self.a = rt.create(np.full(N, 1, "f4"), stream=self.home)
        self.b = rt.empty(4 * N, stream=self.home)
        with rt.capture(self.home) as capture:
            rt.launch(SAXPY, 1, N, In(self.a), Out(self.b), 2.0, N, stream=self.home)
        self.graph = capture.graph
        self.graph.replay()

    def write(self, number: float, stream: Any) -> None:
        self.rt.command(stream=stream).write_to_gpu(self.a.descriptor(N, "f4"), np.full(N, number, "f4"))

    def result(self, stream: Any) -> float:
        (found,) = set(self.rt.read(self.b, dtype="f4", stream=stream).result().tolist())
        return float(found)


@pytest.fixture
def doubling(rt: Runtime) -> Any:
    made = Doubling(rt)
    yield made
    made.graph.close()


def test_C33_a_repeat_at_home_is_one_driver_call(doubling: Doubling, calls: Calls) -> None:
    for _ in range(5):
        doubling.graph.replay()
    assert [call.method for call in calls.made] == ["graph_launch"] * 5
    assert doubling.result(doubling.home) == 2


def test_C33_what_another_stream_writes_is_waited_for_once(doubling: Doubling, calls: Calls) -> None:
    doubling.write(3, doubling.other)
    calls.clear()
    doubling.graph.replay()
    doubling.graph.replay()
    assert (calls.count("stream_wait_event"), calls.count("graph_launch")) == (1, 2)
    assert doubling.result(doubling.home) == 6


def test_C33_what_another_stream_reads_is_not_overwritten_under_it(doubling: Doubling, calls: Calls) -> None:
    found = doubling.rt.read(doubling.b, dtype="f4", stream=doubling.other)
    doubling.write(5, doubling.home)
    calls.clear()
    doubling.graph.replay()
    assert calls.count("stream_wait_event") == 1
    assert set(found.result().tolist()) == {2.0}
    assert doubling.result(doubling.home) == 10


def test_C33_a_replay_that_asked_nothing_is_waited_for_by_others(doubling: Doubling, calls: Calls) -> None:
    doubling.write(7, doubling.home)
    doubling.graph.replay()
    doubling.graph.replay()
    calls.clear()
    doubling.write(100, doubling.other)  # not before the replays have read it
    assert calls.count("stream_wait_event") == 1
    doubling.graph.replay()
    doubling.write(9, doubling.home)
    for _ in range(2):
        doubling.graph.replay()
    calls.clear()
    assert doubling.result(doubling.rt.stream(2)) == 18  # not before they have written it
    assert calls.count("stream_wait_event") == 1


@pytest.mark.parametrize("use", ["write what it reads", "read what it writes"])
def test_C33_a_replay_is_newer_than_what_others_have_waited_for(
    doubling: Doubling, calls: Calls, use: str
) -> None:
    """The other stream has waited for all that was there; a replay that asked nothing came after."""
    doubling.write(7, doubling.home)
    doubling.rt.read(doubling.a, stream=doubling.other).result()
    calls.clear()
    doubling.graph.replay()
    assert [call.method for call in calls.made] == ["graph_launch"]
    if use == "write what it reads":
        doubling.write(100, doubling.other)
        assert calls.count("stream_wait_event") == 1
        assert doubling.result(doubling.home) == 14
    else:
        assert doubling.result(doubling.other) == 14
        assert calls.count("stream_wait_event") == 1


def test_C33_what_another_stream_writes_unasked_is_waited_for(doubling: Doubling, calls: Calls) -> None:
    """Noted after the work, with no wait before it: nothing else tells that the graph is not alone."""
    for access in (Access.WRITE, Access.READ):
        for _ in range(2):
            doubling.graph.replay()
        doubling.b.block.finish(doubling.other, access)
        calls.clear()
        doubling.graph.replay()
        assert calls.count("stream_wait_event") == 1


@pytest.mark.parametrize("when", ["after a launch", "in a launch"])
def test_C33_a_repeat_is_newer_than_an_event(
    doubling: Doubling, calls: Calls, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Others learn of a replay by its number. Once an event covers it, the next one takes another."""
    home, other, graph, driver = doubling.home, doubling.other, doubling.graph, doubling.rt.driver
    graph.replay()
    graph.replay()
    if when == "in a launch":
        launch = driver.graph_launch
        with monkeypatch.context() as patch:

            def launched(*what: Any) -> None:
                events.append(home.record())  # as another thread may
                launch(*what)

            events: list[Any] = []
            patch.setattr(driver, "graph_launch", launched)
            graph.replay()
        event = events.pop()
    else:
        event = home.record()
        graph.replay()
    other.wait(event)
    calls.clear()
    doubling.write(100, other)
    assert calls.count("stream_wait_event") == 1
    assert doubling.result(home) == 2


def test_C33_a_repeat_is_newer_than_what_the_host_has_waited_for(doubling: Doubling) -> None:
    for _ in range(2):
        doubling.graph.replay()
    doubling.home.synchronize()
    doubling.graph.replay()
    ((stream, seq),) = doubling.b.block.uses()
    assert stream is doubling.home
    assert stream.completed < seq


def test_C38_a_replay_over_bytes_that_were_never_written_is_skipped(doubling: Doubling) -> None:
    with fail("copy_async", driver=doubling.rt.driver), pytest.raises(DriverError):
        doubling.write(3, doubling.home)
    assert isinstance(doubling.graph.replay(), Skipped)
    with pytest.raises(UnwrittenError):
        doubling.result(doubling.home)
    doubling.write(4, doubling.home)
    assert doubling.graph.replay() is None
    assert doubling.result(doubling.home) == 8


def test_C38_a_refused_repeat_claims_the_outputs(doubling: Doubling) -> None:
    with fail("graph_launch", driver=doubling.rt.driver), pytest.raises(DriverError):
        doubling.graph.replay()
    with pytest.raises(UnwrittenError):
        doubling.result(doubling.home)
    doubling.graph.replay()
    assert doubling.result(doubling.home) == 2


def test_C38_outputs_that_somebody_else_failed_to_write_are_good_again(doubling: Doubling) -> None:
    with pytest.raises(LaunchError):
        doubling.rt.launch(INCREMENT, 1, 4096, Out(doubling.b), N, 1, stream=doubling.home)
    assert doubling.graph.replay() is None
    assert doubling.result(doubling.home) == 2


def test_C39_a_repeat_is_refused_while_its_stream_records(doubling: Doubling, calls: Calls) -> None:
    with pytest.raises(CaptureError), doubling.rt.capture(doubling.home):
        doubling.graph.replay()
    assert calls.count("graph_launch") == 0


def test_a_graph_goes_only_after_its_last_repeat(doubling: Doubling, calls: Calls) -> None:
    from cuglue.testing import Latch

    state = doubling.home.state
    with Latch(doubling.home, driver=doubling.rt.driver) as latch:
        doubling.graph.replay()
        calls.clear()
        doubling.graph.close()
        assert calls.count("graph_exec_destroy") == 0
        latch.release()
    state.retire.drain(block=True)
    assert calls.count("graph_exec_destroy") == 1


def test_an_array_that_is_used_at_home_alone_leaves_a_repeat_one_driver_call(
    rt: Runtime, calls: Calls
) -> None:
    home = rt.stream(0)
    x = rt.create(np.zeros(N, "i4"), stream=home)
    x.storage.note_consumer(home)  # an array library has it, for this stream
    with rt.capture(home) as capture:
        rt.launch(TOUCH, 1, N, InOut(x), stream=home)
    with capture.graph as graph:
        graph.replay()
        calls.clear()
        graph.replay()
        assert [call.method for call in calls.made] == ["graph_launch"]
        assert set(rt.read(x, dtype="i4", stream=home).result().tolist()) == {2}


def test_nothing_is_quiet_where_somebody_else_may_use_the_memory(rt: Runtime) -> None:
    here, there = rt.stream(0), rt.stream(1)
    uses = Uses()
    assert uses.quiet(here)
    uses.partners = (here,)
    assert uses.quiet(here)
    assert not uses.quiet(there)
    uses.partners = (here, there)
    assert not uses.quiet(here)


def test_the_per_thread_default_stream_of_another_thread_is_refused(sim: SimDriver) -> None:
    """Its handle means that thread's own stream there: the work would be ordered with nothing."""
    with Runtime() as rt:
        mine = cuglue.as_stream(2)
        x = rt.create(np.zeros(N, "i4"), stream=mine)
        with rt.capture(mine) as capture:
            rt.launch(TOUCH, 1, N, InOut(x), stream=mine)
        found: list[str] = []

        def elsewhere() -> None:
            for use in (
                lambda: capture.graph.replay(),
                lambda: capture.graph.replay(mine),
                lambda: rt.launch(TOUCH, 1, N, InOut(x), stream=mine),
                lambda: rt.command(stream=mine),
                lambda: rt.read(x, stream=mine),
                lambda: rt.capture(mine),
                lambda: rt.profile(mine),
            ):
                try:
                    use()
                except WrongThreadError as error:
                    found.append(str(error))

        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        assert len(found) == 7
        assert all("of another thread" in text for text in found)
        with capture.graph as graph:
            graph.replay()
            assert set(rt.read(x, dtype="i4", stream=mine).result().tolist()) == {1}


def test_a_graph_is_closed_while_other_threads_replay_it(rt: Runtime) -> None:
    home = rt.stream(0)
    for _ in range(5):
        x = rt.create(np.zeros(N, "i4"), stream=home)
        with rt.capture(home) as capture:
            rt.launch(TOUCH, 1, N, InOut(x), stream=home)
        graph, done, begun = capture.graph, [], threading.Barrier(4)

        def replay(graph: Graph, done: list[int], begun: threading.Barrier) -> None:
            begun.wait()
            try:
                for _ in range(1000):
                    graph.replay()
                    done.append(1)
            except ClosedError:
                pass

        threads = [threading.Thread(target=replay, args=(graph, done, begun)) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait()
        graph.close()
        for thread in threads:
            thread.join()
        assert set(rt.read(x, dtype="i4", stream=home).result().tolist()) == {len(done)}
        x.close()


TOUCH = Kernel(
    "touch",
    'extern "C" __global__ void touch(int* x) { x[threadIdx.x] += 1; }',
    sim=lambda grid, block, x: x.__iadd__(1),
)


@pytest.mark.parametrize("seed", range(8))
def test_replays_among_other_work_on_three_streams(rt: Runtime, seed: int) -> None:
    choose = np.random.default_rng(seed)
    streams = [rt.stream(i) for i in range(3)]
    x = rt.create(np.zeros(N, "i4"), stream=streams[0])
    with rt.capture(streams[0]) as capture:
        rt.launch(TOUCH, 1, N, InOut(x), stream=streams[0])
    graph: Graph = capture.graph
    done, reads = 0, []
    for step in choose.integers(0, 6, 60):
        if step < 3:
            graph.replay()
            done += 1
        elif step == 3:
            graph.replay(streams[1])
            done += 1
        elif step == 4:
            rt.launch(TOUCH, 1, N, InOut(x), stream=streams[choose.integers(3)])
            done += 1
        else:
            reads.append((rt.read(x, dtype="i4", stream=streams[choose.integers(3)]), done))
    for future, wanted in reads:
        assert set(future.result().tolist()) == {wanted}
    graph.close()
    assert set(rt.read(x, dtype="i4").result().tolist()) == {done}


def test_C33_a_read_at_home_leaves_a_repeat_one_driver_call(doubling: Doubling, calls: Calls) -> None:
    for number in (3.0, 4.0):
        doubling.write(number, doubling.home)
        doubling.graph.replay()
        assert doubling.result(doubling.home) == 2 * number
        calls.clear()
        doubling.graph.replay()
        assert [call.method for call in calls.made] == ["graph_launch"]
    calls.clear()
    doubling.write(100, doubling.other)  # the reads before the repeat are no use any more; it is
    assert calls.count("stream_wait_event") == 1


@pytest.mark.parametrize("points", [interrupted, interrupted_after])
def test_an_interrupted_repeat_lets_others_go_on(sim: SimDriver, points: Any) -> None:
    """CPython looks at signals when a function written in C has returned, so also when a lock has been taken."""
    with Runtime(driver=sim) as rt:
        graph, free = Doubling(rt).graph, rt.stream(0).state.ordering
        for step in range(1, 100):
            graph.replay()
            if points(graph.replay, step, "command/graph.py") is None:
                break
            found: list[bool] = []

            def take(found: list[bool] = found) -> None:
                found.append(free.acquire(timeout=5))
                free.release()

            other = threading.Thread(target=take)
            other.start()
            other.join()
            assert found == [True]
        assert step > 2
        graph.close()


def test_a_close_that_is_interrupted_can_be_repeated_and_destroys_once(
    sim: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*anything: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    with Runtime(driver=sim) as rt:
        for again in (True, False):
            graph = Doubling(rt).graph
            queue = graph._home.state.retire
            for name in ("push", "drain"):  # before the queue has it, and after
                with monkeypatch.context() as patch:
                    patch.setattr(queue, name, interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        graph.close()
                assert not graph.closed
            if again:
                graph.close()
                del graph
            else:  # the finaliser is the second one to give it back
                with pytest.warns(ResourceWarning, match="never closed"):
                    del graph
            queue.drain(block=True)
            assert sim.inventory()["executables"] == 0
