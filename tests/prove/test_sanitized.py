"""What runs under the four tools of compute-sanitizer: each way in which the library touches device memory, once.

On the simulated device they are tests as others; ``scripts/gpu_suite.py --part sanitize --tool all`` runs them under
memcheck, racecheck, initcheck and synccheck. Nothing here reads a byte that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from graphics.subjects import make_buffer, make_texture
from sample_kernels import INCREMENT, SAXPY

import cuglue
from cuglue import Access, In, InOut, Kernel, Out
from cuglue.graphics import image_copy
from cuglue.graphics.image_copy import CopyPath
from cuglue.memory.streams import OwnStream
from cuglue.testing.resource_case import ResourceCase

pytestmark = pytest.mark.timeout(300)

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.sanitize])

TOTAL = Kernel(
    "total",
    """
    extern "C" __global__ void total(const int* x, int* out) {
        __shared__ int part[64];
        part[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
        __syncthreads();
        for (int half = 32; half; half /= 2) {
            if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
            __syncthreads();
        }
        if (threadIdx.x == 0) out[blockIdx.x] = part[0];
    }""",
    sim=lambda grid, block, x, out: np.copyto(out, x.reshape(-1, 64).sum(axis=1)),
)


@pytest.fixture(params=["sim", CUDA])
def driver(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "cuda":
        yield cuglue.current_driver()
        return
    with cuglue.use_driver("sim") as simulated:
        yield simulated
        simulated.check()


RESOURCES: dict[str, Callable[[], cuglue.DeviceMemoryResource]] = {
    "synchronous": lambda: cuglue.DirectCudaResource(mode="sync"),
    "stream-ordered": cuglue.AsyncCudaResource,
    "pool": lambda: cuglue.PoolResource(cuglue.DirectCudaResource(mode="sync")),
    "guard": lambda: cuglue.DebugGuardResource(cuglue.DirectCudaResource(mode="sync")),
}


@pytest.mark.parametrize("kind", RESOURCES)
def test_blocks_of_all_sizes_on_two_streams(driver: Any, kind: str) -> None:
    case, mr = ResourceCase(), RESOURCES[kind]()
    one, two = case.stream(mr), case.stream(mr)
    for nbytes in (1, 17, 1000, 4096, 100_003):
        block = case.written(mr, nbytes, nbytes % 251, one)
        assert (case.contents(block, one) == nbytes % 251).all()
        if mr.supports_block_use_tracking():
            block.prepare(two, Access.WRITE)
            case.fill(block, 3, two)
            block.finish(two, Access.WRITE)
            assert (case.contents(block, two) == 3).all()
        mr.deallocate(block)
    mr.reap_pending()
    mr.close()


def test_launches_across_streams_a_capture_and_shared_memory(driver: Any) -> None:
    with cuglue.Runtime(driver=driver) as rt:
        lanes = [OwnStream(cuglue.as_stream(0).state) for _ in range(2)]
        x = rt.create(np.arange(256, dtype="f4"), stream=lanes[0])
        y, z, sums = rt.empty(1024), rt.create(np.arange(256, dtype="i4"), stream=lanes[1]), rt.empty(16)
        rt.launch(SAXPY, 2, 128, In(x), Out(y), 2.0, 256, stream=lanes[1])
        rt.launch(INCREMENT, 2, 128, InOut(z), 256, 5, stream=lanes[0])
        rt.launch(INCREMENT, 2, 128, InOut(z), 256, 0, stream=lanes[1])  # a capture waits for nobody
        with rt.capture(lanes[1]) as capture:
            rt.launch(INCREMENT, 2, 128, InOut(z), 256, 5, stream=lanes[1])
        capture.graph.replay(lanes[1])
        rt.launch(TOTAL, 4, 64, In(z), Out(sums), stream=lanes[0])
        expected = np.arange(256, dtype="i4") + 10
        assert np.asarray(rt.read(y, dtype="f4").result()).tolist() == [2.0 * i for i in range(256)]
        assert np.asarray(rt.read(z, dtype="i4").result()).tolist() == expected.tolist()
        got = np.asarray(rt.read(sums, dtype="i4").result())
        assert got.tolist() == expected.reshape(4, 64).sum(axis=1).tolist()
        capture.graph.close()
        for buffer in (x, y, z, sums):
            buffer.close()


@pytest.mark.gl
@pytest.mark.parametrize("size", [(16, 8), (37, 5)], ids=["wide words", "single texels"])
def test_image_and_buffer_maps(driver: Any, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    """Copied by our surface kernels."""
    monkeypatch.setattr(image_copy, "SMALL_BYTES", 0)
    with cuglue.gl.headless():
        for handle in (
            cuglue.register_texture(make_texture(*size)),
            cuglue.register_buffer(make_buffer(999)),
        ):
            with handle:
                assert handle.kind == "GlBuffer" or handle.copy_path is CopyPath.SURFACE
                data = np.arange(handle.size, dtype=np.uint32).astype("u1").reshape(handle.shape)
                handle.write(data)
                with handle.map_mut() as m:
                    m.driver.fill_async(m.device_ptr, 9, 64, m.stream.handle)
                got = handle.read()
                got = got if isinstance(got, np.ndarray) else got.get()
                data.reshape(-1)[:64] = 9
                np.testing.assert_array_equal(got, data)
