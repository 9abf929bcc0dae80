"""Corners that only a removed line shows."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
from memory_tools import contents, fill, make_current, new_stream

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    DebugGuardResource,
    DeviceMemoryResource,
    DirectCudaResource,
    GlobalDeviceBudget,
    LaunchRecorder,
    PinnedHostResource,
    testing,
)
from cuglue.core.block import Block
from cuglue.driver.sim import SimDriver
from cuglue.errors import UseAfterFree
from cuglue.memory.adaptor import Adaptor


class Node:
    """Something that can be part of a cycle."""

    me: Any
    pointer: Any


@pytest.mark.parametrize(
    "make",
    [
        AsyncCudaResource,
        lambda: DirectCudaResource(mode="async"),
        lambda: DebugGuardResource(DirectCudaResource(mode="async"), quarantine_bytes=0),
        PinnedHostResource,
    ],
)
def test_a_stale_block_does_not_take_a_dead_arrays_memory(sim: Any, make: Any) -> None:
    """The address has a new owner, whose weak reference the collector has cleared already."""
    resource = make()
    stream = sim.Stream()
    with make_current(stream):
        first = resource.malloc(4096)
        stale: Any = first.mem
        resource.deallocate(stale)
        if isinstance(resource, PinnedHostResource):
            resource.reap_pending()
        del first
        gc.disable()
        try:
            node = Node()
            node.me, node.pointer = node, resource.malloc(4096)
            assert node.pointer.ptr == stale.ptr, "the address must be reused for this test to mean anything"
            del node
            gc.collect()
            with pytest.raises(UseAfterFree):
                resource.deallocate(stale)
        finally:
            gc.enable()
    stale.stream.state.retire.run_forgotten()
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


def test_a_guarded_block_whose_stream_may_not_be_named(sim: Any) -> None:
    guard = DebugGuardResource(AsyncCudaResource())
    handle = sim.stream_create(0)
    block = guard.allocate(64, handle)
    sim.stream_destroy(handle)
    guard.deallocate(block)
    guard.reap_pending()
    assert guard.bytes_outstanding == 0


def test_a_guard_comes_after_uses_told_to_the_resource_below(sim: Any) -> None:
    guard = DebugGuardResource(AsyncCudaResource())
    home, other = (cuglue.as_stream(sim.Stream()) for _ in range(2))
    block = guard.allocate(64, home)
    guard.prepare_block_use(block.id, other, Access.WRITE)
    fill(block, 1, other)
    guard.finish_block_use(block.id, other, Access.WRITE)
    guard.deallocate(block)
    block = guard.allocate(64, home)
    other.wait_for(home, block.write_seq)
    fill(block, 1, other)
    guard.record_block_use(block, other)
    guard.deallocate(block)
    guard.reap_pending()


def test_a_guarded_block_follows_the_one_below_until_it_is_free(sim: Any) -> None:
    guard = DebugGuardResource(AsyncCudaResource(), quarantine_bytes=0)
    stream = cuglue.as_stream(sim.Stream())
    block = guard.allocate(64, stream)
    guard.deallocate(block)
    with testing.Latch(stream):
        late = guard.allocate(64, cuglue.as_stream(sim.Stream()))
        for _ in range(3):
            guard.reap_pending(block=False)
        guard.deallocate(late)
    guard.reap_pending()
    assert block.state is late.state is BlockState.FREED
    assert len(guard._leaving) == 0


def test_pinned_memory_of_a_dead_array_is_freed_by_a_reap(sim: Any) -> None:
    resource = PinnedHostResource()
    pointer = resource.malloc(64)
    del pointer
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


def test_pinned_memory_that_is_done_with_is_not_waited_for(sim: Any) -> None:
    resource = PinnedHostResource()
    stream = cuglue.as_stream(sim.Stream())
    resource.deallocate(resource.allocate(64, stream))
    stream.synchronize()
    with testing.faults.counts() as counted:
        resource.reap_pending()
    assert counted["stream_synchronize"] == 0
    assert resource.bytes_outstanding == 0


def test_a_stream_that_is_done_is_not_waited_for(sim: Any) -> None:
    resource = AsyncCudaResource()
    stream = cuglue.as_stream(sim.Stream())
    resource.deallocate(resource.allocate(64, stream))
    stream.synchronize()
    with testing.faults.counts() as counted:
        resource.reap_pending()
    assert counted["stream_synchronize"] == 0
    assert resource.bytes_outstanding == 0


def test_arrays_that_a_callback_drops_are_there_for_the_next_attempt() -> None:
    driver = SimDriver(memory_bytes=1 << 20)
    with cuglue.use_driver(driver):
        direct = DirectCudaResource(mode="sync")
        budget = cuglue.GlobalDeviceBudget(direct, 1 << 20)
        hoard = [budget.malloc(700_000)]
        taken: list[int] = []

        class Counts(Adaptor):  # refuses once without looking whether there is room by now
            def _allocate(self, nbytes: int, stream: Any, tag: str, kind: Any) -> Any:
                taken.append(direct.bytes_outstanding)
                if len(taken) == 1:
                    raise cuglue.errors.OutOfMemory("no", requested=nbytes)
                return super()._allocate(nbytes, stream, tag, kind)

        def drop(failure: cuglue.AllocationFailure) -> bool:
            hoard.clear()
            return True

        resource = cuglue.FailureCallbackResource(Counts(budget), drop)
        block = resource.allocate(100)
        assert taken == [700_000, 0], "given back before the second attempt"
        resource.deallocate(block)


def test_a_freed_block_leaves_no_ticket(sim: Any) -> None:
    for resource in (PinnedHostResource(), AsyncCudaResource()):
        block = resource.allocate(64)
        resource.prepare_block_use(block.id, sim.Stream(), Access.WRITE)
        resource.deallocate(block)
        assert resource._tickets is not None
        assert resource._tickets._open == {}
        resource.reap_pending()


def test_a_freed_block_keeps_no_stream_of_its_users_alive(sim: Any) -> None:
    resource = AsyncCudaResource()
    block = resource.allocate(64, sim.Stream())
    resource.record_block_use(block, sim.Stream())
    resource.deallocate(block)
    assert block.reads is None
    resource.reap_pending()


def test_use_comes_after_other_users_too(sim: Any) -> None:
    """Not only after the stream that the memory was allocated on."""
    resource = AsyncCudaResource()
    home, writer, user = (cuglue.as_stream(sim.Stream()) for _ in range(3))
    block = resource.allocate(64, home)
    resource.prepare_block_use(block.id, writer, Access.WRITE)
    fill(block, 5, writer)
    resource.finish_block_use(block.id, writer, Access.WRITE)
    cuglue.use(block, user, Access.READ)
    assert (contents(block, user) == 5).all()
    resource.deallocate(block)
    resource.reap_pending()


def test_a_recorder_comes_after_other_users_of_foreign_memory(sim: Any) -> None:
    home, writer, user = (cuglue.as_stream(sim.Stream()) for _ in range(3))
    ptr = sim.malloc(64, 0)
    block = Block(ptr, 64, home, home.submit())
    block.prepare(writer, Access.WRITE)
    fill(block, 5, writer)
    block.finish(writer, Access.WRITE)
    with LaunchRecorder(user).read(block):
        assert (contents(block, user) == 5).all()
    home.join(user)
    home.join(writer)
    home.synchronize()
    sim.free(ptr, 0)


def test_out_of_memory_collects_garbage_over_a_resource_that_frees_at_once() -> None:
    driver = SimDriver(memory_bytes=1 << 20)
    with cuglue.use_driver(driver):
        resource = DirectCudaResource(mode="sync")
        gc.disable()
        try:
            node = Node()
            node.me, node.pointer = node, resource.malloc(700_000)
            del node
            block = resource.allocate(800_000)
        finally:
            gc.enable()
        resource.deallocate(block)


def test_every_decorator_passes_a_record_on(sim: Any) -> None:
    for layer in (
        cuglue.StatisticsResource,
        cuglue.TrackingResource,
        lambda upstream: cuglue.GlobalDeviceBudget(upstream, 1 << 20),
        lambda upstream: cuglue.LoggingResource(upstream, cuglue.NullSink()),
    ):
        resource = layer(AsyncCudaResource())
        user = cuglue.as_stream(sim.Stream())
        block = resource.allocate(64)
        resource.record_block_use(block, user)
        assert user in (block.reads or {})
        resource.deallocate(block)
        resource.reap_pending()


class _Asked(Adaptor):
    """Notes how a layer above asks for what is free by now."""

    def __init__(self, upstream: DeviceMemoryResource) -> None:
        super().__init__(upstream)
        self.asked: list[str] = []

    def _look(self) -> None:
        self.asked.append("look")
        super()._look()

    def reap_pending(self, *, block: bool = True) -> None:
        self.asked.append("wait" if block else "reap")
        super().reap_pending(block=block)


def test_a_budget_asks_no_more_than_it_has_to(driver: Any) -> None:
    """What is known to be free is counted; then it looks; then it waits."""
    source = AsyncCudaResource()
    below = _Asked(source)
    budget = GlobalDeviceBudget(below, 1000)
    stream = cuglue.as_stream(new_stream())
    budget.deallocate(budget.allocate(600, stream))
    source.reap_pending()
    block = budget.allocate(600, stream)
    assert below.asked == []
    budget.deallocate(block)
    stream.synchronize()
    block = budget.allocate(600, stream)
    assert below.asked == ["look"]
    budget.deallocate(block)
    with testing.Latch(stream) as latch:
        budget.deallocate(budget.allocate(300, stream))
        threading.Timer(0.1, latch.release).start()
        block = budget.allocate(900, stream)
    assert below.asked == ["look", "look", "wait"]
    budget.deallocate(block)
    budget.reap_pending()


def test_a_look_ends_the_quarantine_of_what_was_held_long_enough(driver: Any) -> None:
    below = _Asked(DebugGuardResource(DirectCudaResource(), quarantine_age=0.01))
    budget = GlobalDeviceBudget(below, 1000)
    budget.deallocate(budget.allocate(600))
    time.sleep(0.05)
    block = budget.allocate(600)
    assert below.asked == ["look"]
    budget.deallocate(block)
    budget.reap_pending()
