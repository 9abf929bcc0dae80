"""Imported memory as an OpenGL buffer, so that OpenGL and CUDA see the same bytes without mapping.

Owns the memory object and the buffer over it, and which memory may be shared so. Must not know handles.
"""

from __future__ import annotations

from ..errors import UnsupportedError
from ..exchange.tokens import call_site
from ..lifecycle import Owned
from .extmemory import ExternalMemory, check_external
from .glcalls import checked
from .glcontext import ops_here
from .glops import GlOps
from .imports import check_descriptor, lent

_OPAQUE_FD = 0x9586  # GL_HANDLE_TYPE_OPAQUE_FD_EXT
_DEDICATED = 0x9581  # GL_DEDICATED_MEMORY_OBJECT_EXT


class SharedGlBuffer(Owned):
    """An OpenGL buffer over memory that CUDA has imported. Made by :func:`cuglue.external.gl_buffer`.

    OpenGL and CUDA are not ordered by it: use fences, or wait on the host.

    Attributes:
        glo: the buffer's name.
        size: its size in bytes.
    """

    def __init__(self, ops: GlOps, glo: int, memory_object: int, size: int) -> None:
        """Made by :func:`gl_buffer`."""
        self._ops = ops
        self._memory_object = memory_object
        self.glo = glo
        self.size = size
        self._own()
        self._created_at = "{}:{}".format(*call_site())

    def _close(self) -> None:
        if self._ops.alive:  # with its context the buffer is gone
            self._ops.call(_delete, self.glo, self._memory_object)

    def _forgotten(self) -> None:
        glo, memory_object = self.glo, self._memory_object
        self._ops.post(lambda: _delete(glo, memory_object))

    def __repr__(self) -> str:
        return f"SharedGlBuffer(glo={self.glo}, size={self.size})"


def gl_buffer(
    memory: ExternalMemory,
    fd: int,
    *,
    offset: int = 0,
    size: int | None = None,
    dedicated: bool = False,
    ops: GlOps | None = None,
) -> SharedGlBuffer:
    """Open an allocation that CUDA has imported in OpenGL too, as a buffer.

    Args:
        memory: what :func:`import_fd` gave.
        fd: the descriptor that it was imported from; stays the caller's.
        offset, size: the range that the buffer has, in bytes; size None: all that follows ``offset``.
        dedicated: the owner made a dedicated allocation.
        ops: where the OpenGL calls run; None: at once, on this thread.

    Ordering: queues nothing. Ownership: close the buffer; the memory may be closed before.

    Raises:
        UnsupportedError: CUDA virtual memory: OpenGL's copies reach only a part of what CUDA sees of it (measured;
            the two use other page kinds). Allocate with Vulkan instead. Or OpenGL lacks GL_EXT_memory_object_fd.
        LayoutError, UsageError, NoContextError, DriverError: as they say; nothing is left.
    """
    whole = check_external(memory)
    start, length = whole.check_range(offset, size)
    if whole.kind != "opaque":
        raise UnsupportedError(
            f"{whole!r} cannot be shared with OpenGL",
            got=f"memory of kind {whole.kind!r}",
            expected="an opaque fd of a Vulkan allocation",
            hint="Allocate it with Vulkan, or register an OpenGL buffer with CUDA",
            reason="vmm" if whole.kind == "vmm" else "handle_kind",
        )
    descriptor = check_descriptor(fd)
    where = ops or ops_here()
    glo, memory_object = where.call(_create, descriptor, whole.size, start, length, dedicated)
    return SharedGlBuffer(where, glo, memory_object, length)


def _create(fd: int, whole: int, offset: int, size: int, dedicated: bool) -> tuple[int, int]:
    """``(buffer, memory object)``."""
    with checked("a buffer over imported memory") as gl:
        from OpenGL.GL.EXT import memory_object as objects
        from OpenGL.GL.EXT import memory_object_fd as descriptors

        if not (objects.glInitMemoryObjectEXT() and descriptors.glInitMemoryObjectFdEXT()):
            raise UnsupportedError(
                "memory by descriptor in OpenGL",
                got="a context without GL_EXT_memory_object_fd",
                hint="Register an OpenGL buffer with CUDA instead",
                reason="gl_extension",
            )
        memory_object, buffer = gl.GLuint(), gl.GLuint()
        objects.glCreateMemoryObjectsEXT(1, memory_object)
        try:
            if dedicated:
                objects.glMemoryObjectParameterivEXT(memory_object.value, _DEDICATED, gl.GLint(1))
            with lent(fd) as copy:
                descriptors.glImportMemoryFdEXT(memory_object.value, whole, _OPAQUE_FD, copy)
            gl.glCreateBuffers(1, buffer)
            objects.glNamedBufferStorageMemEXT(buffer.value, size, memory_object.value, offset)
        except BaseException:
            _drop(buffer.value, memory_object.value)
            raise
        return int(buffer.value), int(memory_object.value)


def _delete(buffer: int, memory_object: int) -> None:
    with checked("a buffer over imported memory"):
        _drop(buffer, memory_object)


def _drop(buffer: int, memory_object: int) -> None:
    from OpenGL.GL import glDeleteBuffers
    from OpenGL.GL.EXT.memory_object import glDeleteMemoryObjectsEXT

    if buffer:
        glDeleteBuffers(1, [buffer])
    glDeleteMemoryObjectsEXT(1, [memory_object])
