"""The life of one registered object: its live maps, the conflicts between them, and its end.

Owns the state, the lock and the shares of a handle, and the steps of mapping, leaving and closing where the object's
calls run. Must not know how the public calls are spelled (:mod:`handle`) nor how an object is opened (:mod:`backings`).

The lock is only ever taken on the thread where the backing's calls run, so a thread that waits for that one holds
nothing it could want.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import NamedTuple

from ..core.stream import Stream
from ..driver.protocol import Access
from ..errors import CaptureError, ClosedError, CuglueError, PublishError
from ..lifecycle import HANDLE, HandleState, MapState, busy, step
from .backings import Backing, OpaqueBacking, Part, Share
from .conflicts import held_for, refuse_conflict
from .mapping import CudaMap
from .plan import Plan
from .users import order_everybody, unannounced_readers

_OR_ALIAS = "Leave that map first, or pass alias=True to share its memory"
_ENDED = (HandleState.CLOSING, HandleState.CLOSED, HandleState.TRANSFERRED)


class Wish(NamedTuple):
    """What kind of map is asked for, in the words of :meth:`CudaHandle.map`.

    ``load``: copy the contents in; ``host``: for the copy of a host map that was counted.
    """

    part: Part
    writable: bool = False
    load: bool = True
    readonly: bool = False
    alias: bool = False
    join: bool = True
    host: bool = False


class Life:
    """State of one registered object, which several handles may share: the last one that is closed ends it.

    Attributes:
        backing: the object.
        plan: how to map all of it at once on the stream where it was mapped before, if there is such a plan.
        plan_together: the same for several objects mapped by one call, of which this is the first.
        host: copies of the object that the host works on, by whatever stands for them: whether it writes them back.
        name: repr of its handles, for messages.
    """

    def __init__(self, backing: Backing) -> None:
        self.backing = backing
        # Asked at every map, and isinstance() asks an abstract class in Python.
        self._opaque = backing if isinstance(backing, OpaqueBacking) else None
        self.plan: Plan | None = None
        self.plan_together: Plan | None = None
        self.host: dict[object, bool] = {}
        self.name = f"CudaHandle(kind={backing.kind!r}, size={backing.size})"
        self._lock = threading.RLock()
        self._live: dict[Part, Share] = {}
        self._state = HandleState.REGISTERED
        self._ending = False  # the end has begun: nobody may map it, whatever came of that
        self._destroyed = False
        self._users: weakref.WeakSet[object] = weakref.WeakSet()  # one whose making is interrupted is none
        self._left_over: deque[tuple[CudaMap, bool]] = deque()
        self._ordering = backing.ordering

    def __repr__(self) -> str:
        return self.name

    @property
    def closed(self) -> bool:
        """True once closed, also while live maps defer the end."""
        return self._ending or self._state in _ENDED

    def check_open(self) -> None:
        """Raise ClosedError if the handle was closed."""
        if self.closed:
            raise ClosedError(
                f"{self.name} is closed",
                got="a call",
                expected="an open handle",
                hint="Register the object again",
            )

    def add_user(self, handle: object) -> None:
        """One more handle shares this object, as long as it lives and is not closed."""
        with self._lock:
            self.check_open()
            self._users.add(handle)

    # --- mapping --------------------------------------------------------------------------------------------------
    def map(self, stream: Stream, wish: Wish) -> CudaMap:
        """A live map. Runs where the backing's calls run."""
        part, writable, load, readonly, alias, join, host = wish
        backing = self.backing
        with self._lock, self._ordering:
            if self._left_over:
                self._leave_left_over()
            state = step(HANDLE, self._state, "map", self)
            share = self._live.get(part)
            opaque = self._opaque
            if not alias and opaque is not None:
                self._refuse_conflict(share, writable)
                self._refuse_conflict(self._live.get(part.twin), writable)
            if self.host and not (alias or host):
                self._refuse_beside_host("map_mut()" if writable else "map()", writes=writable)
            backing.check(part)
            if share is None:
                if self.plan is None or self.plan.stream is not stream:
                    self.plan = backing.plan(stream)
                share = backing.open(part, stream, load)
            elif opaque is not None and load and (alias or opaque.volatile):
                opaque.refresh(share, stream)
            else:
                with backing.state.ordering:
                    share.block.prepare(stream, Access.READ_WRITE if writable else Access.READ)
            try:
                result = CudaMap(self, share, stream, writable, readonly)
            except BaseException:  # an interrupt: nobody else would give the object back
                if not share.maps:
                    backing.shut(share, stream)
                raise
            share.maps += 1  # from here on nothing is called: an interrupt leaves none of it done, or all
            share.writers += writable
            self._live[part] = share
            self._state = state
            result._state = MapState.LIVE
            if join and unannounced_readers() and stream.state.capabilities.context_events:
                self._order_everybody(result, stream)
            return result

    def _order_everybody(self, m: CudaMap, stream: Stream) -> None:
        """Order all streams of the device after the map; where that fails the map is left again."""
        try:
            order_everybody((m,), stream)
        except BaseException as error:
            try:
                self.leave_here(m, stream, stream, False)
            except CuglueError as second:
                error.add_note(f"leaving {self.name} again failed too: {second}")
                m.leave_later()
            raise

    def _refuse_conflict(self, share: Share | None, writable: bool) -> None:
        if share is not None:
            held, wish = held_for(share.maps, share.writers), "map_mut()" if writable else "map()"
            refuse_conflict(self.name, held, wish, writes=writable, hint=_OR_ALIAS)

    def _refuse_beside_host(self, wish: str, *, writes: bool, what: object = None) -> None:
        """A map that a copy of the host's would undo, or that would not see it, is refused."""
        held = held_for(len(self.host), sum(self.host.values()))
        refuse_conflict(what or self.name, held, wish, writes=writes, by=" by the host", hint=_OR_ALIAS)

    # --- leaving --------------------------------------------------------------------------------------------------
    def leave(self, m: CudaMap, stream: Stream, current: Stream, publish: bool) -> None:
        """Leave a map, on the thread where that has to happen; called by the map."""
        try:
            self.backing.call(self.leave_here, m, stream, current, publish)
        except ClosedError:
            if self.backing.alive:
                raise
            self.drop(m)  # with its context went whatever could be given back
        except CuglueError:
            raise
        except BaseException:  # an interrupt (Ctrl-C): whoever leaves a map has left it
            if not m.released:
                self.leave_later(m, publish=publish)
            raise

    def drop(self, m: CudaMap) -> None:
        """Forget a map of which nothing can be given back."""
        with self._lock:
            if not m.released:
                self._drop(m)

    def leave_here(self, m: CudaMap, stream: Stream, current: Stream, publish: bool) -> None:
        """:meth:`leave`, on the right thread already."""
        with self._lock, self._ordering:
            if m.released:
                return
            stream.refuse_capture("leave a map")
            with self.backing.state.ordering:
                m.note_uses(stream, current)
            self.make_ready(m, stream, publish, last=m.share.maps == 1)
            self.hand_over(m, stream)

    def make_ready(self, m: CudaMap, stream: Stream, publish: bool, *, last: bool) -> None:
        """Queue on ``stream``, which captures nothing, all that comes before :meth:`hand_over`; m's users are noted.

        Where it fails the map is a live one still, and again it does what was not done. ``last``: no map of the same
        part stays.
        """
        share = m.share
        with self._lock, self._ordering:
            if publish and m.writable and not m.published and self._opaque is not None:
                try:
                    self._opaque.publish(share, stream)
                except CaptureError:
                    raise  # nothing was tried
                except CuglueError as error:
                    m.advance("fail")
                    raise PublishError(
                        f"{self.name} was not published",
                        got=str(error),
                        hint="Release the map again, or cancel() it",
                    ) from error
                m.published = True
            if last:
                try:
                    self.backing.join(share, stream)
                except BaseException:
                    m.advance("fail")
                    raise

    def hand_over(self, m: CudaMap, stream: Stream) -> None:
        """Leave a map that :meth:`make_ready` made ready, and give the part back with its last one."""
        with self._lock, self._ordering:
            if m.released:
                return
            if m.share.maps == 1:
                try:
                    self.backing.shut(m.share, stream)
                except BaseException:
                    m.advance("fail")
                    raise
            self._drop(m)

    def _drop(self, m: CudaMap) -> None:
        """Forget a map that was left (lock held), and end the handle if it was closed and this was the last one."""
        share = m.share
        last = share.maps == 1 and len(self._live) == 1
        state = step(HANDLE, self._state, "unmap_last" if last else "unmap", self)
        m.advance("release")
        # From here on nothing is called: an interrupt leaves all of it undone, or all done.
        share.maps -= 1
        share.writers -= m.writable
        if not share.maps:
            del self._live[share.part]
        self._state = state
        if self._state is HandleState.CLOSED:
            self._destroy()

    def leave_later(self, m: CudaMap, *, publish: bool) -> None:
        """Leave a map that nobody can reach before the object's next use. For finalisers: only appends."""
        self._left_over.append((m, publish))
        self.backing.post(self._leave_left_over)

    def _leave_left_over(self) -> None:
        """Leave what :meth:`leave_later` brought; what cannot be left stays for the next time."""
        while self._left_over:
            m, publish = self._left_over[0]
            current = m.current_stream()
            self.leave_here(m, m.stream if m.stream.nameable() else current, current, publish)
            self._left_over.popleft()

    @property
    def mapped(self) -> bool:
        """Whether a map is live."""
        return bool(self._live)

    def begin_host(self, key: object, writes: bool, wish: str, what: object) -> None:
        """Note a copy that the host works on, before it is made; on the right thread already.

        Raises:
            MapConflictError: it would tear or undo what another map shows. Nothing is noted.
        """
        with self._lock:
            self._leave_left_over()
            self._refuse_beside_host(wish, writes=writes, what=what)
            writers = sum(share.writers for share in self._live.values())
            refuse_conflict(what, held_for(len(self._live), writers), wish, writes=writes, by=" by CUDA")
            self.host[key] = writes

    def transfer(self) -> None:
        """Give the registration away, on the right thread already: nothing here ends it any more.

        Raises:
            MapConflictError: maps are live. BusyError: other handles share it. ClosedError. Nothing changed.
        """
        with self._lock:
            self._leave_left_over()
            self._refuse_beside_host("a transfer", writes=True)
            users = len(self._users)
            if users > 1:
                raise busy(self.name, f"{users} open handles", "Close the other handles of the object first")
            self._state = step(HANDLE, self._state, "transfer", self)
            self._destroyed = True

    # --- the end --------------------------------------------------------------------------------------------------
    def close(self, handle: object) -> None:
        """One handle less; with the last one the registration ends, now or when the last live map is left."""
        try:
            self.backing.call(self.close_here, handle)
        except ClosedError:
            if self.backing.alive:
                raise
            with self._lock:
                self._users.discard(handle)
                if not self._users:
                    self._state = step(HANDLE, self._state, "close", self.name)
                    self._destroyed = True  # with its context went the registration

    def close_here(self, handle: object = None) -> None:
        """:meth:`close`, on the right thread already; None: of a handle that is gone.

        Where it fails nothing has changed; where it is interrupted it can be repeated.
        """
        with self._lock:
            self._leave_left_over()
            if not [other for other in self._users if other is not handle]:
                if self.host:
                    raise busy(self.name, "a map of the host", "Leave that map first")
                state = step(HANDLE, self._state, "close", self.name)
                if state is HandleState.CLOSED:
                    self._destroy()
                self._state = state
            if handle is not None:
                self._users.discard(handle)

    def finish(self) -> None:
        """Try an end again that failed when the last map was left."""
        if self._state is HandleState.CLOSED and not self._destroyed and self.backing.alive:
            self.backing.call(self._finish_here)

    def _finish_here(self) -> None:
        with self._lock:
            self._destroy()

    def _destroy(self) -> None:
        if self._destroyed:
            return
        self._ending = True
        try:
            self.backing.destroy()
        except CuglueError:
            self._ending = False  # refused: it is as it was
            raise
        self._destroyed = True
