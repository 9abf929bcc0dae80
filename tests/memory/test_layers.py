"""Blocks given back to another layer than they came from, and interrupted layers: all still count right."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from memory_tools import new_stream

import cuglue
from cuglue import (
    AsyncCudaResource,
    BlockState,
    DebugGuardResource,
    DeviceBlock,
    DeviceMemoryResource,
    DirectCudaResource,
    FailureCallbackResource,
    GlobalDeviceBudget,
    InMemorySink,
    LoggingResource,
    PoolResource,
    StatisticsResource,
    TrackingResource,
    testing,
)
from cuglue.errors import OutOfMemory, UseAfterFree
from cuglue.memory.adaptor import Adaptor
from cuglue.memory.records import Action, AllocationRecord

# --- another layer ----------------------------------------------------------------------------------------------


def test_a_block_goes_back_by_its_own_budget_whoever_is_asked(driver: Any) -> None:
    """The layer above, the one below, one beside it: the budget that was charged is discharged."""
    source = DirectCudaResource(mode="sync")
    budget, beside = GlobalDeviceBudget(source, 1000), GlobalDeviceBudget(source, 1000)
    above = StatisticsResource(budget)
    for asked in (source, budget, beside, above):
        block = budget.allocate(600)
        asked.deallocate(block)
        assert (budget.reserved_bytes, beside.reserved_bytes, source.bytes_outstanding) == (0, 0, 0), asked
        assert above.statistics().current_count == 0, asked


def test_layers_that_a_block_did_not_come_through_do_not_count_it(driver: Any) -> None:
    source = DirectCudaResource()
    sink = InMemorySink()
    statistics = StatisticsResource(source)
    tracking = TrackingResource(statistics)
    logging = LoggingResource(tracking, sink)
    low, high = source.allocate(64), logging.allocate(32)
    assert [a.nbytes for a in tracking.live()] == [32]
    logging.deallocate(low)
    assert (statistics.statistics().current_bytes, len(sink)) == (32, 1)
    source.deallocate(high)
    assert (statistics.statistics().current_bytes, tracking.live()) == (0, [])
    assert [record.action for record in sink.snapshot()] == [Action.ALLOCATE, Action.DEALLOCATE]
    assert source.bytes_outstanding == 0


def test_a_guarded_block_given_to_what_lies_below(driver: Any) -> None:
    source = AsyncCudaResource()
    guard = DebugGuardResource(source)
    block = guard.allocate(64)
    source.deallocate(block)
    assert block.state is BlockState.QUARANTINED
    guard.reap_pending()
    assert (block.state, source.bytes_outstanding) == (BlockState.FREED, 0)
    low = source.allocate(64)
    guard.deallocate(low)
    guard.reap_pending()
    assert source.bytes_outstanding == 0


def test_a_block_of_a_pool_given_to_what_lies_below(driver: Any) -> None:
    source = AsyncCudaResource()
    pool = PoolResource(source)
    block, low = pool.allocate(64), source.allocate(64)
    source.deallocate(block)
    pool.deallocate(low)
    assert (block.state is BlockState.LIVE, low.state is BlockState.LIVE) == (False, False)
    pool.close()
    source.reap_pending()
    assert source.bytes_outstanding == 0


def test_memory_of_an_array_given_to_what_lies_below(driver: Any) -> None:
    source = DirectCudaResource()
    budget = GlobalDeviceBudget(source, 1000)
    pointer = budget.malloc(600)
    source.deallocate(pointer.mem)
    assert budget.reserved_bytes == 0
    del pointer
    gc.collect()
    assert (budget.reserved_bytes, source.bytes_outstanding) == (0, 0)


def test_strangers_are_refused_still(driver: Any) -> None:
    a, b = GlobalDeviceBudget(DirectCudaResource(), 1000), GlobalDeviceBudget(DirectCudaResource(), 1000)
    block = a.allocate(600)
    with pytest.raises(UseAfterFree):
        b.deallocate(block)
    assert (a.reserved_bytes, b.reserved_bytes) == (600, 0)
    a.deallocate(block)
    with pytest.raises(UseAfterFree):
        a.upstream.deallocate(block)
    assert a.reserved_bytes == 0


class _Overridden(Adaptor):
    """Passes blocks down through the public methods."""

    frees = 0

    def deallocate(self, block: DeviceBlock) -> None:
        self.frees += 1
        self.upstream.deallocate(block)


class _Foreign(DeviceMemoryResource):
    """Somebody else's layer."""

    def __init__(self, upstream: DeviceMemoryResource) -> None:
        self.upstream = upstream
        self.frees = 0

    def allocate(self, nbytes: int, stream: object = None, tag: str = "untagged") -> DeviceBlock:
        return self.upstream.allocate(nbytes, stream, tag)

    def deallocate(self, block: DeviceBlock) -> None:
        self.frees += 1
        self.upstream.deallocate(block)

    @property
    def device_ordinal(self) -> int:
        return self.upstream.device_ordinal

    @property
    def bytes_outstanding(self) -> int:
        return self.upstream.bytes_outstanding


