"""Operands of every maker: maps, views, CuPy arrays, torch tensors, strangers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from driver_calls import recorded
from sample_kernels import INCREMENT, SAXPY

import cuglue
from cuglue import In, InOut, Kernel, Out, Runtime
from cuglue.command.makers import operand_of
from cuglue.command.operands import Place
from cuglue.core.block import Block
from cuglue.driver.sim import SimDriver
from cuglue.errors import ClosedError, LaunchError, StreamMisuse, UsageError

N = 256

INVERT = Kernel(
    "invert",
    """extern "C" __global__ void invert(unsigned char* image, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) image[i] = 255 - image[i];
    }""",
    sim=lambda grid, block, image, n: np.subtract(255, image, out=image),
)


# --- maps -------------------------------------------------------------------------------------------------------


@pytest.fixture
def texture(driver: Any) -> Iterator[Any]:
    """A 16x8 RGBA8 texture of a headless context, and its pixels."""
    from cuglue.graphics.glcontext import headless

    with headless():
        from OpenGL import GL

        pixels = np.arange(16 * 8 * 4, dtype="u1").reshape(8, 16, 4)
        name = int(GL.glGenTextures(1))
        GL.glBindTexture(GL.GL_TEXTURE_2D, name)
        GL.glTexImage2D(GL.GL_TEXTURE_2D, 0, GL.GL_RGBA8, 16, 8, 0, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, pixels)
        handle = cuglue.register_texture(name, GL.GL_TEXTURE_2D)
        yield handle, pixels
        handle.close()
        GL.glDeleteTextures([name])


@pytest.mark.gl
def test_a_map_of_a_buffer_is_bytes_that_any_pointer_may_take(rt: Runtime) -> None:
    from cuglue.graphics.glcontext import headless

    with headless():
        from OpenGL import GL

        name = int(GL.glGenBuffers(1))
        GL.glBindBuffer(GL.GL_ARRAY_BUFFER, name)
        GL.glBufferData(GL.GL_ARRAY_BUFFER, 4 * N, np.arange(N, dtype="i4"), GL.GL_DYNAMIC_DRAW)
        with cuglue.register_buffer(name) as handle:
            with handle.map_mut() as m:
                rt.launch(INCREMENT, 1, N, InOut(m), N, 1)
            with handle.map() as m:
                np.testing.assert_array_equal(m.numpy().view("i4"), np.arange(N) + 1)
        GL.glDeleteBuffers(1, [name])


@pytest.mark.gl
def test_a_kernel_on_a_mapped_texture(rt: Runtime, texture: Any) -> None:
    handle, pixels = texture
    with handle.map_mut() as m:
        rt.launch(INVERT, 2, 256, InOut(m), m.size)
    with handle.map() as m:
        np.testing.assert_array_equal(m.numpy(), 255 - pixels)


@pytest.mark.gl
def test_a_map_used_on_another_stream_is_ordered_both_ways(rt: Runtime, texture: Any) -> None:
    handle, pixels = texture
    out = rt.empty(pixels.size)
    with handle.map_mut(stream=rt.stream(1)) as m:
        with rt.command(InOut(m), stream=rt.stream(2)) as cmd:
            cmd.kernel(INVERT, 2, 256, m, m.size)
            before = cmd.read_async(cuglue.CopyDescriptor(m, m.shape, (64, 4, 1), 1, np.dtype("u1")))
        np.testing.assert_array_equal(np.asarray(before.result()), 255 - pixels)
    out.close()
    with handle.map(stream=rt.stream(1)) as m:
        np.testing.assert_array_equal(m.numpy(), 255 - pixels)


@pytest.mark.gl
def test_a_map_that_was_left_is_no_operand(rt: Runtime, texture: Any) -> None:
    handle, _ = texture
    with handle.map() as m:
        pass
    with pytest.raises(ClosedError):
        rt.launch(INVERT, 1, 1, InOut(m), 1)
    with handle.map(readonly=True) as m, pytest.raises(UsageError, match="read-only"):
        rt.launch(INVERT, 1, 1, InOut(m), 1)


def test_a_view_of_memory_that_is_gone_is_no_operand() -> None:
    with Runtime(driver="sim") as rt:
        x = rt.create(np.zeros(N, "i4"))
        view = x.array((N,), "i4")
        x.block.advance("deallocate")
        with pytest.raises(ClosedError):
            rt.launch(INCREMENT, 1, N, InOut(view), N, 1)


# --- CuPy and torch ---------------------------------------------------------------------------------------------


class FakeMemory(Block):
    """What stands behind a CuPy array that one of our resources allocated."""


def cupy_like(sim: SimDriver, memory: Any, data: np.ndarray[Any, Any]) -> Any:
    """An object with the attributes of a CuPy array that are read, over simulated memory."""

    class Pointer:
        mem = memory
        ptr = memory.ptr

    class Array:
        pass

    Array.__module__ = "cupy"
    Array.data = Pointer()  # type: ignore[attr-defined]
    array = Array()
    for name in ("shape", "dtype", "strides", "nbytes", "flags"):
        setattr(array, name, getattr(data, name))
    sim.host_view(memory.ptr, data.nbytes, True)[:] = data.tobytes()
    return array


@pytest.fixture
def place(sim: SimDriver) -> Place:
    return Place(sim, 0, 0)


def test_a_cupy_array_of_ours_is_tracked_and_ordered_with_home_and_current(sim: SimDriver) -> None:
    with Runtime() as rt:
        home, current, other = sim.Stream(), sim.Stream(), rt.stream(1)
        block = FakeMemory(sim.malloc(4 * N, 0), 4 * N, cuglue.as_stream(home))
        array = cupy_like(sim, block, np.zeros(N, "i4"))
        with current:
            with recorded(sim) as calls:
                rt.launch(INCREMENT, 1, N, InOut(array), N, 1, stream=other)
                rt.launch(INCREMENT, 1, N, InOut(array), N, 1, stream=other)
            # Nobody knows what CuPy submits: both streams are joined before and after, every time.
            assert calls.count("stream_wait_event") == 8
            sim.fill_async(block.ptr, 3, 4 * N, current.ptr)  # CuPy goes on without a wait of its own
            assert block.write_stream is other
            assert set(rt.read(array, dtype="u1", stream=rt.stream(2)).result()) == {3}
        with home:
            assert set(rt.read(array, dtype="u1").result()) == {3}
        sim.free(block.ptr, 0)


def test_a_cupy_array_on_its_own_current_stream_needs_nothing(sim: SimDriver) -> None:
    with Runtime() as rt, sim.Stream() as current:
        block = FakeMemory(sim.malloc(4 * N, 0), 4 * N, cuglue.as_stream(current))
        array = cupy_like(sim, block, np.zeros(N, "i4"))
        with recorded(sim) as calls:
            rt.launch(INCREMENT, 1, N, InOut(array), N, 1)
        assert calls.count("stream_wait_event") == calls.count("event_record") == 0
        rt.synchronize()
        sim.free(block.ptr, 0)


def test_an_array_made_from_a_buffer_or_a_view_has_its_block(sim: SimDriver) -> None:
    class Unowned:
        """CuPy's memory object over memory that it was given."""

        __module__ = "cupy.cuda.memory"

        def __init__(self, ptr: int, owner: Any) -> None:
            self.ptr, self.size, self.device_id, self._owner = ptr, 4 * N, 0, owner

    with Runtime() as rt:
        x = rt.create(np.zeros(N, "i4"), stream=rt.stream(1))
        rt.synchronize()
        view = x.array((N,), "i4")
        by_token = Unowned(x.ptr, x.storage.ledger.issue(x.storage, "cupy()"))  # what view.cupy() makes
        by_interface = Unowned(x.ptr, view)  # what cupy.asarray(view) makes
        for memory in (by_token, by_interface):
            array = cupy_like(sim, memory, np.zeros(N, "i4"))
            rt.launch(INCREMENT, 1, N, InOut(array), N, 1, stream=rt.stream(2), strict=True)
            assert x.block.write_stream is rt.stream(2)
            rt.synchronize()
        assert set(rt.read(x, dtype="i4").result()) == {1}
        del by_token, by_interface, memory, array


