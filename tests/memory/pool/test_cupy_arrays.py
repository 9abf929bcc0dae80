"""CuPy's own arrays in a pool, on a real device."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

import cuglue
from cuglue import Access, AsyncCudaResource, DirectCudaResource, PoolResource, as_stream
from cuglue.memory.cupy_plug import block_of
from cuglue.testing import faults

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def settled(pool: PoolResource) -> None:
    gc.collect()
    cuglue.core.device.device_state(pool.driver, 0).retire.run_forgotten()
    pool.driver.device_synchronize(0)
    cuglue.core.device.device_state(pool.driver, 0).retire.drain(block=True)


@pytest.mark.parametrize(
    "source", [AsyncCudaResource, lambda: DirectCudaResource(mode="sync")], ids=["async", "sync"]
)
def test_arrays_compute_in_pool_memory(source: Any) -> None:
    import cupy as cp

    pool = PoolResource(source())
    with pool.as_cupy_allocator():
        x = cp.arange(1 << 18, dtype=cp.float32)
        for _ in range(20):
            y = (x * 2 + 1).reshape(512, 512) @ cp.eye(512, dtype=cp.float32)
        assert float(y[0, 1]) == 3.0
        assert block_of(y.data.mem).resource is pool  # type: ignore[union-attr]
        assert pool.counters.hits > 20
        view = y[::2, ::3]
        address = y.data.ptr
        del y
        assert float(view[0, 0]) == 1.0
        assert not any(b.ptr == address and b.state.value != "live" for b in pool.live_blocks())
        del x, view
    settled(pool)
    assert pool.bytes_outstanding == 0
    pool.close()


def test_a_hit_makes_no_driver_call_but_asks_for_the_stream() -> None:
    import cupy as cp

    pool = PoolResource(AsyncCudaResource())
    stream = cp.cuda.Stream(non_blocking=True)
    with pool.as_cupy_allocator(), stream:
        cp.cuda.alloc(MIB)
        malloc = pool.malloc
        with faults.counts() as calls:
            for _ in range(100):
                malloc(MIB)
        assert set(calls) <= {"stream_current"}
    settled(pool)
    pool.close()


def test_memory_of_an_array_used_elsewhere_is_not_written_too_early() -> None:
    import cupy as cp

    pool = PoolResource(AsyncCudaResource())
    home, other = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    with pool.as_cupy_allocator():
        with home:
            x = cp.full(MIB, 7, cp.uint8)
        out = cp.zeros(MIB, cp.uint8)
        cp.cuda.Device(0).synchronize()
        block = block_of(x.data.mem)
        assert block is not None
        block.prepare(as_stream(other), Access.READ)
        latch = cuglue.testing.Latch(as_stream(other))  # other stands still from here
        with other:
            out[:] = x
        block.finish(as_stream(other), Access.READ)
        address = x.data.ptr
        del x
        with home:
            z = cp.full(MIB, 9, cp.uint8)
        assert z.data.ptr == address
        latch.close()
        cp.cuda.Device(0).synchronize()
        assert int(out.min()) == int(out.max()) == 7
        assert int(z.min()) == 9
        del z, out, block
    settled(pool)
    pool.close()


def test_threads_with_streams_of_their_own() -> None:
    import cupy as cp

    pool = PoolResource(AsyncCudaResource(), max_bytes=512 * MIB)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with cp.cuda.Stream(non_blocking=True) as stream, pool.as_cupy_allocator():
                for turn in range(50):
                    x = cp.full(100_000 + 7000 * (turn % 5), number, cp.int32)
                    assert int((x + x).max()) == 2 * number
                stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    settled(pool)
    assert pool.bytes_outstanding == 0
    pool.close()


def test_an_error_is_cupys_too() -> None:
    import cupy as cp

    pool = PoolResource(AsyncCudaResource(), max_bytes=MIB)
    with pool.as_cupy_allocator(), pytest.raises(cp.cuda.memory.OutOfMemoryError):
        cp.zeros(2 * MIB, cp.uint8)
    pool.close()