@pytest.mark.parametrize("layer", [_Overridden, _Foreign])
def test_a_layer_of_the_users_is_passed_once(driver: Any, layer: Any) -> None:
    source = DirectCudaResource()
    between = layer(source)
    top = GlobalDeviceBudget(between, 1000)
    block = top.allocate(600)
    top.deallocate(block)
    assert (between.frees, top.reserved_bytes, source.bytes_outstanding) == (1, 0, 0)
    assert block.resource is top, "it says where it came from, also afterwards"
    block = between.allocate(600)
    between.deallocate(block)
    assert (between.frees, source.bytes_outstanding) == (2, 0)
    block = top.allocate(600)
    with testing.faults.fail("free_async", on=1), pytest.raises(cuglue.errors.CuglueError):
        top.deallocate(block)
    assert (block.resource, top.reserved_bytes) == (top, 600)
    source.deallocate(block)
    assert (top.reserved_bytes, source.bytes_outstanding) == (0, 0)


# --- interrupted ------------------------------------------------------------------------------------------------


class _Interrupted:
    """A sink in which the user presses Ctrl-C."""

    def __init__(self, at: Action) -> None:
        self.at = at

    def emit(self, record: AllocationRecord) -> None:
        if record.action is self.at:
            raise KeyboardInterrupt


def test_B30_an_interrupt_in_a_sink_loses_no_block(driver: Any) -> None:
    source = DirectCudaResource()
    logging = LoggingResource(source, _Interrupted(Action.ALLOCATE))
    budget = GlobalDeviceBudget(logging, 1000)
    for ask in (budget.allocate, budget.malloc):
        with pytest.raises(KeyboardInterrupt):
            ask(600)
        assert (source.bytes_outstanding, budget.reserved_bytes) == (0, 0)


def test_B30_an_interrupt_in_a_sink_and_a_failing_free_lose_no_block(driver: Any) -> None:
    source = DirectCudaResource(mode="async")
    logging = LoggingResource(source, _Interrupted(Action.ALLOCATE))
    with testing.faults.fail("free_async", on=1), pytest.raises(KeyboardInterrupt) as caught:
        logging.allocate(600, new_stream())
    assert "giving the memory back failed too" in caught.value.__notes__[0]
    assert source.bytes_outstanding == 600
    source.reap_pending()
    cuglue.as_stream(0).state.retire.drain()
    assert source.bytes_outstanding == 0


def test_B30_an_interrupt_in_a_sink_leaves_a_free_counted(driver: Any) -> None:
    source = DirectCudaResource()
    logging = LoggingResource(source, _Interrupted(Action.DEALLOCATE))
    statistics = StatisticsResource(GlobalDeviceBudget(logging, 1000))
    block = statistics.allocate(600)
    with pytest.raises(KeyboardInterrupt):
        statistics.deallocate(block)
    assert statistics.statistics().current_bytes == 0
    assert statistics.budget_snapshot().reserved == 0  # type: ignore[union-attr]
    assert source.bytes_outstanding == 0


def test_an_interrupt_in_a_failure_callback_leaves_nothing_behind(driver: Any) -> None:
    def interrupted(failure: cuglue.AllocationFailure) -> bool:
        raise KeyboardInterrupt

    resource = FailureCallbackResource(GlobalDeviceBudget(DirectCudaResource(), 100), interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            resource.allocate(200)
    assert resource.budget_snapshot().reserved == 0  # type: ignore[union-attr]
    resource = FailureCallbackResource(resource.upstream, lambda failure: False)
    with pytest.raises(OutOfMemory):
        resource.allocate(200)