def test_who_reads_the_array_interface_of_a_buffer_is_joined_on_the_current_stream(sim: SimDriver) -> None:
    with Runtime() as rt:
        x = rt.create(np.zeros(N, "i4"), stream=rt.stream(1))
        x.storage.note_cai_reader()  # streams that nobody named may use it
        assert (x.storage.cai_read, x.storage.exported) == (True, True)
        rt.synchronize()
        with recorded(sim) as calls:
            rt.launch(INCREMENT, 1, N, InOut(x), N, 1, stream=rt.stream(1))
        current = rt._place.current()
        waits = [(call.args[0] == current.handle) for call in calls.of("stream_wait_event")]
        assert sorted(waits) == [False, True]  # it waits for the current stream, and that waits for it


def test_memory_that_nobody_tracks(sim: SimDriver) -> None:
    class Foreign:
        def __init__(self, ptr: int) -> None:
            self.ptr = ptr
            self.size = 4 * N
            self.device_id = 0

    with Runtime() as rt:
        memory = Foreign(sim.malloc(4 * N, 0))
        array = cupy_like(sim, memory, np.zeros(N, "i4"))
        with recorded(sim) as calls:
            rt.launch(INCREMENT, 1, N, InOut(array), N, 1, stream=rt.stream(1))
            assert calls.count("stream_wait_event") == 2
            calls.clear()
            with pytest.raises(StreamMisuse, match="untracked buffer rejected"):
                rt.launch(INCREMENT, 1, N, InOut(array), N, 1, stream=rt.stream(1), strict=True)
            assert calls.count("stream_wait_event") == calls.count("kernel_launch") == 0
        rt.synchronize()
        sim.free(memory.ptr, 0)


