"""OpenGL objects of a real context for random programs, where the simulated ones would prove less.

Owns the context of the process and the objects made in it. Must not know programs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import cuglue
from cuglue.driver.sim import SimDriver
from cuglue.graphics.glcontext import headless
from cuglue.graphics.handle import CudaHandle

from .memory import Bytes

_context: Any = None
_RGBA, _UNSIGNED_BYTE, _RGBA8, _TEXTURE_2D = 0x1908, 0x1401, 0x8058, 0x0DE1


class MesaGraphics:
    """Graphics objects of the OpenGL context of this process, which is made at first use."""

    def __init__(self, driver: SimDriver) -> None:
        global _context
        if _context is None:
            _context = headless()
        from OpenGL import GL

        self.gl: Any = GL
        self.made: dict[
            int, tuple[str, int]
        ] = {}  # by our own number: names of buffers and textures are alike
        self._names: dict[int, int] = {}

    class _Ops:
        """Calls run at once: nothing waits to be done."""

        def close(self) -> None:
            """Nothing to do."""

    ops = _Ops()

    def register(self, kind: str, size: int, data: Bytes) -> tuple[CudaHandle, int]:
        """A new object that holds ``data``, and a handle of it."""
        gl, number = self.gl, len(self.made) + 1
        self.made[number] = kind, size
        made = np.zeros(1, np.uint32)
        if kind == "image":
            gl.glCreateTextures(_TEXTURE_2D, 1, made)
            gl.glTextureStorage2D(int(made[0]), 1, _RGBA8, size // 16, 4)
        else:
            gl.glCreateBuffers(1, made)
            gl.glNamedBufferData(int(made[0]), size, data, gl.GL_DYNAMIC_DRAW)
        self._names[number] = name = int(made[0])
        self.put(number, data)
        made_handle = cuglue.register_texture(name) if kind == "image" else cuglue.register_buffer(name)
        return made_handle, number

    def put(self, number: int, data: Bytes) -> None:
        """Draw: replace what the object holds."""
        gl, (kind, size), name = self.gl, self.made[number], self._names[number]
        if kind == "image":
            gl.glTextureSubImage2D(name, 0, 0, 0, size // 16, 4, _RGBA, _UNSIGNED_BYTE, data)
        else:
            gl.glNamedBufferSubData(name, 0, size, data)

    def get(self, number: int) -> Bytes:
        """What the object holds."""
        gl, (kind, size), name = self.gl, self.made[number], self._names[number]
        out = np.zeros(size, np.uint8)
        if kind == "image":
            gl.glGetTextureImage(name, 0, _RGBA, _UNSIGNED_BYTE, size, out)
        else:
            gl.glGetNamedBufferSubData(name, 0, size, out)
        return out

    def delete(self) -> None:
        """Delete the objects; their handles are closed by now."""
        for number, (kind, _) in self.made.items():
            name = np.array([self._names[number]], np.uint32)
            if kind == "image":
                self.gl.glDeleteTextures(1, name)
            else:
                self.gl.glDeleteBuffers(1, name)
