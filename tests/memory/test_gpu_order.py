"""On a device, with CuPy's own kernels: what is ordered, and what is not without us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import pytest

import cuglue
from cuglue import Access, AsyncCudaResource, DirectCudaResource, LaunchRecorder, PoolResource, testing

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
