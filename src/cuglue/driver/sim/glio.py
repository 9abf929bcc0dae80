"""Bytes of OpenGL objects to and from host memory, for the simulated device alone.

Owns the transfers and leaves the application's pixel-store state and bindings as they were. Must not know maps or
arrays. It shares no code with the library's own OpenGL calls: those are what tests check it with.

Images are as the CUDA driver's arrays have them: tight rows, four channels where OpenGL has three, sRGB as stored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...formats import Format
from .memory import Bytes

TEXTURE_3D, TEXTURE_2D_ARRAY, TEXTURE_CUBE_MAP = 0x806F, 0x8C1A, 0x8513
TEXTURE_2D, TEXTURE_RECTANGLE, RENDERBUFFER = 0x0DE1, 0x84F5, 0x8D41
_FORMATS = {1: (0x1903, 0x8D94), 2: (0x8227, 0x8228), 4: (0x1908, 0x8D99)}  # and for integers
_TYPES = {
    "uint8": 0x1401,
    "int8": 0x1400,
    "uint16": 0x1403,
    "int16": 0x1402,
    "uint32": 0x1405,
    "int32": 0x1404,
    "float16": 0x140B,
    "float32": 0x1406,
}
# Pixel-store parameters and what they must be: the byte order, the strides, the offsets, the alignment.
_PACK = dict.fromkeys((0x0D00, 0x0D01, 0x0D02, 0x0D03, 0x0D04, 0x806B, 0x806C), 0) | {0x0D05: 1}
_UNPACK = dict.fromkeys((0x0CF0, 0x0CF1, 0x0CF2, 0x0CF3, 0x0CF4, 0x806D, 0x806E), 0) | {0x0CF5: 1}
_PACK_BUFFER, _PACK_BINDING = 0x88EB, 0x88ED
_UNPACK_BUFFER, _UNPACK_BINDING = 0x88EC, 0x88EF


def read_buffer(gl: Any, name: int, out: Bytes) -> None:
    """Copy the first bytes of a buffer to ``out``."""
    gl.glGetNamedBufferSubData(name, 0, out.nbytes, _address(out))  # of an array PyOpenGL would make a copy


def write_buffer(gl: Any, name: int, data: Bytes) -> None:
    """Copy ``data`` to the start of a buffer, whatever its storage allows: a copy between buffers always may."""
    staging = gl.GLuint()
    gl.glCreateBuffers(1, staging)
    try:
        gl.glNamedBufferStorage(staging.value, data.nbytes, _address(data), 0)
        gl.glCopyNamedBufferSubData(staging.value, name, 0, 0, data.nbytes)
    finally:
        gl.glDeleteBuffers(1, staging)


class Part:
    """A level of an image, and of a layered one the slices ``first`` to ``first + count``."""

    __slots__ = ("count", "first", "format", "height", "level", "name", "target", "width")

    def __init__(
        self,
        name: int,
        target: int,
        level: int,
        extent: tuple[int, int],
        format: Format,
        first: int = 0,
        count: int = 1,
    ) -> None:
        self.name, self.target, self.level = name, target, level
        self.width, self.height = extent
        self.format = format
        self.first, self.count = first, count

    def read(self, gl: Any, out: Bytes) -> None:
        """Copy its texels to ``out``."""
        with _plain(gl, _PACK, _PACK_BUFFER, _PACK_BINDING):
            if self.target != RENDERBUFFER:
                self._get(gl, self.name, out)
                return
            with self._twin(gl) as twin:
                self._copy(gl, (self.name, RENDERBUFFER), (twin, TEXTURE_2D))
                self._get(gl, twin, out)

    def write(self, gl: Any, data: Bytes) -> None:
        """Copy ``data`` to its texels."""
        with _plain(gl, _UNPACK, _UNPACK_BUFFER, _UNPACK_BINDING):
            if self.target in (TEXTURE_3D, TEXTURE_2D_ARRAY, TEXTURE_CUBE_MAP):
                where = (self.name, self.level, 0, 0, self.first, self.width, self.height, self.count)
                gl.glTextureSubImage3D(*where, *self._transfer(), _address(data))
            elif self.target != RENDERBUFFER:
                self._put(gl, self.name, self.level, data)
            else:
                with self._twin(gl) as twin:
                    self._put(gl, twin, 0, data)
                    self._copy(gl, (twin, TEXTURE_2D), (self.name, RENDERBUFFER))

    def _transfer(self) -> tuple[int, int]:
        return _FORMATS[self.format.channels][self.format.integer], _TYPES[self.format.dtype]

    def _get(self, gl: Any, texture: int, out: Bytes) -> None:
        where = (texture, self.level, 0, 0, self.first, self.width, self.height, self.count)
        gl.glGetTextureSubImage(*where, *self._transfer(), out.nbytes, _address(out))

    def _put(self, gl: Any, texture: int, level: int, data: Bytes) -> None:
        gl.glTextureSubImage2D(
            texture, level, 0, 0, self.width, self.height, *self._transfer(), _address(data)
        )

    @contextmanager
    def _twin(self, gl: Any) -> Iterator[int]:
        """A texture like a renderbuffer, which has no transfers itself. Copies between the two keep every bit."""
        texture = gl.GLuint()
        gl.glCreateTextures(TEXTURE_2D, 1, texture)
        try:
            gl.glTextureStorage2D(texture.value, 1, self.format.gl, self.width, self.height)
            yield texture.value
        finally:
            gl.glDeleteTextures(1, texture)

    def _copy(self, gl: Any, source: tuple[int, int], target: tuple[int, int]) -> None:
        gl.glCopyImageSubData(*source, 0, 0, 0, 0, *target, 0, 0, 0, 0, self.width, self.height, 1)


@contextmanager
def _plain(gl: Any, wanted: dict[int, int], target: int, binding: int) -> Iterator[None]:
    """Tight rows and host memory, for the time of one transfer."""
    before = {parameter: int(gl.glGetIntegerv(parameter)) for parameter in wanted}
    bound = int(gl.glGetIntegerv(binding))
    for parameter, value in wanted.items():
        gl.glPixelStorei(parameter, value)
    gl.glBindBuffer(target, 0)
    try:
        yield
    finally:
        gl.glBindBuffer(target, bound)
        for parameter, value in before.items():
            gl.glPixelStorei(parameter, value)


def _address(array: Bytes) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
