"""Maps on a CUDA device, with the libraries people use there: the main job, and its order proved by held streams."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.subjects import (
    download,
    make_buffer,
    make_texture,
    registered_buffer,
    registered_texture,
    upload,
)

import cuglue
from cuglue.driver.protocol import Driver
from cuglue.errors import BusyError, CaptureError, DanglingExportWarning
from cuglue.graphics import image_copy, users
from cuglue.graphics.glcontext import GlContext, headless
from cuglue.graphics.image_copy import CopyPath
from cuglue.testing import Latch, trace

pytestmark = [pytest.mark.gpu, pytest.mark.gl]

KERNELS = {
    "invert": """
extern "C" __global__ void invert(uchar4* image, int texels)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < texels) {
        uchar4 t = image[i];
        image[i] = make_uchar4(255 - t.x, 255 - t.y, 255 - t.z, t.w);
    }
}
"""
}


@pytest.fixture(autouse=True)
def _context(driver: Driver, context: GlContext) -> None:
    pass


@pytest.fixture
def cp() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def torch() -> Any:
    """PyTorch, its kernels loaded: loading one waits for the device, and so for a stream that a test holds."""
    loaded = pytest.importorskip("torch")
    tensor = loaded.zeros(16, dtype=loaded.uint8, device="cuda")
    tensor ^= 255
    tensor[...] = 1
    tensor.clone()
    return loaded


def picture(width: int = 640, height: int = 480, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 4), np.uint8)


# --- the main job ---------------------------------------------------------------------------------------------


def test_the_main_job(driver: Driver, cp: Any, torch: Any) -> None:
    """OpenGL draws, CuPy and PyTorch see the same memory, a kernel changes it, OpenGL shows the change."""
    pixels, name = picture(), make_texture(640, 480)
    upload(name, pixels)
    with cuglue.register_texture(name, GL.GL_TEXTURE_2D) as image:
        assert image.copy_path is CopyPath.SURFACE
        with image.map() as m:
            array, tensor = cp.asarray(m), torch.from_dlpack(m)
            assert array.data.ptr == tensor.data_ptr() == m.device_ptr
            assert (array.shape, tuple(tensor.shape)) == ((480, 640, 4), (480, 640, 4))
            assert tensor.is_cuda
            np.testing.assert_array_equal(array.get(), pixels)
            np.testing.assert_array_equal(tensor.cpu().numpy(), pixels)
            del array, tensor
        kernel = cp.RawKernel(KERNELS["invert"], "invert")
        with image.map_mut() as m:
            kernel((-(-640 * 480 // 256),), (256,), (cp.asarray(m), 640 * 480))
        expected = pixels.copy()
        expected[..., :3] ^= 255
        np.testing.assert_array_equal(download(name, 640, 480), expected)
        np.testing.assert_array_equal(image.read().get(), expected)
        image.write(pixels)
        np.testing.assert_array_equal(download(name, 640, 480), pixels)
        image.write(cp.asarray(expected))
        np.testing.assert_array_equal(download(name, 640, 480), expected)
        image.write(torch.from_numpy(pixels).cuda())
        np.testing.assert_array_equal(download(name, 640, 480), pixels)


@pytest.mark.parametrize("path", list(CopyPath))
@pytest.mark.parametrize(("width", "height"), [(1920, 1080), (1366, 768), (333, 777)])
def test_large_images(
    driver: Driver, cp: Any, monkeypatch: pytest.MonkeyPatch, path: CopyPath, width: int, height: int
) -> None:
    monkeypatch.setattr(image_copy, "SMALL_BYTES", 0 if path is CopyPath.SURFACE else 1 << 40)
    pixels, name = picture(width, height), make_texture(width, height)
    upload(name, pixels)
    with cuglue.register_texture(name) as image:
        np.testing.assert_array_equal(image.read().get(), pixels)
        image.write(cp.asarray(pixels[::-1]))
        np.testing.assert_array_equal(download(name, width, height), pixels[::-1])
    GL.glDeleteTextures([name])


def test_a_buffer_is_the_object_s_own_memory(driver: Driver, cp: Any, torch: Any) -> None:
    with registered_buffer(driver, 4096) as subject:
        with subject.handle.map_mut() as m:
            cp.asarray(m)[...] = 7
            torch.as_tensor(m, device="cuda")[:16] = 9
        assert (subject.get() == np.repeat([9, 7], [16, 4080])).all()


def test_consumers_get_typed_arrays(driver: Driver, cp: Any, torch: Any) -> None:
    name = make_texture(64, 48, "RGBA32F")
    with cuglue.register_texture(name) as image:
        with image.map_mut() as m:
            array = m.cupy()
            assert (array.dtype, array.shape) == (np.float32, (48, 64, 4))
            array[...] = 0.5
            tensor = m.torch()
            assert tensor.dtype is torch.float32
            tensor[0] = 2.0
            del array, tensor
        expected = np.full((48, 64, 4), 0.5, np.float32)
        expected[0] = 2.0
        np.testing.assert_array_equal(image.read().get(), expected)


def by_numba(m: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy about Numba, at its import
        from numba import cuda
    return cuda.as_cuda_array(m).copy_to_host()


def by_jax(m: Any) -> Any:
    import jax

    return np.asarray(jax.dlpack.from_dlpack(m))


def by_cuda_core(m: Any) -> Any:
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_any_interface(m, stream_ptr=-1)
    assert (view.ptr, view.shape, view.readonly) == (m.device_ptr, m.shape, False)
    return m.numpy()


CONSUMERS = {
    "numpy": lambda m: m.numpy(),
    "cupy": lambda m: m.cupy().get(),
    "torch": lambda m: m.torch().cpu().numpy(),
    "numba": by_numba,
    "jax": by_jax,
    "cuda.core": by_cuda_core,
}


@pytest.mark.parametrize("library", CONSUMERS)
def test_every_library_takes_a_map(driver: Driver, cp: Any, library: str) -> None:
    """moderngl's textures are the other side: tests/graphics/test_handle_register.py."""
    pixels, name = picture(64, 48), make_texture(64, 48)
    upload(name, pixels)
    with cuglue.register_texture(name) as image, image.map() as m:
        np.testing.assert_array_equal(CONSUMERS[library](m), pixels)
        gc.collect()
    GL.glDeleteTextures([name])


