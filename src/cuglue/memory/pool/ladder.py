"""What is done when an arena is empty, from growth to giving up.

Owns the ladder: grow, grow by the exact size, steal from other streams, give unused pages back and grow again, wait for
the device, collect garbage. Must not know blocks or arrays. For locks see :mod:`.homes`.

Up to the most that the pool ever held it grows as it likes. Before it holds more it first does without: unused pages
are replaced, and streams that have nothing to do lend what they keep free, as long as that does not become a habit.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

from ...core.block import OPEN
from ...driver.protocol import Access
from ...errors import CaptureError, CuglueError, DevicePoisoned, OutOfMemory, PoolCapacityExceeded
from .arena import CLOSE, SLACK
from .bins import LARGE, SMALL, class_size
from .graphs import GraphHomes
from .homes import Home
from .spans import Page, Span, taken

# Doing without costs as much as a few hundred hits: so often at first, then once for so many requests.
FIRST_EFFORTS = 64
FIRST_EXCHANGES = 16  # of pages of middle size
REQUESTS_FOR_AN_EFFORT = 2048
LITTLE_SLACK = 11 / 10  # up to so many times what was ever in use no page of middle size is exchanged
WORTH_ASKING = 3  # part of its memory that a stream has to keep free to be asked for a page
MERGED_TOO = (
    4 / 3
)  # part that it has to keep free to be merged first: little of that will be wanted as it was
WORTH_BORROWING = 64 << 20  # bytes of the pool; a smaller one rather grows than asks other streams


class Ladder(GraphHomes):
    """The homes of a pool, and how a request is served that no bin serves."""

    # --- a request that no bin served ---------------------------------------------------------------------------
    def supply(self, home: Home, nbytes: int) -> Span:
        """A span for ``nbytes`` bytes on the stream of ``home``.

        Ordering: only enqueues, but for a request that upstream refuses: then it waits for the device.

        Raises:
            OutOfMemory: nothing helped. The error names no resource: callers know more.
            CaptureError: the stream captures and more memory would be needed.
        """
        self.state.retire.run_forgotten()
        troubles: list[CuglueError] = []
        former, taken.span = taken.span, None  # another one's, where a signal's handler allocates
        try:
            with home.lock:
                home.misses += 1
                span = home.find(nbytes)
            if span is not None:
                return span
            home.stream.refuse_capture("take memory from upstream")
            self.look_at_ages()
            return self._climb(home, nbytes, troubles)
        except CuglueError:
            raise
        except BaseException:
            if taken.span is not None:
                home.put(taken.span)
            self.mend()
            raise
        finally:
            troubles[
                :
            ] = ()  # errors hold the frames of all callers, and these hold arrays; a call would lose the span
            home.refusal = None
            taken.span = former

    def _climb(self, home: Home, nbytes: int, troubles: list[CuglueError]) -> Span:
        limit = self.upstream.limit
        if limit is not None and class_size(nbytes) > limit:
            return self._refuse(home, nbytes, troubles)
        span = self._grow(home, nbytes)
        if span is not None:
            return span
        home.memory_is_short()
        span = self._steal(home, nbytes) or self._drain(home, nbytes)
        if span is not None:
            return span
        span = self._wait(home, nbytes, troubles)
        if span is None:
            gc.collect()  # arrays in cycles
            span = self._wait(home, nbytes, troubles)
        return span if span is not None else self._refuse(home, nbytes, troubles)

    def _refuse(self, home: Home, nbytes: int, troubles: Sequence[CuglueError]) -> Span:
        cause = troubles[0] if troubles else home.refusal
        limit = self.upstream.limit
        if limit is not None and not self.upstream.fits(class_size(nbytes)):
            raise PoolCapacityExceeded(
                "pool", requested=nbytes, capacity=limit, in_use=self.upstream.reserved - self.free_bytes
            ) from cause
        raise OutOfMemory(
            "pool", requested=nbytes, in_use=self.upstream.reserved - self.free_bytes
        ) from cause

    def _grow(self, home: Home, nbytes: int) -> Span | None:
        """Take a page from upstream, or more of the last one; None if it has none."""
        good, enough = home.page_sizes(nbytes)
        if self.upstream.reserved + good > self.upstream.peak and not home.private:
            # Not so for a graph, which may use every address that it was ever given.
            span = self._do_without(home, nbytes, good)
            if span is not None:
                return span
        span = self._extend(home, nbytes)
        if span is not None:
            return span
        span = self._grow_by(home, nbytes, good) if self.upstream.fits(good) else None
        if span is None and enough < good:
            span = self._grow_by(home, nbytes, enough)
            self.counters.fallbacks += span is not None
        return span

    def _do_without(self, home: Home, nbytes: int, good: int) -> Span | None:
        """What spares the pool a page of ``good`` bytes before it holds more than ever, or None: then there is room."""
        size = class_size(nbytes)
        with home.lock:
            tired = _tired(home, home.efforts - FIRST_EFFORTS)
            if size > SMALL:
                pages = self._exchangeable(home, size, tired)
                if size >= LARGE and (tired or not pages):
                    span = home.take(nbytes, whole=True)
                    if span is not None:
                        return span
                for page in pages:
                    over = self.upstream.reserved + good > self.upstream.peak
                    if (over or size >= LARGE) and home.vacate(page):
                        self._drop(home, page)
                        home.replaced += 1
        if tired or self.upstream.reserved < max(WORTH_BORROWING, self.upstream.peak - good):
            return None
        others = [other for other in self.all() if other is not home and other.has_free]
        home.efforts += bool(others)
        lenders = [other for other in others if _idle(other) and _lends(other)]
        if not lenders:
            return None
        with self.all_locked():
            return self._borrow(home, nbytes, good, lenders)

    def _exchangeable(self, home: Home, size: int, tired: bool) -> list[Page]:
        """The spare pages that should go before one for ``size`` bytes comes, the largest first (locked).

        It fits into none of these, but for a large one: that takes no page much larger.
        """
        if self.upstream.expandable is not None:
            return []  # pages that grow where they are need not be exchanged for larger ones
        if size < LARGE:
            weary = _tired(home, home.exchanges - FIRST_EXCHANGES)
            if not home.keeps(SLACK if weary else LITTLE_SLACK):
                return []
        all_sizes = size >= LARGE and not tired
        pages = [page for page in home.spare() if not page.small and (all_sizes or page.nbytes < size)]
        if size >= LARGE:
            home.efforts += bool(pages)
        else:
            home.exchanges += bool(pages)
        return pages

    def _borrow(self, home: Home, nbytes: int, good: int, lenders: list[Home]) -> Span | None:
        """A spare page of a stream without work, or the room of some that do not fit (all locked)."""
        size = class_size(nbytes)
        for other in lenders:
            if other.free_at_least * MERGED_TOO > other.reserved:
                other.flush()
        found = [(page.nbytes, page.ptr, page, other) for other in lenders for page in other.spare()]
        found.sort(key=lambda one: one[:2])
        # The page is given back after work on this stream, which must have a name by then.
        moving = self.upstream.tracks and home.stream.thread is None and home.stream.nameable()
        for have, _, page, other in found if moving else ():
            fits = size <= have <= size * CLOSE and page.small is (size <= SMALL)
            if fits and other.vacate(page):
                home.stream.join(other.stream)
                page.source.finish(home.stream, Access.READ, OPEN)  # it is given back after the work there
                other.drop(page)
                try:
                    home.add(page, small=page.small)
                except BaseException:
                    if page not in home.pages:
                        other.add(page, small=page.small)
                    raise
                self.counters.stolen += 1
                return home.take(nbytes, whole=True)
        for _, _, page, other in reversed(found):
            if self.upstream.reserved + good > self.upstream.peak and other.vacate(page):
                self._drop(other, page)
                self.counters.drained += 1
        return None

    def _extend(self, home: Home, nbytes: int) -> Span | None:
        """Make the last page longer, by no more than is missing at its end."""
        by = self.upstream.expandable
        if by is None:
            return None
        size = class_size(nbytes)
        with self.all_locked():  # its end may be another home's
            page = home.last(small=size <= SMALL)
            if page is None:
                return None
            end = page.end
            missing = size - end.size if end.free and end.home is home else size
            more = self.upstream.extend(page, missing, by)
            if more is None:
                return None
            self.counters.extended += 1
            home.extended(page, more)
            return home.take(nbytes, whole=True)

    def _grow_by(self, home: Home, nbytes: int, size: int) -> Span | None:
        try:
            page = self.upstream.grow(size, home.stream)
        except OutOfMemory as error:
            home.refusal = error
            return None
        try:
            self.counters.grown += 1
            with home.lock:
                home.add(page, small=class_size(nbytes) <= SMALL)
                return home.take(nbytes, whole=True)
        except BaseException:
            if page not in home.pages:
                self.upstream.drop(page)
            raise

    # --- the ladder ---------------------------------------------------------------------------------------------
    def _steal(self, home: Home, nbytes: int) -> Span | None:
        """A free span of this or another stream, however large; that stream's work so far is waited for on the GPU."""
        with self.all_locked():
            home.flush()
            span = home.take(nbytes, whole=True)
            if span is not None:
                return span
            for other in self._lenders(home):
                other.flush()
                span = other.lend(nbytes)
                if span is None:
                    continue
                try:
                    home.stream.join(other.stream)
                except BaseException as error:
                    other.give(span)
                    if isinstance(error, CaptureError):
                        continue
                    raise
                self.counters.stolen += 1
                return home.adopt(span)
        return None

    def _lenders(self, home: Home) -> Iterator[Home]:
        others = [other for other in self.all() if other is not home and not other.private]
        return iter(sorted(others, key=lambda other: other.free_bytes, reverse=True))

    def _drain(self, home: Home, nbytes: int) -> Span | None:
        """Give back every unused page of every stream and take one of the exact size."""
        with self.all_locked():
            self.counters.drained += self._drop_unused(lambda page: True, [])
            span = home.take(nbytes, whole=True)
        return span or self._grow(home, nbytes)

    def _wait(self, home: Home, nbytes: int, troubles: list[CuglueError]) -> Span | None:
        """Wait until the device is done with what was given back, to us and to upstream, and ask once more.

        What fails on the way is no reason to give up; it is told if nothing else helps.
        """
        self.counters.retries += 1
        retire = self.state.retire
        for step in (lambda: retire.drain(block=True), self.upstream.resource.reap_pending):
            try:
                step()
            except DevicePoisoned:
                raise
            except CuglueError as error:
                troubles.append(error)
        return self._steal(home, nbytes) or self._drain(home, nbytes)

    # --- giving back --------------------------------------------------------------------------------------------
    def trim(self, keep: int = 0) -> int:
        """Give back unused pages until ``keep`` bytes are reserved; the bytes given back.

        Raises:
            CaptureError: a capture is in the way of some pages; all others were given back.
        """
        before = self.upstream.reserved
        refused: list[CaptureError] = []
        with self.all_locked():
            self.counters.trimmed += self._drop_unused(lambda page: self.upstream.reserved > keep, refused)
        if refused and self.upstream.reserved > keep:
            raise refused[0]
        return before - self.upstream.reserved

    def look_at_ages(self) -> None:
        """Give back the pages that nobody used for long; looks twice in that time."""
        period = self._idle_seconds
        now = self.clock()
        if period is None or now < self._next_look:
            return
        self._next_look = now + period / 2
        with self.all_locked() as homes:
            for home in homes:
                if home.private:
                    continue
                requests = home.hits + home.misses
                if requests == home.seen:
                    home.flush()  # nothing happened here: what lies in bins is idle too
                home.seen = requests
                for page in home.unused():
                    page.idle_since = page.idle_since or now
                    if now - page.idle_since >= period:
                        self.counters.shrunk += self._spare(home, page, [])


def _tired(home: Home, efforts: int) -> bool:
    """Whether so many efforts beyond the first are too many for the requests so far."""
    return efforts * REQUESTS_FOR_AN_EFFORT > home.hits + home.misses


def _lends(home: Home) -> bool:
    """Whether it keeps so much free that it can spare a page: a stream whose work goes on needs the rest again."""
    return home.free_at_least * WORTH_ASKING > home.reserved


def _idle(home: Home) -> bool:
    """Whether nobody asked it for memory since the last look, and the device has nothing left to do on its stream.

    A stream that cannot say so is not idle.
    """
    before, home.looked = home.looked, home.hits + home.misses
    stream = home.stream
    try:
        return (
            before == home.looked
            and not home.private
            and stream.nameable()
            and not stream.capturing
            and stream.query()
        )
    except CuglueError:
        return False
