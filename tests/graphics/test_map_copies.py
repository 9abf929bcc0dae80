"""Copies between images and their linear buffers: formats, widths, levels, layers and faces; both ways, both paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import glpixels
import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.subjects import make_renderbuffer, make_texture

import cuglue
from cuglue.core.device import device_state
from cuglue.core.stream import as_stream
from cuglue.driver.protocol import ArrayInfo, CopyKind, Driver, TexelKind
from cuglue.errors import NotAllocatedError, UsageError
from cuglue.formats import FORMATS, by_name
from cuglue.graphics import image_copy
from cuglue.graphics.glcontext import GlContext
from cuglue.graphics.handle import CudaHandle
from cuglue.graphics.image_copy import CopyPath, Image, choose_path, choose_unit, image_copier
from cuglue.testing import trace
from cuglue.testing.handle_suite import peek, poke

STORED = [f.name for f in FORMATS if f.gl is not None and f.registers]
DEVICES = pytest.mark.parametrize("on", ["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
PATHS = pytest.mark.parametrize("path", list(CopyPath))


@pytest.fixture
def path_taken(path: CopyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_copy, "SMALL_BYTES", 0 if path is CopyPath.SURFACE else 1 << 40)


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Values that survive OpenGL's own transfers bit for bit."""
    rng = np.random.default_rng(seed)
    if dtype.startswith("float"):
        return rng.integers(-512, 512, shape).astype(dtype)
    kind = np.iinfo(dtype)
    return rng.integers(kind.min, kind.max, shape, dtype, endpoint=True)


def check_both_ways(handle: CudaHandle, name: int, target: int, level: int = 0, layer: int = 0) -> None:
    """A map shows what OpenGL has; what a writable map holds reaches OpenGL."""
    assert handle.format is not None
    stored = slice(handle.format.components)  # OpenGL keeps no fourth channel of RGB8 and RGB32F
    old = glpixels.read_image(name, target, level, layer)
    pixels = numbers(old.shape, old.dtype.name, level + 7 * layer)
    glpixels.write_image(name, pixels, target, level, layer)
    with handle.map(level=level, layer=layer) as m:
        assert m.shape == pixels.shape
        np.testing.assert_array_equal(m.numpy()[..., stored], pixels[..., stored])
    other = np.ascontiguousarray(pixels[::-1, ::-1])
    with handle.map_mut(level=level, layer=layer) as m:
        poke(m, other.view(np.uint8).reshape(-1))
    np.testing.assert_array_equal(
        glpixels.read_image(name, target, level, layer)[..., stored], other[..., stored]
    )


@DEVICES
@PATHS
@pytest.mark.gl
@pytest.mark.usefixtures("path_taken")
class TestEveryCopy:
    @pytest.fixture(autouse=True)
    def _context(self, on: str, driver: Driver, context: GlContext) -> None:
        self.driver = driver

    @pytest.mark.parametrize("format", STORED)
    def test_formats(self, format: str, path: CopyPath) -> None:
        for width, height in ((1, 1), (3, 2), (4, 5), (16, 3), (67, 5)):
            name = make_texture(width, height, format)
            with cuglue.register_texture(name) as handle:
                assert handle.copy_path is path
                assert handle.format is by_name(format)
                check_both_ways(handle, name, GL.GL_TEXTURE_2D)
            GL.glDeleteTextures([name])

    @pytest.mark.parametrize("format", ["R8", "RG8", "RGBA8", "RGBA16F", "RGBA32F"])
    def test_every_width(self, format: str) -> None:
        for width in range(1, 68):
            name = make_texture(width, 1 + width % 5, format)
            with cuglue.register_texture(name) as handle:
                check_both_ways(handle, name, GL.GL_TEXTURE_2D)
            GL.glDeleteTextures([name])

    def test_levels(self) -> None:
        name = make_texture(20, 12, levels=3)
        with cuglue.register_texture(name) as handle:
            for level in (0, 1, 2, 0):
                check_both_ways(handle, name, GL.GL_TEXTURE_2D, level)
            with pytest.raises(NotAllocatedError):
                handle.map(level=3)
        GL.glDeleteTextures([name])

    @pytest.mark.parametrize("target", [GL.GL_TEXTURE_2D_ARRAY, GL.GL_TEXTURE_CUBE_MAP])
    def test_layers_and_faces(self, target: int) -> None:
        cube = target == GL.GL_TEXTURE_CUBE_MAP
        name = make_texture(12, 12, target=target, depth=0 if cube else 4, levels=2)
        layers = 6 if cube else 4
        with cuglue.register_texture(name, target) as handle:
            for level in (0, 1):
                for layer in range(layers):
                    check_both_ways(handle, name, target, level, layer)
            with pytest.raises(UsageError):
                handle.map(layer=layers)
        GL.glDeleteTextures([name])

    def test_a_rectangle(self) -> None:
        name = make_texture(13, 5, target=GL.GL_TEXTURE_RECTANGLE)
        with cuglue.register_texture(name, GL.GL_TEXTURE_RECTANGLE) as handle:
            check_both_ways(handle, name, GL.GL_TEXTURE_RECTANGLE)
        GL.glDeleteTextures([name])

    @pytest.mark.parametrize("format", ["RGBA8", "RGBA32F"])
    def test_a_renderbuffer(self, format: str) -> None:
        name = make_renderbuffer(13, 5, format)
        with cuglue.register_renderbuffer(name) as handle:
            check_both_ways(handle, name, GL.GL_RENDERBUFFER)
        GL.glDeleteRenderbuffers(1, [name])