def test_readonly_maps(driver: Driver, cp: Any, torch: Any) -> None:
    """PyTorch would raise on the array interface's flag, so there is none."""
    with registered_texture(driver) as subject, subject.handle.map(readonly=True) as m:
        assert not hasattr(m, "__cuda_array_interface__")
        assert torch.from_dlpack(m).data_ptr() == m.device_ptr
        assert m.cupy().data.ptr == m.device_ptr
        assert cp.from_dlpack(m).data.ptr == m.device_ptr


def test_the_array_interface(driver: Driver, cp: Any) -> None:
    with registered_texture(driver) as subject, subject.handle.map() as m:
        fields = m.__cuda_array_interface__
        assert fields == m.__cuda_array_interface__
        assert fields["data"] == (m.device_ptr, False)
        assert (fields["shape"], fields["typestr"], fields["strides"]) == (m.shape, "|u1", None)
        assert (fields["version"], fields["stream"]) == (3, None)
        assert m.__dlpack_device__() == (2, m.device)
        with pytest.raises(TypeError):
            np.asarray(m)


# --- order, proved by a stream that is held -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["record", "cupy", "torch"])
def test_A15_publishing_waits_for_writers_on_other_streams(
    driver: Driver, cp: Any, torch: Any, how: str
) -> None:
    """The writer cannot have run when the map is left, for its stream is held; yet OpenGL gets what it wrote."""
    pixels, name = picture(), make_texture(640, 480)
    upload(name, pixels)
    with cuglue.register_texture(name) as image:
        stream = torch.cuda.Stream() if how == "torch" else cp.cuda.Stream(non_blocking=True)
        with image.map_mut(cp.cuda.Stream(non_blocking=True)) as m:
            with torch.cuda.stream(stream) if how == "torch" else stream:
                array = m.torch() if how == "torch" else m.cupy()
                latch = Latch(stream)
                array[...] = 0x33 if how == "torch" else cp.uint8(0x33)
                if how == "record":
                    m.record(stream)
            del array
        latch.release()
        assert (download(name, 640, 480) == 0x33).all()
        latch.close()


def test_A15_the_next_map_waits_for_readers_of_the_last(driver: Driver, cp: Any) -> None:
    """Slow reader, map left, texture rewritten, mapped again: the reader got the old bytes."""
    name = make_texture(640, 480)
    old, new = picture(seed=1), picture(seed=2)
    upload(name, old)
    with cuglue.register_texture(name) as image:
        stream = cp.cuda.Stream(non_blocking=True)
        kept = cp.zeros(old.shape, "u1")
        cp.cuda.get_current_stream().synchronize()
        with image.map() as m, stream:
            array = m.cupy()
            latch = Latch(stream)
            kept[...] = array
            del array
        upload(name, new)
        with image.map() as m:
            latch.release()
            np.testing.assert_array_equal(m.numpy(), new)
        stream.synchronize()
        np.testing.assert_array_equal(kept.get(), old)
        latch.close()


def test_reading_does_not_hold_opengl(driver: Driver, cp: Any) -> None:
    """The reader's stream is held, and OpenGL finishes all the same: readers have a copy."""
    name = make_texture(640, 480)
    upload(name, picture(seed=1))
    with cuglue.register_texture(name) as image:
        stream = cp.cuda.Stream(non_blocking=True)
        with image.map() as m, stream:
            array = m.cupy()
            latch = Latch(stream)
            array.copy()
            del array
        upload(name, picture(seed=2))
        GL.glFinish()
        latch.close()


