"""What OpenGL objects are: sizes, formats and samples of buffers, textures and renderbuffers, asked by name.

Owns the questions, through direct state access: nothing is bound and no state changes. Must not know CUDA, nor
whether what it finds registers. Every function runs where a context is current (see :mod:`glops`).
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_int64
from typing import NamedTuple

from ..errors import NotAllocatedError, UsageError
from .glquestions import BUFFER_SIZE, Question, Questions

TEXTURE_2D = 0x0DE1
RENDERBUFFER = 0x8D41
_TARGET = 0x1006
_WIDTH, _HEIGHT, _DEPTH, _INTERNAL_FORMAT, _SAMPLES = 0x1000, 0x1001, 0x8071, 0x1003, 0x9106
_LEVEL = _WIDTH, _HEIGHT, _DEPTH, _INTERNAL_FORMAT, _SAMPLES
_FLAT_LEVEL = _WIDTH, _HEIGHT, _INTERNAL_FORMAT
_RENDERBUFFER = 0x8D42, 0x8D43, 0x8D44, 0x8CAB  # width, height, internal format, samples
_CUBE_MAP = 0x8513
_RECTANGLE = 0x84F5

_TARGETS = {
    0x0DE0: "GL_TEXTURE_1D",
    TEXTURE_2D: "GL_TEXTURE_2D",
    0x806F: "GL_TEXTURE_3D",
    _RECTANGLE: "GL_TEXTURE_RECTANGLE",
    _CUBE_MAP: "GL_TEXTURE_CUBE_MAP",
    0x8C18: "GL_TEXTURE_1D_ARRAY",
    0x8C1A: "GL_TEXTURE_2D_ARRAY",
    0x8C2A: "GL_TEXTURE_BUFFER",
    0x9009: "GL_TEXTURE_CUBE_MAP_ARRAY",
    0x9100: "GL_TEXTURE_2D_MULTISAMPLE",
    0x9102: "GL_TEXTURE_2D_MULTISAMPLE_ARRAY",
    RENDERBUFFER: "GL_RENDERBUFFER",
}
#: Targets whose levels have one slice and no samples.
_FLAT = frozenset({TEXTURE_2D, _RECTANGLE, _CUBE_MAP})


class ImageInfo(NamedTuple):
    """One level of a texture, or a renderbuffer.

    ``width`` and ``height`` in texels; ``depth``: slices of a 3D texture, layers of an array, 6 for a cube map, else
    1; ``internal_format``: the GL number; ``samples``: 0 where not multisampled.
    """

    width: int
    height: int
    depth: int
    internal_format: int
    samples: int


def target_name(target: int) -> str:
    """Name a texture target for messages."""
    return _TARGETS.get(target, f"0x{target:04X}")


def describe_buffer(name: int) -> int:
    """Size in bytes of the buffer object ``name``.

    Raises:
        NotAllocatedError: no buffer object of that name here, or it has no storage.
        NoContextError: no context is current on this thread.
    """
    what = f"buffer {name}"
    ask = Questions(what)
    _require(ask.exists("glIsBuffer", name), what, "glBindBuffer")
    size = ask.size("glGetNamedBufferParameteri64v", name, BUFFER_SIZE)
    if not size:
        raise _no_storage(what, "glNamedBufferStorage or glBufferData")
    return size


class BufferSize(Question):
    """:func:`describe_buffer` of one buffer for every map, one at a time: one question where all is well."""

    __slots__ = ("_name",)

    def __init__(self, name: int) -> None:
        super().__init__(c_int64, "glGetNamedBufferParameteri64v", name, BUFFER_SIZE)
        self._name = name

    def __call__(self) -> int:
        return self.number() or describe_buffer(self._name)


def image_level(name: int, target: int, info: ImageInfo) -> Callable[[int], ImageInfo]:
    """:func:`describe_image` by level for every map, one at a time: few questions where level 0 still is ``info``."""
    if target not in _FLAT:
        return lambda level: describe_image(name, target, level)
    level_of = "glGetTextureLevelParameteriv", name, 0
    expected = [
        (Question(c_int, "glGetTextureParameteriv", name, _TARGET), target),
        (Question(c_int, *level_of, _WIDTH), info.width),
        (Question(c_int, *level_of, _HEIGHT), info.height),
        (Question(c_int, *level_of, _INTERNAL_FORMAT), info.internal_format),
    ]

    def describe(level: int) -> ImageInfo:
        if not level and all(question.number() == number for question, number in expected):
            return info
        return describe_image(name, target, level)

    return describe


def describe_texture(name: int, target: int = TEXTURE_2D, level: int = 0) -> ImageInfo:
    """Size and format of one level of the texture ``name``.

    Args:
        name: the GL texture name.
        target: what the texture was first bound to (or created as).
        level: mipmap level.

    Raises:
        NotAllocatedError: no texture of that name here, or the level has no storage.
        UsageError: the texture has another target, or the level is negative.
        NoContextError: no context is current on this thread.
    """
    what = f"texture {name}"
    if level < 0 or (level and target == _RECTANGLE):
        last = "level 0: a rectangle has no other" if target == _RECTANGLE else "a level of 0 or more"
        raise UsageError(what, got=f"level {level}", expected=last)
    ask = Questions(what)
    _require(ask.exists("glIsTexture", name), what, "glBindTexture")
    (found,) = ask.numbers("glGetTextureParameteriv", name, parameters=(_TARGET,))
    if found != target:
        raise UsageError(
            f"{what} has another target",
            got=target_name(target),
            expected=target_name(found),
            hint=f"Pass target={target_name(found)}",
        )
    if target in _FLAT:  # every map asks, and OpenGL has one answer to the rest
        numbers = ask.numbers("glGetTextureLevelParameteriv", name, level, parameters=_FLAT_LEVEL)
        width, height, internal_format = numbers
        info = ImageInfo(width, height, 1, internal_format, 0)
    else:
        info = ImageInfo(*ask.numbers("glGetTextureLevelParameteriv", name, level, parameters=_LEVEL))
    if not info.width or not info.height:
        raise _no_storage(f"level {level} of {what}", "glTextureStorage2D or glTexImage2D")
    return info._replace(depth=6) if target == _CUBE_MAP else info


def describe_renderbuffer(name: int) -> ImageInfo:
    """Size and format of the renderbuffer ``name``.

    Raises:
        NotAllocatedError: no renderbuffer of that name here, or it has no storage.
        NoContextError: no context is current on this thread.
    """
    what = f"renderbuffer {name}"
    ask = Questions(what)
    _require(ask.exists("glIsRenderbuffer", name), what, "glBindRenderbuffer")
    numbers = ask.numbers("glGetNamedRenderbufferParameteriv", name, parameters=_RENDERBUFFER)
    width, height, internal_format, samples = numbers
    info = ImageInfo(width, height, 1, internal_format, samples)
    if not info.width or not info.height:
        raise _no_storage(what, "glNamedRenderbufferStorage")
    return info


def describe_image(name: int, target: int, level: int = 0) -> ImageInfo:
    """:func:`describe_texture`, or :func:`describe_renderbuffer` where ``target`` is ``GL_RENDERBUFFER``."""
    if target != RENDERBUFFER:
        return describe_texture(name, target, level)
    if level:
        raise UsageError(f"renderbuffer {name}", got=f"level {level}", expected="level 0: it has no other")
    return describe_renderbuffer(name)


def _require(exists: bool, what: str, bind: str) -> None:
    if not exists:
        raise NotAllocatedError(
            f"{what} is no object of the current OpenGL context",
            got="a name never generated, never bound, deleted, or of a context that shares nothing with this one",
            hint=f"Call {bind} (or glCreate...) and give it storage first",
        )


def _no_storage(what: str, call: str) -> NotAllocatedError:
    return NotAllocatedError(f"{what} has no storage", hint=f"Call {call} before registering it")
