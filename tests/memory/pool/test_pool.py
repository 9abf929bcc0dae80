"""The pool as a resource: hits, growth, other streams, and what it does when memory is short."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    DirectCudaResource,
    GlobalDeviceBudget,
    PoolResource,
    as_stream,
)
from cuglue.core.block import BlockLife
from cuglue.errors import (
    CaptureError,
    ClosedError,
    LayoutError,
    OutOfBudget,
    OutOfMemory,
    PoolCapacityExceeded,
    UsageError,
)
from cuglue.memory.cupy_plug import block_of
from cuglue.memory.lookup import block_at
from cuglue.testing import faults

KIB, MIB = 1 << 10, 1 << 20
EVENTS = ("event_record", "stream_wait_event", "event_create", "context_record")


def live(pool: PoolResource) -> int:
    pool.upstream.reap_pending()
    return pool.bytes_outstanding


# --- hits -----------------------------------------------------------------------------------------------------------


def test_a_hit_calls_no_driver(driver: Any) -> None:
    pool = PoolResource(AsyncCudaResource())
    malloc = pool.malloc
    for n in (1, 1000, 100_000, 3 * MIB):
        malloc(n)  # dropped at once: now there is one in the bin
    driver.stream_current(0)
    with faults.counts() as calls:
        for _ in range(50):
            pointers = [malloc(n) for n in (1, 1000, 100_000, 3 * MIB)]
            del pointers
    assert set(calls) <= {"stream_current"}
    assert pool.counters.hits >= 200
    pool.close()


def test_a_hit_through_allocate_calls_no_driver(driver: Any, new_stream: Callable[[], Any]) -> None:
    pool = PoolResource(AsyncCudaResource())
    stream = new_stream()
    pool.deallocate(pool.allocate(5000, stream))
    with faults.counts() as calls:
        for _ in range(20):
            pool.deallocate(pool.allocate(5000, stream))
    assert not calls
    pool.close()


def test_B24_memory_given_back_comes_again_at_once_on_its_stream(
    driver: Any, new_stream: Callable[[], Any]
) -> None:
    pool = PoolResource(AsyncCudaResource())
    stream = new_stream()
    for value in range(32):
        block = pool.allocate(100_000, stream)
        first = block.ptr if value == 0 else first  # noqa: F821
        assert block.ptr == first
        driver.fill_async(block.ptr, value, block.nbytes, stream.handle)
        pool.deallocate(block)
        assert block.state is BlockState.FREED
    pool.close()


def test_other_streams_never_share_memory_while_there_is_more(
    driver: Any, new_stream: Callable[[], Any]
) -> None:
    pool = PoolResource(AsyncCudaResource())
    streams = [new_stream() for _ in range(4)]
    addresses = []
    with faults.counts() as calls:
        for stream in streams:
            block = pool.allocate(MIB, stream)
            driver.fill_async(block.ptr, 1, MIB, stream.handle)
            pool.deallocate(block)
            addresses.append(block.ptr)
    assert len(set(addresses)) == 4
    assert not any(name in calls for name in EVENTS)
    pool.close()


def test_zero_and_impossible_sizes(driver: Any) -> None:
    pool = PoolResource(AsyncCudaResource())
    malloc = pool.malloc
    assert malloc(0).ptr == 0
    for wrong in (-1, 1.5, "1", None):
        with pytest.raises((ValueError, TypeError)):
            malloc(wrong)  # type: ignore[arg-type]
    with pytest.raises(OutOfMemory):
        malloc(1 << 62)
    assert pool.bytes_reserved == 0
    pool.close()


# --- arrays that somebody asked about -------------------------------------------------------------------------------


def test_the_block_of_an_array_is_made_once_and_tracks_uses(
    driver: Any, new_stream: Callable[[], Any]
) -> None:
    pool = PoolResource(AsyncCudaResource())
    pointer = pool.malloc(1000)
    block = block_of(pointer.mem)
    assert block is block_of(pointer.mem)
    assert (block.ptr, block.state) == (pointer.ptr, BlockState.LIVE)
    other = new_stream()
    block.prepare(other, Access.READ)
    driver.fill_async(new_block(pool, other).ptr, 1, 512, other.handle)
    block.finish(other, Access.READ)
    address = pointer.ptr
    with faults.counts() as calls:
        del pointer
        again = pool.malloc(1000)
    assert again.ptr == address
    assert calls["stream_wait_event"] == 1, "the stream has to wait for the use elsewhere, and only for that"
    with faults.counts() as calls:
        del again
        assert pool.malloc(1000).ptr == address
    assert set(calls) <= {"stream_current"}
    assert block.state is BlockState.FREED
    driver.device_synchronize(0)
    for left in pool.live_blocks():
        if left.tag == "helper":
            pool.deallocate(left)  # type: ignore[arg-type]
    pool.close()


def new_block(pool: PoolResource, stream: Any) -> Any:
    return pool.allocate(512, stream, "helper")


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize(
    "make",
    [
        lambda: PoolResource(AsyncCudaResource()),
        lambda: PoolResource(AsyncCudaResource(), layout=[cuglue.Direct()]),
        AsyncCudaResource,
    ],
    ids=["arena", "direct", "plain"],
)
def test_the_memory_of_an_array_is_not_copied(
    driver: Any, make: Callable[[], Any], way: Callable[[Any], Any]
) -> None:
    """A copy would give the memory back a second time."""
    pool = make()
    pool.malloc(1000)  # from now on the short way
    pointer = pool.malloc(1000)
    with pytest.raises(UsageError, match="a copy of the array"):
        way(pointer.mem)
    del pointer
    kept = [pool.malloc(1000) for _ in range(100)]
    assert len({one.ptr for one in kept}) == 100
    del kept
    pool.close()


def test_the_block_of_an_array_cannot_be_given_back_by_hand(driver: Any) -> None:
    pool = PoolResource(AsyncCudaResource())
    pointer = pool.malloc(1000)
    with pytest.raises(UsageError, match="Drop the array"):
        pool.deallocate(pointer.mem.block)
    assert pool.usage().number_allocs == 1
    del pointer
    assert pool.usage().number_allocs == 0 or pool.bytes_outstanding == 0
    pool.close()


def test_an_array_over_layers_over_a_pool_costs_one_object(device: Any) -> None:
    device()
    resource = GlobalDeviceBudget(PoolResource(AsyncCudaResource()), 10 * MIB)
    pointer = resource.malloc(1000)
    assert isinstance(pointer.mem, BlockLife)
    assert pointer.mem.size == 1000
    del pointer
    assert resource.malloc(1000).ptr
    resource.reap_pending()
    assert resource.bytes_outstanding == 0
    resource.close()


def test_a_use_of_memory_that_is_known_by_its_address_alone_is_waited_for(
    driver: Any, new_stream: Callable[[], Any]
) -> None:
    """As of a tensor of PyTorch over an array's memory: nobody asked for its block before."""
    pool = PoolResource(AsyncCudaResource())
    user = new_stream()
    other, pointer = pool.malloc(5000), pool.malloc(1000)
    address = pointer.ptr
    block = block_at(address + 700)
    assert block is not None
    assert (block.ptr, block.size) == (address, pointer.mem.size)
    assert block is pool.block_at(address) is block_of(pointer.mem)
    pool.record_block_use(block, user)
    assert pool.pending_use_event_count(address) == 2
    del pointer
    with faults.counts() as calls:
        again = pool.malloc(1000)
    assert again.ptr == address
    assert calls["stream_wait_event"] == 1, "its stream waits for the other one first"
    assert pool.block_at(other.ptr + 10_000_000) is None
    assert block.state is cuglue.BlockState.FREED
    del other, again
    pool.close()


