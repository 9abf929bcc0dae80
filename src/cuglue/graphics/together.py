"""Several handles mapped by one driver call, and handed back by one.

Owns the group: who is mapped together with whom, and leaving in the face of errors. Must not know how one object is
opened or left. A call for 16 buffers with OpenGL work pending costs a third of 16 calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from types import TracebackType
from typing import Any, Self

from ..core.stream import Stream
from ..errors import CuglueError, SeveralErrors, UsageError
from ..lifecycle import leave
from .backings import GlBacking, Part
from .glops import GlOps
from .handle import CudaHandle
from .mapping import CudaMap
from .registration import Registration, map_together, undo_map_together, unmap_together


class MapList(list[CudaMap]):
    """What :func:`map_all` gives: the maps in the order of their handles, left together at the end of ``with``."""

    def __init__(self, maps: Iterable[CudaMap], stream: Stream | None, groups: list[_Group]) -> None:
        super().__init__(maps)
        self._stream = stream
        self._groups = groups

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self.release, error, "leaving", self)

    def release(self) -> None:
        """Leave every map, as :meth:`CudaMap.release` does. Releasing again tries those again that could not be left.

        Ordering: only enqueues.

        Raises:
            SeveralErrors: more than one could not be left; a single error is raised as it is.
        """
        errors: list[BaseException] = []
        for m in self:
            try:
                m.release()
            except CuglueError as error:
                errors.append(error)
        while self._groups and self._stream is not None:
            try:
                self._groups[-1].give_back(self._stream)
            except CuglueError as error:
                errors.append(error)
                break  # what is left here is tried again by the next release
            self._groups.pop()
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise SeveralErrors(f"leaving {len(self)} maps", errors=errors) from errors[0]

    def abandon(self, error: BaseException) -> None:
        """Leave without publishing, because of ``error``; what cannot be left now is left before its next use."""
        for m in self:
            try:
                m.cancel()
            except CuglueError as second:
                error.add_note(f"leaving {m!r} failed too: {second}")
                m.leave_later()
        for group in self._groups:
            assert self._stream is not None, "a group without a stream"
            group.undo(self._stream, error)


class _Group:
    """Registrations of one OpenGL context and device, held mapped while their maps come and go."""

    def __init__(self, ops: GlOps) -> None:
        self.ops = ops
        self.backings: list[GlBacking] = []

    @property
    def _registrations(self) -> list[Registration]:
        return [backing.registration for backing in self.backings]

    def take(self, stream: Stream) -> None:
        """Map them all."""
        self.ops.call(self._take_here, stream)

    def _take_here(self, stream: Stream) -> None:
        with stream.state.ordering:
            for backing in self.backings:
                backing.check(Part())
            map_together(self._registrations, stream)

    def give_back(self, stream: Stream) -> None:
        """Hand them back, but for those that somebody else has mapped still."""
        self.ops.call(self._give_back_here, stream)

    def undo(self, stream: Stream, error: BaseException) -> None:
        """:meth:`give_back`, because of ``error``; what cannot be handed back now is so before it is mapped again."""
        self.ops.call(undo_map_together, self._registrations, stream, error)

    def _give_back_here(self, stream: Stream) -> None:
        with stream.state.ordering:
            unmap_together(self._registrations, stream)


def map_all(handles: Iterable[CudaHandle], stream: Any = None, *, mutable: bool = False) -> MapList:
    """Map several handles at once; use the result in ``with``.

    Args:
        handles: of one device. A handle that comes twice is mapped twice, which only readers of an image may do.
        stream: as for :meth:`CudaHandle.map`, for all of them.
        mutable: map them for writing.

    Ordering: only enqueues. Objects of one OpenGL context are mapped by one driver call, and handed back by one.
    Ownership: as for :meth:`CudaHandle.map`. Where one of them cannot be mapped, none is.

    Raises:
        UsageError: handles of different devices. Else as :meth:`CudaHandle.map`.
    """
    chosen = list(handles)
    if not chosen:
        return MapList((), None, [])
    where = chosen[0]._stream(stream)
    groups: dict[Hashable, _Group] = {}
    for handle in chosen:
        handle._check_open()
        backing = handle._life.backing
        if backing.state is not where.state:
            raise UsageError(
                f"{handle!r}",
                got=f"device {handle.device}",
                expected=f"device {where.device}, as the first handle",
            )
        if isinstance(backing, GlBacking):
            ops = backing.registration.ops
            place = (ops.context_id, ops.thread) if ops.context_id is not None else id(ops)
            group = groups.setdefault(place, _Group(ops))
            if backing not in group.backings:
                group.backings.append(backing)
    where.refuse_capture("map graphics objects")
    taken = MapList((), where, [])
    try:
        for group in groups.values():
            group.take(where)
            taken._groups.append(group)
        for handle in chosen:
            taken.append(handle.map_mut(where) if mutable else handle.map(where))
    except BaseException as error:
        taken.abandon(error)
        raise
    return taken
