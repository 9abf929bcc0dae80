"""What stands behind arrays: memory is given back once, and when nobody has any of it."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import cupy
import pytest

import cuglue
from cuglue import Access, AsyncCudaResource, PoolResource
from cuglue.core.device import device_state
from cuglue.errors import ClosedError
from cuglue.memory.lookup import block_behind, owned_block
from cuglue.testing import SimDriver, faults

from .bytemap import covered

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def pool(driver: Any) -> PoolResource:
    return PoolResource(AsyncCudaResource())


def nothing_is_lost(pool: PoolResource) -> None:
    """All memory is free, and every piece of it is in one place."""
    gc.collect()
    assert pool.bytes_outstanding == 0
    binned = [id(span) for home in pool.homes.all() for span in home.binned_spans()]
    assert len(set(binned)) == len(binned)
    assert all(covered(page) for home in pool.homes.all() for page in home.pages)
    pool.close()


def flush(pool: PoolResource) -> None:
    with pool.homes.all_locked() as homes:
        for home in homes:
            home.flush()


# --- memory of one array after the other ----------------------------------------------------------------------------


def test_arrays_on_streams_in_turn_have_memory_of_their_own_stream(device: Any) -> None:
    sim: SimDriver = device()
    pool = PoolResource(AsyncCudaResource())
    streams = [sim.Stream(), sim.Stream()]
    for turn in range(4):
        for stream in (*streams, streams[turn % 2]):
            with stream:
                pointers = [pool.malloc(1000), pool.malloc(5000)]
            homes = [pointer.mem.span.home for pointer in pointers]
            assert [home.stream for home in homes] == [cuglue.as_stream(stream)] * 2
            del pointers
    assert pool.counters.misses <= 4
    nothing_is_lost(pool)


def test_a_closed_pool_hands_out_nothing_that_comes_back_late(device: Any) -> None:
    """As from a finaliser on another thread, after the bins were emptied."""
    sim: SimDriver = device()
    pool = PoolResource(AsyncCudaResource())
    with sim.Stream():
        pointer = pool.malloc(1000)
        span = pointer.mem.span
        del pointer
        pool.close()
        span.stack.append(span)
        with pytest.raises(ClosedError):
            pool.malloc(1000)


def test_blocks_and_arrays_take_turns(pool: PoolResource) -> None:
    pointer = pool.malloc(1000)
    address = pointer.ptr
    del pointer
    block = pool.allocate(1000)
    assert block.ptr == address
    pool.deallocate(block)
    pointer = pool.malloc(1000)
    assert (pointer.ptr, pointer.mem.ptr, pointer.mem.size) == (address, address, pointer.mem.span.size)
    assert pointer.mem.block is not block
    del pointer
    nothing_is_lost(pool)


def test_memory_that_was_cut_or_merged_says_its_own_size(pool: PoolResource) -> None:
    sizes = random.Random(5)
    for _ in range(300):
        kept = [pool.malloc(sizes.choice((2 * KIB, 12 * KIB, 300 * KIB, MIB, 3 * MIB))) for _ in range(6)]
        for pointer in kept:
            memory = pointer.mem
            assert (memory.ptr, memory.size) == (memory.span.ptr, memory.span.size)
        del pointer, memory
        kept.clear()
        flush(pool)
    counters = pool.counters
    assert counters.splits > 100
    assert counters.coalesced > 100
    nothing_is_lost(pool)


def test_an_array_and_what_it_holds_lead_to_one_block(pool: PoolResource) -> None:
    array = cupy.ndarray((1000,), "u1", pool.malloc(1000))
    block = array.data.mem.block
    for thing in (array, array[5:], array.reshape(2, 500), array.data, array.data + 5, array.data.mem):
        assert owned_block(thing) is block_behind(thing) is block
    del array, thing
    nothing_is_lost(pool)


# --- what is still used when the array is gone ----------------------------------------------------------------------

HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a view": lambda pointer: pointer + 512,
    "views": lambda pointer: (pointer + 512, pointer + 512 + 64),
    "a pointer like it": copy.copy,
    "a pointer to all of it": lambda pointer: pointer + 0,
    "who took the memory object": lambda pointer: pointer.mem,
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_memory_is_not_handed_out_while_somebody_has_it(pool: PoolResource, holder: str, again: bool) -> None:
    pointer = pool.malloc(1000)
    address = pointer.ptr
    if again:  # its memory object was behind another array before
        del pointer
        pointer = pool.malloc(1000)
    held = HOLDERS[holder](pointer)
    del pointer
    others = [pool.malloc(1000) for _ in range(3)]
    assert address not in [other.ptr for other in others]
    assert pool.usage().number_allocs == 4
    del held
    last = pool.malloc(1000)
    assert last.ptr == address
    assert len({one.ptr for one in (*others, last)}) == 4
    del last, others
    nothing_is_lost(pool)


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_goes_back_once_whoever_has_it_last(pool: PoolResource, holder: str) -> None:
    pointer = pool.malloc(1000)
    span = pointer.mem.span
    held = HOLDERS[holder](pointer)
    del held
    assert span not in span.stack
    del pointer
    assert span.stack.count(span) == 1
    nothing_is_lost(pool)


def test_a_view_of_memory_used_elsewhere_is_waited_for(
    pool: PoolResource, new_stream: Callable[[], Any]
) -> None:
    pointer = pool.malloc(1000)
    address, view = pointer.ptr, pointer + 512
    cuglue.use(pointer.mem, new_stream(), Access.READ)
    del pointer, view
    with faults.counts() as calls:
        again = pool.malloc(1000)
    assert again.ptr == address
    assert calls["stream_wait_event"] == 1
    del again
    nothing_is_lost(pool)


def test_a_view_keeps_the_pool_alive(device: Any) -> None:
    sim = device()
    view = PoolResource(AsyncCudaResource()).malloc(1000) + 512
    gc.collect()
    state = device_state(sim, 0)
    state.retire.run_forgotten()
    assert sim.inventory()["malloc_async"] == 1
    del view
    gc.collect()
    state.retire.run_forgotten()
    assert sim.inventory()["malloc_async"] == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["view first", "view last"])
def test_the_collector_gives_back_what_lies_in_cycles(pool: PoolResource, order: tuple[int, int]) -> None:
    gc.collect()
    for _ in range(20):
        pointer = pool.malloc(1000)
        both = (pointer + 512, pointer)
        cycle: list[Any] = [both[i] for i in order]
        cycle.append(cycle)
        del pointer, both, cycle
    assert pool.usage().number_allocs == 20
    gc.collect()
    assert pool.usage().number_allocs == 0
    kept = [pool.malloc(1000) for _ in range(20)]
    assert len({one.ptr for one in kept}) == 20
    del kept
    nothing_is_lost(pool)


def test_memory_dies_on_any_thread_in_any_order(driver: Any) -> None:
    pool = PoolResource(AsyncCudaResource())
    pool.malloc(1000)
    shelf: list[Any] = []
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            choose = random.Random(number)
            for _ in range(3000):
                pointer = pool.malloc(choose.choice((1000, 5000, 300 * KIB)))
                shelf.append(choose.choice((pointer, pointer + 64, pointer.mem)))
                if choose.random() < 0.5:
                    shelf.append(pointer + 128)
                while len(shelf) > 40:
                    shelf.pop(choose.randrange(20))
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    shelf.clear()
    kept = [pool.malloc(1000) for _ in range(200)]
    assert len({one.ptr for one in kept}) == 200
    del kept
    nothing_is_lost(pool)


# --- what goes wrong on the way -------------------------------------------------------------------------------------


class Interrupted(list[Any]):
    """A bin: Ctrl-C comes when something is in it."""

    def append(self, span: Any) -> None:
        super().append(span)
        raise KeyboardInterrupt


@pytest.mark.parametrize("unmade", [False, True])
def test_an_interrupted_return_is_repeated_and_gives_back_once(device: Any, unmade: bool) -> None:
    sim: SimDriver = device()
    pool = PoolResource(AsyncCudaResource())
    pointer = pool.malloc(1000)
    span, block, bin_ = pointer.mem.span, pointer.mem.block, pointer.mem.span.stack
    span.stack = Interrupted()
    del pointer
    if unmade:
        pool._unmake(span)
    retire = device_state(sim, 0).retire
    with pytest.raises(KeyboardInterrupt):
        retire.run_forgotten()  # and keeps it, for the next time
    assert span.stack == [span]
    assert block.state is cuglue.BlockState.FREED
    retire.drain(block=True)
    assert span.stack == [span]
    span.stack = bin_
    bin_.append(span)
    nothing_is_lost(pool)
