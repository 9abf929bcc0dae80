"""Real OpenGL objects to register, and their bytes through OpenGL itself."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import glpixels
import numpy as np
import OpenGL.GL as GL

import cuglue
from cuglue.driver.protocol import Driver
from cuglue.formats import Format, by_name
from cuglue.graphics.handle import CudaHandle


def make_texture(
    width: int,
    height: int,
    format: str = "RGBA8",
    target: int = GL.GL_TEXTURE_2D,
    depth: int = 0,
    levels: int = 1,
) -> int:
    """Name of a new texture with storage."""
    name = GL.GLuint()
    GL.glCreateTextures(target, 1, name)
    number = by_name(format).gl
    if depth:
        GL.glTextureStorage3D(name.value, levels, number, width, height, depth)
    else:
        GL.glTextureStorage2D(name.value, levels, number, width, height)
    return int(name.value)


def make_renderbuffer(width: int, height: int, format: str = "RGBA8") -> int:
    """Name of a new renderbuffer with storage."""
    name = GL.GLuint()
    GL.glCreateRenderbuffers(1, name)
    GL.glNamedRenderbufferStorage(name.value, by_name(format).gl, width, height)
    return int(name.value)


def make_buffer(nbytes: int) -> int:
    """Name of a new buffer with storage."""
    name = GL.GLuint()
    GL.glCreateBuffers(1, name)
    GL.glNamedBufferData(name.value, nbytes, None, GL.GL_DYNAMIC_DRAW)
    return int(name.value)


def upload(texture: int, pixels: np.ndarray[Any, Any]) -> None:
    """Fill level 0 of a 2D texture of four bytes a texel."""
    height, width = pixels.shape[:2]
    data = np.ascontiguousarray(pixels)
    GL.glTextureSubImage2D(
        texture, 0, 0, 0, width, height, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, ctypes.c_void_p(data.ctypes.data)
    )


def download(texture: int, width: int, height: int) -> np.ndarray[Any, Any]:
    """Level 0 of a 2D texture as (height, width, 4) bytes."""
    out = np.empty((height, width, 4), np.uint8)
    GL.glGetTextureImage(
        texture, 0, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, out.nbytes, ctypes.c_void_p(out.ctypes.data)
    )
    return out


@dataclass
class BufferSubject:
    """A registered GL buffer."""

    handle: CudaHandle
    driver: Driver
    name: int
    opaque = False

    def get(self) -> np.ndarray[Any, Any]:
        return glpixels.read_buffer(self.name)

    def put(self, data: np.ndarray[Any, Any]) -> None:
        glpixels.write_buffer(self.name, data)


@dataclass
class ImageSubject:
    """A registered GL texture or renderbuffer, level 0, layer 0."""

    handle: CudaHandle
    driver: Driver
    name: int
    target: int
    format: Format
    opaque = True

    def get(self) -> np.ndarray[Any, Any]:
        return glpixels.read_image(self.name, self.target).reshape(-1).view(np.uint8)

    def put(self, data: np.ndarray[Any, Any]) -> None:
        array = data.view(self.format.dtype).reshape(self.handle.shape)
        glpixels.write_image(self.name, array, self.target)


#: Whether buffers were mapped before they are given to a test: see :func:`map_before`.
mapped_before = False


def map_before(*handles: CudaHandle, stream: Any = None) -> None:
    """Map buffers as often, alone and together, as it takes until their maps on this stream go by a plan."""
    for _ in range(2):
        for handle in handles:
            with handle.map(stream):
                pass
        with cuglue.map_all(handles, stream):
            pass


@contextmanager
def registered_buffer(driver: Driver, nbytes: int = 1000) -> Iterator[BufferSubject]:
    """A buffer with a handle."""
    name = make_buffer(nbytes)
    with cuglue.register_buffer(name) as handle:
        if mapped_before:
            map_before(handle)
        yield BufferSubject(handle, driver, name)
    GL.glDeleteBuffers(1, [name])


@contextmanager
def registered_texture(
    driver: Driver, width: int = 20, height: int = 7, format: str = "RGBA8", target: int = GL.GL_TEXTURE_2D
) -> Iterator[ImageSubject]:
    """A texture with a handle."""
    name = make_texture(width, height, format, target)
    with cuglue.register_texture(name, target) as handle:
        yield ImageSubject(handle, driver, name, target, by_name(format))
    GL.glDeleteTextures([name])


@contextmanager
def registered_renderbuffer(driver: Driver, width: int = 20, height: int = 7) -> Iterator[ImageSubject]:
    """A renderbuffer with a handle."""
    name = make_renderbuffer(width, height)
    with cuglue.register_renderbuffer(name) as handle:
        yield ImageSubject(handle, driver, name, GL.GL_RENDERBUFFER, by_name("RGBA8"))
    GL.glDeleteRenderbuffers(1, [name])