def test_a_stranger_by_its_array_interface(sim: SimDriver) -> None:
    ptr = sim.malloc(4 * N, 0)
    named = sim.Stream()

    class Stranger:
        readonly = False

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {
                "shape": (N,),
                "typestr": "<i4",
                "data": (ptr, self.readonly),
                "strides": None,
                "version": 3,
                "stream": named.ptr,
            }

    with Runtime() as rt:
        stranger = Stranger()
        sim.fill_async(ptr, 0, 4 * N, named.ptr)
        rt.launch(INCREMENT, 1, N, InOut(stranger), N, 5, stream=rt.stream(1))
        sim.fill_async(ptr, 7, 4, named.ptr)
        assert rt.read(stranger, (N,), "i4", stream=rt.stream(2)).result().tolist()[1:] == [5] * (N - 1)
        Stranger.readonly = True
        with pytest.raises(UsageError, match="read-only"):
            rt.launch(INCREMENT, 1, N, Out(stranger), N, 5)
        with pytest.raises(UsageError, match="without a declaration"):
            rt.launch(INCREMENT, 1, N, stranger, N, 5)
        sim.free(ptr, 0)


def test_makers_are_found_once_for_each_type(place: Place) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match=r"runtime\.create"):
            operand_of(np.zeros(3), place)
        with pytest.raises(UsageError, match="operand of type str"):
            operand_of("x", place)


