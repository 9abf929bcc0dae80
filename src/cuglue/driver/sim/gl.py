"""Real OpenGL objects as the simulated device sees them: what registers, and their bytes.

Owns the questions asked of the context that is current on the calling thread. Must not know maps, streams or clocks.
It answers as the CUDA driver was seen to: unknown names and missing storage are 400, no context and formats or
targets that do not register are 1, and once registered nothing notices that an object was resized or deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ...errors import UnsupportedError
from ...formats import by_gl
from ..protocol import ArrayInfo, TexelKind
from . import codes, glio
from .memory import Bytes

_WIDTH, _HEIGHT, _FORMAT, _DEPTH, _SAMPLES = 0x1000, 0x1001, 0x1003, 0x8071, 0x9106
_RB_WIDTH, _RB_HEIGHT, _RB_FORMAT, _RB_SAMPLES = 0x8D42, 0x8D43, 0x8D44, 0x8CAB
_TEXTURE_TARGET, _BUFFER_SIZE = 0x1006, 0x8764
_TARGETS = (
    glio.TEXTURE_2D,
    glio.TEXTURE_RECTANGLE,
    glio.TEXTURE_3D,
    glio.TEXTURE_2D_ARRAY,
    glio.TEXTURE_CUBE_MAP,
    glio.RENDERBUFFER,
)
_KINDS = {"u": TexelKind.UINT, "i": TexelKind.SINT, "f": TexelKind.FLOAT}

PartKey = tuple[int, int]
"""Layer (or face) and level of one part of an image."""


class GraphicsObject(Protocol):
    """A registered object. ``nbytes`` is 0 of an image, ``parts`` empty of a buffer."""

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer."""

    @property
    def parts(self) -> dict[PartKey, ArrayInfo]:
        """The array that each layer and level of an image is mapped as."""

    def read(self, part: PartKey, out: Bytes) -> bool:
        """Read a part (of a buffer: any) to ``out``; False if the object is gone or has changed its size."""

    def write(self, part: PartKey, data: Bytes) -> bool:
        """Write a part; False as in :meth:`read`."""

    def reachable(self, call: str) -> None:
        """Raise if this thread cannot reach the object."""

    def finish(self, call: str) -> None:
        """Let everything done to the object so far be done. Raises if it cannot be reached from this thread."""


class GraphicsApi(Protocol):
    """Where names of objects mean something."""

    def buffer(self, name: int, call: str) -> GraphicsObject:
        """The buffer of that name."""

    def image(self, name: int, target: int, call: str) -> GraphicsObject:
        """The texture or renderbuffer of that name."""

    def present(self) -> bool:
        """True if this thread can reach objects now."""


@contextmanager
def _calls(call: str) -> Iterator[Any]:
    """PyOpenGL for a few calls. Errors that the application left pending are dropped: they are not ours."""
    import OpenGL.GL as gl

    while gl.glGetError():
        pass
    try:
        yield gl
    except gl.GLError as error:
        raise codes.refused(codes.UNKNOWN, call, "OpenGL refused a transfer", got=error) from error


class OpenGL:
    """The context that is current on the calling thread, through PyOpenGL. Needs OpenGL 4.5."""

    def present(self) -> bool:
        """True if a context is current. Only this call tells: without one, OpenGL answers zeros and no error."""
        try:
            with _calls("gl_devices") as gl:
                return gl.glGetString(gl.GL_VERSION) is not None
        except (ImportError, OSError, AttributeError):  # no PyOpenGL, or no OpenGL library
            return False

    def _require(self, call: str, code: int) -> None:
        if not self.present():
            raise codes.refused(code, call, "no OpenGL context is current on this thread")

    def reachable(self, call: str) -> None:
        """Raise if no context is current."""
        self._require(call, codes.INVALID_GRAPHICS_CONTEXT)

    def finish(self, call: str) -> None:
        """Wait for everything queued in the context. Raises if none is current."""
        self.reachable(call)
        with _calls(call) as gl:
            gl.glFinish()

    def buffer(self, name: int, call: str) -> GraphicsObject:
        """The buffer of that name."""
        self._require(call, codes.INVALID_VALUE)
        with _calls(call) as gl:
            nbytes = _buffer_size(gl, name)
        if not nbytes:
            raise codes.refused(
                codes.INVALID_RESOURCE_HANDLE, call, f"OpenGL buffer {name}", got="no storage of that name"
            )
        return _Buffer(self, name, nbytes)

    def image(self, name: int, target: int, call: str) -> GraphicsObject:
        """The texture or renderbuffer of that name."""
        self._require(call, codes.INVALID_VALUE)
        what = f"OpenGL image {name}"
        if target not in _TARGETS:
            raise codes.refused(codes.INVALID_VALUE, call, what, got=f"target {target:#06x}")
        with _calls(call) as gl:
            levels = _levels(gl, name, target)
        if not levels:
            raise codes.refused(
                codes.INVALID_RESOURCE_HANDLE, call, what, got="no storage of that name and target"
            )
        width, height, depth, number, samples = levels[0]
        try:
            format = by_gl(number)
        except UnsupportedError as error:
            raise codes.refused(codes.INVALID_VALUE, call, what, got=error) from None
        if not format.registers or samples > 1:
            raise codes.refused(codes.INVALID_VALUE, call, f"{what} of {samples} samples", got=format)
        parts: dict[PartKey, tuple[ArrayInfo, glio.Part]] = {}
        for level, (width, height, depth, _, _) in enumerate(levels):
            solid = target == glio.TEXTURE_3D
            texel = (8 * _itemsize(format.dtype), format.channels, _KINDS[format.dtype[0]])
            info = ArrayInfo(width, height, depth if solid else 0, *texel)
            layers = 1 if solid else 6 if target == glio.TEXTURE_CUBE_MAP else max(depth, 1)
            for layer in range(layers):
                part = glio.Part(name, target, level, (width, height), format, layer, depth if solid else 1)
                parts[layer, level] = info, part
        return _Image(self, name, target, parts)


