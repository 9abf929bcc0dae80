"""The memory of one stream of a runtime: contracts C8-C13, C15."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

import cuglue
from cuglue import (
    AsyncCudaResource,
    Direct,
    Exclusive,
    MemoryAllocationMode,
    MemoryConfiguration,
    MemoryUsage,
    PoolResource,
    Sliced,
    StreamMemory,
    as_stream,
)
from cuglue.errors import (
    BufferTooBig,
    CaptureError,
    DriverError,
    LayoutError,
    OutOfMemory,
    PoolCapacityExceeded,
    PoolsInUse,
    UsageError,
)
from cuglue.testing import faults

KIB, MIB = 1 << 10, 1 << 20
AUTO, PERSISTENT = MemoryAllocationMode.AUTO, MemoryAllocationMode.PERSISTENT


@pytest.fixture
def pool(driver: Any) -> Iterator[PoolResource]:
    made = PoolResource(AsyncCudaResource(), layout=[Sliced(MIB)])
    yield made
    made.close()


@pytest.fixture
def stream(driver: Any) -> Any:
    return as_stream(cuglue.memory.streams.OwnStream(cuglue.core.device.device_state(driver, 0)))


def memory_of(layout: Any, **options: Any) -> StreamMemory:
    pool = PoolResource(AsyncCudaResource(), layout=layout, **options)
    return pool.stream_memory(0)


# --- usage and report -----------------------------------------------------------------------------------------------


def test_C8_usage_is_of_one_stream_and_combines(pool: PoolResource, stream: Any) -> None:
    here, there = pool.stream_memory(stream), pool.stream_memory(0)
    a, b = here.reserve(1000), there.reserve(3000)
    assert here.usage() == MemoryUsage(1, 1000, 24, MIB)
    assert there.usage() == MemoryUsage(1, 3000, 72, MIB)
    assert here.usage().combine(there.usage()) == MemoryUsage(2, 4000, 96, 2 * MIB)
    a.release()
    b.release()
    a.release()
    assert here.usage() == MemoryUsage(0, 0, 0, MIB)
    assert pool.bytes_reserved == 2 * MIB


def test_C8_persistent_memory_counts(pool: PoolResource) -> None:
    memory = pool.stream_memory(0)
    with memory.persistent():
        held = memory.reserve(100)
    assert memory.usage() == MemoryUsage(1, 100, 412, 512)
    held.release()


def test_C8b_a_freed_slice_leaves_at_once_without_a_driver_call(pool: PoolResource) -> None:
    memory = pool.stream_memory(0)
    a, b = memory.reserve(600 * KIB), memory.reserve(600 * KIB)
    assert memory.usage() == MemoryUsage(2, 1200 * KIB, 0, 2 * MIB)
    with faults.counts() as calls:
        a.release()
        assert memory.usage() == MemoryUsage(1, 600 * KIB, 0, 2 * MIB)
    assert not calls
    memory.cleanup()
    assert memory.usage().bytes_reserved == MIB
    b.release()


def test_C9_the_report_lists_pools_in_routing_order(driver: Any) -> None:
    layout = [Sliced(MIB, 100 * KIB, 3 * MIB + 5), Exclusive(2 * MIB, 7), Direct()]
    memory = memory_of(layout)
    held = [memory.reserve(n) for n in (1000, MIB, 5 * MIB, 90 * KIB)]
    report = memory.report()
    assert [p.kind for p in report.dynamic] == [
        Sliced(MIB, 100 * KIB, 3 * MIB),
        Exclusive(2 * MIB, 7),
        Direct(),
    ]
    assert [p.pages for p in report.dynamic] == [1, 1, 1]
    assert [p.largest_alloc for p in report.dynamic] == [90 * KIB, MIB, 5 * MIB]
    assert report.persistent.pages == 0
    assert report.usage == memory.usage()
    for reservation in held:
        reservation.release()
    memory.cleanup()
    assert [p.pages for p in memory.report().dynamic] == [0, 0, 0]
    assert [p.pages_peak for p in memory.report().dynamic] == [1, 1, 1]


def test_C9_plan_cycle_measure_cap_replay(pool: PoolResource) -> None:
    memory = pool.stream_memory(0)

    def program() -> list[Any]:
        a, b = memory.reserve(600 * KIB), memory.reserve(600 * KIB)
        a.release()
        return [b, memory.reserve(900 * KIB)]

    def run() -> int:
        for reservation in program():
            reservation.release()
        return memory.report().dynamic[0].pages_peak

    peak = run()
    assert peak == 2
    memory.cleanup()
    memory.install([Sliced(MIB, None, peak * MIB)])
    assert memory.report().dynamic[0].pages_peak == 0
    assert run() == peak


def test_C9_a_dry_run_maps_pages_when_they_are_looked_at(driver: Any) -> None:
    memory = memory_of(MemoryConfiguration((Sliced(MIB),), dry_run=True))
    with faults.counts() as calls:
        held = [memory.reserve(900 * KIB) for _ in range(3)]
    assert "malloc_async" not in calls
    assert memory.usage().bytes_reserved == 3 * MIB
    assert memory.report().dynamic[0].pages_unmapped == 3
    with faults.counts() as calls:
        assert held[1].resolve() == held[1].resolve() != 0
    assert calls["malloc_async"] == 1
    assert memory.report().dynamic[0].pages_unmapped == 2
    for reservation in held:
        reservation.release()
    memory.cleanup()
    assert memory.usage().bytes_reserved == 0


def test_C9_a_page_that_cannot_be_mapped_stays_unmapped(driver: Any) -> None:
    memory = memory_of(MemoryConfiguration((Sliced(MIB),), dry_run=True))
    held = memory.reserve(1000)
    with faults.fail("malloc_async", persistent=True), pytest.raises(OutOfMemory):
        held.resolve()
    assert memory.report().dynamic[0].pages_unmapped == 1
    assert held.resolve()
    held.release()
    memory.cleanup()
    with pytest.raises(UsageError, match="not released"):
        held.resolve()


# --- install --------------------------------------------------------------------------------------------------------


def test_C10_install_refuses_while_memory_is_in_use_and_keeps_the_layout(pool: PoolResource) -> None:
    memory = pool.stream_memory(0)
    pool.install([Sliced(MIB, None, MIB)], 0)
    held, spare = memory.reserve(600 * KIB), memory.reserve(100)
    spare.release()
    with pytest.raises(PoolsInUse) as caught:
        pool.install([Sliced(4 * MIB)], 0)
    assert (caught.value.bytes_in_use, caught.value.number_allocs) == (600 * KIB, 1)
    with pytest.raises(PoolCapacityExceeded):
        memory.reserve(600 * KIB)  # the old cap
    held.release()
    pool.install([Sliced(4 * MIB)], 0)
    memory.reserve(3 * MIB).release()
    assert memory.report().dynamic[0].kind == Sliced(4 * MIB, 4 * MIB)
    memory.cleanup()


def test_C10_a_refused_install_has_given_back_free_pages(pool: PoolResource) -> None:
    memory = pool.stream_memory(0)
    a, b = memory.reserve(MIB), memory.reserve(MIB)
    a.release()
    with pytest.raises(PoolsInUse):
        memory.install([Direct()])
    assert memory.usage().bytes_reserved == MIB
    b.release()


def test_C10_persistent_memory_does_not_block_an_install(pool: PoolResource) -> None:
    memory = pool.stream_memory(0)
    with memory.persistent():
        held = memory.reserve(1000)
    address = held.resolve()
    memory.install([Direct()])
    assert held.resolve() == address
    assert memory.report().persistent.usage.number_allocs == 1
    held.release()
    memory.cleanup()
    assert memory.usage().bytes_reserved == 0


def test_C10_streams_that_come_later_get_the_layout_even_if_it_was_refused(
    pool: PoolResource, stream: Any
) -> None:
    held = pool.stream_memory(0).reserve(1000)
    with pytest.raises(PoolsInUse):
        pool.install([Direct()], 0)
    assert pool.stream_memory(stream).configuration.pools == (Direct(),)
    assert pool.stream_memory(0).configuration.pools == (Sliced(MIB, MIB),)
    held.release()


def test_C10_an_invalid_layout_changes_nothing(pool: PoolResource, stream: Any) -> None:
    with pytest.raises(LayoutError):
        pool.install([], 0)
    assert pool.stream_memory(stream).configuration.pools == (Sliced(MIB, MIB),)


# --- routing --------------------------------------------------------------------------------------------------------


def test_C11_a_full_pool_spills_with_one_warning(driver: Any, caplog: pytest.LogCaptureFixture) -> None:
    memory = memory_of([Sliced(MIB, None, MIB), Sliced(2 * MIB, None, 4 * MIB)])
    with caplog.at_level(logging.WARNING, "cuglue"):
        held = [memory.reserve(MIB) for _ in range(4)]
    assert [p.pages for p in memory.report().dynamic] == [1, 2]
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    for reservation in held:
        reservation.release()
    caplog.clear()
    memory.install([Sliced(MIB, None, MIB), Direct()])
    with caplog.at_level(logging.WARNING, "cuglue"):
        held = [memory.reserve(MIB) for _ in range(3)]
    assert len(caplog.records) == 1, "a new layout warns anew"
    for reservation in held:
        reservation.release()
    memory.cleanup()


def test_C11_no_pool_left_names_size_capacity_and_use(driver: Any) -> None:
    memory = memory_of([Sliced(MIB, None, 2 * MIB), Sliced(2 * MIB, None, 2 * MIB)])
    held = [memory.reserve(MIB) for _ in range(4)]
    with pytest.raises(PoolCapacityExceeded) as caught:
        memory.reserve(MIB)
    error = caught.value
    assert (error.requested, error.capacity, error.in_use) == (MIB, 4 * MIB, 4 * MIB)
    for reservation in held:
        reservation.release()
    memory.cleanup()


def test_C12_windows_nest(pool: PoolResource) -> None:
    memory = pool.stream_memory(0)

    def where() -> str:
        held = memory.reserve(1000)
        found = "persistent" if memory.report().persistent.usage.number_allocs else "dynamic"
        held.release()
        return found

    memory.allocation_mode(PERSISTENT)
    memory.allocation_mode(PERSISTENT)
    memory.allocation_mode(AUTO)
    assert where() == "persistent"
    memory.allocation_mode(AUTO)
    assert where() == "dynamic"
    with pytest.warns(RuntimeWarning, match="no persistent window is open"):
        memory.allocation_mode(AUTO)
    memory.allocation_mode(PERSISTENT)
    assert where() == "persistent"
    memory.allocation_mode(AUTO)


@pytest.mark.parametrize(("mode", "expected"), [("disabled", False), ("enforced", True)])
def test_C12_a_configured_mode_ignores_the_call(driver: Any, mode: str, expected: bool) -> None:
    memory = memory_of(MemoryConfiguration((Direct(),), persistent=mode))
    assert memory.persistent_now is expected
    memory.allocation_mode(PERSISTENT)
    assert memory.persistent_now is expected
    memory.allocation_mode(AUTO)
    memory.allocation_mode(AUTO)
    assert memory.persistent_now is expected


def test_C12_during_a_capture_the_change_waits(driver: Any, pool: PoolResource, stream: Any) -> None:
    memory = pool.stream_memory(stream)
    memory.reserve(100).release()
    driver.capture_begin(stream.handle, cuglue.driver.protocol.CaptureMode.RELAXED)
    memory.allocation_mode(PERSISTENT)
    assert not memory.persistent_now
    driver.graph_destroy(driver.capture_end(stream.handle))
    memory.reserve(100).release()
    assert memory.persistent_now
    memory.allocation_mode(AUTO)


# --- cleanup --------------------------------------------------------------------------------------------------------


def test_C13_after_dropping_all_and_a_cleanup_nothing_is_reserved(driver: Any) -> None:
    memory = memory_of([Sliced(MIB), Exclusive(4 * MIB), Direct()])
    with memory.persistent():
        kept = memory.reserve(777)
    held = [memory.reserve(n) for n in (100, MIB, 3 * MIB, 9 * MIB)]
    for reservation in (*held, kept):
        reservation.release()
    memory.cleanup()
    assert memory.usage() == MemoryUsage()


def test_C13_live_memory_keeps_working_across_a_cleanup(pool: PoolResource, driver: Any) -> None:
    memory = pool.stream_memory(0)
    a, b, c = (memory.reserve(900 * KIB) for _ in range(3))
    driver.fill_async(c.resolve(), 7, 900 * KIB, 0)
    a.release()
    b.release()
    memory.cleanup()
    address = c.resolve()
    d = memory.reserve(900 * KIB)
    assert d.resolve() != address
    c.release()
    d.release()


def test_C13_refused_while_any_stream_records_and_nothing_is_touched(
    driver: Any, pool: PoolResource, stream: Any
) -> None:
    memory = pool.stream_memory(0)
    memory.reserve(100).release()
    driver.capture_begin(stream.handle, cuglue.driver.protocol.CaptureMode.RELAXED)
    for call in (memory.cleanup, lambda: memory.install([Direct()])):
        with pytest.raises(CaptureError):
            call()
    assert memory.usage().bytes_reserved == MIB
    driver.graph_destroy(driver.capture_end(stream.handle))
    memory.cleanup()
    assert memory.usage().bytes_reserved == 0


# --- reserve --------------------------------------------------------------------------------------------------------


def test_C15_too_big_is_said_at_once(driver: Any) -> None:
    memory = memory_of([Sliced(MIB), Exclusive(4 * MIB)])
    for mode in ("dynamic", "persistent"):
        if mode == "persistent":
            memory.allocation_mode(PERSISTENT)
        with faults.counts() as calls, pytest.raises(BufferTooBig) as caught:
            memory.reserve(1 << 40)
        assert caught.value.requested == 1 << 40
        assert "malloc_async" not in calls
        assert "stream_synchronize" not in calls
    memory.allocation_mode(AUTO)
    with pytest.raises(BufferTooBig, match=str(4 * MIB)):
        memory.reserve(5 * MIB)


@pytest.mark.parametrize(
    ("code", "kind", "attempts"), [(2, OutOfMemory, 2), (999, DriverError, 2)], ids=["memory", "unknown"]
)
def test_C15_a_failure_is_tried_exactly_twice(
    driver: Any, code: int, kind: type[Exception], attempts: int
) -> None:
    calls = []

    class Source(AsyncCudaResource):
        def _take(self, nbytes: int, stream: Any) -> int:
            return super()._take(nbytes, stream)

        def _allocate(self, nbytes: int, stream: Any, tag: str, kind: Any) -> Any:
            calls.append(nbytes)
            return super()._allocate(nbytes, stream, tag, kind)

    memory = PoolResource(Source(), layout=[Sliced(MIB)]).stream_memory(0)
    with faults.fail("malloc_async", persistent=True, code=code), pytest.raises(kind) as caught:
        memory.reserve(1000)
    assert len(calls) == attempts
    assert any("first attempt" in note for note in caught.value.__notes__)
    assert not isinstance(caught.value, BufferTooBig)
    assert memory.usage() == MemoryUsage()


def test_C15_capacity_is_tried_exactly_twice(driver: Any) -> None:
    memory = memory_of([Sliced(MIB, None, MIB)])
    held = memory.reserve(MIB)
    with pytest.raises(PoolCapacityExceeded) as caught:
        memory.reserve(MIB)
    assert sum("first attempt" in note for note in caught.value.__notes__) == 1
    held.release()
    memory.cleanup()


def test_C15_free_pages_are_given_back_before_giving_up(sim: Any) -> None:
    with cuglue.use_driver(cuglue.driver.sim.SimDriver(memory_bytes=8 * MIB)) as small:
        pool = PoolResource(AsyncCudaResource(), layout=[Direct()])
        memory = pool.stream_memory(0)
        for reservation in [memory.reserve(MIB) for _ in range(7)]:
            reservation.release()
        assert memory.usage().bytes_reserved == 7 * MIB
        memory.reserve(6 * MIB).release()
        assert small.hazards == []
        pool.close()


def test_C15_the_free_pages_of_other_streams_go_too(sim: Any) -> None:
    with cuglue.use_driver(cuglue.driver.sim.SimDriver(memory_bytes=8 * MIB)) as small:
        pool = PoolResource(AsyncCudaResource(), layout=[Direct()])
        streams = [small.Stream() for _ in range(4)]
        for stream in streams:
            pool.stream_memory(stream).reserve(2 * MIB - KIB).release()
        pool.stream_memory(0).reserve(6 * MIB).release()
        assert small.hazards == []
        pool.close()


def test_a_pool_without_a_layout_has_no_stream_memory(driver: Any) -> None:
    pool = PoolResource(AsyncCudaResource())
    for call in (lambda: pool.stream_memory(0), lambda: pool.install([Direct()], 0)):
        with pytest.raises(UsageError, match="layout"):
            call()


@pytest.mark.parametrize("mode", [None, "persistent", 1, True, float("nan"), object()])
def test_C12_a_mode_that_is_none(device: Any, mode: Any) -> None:
    device()
    pool = PoolResource(AsyncCudaResource(), layout=[Direct()])
    with pytest.raises(UsageError, match="MemoryAllocationMode"):
        pool.stream_memory(0).allocation_mode(mode)
    assert not pool.stream_memory(0).persistent_now
    pool.close()


def test_C9_pages_of_a_dry_run_count_against_the_limit(device: Any) -> None:
    sim = device()
    layout = MemoryConfiguration((Direct(),), dry_run=True)
    pool = PoolResource(AsyncCudaResource(), layout=layout, max_bytes=4 * MIB)
    memory = pool.stream_memory(0)
    planned = memory.reserve(3 * MIB)
    assert pool.bytes_reserved == 3 * MIB
    with pytest.raises(PoolCapacityExceeded):
        memory.reserve(2 * MIB)
    assert pool.bytes_reserved == 3 * MIB
    assert sim.inventory()["malloc_async"] == 0
    planned.resolve()
    assert (pool.bytes_reserved, sim.inventory()["malloc_async"]) == (3 * MIB, 1)
    planned.release()
    memory.cleanup()
    assert pool.bytes_reserved == 0
    pool.close()
