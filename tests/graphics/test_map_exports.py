"""Arrays made from maps: the same memory, and what becomes of them when the map is left (contracts A11-A13, A17)."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import glpixels
import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.subjects import make_texture, registered_buffer, registered_texture

import cuglue
from cuglue.core.device import device_state
from cuglue.driver.protocol import Driver, MemoryType
from cuglue.errors import (
    BusyError,
    ClosedError,
    DanglingExportWarning,
    LayoutError,
    UnsupportedError,
    UsageError,
)
from cuglue.exchange import Exporter
from cuglue.formats import by_name, tight_geometry
from cuglue.graphics.glcontext import GlContext, headless
from cuglue.testing.view_suite import ViewSuite

pytestmark = [pytest.mark.gl, pytest.mark.usefixtures("way")]


@pytest.fixture(scope="module", autouse=True)
def _context() -> Iterator[GlContext]:
    with headless() as made:
        yield made


@pytest.fixture(autouse=True)
def _driver(driver: Driver) -> None:
    pass


class TestImageView(ViewSuite):
    """The contract of every array."""

    @contextmanager
    def make(self, array: np.ndarray[Any, Any], *, readonly: bool = False) -> Iterator[Exporter]:
        height, width, _ = array.shape
        name = make_texture(width, height, FORMATS[array.dtype.name, array.shape[2]])
        glpixels.write_image(name, array)
        with cuglue.register_texture(name) as handle, handle.map(readonly=readonly) as m:
            yield m
        GL.glDeleteTextures([name])

    def samples(self) -> list[np.ndarray[Any, Any]]:
        rng = np.random.default_rng(0)
        return [rng.integers(0, 100, (3, 5, c)).astype(dtype) for dtype, c in FORMATS]


FORMATS = {
    ("uint8", 4): "RGBA8",
    ("uint8", 1): "R8",
    ("uint16", 2): "RG16",
    ("int32", 1): "R32I",
    ("float16", 4): "RGBA16F",
    ("float32", 4): "RGBA32F",
}


class TestBufferView(ViewSuite):
    """The contract of every array, over memory that goes away."""

    @contextmanager
    def make(self, array: np.ndarray[Any, Any], *, readonly: bool = False) -> Iterator[Exporter]:
        with registered_buffer(cuglue.current_driver(), array.size) as subject, warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DanglingExportWarning
            )  # the suite holds its capsules a little longer
            subject.put(array)
            with subject.handle.map(readonly=readonly) as m:
                yield m

    def samples(self) -> list[np.ndarray[Any, Any]]:
        return [np.arange(n, dtype="u1") for n in (1, 64, 200)]


# --- the same memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registered", [registered_buffer, registered_texture])
def test_numpy_sees_the_mapped_memory_itself(driver: Driver, registered: Any) -> None:
    with registered(driver) as subject:
        expected = np.arange(subject.handle.size).astype("u1")
        subject.put(expected)
        with subject.handle.map_mut() as m:
            array = np.asarray(m)
            assert array.ctypes.data == m.device_ptr
            assert array.shape == m.shape
            np.testing.assert_array_equal(array.reshape(-1), expected)
            array[...] = 255 - array
            del array
        np.testing.assert_array_equal(subject.get(), 255 - expected)


def test_a_simulated_map_is_no_cuda_memory(driver: Driver) -> None:
    with registered_texture(driver) as subject, subject.handle.map() as m:
        assert not hasattr(m, "__cuda_array_interface__")
        assert m.__dlpack_device__() == (1, 0)
        with pytest.raises(UnsupportedError):
            m.cupy()


def test_the_cuda_array_interface_is_each_readers_own_and_ends_with_the_map(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is worked out once a map; what changes meanwhile is the stream."""
    state = device_state(driver, 0)
    monkeypatch.setattr(state, "capabilities", replace(state.capabilities, device_type=MemoryType.DEVICE))
    stream = driver.Stream()
    with registered_texture(driver) as subject, stream, subject.handle.map() as m:
        first = m.__cuda_array_interface__
        assert first == {
            "shape": (7, 20, 4),
            "typestr": "|u1",
            "data": (m.device_ptr, False),
            "strides": None,
            "version": 3,
            "stream": None,  # the reader is on the map's own stream
        }
        first.clear()
        with driver.Stream():
            assert m.__cuda_array_interface__["stream"] == stream.ptr
        assert m.__cuda_array_interface__["data"] == (m.device_ptr, False)
        assert m.cai_read
    with pytest.raises(ClosedError):
        m.__cuda_array_interface__  # noqa: B018 - a property