class _Buffer:
    """A registered OpenGL buffer."""

    parts: dict[PartKey, ArrayInfo] = {}  # noqa: RUF012 - empty for all

    def __init__(self, api: OpenGL, name: int, nbytes: int) -> None:
        self._api = api
        self._name = name
        self.nbytes = nbytes

    def read(self, part: PartKey, out: Bytes) -> bool:
        with _calls("graphics_map") as gl:
            if _buffer_size(gl, self._name) != self.nbytes:
                return False
            glio.read_buffer(gl, self._name, out)
        return True

    def write(self, part: PartKey, data: Bytes) -> bool:
        with _calls("graphics_unmap") as gl:
            if _buffer_size(gl, self._name) != self.nbytes:
                return False
            glio.write_buffer(gl, self._name, data)
        return True

    def reachable(self, call: str) -> None:
        self._api.reachable(call)

    def finish(self, call: str) -> None:
        self._api.finish(call)


class _Image:
    """A registered texture or renderbuffer."""

    nbytes = 0

    def __init__(
        self, api: OpenGL, name: int, target: int, parts: dict[PartKey, tuple[ArrayInfo, glio.Part]]
    ) -> None:
        self._api = api
        self._name = name
        self._target = target
        self._parts = {key: part for key, (_, part) in parts.items()}
        self.parts = {key: info for key, (info, _) in parts.items()}

    def read(self, part: PartKey, out: Bytes) -> bool:
        with _calls("graphics_map") as gl:
            if not self._same(gl, part):
                return False
            self._parts[part].read(gl, out)
        return True

    def write(self, part: PartKey, data: Bytes) -> bool:
        with _calls("graphics_unmap") as gl:
            if not self._same(gl, part):
                return False
            self._parts[part].write(gl, data)
        return True

    def reachable(self, call: str) -> None:
        self._api.reachable(call)

    def finish(self, call: str) -> None:
        self._api.finish(call)

    def _same(self, gl: Any, part: PartKey) -> bool:
        known, levels = self._parts[part], _levels(gl, self._name, self._target)
        if part[1] >= len(levels):
            return False
        width, height, depth, number, _ = levels[part[1]]
        layers = known.first + known.count
        return (
            (width, height) == (known.width, known.height)
            and by_gl(number) is known.format
            and layers <= max(depth, 1)
        )


def _buffer_size(gl: Any, name: int) -> int:
    if not gl.glIsBuffer(name):
        return 0
    size = gl.GLint64()
    gl.glGetNamedBufferParameteri64v(name, _BUFFER_SIZE, size)
    return int(size.value)


def _levels(gl: Any, name: int, target: int) -> list[tuple[int, int, int, int, int]]:
    """Width, height, depth, internal format and samples of each level; empty if there is no such image."""

    def ask(getter: Any, *args: int) -> int:
        value = gl.GLint()
        getter(*args, value)
        return int(value.value)

    if target == glio.RENDERBUFFER:
        if not gl.glIsRenderbuffer(name):
            return []
        width, height, number, samples = (
            ask(gl.glGetNamedRenderbufferParameteriv, name, p)
            for p in (_RB_WIDTH, _RB_HEIGHT, _RB_FORMAT, _RB_SAMPLES)
        )
        return [(width, height, 1, number, samples)] if width and height else []
    if not gl.glIsTexture(name) or ask(gl.glGetTextureParameteriv, name, _TEXTURE_TARGET) != target:
        return []
    found = []
    for level in range(32):
        width, height, depth, number, samples = (
            ask(gl.glGetTextureLevelParameteriv, name, level, p)
            for p in (_WIDTH, _HEIGHT, _DEPTH, _FORMAT, _SAMPLES)
        )
        if not width or not height:
            break
        found.append((width, height, 6 if target == glio.TEXTURE_CUBE_MAP else depth, number, samples))
        if target == glio.TEXTURE_RECTANGLE:  # asking for level 1 is an error there
            break
    return found


def _itemsize(dtype: str) -> int:
    return int(dtype.lstrip("uintfloa")) // 8
