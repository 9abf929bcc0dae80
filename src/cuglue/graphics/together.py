"""Several handles mapped by one driver call, and handed back by one.

Owns the groups: who is mapped together with whom, and leaving in the face of errors. Must not know how one object is
opened or left. A call for 16 buffers with OpenGL work pending costs a third of 16 calls, and one journey to the
context's thread a sixteenth of 16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from types import TracebackType
from typing import Any, Self

from ..arguments import shown
from ..core.stream import Stream, as_stream
from ..errors import CuglueError, UsageError, raise_together
from ..lifecycle import leave
from .backings import WHOLE, Backing, GlBacking
from .handle import CudaHandle
from .life import Life, Wish
from .mapping import CudaMap
from .plan import Plan
from .registration import (
    Registration,
    let_go,
    map_together,
    undo_map_together,
    unmap_together,
)
from .users import order_everybody, unannounced_readers


class MapList(list[CudaMap]):
    """What :func:`map_all` gives: the maps in the order of their handles, left together at the end of ``with``."""

    def __init__(self, maps: Iterable[CudaMap], groups: Iterable[_Group], plan: Plan | None = None) -> None:
        """``plan``: how all of them were mapped, and may be left; they are one of ``groups``, too."""
        super().__init__(maps)
        self._groups = tuple(groups)
        self._plan = plan

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
        for group in self._groups:
            if self._plan is not None and self._plan.leave(group.maps):
                group.report_exports(group.maps, errors)
            else:
                group.leave(errors)
        raise_together(f"leaving {len(self)} maps", errors)


class _Group:
    """Handles whose calls run in one place: one journey there maps them all, and one leaves them all.

    Those of one OpenGL context are mapped by one driver call, which holds them while their maps are made. After that
    nothing but the maps holds them: a map that is left alone hands its object back, also where the list is gone. One
    call hands back what they leave together; where that fails, all of them are live still.

    Attributes:
        maps: in the order of their handles.
    """

    def __init__(self, stream: Stream, maps: list[CudaMap] | None = None) -> None:
        """``maps``: what was mapped already."""
        self.maps = maps or []
        self._stream = stream
        self._chosen: list[tuple[CudaHandle, Wish]] = []
        self._registered: dict[Life, GlBacking] = {}
        self._held: list[Registration] = []

    def add(self, handle: CudaHandle, wish: Wish) -> None:
        """One more to be mapped."""
        self._chosen.append((handle, wish))
        backing = handle._life.backing
        if isinstance(backing, GlBacking):
            self._registered[handle._life] = backing

    @property
    def _first(self) -> CudaHandle:
        """A handle whose calls run where those of all do."""
        return self._chosen[0][0]

    def take(self) -> list[CudaMap]:
        """Map them all; the maps, in the order of :meth:`add`."""
        self._first._call(self._take_here)
        return self.maps

    def _take_here(self) -> None:
        stream, backings = self._stream, self._registered.values()
        registrations: list[Registration] = [backing.registration for backing in backings]
        with stream.state.ordering:
            for backing in backings:
                backing.check(WHOLE)
            map_together(registrations, stream, self._held)
        for handle, wish in self._chosen:
            m = handle._life.map(stream, wish)
            m.handle = handle
            self.maps.append(m)
        let_go(self._held)

    def leave(self, errors: list[BaseException]) -> None:
        """Leave the maps and hand the objects back, but for those that somebody else has mapped still.

        What fails is added to ``errors``; a map that could not be left is a live one still.
        """
        maps = [m for m in self.maps if not m.released]
        if not maps:
            return
        stream, backing = self._stream, self.maps[0]._life.backing
        try:
            current = as_stream(None, device=stream.device, driver=stream.driver)
            where = stream if stream.nameable() else current  # never a handle that may be dead by now
            backing.call(self._leave_here, maps, where, current, errors)
        except CuglueError as error:
            if backing.alive:
                errors.append(error)
            else:  # with its context went whatever could be handed back
                for m in maps:
                    m._life.drop(m)
        except BaseException:  # an interrupt (Ctrl-C): whoever leaves maps has left them
            for m in maps:
                if not m.released:
                    m._life.leave_later(m, publish=True)
            raise
        self.report_exports([m for m in maps if m.released], errors)

    def report_exports(self, maps: Iterable[CudaMap], errors: list[BaseException]) -> None:
        """Report what is alive of maps that were left; what that raises is added to ``errors``."""
        for m in maps:
            if m._cai_read or m._ledger is not None:
                try:
                    m.report_exports()
                except CuglueError as error:
                    errors.append(error)

    def _leave_here(
        self, maps: list[CudaMap], stream: Stream, current: Stream, errors: list[BaseException]
    ) -> None:
        """Three rounds: what one map waits for covers the others too, and no map is left before its object is back."""
        stream.refuse_capture("leave maps")
        noted, ready = [], []
        for m in maps:
            try:
                with stream.state.ordering:
                    m.note_uses(stream, current)
                noted.append(m)
            except CuglueError as error:
                errors.append(error)
        leaving = Counter(m.share for m in noted)
        for m in noted:
            try:
                m._life.make_ready(m, stream, True, last=leaving[m.share] == m.share.maps)
                ready.append(m)
            except CuglueError as error:
                errors.append(error)
        try:
            with stream.state.ordering:
                unmap_together(_users_that_leave(ready), stream)
        except CuglueError:
            for m in ready:
                m.advance("fail")
            raise
        for m in ready:
            try:
                m._life.hand_over(m, stream)
            except CuglueError as error:
                errors.append(error)

    def undo(self, error: BaseException) -> None:
        """Leave without publishing, because of ``error``; what cannot be left now is left before its next use."""
        for m in self.maps:
            try:
                m.cancel()
            except CuglueError as second:
                error.add_note(f"leaving {m!r} failed too: {second}")
                m.leave_later()
        held, self._held = self._held, []
        if not held:
            return
        try:
            self._first._life.backing.call(undo_map_together, held, self._stream, error)
        except CuglueError as second:
            error.add_note(f"handing {len(held)} objects back failed too: {second}")


def map_all(handles: Iterable[CudaHandle], stream: Any = None, *, mutable: bool = False) -> MapList:
    """Map several handles at once; use the result in ``with``.

    Args:
        handles: of one device; none give no maps. One that comes twice is mapped twice, as readers of an image may do.
        stream: as for :meth:`CudaHandle.map`, for all of them.
        mutable: map them for writing.

    Ordering: only enqueues. Objects of one OpenGL context are mapped by one driver call, and handed back by one.
    Ownership: as for :meth:`CudaHandle.map`. Where one of them cannot be mapped, none is.

    Raises:
        UsageError: not handles, or of different devices. Else as :meth:`CudaHandle.map`.
    """
    chosen = _chosen(handles)
    if not chosen:
        return MapList((), ())
    plan = chosen[0]._life.plan_together
    if plan is not None:
        planned = plan.map(chosen, stream, mutable, False, True)
        if planned is not None:
            return MapList(planned, (_Group(plan.stream, planned),), plan)
    where = chosen[0]._stream(stream)
    where.refuse_capture("map graphics objects")
    wish = Wish(WHOLE, writable=mutable, join=False)
    groups: dict[Hashable, _Group] = {}
    asked: list[_Group] = []
    for handle in chosen:
        backing = handle._life.backing
        if backing.state is not where.state:
            raise UsageError(
                f"{handle!r}",
                got=f"device {handle.device}",
                expected=f"device {where.device}, as the first handle",
            )
        handle._check_thread(where)
        place = _place(backing)
        if place not in groups:
            groups[place] = _Group(where)
        groups[place].add(handle, handle._allowed(wish))
        asked.append(groups[place])
    where.state.retire.drain()
    try:
        taken = {group: iter(group.take()) for group in groups.values()}
        maps = [next(taken[group]) for group in asked]
        if unannounced_readers() and where.state.capabilities.context_events:
            order_everybody(maps, where)  # once for all of them
    except BaseException as error:
        for group in groups.values():
            group.undo(error)
        raise
    chosen[0]._life.plan_together = _plan(chosen, where, plan)
    return MapList(maps, groups.values())


def _plan(handles: list[CudaHandle], stream: Stream, former: Plan | None) -> Plan | None:
    """How to map these together from the next time on, if all of them are buffers that can be mapped so alone."""
    plans = [handle._life.plan for handle in handles]
    backings = tuple(plan.backings[0] for plan in plans if plan is not None and plan.stream is stream)
    if former is not None and former.stream is stream and former.backings == backings:
        return former
    alike = len({backing.registration.ops for backing in backings}) == 1
    return Plan(backings, stream) if alike and len(set(backings)) == len(handles) else None


def _chosen(handles: Iterable[CudaHandle]) -> list[CudaHandle]:
    """The handles as a list. Raises UsageError if they are none."""
    chosen = list(handles) if isinstance(handles, Iterable) else None
    if chosen is None or (
        {*map(type, chosen)} != {CudaHandle} and not all(isinstance(handle, CudaHandle) for handle in chosen)
    ):
        raise UsageError("map_all", got=shown(handles), expected="a sequence of CudaHandle")
    return chosen


def _users_that_leave(maps: Iterable[CudaMap]) -> Counter[Registration]:
    """How many users each registration loses once these maps are left: one with the last map of each part."""
    leaving = Counter(m.share for m in maps)
    parts = {m.share: m._life.backing for m in maps if m.share.open and leaving[m.share] == m.share.maps}
    return Counter(b.registration for b in parts.values() if isinstance(b, GlBacking))


def _place(backing: Backing) -> Hashable:
    """Equal for objects whose calls can be made in one journey."""
    if not isinstance(backing, GlBacking):
        return id(backing)
    ops = backing.registration.ops
    return (ops.context_id, ops.thread) if ops.context_id is not None else id(ops)