@DEVICES
@pytest.mark.gl
@pytest.mark.parametrize("format", ["R8", "RGBA8", "RGBA32F"])
def test_slices_of_a_3d_texture(on: str, driver: Driver, context: GlContext, format: str) -> None:
    """Whatever its size: the driver's copy reaches the first slice only."""
    name = make_texture(9, 6, format, GL.GL_TEXTURE_3D, depth=4, levels=2)
    with cuglue.register_texture(name, GL.GL_TEXTURE_3D) as handle:
        assert handle.copy_path is CopyPath.SURFACE
        for level, slices in ((0, 4), (1, 2)):
            for layer in range(slices):
                check_both_ways(handle, name, GL.GL_TEXTURE_3D, level, layer)
            with pytest.raises(UsageError):
                handle.map(level=level, layer=slices)
    GL.glDeleteTextures([name])


@DEVICES
@pytest.mark.gl
def test_two_levels_at_once(on: str, driver: Driver, context: GlContext) -> None:
    """One is read while the next is made from it; each has memory of its own while both are mapped."""
    name = make_texture(16, 8, levels=2)
    pixels = numbers((8, 16, 4), "uint8")
    glpixels.write_image(name, pixels)
    half = np.ascontiguousarray(pixels[::2, ::2])
    with cuglue.register_texture(name) as handle:
        for _ in range(3):
            with handle.map() as base, handle.map_mut(level=1, overwrite=True) as level:
                assert base.device_ptr != level.device_ptr
                poke(level, half.reshape(-1))
                np.testing.assert_array_equal(peek(base), pixels.reshape(-1))
        np.testing.assert_array_equal(glpixels.read_image(name, level=1), half)
    GL.glDeleteTextures([name])


# --- every texel, width and height, between canaries ----------------------------------------------------------------

TEXELS = [
    (bits, channels, kind)
    for kind in TexelKind
    for bits in ((16, 32) if kind is TexelKind.FLOAT else (8, 16, 32))
    for channels in (1, 2, 4)
]
ZONE = 256  # bytes before and behind the linear memory


