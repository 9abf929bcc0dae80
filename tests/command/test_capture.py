"""Captures: the order of their steps, what they keep, and what dooms them (contracts C31-C40)."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import numpy as np
import pytest
from driver_calls import Calls, recorded
from interrupts import interrupted
from sample_kernels import BLEND, INCREMENT, SAXPY

import cuglue
from cuglue import CopyDescriptor, In, InOut, Kernel, Out, Runtime
from cuglue.command import capture as capture_module
from cuglue.command.graph import Graph
from cuglue.command.perform import Skipped
from cuglue.core.device import device_state
from cuglue.driver.protocol import CaptureMode, CaptureStatus
from cuglue.driver.sim import SimDriver
from cuglue.errors import CaptureError, ClosedError, DriverError, LaunchError, UnwrittenError
from cuglue.testing.faults import fail

N = 64


@pytest.fixture
def stream(rt: Runtime) -> Any:
    return rt.stream(0)


@pytest.fixture
def x(rt: Runtime, stream: Any) -> Any:
    buffer = rt.create(np.zeros(N, "i4"), stream=stream)
    rt.synchronize()
    return buffer


def increment(rt: Runtime, x: Any, by: int = 1, stream: Any = None) -> Any:
    return rt.launch(INCREMENT, 1, N, InOut(x), N, by, stream=stream)


def value(rt: Runtime, x: Any, stream: Any = None) -> int:
    found = set(rt.read(x, dtype="i4", stream=stream).result().tolist())
    assert len(found) == 1
    return int(found.pop())


# --- recording and replaying ------------------------------------------------------------------------------------


def test_C33_recorded_work_does_not_run_until_it_is_replayed(rt: Runtime, stream: Any, x: Any) -> None:
    with rt.capture(stream) as capture:
        for _ in range(150):
            increment(rt, x, stream=stream)
    graph = capture.graph
    assert graph.operations == 150
    assert value(rt, x, stream) == 0
    graph.replay()
    assert value(rt, x, stream) == 150
    graph.replay()
    graph.replay()
    assert value(rt, x, stream) == 450
    graph.close()


def test_C33_replays_read_buffers_live(rt: Runtime, stream: Any) -> None:
    a = rt.create(np.full(N, 1, "f4"), stream=stream)
    b = rt.empty(4 * N, stream=stream)
    with rt.capture(stream) as capture:
        rt.launch(SAXPY, 1, N, In(a), Out(b), 10.0, N, stream=stream)
    with capture.graph as graph:
        for number in (1, 2, 3):
            rt.command(stream=stream).write_to_gpu(a.descriptor(N, "f4"), np.full(N, number, "f4"))
            graph.replay()
            assert set(rt.read(b, dtype="f4", stream=stream).result()) == {10.0 * number}


def test_a_replay_on_another_stream_is_ordered_by_what_it_uses(rt: Runtime, stream: Any, x: Any) -> None:
    other = rt.stream(1)
    with rt.capture(stream) as capture:
        increment(rt, x, stream=stream)
    with capture.graph as graph:
        for _ in range(3):
            graph.replay(other)
            increment(rt, x, by=10, stream=stream)
        assert value(rt, x, rt.stream(2)) == 33


def test_a_replay_makes_no_python_per_operation(rt: Runtime, stream: Any, x: Any, calls: Calls) -> None:
    with rt.capture(stream) as capture:
        for _ in range(20):
            increment(rt, x, stream=stream)
    calls.clear()
    capture.graph.replay()
    assert calls.count("graph_launch") == 1
    assert (
        calls.count("kernel_launch") == calls.count("event_record") == calls.count("stream_wait_event") == 0
    )
    capture.graph.close()


def test_C32_a_warmup_runs_and_reads(rt: Runtime, stream: Any, x: Any) -> None:
    with rt.capture(stream) as capture:
        with capture.warmup():
            increment(rt, x, stream=stream)
            assert value(rt, x, stream) == 1
        increment(rt, x, stream=stream)
    assert value(rt, x, stream) == 1
    with capture.graph as graph:
        graph.replay()
        assert value(rt, x, stream) == 2


def temporaries(rt: Runtime, stream: Any, source: Any, out: Any, count: int = 3) -> None:
    """``out = source * 2**count`` through temporaries that are dropped one after another."""
    last = source
    for _ in range(count):
        temporary = rt.empty(4 * N, stream=stream)
        rt.launch(SAXPY, 1, N, In(last), Out(temporary), 2.0, N, stream=stream)
        if last is not source:
            last.close()
        last = temporary
    rt.launch(SAXPY, 1, N, In(last), Out(out), 1.0, N, stream=stream)
    last.close()


@pytest.fixture
def floats(rt: Runtime, stream: Any) -> tuple[Any, Any]:
    a = rt.create(np.full(N, 3, "f4"), stream=stream)
    b = rt.create(np.zeros(N, "f4"), stream=stream)
    rt.synchronize()
    return a, b


def test_C32_the_warmup_finds_the_memory_that_the_recording_uses(
    rt: Runtime, stream: Any, floats: Any
) -> None:
    a, b = floats
    capture = rt.capture(stream)
    capture.prepare()
    temporaries(rt, stream, a, b)
    rt._state.retire.run_forgotten()
    assert capture._primed is not None
    assert capture._primed.sizes == {4 * N: 3}  # three pieces, though two were never needed at once
    capture.begin()
    temporaries(rt, stream, a, b)
    graph = capture.end()
    rt.command(stream=stream).write_to_gpu(a.descriptor(N, "f4"), np.full(N, 5, "f4"))
    graph.replay()
    assert set(rt.read(b, dtype="f4", stream=stream).result()) == {40.0}
    graph.close()


def test_C32_memory_that_was_dropped_without_closing_is_found_too(rt: Runtime, stream: Any) -> None:
    capture = rt.capture(stream)
    capture.prepare()
    temporary = rt.empty(640, stream=stream)
    del temporary
    capture.begin()
    assert rt.empty(640, stream=stream).bound
    capture.end().close()


def test_C36_memory_of_a_graph_is_given_to_nobody_else(rt: Runtime, stream: Any, floats: Any) -> None:
    a, b = floats
    with rt.capture(stream) as capture:
        with capture.warmup():
            temporaries(rt, stream, a, b)
        temporaries(rt, stream, a, b)
    with capture.graph as graph:
        sentinels = [rt.create(np.full(N, -i, "f4"), stream=stream) for i in range(20)]
        for _ in range(3):
            graph.replay()
        for i, sentinel in enumerate(sentinels):
            assert set(rt.read(sentinel, dtype="f4", stream=stream).result()) == {float(-i)}
        assert set(rt.read(b, dtype="f4", stream=stream).result()) == {24.0}


def test_C36_an_input_that_the_user_drops_is_protected(rt: Runtime, stream: Any, floats: Any) -> None:
    a, b = floats
    with rt.capture(stream) as capture:
        rt.launch(SAXPY, 1, N, In(a), Out(b), 1.0, N, stream=stream)
    a.close()
    others = [rt.create(np.full(N, 99, "f4"), stream=stream) for _ in range(5)]
    with capture.graph as graph:
        graph.replay()
        assert set(rt.read(b, dtype="f4", stream=stream).result()) == {3.0}
    del others


def test_C36_closing_gives_the_memory_back_and_untouched_memory_at_once(sim: SimDriver) -> None:
    with Runtime() as rt:
        stream = rt.stream(0)
        a, b = (rt.create(np.zeros(N, "f4"), stream=stream) for _ in range(2))
        base = rt.resource.bytes_outstanding
        capture = rt.capture(stream)
        with capture:
            with capture.warmup():
                temporaries(rt, stream, a, b, count=3)
                rt.empty(1000, stream=stream).close()
            temporaries(rt, stream, a, b, count=3)
        assert rt.resource.bytes_outstanding == base + 3 * 4 * N
        graph = capture.graph
        graph.replay()
        stream.synchronize()
        graph.close()
        assert sim.inventory()["executables"] == 0  # its replays are done, so it went at once
        graph.close()
        rt.empty(4, stream=stream).close()
        assert rt.resource.bytes_outstanding == base
        inventory = sim.inventory()
        assert (inventory["graphs"], inventory["executables"]) == (0, 0)


def test_C36_a_graph_dropped_without_close_warns_and_frees(sim: SimDriver) -> None:
    with Runtime() as rt:
        x = rt.create(np.zeros(N, "i4"), stream=rt.stream(0))
        with rt.capture(rt.stream(0)) as capture:
            increment(rt, x, stream=rt.stream(0))
        capture.graph.replay()
        with pytest.warns(ResourceWarning, match="Graph"):
            del capture
        rt.synchronize()
        rt._state.retire.drain()
        assert sim.inventory()["executables"] == 0


def test_C38_a_closed_graph_does_not_replay(rt: Runtime, stream: Any, x: Any) -> None:
    with rt.capture(stream) as capture:
        increment(rt, x, stream=stream)
    graph = capture.graph
    graph.close()
    with pytest.raises(ClosedError):
        graph.replay()
    assert value(rt, x, stream) == 0


def test_C40_a_graph_keeps_the_kernels_that_it_launches(driver: Any, calls: Calls) -> None:
    rt = Runtime(driver=driver)
    stream = rt.stream(0)
    kernel = Kernel(INCREMENT.name, INCREMENT.source + "// of this test alone", sim=INCREMENT.sim)
    x = rt.create(np.zeros(N, "i4"), stream=stream)
    with rt.capture(stream) as capture:
        for _ in range(2):
            rt.launch(kernel, 1, N, InOut(x), N, 1, stream=stream)
    graph = capture.graph
    rt.close()
    assert calls.count("kernel_unload") == 0
    graph.replay()
    with Runtime(driver=driver) as other:
        found = np.zeros(N, "i4")
        view = x.array((N,), "i4")
        with other.command() as cmd:
            cmd.write_to_cpu(CopyDescriptor(view, (N,), (1,), 4), found)
            cmd.synchronize()
    assert set(found.tolist()) == {2}
    del view
    graph.close()
    x.close()
    device_state(driver, 0).retire.drain(block=True)
    assert calls.count("kernel_unload") == 1


# --- host bytes -------------------------------------------------------------------------------------------------


def test_C35_host_bytes_ride_on_the_graph(rt: Runtime, stream: Any, x: Any) -> None:
    source = np.full(N, 7, "i4")
    with rt.capture(stream) as capture, rt.command(stream=stream) as cmd:
        cmd.write_to_gpu(x.descriptor(N, "i4"), source)
        increment(rt, x, stream=stream)
    source[:] = 1000
    del source
    rt.create(np.full(N, 55, "i4"), stream=stream)
    with capture.graph as graph:
        for _ in range(3):
            graph.replay()
            assert value(rt, x, stream) == 8


def test_C35_nobody_else_gets_the_memory_of_recorded_bytes(rt: Runtime, stream: Any, x: Any) -> None:
    ready = [rt.command().reserve_cpu(4 * N) for _ in range(4)]  # a capture takes what lies ready
    del ready
    with rt.capture(stream) as capture:
        for number in (1, 2, 3):
            rt.command(stream=stream).write_to_gpu(x.descriptor(N, "i4"), np.full(N, number, "i4"))
    with capture.graph as graph, rt.command(stream=rt.stream(1)) as cmd:
        others = [cmd.reserve_cpu(4 * N) for _ in range(10)]
        for other in others:
            other[:] = 255
        graph.replay()
        assert value(rt, x, stream) == 3


def test_C35_pinned_bytes_too(rt: Runtime, stream: Any, x: Any) -> None:
    with rt.command(stream=stream) as cmd:
        pinned = cmd.reserve_cpu(4 * N)
        pinned.view("i4")[:] = 3
        with rt.capture(stream) as capture:
            cmd.write_to_gpu(x.descriptor(N, "i4"), pinned)
        pinned[:] = 0
    with capture.graph as graph:
        graph.replay()
        assert value(rt, x, stream) == 3


def test_C27_the_drop_queue_does_not_move_while_recording(
    rt: Runtime, stream: Any, x: Any, calls: Calls
) -> None:
    drops = rt._lanes.lane(stream).drops
    with rt.command(stream=stream) as cmd:
        first, second = (cmd.reserve_cpu(4 * N) for _ in range(2))  # pinned: held until it was read
        cmd.write_to_gpu(x.descriptor(N, "i4"), first)
        drops.flush()
        cmd.write_to_gpu(x.descriptor(N, "i4"), second)
    assert len(drops.staged) == len(drops.pending) == 1
    with rt.capture(stream) as capture:
        assert (drops.staged, drops.pending) == ((), ())  # drained before anything is recorded
        calls.clear()
        for _ in range(200):
            rt.command(stream=stream).write_to_gpu(x.descriptor(N, "i4"), np.zeros(N, "i4"))
        assert calls.count("event_record") == 0
        assert rt._lanes.lane(stream).drops.staged == ()
    capture.graph.close()


def test_write_to_cpu_is_recorded_and_its_buffer_kept(rt: Runtime, stream: Any, x: Any) -> None:
    target = np.zeros(N, "i4")
    with rt.capture(stream) as capture, rt.command(stream=stream) as cmd:
        increment(rt, x, stream=stream)
        cmd.write_to_cpu(x.descriptor(N, "i4"), target)
    with capture.graph as graph:
        for number in (1, 2):
            graph.replay()
            rt.command(stream=stream).synchronize()
            assert set(target) == {number}


# --- the order of the steps -------------------------------------------------------------------------------------


def test_C31_out_of_order_changes_nothing(rt: Runtime, stream: Any, x: Any) -> None:
    capture, other = rt.capture(stream), rt.capture(stream)
    for wrong in (capture.begin, capture.end):
        with pytest.raises(CaptureError):
            wrong()
    capture.prepare()
    for wrong in (capture.prepare, other.prepare, other.begin):
        with pytest.raises(CaptureError):
            wrong()
    capture.begin()
    for wrong in (capture.prepare, capture.begin, other.prepare, other.begin):
        with pytest.raises(CaptureError):
            wrong()
    increment(rt, x, stream=stream)
    graph = capture.end()
    with pytest.raises(CaptureError):
        capture.end()
    graph.replay()
    assert value(rt, x, stream) == 1
    graph.close()


@pytest.mark.parametrize("who", ["owner", "other"])
def test_C31b_an_end_after_prepare_is_refused_and_unwinds(rt: Runtime, stream: Any, x: Any, who: str) -> None:
    capture, other = rt.capture(stream), rt.capture(stream)
    capture.prepare()
    with pytest.raises(CaptureError, match="recording"):
        (capture if who == "owner" else other).end()
    with other:
        increment(rt, x, stream=stream)
    other.graph.close()


def test_C31b_somebody_elses_end_abandons_the_recording(rt: Runtime, stream: Any, x: Any) -> None:
    capture, other = rt.capture(stream), rt.capture(stream)
    capture.prepare()
    capture.begin()
    increment(rt, x, stream=stream)
    with pytest.raises(CaptureError, match="abandoned"):
        other.end()
    with pytest.raises(CaptureError, match="recording"):
        capture.end()
    with pytest.raises(CaptureError, match="no graph"):
        _ = capture.graph
    with pytest.raises(UnwrittenError):
        rt.read(x, stream=stream)
    x.trust()
    increment(rt, x, stream=stream)
    assert value(rt, x, stream) == 1


def test_C31_a_begin_that_the_driver_refuses_can_be_repeated(
    rt: Runtime, driver: Any, stream: Any, x: Any
) -> None:
    capture = rt.capture(stream)
    with fail("capture_begin", driver=driver), pytest.raises(DriverError):
        capture.__enter__()
    assert rt._lanes.lane(stream).warmup is None
    with capture:
        increment(rt, x, stream=stream)
    capture.graph.close()
    assert value(rt, x, stream) == 0


@pytest.mark.parametrize("raised", [False, True])
@pytest.mark.parametrize("refusals", [1, 2])
def test_C31_an_end_that_the_driver_refuses_leaves_no_capture_open(
    rt: Runtime, driver: Any, stream: Any, x: Any, refusals: int, raised: bool
) -> None:
    capture = rt.capture(stream)

    def record() -> None:
        with capture:
            increment(rt, x, stream=stream)
            if raised:
                raise KeyError("body")

    error = KeyError if raised else DriverError
    with fail("capture_end", driver=driver, persistent=refusals > 1), pytest.raises(error):
        record()
    device_state(driver, 0).retire.drain()  # a second refusal is made good here
    assert driver.capture_status(stream.handle) is CaptureStatus.NONE
    with pytest.raises(UnwrittenError):  # recorded, and never ran
        rt.read(x, stream=stream)
    x.trust()
    with capture:
        increment(rt, x, stream=stream)
    capture.graph.replay()
    capture.graph.close()
    assert value(rt, x, stream) == 1


def test_a_graph_that_cannot_be_destroyed_goes_with_the_next_drain(
    rt: Runtime, driver: Any, stream: Any, x: Any, calls: Calls
) -> None:
    with fail("graph_destroy", driver=driver), rt.capture(stream) as capture:
        increment(rt, x, stream=stream)
    assert calls.count("graph_destroy") == 0  # the one that failed is not among them
    device_state(driver, 0).retire.drain()
    assert calls.count("graph_destroy") == 1
    capture.graph.close()


def test_the_empty_graph_of_a_warmup_goes_with_the_next_drain(sim: SimDriver) -> None:
    """Its end was refused: the warm-up does not depend on it."""
    with Runtime() as rt:
        stream = rt.stream(0)
        with rt.capture(stream) as capture, fail("graph_destroy", driver=sim), capture.warmup():
            assert sim.inventory()["graphs"] == 1
        device_state(sim, 0).retire.drain()
        assert sim.inventory()["graphs"] == 0
        capture.graph.close()


@pytest.mark.parametrize("then", ["write", "capture", "launch"])
def test_C31_an_end_refused_twice_is_made_good_by_what_comes_next(
    rt: Runtime, driver: Any, stream: Any, x: Any, then: str
) -> None:
    capture = rt.capture(stream)

    def record() -> None:
        with capture:
            increment(rt, x, stream=stream)

    with fail("capture_end", driver=driver, persistent=True), pytest.raises(DriverError):
        record()
    assert driver.capture_status(stream.handle) is not CaptureStatus.NONE
    x.trust()
    if then == "write":
        rt.command(stream=stream).write_to_gpu(x.descriptor(N, "i4"), np.full(N, 1, "i4"))
    elif then == "launch":
        increment(rt, x, stream=stream)
    else:
        record()
        with capture.graph as graph:
            graph.replay()
    assert driver.capture_status(stream.handle) is CaptureStatus.NONE
    assert value(rt, x, stream) == 1


def test_C31_a_warmup_that_cannot_begin_leaves_no_capture_open(
    rt: Runtime, driver: Any, stream: Any, x: Any
) -> None:
    with fail("capture_end", driver=driver), pytest.raises(DriverError):
        with rt.capture(stream) as capture, capture.warmup():
            pass
    assert driver.capture_status(stream.handle) is CaptureStatus.NONE
    increment(rt, x, stream=stream)
    assert value(rt, x, stream) == 1


def test_C31_a_new_prepare_starts_empty(rt: Runtime, stream: Any, x: Any) -> None:
    capture = rt.capture(stream)
    with capture:
        increment(rt, x, stream=stream)
    first = capture.graph
    with capture:
        pass
    second = capture.graph
    assert (first.operations, second.operations) == (1, 0)
    second.replay()
    assert value(rt, x, stream) == 0
    first.close()
    second.close()


def test_a_warmup_comes_before_anything_is_recorded(rt: Runtime, stream: Any, x: Any) -> None:
    with rt.capture(stream) as capture:
        increment(rt, x, stream=stream)
        with pytest.raises(CaptureError, match="nothing was recorded yet"), capture.warmup():
            pass
    capture.graph.close()


def test_the_legacy_default_stream_cannot_capture(rt: Runtime, calls: Calls) -> None:
    for stream in (0, 1):
        with pytest.raises(CaptureError, match="another stream"), rt.capture(stream):
            pass
    assert calls.count("capture_begin") == 0


def test_a_stream_that_somebody_else_captures_is_left_alone(sim: SimDriver) -> None:
    with Runtime() as rt:
        stream = rt.stream(0)
        sim.capture_begin(stream.handle, CaptureMode.RELAXED)
        with recorded(sim) as calls, pytest.raises(CaptureError, match="captures"):
            rt.capture(stream).prepare()
        assert calls.count("capture_begin") == 0
        sim.graph_destroy(sim.capture_end(stream.handle))


# --- what dooms a recording -------------------------------------------------------------------------------------


def test_C34_growth_while_recording_dooms(rt: Runtime, stream: Any, x: Any) -> None:
    capture = rt.capture(stream)
    capture.prepare()
    capture.begin()
    increment(rt, x, stream=stream)
    with pytest.raises(CaptureError, match="1001 bytes"):
        rt.empty(1001, stream=stream)
    with pytest.raises(CaptureError, match="1001 bytes"):
        capture.end()
    with pytest.raises(UnwrittenError):  # recorded, and never ran
        rt.read(x, stream=stream)


def test_C34_a_failed_question_about_memory_nodes_is_a_refusal(
    rt: Runtime, driver: Any, stream: Any, x: Any
) -> None:
    capture = rt.capture(stream)
    capture.prepare()
    capture.begin()
    increment(rt, x, stream=stream)
    with fail("graph_memory_nodes", driver=driver), pytest.raises(DriverError):
        capture.end()
    assert not stream.capturing
    with pytest.raises(UnwrittenError):
        rt.read(x, stream=stream)


def test_C37_the_first_failure_is_named(rt: Runtime, stream: Any, x: Any) -> None:
    capture = rt.capture(stream)
    capture.prepare()
    capture.begin()
    y = x.part(0, 4 * N - 4)
    increment(rt, x, stream=stream)
    for threads in (4096, 5000):
        with pytest.raises(LaunchError):
            rt.launch(INCREMENT, 1, threads, InOut(y), 1, 1, stream=stream)
        x.trust()
    with pytest.raises(CaptureError, match="4096") as caught:
        capture.end()
    assert isinstance(caught.value.__cause__, LaunchError)
    with pytest.raises(UnwrittenError, match="4096"):
        rt.read(x, stream=stream)


def test_C37_skipped_work_dooms(rt: Runtime, stream: Any, x: Any) -> None:
    with pytest.raises(LaunchError):
        rt.launch(INCREMENT, 1, 4096, InOut(x), 1, 1, stream=stream)
    capture = rt.capture(stream)
    capture.prepare()
    capture.begin()
    assert isinstance(increment(rt, x, stream=stream), Skipped)
    with pytest.raises(CaptureError, match="4096"):
        capture.end()


def test_C37_a_body_that_raises_leaves_no_graph_and_the_stream_usable(
    rt: Runtime, stream: Any, x: Any
) -> None:
    capture = rt.capture(stream)
    with pytest.raises(ZeroDivisionError):
        _raise_inside(rt, capture, stream, x)
    with pytest.raises(CaptureError):
        _ = capture.graph
    with pytest.raises(UnwrittenError):
        rt.read(x, stream=stream)
    x.trust()
    with capture:
        increment(rt, x, stream=stream)
    capture.graph.replay()
    assert value(rt, x, stream) == 1
    capture.graph.close()


def _raise_inside(rt: Runtime, capture: Any, stream: Any, x: Any) -> None:
    with capture:
        increment(rt, x, stream=stream)
        raise ZeroDivisionError


def test_C38_a_refused_replay_claims_the_outputs_and_a_good_one_clears_them(
    rt: Runtime, driver: Any, stream: Any, floats: Any
) -> None:
    a, b = floats
    with rt.capture(stream) as capture:
        rt.launch(SAXPY, 1, N, In(a), Out(b), 1.0, N, stream=stream)
    with capture.graph as graph:
        with fail("graph_launch", driver=driver), pytest.raises(DriverError):
            graph.replay()
        with pytest.raises(UnwrittenError):
            rt.read(b, stream=stream)
        assert graph.replay() is None
        assert set(rt.read(b, dtype="f4", stream=stream).result()) == {3.0}
        with pytest.raises(LaunchError):
            rt.launch(SAXPY, 1, 4096, In(b), Out(a), 1.0, N, stream=stream)
        assert isinstance(graph.replay(), Skipped)


def test_C38_a_failing_upload_does_no_harm(rt: Runtime, driver: Any, stream: Any, x: Any) -> None:
    capture = rt.capture(stream)
    capture.prepare()
    capture.begin()
    increment(rt, x, stream=stream)
    with fail("graph_upload", driver=driver):
        graph = capture.end()
    graph.replay()
    assert value(rt, x, stream) == 1
    graph.close()


def test_C39_what_is_refused_inside(rt: Runtime, stream: Any, x: Any, calls: Calls) -> None:
    foreign = rt.create(np.zeros(N, "i4"), stream=rt.stream(1))
    with rt.capture(stream) as earlier:
        pass
    with rt.capture(stream) as capture:
        increment(rt, x, stream=stream)
        calls.clear()
        with rt.command(stream=stream) as cmd:
            for refused in (
                cmd.sync,
                cmd.synchronize,
                cmd.memory_cleanup,
                lambda: cmd.read_async(x.descriptor(N, "i4")),
                lambda: rt.command(In(foreign), stream=stream),
                lambda: rt.command(In(x), stream=rt.stream(1)),
                earlier.graph.replay,
            ):
                with pytest.raises(CaptureError):
                    refused()
            cmd.flush_drops()
        assert calls.count("event_record") == calls.count("stream_wait_event") == 0
        assert calls.count("stream_synchronize") == calls.count("graph_launch") == 0
    earlier.graph.close()
    with capture.graph as graph:
        graph.replay()
        assert value(rt, x, stream) == 1


def test_C39_a_foreign_binding_in_a_launch_dooms(rt: Runtime, stream: Any, x: Any) -> None:
    foreign = rt.create(np.zeros(N, "i4"), stream=rt.stream(1))
    capture = rt.capture(stream)
    capture.prepare()
    capture.begin()
    with pytest.raises(CaptureError):
        increment(rt, foreign, stream=stream)
    with pytest.raises(CaptureError):
        capture.end()
    assert value(rt, foreign) == 0


def test_C39_other_threads_go_on_allocating(rt: Runtime, stream: Any, x: Any) -> None:
    results: list[int] = []

    def other() -> None:
        for _ in range(20):
            y = rt.create(np.full(N, 4, "i4"), stream=rt.stream(2))
            results.append(value(rt, y, rt.stream(2)))

    with rt.capture(stream) as capture:
        thread = threading.Thread(target=other)
        thread.start()
        for _ in range(20):
            increment(rt, x, stream=stream)
        thread.join()
    assert results == [4] * 20
    with capture.graph as graph:
        graph.replay()
        assert value(rt, x, stream) == 20


@pytest.mark.gl
def test_maps_are_refused_inside(sim: SimDriver) -> None:
    from OpenGL import GL

    from cuglue.graphics.glcontext import headless

    with headless(), Runtime() as rt:
        name = int(GL.glGenBuffers(1))
        GL.glBindBuffer(GL.GL_ARRAY_BUFFER, name)
        GL.glBufferData(GL.GL_ARRAY_BUFFER, 4 * N, np.zeros(N, "i4"), GL.GL_DYNAMIC_DRAW)
        stream = rt.stream(0)
        with cuglue.register_buffer(name) as handle, handle.map_mut(stream=stream) as m:
            capture = rt.capture(stream)
            capture.prepare()
            capture.begin()
            with pytest.raises(CaptureError, match="map"):
                rt.launch(BLEND, 1, N, In(m), In(m), Out(m), N, 0.5, True, stream=stream)
            with pytest.raises(CaptureError):
                capture.end()
        GL.glDeleteBuffers(1, [name])


def test_captures_on_two_streams_at_once(rt: Runtime) -> None:
    streams = [rt.stream(i) for i in range(2)]
    buffers = [rt.create(np.zeros(N, "i4"), stream=s) for s in streams]
    rt.synchronize()
    captures = [rt.capture(s) for s in streams]
    for step in ("prepare", "begin"):
        for capture in captures:
            getattr(capture, step)()
    for stream, buffer in zip(streams, buffers, strict=True):
        increment(rt, buffer, stream=stream)
    graphs: list[Graph] = [capture.end() for capture in captures]
    for graph in graphs:
        graph.replay()
    assert [value(rt, b, s) for b, s in zip(buffers, streams, strict=True)] == [1, 1]
    for graph in graphs:
        graph.close()


def in_the_middle(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Any) -> threading.Thread:
    """Let another thread ``act`` after the first call of ``owner.name``; it may have to wait for the end."""
    call = getattr(owner, name)
    other = threading.Thread(target=act)

    def called(*args: Any) -> Any:
        answer = call(*args)
        if other.ident is None:
            other.start()
            other.join(0.2)
        return answer

    monkeypatch.setattr(owner, name, called)
    return other


def test_C31_two_threads_that_capture_one_stream_take_turns(
    rt: Runtime, stream: Any, x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One comes as the other has checked that it may prepare: it is refused, or the next."""
    seen: list[Any] = []
    first_is_done = threading.Event()

    def second() -> None:
        capture = rt.capture(stream)
        try:
            capture.prepare()
            capture.begin()
            first_is_done.wait(10)
            increment(rt, x, 10, stream=stream)
            seen.append(capture.end())
        except BaseException as error:  # noqa: BLE001 - judged below
            seen.append(error)

    thread = in_the_middle(monkeypatch, capture_module, "step", second)
    with rt.capture(stream) as capture:
        increment(rt, x, stream=stream)
    first_is_done.set()
    thread.join(10)
    capture.graph.replay()
    expected = 1
    if isinstance(seen[0], Graph):
        seen[0].replay()
        expected += 10
        seen[0].close()
    else:
        assert isinstance(seen[0], CaptureError), seen
    assert value(rt, x, stream) == expected
    assert not cuglue.as_stream(stream).capturing
    capture.graph.close()


