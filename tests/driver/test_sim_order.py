"""The simulated device defers work and judges its order: the promises everything else is proved with."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import numpy as np
import pytest

from cuglue.driver.protocol import Access, CopyKind, Span
from cuglue.driver.sim import HazardError, SimDriver, StillRunning
from cuglue.errors import DevicePoisoned, DriverError, LaunchError, UnsupportedError

N = 256


def line_of(function: Callable[..., object]) -> int:
    return function.__code__.co_firstlineno


def view(sim: SimDriver, ptr: int, nbytes: int = N) -> np.ndarray:
    return np.frombuffer(sim.host_view(ptr, nbytes, True), np.uint8)


def test_a_fill_is_not_visible_before_a_wait() -> None:
    sim = SimDriver()
    stream, ptr = sim.stream_create(0), sim.malloc(N, 0)
    data = view(sim, ptr)
    sim.fill_async(ptr, 7, N, stream)
    assert (data == 0xCD).all()
    sim.stream_synchronize(stream)
    assert (data == 7).all()


def missing_wait(sim: SimDriver, wait: bool) -> None:
    first, second = sim.stream_create(0), sim.stream_create(0)
    a, b = sim.malloc(N, 0), sim.malloc(N, 0)
    event = sim.event_create(0)
    sim.fill_async(a, 1, N, first)
    sim.event_record(event, first)
    if wait:
        sim.stream_wait_event(second, event)
    sim.copy_async(b, a, N, CopyKind.D2D, second)
    sim.stream_synchronize(second)


def test_a_missing_wait_is_flagged_on_every_seed_with_both_lines() -> None:
    start = line_of(missing_wait)
    copied = set()
    for seed in range(1000):
        sim = SimDriver(seed)
        with pytest.raises(HazardError) as caught:
            missing_wait(sim, wait=False)
        (hazard,) = caught.value.hazards
        assert [hazard] == sim.hazards
        assert hazard.kind == "unordered access"
        assert hazard.nbytes == N
        assert (hazard.first.name, hazard.first.site.line) == ("fill_async", start + 4)
        assert (hazard.second.name, hazard.second.site.line) == ("copy_async", start + 8)
        assert hazard.first.site.file == hazard.second.site.file == __file__
        allocations = sorted(a.ptr for a in sim._space.live())
        copied.update(int(sim._space.exact(ptr).data[0]) for ptr in allocations)  # type: ignore[union-attr]
    assert copied == {1, 0xCD}, "some seeds ran the right order, some the wrong one, and all were flagged"


def test_with_the_wait_no_seed_is_flagged() -> None:
    for seed in range(1000):
        sim = SimDriver(seed)
        missing_wait(sim, wait=True)
        assert sim.hazards == []


def test_an_event_covers_only_what_was_queued_before_it() -> None:
    sim = SimDriver()
    first, second = sim.stream_create(0), sim.stream_create(0)
    a, event = sim.malloc(N, 0), sim.event_create(0)
    sim.event_record(event, first)
    sim.fill_async(a, 1, N, first)
    sim.stream_wait_event(second, event)
    sim.fill_async(a, 2, N, second)
    with pytest.raises(HazardError):
        sim.device_synchronize(0)


def test_order_is_transitive_through_a_third_stream() -> None:
    sim = SimDriver()
    streams = [sim.stream_create(0) for _ in range(3)]
    a = sim.malloc(N, 0)
    sim.fill_async(a, 1, N, streams[0])
    for before, after in itertools.pairwise(streams):
        event = sim.event_create(0)
        sim.event_record(event, before)
        sim.stream_wait_event(after, event)
        sim.event_destroy(event)
    sim.fill_async(a, 2, N, streams[2])
    sim.device_synchronize(0)
    assert view(sim, a)[0] == 2
    assert sim.hazards == []


def test_reads_do_not_conflict_and_ranges_are_exact() -> None:
    sim = SimDriver()
    first, second = sim.stream_create(0), sim.stream_create(0)
    source, left, right = sim.malloc(N, 0), sim.malloc(N, 0), sim.malloc(N, 0)
    sim.copy_async(left, source, N, CopyKind.D2D, first)
    sim.copy_async(right, source, N, CopyKind.D2D, second)
    target = sim.malloc(N, 0)
    sim.copy_2d_async(target, 16, left, 8, 8, 16, CopyKind.D2D, first)
    sim.copy_2d_async(target + 8, 16, right, 8, 8, 16, CopyKind.D2D, second)
    sim.device_synchronize(0)
    assert sim.hazards == [], "columns side by side share no byte"
    sim.copy_2d_async(target, 16, left, 8, 8, 16, CopyKind.D2D, first)
    sim.copy_2d_async(target + 7, 16, right, 8, 8, 15, CopyKind.D2D, second)
    assert len(sim.hazards) == 1, "one byte a row is shared"


def test_an_ordered_read_does_not_hide_the_write_before_it() -> None:
    sim = SimDriver()
    first, second, third = (sim.stream_create(0) for _ in range(3))
    a, b, c, event = sim.malloc(N, 0), sim.malloc(N, 0), sim.malloc(N, 0), sim.event_create(0)
    sim.fill_async(a, 1, N, first)
    sim.event_record(event, first)
    sim.stream_wait_event(second, event)
    sim.copy_async(b, a, N, CopyKind.D2D, second)
    sim.copy_async(c, a, N, CopyKind.D2D, third)
    assert [(h.first.name, h.second.stream) for h in sim.hazards] == [("fill_async", third)]


def test_an_unordered_write_does_not_hide_the_write_before_it() -> None:
    sim = SimDriver()
    first, second, third = (sim.stream_create(0) for _ in range(3))
    a, b, event = sim.malloc(N, 0), sim.malloc(N, 0), sim.event_create(0)
    sim.fill_async(a, 1, N, first)
    sim.fill_async(a, 2, N, second)
    sim.event_record(event, second)
    sim.stream_wait_event(third, event)
    sim.copy_async(b, a, N, CopyKind.D2D, third)
    pairs = [(h.first.stream, h.second.stream) for h in sim.hazards]
    assert pairs == [(first, second), (first, third)]


def test_the_host_must_wait_before_it_looks() -> None:
    sim = SimDriver()
    stream, ptr = sim.stream_create(0), sim.malloc(N, 0)
    sim.fill_async(ptr, 7, N, stream)
    sim.pump()
    assert view(sim, ptr)[0] == 7, "it ran, but nothing said that it would have"
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.hazards[0].second.stream is None
    sim.fill_async(ptr, 8, N, stream)
    sim.stream_synchronize(stream)
    view(sim, ptr)
    sim.check()


def test_a_query_runs_one_step_and_true_counts_as_a_wait() -> None:
    sim = SimDriver()
    stream, ptr = sim.stream_create(0), sim.malloc(N, 0)
    for value in (1, 2, 3):
        sim.fill_async(ptr, value, N, stream)
    answers = [sim.stream_query(stream) for _ in range(3)]
    assert answers == [False, False, True]
    assert view(sim, ptr)[0] == 3
    sim.check()


def test_streams_interleave_by_seed() -> None:
    def order(seed: int) -> tuple[str, ...]:
        sim, seen = SimDriver(seed), []
        streams = [sim.stream_create(0) for _ in range(3)]
        for name, stream in zip("abc", streams, strict=True):
            for i in range(3):
                kernel = sim.kernel_load(name, "", (), 0, lambda grid, block, what: seen.append(what))
                sim.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (f"{name}{i}",), (None,), 0, stream)
        sim.device_synchronize(0)
        return tuple(seen)

    orders = [order(seed) for seed in range(50)]
    assert order(3) == orders[3]
    assert len(set(orders)) > 10
    for one in orders:
        assert [x for x in one if x[0] == "b"] == ["b0", "b1", "b2"]


# --- host writes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("when", ["before it runs", "before the wait"])
def test_a_host_write_under_a_queued_copy_is_found(when: str) -> None:
    sim = SimDriver()
    stream, a, pinned = sim.stream_create(0), sim.malloc(N, 0), sim.host_alloc(N)
    data = view(sim, pinned)
    data[:] = 1
    sim.copy_async(a, pinned, N, CopyKind.H2D, stream)
    if when == "before the wait":
        sim.pump()
    data[5] = 9
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.hazards[0].kind == "host write that nothing orders"


def test_host_writes_between_waits_and_beside_the_copy_are_fine() -> None:
    sim = SimDriver()
    stream, a, pinned = sim.stream_create(0), sim.malloc(N, 0), sim.host_alloc(2 * N)
    data = view(sim, pinned, 2 * N)
    for i in range(5):
        data[:N] = i
        sim.copy_async(a, pinned, N, CopyKind.H2D, stream)
        data[N:] = i + 100
        sim.stream_synchronize(stream)
        assert view(sim, a)[0] == i
    assert sim.hazards == []


def test_a_write_through_a_read_only_view_is_found() -> None:
    sim = SimDriver()
    stream, ptr = sim.stream_create(0), sim.malloc(N, 0)
    data = sim.host_view(ptr, N, False)
    with pytest.raises(TypeError):
        data[0] = 1
    sim._space.exact(ptr).data[3] = 1  # type: ignore[union-attr]  # what a torch tensor over the memory can do
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.hazards[0].kind == "host write through a read-only view"
    sim.fill_async(ptr, 1, N, stream)
    sim.stream_synchronize(stream)


def records(sim: SimDriver) -> int:
    """What the driver keeps of views that the host took."""
    return sum(len(a.watch._views) for a in sim._watched.values() if a.watch is not None)


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "of a slab that is viewed"])
def test_small_transfers_leave_no_records_behind(whole: bool) -> None:
    """Each from pinned bytes of its own, as a slab hands them out: 2,000 records made each call as long as 40."""
    sim, count = SimDriver(), 2000
    stream, a, pinned = sim.stream_create(0), sim.malloc(N, 0), sim.host_alloc(count * N)
    if whole:
        view(sim, pinned, count * N)
    for i in range(count):
        view(sim, pinned + i * N)[:] = i % 256
        sim.copy_async(a, pinned + i * N, N, CopyKind.H2D, stream)
        if i % 10 == 9:
            sim.stream_synchronize(stream)
            assert view(sim, a)[0] == i % 256
        assert records(sim) < 5
    assert sim.hazards == []


def test_a_host_write_is_found_where_the_view_is_one_record_with_others() -> None:
    sim = SimDriver()
    stream, a, pinned = sim.stream_create(0), sim.malloc(N, 0), sim.host_alloc(4 * N)
    for i in (1, 0, 2, 3):
        view(sim, pinned + i * N)
    assert records(sim) == 2
    sim.copy_async(a, pinned + N, N, CopyKind.H2D, stream)
    sim._space.exact(pinned).data[N + 5] = 9  # type: ignore[union-attr]  # who kept the address, and no view
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.hazards[0].kind == "host write that nothing orders"


# --- handles, events, callbacks -------------------------------------------------------------------------------------
def test_handles_are_reused_at_once_and_unknown_ones_refused() -> None:
    sim = SimDriver()
    stream, event = sim.stream_create(0), sim.event_create(0)
    sim.stream_destroy(stream)
    sim.event_destroy(event)
    for call in (
        lambda: sim.stream_synchronize(stream),
        lambda: sim.event_query(event),
        lambda: sim.fill_async(0, 0, 1, 12345),
        lambda: sim.stream_destroy(stream),
    ):
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.code == 400
    assert sim.stream_create(0) == stream
    assert sim.event_create(0) == event


def test_a_destroyed_stream_still_runs_and_a_reused_handle_is_another_stream() -> None:
    sim = SimDriver()
    stream, ptr = sim.stream_create(0), sim.malloc(N, 0)
    sim.fill_async(ptr, 1, N, stream)
    sim.stream_destroy(stream)
    again = sim.stream_create(0)
    assert again == stream
    sim.fill_async(ptr, 2, N, again)
    with pytest.raises(HazardError):
        sim.device_synchronize(0)


def test_an_event_destroyed_after_a_wait_keeps_the_wait() -> None:
    for seed in range(20):
        sim = SimDriver(seed)
        first, second, ptr = sim.stream_create(0), sim.stream_create(0), sim.malloc(N, 0)
        event = sim.event_create(0)
        sim.fill_async(ptr, 1, N, first)
        sim.event_record(event, first)
        sim.stream_wait_event(second, event)
        sim.event_destroy(event)
        sim.fill_async(ptr, 2, N, second)
        sim.stream_synchronize(second)
        assert view(sim, ptr)[0] == 2


def test_elapsed_time_counts_steps_between_two_timing_events() -> None:
    sim = SimDriver()
    stream, ptr = sim.stream_create(0), sim.malloc(N, 0)
    start, end = sim.event_create(0, timing=True), sim.event_create(0, timing=True)
    sim.event_record(start, stream)
    for _ in range(9):
        sim.fill_async(ptr, 1, N, stream)
    sim.event_record(end, stream)
    with pytest.raises(DriverError) as caught:
        sim.event_elapsed(start, end)
    assert caught.value.code == 600
    sim.event_synchronize(end)
    assert sim.event_elapsed(start, end) == pytest.approx(0.010)
    plain = sim.event_create(0)
    with pytest.raises(DriverError):
        sim.event_elapsed(plain, end)


def test_a_callback_runs_on_another_thread_after_the_work_before_it_and_may_not_call_back() -> None:
    sim = SimDriver()
    stream, ptr = sim.stream_create(0), sim.malloc(N, 0)
    data = view(sim, ptr)
    seen: list[object] = []

    def function() -> None:
        seen.extend([int(data[0]), threading.get_ident()])
        with pytest.raises(DriverError) as caught:
            sim.stream_query(stream)
        seen.append(caught.value.code)

    sim.fill_async(ptr, 5, N, stream)
    sim.stream_callback(stream, function)
    assert seen == []
    sim.stream_synchronize(stream)
    assert seen == [5, seen[1], 800]
    assert seen[1] != threading.get_ident()


def test_context_record_and_wait_cover_every_stream() -> None:
    sim = SimDriver()
    streams = [sim.stream_create(0) for _ in range(3)]
    a, event = sim.malloc(N, 0), sim.event_create(0)
    sim.fill_async(a, 1, N, streams[0])
    sim.context_record(event, 0)
    sim.context_wait(event, 0)
    sim.fill_async(a, 2, N, sim.stream_create(0))
    sim.device_synchronize(0)
    assert sim.hazards == []


def test_the_legacy_and_the_per_thread_stream_wait_for_each_other() -> None:
    sim = SimDriver()
    a = sim.malloc(N, 0)
    for value, stream in enumerate((0, 2, 1, 2, 0)):
        sim.fill_async(a, value, N, stream)
    sim.stream_synchronize(0)
    assert view(sim, a)[0] == 4
    assert sim.hazards == []


# --- kernels and faults ---------------------------------------------------------------------------------------------
def double(grid: object, block: object, out: np.ndarray, src: np.ndarray, factor: np.float32) -> None:
    out[...] = src * factor


def spans(out: int, src: int, shape: tuple[int, ...] = (8,)) -> tuple[Span, Span, None]:
    return (
        Span(out, 32, Access.WRITE, shape, "f4", (4,)),
        Span(src, 32, Access.READ, shape, "f4", (4,)),
        None,
    )


def test_a_kernel_gets_views_of_the_memory() -> None:
    sim = SimDriver()
    stream, a, b = sim.stream_create(0), sim.malloc(32, 0), sim.malloc(32, 0)
    np.frombuffer(sim.host_view(a, 32, True), "f4")[:] = np.arange(8)
    kernel = sim.kernel_load("double", "", (), 0, double)
    sim.kernel_launch(kernel, (1, 1, 1), (8, 1, 1), (b, a, np.float32(2)), spans(b, a), 0, stream)
    sim.stream_synchronize(stream)
    assert np.frombuffer(sim.host_view(b, 32, False), "f4").tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


def test_a_kernel_that_writes_what_it_declared_read_faults_and_poisons_the_device() -> None:
    sim = SimDriver()
    stream, a, b = sim.stream_create(0), sim.malloc(32, 0), sim.malloc(32, 0)

    def wrong(grid: object, block: object, out: np.ndarray, src: np.ndarray, factor: object) -> None:
        src[0] = 1

    kernel = sim.kernel_load("wrong", "", (), 0, wrong)
    sim.kernel_launch(kernel, (1, 1, 1), (8, 1, 1), (b, a, np.float32(2)), spans(b, a), 0, stream)
    sim.fill_async(a, 1, 32, stream)
    with pytest.raises(DevicePoisoned) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.code == 719
    assert "wrong" in str(caught.value)
    for call in (
        lambda: sim.malloc(1, 0),
        lambda: sim.stream_synchronize(stream),
        lambda: sim.free(a, 0),
        lambda: sim.event_create(0),
    ):
        with pytest.raises(DevicePoisoned):
            call()


def test_a_span_outside_its_allocation_is_an_illegal_address() -> None:
    sim = SimDriver()
    stream, a, b = sim.stream_create(0), sim.malloc(32, 0), sim.malloc(16, 0)
    kernel = sim.kernel_load("double", "", (), 0, double)
    sim.kernel_launch(kernel, (1, 1, 1), (8, 1, 1), (b, a, np.float32(2)), spans(b, a), 0, stream)
    with pytest.raises(DevicePoisoned) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.code == 700


@pytest.mark.parametrize(
    ("grid", "block", "shared", "code"),
    [
        ((1, 1, 1), (1025, 1, 1), 0, 9),
        ((1, 1, 1), (32, 33, 1), 0, 9),
        ((0, 1, 1), (1, 1, 1), 0, 9),
        ((1, 70000, 1), (1, 1, 1), 0, 9),
        ((1, 1, 1), (1, 1, 65), 0, 9),
        ((1, 1, 1), (1, 1, 1), 1 << 20, 1),
    ],
)
def test_launch_errors_come_at_the_launch(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, code: int
) -> None:
    sim = SimDriver()
    stream, a, b = sim.stream_create(0), sim.malloc(32, 0), sim.malloc(32, 0)
    kernel = sim.kernel_load("double", "", (), 0, double)
    with pytest.raises(LaunchError) as caught:
        sim.kernel_launch(kernel, grid, block, (b, a, np.float32(2)), spans(b, a), shared, stream)
    assert caught.value.code == code
    with pytest.raises(LaunchError):
        sim.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (b, a), spans(b, a)[:2], 0, stream)
    sim.stream_synchronize(stream)


def test_a_kernel_needs_a_sim_function() -> None:
    sim = SimDriver()
    with pytest.raises(UnsupportedError):
        sim.kernel_load("k", "", (), 0)
    with pytest.raises(UnsupportedError):
        sim.kernel_adopt(object(), 0)


def test_a_still_running_kernel_holds_its_stream_only() -> None:
    sim = SimDriver()
    first, second = sim.stream_create(0), sim.stream_create(0)
    a, b = sim.malloc(N, 0), sim.malloc(N, 0)
    hold = [True]

    def latch(grid: object, block: object) -> None:
        if hold[0]:
            raise StillRunning

    kernel = sim.kernel_load("latch", "", (), 0, latch)
    sim.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (), (), 0, first)
    sim.fill_async(a, 1, N, first)
    sim.fill_async(b, 1, N, second)
    sim.stream_synchronize(second)
    assert not sim.stream_query(first)
    threading.Timer(0.02, lambda: hold.__setitem__(0, False)).start()
    sim.stream_synchronize(first)
    assert view(sim, a)[0] == 1