def test_an_address_whose_array_dies_while_it_is_looked_up_has_no_block(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PoolResource(AsyncCudaResource())
    arrays = [pool.malloc(1000)]
    address = arrays[0].ptr
    make = pool._block_of

    def late(span: Any) -> Any:
        arrays.clear()
        return make(span)

    monkeypatch.setattr(pool, "_block_of", late)
    assert pool.block_at(address) is None
    monkeypatch.undo()
    assert pool.bytes_outstanding == 0
    assert pool.live_blocks() == []
    again = pool.malloc(1000)
    assert again.ptr == address
    assert pool.block_at(address) is block_of(again.mem)
    del again
    pool.close()


def test_memory_whose_block_was_unmade_too_late_still_goes_back(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PoolResource(AsyncCudaResource())
    arrays = [pool.malloc(1000)]
    span = arrays[0].mem.span
    pool.block_at(arrays[0].ptr)
    arrays.clear()  # it saw a block: left for the next call
    pool._unmake(span)
    again = pool.malloc(1000)
    assert again.mem.span is span
    del again
    pool.close()


def test_uses_are_known_by_id_only_while_the_block_lives(driver: Any, new_stream: Callable[[], Any]) -> None:
    pool = PoolResource(AsyncCudaResource())
    stream, other = new_stream(), new_stream()
    block = pool.allocate(1000, stream)
    pool.prepare_block_use(block.id, other, Access.WRITE)
    pool.finish_block_use(block.id, other, Access.WRITE)
    assert pool.pending_use_event_count(block.ptr) == 1
    stale = block.id
    pool.deallocate(block)
    again = pool.allocate(1000, stream)
    assert again.ptr == block.ptr
    with pytest.raises(cuglue.errors.UseAfterFree):
        pool.prepare_block_use(stale, other, Access.READ)
    pool.deallocate(again)
    with pytest.raises(cuglue.errors.UseAfterFree):
        pool.deallocate(again)
    pool.close()


def test_a_use_on_a_capturing_streams_partner_is_waited_for_later(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    home, other = as_stream(sim.Stream()), as_stream(sim.Stream())
    block = pool.allocate(1000, home)
    block.prepare(other, Access.WRITE)
    sim.fill_async(block.ptr, 1, 1000, other.handle)
    block.finish(other, Access.WRITE)
    spare = pool.allocate(1000, home)
    pool.deallocate(spare)
    sim.capture_begin(home.handle, cuglue.driver.protocol.CaptureMode.RELAXED)
    pool.deallocate(block)  # no wait may enter the capture
    assert block.state is BlockState.RETIRED
    assert pool.bytes_outstanding >= 1000
    sim.graph_destroy(sim.capture_end(home.handle))
    sim.device_synchronize(0)
    home.state.retire.drain()
    assert block.state is BlockState.FREED
    assert pool.bytes_outstanding == 0
    pool.close()


def test_the_first_use_elsewhere_comes_after_what_cupy_did(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    home, other = sim.Stream(), as_stream(sim.Stream())
    with home:
        pointer = pool.malloc(1000)
    other.join(as_stream(home))  # a wait that does not cover what comes now
    sim.fill_async(pointer.ptr, 1, 1000, home.ptr)  # CuPy counts nothing
    block = pointer.mem.block
    assert block.prepare(other, Access.WRITE) == 1
    sim.fill_async(pointer.ptr, 2, 1000, other.handle)
    block.finish(other, Access.WRITE)
    del pointer, block
    pool.close()


def test_a_block_is_there_after_what_its_stream_has_got(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    home, other = as_stream(sim.Stream()), as_stream(sim.Stream())
    first = pool.allocate(1000, home)
    other.join(home)  # a wait that does not cover what comes now
    sim.fill_async(first.ptr, 1, 1000, home.handle)
    pool.deallocate(first)
    block = pool.allocate(1000, home)
    assert block.prepare(other, Access.WRITE) == 1
    sim.fill_async(block.ptr, 2, 1000, other.handle)
    block.finish(other, Access.WRITE)
    pool.deallocate(block)
    pool.close()


def test_a_stream_known_by_its_number_is_not_asked_for_at_a_free(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    stream = sim.Stream()
    block = pool.allocate(1000, stream.ptr)
    pool.deallocate(block)
    assert block.state is BlockState.FREED
    used = pool.allocate(1000, stream.ptr)
    other = as_stream(sim.Stream())
    used.prepare(other, Access.WRITE)
    sim.fill_async(used.ptr, 2, 1000, other.handle)
    used.finish(other, Access.WRITE)
    pool.deallocate(used)
    assert used.state is BlockState.RETIRED, (
        "the handle may be somebody else's by now: wait for the use instead"
    )
    sim.device_synchronize(0)
    other.state.retire.drain()
    assert used.state is BlockState.FREED
    pool.close()


def test_what_was_prepared_and_never_finished_is_forgotten_with_the_block(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    block = pool.allocate(1000, 0)
    pool.prepare_block_use(block.id, as_stream(sim.Stream()), Access.WRITE)
    pool.deallocate(block)
    assert pool._tickets is not None
    assert pool._tickets._open == {}
    pool.close()


@pytest.mark.parametrize("call", ["allocate", "trim", "reap", "close", "figures"])
@pytest.mark.parametrize("layout", [None, [cuglue.Direct()]], ids=["arena", "direct"])
def test_arrays_that_are_gone_are_seen_to_first(
    device: Any, monkeypatch: pytest.MonkeyPatch, call: str, layout: Any
) -> None:
    device()
    pool = PoolResource(AsyncCudaResource(), layout=layout)
    pointer = pool.malloc(3 * MIB)
    assert block_of(pointer.mem) is not None
    reserved = pool.bytes_reserved
    del pointer
    if call == "allocate":
        pool.deallocate(pool.allocate(3 * MIB, None))
        assert pool.bytes_reserved == reserved
    elif call == "trim":
        assert pool.trim() == reserved
    elif call == "reap":
        with monkeypatch.context() as patch:
            patch.setattr(pool.upstream, "reap_pending", lambda block: None)  # it need not do this for us
            pool.reap_pending()
        assert not pool.live_blocks()
    elif call == "figures":
        assert pool.bytes_outstanding == 0
    pool.close()
    assert pool.bytes_reserved == 0


@pytest.mark.parametrize("layout", [None, [cuglue.Direct()]], ids=["arena", "direct"])
def test_memory_that_waits_for_a_use_is_waited_for_before_giving_up(device: Any, layout: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource(), layout=layout, max_bytes=8 * MIB)
    home, other = as_stream(sim.Stream()), as_stream(sim.Stream())
    block = pool.allocate(8 * MIB, home)
    block.prepare(other, Access.WRITE)
    sim.fill_async(block.ptr, 1, block.nbytes, other.handle)
    block.finish(other, Access.WRITE)
    sim.capture_begin(home.handle, cuglue.driver.protocol.CaptureMode.RELAXED)
    pool.deallocate(block)
    sim.graph_destroy(sim.capture_end(home.handle))
    assert block.state is BlockState.RETIRED
    again = pool.allocate(8 * MIB, as_stream(sim.Stream()))
    assert block.state is BlockState.FREED
    pool.deallocate(again)
    pool.close()


@pytest.mark.parametrize("layout", [None, [cuglue.Direct()]], ids=["arena", "direct"])
def test_upstream_counts_as_free_what_it_got_back_before_giving_up(device: Any, layout: Any) -> None:
    class Lazy(AsyncCudaResource):
        """Has 8 MiB, and what was given back only after a reap."""

        def _take(self, nbytes: int, stream: Any) -> int:
            if self.bytes_outstanding + nbytes > 8 * MIB:
                raise OutOfMemory("lazy", requested=nbytes)
            return super()._take(nbytes, stream)

        def _make_room(self, stream: Any) -> list[str]:
            return []

    sim = device()
    pool = PoolResource(Lazy(), layout=layout)
    pool.deallocate(pool.allocate(6 * MIB, sim.Stream()))
    pool.deallocate(pool.allocate(8 * MIB, sim.Stream()))
    pool.close()


def test_a_forgotten_pool_with_a_live_block_says_where_it_was_made(device: Any) -> None:
    sim = device()
    source = AsyncCudaResource()
    pool = PoolResource(source)
    pool.allocate(1000, 0)
    del pool
    with pytest.warns(ResourceWarning, match=r"test_pool\.py"):
        gc.collect()
    cuglue.core.device.device_state(sim, 0).retire.run_forgotten()
    source.reap_pending()
    assert source.bytes_outstanding == 0
    source.close()


# --- limits and growth ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [None, "direct"])
def test_report_M17_cached_memory_goes_before_a_refusal(device: Any, layout: Any) -> None:
    device()
    pool = PoolResource(
        AsyncCudaResource(), layout=None if layout is None else [cuglue.Direct()], max_bytes=1024 * KIB
    )
    pool.deallocate(pool.allocate(512 * KIB))
    block = pool.allocate(768 * KIB)
    assert pool.bytes_reserved <= 1024 * KIB
    pool.deallocate(block)
    pool.close()


def test_report_M18_a_large_free_piece_is_found_although_a_variable_kept_it(device: Any) -> None:
    device(mib=100)
    pool = PoolResource(AsyncCudaResource())
    a, b = pool.malloc(30 * MIB), pool.malloc(30 * MIB)
    del a
    c = pool.malloc(60 * MIB)
    del b, c
    pool.close()


def test_report_M19_growing_arrays_keep_bounded_memory(device: Any) -> None:
    device(mib=64)
    pool = PoolResource(AsyncCudaResource())
    for i in range(1, 101):
        pool.malloc(i * 512 * KIB)
    assert pool.peak_bytes_reserved < 1.2 * 100 * 512 * KIB
    assert pool.counters.replaced > 0
    pool.close()


def test_report_M21_M28_the_message_tells_leak_from_fragmentation(device: Any) -> None:
    device(mib=64)
    pool = PoolResource(AsyncCudaResource())
    pool.deallocate(pool.allocate(48 * MIB, 0))  # one page
    held = [pool.allocate(4 * MIB, 0, "odd" if i % 2 else "even") for i in range(12)]
    for block in held[::2]:
        pool.deallocate(block)
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate(40 * MIB, 0)
    report = caught.value.report
    assert (report.live, report.live_blocks) == (24 * MIB, 6)
    assert (report.cached, report.largest_free, report.free_spans) == (24 * MIB, 4 * MIB, 6)
    assert report.fragmentation == pytest.approx(5 / 6)
    assert report.top_tags == (("odd", 24 * MIB, 6),)
    text = str(caught.value)
    for word in ("live: 25165824 bytes in 6 blocks", "cached and free", "largest", "fragmented", "device:"):
        assert word in text
    for block in held[1::2]:
        pool.deallocate(block)
    pool.close()


def test_report_M22_every_free_piece_is_looked_at_before_giving_up(device: Any) -> None:
    device()
    pool = PoolResource(AsyncCudaResource(), max_bytes=8 * MIB)
    a, b = pool.allocate(4 * MIB, 0), pool.allocate(4 * MIB, 0)
    pool.deallocate(a)
    # all that is free is large memory in one page with a live block: small requests must take it
    small = [pool.allocate(n, 0) for n in (100, 50_000, 100_000, 300_000)]
    for block in (*small, b):
        pool.deallocate(block)
    pool.close()


def test_report_M23_the_device_is_waited_for_and_driver_held_bytes_reported(device: Any) -> None:
    sim = device(mib=64)
    pool = PoolResource(AsyncCudaResource())
    one, two = as_stream(sim.Stream()), as_stream(sim.Stream())
    for size in (20, 25, 15):
        for stream in (one, two):
            block = pool.allocate(size * MIB, stream)
            sim.fill_async(block.ptr, 1, block.nbytes, stream.handle)
            pool.deallocate(block)
    block = pool.allocate(60 * MIB, one)
    assert pool.counters.retries + pool.counters.drained > 0
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate(10 * MIB, two)
    assert caught.value.report.device_free < 10 * MIB
    pool.deallocate(block)
    pool.close()


def test_report_M24_threads_near_the_limit_never_fail_for_cached_memory(device: Any) -> None:
    sim = device(mib=64)
    pool = PoolResource(AsyncCudaResource(), max_bytes=40 * MIB)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        stream = as_stream(sim.Stream())
        try:
            for _ in range(60):
                block = pool.allocate(choose.randint(1, 18) * MIB, stream)
                sim.fill_async(block.ptr, seed, block.nbytes, stream.handle)
                pool.deallocate(block)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert pool.peak_bytes_reserved <= 40 * MIB
    pool.close()


@pytest.mark.parametrize(
    "source", [AsyncCudaResource, lambda: DirectCudaResource(mode="sync")], ids=["async", "sync"]
)
def test_report_M25_a_big_block_at_exactly_the_limit_after_frees_on_sixteen_streams(
    device: Any, source: Any
) -> None:
    sim = device(mib=256)
    limit = 64 * MIB
    pool = PoolResource(source(), max_bytes=limit)
    streams = [as_stream(sim.Stream()) for _ in range(17)]
    for stream in streams[1:]:
        blocks = [pool.allocate(MIB, stream) for _ in range(4)]
        for block in blocks:
            sim.fill_async(block.ptr, 3, block.nbytes, stream.handle)
            stream.submit()
            pool.deallocate(block)
    big = pool.allocate(limit, streams[0])
    sim.fill_async(big.ptr, 4, limit, streams[0].handle)
    assert pool.bytes_reserved == limit
    assert pool.counters.drained >= 16
    pool.deallocate(big)
    pool.close()


def test_report_M25_the_same_on_a_device_that_is_full(device: Any) -> None:
    sim = device(mib=66)
    pool = PoolResource(AsyncCudaResource())
    streams = [as_stream(sim.Stream()) for _ in range(17)]
    for stream in streams[1:]:
        block = pool.allocate(4 * MIB, stream)
        sim.fill_async(block.ptr, 3, block.nbytes, stream.handle)
        pool.deallocate(block)
    big = pool.allocate(64 * MIB, streams[0])
    pool.deallocate(big)
    pool.close()


def test_report_M27_growth_falls_back_to_the_exact_size(device: Any) -> None:
    device(mib=330)
    pool = PoolResource(AsyncCudaResource())
    first = pool.allocate(320 * MIB, 0)  # from now on a good page has 10 MiB
    second = pool.allocate(4 * MIB, 0)
    third = pool.allocate(5 * MIB, 0)
    assert pool.counters.fallbacks > 0 or pool.bytes_reserved <= 330 * MIB
    for block in (first, second, third):
        pool.deallocate(block)
    pool.close()
    limited = PoolResource(AsyncCudaResource(), max_bytes=SMALL_LIMIT)
    tiny = limited.allocate(1000, 0)
    assert limited.bytes_reserved <= SMALL_LIMIT
    assert limited.counters.fallbacks == 1
    limited.deallocate(tiny)
    limited.close()


SMALL_LIMIT = 64 * KIB


@pytest.mark.parametrize("layout", [None, [cuglue.Direct()], [cuglue.Sliced(MIB), cuglue.Direct()]], ids=str)
def test_report_M29_every_layout_retries(device: Any, layout: Any) -> None:
    device(mib=70)
    pool = PoolResource(AsyncCudaResource(), layout=layout)
    pool.deallocate(pool.allocate(60 * MIB, 0))
    pool.deallocate(pool.allocate(68 * MIB, 0))
    pool.close()


def test_report_M46_threads_on_their_own_streams_do_not_meet(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    streams = [as_stream(sim.Stream()) for _ in range(8)]
    for stream in streams:
        pool.deallocate(pool.allocate(MIB, stream))
    done = []

    def work(stream: Any) -> None:
        for _ in range(50):
            pool.deallocate(pool.allocate(MIB, stream))
        done.append(stream)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    with pool.homes.lock, faults.counts() as calls:  # a hit needs neither the pool's lock nor the driver
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(done) == 8
    assert not calls
    pool.close()


def test_report_M47_grows_before_it_steals(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource(), max_bytes=64 * MIB)
    streams = [as_stream(sim.Stream()) for _ in range(4)]
    with faults.counts() as calls:
        for stream in streams:
            block = pool.allocate(10 * MIB, stream)
            sim.fill_async(block.ptr, 1, block.nbytes, stream.handle)
            pool.deallocate(block)
    assert pool.counters.stolen == 0
    assert not any(name in calls for name in EVENTS)
    held = pool.allocate(30 * MIB, streams[0])  # in the place of the 10 MiB that were free there
    taken = pool.allocate(10 * MIB, as_stream(sim.Stream()))  # over the limit: 30 + 30 + 10
    sim.fill_async(taken.ptr, 2, taken.nbytes, taken.stream.handle)
    assert pool.counters.stolen == 1
    for block in (held, taken):
        pool.deallocate(block)
    pool.close()


def _filled(sim: Any, pool: PoolResource, stream: Any, nbytes: int) -> Any:
    block = pool.allocate(nbytes, stream)
    sim.fill_async(block.ptr, 1, nbytes, stream.handle)
    stream.submit()
    return block


def _quiet(pool: PoolResource) -> None:
    """Somebody looked at every stream just now: who gets no request until the next look is idle."""
    for home in pool.homes.all():
        home.looked = home.hits + home.misses


def test_report_M47_only_a_stream_without_work_lends_before_the_pool_grows(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    busy, idle, third = (as_stream(sim.Stream()) for _ in range(3))
    held = _filled(sim, pool, third, 80 * MIB)
    freed = [_filled(sim, pool, stream, 10 * MIB) for stream in (busy, idle)]
    for block in freed:
        pool.deallocate(block)
    sim.stream_synchronize(idle.handle)
    _quiet(pool)
    event = sim.event_create(0)
    for _ in range(100):  # each look at a stream runs one step of it
        sim.event_record(event, busy.handle)
    reserved = pool.bytes_reserved
    lent = _filled(sim, pool, third, 10 * MIB)
    assert pool.counters.stolen == 1
    assert lent.ptr == freed[1].ptr
    assert pool.bytes_reserved == reserved
    more = _filled(sim, pool, third, 10 * MIB)
    assert pool.counters.stolen == 1
    assert pool.bytes_reserved == reserved + 10 * MIB
    for block in (held, lent, more):
        pool.deallocate(block)
    sim.stream_synchronize(busy.handle)
    sim.event_destroy(event)
    pool.close()


def test_what_idle_streams_have_is_merged_before_the_pool_grows(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    one, two = (as_stream(sim.Stream()) for _ in range(2))
    held = _filled(sim, pool, two, 96 * MIB)
    page = _filled(sim, pool, one, 24 * MIB)
    pool.deallocate(page)
    parts = [_filled(sim, pool, one, 3 * MIB) for _ in range(8)]
    assert {part.ptr for part in parts} <= set(range(page.ptr, page.ptr + 24 * MIB, 3 * MIB))
    for part in parts:
        pool.deallocate(part)
    sim.stream_synchronize(one.handle)
    _quiet(pool)
    reserved = pool.bytes_reserved
    whole = _filled(sim, pool, two, 24 * MIB)
    assert whole.ptr == page.ptr
    assert pool.bytes_reserved == reserved
    assert pool.counters.stolen > 0
    for block in (held, whole):
        pool.deallocate(block)
    pool.close()


def test_a_stream_that_is_asked_for_memory_now_and_then_lends_nothing(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    one, two = (as_stream(sim.Stream()) for _ in range(2))
    held = [pool.allocate(96 * MIB, two)]
    for _ in range(3):
        pool.deallocate(pool.allocate(10 * MIB, one))
        sim.stream_synchronize(one.handle)
        held.append(pool.allocate(10 * MIB, two))
    assert pool.counters.stolen == 0
    held.append(pool.allocate(10 * MIB, two))  # the second look without a request in between
    assert pool.counters.stolen == 1
    for block in held:
        pool.deallocate(block)
    pool.close()


def test_a_stream_that_cannot_say_whether_it_has_work_lends_nothing(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    one, two = (as_stream(sim.Stream()) for _ in range(2))
    held = pool.allocate(96 * MIB, two)
    pool.deallocate(pool.allocate(10 * MIB, one))
    sim.stream_synchronize(one.handle)
    _quiet(pool)
    with faults.fail("stream_query", persistent=True):
        other = pool.allocate(10 * MIB, two)
    assert pool.counters.stolen == 0
    for block in (held, other):
        pool.deallocate(block)
    pool.close()


def test_a_wait_that_fails_lends_nothing_and_loses_nothing(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    one, two = (as_stream(sim.Stream()) for _ in range(2))
    held = pool.allocate(96 * MIB, two)
    pool.deallocate(pool.allocate(10 * MIB, one))
    sim.stream_synchronize(one.handle)
    _quiet(pool)
    cached = pool.free_spans()[0]
    with faults.fail("stream_wait_event"), pytest.raises(cuglue.errors.DriverError):
        pool.allocate(10 * MIB, two)
    assert pool.free_spans()[0] == cached
    assert pool.counters.stolen == 0
    pool.deallocate(held)
    pool.close()


def test_a_page_that_moved_is_given_back_after_the_work_of_its_last_stream(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    one, two = (as_stream(sim.Stream()) for _ in range(2))
    held = pool.allocate(96 * MIB, two)
    pool.deallocate(_filled(sim, pool, one, 10 * MIB))
    sim.stream_synchronize(one.handle)
    _quiet(pool)
    lent = _filled(sim, pool, two, 10 * MIB)
    assert pool.counters.stolen == 1
    pool.deallocate(lent)
    with faults.counts() as calls:
        assert pool.trim() == 10 * MIB
    assert calls["stream_wait_event"] >= 1, "the stream that it is freed on waits for the one that used it"
    pool.deallocate(held)
    pool.close()


def test_idle_streams_give_pages_back_that_do_not_fit(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    one, two = (as_stream(sim.Stream()) for _ in range(2))
    held = _filled(sim, pool, two, 96 * MIB)
    for block in [_filled(sim, pool, one, 5 * MIB) for _ in range(6)]:
        pool.deallocate(block)
    sim.stream_synchronize(one.handle)
    _quiet(pool)
    reserved = pool.bytes_reserved
    big = _filled(sim, pool, two, 20 * MIB)
    assert pool.counters.drained == 4, "no more than are needed"
    assert pool.counters.stolen == 0
    assert pool.bytes_reserved == reserved
    for block in (held, big):
        pool.deallocate(block)
    pool.close()


class Untracked(cuglue.DeviceMemoryResource):
    """Somebody's resource, which is told of no uses."""

    device_ordinal = 0

    def __init__(self) -> None:
        self.below = AsyncCudaResource()

    def allocate(self, nbytes: int, stream: object = None, tag: str = "") -> Any:
        return self.below.allocate(nbytes, stream, tag)

    def deallocate(self, block: Any) -> None:
        self.below.deallocate(block)

    @property
    def bytes_outstanding(self) -> int:
        return self.below.bytes_outstanding

    def close(self) -> None:
        self.below.close()


def test_pages_of_a_resource_that_is_told_of_no_uses_do_not_move(device: Any) -> None:
    sim = device()
    pool = PoolResource(Untracked())
    one, two = (as_stream(sim.Stream()) for _ in range(2))
    held = _filled(sim, pool, two, 96 * MIB)
    pool.deallocate(_filled(sim, pool, one, 10 * MIB))
    sim.stream_synchronize(one.handle)
    _quiet(pool)
    other = _filled(sim, pool, two, 10 * MIB)
    assert (pool.counters.stolen, pool.counters.drained) == (0, 1)
    for block in (held, other):
        pool.deallocate(block)
    pool.close()


def test_no_page_moves_to_a_stream_that_is_known_by_its_number(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    one, busy, number = as_stream(sim.Stream()), as_stream(sim.Stream()), sim.stream_create(0)
    held = _filled(sim, pool, busy, 96 * MIB)
    pool.deallocate(_filled(sim, pool, one, 10 * MIB))
    sim.stream_synchronize(one.handle)
    _quiet(pool)
    block = pool.allocate(10 * MIB, number)
    assert (pool.counters.stolen, pool.counters.drained) == (0, 1)
    for taken in (held, block):
        pool.deallocate(taken)
    pool.reap_pending()
    sim.device_synchronize(0)
    sim.stream_destroy(number)
    pool.close()


def test_doing_without_does_not_become_a_habit(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    one, two, busy = (as_stream(sim.Stream()) for _ in range(3))
    held = pool.allocate(100 * MIB, busy)
    for _ in range(100):  # one page is enough for both if it is taken over each time
        for stream in (one, two):
            pool.deallocate(_filled(sim, pool, stream, 10 * MIB))
            sim.stream_synchronize(stream.handle)
            _quiet(pool)
    assert pool.bytes_reserved == 120 * MIB, "now each has its own"
    assert 60 <= pool.counters.stolen <= 140
    pool.deallocate(held)
    pool.close()


def test_threads_whose_bins_are_empty_do_not_meet_either(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    streams = [as_stream(sim.Stream()) for _ in range(4)]
    for stream in streams:
        pool.deallocate(pool.allocate(15 * MIB, stream))
        pool.homes.of(stream).flush()
    done = []

    def work(stream: Any) -> None:
        done.append([pool.allocate(nbytes, stream) for nbytes in (4 * MIB, 5 * MIB, 5 * MIB)])

    threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    with pool.homes.lock:  # cutting up what its own stream has free needs no more than that stream's lock
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(done) == 4
    for blocks in done:
        for block in blocks:
            pool.deallocate(block)
    pool.close()


def test_a_stolen_piece_goes_home_when_memory_is_short(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource(), max_bytes=40 * MIB)
    one, two = as_stream(sim.Stream()), as_stream(sim.Stream())
    pool.deallocate(pool.allocate(40 * MIB, one))
    stolen = pool.allocate(10 * MIB, two)
    sim.fill_async(stolen.ptr, 1, stolen.nbytes, two.handle)
    assert pool.counters.stolen == 1
    pool.deallocate(stolen)
    whole = pool.allocate(40 * MIB, one)
    sim.fill_async(whole.ptr, 2, whole.nbytes, one.handle)
    pool.deallocate(whole)
    pool.close()


def test_report_M48_the_limit_is_the_pools_on_every_thread(driver: Any) -> None:
    pool = PoolResource(AsyncCudaResource(), max_bytes=MIB)
    seen: list[Any] = []

    def look() -> None:
        seen.append(pool.max_bytes)
        try:
            pool.allocate(2 * MIB, 0)
        except PoolCapacityExceeded as error:
            seen.append(error.capacity)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [MIB, MIB]
    pool.close()


def test_report_M48_a_stream_of_another_device_is_refused(device: Any) -> None:
    sim = device(devices=2)
    pool = PoolResource(AsyncCudaResource(0))
    with pytest.raises(cuglue.errors.StreamMisuse):
        pool.allocate(100, sim.Stream(1))
    pool.close()


def test_report_M49_what_the_pool_cannot_see_is_reported(device: Any) -> None:
    sim = device(mib=32)
    foreign = sim.malloc(20 * MIB, 0)
    pool = PoolResource(AsyncCudaResource())
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate(15 * MIB, 0)
    report = caught.value.report
    assert report.device_total - report.device_free - report.live - report.cached >= 20 * MIB
    sim.free(foreign, 0)
    pool.close()


def test_more_than_the_limit_is_refused_at_once(driver: Any) -> None:
    pool = PoolResource(AsyncCudaResource(), max_bytes=MIB)
    with faults.counts() as calls, pytest.raises(PoolCapacityExceeded) as caught:
        pool.allocate(MIB + 1, 0)
    assert (caught.value.requested, caught.value.capacity) == (MIB + 1, MIB)
    assert "malloc_async" not in calls
    assert "stream_synchronize" not in calls
    block = pool.allocate(MIB, 0)
    pool.deallocate(block)
    pool.close()


def test_arrays_in_cycles_are_collected_before_giving_up(device: Any) -> None:
    device()
    pool = PoolResource(AsyncCudaResource(), max_bytes=10 * MIB)
    gc.disable()
    try:
        cycle: list[Any] = [pool.malloc(8 * MIB)]
        cycle.append(cycle)
        del cycle
        pool.malloc(9 * MIB)
    finally:
        gc.enable()
    pool.close()


@pytest.mark.parametrize("around", [False, True], ids=["pool over budget", "budget over pool"])
def test_the_budget_both_ways_round(device: Any, around: bool) -> None:
    device()
    source = AsyncCudaResource()
    if around:
        resource: Any = GlobalDeviceBudget(PoolResource(source), 10 * MIB)
    else:
        resource = PoolResource(GlobalDeviceBudget(source, 10 * MIB))
    for size in (8, 3, 9, 10, 1, 10):
        block = resource.allocate(size * MIB, 0)
        resource.deallocate(block)
    held = resource.allocate(6 * MIB, 0)
    with pytest.raises(OutOfMemory) as caught:
        resource.allocate(6 * MIB, 0)
    assert isinstance(caught.value, OutOfBudget) or not around
    resource.deallocate(held)
    resource.reap_pending()
    assert resource.bytes_outstanding == 0
    snapshot = resource.budget_snapshot()
    assert snapshot.limit == 10 * MIB
    # a budget over a pool limits what is in use, one below it what is kept
    assert snapshot.reserved == (0 if around else resource.bytes_reserved)
    resource.close()


# --- giving back ----------------------------------------------------------------------------------------------------


def test_trim_gives_back_what_is_unused(driver: Any, new_stream: Callable[[], Any]) -> None:
    pool = PoolResource(AsyncCudaResource())
    stream = new_stream()
    held = [pool.allocate(5 * MIB, stream) for _ in range(6)]
    for block in held[:5]:
        pool.deallocate(block)
    before = pool.bytes_reserved
    freed = pool.trim()
    assert freed > 0
    assert pool.bytes_reserved == before - freed
    assert pool.counters.trimmed > 0
    pool.deallocate(held[5])
    assert pool.trim(keep=100 * MIB) == 0
    pool.trim()
    assert pool.bytes_reserved == 0
    pool.close()


def test_memory_unused_for_long_is_given_back(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource(), idle_seconds=60)
    now = [1000.0]
    pool.homes.clock = lambda: now[0]
    idle, busy = as_stream(sim.Stream()), as_stream(sim.Stream())
    pool.deallocate(pool.allocate(32 * MIB, idle))
    for _ in range(6):
        now[0] += 31
        block = pool.allocate((5 + int(now[0]) % 50) * MIB, busy)  # a request that no bin serves
        pool.deallocate(block)
    assert pool.counters.shrunk >= 1
    assert pool.homes.of(idle).reserved == 0
    pool.close()


def test_memory_unused_for_long_is_given_back_by_a_reap_too(device: Any) -> None:
    device()
    pool = PoolResource(AsyncCudaResource(), idle_seconds=60)
    now = [1000.0]
    pool.homes.clock = lambda: now[0]
    pool.deallocate(pool.allocate(32 * MIB, 0))
    for _ in range(5):
        now[0] += 31
        pool.reap_pending(block=False)
    assert pool.bytes_reserved == 0
    pool.close()


def test_a_stream_that_took_memory_over_is_not_let_go_with_it(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource(), max_bytes=40 * MIB)
    pool.deallocate(pool.allocate(40 * MIB, sim.Stream()))
    stolen = pool.allocate(10 * MIB, sim.Stream())
    assert pool.counters.stolen == 1
    for _ in range(100):
        pool.deallocate(pool.allocate(1000, sim.Stream()))
    pool.deallocate(stolen)
    pool.deallocate(pool.allocate(40 * MIB, 0))
    pool.close()


def test_streams_that_nothing_lives_on_are_let_go(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    for _ in range(200):
        pool.deallocate(pool.allocate(MIB, sim.Stream()))
    pool.reap_pending()
    gc.collect()
    cuglue.core.device.device_state(sim, 0).retire.run_forgotten()
    assert len(pool.homes.all()) <= 65
    assert sim.inventory()["streams"] < 80
    assert pool.counters.misses == 200
    pool.close()


def test_closing_gives_everything_back_and_refuses_the_rest(driver: Any) -> None:
    pool = PoolResource(AsyncCudaResource())
    pointer = pool.malloc(1000)
    with pytest.warns(ResourceWarning, match="1 pieces in use by CuPy arrays"):
        pool.close()
    pool.close()
    for call in (lambda: pool.malloc(100), lambda: pool.allocate(100)):
        with pytest.raises(ClosedError):
            call()
    assert pool.bytes_reserved > 0
    del pointer
    cuglue.core.device.device_state(driver, 0).retire.run_forgotten()
    assert pool.bytes_reserved == 0


def test_a_forgotten_pool_gives_its_pages_back(device: Any) -> None:
    sim = device()
    source = AsyncCudaResource()
    pool = PoolResource(source)
    pool.malloc(1000)
    del pool
    gc.collect()
    cuglue.core.device.device_state(sim, 0).retire.run_forgotten()
    source.reap_pending()
    assert source.bytes_outstanding == 0
    source.close()


def test_an_array_keeps_its_pool_alive(device: Any) -> None:
    sim = device()
    pointer = PoolResource(AsyncCudaResource()).malloc(1000)
    gc.collect()
    state = cuglue.core.device.device_state(sim, 0)
    state.retire.run_forgotten()
    assert sim.inventory()["malloc_async"] == 1
    del pointer
    gc.collect()
    state.retire.run_forgotten()
    assert sim.inventory()["malloc_async"] == 0


def test_the_end_of_the_process_is_quiet() -> None:
    code = """
import cuglue, cupy
cuglue.use_driver("sim")
pool = cuglue.PoolResource(cuglue.AsyncCudaResource())
cupy.cuda.set_allocator(pool.malloc)
plain, known = cupy.cuda.alloc(1000), cupy.cuda.alloc(5000)
known.mem.block
views = [cupy.cuda.alloc(1000) + 512, known + 512]
cycle = [cupy.cuda.alloc(70000)]
cycle.append(cycle)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_forked_child_is_refused() -> None:
    code = """
import os, cuglue
cuglue.use_driver("sim")
stream = cuglue.current_driver().Stream()
stream.__enter__()  # so that memory is kept for it
pool = cuglue.PoolResource(cuglue.AsyncCudaResource())
pool.malloc(1000)
child = os.fork()
if not child:
    try:
        pool.malloc(1000)
    except cuglue.errors.UsageError as error:
        os._exit(0 if "forked child" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
pool.malloc(1000)
pool.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


# --- graphs ---------------------------------------------------------------------------------------------------------


def test_growing_is_refused_while_the_stream_captures(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    stream = as_stream(sim.Stream())
    pool.deallocate(pool.allocate(MIB, stream))
    sim.capture_begin(stream.handle, cuglue.driver.protocol.CaptureMode.RELAXED)
    block = pool.allocate(MIB, stream)  # what is free may be used
    with pytest.raises(CaptureError):
        pool.allocate(50 * MIB, stream)
    pool.deallocate(block)
    sim.graph_destroy(sim.capture_end(stream.handle))
    pool.close()


def test_a_stream_that_is_known_and_a_graphs_memory_have_the_short_way(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = device()
    long_ways = []
    original = PoolResource.span_for
    monkeypatch.setattr(
        PoolResource, "span_for", lambda *arguments: long_ways.append(1) or original(*arguments)
    )
    pool = PoolResource(AsyncCudaResource())
    stream = sim.Stream()
    with stream:
        general = pool.malloc(MIB).ptr
        assert pool.malloc(MIB).ptr == general
        assert len(long_ways) == 1
        with pool.graph_memory(stream) as memory:
            apart = pool.malloc(MIB).ptr
            assert apart != general, "the general memory has such a piece, but not for the graph"
            assert pool.malloc(MIB).ptr == apart
            assert len(long_ways) == 2
        assert pool.malloc(MIB).ptr == general, "nor has the graph's memory for anybody else"
        assert len(long_ways) == 2
        memory.close()
    pool.close()


def test_a_streams_first_memory_may_be_a_graphs_and_is_not_anybodys_later(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    stream = sim.Stream()
    with stream, pool.graph_memory(stream) as memory:
        apart = pool.malloc(MIB).ptr
    with stream:
        assert pool.malloc(MIB).ptr != apart
    memory.close()
    pool.close()


def test_while_the_stream_captures_other_streams_and_pages_are_left_alone(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    stream, other, busy = (as_stream(sim.Stream()) for _ in range(3))
    held = pool.allocate(70 * MIB, busy)
    for nbytes, owner in ((10 * MIB, other), (9 * MIB, stream)):
        pool.deallocate(pool.allocate(nbytes, owner))
    sim.device_synchronize(0)
    _quiet(pool)
    reserved = pool.bytes_reserved
    sim.capture_begin(stream.handle, cuglue.driver.protocol.CaptureMode.RELAXED)
    with faults.counts() as calls, pytest.raises(CaptureError, match="take memory from upstream"):
        pool.allocate(10 * MIB, stream)  # the other stream has such a page, and nothing to do
    assert set(calls) <= {"capture_status"}
    assert pool.bytes_reserved == reserved
    sim.graph_destroy(sim.capture_end(stream.handle))
    block = pool.allocate(10 * MIB, stream)
    assert pool.counters.stolen == 1
    for one in (held, block):
        pool.deallocate(one)
    pool.close()


def test_memory_of_a_graph_stays_out_of_general_use(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource(), max_bytes=40 * MIB)
    stream = sim.Stream()
    with stream:
        before = pool.malloc(MIB)
        with pool.graph_memory(stream) as memory:
            used = {pool.malloc(MIB).ptr for _ in range(3)}
            inside = pool.malloc(2 * MIB)
            used.add(inside.ptr)
        assert memory.bytes_reserved >= 2 * MIB
        del inside
        others = [pool.malloc(MIB).ptr for _ in range(10)]
        assert not used & set(others)
        pool.trim()
        kept = memory.bytes_reserved
        assert kept >= 2 * MIB
        with pytest.raises(PoolCapacityExceeded):
            pool.malloc(40 * MIB)
        assert memory.bytes_reserved == kept
        memory.close()
        memory.close()
        assert memory.bytes_reserved == 0
        del before
        pool.malloc(40 * MIB)
    pool.close()


# --- counters -------------------------------------------------------------------------------------------------------


def test_counters_of_every_mechanism(device: Any) -> None:
    sim = device(mib=96)
    pool = PoolResource(AsyncCudaResource(), max_bytes=64 * MIB)
    now = [0.0]
    pool.homes.clock = lambda: now[0]
    streams = [as_stream(sim.Stream()) for _ in range(3)]
    choose = random.Random(3)
    held: list[Any] = []
    for turn in range(600):
        now[0] += 1
        if held and (len(held) > 12 or choose.random() < 0.4):
            pool.deallocate(held.pop(choose.randrange(len(held))))
        size = choose.choice([1000, 40_000, MIB, 3 * MIB, 5 * MIB, 9 * MIB]) + choose.randrange(3) * 512
        stream = streams[0] if turn % 200 < 150 else streams[turn % 3]
        try:
            block = pool.allocate(size, stream)
        except OutOfMemory:
            pool.deallocate(held.pop())
            continue
        sim.fill_async(block.ptr, 1, block.nbytes, stream.handle)
        held.append(block)
    for block in held:
        pool.deallocate(block)
    for size in range(5, 40, 3):
        pool.deallocate(pool.allocate(size * MIB, streams[0]))
    pool.trim()
    pool.deallocate(pool.allocate(MIB, streams[1]))
    for size in (10, 15, 20, 25):
        now[0] += 100
        pool.deallocate(pool.allocate(size * MIB, streams[2]))
    limited = PoolResource(pool.upstream, max_bytes=64 * KIB)
    limited.deallocate(limited.allocate(100, streams[0]))
    counters = pool.counters
    counters.fallbacks += limited.counters.fallbacks
    unused = [name for name in type(counters).__slots__ if not getattr(counters, name) and name != "extended"]
    assert unused == []
    limited.trim()
    pool.close()


@pytest.mark.parametrize("keep", [-1, 1.5, None, "0", True])
def test_trim_to_what_is_no_size(device: Any, keep: Any) -> None:
    device()
    with PoolResource(AsyncCudaResource()) as pool, pytest.raises(LayoutError):
        pool.trim(keep)
