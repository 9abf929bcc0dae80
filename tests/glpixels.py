"""What OpenGL itself says is in its objects, for tests that must not ask the code under test.

Owns the transfers and keeps the application's pixel-store state and bindings as they were. Images come as the CUDA
driver's array has them: tight rows, row 0 at the bottom, four channels where OpenGL has three, sRGB bytes as stored.
Must not know CUDA; runs where a context is current (see ``cuglue.graphics.glops``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from cuglue.errors import LayoutError, UnsupportedError, UsageError
from cuglue.formats import Format, by_gl
from cuglue.graphics.glcalls import checked
from cuglue.graphics.globjects import (
    RENDERBUFFER,
    TEXTURE_2D,
    ImageInfo,
    describe_buffer,
    describe_image,
    target_name,
)

_FLAT_TARGETS = (TEXTURE_2D, 0x84F5)  # and GL_TEXTURE_RECTANGLE
_LAYERED_TARGETS = (0x806F, 0x8C1A, 0x8513, 0x9009)  # 3D, 2D array, cube map, cube map array
_CHANNELS = {
    1: (0x1903, 0x8D94),
    2: (0x8227, 0x8228),
    4: (0x1908, 0x8D99),
}  # RED, RG, RGBA and their _INTEGER
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
_DYNAMIC_STORAGE = 0x0100
_BUFFER_IMMUTABLE, _BUFFER_STORAGE_FLAGS = 0x821F, 0x8220
_PIXEL_PACK_BUFFER, _PIXEL_UNPACK_BUFFER = 0x88EB, 0x88EC
_PACK_BINDING, _UNPACK_BINDING = 0x88ED, 0x88EF
_ALIGNMENTS = {0x0D05, 0x0CF5}
# SWAP_BYTES, LSB_FIRST, ROW_LENGTH, SKIP_ROWS, SKIP_PIXELS, ALIGNMENT, SKIP_IMAGES, IMAGE_HEIGHT
_PACK = (0x0D00, 0x0D01, 0x0D02, 0x0D03, 0x0D04, 0x0D05, 0x806B, 0x806C)
_UNPACK = (0x0CF0, 0x0CF1, 0x0CF2, 0x0CF3, 0x0CF4, 0x0CF5, 0x806D, 0x806E)


# --- buffers --------------------------------------------------------------------------------------------------


def read_buffer(name: int, nbytes: int | None = None, offset: int = 0) -> npt.NDArray[np.uint8]:
    """Copy bytes of a buffer object to the host.

    Args:
        name: the GL buffer name.
        nbytes: how many bytes; None: all from ``offset`` on.
        offset: first byte.

    Ordering: blocks the host until OpenGL has finished writing the buffer.

    Raises:
        LayoutError: the range leaves the buffer. NotAllocatedError: no such buffer, or no storage.
    """
    count = _range(name, nbytes, offset)
    out = np.empty(count, np.uint8)
    with checked(f"reading buffer {name}") as gl:
        # An address, not the array: PyOpenGL casts NumPy destinations of this call to bytes and corrupts the heap.
        gl.glGetNamedBufferSubData(name, offset, count, _address(out))
    return out


def write_buffer(name: int, data: npt.ArrayLike | bytes, offset: int = 0) -> None:
    """Copy ``data`` (its bytes, in C order) into a buffer object, immutable storage included.

    Ordering: OpenGL has taken the bytes when this returns.

    Raises:
        LayoutError: the range leaves the buffer. NotAllocatedError: no such buffer, or no storage.
    """
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data)
    _range(name, array.nbytes, offset)
    with checked(f"writing buffer {name}") as gl:
        if _writable(gl, name):
            gl.glNamedBufferSubData(name, offset, array.nbytes, _address(array))
            return
        staging = gl.GLuint()  # storage that glBufferSubData may not touch can still be the target of a copy
        gl.glCreateBuffers(1, staging)
        try:
            gl.glNamedBufferStorage(staging.value, array.nbytes, _address(array), 0)
            gl.glCopyNamedBufferSubData(staging.value, name, 0, offset, array.nbytes)
        finally:
            gl.glDeleteBuffers(1, staging)


def _range(name: int, nbytes: int | None, offset: int) -> int:
    size = describe_buffer(name)
    count = size - offset if nbytes is None else nbytes
    if offset < 0 or count < 0 or offset + count > size:
        raise LayoutError(
            f"buffer {name}", got=f"bytes {offset} to {offset + count}", expected=f"within its {size} bytes"
        )
    return count


def _writable(gl: Any, name: int) -> bool:
    immutable, flags = gl.GLint(), gl.GLint()
    gl.glGetNamedBufferParameteriv(name, _BUFFER_IMMUTABLE, immutable)
    gl.glGetNamedBufferParameteriv(name, _BUFFER_STORAGE_FLAGS, flags)
    return not immutable.value or bool(flags.value & _DYNAMIC_STORAGE)


# --- images ---------------------------------------------------------------------------------------------------


def read_image(name: int, target: int = TEXTURE_2D, level: int = 0, layer: int = 0) -> npt.NDArray[Any]:
    """Copy one level and layer of an image to the host: shape (height, width, channels), tight rows.

    Args:
        name: the GL texture or renderbuffer name.
        target: its target; ``GL_RENDERBUFFER`` for a renderbuffer.
        level: mipmap level.
        layer: slice, array layer or cube map face.

    Ordering: blocks the host until OpenGL has finished drawing the image.

    Raises:
        UnsupportedError: a format without a texel type, a multisampled image or a target without rows.
        UsageError: a layer out of range, or as :func:`~cuglue.graphics.globjects.describe_image`.
    """
    info, format = _image(name, target, level, layer)
    out = np.empty((info.height, info.width, format.channels), format.dtype)
    with checked(f"reading {target_name(target)} {name}") as gl, _plain_transfers(gl, _PACK, _PACK_BINDING):
        if target != RENDERBUFFER:
            _get(gl, name, level, layer, info, format, out)
        else:
            with _copy_texture(gl, info, format) as texture:
                _copy_image(gl, (name, RENDERBUFFER), (texture, TEXTURE_2D), info)
                _get(gl, texture, 0, 0, info, format, out)
    return out


def write_image(
    name: int, array: npt.NDArray[Any], target: int = TEXTURE_2D, level: int = 0, layer: int = 0
) -> None:
    """Copy ``array`` of shape (height, width, channels) into one level and layer of an image.

    Args: as :func:`read_image`. The fourth channel of a three-channel image is dropped, as OpenGL stores none.

    Ordering: OpenGL has taken the bytes when this returns.

    Raises:
        LayoutError: another shape or element type than :func:`read_image` gives.
        UnsupportedError, UsageError: as :func:`read_image`.
    """
    info, format = _image(name, target, level, layer)
    shape = (info.height, info.width, format.channels)
    if array.shape != shape or array.dtype != format.dtype:
        raise LayoutError(
            f"writing {target_name(target)} {name} ({format})",
            got=f"{array.dtype} of shape {array.shape}",
            expected=f"{format.dtype} of shape {shape}",
        )
    data = np.ascontiguousarray(array)
    with (
        checked(f"writing {target_name(target)} {name}") as gl,
        _plain_transfers(gl, _UNPACK, _UNPACK_BINDING),
    ):
        if target in _FLAT_TARGETS:
            gl.glTextureSubImage2D(
                name, level, 0, 0, info.width, info.height, *_transfer(format), _address(data)
            )
        elif target != RENDERBUFFER:
            gl.glTextureSubImage3D(
                name, level, 0, 0, layer, info.width, info.height, 1, *_transfer(format), _address(data)
            )
        else:
            with _copy_texture(gl, info, format) as texture:
                gl.glTextureSubImage2D(
                    texture, 0, 0, 0, info.width, info.height, *_transfer(format), _address(data)
                )
                _copy_image(gl, (texture, TEXTURE_2D), (name, RENDERBUFFER), info)


def _image(name: int, target: int, level: int, layer: int) -> tuple[ImageInfo, Format]:
    """Describe an image and check that its bytes can be moved as texels."""
    what = f"{target_name(target)} {name}"
    info = describe_image(name, target, level)
    if target != RENDERBUFFER and target not in _FLAT_TARGETS + _LAYERED_TARGETS:
        raise UnsupportedError(
            f"reading and writing {what}",
            reason="target",
            hint="Use a 2D, rectangle, 3D, array or cube map texture",
        )
    if info.samples > 1:
        raise UnsupportedError(
            f"reading and writing {what}",
            reason="multisample",
            got=f"{info.samples} samples",
            hint="Resolve it first",
        )
    if not 0 <= layer < info.depth:
        raise UsageError(what, got=f"layer {layer}", expected=f"0 to {info.depth - 1}")
    format = by_gl(info.internal_format)
    if not format.channels:
        raise UnsupportedError(f"{what} ({format}): {format.reason}", reason="format", hint=format.way_out)
    return info, format


def _transfer(format: Format) -> tuple[int, int]:
    """The pixel format and type of a transfer that changes no bit."""
    return _CHANNELS[format.channels][format.integer], _TYPES[format.dtype]


def _get(
    gl: Any, texture: int, level: int, layer: int, info: ImageInfo, format: Format, out: npt.NDArray[Any]
) -> None:
    gl.glGetTextureSubImage(
        texture, level, 0, 0, layer, info.width, info.height, 1, *_transfer(format), out.nbytes, _address(out)
    )


@contextmanager
def _copy_texture(gl: Any, info: ImageInfo, format: Format) -> Iterator[int]:
    """A temporary texture like a renderbuffer, which itself has no transfers. Copies between them are bitwise and
    ignore scissor, masks and blending, which a framebuffer would obey."""
    texture = gl.GLuint()
    gl.glCreateTextures(TEXTURE_2D, 1, texture)
    try:
        gl.glTextureStorage2D(texture.value, 1, format.gl, info.width, info.height)
        yield texture.value
    finally:
        gl.glDeleteTextures(1, texture)


def _copy_image(gl: Any, source: tuple[int, int], target: tuple[int, int], info: ImageInfo) -> None:
    gl.glCopyImageSubData(*source, 0, 0, 0, 0, *target, 0, 0, 0, 0, info.width, info.height, 1)


@contextmanager
def _plain_transfers(gl: Any, parameters: tuple[int, ...], binding: int) -> Iterator[None]:
    """Tight rows to or from host memory; the application's pixel-store state and pixel buffer come back after."""
    target = _PIXEL_PACK_BUFFER if binding == _PACK_BINDING else _PIXEL_UNPACK_BUFFER
    saved = [int(gl.glGetIntegerv(parameter)) for parameter in parameters]
    bound = int(gl.glGetIntegerv(binding))
    wanted = [1 if parameter in _ALIGNMENTS else 0 for parameter in parameters]
    changed = [(p, old, new) for p, old, new in zip(parameters, saved, wanted, strict=True) if old != new]
    for parameter, _, new in changed:
        gl.glPixelStorei(parameter, new)
    gl.glBindBuffer(target, 0)
    try:
        yield
    finally:
        for parameter, old, _ in changed:
            gl.glPixelStorei(parameter, old)
        gl.glBindBuffer(target, bound)


def _address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