def test_a_busy_stream_delays_no_map(driver: Driver, cp: Any) -> None:
    """A7: nothing waits for the device or the legacy stream."""
    busy = cp.cuda.Stream(non_blocking=True)
    pixels = picture()
    with registered_texture(driver, 640, 480) as subject, Latch(busy) as latch:
        subject.put(pixels.reshape(-1))
        with subject.handle.map(cp.cuda.Stream(non_blocking=True)) as m:
            np.testing.assert_array_equal(m.numpy(), pixels)
        assert not busy.done
        latch.release()


def test_unannounced_readers_are_joined(driver: Driver, cp: Any, torch: Any) -> None:
    """PyTorch reads the array interface on a stream that it does not name."""
    assert users.unannounced_readers()
    pixels, name = picture(), make_texture(640, 480)
    upload(name, pixels)
    with cuglue.register_texture(name) as image:
        side = torch.cuda.Stream()
        with image.map_mut(cp.cuda.Stream(non_blocking=True)) as m, torch.cuda.stream(side):
            tensor = torch.as_tensor(m, device="cuda")
            assert tensor.data_ptr() == m.device_ptr
            latch = Latch(side)
            tensor ^= 255
            del tensor
        latch.release()
        np.testing.assert_array_equal(download(name, 640, 480), pixels ^ 255)
        latch.close()


def test_row_78_unannounced_readers_come_after_the_map(driver: Driver, cp: Any, torch: Any) -> None:
    """The map's own stream is held when PyTorch reads: it gets the picture, not what the memory held before."""
    pixels, name = picture(), make_texture(640, 480)
    with cuglue.register_texture(name) as image:
        with image.map():
            pass
        upload(name, pixels)
        mine = cp.cuda.Stream(non_blocking=True)
        latch = Latch(mine)
        side = torch.cuda.Stream()
        with image.map(mine) as m, torch.cuda.stream(side):
            copy = torch.as_tensor(m, device="cuda").clone()
            assert not side.query()
            latch.release()
            side.synchronize()
        np.testing.assert_array_equal(copy.cpu().numpy(), pixels)
        latch.close()


def test_what_was_read_is_ready_on_the_stream_named(driver: Driver, cp: Any) -> None:
    """CuPy copied it on its current stream, which is held."""
    pixels, name = picture(), make_texture(640, 480)
    upload(name, pixels)
    with cuglue.register_texture(name) as image:
        current, mine = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
        kept = cp.zeros(pixels.shape, "u1")
        cp.cuda.Device().synchronize()
        with current:
            latch = Latch(current)
            array = image.read(mine)
        with mine:
            kept[...] = array
        latch.release()
        mine.synchronize()
        np.testing.assert_array_equal(kept.get(), pixels)
        latch.close()


def test_what_is_written_is_ready_on_the_stream_named(driver: Driver, cp: Any) -> None:
    """The array is made on a stream that is held, and named."""
    pixels, name = picture(), make_texture(640, 480)
    with cuglue.register_texture(name) as image:
        mine = cp.cuda.Stream(non_blocking=True)
        array = cp.zeros(pixels.shape, "u1")
        source = cp.asarray(pixels)
        cp.cuda.Device().synchronize()
        with mine:
            latch = Latch(mine)
            array[...] = source
        image.write(array, mine)
        latch.release()
        np.testing.assert_array_equal(download(name, 640, 480), pixels)
        latch.close()


def test_a_dead_consumer_stream(driver: Driver, cp: Any) -> None:
    name = make_texture(640, 480)
    with cuglue.register_texture(name) as image:
        with image.map_mut() as m:
            stream = cp.cuda.Stream(non_blocking=True)
            with stream:
                m.cupy()[...] = 0x21
            del stream
            gc.collect()
        assert (download(name, 640, 480) == 0x21).all()


def test_a_capture_is_refused_and_goes_on(driver: Driver, cp: Any) -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    x = cp.zeros(16)
    with registered_texture(driver) as subject:
        with stream:
            stream.begin_capture()
            with pytest.raises(CaptureError):
                subject.handle.map()
            x += 1
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        assert (x.get() == 1).all()


def test_rows_32_55_a_failed_call_leaves_no_error_behind(driver: Driver, cp: Any, torch: Any) -> None:
    with registered_texture(driver) as subject:
        m = subject.handle.map()
        with pytest.raises(cuglue.errors.DriverError):
            driver.graphics_map((subject.handle._life.backing.registration.handle,), 0)  # type: ignore[attr-defined]
        m.release()
    assert torch.ones(1).cuda().item() == 1
    assert cp.ones(3).sum().item() == 3


