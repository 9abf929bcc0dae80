"""Objects of OpenGL mapped on a device that is not current."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from graphics.subjects import download, make_buffer, make_texture, upload
from OpenGL import GL
from sample_kernels import INCREMENT

import cuglue
from cuglue import InOut, Runtime
from cuglue.driver.protocol import ArrayInfo, MemoryType, TexelKind
from cuglue.driver.sim import SimDriver
from cuglue.errors import UsageError
from cuglue.graphics.glcontext import headless

pytestmark = pytest.mark.gl
DEFAULT = (None, 0, 1, 2)


@pytest.fixture
def context(two: Any) -> Iterator[Any]:
    """A context on the GPU of the device that is not current."""
    with headless(two.there) as made:
        yield made


def device_bytes(m: Any) -> np.ndarray[Any, Any]:
    return np.asarray(m.numpy()).view(np.uint8).reshape(-1)


def on_host(two: Any, array: Any) -> np.ndarray[Any, Any]:
    """An array of ``handle.read()``."""
    if two.driver.name == "sim":
        return np.asarray(array)
    with two.on(two.there):
        found: np.ndarray[Any, Any] = array.get()
    return found


def test_a_buffer(two: Any, context: Any) -> None:
    name = make_buffer(4 * 64)
    data = np.arange(64, dtype="i4")
    GL.glNamedBufferSubData(name, 0, data.nbytes, data)
    with cuglue.register_buffer(name, device=two.there) as handle, Runtime(two.there) as rt:
        assert handle.device == two.there
        for count in range(8):
            stream = DEFAULT[count % 4]
            with handle.map_mut(stream) as m:
                rt.launch(INCREMENT, 1, 64, InOut(m), 64, 1, stream=stream)
            with handle.map(stream) as m:
                np.testing.assert_array_equal(device_bytes(m).view("i4"), data + count + 1)
        handle.write(data.view("u1"))
        with handle.map() as m:
            np.testing.assert_array_equal(device_bytes(m), data.view("u1"))
        read = handle.read()
        assert two.driver.name == "sim" or read.device.id == two.there
        np.testing.assert_array_equal(on_host(two, read).reshape(-1), data.view("u1"))
        with two.on(two.there):
            more = read + 1
        handle.write(more)
        np.testing.assert_array_equal(on_host(two, handle.read()).reshape(-1), data.view("u1") + np.uint8(1))


@pytest.mark.parametrize("side", [8, 512], ids=["driver's copy", "our kernels"])
def test_an_image(two: Any, context: Any, side: int) -> None:
    name = make_texture(side, side)
    pixels = np.random.default_rng(2).integers(0, 256, (side, side, 4), np.uint8)
    upload(name, pixels)
    with cuglue.register_texture(name, device=two.there) as handle:
        for count, stream in enumerate(DEFAULT * 2):
            with handle.map_mut(stream) as m:
                m.driver.fill_async(m.device_ptr, count, m.row_bytes, m.stream.handle)
                m.stream.submit()
            pixels[0] = count
            with handle.map(stream) as m:
                np.testing.assert_array_equal(m.numpy(), pixels)
        np.testing.assert_array_equal(download(name, side, side), pixels)
        handle.write(pixels[::-1].copy(), flip=True)
        np.testing.assert_array_equal(on_host(two, handle.read(flip=True)), pixels[::-1])
        np.testing.assert_array_equal(download(name, side, side), pixels)


def test_several_at_once(two: Any, context: Any) -> None:
    names = [make_buffer(256) for _ in range(3)]
    handles = [cuglue.register_buffer(name, device=two.there) for name in names]
    for number in (1, 2, 3):
        with cuglue.map_all(handles, mutable=True) as maps:
            for m in maps:
                m.driver.fill_async(m.device_ptr, number, 256, m.stream.handle)
                m.stream.submit()
        with cuglue.map_all(handles) as maps:
            assert all((device_bytes(m) == number).all() for m in maps)
    for handle in handles:
        handle.close()


def test_parts_say_their_device(two: Any, context: Any) -> None:
    """Who takes a registration maps it on the device that it was made for."""
    name = make_buffer(256)
    for wrong in {two.here} - {two.there}:
        parts = cuglue.register_buffer(name, device=two.there).into_client_parts()
        tensor = cuglue.Tensor((16, 16), "R8")
        for take in (cuglue.CudaHandle.from_client_parts, tensor.attach):
            with pytest.raises(UsageError, match=f"device {two.there}.*device={wrong}"):
                take(parts, device=wrong)
        assert not parts.transferred
        parts.close()
        tensor.close()
    parts = cuglue.register_buffer(name, device=two.there).into_client_parts()
    with cuglue.CudaHandle.from_client_parts(parts) as handle:
        assert handle.device == two.there
        for number in (1, 2):
            with handle.map_mut() as m:
                m.driver.fill_async(m.device_ptr, number, 256, m.stream.handle)
                m.stream.submit()
            with handle.map() as m:
                assert (device_bytes(m) == number).all()
    parts.close()


def test_memory_of_another_device_is_refused(two: Any, context: Any) -> None:
    """As the linear copy of an image, and as what somebody else's functions map."""
    if two.here == two.there:
        return
    texture, name = make_texture(8, 8), make_buffer(256)
    info = ArrayInfo(8, 8, 0, 8, 4, TexelKind.UINT)
    array = two.driver.array_create(info, two.there)
    memory = cuglue.AsyncCudaResource(two.here)
    made: list[Any] = [
        lambda: cuglue.register_texture(texture, device=two.there, memory=memory),
        lambda: cuglue.CudaHandle.from_array(
            array, texels=8, rows=8, bytes_per_texel=4, device=two.there, memory=memory
        ),
    ]
    for make in made:
        with pytest.raises(UsageError, match=f"device=0.*device {two.there}"):
            make()
    memory.close()
    two.driver.array_destroy(array)
    assert two.driver.name == "cuda" or two.driver.inventory()["resources"] == 0
    parts = cuglue.register_buffer(name, device=two.there).into_client_parts()
    ops = SimpleNamespace(map=parts.map_fn, unmap=parts.unmap_fn, unregister=parts.unregister_fn)
    handle = cuglue.CudaHandle.from_gl(parts.resource, parts.size, ops)
    with pytest.raises(UsageError, match=f"memory of device {two.there}.*device="):
        handle.map()
    assert not handle.mapped
    handle.close()
    parts.mark_transferred()
    parts.close()


def test_a_linear_copy_lies_where_its_handle_does() -> None:
    """Not with the driver that is current."""
    own, current = SimDriver(devices=2), SimDriver()
    array = own.array_create(ArrayInfo(8, 8, 0, 8, 4, TexelKind.UINT), 1)
    with cuglue.use_driver(current):
        with cuglue.CudaHandle.from_array(
            array, texels=8, rows=8, bytes_per_texel=4, device=1, driver=own
        ) as handle:
            with handle.map() as m:
                assert own.pointer_info(m.device_ptr) == (MemoryType.DEVICE, 1)
    assert current.inventory()["bytes"] == 0
