"""DebugGuardResource: canaries, poison and quarantine find misuse and name whose it is."""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from typing import Any

import pytest
from memory_tools import contents, fill, new_stream

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    DebugGuardResource,
    DirectCudaResource,
    GlobalDeviceBudget,
    LaunchRecorder,
    ManagedResource,
    MemoryMisuseWarning,
    PinnedHostResource,
    StatisticsResource,
    testing,
)
from cuglue.driver.sim import SimDriver
from cuglue.errors import DriverError, OutOfBounds, SeveralErrors, UsageError, UseAfterFree
from cuglue.memory.patterns import CANARY, FREED, FRESH


class Span:
    """Any bytes, as something that the helpers fill and read."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.ptr, self.nbytes = ptr, nbytes


@pytest.fixture(params=[DirectCudaResource, AsyncCudaResource])
def guard(request: pytest.FixtureRequest, driver: Any) -> Any:
    made = DebugGuardResource(request.param())
    yield made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryMisuseWarning)
        made.flush()
        made.reap_pending()
    assert made.bytes_outstanding == 0


@pytest.mark.parametrize("offset", [0, 1, 63, -1, -64, -512])
def test_report_M63_a_write_beside_a_block(guard: Any, offset: int) -> None:
    """1 element past the end of a 1000 B block, and before its beginning."""
    stream = new_stream()
    other = guard.allocate(64, stream, "neighbour")
    block = guard.allocate(1000, stream, "victim")
    where = 1000 + offset if offset >= 0 else offset
    fill(Span(block.ptr + where, 1), 7, stream)
    with pytest.raises(OutOfBounds) as caught:
        guard.deallocate(block)
    assert caught.value.generation == block.generation
    assert block.state is BlockState.QUARANTINED
    for word in ("victim", "neighbour", f"byte {where}"):
        assert word in str(caught.value)
    (report,) = guard.reports
    assert (report.kind, report.tag, report.offset, report.neighbour) == (
        "out of bounds",
        "victim",
        where,
        "neighbour",
    )
    with pytest.raises(UseAfterFree):
        guard.deallocate(block)
    guard.deallocate(other)


def test_a_canary_may_be_written_from_another_stream(guard: Any) -> None:
    """The look comes after every known use of the block."""
    home, other = new_stream(), cuglue.as_stream(new_stream())
    block = guard.allocate(100, home)
    other.wait_for(block.alloc_stream, block.write_seq)
    fill(Span(block.ptr + 100, 4), 1, other)
    block.finish(other, Access.WRITE)
    with pytest.raises(OutOfBounds):
        guard.deallocate(block)


def test_whole_blocks_may_be_written(guard: Any) -> None:
    for nbytes in (1, 511, 512, 513, 4096):
        stream = new_stream()
        block = guard.allocate(nbytes, stream)
        fill(block, 5, stream)
        assert (contents(block, stream) == 5).all()
        guard.deallocate(block)
        assert block.state is BlockState.QUARANTINED
    assert guard.reports == []


def test_B4_the_states_of_a_guarded_block(guard: Any) -> None:
    block = guard.allocate(64)
    assert block.state is BlockState.LIVE
    guard.deallocate(block)
    assert block.state is BlockState.QUARANTINED
    for call in (
        lambda: guard.deallocate(block),
        lambda: guard.prepare_block_use(block.id, new_stream(), Access.READ),
    ):
        with pytest.raises(UseAfterFree):
            call()
        assert block.state is BlockState.QUARANTINED
    guard.flush()
    assert block.state in (BlockState.RETIRED, BlockState.FREED)
    guard.reap_pending()
    assert block.state is BlockState.FREED


def test_report_M64_reads_of_memory_that_is_not_there_show(guard: Any) -> None:
    stream = new_stream()
    block = guard.allocate(256, stream)
    assert (contents(block, stream) == FRESH).all()
    fill(block, 1, stream)
    stale = Span(block.ptr, 256)
    guard.deallocate(block)
    inner = next(iter(guard._quarantine)).inner
    assert (contents(stale, inner.write_stream) == FREED).all()
    assert len({CANARY, FRESH, FREED}) == 3


def test_report_M06_a_missing_record_shows_as_poison(driver: Any) -> None:
    """A side stream reads after the source was freed: without the record the bytes are known to be wrong."""
    guard = DebugGuardResource(AsyncCudaResource())
    stream = new_stream()
    block = guard.allocate(256, stream)
    fill(block, 42, stream)
    guard.deallocate(block)
    newer = guard.allocate(256, stream)
    assert newer.ptr != block.ptr, "held back, so the reader does not see another owner's bytes"
    guard.deallocate(newer)
    guard.reap_pending()


def test_a_write_after_the_free(guard: Any) -> None:
    stream = new_stream()
    block = guard.allocate(256, stream, "stale")
    guard.deallocate(block)
    fill(Span(block.ptr + 100, 1), 9, stream)
    with pytest.warns(MemoryMisuseWarning, match=r"use after free: block 'stale'.*byte 100"):
        guard.flush()
    (report,) = guard.reports
    assert (report.kind, report.tag, report.offset) == ("use after free", "stale", 100)
    assert isinstance(report.error(), UseAfterFree)
    assert block.state is not BlockState.QUARANTINED


def test_check_looks_at_everything(guard: Any) -> None:
    stream = new_stream()
    good, bad = guard.allocate(64, stream, "good"), guard.allocate(64, stream, "bad")
    guard.check()
    fill(Span(bad.ptr + 64, 1), 0, stream)
    with pytest.raises(OutOfBounds, match="bad"):
        guard.check()
    fill(Span(bad.ptr + 64, 1), CANARY, stream)
    guard.deallocate(good)
    fill(Span(good.ptr, 1), 0, stream)
    with pytest.raises(UseAfterFree, match="good"):
        guard.check()
    assert len(guard.reports) == 2
    guard.deallocate(bad)


def test_the_quarantine_is_bounded_by_bytes(driver: Any) -> None:
    guard = DebugGuardResource(DirectCudaResource(), quarantine_bytes=10_000)
    blocks = [guard.allocate(2000) for _ in range(10)]
    for block in blocks:
        guard.deallocate(block)
    held = [b for b in blocks if b.state is BlockState.QUARANTINED]
    assert held == blocks[-len(held) :], "the oldest leave first"
    assert sum(entry.inner.size for entry in guard._quarantine) == guard._quarantine.nbytes <= 10_000
    assert 0 < len(held) < 10
    guard.reap_pending()


def test_a_free_costs_the_same_however_much_is_held_back(driver: Any) -> None:
    """Only the oldest is looked at, and the bytes are right after a release that failed."""

    class NotWalked(deque[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("each block held back is looked at")

    guard = DebugGuardResource(DirectCudaResource(mode="sync"), quarantine_bytes=10_000)
    guard._quarantine._line = NotWalked()
    for _ in range(8):
        guard.deallocate(guard.allocate(2000))
    assert 5_000 < guard._quarantine.nbytes <= 10_000
    guard.reap_pending()
    assert (guard._quarantine.nbytes, guard.bytes_outstanding) == (0, 0)


def test_an_older_block_that_cannot_leave_is_in_nobodys_way(driver: Any) -> None:
    """What is given back is given back, and the budget above counts it; a reap says what failed."""
    budget = GlobalDeviceBudget(
        DebugGuardResource(DirectCudaResource(mode="sync"), quarantine_bytes=0), 1 << 20
    )
    blocks = [budget.allocate(2000) for _ in range(2)]
    with testing.faults.fail("free", persistent=True):
        for block in blocks:
            budget.deallocate(block)
        budget.deallocate(budget.allocate(1000))
        assert [block.state for block in blocks] == [BlockState.QUARANTINED] * 2
        with pytest.raises(SeveralErrors, match=r"3\. DriverError: free"):
            budget.reap_pending()
    budget.reap_pending()
    assert (budget.reserved_bytes, budget.bytes_outstanding) == (0, 0)


def test_a_guard_over_a_guard_that_complains(driver: Any) -> None:
    """The lower one has the block all the same: it is not given back again and again."""
    lower = DebugGuardResource(AsyncCudaResource())
    upper = DebugGuardResource(lower)
    stream = new_stream()
    block = upper.allocate(64, stream)
    (inner,) = lower.live_blocks()
    fill(Span(inner.ptr + inner.size, 1), 7, stream)
    upper.deallocate(block)
    with pytest.warns(MemoryMisuseWarning, match="out of bounds"):
        upper.flush()
    assert [report.kind for report in lower.reports] == ["out of bounds"]
    upper.reap_pending()
    assert upper.bytes_outstanding == 0


def test_the_quarantine_is_bounded_by_age(driver: Any) -> None:
    guard = DebugGuardResource(DirectCudaResource(), quarantine_age=0.05)
    block = guard.allocate(64)
    guard.deallocate(block)
    assert block.state is BlockState.QUARANTINED
    time.sleep(0.1)
    guard.reap_pending(block=False)
    assert block.state is BlockState.FREED


def test_no_quarantine(driver: Any) -> None:
    guard = DebugGuardResource(DirectCudaResource(), quarantine_bytes=0)
    block = guard.allocate(64)
    guard.deallocate(block)
    assert block.state is BlockState.FREED


def test_memory_that_is_held_back_is_given_up_when_it_is_needed() -> None:

    driver = SimDriver(memory_bytes=1 << 20)
    with cuglue.use_driver(driver):
        guard = DebugGuardResource(AsyncCudaResource())
        guard.deallocate(guard.allocate(600_000, driver.Stream()))
        block = guard.allocate(700_000, driver.Stream())
        guard.deallocate(block)
        budget = GlobalDeviceBudget(guard, 900_000)
        guard.reap_pending()
        budget.deallocate(budget.allocate(600_000, driver.Stream()))
        budget.deallocate(budget.allocate(600_000, driver.Stream()))
        budget.reap_pending()
        assert budget.reserved_bytes == 0


def test_counters_above_a_guard_stay_right(driver: Any) -> None:
    """The block is back although the guard complained."""
    guard = DebugGuardResource(AsyncCudaResource())
    resource = StatisticsResource(GlobalDeviceBudget(guard, 1 << 20))
    stream = new_stream()
    block = resource.allocate(100, stream)
    fill(Span(block.ptr + 100, 1), 0, stream)
    with pytest.raises(OutOfBounds):
        resource.deallocate(block)
    assert resource.statistics().current_bytes == 0
    resource.reap_pending()
    snapshot = resource.budget_snapshot()
    assert snapshot is not None
    assert snapshot.reserved == 0


def test_memory_of_arrays_is_guarded_too(guard: Any, caplog: pytest.LogCaptureFixture) -> None:
    pointer = guard.malloc(100)
    stream = pointer.mem.stream
    fill(Span(pointer.ptr + 100, 1), 0, stream)
    del pointer
    with caplog.at_level(logging.WARNING):
        stream.state.retire.run_forgotten()
    assert "out of bounds" in caplog.text
    assert [report.kind for report in guard.reports] == ["out of bounds"]
    assert stream.state.retire.drain() == 1, "the second attempt finds nothing to do"
    assert len(stream.state.retire) == 0


@pytest.mark.parametrize("method", ["fill_async", "copy_async", "stream_synchronize"])
def test_a_failing_look_changes_nothing(driver: Any, method: str) -> None:
    guard = DebugGuardResource(AsyncCudaResource())
    block = guard.allocate(64, new_stream())
    with testing.faults.fail(method), pytest.raises(DriverError):
        guard.deallocate(block)
    assert block.state is BlockState.LIVE
    assert guard.live_blocks() == [block]
    guard.deallocate(block)
    with testing.faults.fail("fill_async"), pytest.raises(DriverError):
        guard.allocate(64, new_stream())
    guard.reap_pending()
    assert guard.bytes_outstanding == 0
    guard.deallocate(guard.allocate(64))
    with testing.faults.fail("copy_async"), pytest.raises(DriverError):
        guard.flush()
    assert len(guard._quarantine) == 1
    guard.reap_pending()


def test_without_poison_and_canaries(driver: Any) -> None:
    guard = DebugGuardResource(AsyncCudaResource(), canary=0, poison=False)
    stream = new_stream()
    block = guard.allocate(64, stream)
    guard.deallocate(block)
    fill(Span(block.ptr, 1), 0, stream)
    guard.reap_pending()
    assert guard.reports == []


@pytest.mark.parametrize(
    "bad",
    [
        {"canary": -1},
        {"canary": 1 << 30},
        {"quarantine_bytes": -1},
        {"quarantine_age": -1.0},
        {"quarantine_age": float("nan")},
    ],
)
def test_bad_options(driver: Any, bad: Any) -> None:
    with pytest.raises(UsageError):
        DebugGuardResource(DirectCudaResource(), **bad)


@pytest.mark.parametrize("make", [PinnedHostResource, ManagedResource])
def test_memory_of_the_host_is_guarded_too(driver: Any, make: Any) -> None:
    guard = DebugGuardResource(make())
    fine, broken, late = guard.allocate(100), guard.allocate(100), guard.allocate(100)
    guard.check()
    guard.deallocate(fine)
    fill(Span(broken.ptr + 100, 1), 0, None)
    with pytest.raises(OutOfBounds):
        guard.deallocate(broken)
    guard.deallocate(late)
    fill(Span(late.ptr, 1), 0, None)
    with pytest.warns(MemoryMisuseWarning, match="use after free"):
        guard.flush()
    guard.close()
    assert guard.bytes_outstanding == 0


@pytest.mark.parametrize("told", ["recorder", "calls", "record", "use"])
@pytest.mark.parametrize("then", ["recorder", "calls", "use"])
def test_every_way_of_telling_a_use_sees_every_other(driver: Any, told: str, then: str) -> None:
    """Two writes on two streams, in that order, however each is told."""
    guard = DebugGuardResource(AsyncCudaResource())
    block = guard.allocate(256)
    for way, value in (told, 1), (then, 2):
        stream = new_stream()
        if way == "recorder":
            with LaunchRecorder(stream).write(block):
                fill(block, value, stream)
        elif way == "use":
            cuglue.use(block, stream)
            fill(block, value, stream)
        else:
            guard.prepare_block_use(block.id, stream, Access.WRITE)
            fill(block, value, stream)
            if way == "record":
                guard.cancel_block_use(block.id, stream, Access.WRITE)
                guard.record_block_use(block, stream)
            else:
                guard.finish_block_use(block.id, stream, Access.WRITE)
    assert (contents(block, stream) == 2).all()
    guard.deallocate(block)
    guard.close()


@pytest.mark.parametrize("make", [DirectCudaResource, AsyncCudaResource])
def test_a_guard_over_a_guard_follows_it(driver: Any, make: Any) -> None:
    budget = GlobalDeviceBudget(DebugGuardResource(DebugGuardResource(make())), 1 << 20)
    block = budget.allocate(100)
    budget.deallocate(block)
    assert block.state is BlockState.QUARANTINED
    budget.reap_pending()
    assert block.state is BlockState.FREED
    assert budget.reserved_bytes == 0
    budget.close()


def test_a_look_follows_what_is_free_below(driver: Any) -> None:
    """A budget above it looks before it waits."""
    guard = DebugGuardResource(AsyncCudaResource(), quarantine_bytes=0)
    stream = new_stream()
    block = guard.allocate(64, stream)
    guard.deallocate(block)
    assert block.state is BlockState.RETIRED
    cuglue.as_stream(stream).synchronize()
    guard._look()
    assert block.state is BlockState.FREED
