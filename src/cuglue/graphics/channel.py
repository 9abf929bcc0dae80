"""The functions behind client parts: a registered GL buffer, mapped without naming a stream.

Owns how such a map is ordered, and what is left of it once the OpenGL context is gone. Must not know who calls.
"""

from __future__ import annotations

from typing import cast

from ..arguments import shown
from ..core.stream import Stream, as_stream
from ..errors import ClosedError, UsageError
from .buffers import ForeignBuffer, GlBuffer
from .clientops import CudaGlOps
from .cparts import CountedChannel
from .life import Life
from .parts import CudaClientParts, NotTransferableError


class BufferOps:
    """A registered GL buffer as :class:`~cuglue.graphics.clientops.CudaGlOps`.

    Its functions name no stream: work queued anywhere on the device after a map may use the memory, and an unmap waits,
    on the GPU, for everything queued on the device. They run on the context's thread, wherever they are called. Once
    that is gone nothing can be mapped, and nothing is left to give back.
    """

    def __init__(self, backing: GlBuffer) -> None:
        self._backing = backing

    @property
    def _stream(self) -> Stream:
        state = self._backing.state
        return as_stream(0, device=state.device, driver=state.driver)

    def map(self, res: int) -> tuple[int, int] | None:
        """Inherited."""
        self._check(res)
        try:
            return self._backing.call(self._map)
        except ClosedError:
            if self._backing.alive:
                raise
            return None

    def _map(self) -> tuple[int, int]:
        backing, stream = self._backing, self._stream
        if backing.registration.mapped:
            raise UsageError(f"{backing} is mapped", got="map", expected="one map at a time: unmap it first")
        with backing.state.ordering:
            backing.registration.map(stream)
            try:
                found = backing.state.driver.graphics_pointer(backing.registration.handle)
                stream.hold_context()
            except BaseException as error:
                backing.registration.undo_map(stream, error)
                raise
        return found

    def unmap(self, res: int) -> None:
        """Inherited."""
        self._check(res)
        self._where_alive(self._unmap)

    def _unmap(self) -> None:
        backing, stream = self._backing, self._stream
        if not backing.registration.mapped:
            raise UsageError(f"{backing} is not mapped", got="unmap", expected="a map before it")
        with backing.state.ordering:
            stream.join_context()
            backing.registration.unmap(stream)

    def unregister(self, res: int) -> None:
        """Inherited."""
        self._check(res)
        self._where_alive(self._backing.destroy)

    def _where_alive(self, function: object) -> None:
        try:
            self._backing.call(function)  # type: ignore[arg-type]
        except ClosedError:
            if self._backing.alive:
                raise

    def _check(self, res: int) -> None:
        if res != self._backing.registration.handle:
            raise UsageError(
                f"{self._backing}", got=f"resource {shown(res)}", expected="the one that it was given with"
            )


def parts_of(life: Life) -> CudaClientParts:
    """Take the registration out of ``life``, which ends without ending it.

    Raises:
        NotTransferableError: no GL buffer; nothing changed.
        MapConflictError, BusyError, ClosedError: live maps, other handles, or a closed one; nothing changed.
    """
    backing = life.backing
    if isinstance(backing, GlBuffer):
        ops, resource = cast(CudaGlOps, BufferOps(backing)), backing.registration.handle
    elif isinstance(backing, ForeignBuffer):
        ops, resource = backing.ops, backing.resource
    else:
        raise NotTransferableError(
            f"{life.name} cannot be given away",
            got=f"a handle of kind {backing.kind}",
            expected="one of a GL buffer",
            hint="Use it here, or copy to a buffer",
        )
    backing.call(life.transfer)
    return CudaClientParts(
        resource=resource,
        size=backing.size,
        map_fn=ops.map,
        unmap_fn=ops.unmap,
        unregister_fn=ops.unregister,
        channel=CountedChannel(),
        post=backing.post,
        device=backing.state.device,
    )
