"""Images carried by texels: semi-planar video of any size as planes, and the rows of reports about them (A11-A13)."""

from __future__ import annotations

from typing import Any

import glpixels
import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.subjects import make_texture

import cuglue
from cuglue.driver.protocol import Driver
from cuglue.errors import ClosedError, LayoutError, UsageError
from cuglue.exchange.view import ArrayView
from cuglue.graphics import image_copy
from cuglue.graphics.glcontext import GlContext
from cuglue.graphics.handle import CudaHandle
from cuglue.testing.handle_suite import peek, poke

pytestmark = pytest.mark.gl

SIZES = [(64, 48), (1280, 720), (321, 241), (8, 8), (1, 1), (2, 1), (3, 5), (1000, 10)]


def rows_of(format: str, height: int) -> int:
    return {"NV12": height + (height + 1) // 2, "NV16": 2 * height, "NV24": 3 * height}[format]


def chroma_of(format: str, width: int, height: int) -> tuple[int, int]:
    """(rows, columns) of chroma pairs."""
    across = width if format == "NV24" else (width + 1) // 2
    return (height + 1) // 2 if format == "NV12" else height, across


class Video:
    """A texture that carries video, with a handle."""

    def __init__(self, format: str, width: int, height: int, pitch: int | None = None) -> None:
        self.pitch = pitch or width + width % 2
        self.rows = rows_of(format, height)
        self.name = make_texture(self.pitch, self.rows, "R8")
        self.handle: CudaHandle = cuglue.register_texture(
            self.name, format=format, width=width, height=height
        )

    def __enter__(self) -> Video:
        return self

    def __exit__(self, *exception: object) -> None:
        self.handle.close()
        GL.glDeleteTextures([self.name])

    def get(self) -> np.ndarray[Any, Any]:
        return glpixels.read_image(self.name, GL.GL_TEXTURE_2D).reshape(self.rows, self.pitch)

    def put(self, data: np.ndarray[Any, Any]) -> None:
        glpixels.write_image(self.name, data.reshape(self.rows, self.pitch, 1), GL.GL_TEXTURE_2D)


def picture(video: Video, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (video.rows, video.pitch), np.uint8)


@pytest.fixture(params=["driver copy", "surface kernels"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_copy, "SMALL_BYTES", 0 if request.param == "surface kernels" else 1 << 60)


@pytest.mark.usefixtures("_path", "context")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("format", ["NV12", "NV16", "NV24"])
def test_A13_planes_of_every_size(driver: Driver, format: str, size: tuple[int, int]) -> None:
    """The planes are views of the mapped bytes, of the right shapes and strides."""
    width, height = size
    with Video(format, width, height) as video:
        data = picture(video)
        video.put(data)
        with video.handle.map() as m:
            planes = m.planes
            assert list(planes) == ["y", "uv"]
            y, uv = planes["y"], planes["uv"]
            assert isinstance(y, ArrayView)
            down, across = chroma_of(format, width, height)
            assert (y.shape, uv.shape) == ((height, width), (down, across, 2))
            assert y.strides == (video.pitch, 1)
            assert y.device_ptr == m.device_ptr
            assert uv.device_ptr == m.device_ptr + height * video.pitch
            np.testing.assert_array_equal(y.numpy(), data[:height, :width])
            row = video.pitch * (2 if format == "NV24" else 1)
            below = data[height:].reshape(-1)
            expected = np.stack(
                [below[n * row : n * row + 2 * across].reshape(across, 2) for n in range(down)]
            )
            np.testing.assert_array_equal(uv.numpy(), expected)


@pytest.mark.usefixtures("_path", "context")
@pytest.mark.parametrize("format", ["NV12", "NV16", "NV24"])
def test_A13_the_whole_plane_round_trips(driver: Driver, format: str) -> None:
    """Bytewise, padding too: as wide as its pitch."""
    with Video(format, 321, 241, pitch=336) as video:
        handle, data = video.handle, picture(video, 3)
        assert handle.size == video.rows * video.pitch
        assert handle.shape == (video.rows, video.pitch)
        assert str(handle.format) == format
        with handle.map_mut() as m:
            assert m.row_bytes * m.rows == len(m) == handle.size
            poke(m, data.reshape(-1))
        np.testing.assert_array_equal(video.get(), data)
        with handle.map() as m:
            np.testing.assert_array_equal(peek(m), data.reshape(-1))


@pytest.mark.usefixtures("context")
def test_row_12_15_shapes_of_small_images(driver: Driver) -> None:
    """NV12 64x48; and 8x8: interleaved pairs are not lost."""
    for format, size, y, uv in (
        ("NV12", (64, 48), (48, 64), (24, 32, 2)),
        ("NV12", (8, 8), (8, 8), (4, 4, 2)),
        ("NV16", (8, 8), (8, 8), (8, 4, 2)),
        ("NV24", (8, 8), (8, 8), (8, 8, 2)),
    ):
        with Video(format, *size) as video, video.handle.map() as m:
            assert (m.planes["y"].shape, m.planes["uv"].shape) == (y, uv)
            assert m.planes["y"].dtype == m.planes["uv"].dtype == np.uint8


@pytest.mark.usefixtures("context")
def test_row_13_a_flat_size_comes_with_its_format(driver: Driver) -> None:
    """1280x720: 1,382,400 bytes are 1.5 bytes a pixel, and the handle says why."""
    with Video("NV12", 1280, 720) as video:
        assert video.handle.size == 1_382_400
        assert str(video.handle.format) == "NV12"
        assert video.handle.shape == (1080, 1280)


@pytest.mark.usefixtures("context")
def test_row_14_the_pitch_is_in_the_strides(driver: Driver) -> None:
    """Width 1000, pitch 1024: copying takes only what is visible."""
    with Video("NV12", 1000, 20, pitch=1024) as video:
        data = picture(video)
        video.put(data)
        with video.handle.map() as m:
            y, uv = m.planes["y"], m.planes["uv"]
            assert (y.strides, uv.strides) == ((1024, 1), (1024, 2, 1))
            copy = np.ascontiguousarray(np.asarray(y))
            assert copy.nbytes == 20 * 1000
            np.testing.assert_array_equal(copy, data[:20, :1000])
            np.testing.assert_array_equal(np.from_dlpack(uv), data[20:, :1000].reshape(10, 500, 2))


@pytest.mark.usefixtures("context")
def test_row_16_layout_is_stated_and_nothing_is_permuted(driver: Driver) -> None:
    name = make_texture(5, 4, "RGBA8")
    with cuglue.register_texture(name) as handle, handle.map() as m:
        assert m.shape == m.planes["image"].shape == (4, 5, 4)
    GL.glDeleteTextures([name])
    name = make_texture(2, 12, "RGBA32F")
    with (
        cuglue.register_texture(name, format="RGB32F_PLANAR", width=8, height=4) as handle,
        handle.map() as m,
    ):
        assert m.shape == (3, 4, 8)
        assert [p.shape for p in m.planes.values()] == [(4, 8)] * 3
        assert list(m.planes) == ["r", "g", "b"]
    GL.glDeleteTextures([name])


@pytest.mark.usefixtures("context")
def test_row_17_two_sizes_in_one_texture_are_two_handles(driver: Driver) -> None:
    """A cache keyed by the texture's own size would crop one of them."""
    name = make_texture(544, rows_of("NV12", 40), "R8")
    with (
        cuglue.register_texture(name, format="NV12", width=532, height=40) as first,
        cuglue.register_texture(name, format="NV12", width=530, height=40) as second,
    ):
        with first.map() as m:
            assert m.planes["y"].shape == (40, 532)
        with second.map() as m:
            assert m.planes["y"].shape == (40, 530)
            assert m.planes["uv"].shape == (20, 265, 2)
    GL.glDeleteTextures([name])


@pytest.mark.usefixtures("context")
def test_writing_a_plane_publishes_it(driver: Driver) -> None:
    with Video("NV12", 16, 8) as video:
        video.put(picture(video) * 0)
        with video.handle.map_mut() as m:
            np.asarray(m.planes["uv"])[..., 1] = 7
            np.asarray(m.planes["y"])[2] = 9
        found = video.get()
        assert (found[8:, 1::2] == 7).all()
        assert (found[8:, ::2] == 0).all()
        assert (found[2] == 9).all()
        assert found[:8].sum() == 9 * 16


@pytest.mark.usefixtures("context")
def test_planes_end_with_the_map(driver: Driver) -> None:
    with Video("NV12", 16, 8) as video:
        with video.handle.map() as m:
            y = m.planes["y"]
        with pytest.raises(ClosedError):
            y.numpy()
        with pytest.raises(ClosedError):
            m.planes["y"]


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    ("format", "rows", "height"),
    [("NV12", 9, 6), ("NV12", 11, 7), ("NV12", 2, 1), ("NV16", 8, 4), ("NV24", 12, 4)],
)
def test_A13_the_height_is_what_the_rows_hold(driver: Driver, format: str, rows: int, height: int) -> None:
    name = make_texture(8, rows, "R8")
    with cuglue.register_texture(name, format=format) as handle, handle.map() as m:
        assert m.planes["y"].shape[:2] == (height, 8)
    GL.glDeleteTextures([name])


@pytest.mark.usefixtures("context")
def test_A11_a_planar_image_of_a_wide_texture(driver: Driver) -> None:
    """RGBA16F texels carry four planes of halves."""
    name = make_texture(3, 8, "RGBA16F")
    with cuglue.register_texture(name, format="RGBA16F_PLANAR", width=12, height=2) as handle:
        values = np.arange(4 * 2 * 12, dtype=np.float16).reshape(4, 2, 12)
        handle.write(values)
        texels = glpixels.read_image(name, GL.GL_TEXTURE_2D)
        np.testing.assert_array_equal(texels.reshape(-1), values.reshape(-1))
        with handle.map() as m:
            np.testing.assert_array_equal(m.planes["a"].numpy(), values[3])
    GL.glDeleteTextures([name])


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    ("texture", "options", "words"),
    [
        ((64, 72, "RGBA8"), {"format": "NV12", "width": 64, "height": 48}, "texels of uint8 x 4"),
        ((64, 72, "R8"), {"format": "NV12", "width": 66, "height": 48}, "66 x 72"),
        ((64, 72, "R8"), {"format": "NV12", "width": 64, "height": 50}, "64 x 75"),
        ((63, 72, "R8"), {"format": "NV12", "width": 62, "height": 48}, "even pitch"),
        ((64, 73, "R8"), {"format": "NV12"}, "64 x 74"),
        ((64, 72, "R8"), {"format": "NV12", "width": 0, "height": 48}, "0 x 48"),
        ((64, 72, "R8"), {"format": "NV12", "width": -2, "height": 48}, "-2 x 48"),
        ((6, 4, "RGBA8"), {"format": "RGB8_PACKED", "width": 7}, "multiple of 4"),
        ((2, 12, "RGBA32F"), {"format": "RGB32F_PLANAR", "width": 7, "height": 4}, "multiple of 4"),
    ],
)
def test_A11_what_a_texture_cannot_carry(
    driver: Any, texture: tuple[int, int, str], options: dict[str, Any], words: str
) -> None:
    name = make_texture(*texture)
    with pytest.raises(LayoutError) as caught:
        cuglue.register_texture(name, **options)
    assert words in str(caught.value)
    assert driver.counts["gl_register_image"] == 0
    GL.glDeleteTextures([name])


