"""Captures and graphs of the simulated device."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from cuglue.driver.protocol import CaptureMode, CaptureStatus, CopyKind
from cuglue.driver.sim import HazardError, SimDriver
from cuglue.errors import DriverError

N = 64
MODE = CaptureMode.THREAD_LOCAL


@pytest.fixture
def sim() -> SimDriver:
    return SimDriver()


def code_of(call: Callable[..., object], *args: object) -> int:
    with pytest.raises(DriverError) as caught:
        call(*args)
    return caught.value.code


def value(sim: SimDriver, ptr: int) -> int:
    return int(sim.host_view(ptr, 1, False)[0])


def seal(sim: SimDriver, stream: int) -> int:
    graph = sim.capture_end(stream)
    executable = sim.graph_instantiate(graph)
    sim.graph_destroy(graph)
    return executable


def test_recorded_work_does_not_run_until_replayed_and_runs_each_time(sim: SimDriver) -> None:
    stream, a, b = sim.stream_create(0), sim.malloc(N, 0), sim.malloc(N, 0)
    assert sim.capture_status(stream) is CaptureStatus.NONE
    sim.capture_begin(stream, MODE)
    assert sim.capture_status(stream) is CaptureStatus.ACTIVE
    sim.copy_async(b, a, N, CopyKind.D2D, stream)
    executable = seal(sim, stream)
    sim.graph_upload(executable, stream)
    sim.stream_synchronize(stream)
    assert value(sim, b) == 0xCD
    for number in (1, 2):
        sim.fill_async(a, number, N, stream)
        sim.graph_launch(executable, stream)
        sim.stream_synchronize(stream)
        assert value(sim, b) == number
    sim.graph_exec_destroy(executable)
    assert sim.inventory()["graphs"] == sim.inventory()["executables"] == 0
    assert sim.hazards == []


def test_host_sources_are_read_again_at_each_run(sim: SimDriver) -> None:
    stream, a, source = sim.stream_create(0), sim.malloc(N, 0), np.full(N, 1, np.uint8)
    sim.capture_begin(stream, MODE)
    sim.copy_async(a, source.ctypes.data, N, CopyKind.H2D, stream)
    executable = seal(sim, stream)
    for number in (5, 6):
        source[:] = number
        sim.graph_launch(executable, stream)
        sim.stream_synchronize(stream)
        assert value(sim, a) == number


def fork(sim: SimDriver, *, join: bool = True, wait: bool = True) -> tuple[int, int, int]:
    """Two branches that fill two halves; the origin copies both. ``wait`` orders the branch before the copy."""
    origin, branch, event = sim.stream_create(0), sim.stream_create(0), sim.event_create(0)
    a, b = sim.malloc(N, 0), sim.malloc(N, 0)
    sim.capture_begin(origin, MODE)
    sim.event_record(event, origin)
    sim.stream_wait_event(branch, event)
    assert sim.capture_status(branch) is CaptureStatus.ACTIVE
    sim.fill_async(a, 1, N // 2, origin)
    sim.fill_async(a + N // 2, 2, N // 2, branch)
    sim.event_record(event, branch)
    if wait:
        sim.stream_wait_event(origin, event)
    sim.copy_async(b, a, N, CopyKind.D2D, origin)
    if join and not wait:
        sim.stream_wait_event(origin, event)
    return origin, a, b


def test_branches_join_in_any_order() -> None:
    for seed in range(50):
        sim = SimDriver(seed)
        origin, _, b = fork(sim)
        executable = seal(sim, origin)
        sim.graph_launch(executable, origin)
        sim.stream_synchronize(origin)
        assert sim.host_view(b, N, False).tolist() == [1] * (N // 2) + [2] * (N // 2)
        assert sim.hazards == []


def test_a_missing_wait_inside_a_graph_is_flagged_on_every_seed() -> None:
    for seed in range(50):
        sim = SimDriver(seed)
        origin, *_ = fork(sim, wait=False)
        seal(sim, origin)
        with pytest.raises(HazardError) as caught:
            sim.stream_synchronize(origin)
        (hazard,) = caught.value.hazards
        assert (hazard.kind, hazard.first.name, hazard.second.name) == (
            "unordered use inside a graph",
            "fill_async",
            "copy_async",
        )


def test_an_unjoined_branch_is_refused_and_the_streams_are_free_again(sim: SimDriver) -> None:
    origin, a, _ = fork(sim, join=False, wait=False)
    assert code_of(sim.capture_end, origin) == 904
    assert sim.capture_status(origin) is CaptureStatus.NONE
    sim._unreported.clear()
    sim.fill_async(a, 1, N, origin)
    sim.stream_synchronize(origin)


def test_a_run_is_ordered_by_its_launch(sim: SimDriver) -> None:
    first, second, a = sim.stream_create(0), sim.stream_create(0), sim.malloc(N, 0)
    sim.capture_begin(first, MODE)
    sim.fill_async(a, 1, N, first)
    executable = seal(sim, first)
    sim.graph_launch(executable, first)
    sim.graph_launch(executable, second)
    sim.device_synchronize(0)
    assert sim.hazards == [], "runs of one executable follow each other"
    sim.graph_launch(executable, first)
    sim.fill_async(a, 2, N, second)
    with pytest.raises(HazardError):
        sim.device_synchronize(0)


def test_a_run_over_freed_memory_is_a_hazard_and_does_not_run(sim: SimDriver) -> None:
    stream = sim.stream_create(0)
    a = sim.malloc_async(N, stream, 0)
    sim.capture_begin(stream, MODE)
    sim.fill_async(a, 1, N, stream)
    executable = seal(sim, stream)
    sim.free_async(a, stream, 0)
    sim.graph_launch(executable, stream)
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.hazards[0].kind == "use after free"


def test_memory_nodes_are_counted_and_owned_by_the_graph(sim: SimDriver) -> None:
    stream, out = sim.stream_create(0), sim.malloc(N, 0)
    used = sim.memory_info(0).free
    sim.capture_begin(stream, MODE)
    scratch = sim.malloc_async(N, stream, 0)
    sim.fill_async(scratch, 4, N, stream)
    sim.copy_async(out, scratch, N, CopyKind.D2D, stream)
    sim.free_async(scratch, stream, 0)
    graph = sim.capture_end(stream)
    assert sim.graph_memory_nodes(graph) == 2
    executable = sim.graph_instantiate(graph)
    sim.graph_destroy(graph)
    for _ in range(2):
        sim.graph_launch(executable, stream)
        sim.stream_synchronize(stream)
        assert value(sim, out) == 4
    sim.graph_exec_destroy(executable)
    assert sim.memory_info(0).free == used
    assert sim.hazards == []


def test_an_executable_destroyed_under_its_run_is_a_hazard(sim: SimDriver) -> None:
    stream, a = sim.stream_create(0), sim.malloc(N, 0)
    sim.capture_begin(stream, MODE)
    sim.fill_async(a, 1, N, stream)
    executable = seal(sim, stream)
    sim.graph_launch(executable, stream)
    sim.graph_exec_destroy(executable)
    with pytest.raises(HazardError):
        sim.stream_synchronize(stream)


def test_a_graph_inside_a_graph(sim: SimDriver) -> None:
    stream, a, b = sim.stream_create(0), sim.malloc(N, 0), sim.malloc(N, 0)
    sim.capture_begin(stream, MODE)
    sim.fill_async(a, 1, N, stream)
    inner = seal(sim, stream)
    sim.capture_begin(stream, MODE)
    sim.graph_launch(inner, stream)
    sim.copy_async(b, a, N, CopyKind.D2D, stream)
    sim.graph_launch(inner, stream)
    outer = seal(sim, stream)
    for _ in range(2):
        sim.graph_launch(outer, stream)
    sim.stream_synchronize(stream)
    assert value(sim, b) == 1
    assert sim.hazards == []


FORBIDDEN: dict[str, tuple[Callable[[SimDriver, int, int], object], int]] = {
    "stream_synchronize": (lambda sim, s, e: sim.stream_synchronize(s), 900),
    "stream_query": (lambda sim, s, e: sim.stream_query(s), 900),
    "device_synchronize": (lambda sim, s, e: sim.device_synchronize(0), 900),
    "context_record": (lambda sim, s, e: sim.context_record(sim.event_create(0), 0), 900),
    "event_query": (lambda sim, s, e: sim.event_query(e), 907),
    "event_synchronize": (lambda sim, s, e: sim.event_synchronize(e), 907),
    "wait on the outside": (lambda sim, s, e: sim.stream_wait_event(s, outside(sim)), 905),
    "malloc": (lambda sim, s, e: sim.malloc(N, 0), 900),
    "host_alloc": (lambda sim, s, e: sim.host_alloc(N), 900),
    "malloc_async on another stream": (lambda sim, s, e: sim.malloc_async(N, sim.stream_create(0), 0), 900),
    "query of another stream": (lambda sim, s, e: sim.stream_query(sim.stream_create(0)), 900),
    "wait for another stream": (lambda sim, s, e: sim.stream_synchronize(sim.stream_create(0)), 900),
    "query of an event outside": (lambda sim, s, e: sim.event_query(outside(sim)), 900),
    "wait for an event outside": (lambda sim, s, e: sim.event_synchronize(outside(sim)), 900),
    "end on another stream": (lambda sim, s, e: sim.capture_end(joined(sim, e)), 903),
}


def outside(sim: SimDriver) -> int:
    event = sim.event_create(0)
    sim.event_record(event, sim.stream_create(0))
    return event


def joined(sim: SimDriver, event: int) -> int:
    other = sim.stream_create(0)
    sim.stream_wait_event(other, event)
    return other


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_forbidden_call_is_refused_and_loses_the_capture(sim: SimDriver, name: str) -> None:
    call, code = FORBIDDEN[name]
    stream, event, a = sim.stream_create(0), sim.event_create(0), sim.malloc(N, 0)
    sim.capture_begin(stream, MODE)
    sim.fill_async(a, 1, N, stream)
    sim.event_record(event, stream)
    assert code_of(call, sim, stream, event) == code
    assert sim.capture_status(stream) is CaptureStatus.INVALIDATED
    assert code_of(sim.fill_async, a, 1, N, stream) == 901
    assert code_of(sim.capture_end, stream) == 901
    assert sim.capture_status(stream) is CaptureStatus.NONE
    sim.fill_async(a, 2, N, stream)
    sim.stream_synchronize(stream)
    assert value(sim, a) == 2


def test_states_out_of_order_are_refused_without_harm(sim: SimDriver) -> None:
    stream = sim.stream_create(0)
    assert code_of(sim.capture_end, stream) == 401
    assert code_of(sim.capture_begin, 0, MODE) == 900
    sim.capture_begin(stream, MODE)
    assert code_of(sim.capture_begin, stream, MODE) == 401
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(code_of(sim.capture_end, stream)))
    thread.start()
    thread.join()
    assert codes == [908]
    assert sim.capture_status(stream) is CaptureStatus.NONE, "the capture ended all the same"
    assert code_of(sim.capture_end, stream) == 401
    for call in (sim.graph_instantiate, sim.graph_destroy, sim.graph_exec_destroy, sim.graph_memory_nodes):
        assert code_of(call, 12345) == 400


@pytest.mark.parametrize(
    ("mode", "refused"), [(CaptureMode.GLOBAL, True), (MODE, False), (CaptureMode.RELAXED, False)]
)
def test_modes_differ_in_what_they_do_to_other_threads(
    sim: SimDriver, mode: CaptureMode, refused: bool
) -> None:
    stream, outcome = sim.stream_create(0), []

    def elsewhere() -> None:
        try:
            sim.malloc(N, 0)
            outcome.append(False)
        except DriverError as error:
            outcome.append(error.code == 900)

    sim.capture_begin(stream, mode)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert outcome == [refused]
    assert (sim.capture_status(stream) is CaptureStatus.INVALIDATED) is refused


def test_a_destroyed_stream_takes_its_capture_along(sim: SimDriver) -> None:
    stream, event, a = sim.stream_create(0), sim.event_create(0), sim.malloc(N, 0)
    sim.capture_begin(stream, MODE)
    sim.fill_async(a, 1, N, stream)
    sim.event_record(event, stream)
    sim.stream_destroy(stream)
    sim.malloc(N, 0)
    again = sim.stream_create(0)
    assert again == stream
    assert sim.capture_status(again) is CaptureStatus.NONE
    for call in (sim.event_query, sim.event_synchronize, lambda e: sim.stream_wait_event(again, e)):
        assert code_of(call, event) == 1, "the event belongs to a capture that is over"


def test_two_captures_do_not_merge(sim: SimDriver) -> None:
    first, second, event = sim.stream_create(0), sim.stream_create(0), sim.event_create(0)
    sim.capture_begin(first, MODE)
    sim.capture_begin(second, MODE)
    sim.event_record(event, first)
    assert code_of(sim.stream_wait_event, second, event) == 902
    assert code_of(sim.capture_end, first) == code_of(sim.capture_end, second) == 901
