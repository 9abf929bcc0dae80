"""What a guard's own fills and looks come after, and what comes after them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from memory_tools import fill

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    DebugGuardResource,
    DeviceBlock,
    DeviceMemoryResource,
    DirectCudaResource,
    testing,
)
from cuglue.driver.protocol import PER_THREAD_STREAM
from cuglue.memory.adaptor import Adaptor


class Scrubbing(Adaptor):
    """A layer that overwrites memory on a stream of its own as it comes and goes, ordered by the uses it knows of."""

    def __init__(self, upstream: DeviceMemoryResource, side: Any) -> None:
        super().__init__(upstream)
        self.side = side

    def _allocate(self, nbytes: int, stream: Any, tag: str, kind: Any) -> Any:
        block = super()._allocate(nbytes, stream, tag, kind)
        self._scrub(block)
        block.prepare(stream, Access.WRITE)
        return block

    def _deallocate(self, block: Any) -> None:
        self._scrub(block)
        super()._deallocate(block)

    def _scrub(self, block: Any) -> None:
        block.prepare(self.side, Access.WRITE)
        fill(block, 0xEE, self.side)
        block.finish(self.side, Access.WRITE)


def test_a_layer_below_comes_after_the_guards_fills(sim: Any) -> None:
    home, side = (cuglue.as_stream(sim.Stream()) for _ in range(2))
    guard = DebugGuardResource(Scrubbing(AsyncCudaResource(), side))
    block = guard.allocate(64, home)
    fill(block, 1, home)
    guard.deallocate(block)
    guard.reap_pending()
    assert guard.reports == []


def test_a_layer_below_comes_after_fills_that_failed_half_way(sim: Any) -> None:
    """The canary was queued, the rest was refused: the memory goes back, and is overwritten only then."""
    home, side = (cuglue.as_stream(sim.Stream()) for _ in range(2))
    guard = DebugGuardResource(Scrubbing(AsyncCudaResource(), side))
    for call in (3, 4):  # the first two are the layer's own and the canary in front
        with testing.faults.fail("fill_async", on=call), pytest.raises(cuglue.errors.DriverError):
            guard.allocate(64, home)
    guard.reap_pending()
    assert guard.bytes_outstanding == 0


def test_the_user_comes_after_the_guards_fills(sim: Any) -> None:
    """Also where an event covers the allocation already."""
    home, user = (cuglue.as_stream(sim.Stream()) for _ in range(2))
    for _ in range(5):
        home.submit()  # earlier work: numbers of one stream are none of another's
    guard = DebugGuardResource(Scrubbing(AsyncCudaResource(), user))
    block = guard.allocate(64, home)
    guard.prepare_block_use(block.id, user, Access.WRITE)
    fill(block, 1, user)
    guard.finish_block_use(block.id, user, Access.WRITE)
    guard.deallocate(block)
    guard.reap_pending()
    assert guard.reports == []


def test_a_guard_comes_after_a_use_that_only_the_resource_below_was_told_of(sim: Any) -> None:
    """By a library that has the address of the larger block: it reads the canaries too."""
    source = AsyncCudaResource()
    guard = DebugGuardResource(source)
    home, other = (cuglue.as_stream(sim.Stream()) for _ in range(2))
    block = guard.allocate(64, home)
    (inner,) = source.live_blocks()
    source.prepare_block_use(inner.id, other, Access.READ)
    copy = source.allocate(inner.size, other)
    sim.copy_async(copy.ptr, inner.ptr, inner.size, cuglue.driver.protocol.CopyKind.D2D, other.handle)
    source.finish_block_use(inner.id, other, Access.READ)
    source.deallocate(copy)
    guard.deallocate(block)  # overwrites it
    guard.reap_pending()


def test_a_guard_comes_after_work_on_a_stream_known_by_number_that_nobody_counted(sim: Any) -> None:
    handle = sim.stream_create(0)
    guard = DebugGuardResource(AsyncCudaResource())
    first, second = guard.allocate(64, handle), guard.allocate(64, handle)
    guard.deallocate(first)  # what was counted so far is waited for now
    sim.fill_async(second.ptr, 1, 64, handle)
    guard.deallocate(second)
    guard.reap_pending()
    sim.stream_destroy(handle)


def test_a_look_comes_after_the_poison_of_another_threads_own_stream(sim: Any) -> None:
    guard = DebugGuardResource(AsyncCudaResource())

    def work() -> None:
        guard.deallocate(guard.allocate(64, PER_THREAD_STREAM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    guard.flush()
    assert guard.reports == []
    guard.reap_pending()


class Closing(DeviceMemoryResource):
    """Somebody else's resource, which notes what it still has out when it closes."""

    def __init__(self) -> None:
        self.upstream = DirectCudaResource()
        self.left: list[int] = []

    def allocate(self, nbytes: int, stream: object = None, tag: str = "untagged") -> DeviceBlock:
        return self.upstream.allocate(nbytes, stream, tag)

    def deallocate(self, block: DeviceBlock) -> None:
        self.upstream.deallocate(block)

    @property
    def device_ordinal(self) -> int:
        return 0

    @property
    def bytes_outstanding(self) -> int:
        return self.upstream.bytes_outstanding

    def close(self) -> None:
        self.left.append(self.upstream.bytes_outstanding)
        self.upstream.close()


def test_memory_of_dead_arrays_is_given_back_before_what_lies_below_closes(sim: Any) -> None:
    below = Closing()
    guard = DebugGuardResource(below)
    pointer = guard.malloc(64)
    del pointer
    guard.close()
    assert below.left == [0]


def test_a_block_that_is_free_at_once_is_followed_no_further(sim: Any) -> None:
    guard = DebugGuardResource(DirectCudaResource(), quarantine_bytes=0)
    block = guard.allocate(64)
    guard.deallocate(block)
    assert block.state is BlockState.FREED
    assert len(guard._leaving) == 0