@pytest.mark.gpu
def test_cupy_arrays_in_and_out() -> None:
    import cupy as cp

    with cuglue.AsyncCudaResource() as resource, Runtime(driver="cuda") as rt:
        for allocator in (resource.malloc, cp.get_default_memory_pool().malloc):
            with cp.cuda.using_allocator(allocator), cp.cuda.Stream(non_blocking=True):
                x = cp.arange(N, dtype="f4")
                y = cp.zeros(N, dtype="f4")
                rt.launch(SAXPY, 1, N, In(x), Out(y), 3.0, N, stream=rt.stream(1))
                y += 1
                np.testing.assert_array_equal(cp.asnumpy(y), 3 * np.arange(N, dtype="f4") + 1)
                rt.launch(SAXPY, 1, N // 2, In(x[N // 2 :]), Out(y[: N // 2]), 1.0, N // 2)
                np.testing.assert_array_equal(cp.asnumpy(y)[: N // 2], np.arange(N // 2, N))
                with pytest.raises(UsageError, match="without a declaration"):
                    rt.launch(SAXPY, 1, N, x, Out(y), 1.0, N)
                del x, y
        cp.cuda.Device().synchronize()


@pytest.mark.gpu
def test_arrays_made_from_buffers_are_the_buffers() -> None:
    import cupy as cp

    with Runtime(driver="cuda") as rt:
        x = rt.create(np.zeros(N, "i4"), stream=rt.stream(1))
        view = x.array((N,), "i4")
        for array in (view.cupy(), cp.asarray(view), cp.from_dlpack(view)):
            array += 1
            rt.launch(INCREMENT, 1, N, InOut(array), N, 1, stream=rt.stream(2))
            array += 1
        for array in (view.cupy(), cp.asarray(view)):
            rt.launch(INCREMENT, 1, N, InOut(array), N, 1, stream=rt.stream(2), strict=True)
        assert set(rt.read(x, dtype="i4").result()) == {11}


@pytest.mark.gpu
@pytest.mark.interop
def test_torch_tensors() -> None:
    import torch

    with Runtime(driver="cuda") as rt:
        stream = rt.stream(1)
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.arange(N, dtype=torch.float32, device="cuda")
            y = torch.zeros(N, dtype=torch.float32, device="cuda")
            for _ in range(3):
                rt.launch(SAXPY, 1, N, In(x), Out(y), 2.0, N, stream=stream)
                x += y
            np.testing.assert_array_equal(x.cpu().numpy(), 27 * np.arange(N, dtype="f4"))
        buffer = rt.create(np.zeros(N, "i4"), stream=stream)
        tensor = torch.from_dlpack(buffer.array((N,), "i4"))
        rt.launch(INCREMENT, 1, N, InOut(tensor), N, 4, stream=stream, strict=True)
        assert buffer.block.write_stream is stream
        assert set(tensor.tolist()) == {4}
        for bad, says in ((x.cpu(), "cpu"), (x.double(), "float64"), (x.reshape(16, -1).T, "gaps")):
            with pytest.raises((UsageError, LaunchError), match=says):
                rt.launch(SAXPY, 1, N, In(bad), Out(y), 2.0, N)


@pytest.mark.gpu
def test_raw_kernels_and_functions_of_raw_modules() -> None:
    import cupy as cp

    with Runtime(driver="cuda") as rt:
        raw = cp.RawKernel(SAXPY.source, "saxpy")
        module = cp.RawModule(
            code="template <typename T> __global__ void twice(T* x) { x[threadIdx.x] *= 2; }",
            name_expressions=["twice<int>"],
            options=("--std=c++17",),
        )
        x, y = rt.create(np.arange(N, dtype="f4")), rt.empty(4 * N)
        rt.launch(raw, 1, N, In(x), Out(y), np.float32(2), np.int32(N))
        np.testing.assert_array_equal(np.asarray(rt.read(y, dtype="f4").result()), 2 * np.arange(N))
        z = rt.create(np.arange(N, dtype="i4"))
        rt.launch(module.get_function("twice<int>"), 1, N, InOut(z))
        np.testing.assert_array_equal(np.asarray(rt.read(z, dtype="i4").result()), 2 * np.arange(N))


@pytest.mark.gpu
def test_reports_1_an_array_dropped_while_another_stream_reads_it() -> None:
    """cupy#8068: allocated on A, read by a kernel on B, dropped, its memory reused on A while B still runs."""
    import cupy as cp

    from cuglue.testing import Latch

    with cuglue.AsyncCudaResource() as resource, Runtime(driver="cuda") as rt, resource.as_cupy_allocator():
        a, b = cp.cuda.Stream(non_blocking=True), rt.stream(1)
        y = rt.empty(4 * N, stream=b)
        with a:
            x = cp.full(N, 5, dtype="f4")
            with Latch(b):
                rt.launch(SAXPY, 1, N, In(x), Out(y), 1.0, N, stream=b)
                del x
                later = [cp.full(N, 9, dtype="f4") for _ in range(4)]
            np.testing.assert_array_equal(
                np.asarray(rt.read(y, dtype="f4", stream=b).result()), np.full(N, 5)
            )
            a.synchronize()
            del later