def test_an_end_beside_a_begin_finds_a_capture_that_is_whole(
    rt: Runtime, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's end abandons what is recorded; between two steps of a begin there was nothing to abandon."""
    seen: list[BaseException] = []

    def end() -> None:
        try:
            rt.capture(stream).end()
        except BaseException as error:  # noqa: BLE001 - judged below
            seen.append(error)

    thread = in_the_middle(monkeypatch, capture_module, "Window", end)
    capture = rt.capture(stream)
    capture.prepare()
    capture.begin()
    thread.join(10)
    assert [type(error) for error in seen] == [CaptureError]
    with pytest.raises(CaptureError):
        capture.end()
    assert not cuglue.as_stream(stream).capturing


def test_an_interrupted_warmup_loses_no_graph(sim: SimDriver) -> None:
    for number in itertools.count(1):
        with Runtime() as rt:
            stream = rt.stream(0)
            before = sim.inventory()["graphs"]

            def warm_up(rt: Runtime = rt, stream: Any = stream) -> None:
                with rt.capture(stream) as capture, capture.warmup():
                    raise KeyboardInterrupt

            where = interrupted(warm_up, number, "command/recording.py")
            device_state(sim, 0).retire.drain()
            assert sim.inventory()["graphs"] == before, where
        if where is None:
            break
    assert number > 2


ASKS: dict[str, Any] = {
    "done": lambda a, b: a.done(a.seq),
    "wait_for": lambda a, b: b.wait_for(a, a.seq),
    "join": lambda a, b: b.join(a),
    "record": lambda a, b: a.record(),
    "join_context": lambda a, b: b.join_context(),
    "hold_context": lambda a, b: b.hold_context(),
    "unknown": lambda a, b: b.wait_for(cuglue.as_stream(b.handle + 1000), 1),
}


@pytest.mark.parametrize("ask", ASKS)
def test_a_capture_that_begins_meanwhile_gets_no_event_of_another_thread(
    driver: Any, rt: Runtime, stream: Any, x: Any, ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question whether the stream captures and the record of the event, a capture begins."""
    a, b = cuglue.as_stream(stream), cuglue.as_stream(rt.stream(1))
    capture = rt.capture(stream)
    capture.prepare()
    a.submit()
    begun, tried = threading.Event(), threading.Event()

    def begin() -> None:
        capture.begin()
        begun.set()

    beginning = threading.Thread(target=begin)

    def let_in(call: Any) -> Any:
        def record(*args: Any) -> Any:
            if not tried.is_set():
                tried.set()
                beginning.start()
                assert not begun.wait(0.2), "it waits for the record"
            return call(*args)

        return record

    for name in "event_record", "context_record":
        monkeypatch.setattr(driver, name, let_in(getattr(driver, name)))
    ASKS[ask](a, b)
    beginning.join(10)
    assert begun.is_set()
    increment(rt, x, stream=stream)
    with capture.end() as graph:
        graph.replay()
        assert value(rt, x, stream) == 1
    assert a.done(a.seq)


def test_an_event_that_came_into_somebody_elses_capture_is_forgotten(
    driver: Any, rt: Runtime, stream: Any, x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others begin captures without a word: the event says nothing from then on, and must not stay in the way."""
    a = cuglue.as_stream(stream)
    with rt.capture(stream) as capture:
        increment(rt, x, stream=stream)
    graph = capture.graph
    graph.replay()
    record = driver.event_record

    def begin_first(event: int, handle: int) -> None:
        monkeypatch.undo()
        driver.capture_begin(a.handle, CaptureMode.RELAXED)
        record(event, handle)

    monkeypatch.setattr(driver, "event_record", begin_first)
    assert not a.done(a.seq)
    try:
        driver.graph_destroy(driver.capture_end(a.handle))
    except DriverError:
        pass  # the question spoiled it
    graph.close()
    assert value(rt, x, stream) == 1
    assert a.done(a.seq)


@pytest.mark.gpu
def test_closing_a_graph_whose_replay_still_runs() -> None:
    from cuglue.testing import Latch

    with Runtime(driver="cuda") as rt:
        stream = rt.stream(0)
        x = rt.create(np.zeros(N, "i4"), stream=stream)
        rt.synchronize()
        with rt.capture(stream) as capture:
            increment(rt, x, stream=stream)
        with Latch(stream):
            capture.graph.replay()
            capture.graph.close()
        assert value(rt, x, stream) == 1


def test_a_kernel_that_needs_compiling_is_compiled_while_recording(rt: Runtime, stream: Any, x: Any) -> None:
    kernel = Kernel(
        "add_five",
        'extern "C" __global__ void add_five(int* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += 5; }',
        sim=lambda grid, block, x, n: np.add(x, 5, out=x),
    )
    with rt.capture(stream) as capture:
        rt.launch(kernel, 1, N, InOut(x), N, stream=stream)
    with capture.graph as graph:
        graph.replay()
        assert value(rt, x, stream) == 5


def test_work_that_another_stream_had_last_is_recorded_after_a_warmup(rt: Runtime) -> None:
    stream, other = rt.stream(0), rt.stream(1)
    x = rt.create(np.zeros(4, "i4"), stream=stream)
    for warm in (False, True):
        rt.read(x, dtype="i4", stream=other).result()
        if not warm:
            with (
                pytest.raises(CaptureError, match=r"wait for another stream.*warmup\(\)"),
                rt.capture(stream),
            ):
                rt.launch(INCREMENT, 1, 4, InOut(x), 4, 1, stream=stream)
            continue
        with rt.capture(stream) as capture:
            with capture.warmup():
                rt.launch(INCREMENT, 1, 4, InOut(x), 4, 1, stream=stream)
            rt.launch(INCREMENT, 1, 4, InOut(x), 4, 1, stream=stream)
        with capture.graph as graph:
            graph.replay()
    assert rt.read(x, dtype="i4", stream=stream).result().tolist() == [2] * 4


@pytest.mark.parametrize("steps", [1, 2])
def test_a_capture_that_was_dropped_on_the_way_is_ended_by_another(rt: Runtime, steps: int) -> None:
    stream = rt.stream(0)
    x = rt.create(np.zeros(N, "f4"), stream=stream)
    dropped = rt.capture(stream)
    dropped.prepare()
    if steps == 2:
        dropped.begin()
    del dropped
    gc.collect()
    with pytest.raises(CaptureError):
        rt.capture(stream).prepare()
    with pytest.raises(CaptureError):
        rt.capture(stream).end()
    with rt.capture(stream) as capture:
        pass
    capture.graph.close()
    assert set(rt.read(x, dtype="f4", stream=stream).result().tolist()) == {0}
