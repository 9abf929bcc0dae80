"""The arenas of all streams of one pool.

Owns which stream has which arena, which are kept for graphs, and the figures of all. Must not know blocks or arrays,
nor when memory is taken from upstream (:mod:`.ladder`).

Locks: a request that its own arena can serve takes the lock of that arena alone. Whatever concerns several arenas takes
the pool's lock and then all of theirs (:meth:`Homes.all_locked`); the device's ordering lock comes last. Nothing that
may run the collector or wait for the device is called under any of them: finalisers and other threads need them.

Interrupts: Ctrl-C may end any of this between two calls. Spans say themselves what they are, and those that it leaves
out of the heaps are put back (:meth:`Homes.mend`); statements that must not be parted have no call between them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ...core.device import DeviceState
from ...core.stream import Stream
from ...errors import CaptureError, CuglueError, OutOfMemory
from ...lifecycle import BlockState
from .arena import Arena
from .counters import PoolCounters, sum_of
from .spans import Page, Span, taken
from .upstream import Upstream

_LIVE, _FREED = BlockState.LIVE, BlockState.FREED
_acquire, _release = type(threading.RLock()).acquire, type(threading.RLock()).release
_HOMES = 64  # streams whose free memory is kept apart; beyond it that of unused streams is given back


class Home(Arena):
    """The arena of one stream.

    Attributes:
        stream: may use everything free here at once.
        private: memory of a graph, never given to anybody else.
        abandoned: whether nobody can say any more that the graph is gone.
        former: the home whose place on the stream it takes meanwhile.
        owner: the current stream's own object for which arrays take their memory here; None: for none.
        lock: held for whatever changes spans of this arena, but for bins.
        replaced: unused pages given back before a larger one was taken.
        efforts: how often that for a large one, or borrowing from another stream, was tried to spare a page.
        exchanges: how often pages of middle size were replaced.
    """

    def __init__(self, stream: Stream, *, private: bool = False) -> None:
        super().__init__()
        self.stream = stream
        self.private = private
        self.abandoned = False
        self.former: Home | None = None
        self.owner: object = None
        self.lock = threading.RLock()
        self.replaced = 0
        self.efforts = 0
        self.exchanges = 0
        self.seen = -1  # requests at the last look at its age
        self.looked = -1  # requests at the last look whether it is idle
        self.refusal: OutOfMemory | None = None  # why upstream gave nothing the last time

    def adopt(self, span: Span) -> Span:
        """Inherited. Known as :data:`taken`."""
        taken.span = super().adopt(span)
        return span

    def put(self, span: Span, block: Any = None) -> None:
        """Take a span back, and the block that was in it; what used it is ordered before what :attr:`stream` does next.

        An interrupt finds the block live, or freed and its span in the bin: called again, this does nothing then.
        """
        if block is not None:
            if block.state is _FREED:
                return
            block.state = _FREED
        span.life = None
        span.stack.append(span)

    def counts(self) -> PoolCounters:
        """What happened in this arena."""
        return PoolCounters(
            hits=self.hits,
            misses=self.misses,
            splits=self.small.splits + self.large.splits,
            coalesced=self.small.coalesced + self.large.coalesced,
            flushes=self.flushes,
            replaced=self.replaced,
        )


class Homes:
    """All homes of a pool.

    Args:
        state: of the device.
        upstream: where pages come from.
        idle_seconds: pages unused for so long are given back; None: never.
    """

    def __init__(self, state: DeviceState, upstream: Upstream, idle_seconds: float | None) -> None:
        self.state = state
        self.upstream = upstream
        self.counters = PoolCounters()
        self.lock = threading.RLock()
        self.clock: Callable[[], float] = time.monotonic
        self._idle_seconds = idle_seconds
        self._next_look = 0.0
        self._by_stream: dict[int, Home] = {}
        self._others: list[Home] = []  # memory of graphs, and what is left of homes that were closed
        #: By id of their owner, which they keep alive: what a hit has to look up when the current stream changes.
        self.fast: dict[int, Home] = {}
        #: Called when something comes back after :meth:`seal`.
        self.came_back: Callable[[], None] | None = None

    # --- homes --------------------------------------------------------------------------------------------------
    def of(self, stream: Stream) -> Home:
        """The home of a stream."""
        home = self._by_stream.get(stream.id)
        return home if home is not None else self._add(stream)

    @contextmanager
    def all_locked(self) -> Iterator[list[Home]]:
        """Every home, its lock held; no home comes or goes meanwhile."""
        with self.lock:
            homes = self.all()
            held: list[Any] = []
            # Each way in one call, in which no interrupt comes: a lock that nobody leaves stops all other threads.
            acquired = filter(_acquire, [home.lock for home in homes])
            leave = partial(deque[None](maxlen=0).extend, map(_release, held))
            try:
                held.extend(acquired)
                yield homes
            except CuglueError:
                raise
            except BaseException:
                self._mend(homes)
                raise
            finally:
                leave()

    def mend(self) -> None:
        """After an interrupt in the midst of a change: all that is free is in the heaps of its home again, once."""
        with self.all_locked() as homes:
            self._mend(homes)

    def _mend(self, homes: Sequence[Home]) -> None:
        lent: dict[int, list[Span]] = {id(home): [] for home in homes}
        for home in homes:
            for span in (span for page in home.pages for span in page.spans()):
                if span.home is not home and span.home is not None:
                    lent.setdefault(id(span.home), []).append(span)
        for home in homes:
            home.mend(lent[id(home)])

    def _add(self, stream: Stream) -> Home:
        with self.lock:
            if len(self._by_stream) >= _HOMES:
                with self.all_locked():
                    self._forget_unused()
            home = self._by_stream.setdefault(stream.id, Home(stream))
            self._note_fast(home)
            return home

    def _note_fast(self, home: Home) -> None:
        # A per-thread default stream is one object for many threads' streams, and an int may be anybody's.
        owner = home.stream.owner
        if owner is not None and home.stream.thread is None and self.came_back is None:
            self.fast[id(owner)] = home
            home.owner = owner

    def _forget_unused(self) -> None:
        """Let go of streams that nothing lives on, so that dead streams can be destroyed (all locked)."""
        busy = self._busy()
        for key, home in list(self._by_stream.items()):
            if id(home) in busy or home.private or home.former is not None:
                continue
            home.flush()
            self._return_strays(home)
            for page in home.unused():
                self.counters.drained += self._spare(home, page, [])
            if not home.pages and not home.free_bytes:
                del self._by_stream[key]
                self._forget_fast(home)
                self._keep_counts(home)

    def _busy(self) -> set[int]:
        """The ids of the homes that something goes back to, be it in a page of another home (all locked)."""
        binned = {id(span) for home in self.all() for span in home.binned_spans()}
        spans = [span for home in self.all() for page in home.pages for span in page.spans()]
        return {id(span.home) for span in spans if not span.free and id(span) not in binned}

    def _forget_fast(self, home: Home) -> None:
        for known in [known for known, other in self.fast.items() if other is home]:
            del self.fast[known]
        home.owner = None

    def forget_all_fast(self) -> None:
        """No array gets memory without a question any more."""
        for home in list(self.fast.values()):
            self._forget_fast(home)

    def seal(self, came: Callable[[], None]) -> None:
        """The pool closes: nothing is taken without a question any more, and what comes back is told of by ``came``."""
        with self.all_locked() as homes:
            self.came_back = came
            self.forget_all_fast()
            for home in homes:
                home.seal(came)
            for span in (span for home in homes for page in home.pages for span in page.spans()):
                if span.home is not None:
                    span.stack = span.home.late
            for home in homes:
                home.flush()  # what came back before lies in its bins, and no more comes there
                home.private = home.private and not home.abandoned

    def unseal(self) -> None:
        """The pool could not be closed."""
        with self.lock:
            self.came_back = None
            for home in self.all():
                home.late = None
            for home in self._by_stream.values():
                self._note_fast(home)

    def all(self) -> list[Home]:
        """Every home."""
        with self.lock:
            homes = list(self._by_stream.values())
            for home in homes:
                if home.former is not None:
                    homes.append(home.former)
            return [*homes, *self._others]

    # --- unused pages ---------------------------------------------------------------------------------------------
    def _drop_unused(
        self, wanted: Callable[[Page], bool], refused: list[CaptureError], only: Home | None = None
    ) -> int:
        """Flush, return strays, give back the unused pages that are wanted; how many (all locked).

        What a capture is in the way of stays; ``refused`` gets the errors.
        """
        homes = [home for home in self.all() if not home.private and (only is None or home is only)]
        for home in homes:
            home.flush()
        for home in homes:
            self._return_strays(home)
        dropped = 0
        for home in homes:
            for page in home.unused():
                if wanted(page):
                    dropped += self._spare(home, page, refused)
            dropped += self._shorten(home, refused)
            if (
                home in self._others
                and not home.pages
                and not home.free_bytes
                and id(home) not in self._busy()
            ):
                self._others.remove(home)
                self._keep_counts(home)
        return dropped

    def _shorten(self, home: Home, refused: list[CaptureError]) -> int:
        """Give back the unused ends of pages that can be shortened; how many (all locked)."""
        by = self.upstream.expandable
        done = 0
        if by is None:
            return 0
        for page in list(home.pages):
            while piece := home.cut_end(page, by.ending(page.source, page.nbytes)):
                try:
                    self.upstream.shrink(page, piece.size, by)
                except BaseException as error:
                    home.give(piece)
                    if not isinstance(error, CaptureError):
                        raise
                    refused.append(error)
                    return done
                home.shortened(page, piece.size)
                done += 1
        return done

    def _spare(self, home: Home, page: Page, refused: list[CaptureError]) -> bool:
        """Give an unused page back; False if a capture is in the way."""
        try:
            self._drop(home, page)
        except CaptureError as error:
            refused.append(error)
        return page not in home.pages

    def _drop(self, home: Home, page: Page) -> None:
        home.drop(page)  # first: what is given back must not be handed out, whatever comes in between
        try:
            self.upstream.drop(page)
        except BaseException:
            if page.source is None or page.source.state is _LIVE:
                home.add(page, small=page.small)
            raise

    def _return_strays(self, home: Home) -> None:
        """Give free spans that were stolen back to the arena that has their page, after the work of this one."""
        strays = [span for heap in (home.small, home.large) for span in heap if span.page not in home.pages]
        for span in strays:
            owner = next((other for other in self.all() if span.page in other.pages), None)
            if owner is None or owner.private:
                continue
            try:
                owner.stream.join(home.stream)
            except CaptureError:
                continue
            home.remove(span)
            owner.give(span)

    # --- figures ------------------------------------------------------------------------------------------------
    @property
    def free_bytes(self) -> int:
        """Bytes that are handed out to nobody."""
        with self.all_locked() as homes:
            return sum(home.free_bytes for home in homes)

    def live_spans(self) -> list[tuple[Span, Stream]]:
        """What is handed out, and on which stream."""
        with self.all_locked() as homes:
            binned = {id(span) for home in homes for span in home.binned_spans()}
            spans = [span for home in homes for page in home.pages for span in page.spans()]
            return [(span, span.home.stream) for span in spans if not span.free and id(span) not in binned]

    def free_pieces(self) -> list[int]:
        """Bytes of each free span."""
        with self.all_locked() as homes:
            spans = [span for home in homes for page in home.pages for span in page.spans()]
            binned = [span.size for home in homes for span in home.binned_spans()]
            return [span.size for span in spans if span.free] + binned

    def snapshot(self) -> PoolCounters:
        """The counters, those of the homes added."""
        return sum_of(self.counters, *(home.counts() for home in self.all()))

    def _keep_counts(self, home: Home) -> None:
        self.counters = sum_of(self.counters, home.counts())
