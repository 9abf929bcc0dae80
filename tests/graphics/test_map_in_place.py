"""Images mapped in place: kernels work on them through surface and texture objects, and nothing is copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.subjects import (
    download,
    make_texture,
    registered_buffer,
    registered_renderbuffer,
    registered_texture,
    upload,
)

import cuglue
from cuglue import In, InOut, Kernel, Out, Runtime
from cuglue.driver.protocol import Access, Driver, SurfaceArg
from cuglue.errors import ClosedError, MapConflictError, UnsupportedError, UsageError
from cuglue.graphics.glcontext import GlContext
from cuglue.testing import sweep, trace
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import new_stream, peek

pytestmark = pytest.mark.gl

COPIES = {"copy_from_array_async", "copy_to_array_async", "malloc_async", "malloc"}
DEVICES = pytest.mark.parametrize("on", ["sim", pytest.param("cuda", marks=pytest.mark.gpu)])

KERNELS = {
    "invert": r"""
extern "C" __global__ void invert(cudaSurfaceObject_t image, int width, int height)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;
    uchar4 t = surf2Dread<uchar4>(image, x * 4, y);
    surf2Dwrite(make_uchar4(255 - t.x, 255 - t.y, 255 - t.z, t.w), image, x * 4, y);
}
""",
    "half": r"""
