"""OpenGL objects asked by name, and their bytes moved, in a real context (Mesa where there is no GPU)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import OpenGL.GL as GL
import pytest

from cuglue.errors import DriverError, LayoutError, NoContextError, NotAllocatedError, UnsupportedError, UsageError
from cuglue.formats import FORMATS, Format, Packing, by_name
from cuglue.graphics import glcontext, globjects, glpixels

pytestmark = pytest.mark.gl

STORED = [f for f in FORMATS if f.gl is not None and f.registers]
SIZES = [(1, 1), (5, 3), (7, 4), (16, 8), (67, 5)]


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[glcontext.GlContext]:
    with glcontext.headless() as made:
        yield made


@pytest.fixture(autouse=True)
def no_error_is_left() -> Iterator[None]:
    yield
    assert GL.glGetError() == 0


def texture(format: Format, width: int, height: int, target: int = GL.GL_TEXTURE_2D, depth: int = 0) -> int:
    name = GL.GLuint()
    GL.glCreateTextures(target, 1, name)
    if depth:
        GL.glTextureStorage3D(name.value, 1, format.gl, width, height, depth)
    else:
        GL.glTextureStorage2D(name.value, 1, format.gl, width, height)
    return int(name.value)


def buffer(nbytes: int, *, flags: int | None = None) -> int:
    name = GL.GLuint()
    GL.glCreateBuffers(1, name)
    if flags is None:
        GL.glNamedBufferData(name.value, nbytes, None, GL.GL_STATIC_DRAW)
    else:
        GL.glNamedBufferStorage(name.value, nbytes, None, flags)
    return int(name.value)


def renderbuffer(format: Format, width: int, height: int, samples: int = 0) -> int:
    name = GL.GLuint()
    GL.glCreateRenderbuffers(1, name)
    GL.glNamedRenderbufferStorageMultisample(name.value, samples, format.gl, width, height)
    return int(name.value)


def pattern(format: Format, width: int, height: int, seed: int = 0) -> npt.NDArray[Any]:
    """Every value a texel can hold may occur, but for floats' infinities and NaN, which OpenGL may change."""
    random = np.random.default_rng(seed)
    shape = (height, width, format.channels)
    kind = np.dtype(format.dtype)
    if kind.kind == "f":
        return random.uniform(-100, 100, shape).astype(kind)
    bounds = np.iinfo(kind)
    return random.integers(bounds.min, bounds.max, shape, kind, endpoint=True)


def compare(format: Format, got: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got[..., : format.components], wanted[..., : format.components])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("format", STORED, ids=str)
def test_every_texture_format_round_trips_exactly(format: Format, size: tuple[int, int]) -> None:
    name, image = texture(format, *size), pattern(format, *size)
    glpixels.write_image(name, image)
    compare(format, glpixels.read_image(name), image)
    GL.glDeleteTextures(1, [name])


@pytest.mark.parametrize("format", STORED, ids=str)
def test_every_format_is_described_with_its_own_number(format: Format) -> None:
    name = texture(format, 5, 3)
    assert globjects.describe_texture(name) == (5, 3, 1, format.gl, 0)