class Between:
    """Linear memory between two zones of canaries, and the arrays of one texel beside it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.state = device_state(driver, 0)
        self.stream = as_stream(0, device=0, driver=driver)
        self.size = 2 * ZONE + 67 * 16 * 5 + 16
        self.memory = driver.malloc(self.size, 0)

    def put(self, data: np.ndarray) -> None:
        self.driver.copy_async(self.memory, data.ctypes.data, data.nbytes, CopyKind.H2D, self.stream.handle)
        self.stream.synchronize()

    def get(self) -> np.ndarray:
        found = np.empty(self.size, np.uint8)
        self.driver.copy_async(found.ctypes.data, self.memory, self.size, CopyKind.D2H, self.stream.handle)
        self.stream.synchronize()
        return found

    def check(self, info: ArrayInfo, shift: int) -> None:
        """Linear -> array -> linear again, from an address that is a texel's, and by ``shift`` bytes no more."""
        driver, size = self.driver, info.width * info.texel_bytes * info.height
        array = driver.array_create(info, 0)
        image = Image(self.state, array, info)
        copier, inside = image_copier(self.state), slice(ZONE + shift, ZONE + shift + size)
        before = np.full(self.size, 0xA5, np.uint8)
        before[inside] = np.arange(size) * 7 + info.width
        self.put(before)
        copier.store(image, self.memory + inside.start, self.stream)
        self.stream.submit()
        np.testing.assert_array_equal(self.get(), before)
        self.put(np.full(self.size, 0xA5, np.uint8))
        copier.load(image, self.memory + inside.start, self.stream)
        self.stream.submit()
        np.testing.assert_array_equal(self.get(), before)
        image.objects.retire(self.stream)
        self.state.retire.drain()
        driver.array_destroy(array)


@DEVICES
@PATHS
@pytest.mark.usefixtures("path_taken")
@pytest.mark.parametrize(("bits", "channels", "kind"), TEXELS, ids=str)
def test_every_texel_width_and_height_stays_between_its_canaries(
    on: str, path: CopyPath, driver: Driver, bits: int, channels: int, kind: TexelKind
) -> None:
    between = Between(driver)
    # Kernels and copies know the size of a texel, not its kind: the simulated device takes a few of the others.
    every = on == "cuda" or kind is TexelKind.UINT
    for width in range(1, 68) if every else (1, 3, 16, 67):
        for height in range(1, 6) if on == "cuda" else {1, 1 + width % 5}:
            info = ArrayInfo(width, height, 0, bits, channels, kind)
            between.check(info, info.texel_bytes if width % 2 else 0)
    driver.free(between.memory, 0)


# --- the decisions ------------------------------------------------------------------------------------------------


def paths() -> Iterator[tuple[int, bool, int, CopyPath]]:
    small, large = image_copy.SMALL_BYTES - 1, image_copy.SMALL_BYTES
    yield small, True, 0, CopyPath.DRIVER
    yield large, True, 0, CopyPath.SURFACE
    yield large, False, 0, CopyPath.DRIVER
    yield small, True, 1, CopyPath.SURFACE
    yield small, True, 8, CopyPath.SURFACE


@pytest.mark.parametrize(("nbytes", "surfaces", "depth", "expected"), list(paths()))
def test_the_path(nbytes: int, surfaces: bool, depth: int, expected: CopyPath) -> None:
    assert choose_path(nbytes, surfaces=surfaces, depth=depth) is expected


@pytest.mark.parametrize(
    ("row_bytes", "base", "unit"),
    [
        (16, 0, 16),
        (64, 512, 16),
        (24, 512, 8),
        (4, 512, 4),
        (6, 512, 2),
        (7, 512, 1),
        (64, 520, 8),
        (64, 1, 1),
    ],
)
def test_the_unit(row_bytes: int, base: int, unit: int) -> None:
    assert choose_unit(row_bytes, base) == unit


def test_no_unit_cuts_a_texel() -> None:
    for texel in (1, 2, 4, 8, 16):
        for width in range(1, 70):
            assert choose_unit(width * texel, 512) >= texel


@DEVICES
@PATHS
@pytest.mark.gl
@pytest.mark.usefixtures("path_taken")
def test_a_frame_like_the_last_allocates_and_registers_nothing(
    on: str, path: CopyPath, driver: Driver, context: GlContext
) -> None:
    name = make_texture(32, 16)
    with cuglue.register_texture(name) as handle:
        for turn in range(4):
            with trace() as calls:
                with handle.map() as m:
                    m.__dlpack__(max_version=(1, 0))
                with handle.map_mut(overwrite=True):
                    pass
            made = {c.method for c in calls if "alloc" in c.method or "regist" in c.method}
            made |= {"kernel_load", "event_create", "array_create"} & {c.method for c in calls}
            assert bool(made) == (turn == 0), made
            driver.device_synchronize(0)  # a device that lags behind needs more events at once
    GL.glDeleteTextures([name])