@pytest.mark.usefixtures("context")
def test_the_drivers_descriptor_is_checked(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA sees other texels than OpenGL says, nothing is interpreted."""
    from cuglue.driver.protocol import ArrayInfo, TexelKind
    from cuglue.errors import UnsupportedError

    with Video("NV12", 16, 8) as video:
        monkeypatch.setattr(driver, "array_info", lambda *where: ArrayInfo(16, 12, 0, 8, 4, TexelKind.UINT))
        with pytest.raises(UnsupportedError, match="uint8 x 4"):
            video.handle.map()
        monkeypatch.undo()
        with video.handle.map():
            pass


@pytest.mark.usefixtures("context")
def test_carried_images_have_one_level(driver: Driver) -> None:
    with Video("NV12", 16, 8) as video, pytest.raises(UsageError, match="level 0"):
        video.handle.map(level=1)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["NV12", "NV16", "NV24"])
def test_planes_on_a_gpu(driver: Driver, context: GlContext, format: str) -> None:
    """CuPy sees the same planes, strides and all."""
    import cupy as cp

    with Video(format, 321, 241, pitch=336) as video:
        data = picture(video)
        video.put(data)
        with video.handle.map() as m:
            y, uv = cp.asarray(m.planes["y"]), m.planes["uv"].cupy()
            assert y.data.ptr == m.device_ptr
            assert (y.shape, y.strides) == ((241, 321), (336, 1))
            assert uv.shape == (*chroma_of(format, 321, 241), 2)
            np.testing.assert_array_equal(y.get(), data[:241, :321])
            assert int(uv.sum()) == int(m.planes["uv"].numpy().sum(dtype=np.int64))
            del y, uv
