"""On a device, with CuPy's own kernels: what is ordered, and what is not without us."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import pytest

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    DirectCudaResource,
    LaunchRecorder,
    PoolResource,
    testing,
)
from cuglue.driver.protocol import CopyKind
from cuglue.errors import DriverError
from cuglue.memory.readback import read_back

pytestmark = pytest.mark.gpu
N = 1 << 20


@contextmanager
def allocating(malloc: Callable[[int], Any]) -> Iterator[None]:
    with cupy.cuda.using_allocator(malloc):
        yield


def two_streams() -> tuple[Any, Any]:
    return cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)


def warm_up() -> None:
    """Compile every kernel, so that none is compiled while a stream is held."""
    a = cupy.full(N, 3, "u1")
    b = cupy.empty_like(a)
    b[...] = a
    a += 1
    cupy.zeros(N, "f4")
    _ = cupy.zeros(4, "f4") + 1
    cupy.cuda.Device().synchronize()


def freed_under_a_reader(malloc: Callable[[int], Any], tell: bool) -> tuple[bool, int]:
    """Whether the address was used again, and the bytes that the other stream saw wrong."""
    home, reader = two_streams()
    with allocating(malloc):
        warm_up()
        with reader:
            seen = cupy.zeros(N, "u1")
        with home:
            a = cupy.full(N, 1, "u1")
        home.synchronize()
        reader.synchronize()
        with testing.Latch(reader.ptr) as latch:
            with reader:
                seen[...] = a
            if tell:
                cuglue.use(a, reader, Access.READ)
            address = a.data.ptr
            del a
            with home:
                b = cupy.full(N, 2, "u1")
            again = b.data.ptr == address
            latch.release()
        reader.synchronize()
        home.synchronize()
        wrong = int((seen != 1).sum())
        del b, seen
    return again, wrong


def test_report_M01_cupys_own_pool_gives_memory_away_under_a_reader() -> None:
    """Shown, so that the next test means something."""
    pool = cupy.cuda.MemoryPool()
    again, wrong = freed_under_a_reader(pool.malloc, tell=False)
    assert again
    assert wrong == N


@pytest.mark.parametrize(
    "make", [AsyncCudaResource, DirectCudaResource, lambda: PoolResource(AsyncCudaResource())]
)
def test_report_M01_ours_does_not(make: Callable[[], Any]) -> None:
    resource = make()
    for _ in range(3):
        _, wrong = freed_under_a_reader(resource.malloc, tell=True)
        assert wrong == 0


def test_a_launch_elsewhere_sees_what_cupy_queued_before() -> None:
    """``with s1: a = zeros(n)`` held back; what reads ``a`` on s2 sees the zeros."""
    resource = AsyncCudaResource()
    s1, s2 = two_streams()
    with allocating(resource.malloc):
        warm_up()
        with testing.Latch(s1.ptr) as latch:
            with s1:
                a = cupy.zeros(N, "f4")
            cuglue.use(a, s2, Access.READ)
            with s2:
                b = a + 1
            assert not s2.done
            latch.release()
        s2.synchronize()
        assert float(b.sum()) == N
        del a, b


def test_plain_cupy_afterwards_sees_what_was_launched_elsewhere() -> None:
    resource = AsyncCudaResource()
    s1, s2 = two_streams()
    with allocating(resource.malloc):
        warm_up()
        with s1:
            a = cupy.zeros(N, "u1")
            b = cupy.zeros(N, "u1")
        s1.synchronize()
        with testing.Latch(s2.ptr) as latch:
            with LaunchRecorder(s2).read_write(a), s2:
                a += 1
            with s1:
                b[...] = a
            assert not s1.done
            latch.release()
        s1.synchronize()
        assert int(b.sum()) == N
        del a, b


def test_the_context_covers_streams_that_were_destroyed() -> None:
    """What joins the whole context also comes after work of streams that nobody can name any more."""
    driver = cuglue.current_driver()
    if not driver.capabilities(0).context_events:
        with pytest.raises(DriverError):
            driver.context_record(driver.event_create(0), 0)
        return
    pinned = cuglue.PinnedHostResource()
    word = pinned.allocate(4096)
    seen = pinned.view(word)
    seen[:] = bytes(4096)
    source, target = AsyncCudaResource(), cuglue.as_stream(two_streams()[0])
    block = source.allocate(4096, target)
    driver.fill_async(block.ptr, 1, 4096, target.handle)
    target.synchronize()
    event, gone = driver.event_create(0), driver.stream_create(0)
    with testing.Latch(gone) as latch:
        driver.fill_async(block.ptr, 2, 4096, gone)
        driver.stream_destroy(gone)
        driver.context_record(event, 0)
        driver.stream_wait_event(target.handle, event)
        driver.copy_async(word.ptr, block.ptr, 4096, CopyKind.D2H, target.handle)
        time.sleep(0.05)
        early = driver.event_query(event), bytes(seen[:1])
        latch.release()
    target.submit()
    target.synchronize()
    assert early == (False, b"\0"), "an event of the context left out a destroyed stream"
    assert bytes(seen) == b"\2" * 4096
    driver.event_destroy(event)
    source.deallocate(block)
    source.reap_pending()
    pinned.deallocate(word)
    pinned.reap_pending()


def test_a_free_comes_after_a_use_on_a_stream_known_by_number_and_destroyed_since() -> None:
    driver = cuglue.current_driver()
    source = AsyncCudaResource()
    home = cuglue.as_stream(two_streams()[0])
    copy = source.allocate(4096, home)
    block = source.allocate(4096, home)
    driver.fill_async(block.ptr, 1, 4096, home.handle)
    home.submit()
    home.synchronize()
    gone = driver.stream_create(0)
    with testing.Latch(gone) as latch:
        driver.copy_async(copy.ptr, block.ptr, 4096, CopyKind.D2D, gone)
        source.record_block_use(block, gone)
        driver.stream_destroy(gone)
        source.deallocate(block)
        other = source.allocate(4096, home)
        driver.fill_async(other.ptr, 2, 4096, home.handle)
        home.submit()
        time.sleep(0.05)
        ran_on = home.query()
        latch.release()
    (seen,) = read_back(home, (copy.ptr, 4096))
    assert not ran_on, "the free did not wait for the destroyed stream"
    assert (seen == 1).all()
    for left in (copy, other):
        source.deallocate(left)
    source.reap_pending()


def test_views_and_round_trips_reach_the_block() -> None:
    resource = AsyncCudaResource()
    with allocating(resource.malloc):
        a = cupy.zeros((64, 64), "f4")
        block = a.data.mem
        for view in (a[1:], a.T, cupy.asarray(a[::2]), cupy.from_dlpack(a), cupy.ascontiguousarray(a)):
            from cuglue.memory.lookup import block_behind

            assert block_behind(view) is block
        del a, view, block


def test_computing_with_every_allocator() -> None:
    """Reductions, sorts and products take work space from the allocator too."""
    for make in (AsyncCudaResource, DirectCudaResource, lambda: DirectCudaResource(mode="sync")):
        resource = make()
        with resource.as_cupy_allocator():
            x = cupy.arange(10_000, dtype="f4")
            assert float(x.sum()) == float(sum(range(10_000)))
            assert bool((cupy.sort(x[::-1]) == x).all())
            m = cupy.ones((64, 64), "f4")
            assert float((m @ m).sum()) == 64.0**3
            del x, m
        cuglue.as_stream(0).state.retire.drain()
        resource.reap_pending()
        assert resource.bytes_outstanding == 0


@pytest.mark.sanitize
def test_memory_is_used_within_its_bounds() -> None:
    """Run under compute-sanitizer too: over the synchronous path it sees each block by itself."""
    resource = DirectCudaResource(mode="sync")
    with resource.as_cupy_allocator():
        x = cupy.arange(1000, dtype="u1")
        y = x[::-1].copy()
        assert int(y[0]) == int(x[-1])
        del x, y
    cuglue.as_stream(0).state.retire.drain()
    resource.close()
