"""The way of a map that nearly every frame takes: GL buffers that were mapped before, on the same stream.

Owns what can be said of such a map once (:class:`Plan`), and the few steps that are left of mapping and leaving. Must
not know conflicts, other streams, other threads or images: where one of its questions has another answer than last
time it does nothing, and the general way (:mod:`life`, :mod:`together`) decides everything anew.

What both ways keep alike, since they take turns:
    * A life's state and live shares, a registration's users and what was queued on it last, are written as the general
      way writes them. So whoever comes next, on whatever way, finds a map that is live, or none.
    * Nothing is taken as given but what only the general way changes. The object is the stream's own if that handed it
      over last and nobody has it mapped; the current stream, the thread, the context, captures and the size in OpenGL
      are asked each time.
    * What changes the records stands behind the driver's call, without a call between: an interrupt (Ctrl-C) leaves all
      of it undone, or all done. What it leaves undone is noted as the general way notes it.
    * No lock is held: all this happens on the context's thread, and only there. Nothing is waited for, so that no other
      thread can come between a wait and its stamp.
    * Each driver call is a call of the driver's method, looked up then: tests and tools stand in front of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.stream import Stream
from ..driver.protocol import LEGACY_STREAM, CaptureStatus
from ..errors import CuglueError
from ..lifecycle import HandleState, MapState
from .backings import WHOLE
from .mapping import CudaMap
from .users import order_everybody, unannounced_readers

if TYPE_CHECKING:
    from .buffers import BufferShare, GlBuffer
    from .handle import CudaHandle

_NO_CAPTURE = CaptureStatus.NONE
_REGISTERED, _MAPPED = HandleState.REGISTERED, HandleState.MAPPED
_LIVE, _RELEASED = MapState.LIVE, MapState.RELEASED


def may_plan(backing: GlBuffer, stream: Stream) -> bool:
    """Whether the buffer is mapped here, on a stream that is known by its object (or as 0) and that had it last."""
    registration = backing.registration
    known = stream.owner is not None or not stream.handle
    return (
        known
        and stream.thread is None
        and registration.uses.write_stream is stream
        and registration.ops.here()
    )


class Plan:
    """How to map buffers of one context together, on a stream that they were mapped on before.

    Args:
        backings: the buffers, each once; of all :func:`may_plan` holds.
        stream: where.

    Attributes:
        backings, stream: as said.
    """

    __slots__ = ("_asks", "_handles", "_joins", "_ops", "_shares", "backings", "stream")

    def __init__(self, backings: Sequence[GlBuffer], stream: Stream) -> None:
        self.backings = tuple(backings)
        self.stream = stream
        self._asks = stream.handle > LEGACY_STREAM  # a default stream cannot capture
        self._joins = stream.state.capabilities.context_events
        self._ops = self.backings[0].registration.ops
        self._handles = array("Q", [backing.registration.handle for backing in backings])
        #: Of each buffer the memory, which its maps have one after the other.
        self._shares = [backing.share(stream, 0, 0, backing.size) for backing in backings]

    def map(
        self, handles: Sequence[CudaHandle], stream: Any, writable: bool, readonly: bool, join: bool
    ) -> list[CudaMap] | None:
        """A live map of each; None: the general way has to be gone, and nothing was done.

        Args:
            handles: of the buffers, in their order; those of others are told apart.
            stream, writable, readonly, join: as for :meth:`CudaHandle.map`.

        Ordering: only enqueues. Raises: as there; then nothing is mapped.
        """
        where, shares = self.stream, self._shares
        driver, handle_of_stream = where.driver, where.handle
        if stream is None:
            stream = driver.stream_current(where.device)
        known = 0 if where.owner is None else where.owner  # the simulated default stream has no object
        if (stream is not known and stream is not where) or len(handles) != len(shares):
            return None
        if not self._ops.here() or (
            self._asks and driver.capture_status(handle_of_stream) is not _NO_CAPTURE
        ):
            return None
        where.state.retire.drain()
        chosen = list(zip(handles, shares))  # noqa: B905 - as many; to say strict costs as much as the rest
        for handle, share in chosen:
            life, backing = handle._life, share.backing
            registration, question = backing.registration, backing.current_size
            if (
                life._state is not _REGISTERED
                or life.backing is not backing
                or handle._closed
                or life.host
                or registration._mapped
                or registration.uses.write_stream is not where
                or (writable and backing.readonly)
            ):
                return None
            answer = question.answer
            answer.value = 0  # what a question leaves that OpenGL refuses
            question.ask()
            if answer.value != backing.size:
                return None
        alone = self if len(chosen) == 1 else None
        maps: list[CudaMap] = []
        mapped = False
        try:
            driver.graphics_map(self._handles, handle_of_stream)
            mapped = True
            seq = where.submit()
            for handle, share in chosen:
                backing = share.backing
                registration = backing.registration
                ptr, nbytes = driver.graphics_pointer(registration.handle)
                if nbytes != backing.size:
                    share = backing.share(where, seq, ptr, nbytes)  # of this map alone
                life = handle._life
                m = CudaMap(life, share, where, writable, readonly or backing.readonly)
                m.handle = handle
                m._plan = alone
                maps.append(m)
                # No call from here on.
                share.ptr = ptr
                share.seq = seq
                share.made = None
                share.maps = 1
                share.writers = 1 if writable else 0
                share.open = True
                registration._mapped = True
                registration._users = 1
                life._live[WHOLE] = share
                life._state = _MAPPED
                m._state = _LIVE
            if join and self._joins and unannounced_readers():
                order_everybody(maps, where)
        except BaseException as error:
            if mapped or not isinstance(error, CuglueError):  # else the driver refused, and nothing changed
                self._take_back(chosen, maps, error)
            if isinstance(error, CuglueError):
                self.backings[0].explain(error)
            raise
        return maps

    def _take_back(
        self, chosen: list[tuple[CudaHandle, BufferShare]], maps: list[CudaMap], error: BaseException
    ) -> None:
        """Hand back what was mapped, and what an interrupted call may have mapped, because of ``error``."""
        for m in maps:
            m.advance("cancel")
        for handle, share in chosen:
            registration = share.backing.registration
            handle._life._live.pop(WHOLE, None)
            handle._life._state = _REGISTERED
            registration._mapped = registration._unsure = True
            registration._users = 1
        for backing in self.backings:
            backing.registration.undo_map(self.stream, error)

    def leave(self, maps: Sequence[CudaMap]) -> bool:
        """Leave what :meth:`map` gave, all of it. False: somebody else has a part in it, and nothing was done.

        Ordering: only enqueues. Raises: as :meth:`CudaMap.release`; exports are the caller's to report.
        """
        where = self.stream
        driver, handle_of_stream = where.driver, where.handle
        share: BufferShare
        for m in maps:
            share = m.share  # type: ignore[assignment] # as map() made it
            block = share.made
            if (
                m._state is not _LIVE
                or m._life._state is not _MAPPED
                or share.maps != 1
                or m._consumers is not None
                or (block is not None and (block.write_stream is not where or block.reads))
                or (m._cai_read and unannounced_readers())
            ):
                return False
        known = 0 if where.owner is None else where.owner
        if (
            driver.stream_current(where.device) is not known
            or not self._ops.here()
            or (self._asks and driver.capture_status(handle_of_stream) is not _NO_CAPTURE)
        ):
            return False
        try:
            driver.graphics_unmap(self._handles, handle_of_stream)
            seq = where.submit()
            for m in maps:
                # No call before the last line.
                life = m._life
                share = m.share  # type: ignore[assignment] # the same
                registration = share.backing.registration
                registration._mapped = False
                registration._users = 0
                registration.uses.write_seq = seq
                del life._live[WHOLE]
                life._state = _REGISTERED
                m._state = _RELEASED
                m._interface = None
                m.handle = None  # last, so that its owner outlives the hand-over
        except CuglueError as error:
            for m in maps:
                m.advance("fail")
            self.backings[0].explain(error)
            raise
        except BaseException:  # an interrupt: whoever leaves maps has left them
            for m in maps:
                if not m.released:
                    share = m.share  # type: ignore[assignment] # the same
                    share.backing.registration._unsure = True
                    m._life.leave_later(m, publish=True)
            raise
        return True