def test_row_79_readonly_maps_say_so(driver: Driver) -> None:
    with registered_texture(driver) as subject, subject.handle.map(readonly=True) as m:
        assert m.readonly
        assert not np.asarray(m).flags.writeable
        assert not np.from_dlpack(m).flags.writeable
        with pytest.raises(BufferError):
            m.__dlpack__()


def test_a_buffer_registered_for_reading(driver: Driver) -> None:
    """Its maps are read-only, and nobody writes it by accident."""
    with registered_buffer(driver) as subject:
        with cuglue.register_buffer(subject.name, access="read") as handle:
            with handle.map() as m:
                assert m.readonly
                assert not np.asarray(m).flags.writeable
            with pytest.raises(UsageError):
                handle.map_mut()
            with pytest.raises(UsageError):
                handle.write(np.zeros(handle.shape, np.uint8))


# --- kept too long --------------------------------------------------------------------------------------------


def line() -> int:
    """Number of the caller's line."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


KEEP = {
    "asarray": np.asarray,
    "a slice": lambda m: np.asarray(m)[2:],
    "dlpack": np.from_dlpack,
    "a capsule": lambda m: m.__dlpack__(max_version=(1, 0)),
    "a view's": lambda m: np.asarray(m.view("i1")),
}


@pytest.mark.parametrize("how", KEEP)
def test_row_73_an_array_of_a_buffer_kept_past_the_end_warns_with_its_line(driver: Driver, how: str) -> None:
    with registered_buffer(driver) as subject:
        m = subject.handle.map()
        kept, made_at = KEEP[how](m), line()
        with pytest.warns(DanglingExportWarning) as caught:
            m.release()
        # A lambda of KEEP is the caller that made it, where there is one.
        source = KEEP[how].__code__.co_firstlineno if hasattr(KEEP[how], "__code__") else made_at
        assert f"{__file__}:{source}" in str(caught[0].message)
        assert caught[0].filename == __file__
        assert m.released
        del kept


@pytest.mark.parametrize("how", KEEP)
def test_dropped_before_it_is_silent(driver: Driver, how: str) -> None:
    with registered_buffer(driver) as subject, subject.handle.map() as m:
        kept = KEEP[how](m)
        del kept
        gc.collect()


@pytest.mark.parametrize("how", KEEP)
def test_strict_mode_raises_after_the_map_was_left(
    driver: Driver, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUGLUE_STRICT", "1")
    with registered_buffer(driver) as subject:
        m = subject.handle.map()
        kept = KEEP[how](m)
        with pytest.raises(BusyError):
            m.release()
        assert m.released
        del kept
        with subject.handle.map():
            pass


def test_strict_mode_keeps_the_body_s_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUGLUE_STRICT", "1")
    with registered_buffer(driver) as subject:
        m = subject.handle.map()
        kept = np.asarray(m)
        with pytest.raises(KeyError) as caught, m:
            raise KeyError("body")
        del kept
        assert any("was left while" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("how", KEEP)
def test_row_73_an_array_of_an_image_outlives_the_map_and_the_handle(driver: Driver, how: str) -> None:
    """It is a copy, and memory of its own from then on."""
    with registered_texture(driver) as subject:
        expected = np.arange(subject.handle.size).astype("u1")
        subject.put(expected)
        with subject.handle.map() as m:
            kept = KEEP[how](m)
        del m
    gc.collect()
    with registered_texture(driver) as another, another.handle.map():
        pass
    if isinstance(kept, np.ndarray):
        start = expected.size - kept.size
        np.testing.assert_array_equal(kept.reshape(-1).view("u1"), expected[start:])


def test_memory_of_an_image_goes_with_the_last_array(driver: Any) -> None:
    with registered_texture(driver) as subject:
        with subject.handle.map() as m:
            kept = np.asarray(m)
        del m
    driver.device_synchronize(0)
    assert driver.inventory()["malloc_async"] == 1
    del kept
    with registered_buffer(driver) as subject, subject.handle.map():  # any later call frees it
        assert driver.inventory()["malloc_async"] == 0


def test_the_next_map_refreshes_what_an_old_array_shows(driver: Driver) -> None:
    """One linear buffer per handle: documented aliasing."""
    with registered_texture(driver) as subject:
        with subject.handle.map() as m:
            kept = np.asarray(m)
        subject.put(np.full(subject.handle.size, 9, np.uint8))
        with subject.handle.map() as m:
            m.stream.synchronize()
            assert (kept == 9).all()


# --- images in other images' texels ---------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["NV12", "NV16", "NV24"])
@pytest.mark.parametrize(("width", "height"), [(64, 48), (8, 8), (33, 17), (322, 241)])
def test_A13_semi_planar_images_have_planes(driver: Driver, format: str, width: int, height: int) -> None:
    geometry = tight_geometry(by_name(format), width, height)
    name = make_texture(geometry.texels_per_row, geometry.rows, "R8")
    data = np.random.default_rng(1).integers(0, 256, (geometry.rows, geometry.row_bytes), np.uint8)
    glpixels.write_image(name, data[..., None])
    with cuglue.register_texture(name, format=format, width=width, height=height) as handle:
        assert handle.shape == data.shape
        with handle.map() as m:
            assert m.row_bytes * m.rows == len(m) == data.size
            np.testing.assert_array_equal(np.asarray(m), data)
            y, uv = m.planes["y"], m.planes["uv"]
            x_step, y_step = {"NV12": (2, 2), "NV16": (2, 1), "NV24": (1, 1)}[format]
            assert y.shape == (height, width)
            assert uv.shape == (-(-height // y_step), -(-width // x_step), 2)
            np.testing.assert_array_equal(np.asarray(y), data[:height, :width])
            chroma = data[height:].reshape(uv.shape[0], -1)[:, : 2 * uv.shape[1]].reshape(uv.shape)
            np.testing.assert_array_equal(np.asarray(uv), chroma)
        with handle.map_mut() as m:
            np.asarray(m.planes["uv"])[...] = 128
        with handle.map() as m:
            assert (np.asarray(m.planes["uv"]) == 128).all()
            np.testing.assert_array_equal(np.asarray(m.planes["y"]), data[:height, :width])
        with pytest.raises(UsageError):
            handle.map(level=1)
    GL.glDeleteTextures([name])


def test_row_12_nv12_views_have_the_right_shapes(driver: Driver) -> None:
    name = make_texture(64, 72, "R8")
    with cuglue.register_texture(name, format="NV12", width=64, height=48) as handle, handle.map() as m:
        assert (m.planes["y"].shape, m.planes["uv"].shape) == ((48, 64), (24, 32, 2))
        assert len(m) == 64 * 48 * 3 // 2
    GL.glDeleteTextures([name])


def test_row_14_a_pitch_wider_than_the_image_is_in_the_strides(driver: Driver) -> None:
    name = make_texture(1024, 12, "R8")
    with cuglue.register_texture(name, format="NV12", width=1000, height=8) as handle, handle.map() as m:
        assert m.planes["y"].strides == (1024, 1)
        assert m.planes["y"].shape == (8, 1000)
        assert np.ascontiguousarray(np.asarray(m.planes["y"])).nbytes == 8000
    GL.glDeleteTextures([name])


@pytest.mark.parametrize(
    ("format", "carrier", "texels", "shape"),
    [
        ("RGB8_PACKED", "RGBA8", (6, 5), (5, 8, 3)),
        ("RGBA16F_PLANAR", "RGBA16F", (2, 20), (4, 5, 8)),
        ("YUYV", "RG8", (8, 5), (5, 8, 2)),
        ("BGRA8", "RGBA8", (8, 5), (5, 8, 4)),
    ],
)
def test_A11_images_packed_into_wider_texels(
    driver: Driver, format: str, carrier: str, texels: tuple[int, int], shape: tuple[int, ...]
) -> None:
    name = make_texture(*texels, carrier)
    with cuglue.register_texture(name, format=format, width=8, height=5) as handle:
        assert handle.shape == shape
        values = np.arange(np.prod(shape)).reshape(shape).astype(handle.dtype)
        handle.write(values)
        np.testing.assert_array_equal(handle.read(), values)
        with handle.map() as m:
            assert len(m) == m.rows * m.row_bytes == values.nbytes
            assert set(m.planes) == ({"r", "g", "b", "a"} if "PLANAR" in format else {"image"})
    GL.glDeleteTextures([name])


def test_a_texture_that_cannot_carry_the_image_is_refused(driver: Any) -> None:
    name = make_texture(64, 72, "R8")
    for options in (
        {"format": "NV12", "width": 64, "height": 47},
        {"format": "NV12", "width": 66, "height": 48},
        {"format": "RGB8_PACKED", "width": 64, "height": 72},
        {"format": "NV12", "width": -2, "height": 48},
    ):
        with pytest.raises(LayoutError):
            cuglue.register_texture(name, **options)
    with pytest.raises(UsageError):
        cuglue.register_texture(name, width=64)
    with pytest.raises(UnsupportedError):
        cuglue.register_texture(name, format="NV13")
    assert driver.inventory()["resources"] == 0
    GL.glDeleteTextures([name])


def test_planes_of_a_map_that_was_left(driver: Driver) -> None:
    with registered_texture(driver) as subject:
        with subject.handle.map() as m:
            image = m.planes["image"]
        with pytest.raises(ClosedError):
            np.asarray(image)
        with pytest.raises(ClosedError):
            image.numpy()