# --- kept too long --------------------------------------------------------------------------------------------

KEEP = {
    "cupy": lambda m, cp, torch: m.cupy(),
    "torch": lambda m, cp, torch: m.torch(),
    "a slice": lambda m, cp, torch: m.cupy()[2:],
    "dlpack": lambda m, cp, torch: torch.from_dlpack(m),
}


@pytest.mark.parametrize("how", KEEP)
def test_kept_past_the_end(driver: Driver, cp: Any, torch: Any, how: str) -> None:
    with registered_buffer(driver, 4096) as subject:
        m = subject.handle.map()
        kept = KEEP[how](m, cp, torch)
        with pytest.warns(DanglingExportWarning, match=f"{__file__}:"):
            m.release()
        del kept
        with subject.handle.map() as m, warnings.catch_warnings():
            warnings.simplefilter("error")
            kept = KEEP[how](m, cp, torch)
            del kept


def test_strict_mode_finds_readers_of_the_array_interface(
    driver: Driver, cp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUGLUE_STRICT", "1")
    with registered_buffer(driver, 4096) as subject:
        m = subject.handle.map()
        kept = cp.asarray(m)
        with pytest.raises(BusyError):
            m.release()
        assert m.released
        del kept


def test_arrays_of_an_image_outlive_map_and_handle(driver: Driver, cp: Any, torch: Any) -> None:
    pixels, name = picture(), make_texture(640, 480)
    upload(name, pixels)
    with cuglue.register_texture(name) as image:
        with image.map() as m:
            kept = [m.cupy(), m.torch(), torch.as_tensor(m, device="cuda"), cp.asarray(m)]
        del m
    GL.glDeleteTextures([name])
    gc.collect()
    other = make_texture(640, 480)
    upload(other, picture(seed=5))
    with cuglue.register_texture(other) as image, image.map():
        for array in kept:
            host = array.get() if hasattr(array, "get") else array.cpu().numpy()
            np.testing.assert_array_equal(host, pixels)


# --- the device ------------------------------------------------------------------------------------------------


def test_the_renderer_is_the_device(driver: Driver, context: GlContext) -> None:
    assert not context.software
    with cuglue.register_buffer(make_buffer(16)) as handle:
        assert handle.device in driver.gl_devices()
        assert handle.device == context.cuda_device


@pytest.mark.alone
def test_a_thousand_frames_leave_nothing(driver: Driver, cp: Any) -> None:
    name = make_texture(320, 240)
    with cuglue.register_texture(name) as image:

        def frame() -> None:
            with image.map_mut() as m:
                array = m.cupy()
                array += 1
                del array

        for _ in range(50):
            frame()
        cp.cuda.Device().synchronize()
        before = driver.memory_info(0).free
        for _ in range(1000):
            frame()
        cp.cuda.Device().synchronize()
        assert driver.memory_info(0).free >= before - (4 << 20)
        assert (download(name, 320, 240) == download(name, 320, 240)[0, 0]).all()


def test_several_handles_by_one_call(driver: Driver, cp: Any) -> None:
    names = [make_buffer(4096) for _ in range(4)]
    texture = make_texture(64, 48)
    handles = [cuglue.register_buffer(name) for name in names] + [cuglue.register_texture(texture)]
    with trace(only={"graphics_map", "graphics_unmap"}) as calls:
        with cuglue.map_all(handles, mutable=True) as maps:
            for number, m in enumerate(maps):
                cp.asarray(m)[...] = number + 1
        assert [c.method for c in calls] == ["graphics_map", "graphics_unmap"]
    for number, handle in enumerate(handles):
        assert (handle.read().get() == number + 1).all()
        handle.close()


def test_a_context_on_a_thread_of_its_own(driver: Driver, cp: Any) -> None:
    """Every call is routed there, and CuPy works here."""
    with headless(thread="worker") as worker:
        texture = worker.ops.call(make_texture, 64, 48)
        with cuglue.register_texture(texture, ops=worker.ops) as image:
            with image.map_mut(cp.cuda.Stream(non_blocking=True)) as m:
                m.cupy()[...] = 0x5C
            assert (worker.ops.call(download, texture, 64, 48) == 0x5C).all()


def test_slices_levels_and_layers_by_cupy(driver: Driver, cp: Any) -> None:
    """The next level is made from the one before, on the device."""
    name = make_texture(64, 64, levels=3)
    pixels = picture(64, 64)
    upload(name, pixels)
    with cuglue.register_texture(name) as image:
        for level in (1, 2):
            with image.map(level=level - 1) as above, image.map_mut(level=level, overwrite=True) as below:
                cp.asarray(below)[...] = cp.asarray(above)[::2, ::2]
        with image.map(level=2) as m:
            np.testing.assert_array_equal(m.numpy(), pixels[::4, ::4])