extern "C" __global__ void half(cudaTextureObject_t source, uchar4* out, int width, int height)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x < width && y < height) out[y * width + x] = tex2D<uchar4>(source, 2 * x, 2 * y);
}
""",
}


def invert_twin(grid: Any, block: Any, image: Any, width: Any, height: Any) -> None:
    image.texels[..., :3] = 255 - image.texels[..., :3]


def half_twin(grid: Any, block: Any, source: Any, out: Any, width: Any, height: Any) -> None:
    out.reshape(int(height), int(width), 4)[...] = source.texels[::2, ::2]


INVERT = Kernel("invert", KERNELS["invert"], sim=invert_twin)
HALF = Kernel("half", KERNELS["half"], sim=half_twin)


def picture(width: int, height: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 4), np.uint8)


def grid(width: int, height: int) -> tuple[int, int]:
    return -(-width // 16), -(-height // 16)


def inverted(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    out = pixels.copy()
    out[..., :3] = 255 - out[..., :3]
    return out


@DEVICES
def test_a_kernel_changes_the_texture_itself(on: str, driver: Driver, context: GlContext) -> None:
    pixels, name = picture(70, 50), make_texture(70, 50)
    upload(name, pixels)
    with cuglue.register_texture(name) as image, Runtime(device=image.device) as rt:
        with trace(only=COPIES) as copies, image.map_mut(in_place=True) as m:
            assert m.in_place
            rt.launch(INVERT, grid(70, 50), (16, 16), InOut(m.surface()), 70, 50)
        assert copies == []
        np.testing.assert_array_equal(download(name, 70, 50), inverted(pixels))
        with image.map() as m:
            np.testing.assert_array_equal(m.numpy(), inverted(pixels))
    GL.glDeleteTextures([name])


@DEVICES
def test_a_texture_object_is_read(on: str, driver: Driver, context: GlContext) -> None:
    pixels, name = picture(64, 32), make_texture(64, 32)
    upload(name, pixels)
    with cuglue.register_texture(name) as image, Runtime(device=image.device) as rt:
        out = rt.empty(32 * 16 * 4)
        with image.map(in_place=True) as m:
            rt.launch(HALF, grid(32, 16), (16, 16), In(m.texture()), Out(out), 32, 16)
        result = np.asarray(rt.read(out, (16, 32, 4), "u1").result())
        np.testing.assert_array_equal(result, pixels[::2, ::2])
        out.close()
    GL.glDeleteTextures([name])


@DEVICES
def test_a_kernel_on_another_stream_is_waited_for(on: str, driver: Driver, context: GlContext) -> None:
    """Though nothing says so but the launch."""
    pixels, name = picture(70, 50), make_texture(70, 50)
    upload(name, pixels)
    with cuglue.register_texture(name) as image, Runtime(device=image.device) as rt:
        with new_stream(SimpleNamespace(driver=driver, handle=image)) as other:  # type: ignore[arg-type]
            with image.map_mut(in_place=True) as m:
                rt.launch(INVERT, grid(70, 50), (16, 16), InOut(m.surface()), 70, 50, stream=other.owner)
            np.testing.assert_array_equal(download(name, 70, 50), inverted(pixels))
    GL.glDeleteTextures([name])


def test_work_that_was_recorded_is_waited_for(driver: Any, context: GlContext) -> None:
    """A plain launch, on a stream that is named by hand."""
    with registered_renderbuffer(driver) as subject, new_stream(subject) as other:
        kernel = driver.kernel_load("fill", "", (), 0, lambda grid, block, image: image.texels.fill(7))
        with subject.handle.map_mut(in_place=True) as m:
            surface = m.surface()
            other.wait(m.stream.record())
            use = SurfaceArg(surface.handle, Access.WRITE)
            driver.kernel_launch(
                kernel, (1, 1, 1), (1, 1, 1), (int(surface.handle),), (use,), 0, other.handle
            )
            m.record(other.owner)
        assert (subject.get() == 7).all()
        driver.kernel_unload(kernel)


def test_levels_and_layers(driver: Any, context: GlContext) -> None:
    name = make_texture(8, 8, target=GL.GL_TEXTURE_2D_ARRAY, depth=3, levels=2)
    with cuglue.register_texture(name, GL.GL_TEXTURE_2D_ARRAY) as image, Runtime() as rt:
        with image.map_mut(level=1, layer=2, in_place=True) as m:
            assert m.shape == (4, 4, 4)
            rt.launch(INVERT, grid(4, 4), (16, 16), InOut(m.surface()), 4, 4)
        with image.map(level=1, layer=2) as m:
            assert (peek(m).reshape(-1, 4)[:, :3] == 255).all()
        with image.map(level=1, layer=1) as m:
            assert (peek(m) == 0).all()


# --- what it is not -----------------------------------------------------------------------------------------------


def test_there_is_no_memory_to_export(driver: Any, context: GlContext) -> None:
    with registered_texture(driver) as subject, subject.handle.map(in_place=True) as m:
        assert m.device_ptr == 0
        assert m.shape == subject.handle.shape
        assert not hasattr(m, "__cuda_array_interface__")
        for use in (m.numpy, m.__dlpack__, m.__array__, m.cupy, lambda: m.planes):
            with pytest.raises(UsageError):
                use()
        with pytest.raises(UsageError):
            np.asarray(m)


def test_other_maps_have_no_objects(driver: Any, context: GlContext) -> None:
    """Of a copied image they would bypass the copy."""
    with registered_texture(driver) as subject, subject.handle.map() as m:
        for use in (m.surface, m.texture):
            with pytest.raises(UsageError, match="in_place=True"):
                use()
    with registered_buffer(driver) as subject:
        with pytest.raises(UsageError):
            subject.handle.map(in_place=True)
        with subject.handle.map() as m, pytest.raises(UsageError):
            m.surface()


def test_objects_end_with_their_map(driver: Any, context: GlContext) -> None:
    with registered_texture(driver) as subject, Runtime() as rt:
        with subject.handle.map_mut(in_place=True) as m:
            surface, texture = m.surface(), m.texture()
            assert m.surface().handle == surface.handle
            assert m.texture(normalized=True).handle != texture.handle
            assert int(np.uint64(surface)) == surface.handle
        for use in (lambda: surface.handle, lambda: texture.handle, lambda: np.uint64(surface), m.surface):
            with pytest.raises(ClosedError):
                use()
        with pytest.raises(ClosedError):
            rt.launch(INVERT, 1, 1, InOut(surface), 1, 1)
    driver.device_synchronize(0)
    with registered_texture(driver) as subject, subject.handle.map():  # any later call gives them back
        assert (driver.inventory()["surfaces"], driver.inventory()["textures"]) == (0, 0)


def test_what_is_read_only_is_not_written(driver: Any, context: GlContext) -> None:
    with registered_texture(driver) as subject, Runtime() as rt:
        with subject.handle.map(in_place=True) as m, pytest.raises(UsageError):
            rt.launch(INVERT, 1, 1, InOut(m.surface()), 1, 1)
        with subject.handle.map_mut(in_place=True) as m:
            assert (m.surface().writable, m.texture().writable) == (True, False)


def test_an_image_of_another_device(context: GlContext) -> None:
    from cuglue.driver.sim import SimDriver

    with cuglue.use_driver(SimDriver(devices=2)) as driver, registered_texture(driver) as subject:
        with Runtime(device=1) as rt, subject.handle.map_mut(in_place=True) as m:
            with pytest.raises(UsageError, match="device 0"):
                rt.launch(INVERT, 1, 1, InOut(m.surface()), 1, 1)


def test_a_driver_without_surfaces(driver: Any, context: GlContext) -> None:
    with fail("gl_register_image"), registered_texture(driver) as subject:
        with subject.handle.map_mut(in_place=True) as m, pytest.raises(UnsupportedError) as caught:
            m.surface()
        assert vars(caught.value)["reason"] == "surfaces"


@pytest.mark.parametrize("first", [True, False])
def test_A19_conflicts_with_copies(driver: Any, context: GlContext, first: bool) -> None:
    """A copy and the image itself are one thing to conflict about."""
    with registered_texture(driver) as subject:
        handle = subject.handle
        with handle.map(in_place=first):
            with pytest.raises(MapConflictError):
                handle.map_mut(in_place=not first)
            with handle.map(in_place=not first):
                pass
        with handle.map_mut(in_place=first):
            for ask in (handle.map, handle.map_mut):
                with pytest.raises(MapConflictError):
                    ask(in_place=not first)


def test_nothing_is_lost_whatever_fails(context: GlContext) -> None:
    name = make_texture(8, 8)

    def operation(handle: Any) -> Any:
        m = handle.map_mut(in_place=True)
        try:
            m.surface()
            m.texture()
        except BaseException:
            m.leave_later()
            raise
        return m

    sweep(
        operation,
        setup=lambda driver: cuglue.register_texture(name),
        teardown=lambda handle, m: (m.release(), handle.close()),
        keeps=("kernels", "events"),
        atomic=False,
        name="map in place",
    ).check()
