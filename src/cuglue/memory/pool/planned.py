"""The configurable pools, each an algorithm on pages that somebody else gets.

Owns which request gets which bytes of which page, and what each kind keeps. Must not know drivers, streams or
resources. Given the same requests, a pool gives the same offsets of the same pages: a measured plan can be replayed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Protocol

from .layouts import MAX_PAGES, Direct, Exclusive, Persistent, PoolLayout, Sliced
from .spans import ALIGN, Page, Span, padded, taken
from .usage import MemoryUsage, PoolReport


class PageSource(Protocol):
    """Where pages come from."""

    def grow(self, nbytes: int) -> Page:
        """A new page. Raises OutOfMemory."""

    def drop(self, page: Page) -> None:
        """Take a page back; every use of it is ordered before this."""


class Pool(ABC):
    """One pool of a layout."""

    def __init__(self, kind: PoolLayout, source: PageSource) -> None:
        self.kind = kind
        self.pages: list[Page] = []
        self.pages_peak = 0
        self.largest_alloc = 0
        self.spilled = False  # whether it was said already that this pool is full
        self._source = source

    @abstractmethod
    def accepts(self, nbytes: int) -> bool:
        """Whether a request of this size may be served here, if there is room."""

    @abstractmethod
    def _find(self, size: int) -> Span | None:
        """A span of ``size`` bytes (padded), marked as taken; None if the pool is full."""

    def take(self, nbytes: int) -> Span | None:
        """A span for ``nbytes`` bytes; None if the pool is full.

        Raises:
            OutOfMemory: the source has no page.
        """
        span = self._find(padded(nbytes))
        if span is not None:
            self.largest_alloc = max(self.largest_alloc, nbytes)
            span.free = False
            span.home = self
            span.requested = nbytes
            taken.span = span  # in the same breath: an interrupt finds it there
        return span

    def give(self, span: Span) -> None:
        """Take a span back."""
        span.free = True
        span.requested = 0

    def mend(self) -> None:
        """After an interrupt in the midst of a change: all that is free can be found, and neighbours are merged."""
        for page in self.pages:
            for span in page.spans():
                while span.free and span.after is not None and span.after.free:
                    span.absorb()

    def tick(self) -> None:  # noqa: B027 - most pools do not age
        """A request was served, here or in another pool of the stream."""

    def cleanup(self) -> None:
        """Give back every page that nothing is in. If the source refuses one, it and the rest stay."""
        for page in [page for page in self.pages if page.unused]:
            self._drop(page)

    @property
    def capacity(self) -> int | None:
        """Bytes that there can be at most; None: no cap."""
        return None

    @property
    def usage(self) -> MemoryUsage:
        """Now."""
        live = [span for page in self.pages for span in page.spans() if not span.free]
        asked = sum(span.requested for span in live)
        return MemoryUsage(
            len(live), asked, sum(span.size for span in live) - asked, sum(page.nbytes for page in self.pages)
        )

    def report(self) -> PoolReport:
        """Now, and the peaks."""
        unmapped = sum(page.ptr == 0 for page in self.pages)
        return PoolReport(
            self.kind, self.usage, len(self.pages), self.pages_peak, unmapped, self.largest_alloc
        )

    def _grow(self, nbytes: int) -> Page:
        page = self._source.grow(nbytes)
        self.pages.append(page)
        self.pages_peak = max(self.pages_peak, len(self.pages))
        return page

    def _drop(self, page: Page) -> None:
        at = self.pages.index(page)
        page.first.free = False  # first: what is given back must not be handed out, whatever comes in between
        del self.pages[at]
        try:
            self._source.drop(page)
        except BaseException:
            if not page.gone:
                page.first.free = True
                self.pages.insert(at, page)
            raise


class SlicedPool(Pool):
    """First fit over pages of one size. Deterministic: pages in the order they came, spans in order of address."""

    kind: Sliced

    def __init__(self, kind: Sliced, source: PageSource) -> None:
        super().__init__(kind, source)
        cap = kind.max_pool_size
        self._most = MAX_PAGES if cap is None else cap // kind.page_size if cap >= ALIGN else 0

    def accepts(self, nbytes: int) -> bool:
        """Up to the slice size; without a cap also what nearly fills a page."""
        size = padded(nbytes)
        if size <= (self.kind.max_slice_size or self.kind.page_size):
            return True
        return (
            self.kind.max_pool_size is None
            and self.kind.page_size * 8 <= size * 10 <= self.kind.page_size * 10
        )

    @property
    def capacity(self) -> int | None:
        """Inherited."""
        return None if self.kind.max_pool_size is None else self._most * self.kind.page_size

    def _find(self, size: int) -> Span | None:
        for page in self.pages:
            for span in page.spans():
                if span.free and span.size >= size:
                    return _cut(span, size)
        if len(self.pages) >= self._most:
            return None
        return _cut(self._grow(self.kind.page_size).first, size)

    def give(self, span: Span) -> None:
        """Inherited."""
        super().give(span)
        if span.after is not None and span.after.free:
            span.absorb()
        if span.before is not None and span.before.free:
            span.before.absorb()


def _cut(span: Span, size: int) -> Span:
    if span.size > size:
        span.split(size)
    return span


class ExclusivePool(Pool):
    """A page for each request; free pages go when nothing wanted them for a while."""

    kind: Exclusive

    def __init__(self, kind: Exclusive, source: PageSource) -> None:
        super().__init__(kind, source)
        self._clock = 0
        self._idle: dict[Page, int] = {}  # free pages, and the request that they were last free before

    def accepts(self, nbytes: int) -> bool:
        """Up to the largest size."""
        return padded(nbytes) <= self.kind.max_alloc_size

    def _find(self, size: int) -> Span | None:
        # A page much larger than the request waits for one that needs it.
        fitting = [page for page in self.pages if page.unused and size <= page.nbytes <= 2 * size]
        page = min(fitting, key=lambda page: page.nbytes, default=None) or self._grow(size)
        self._idle.pop(page, None)
        return page.first

    def give(self, span: Span) -> None:
        """Inherited."""
        super().give(span)
        self._idle[span.page] = self._clock

    def mend(self) -> None:
        """Inherited."""
        self._idle = {page: self._idle.get(page, self._clock) for page in self.pages if page.unused}

    def tick(self) -> None:
        """Give back the pages that were free for longer than the period."""
        self._clock += 1
        period = self.kind.dealloc_period
        if period is not None:
            for page in [page for page, since in self._idle.items() if self._clock - since > period]:
                if page.unused:  # else an interrupt left it here
                    self._drop(page)

    def _drop(self, page: Page) -> None:
        super()._drop(page)
        self._idle.pop(page, None)


class _ExactPool(Pool):
    """A page of exactly its size for each request; a free page serves that size again, the oldest first."""

    def __init__(self, kind: PoolLayout, source: PageSource) -> None:
        super().__init__(kind, source)
        self._free: defaultdict[int, list[Page]] = defaultdict(list)

    def accepts(self, nbytes: int) -> bool:
        """Any size."""
        return True

    def _find(self, size: int) -> Span | None:
        waiting = self._free.get(size)
        while waiting:
            page = waiting.pop(0)
            if page.unused:  # else an interrupt left it here
                return page.first
        return self._grow(size).first

    def give(self, span: Span) -> None:
        """Inherited."""
        super().give(span)
        self._free[span.size].append(span.page)

    def mend(self) -> None:
        """Inherited."""
        waiting = [page for pages in self._free.values() for page in pages]
        self._free.clear()
        for page in dict.fromkeys([*waiting, *self.pages]):
            if page.unused:
                self._free[page.nbytes].append(page)

    def _drop(self, page: Page) -> None:
        super()._drop(page)
        if page in self._free[page.nbytes]:  # else an interrupt took it out
            self._free[page.nbytes].remove(page)


class DirectPool(_ExactPool):
    """Gives back free pages, oldest first and no more than needed, before there is more than ``reclaim_at``."""

    kind: Direct

    def _grow(self, nbytes: int) -> Page:
        limit = self.kind.reclaim_at
        if limit is not None:
            excess = sum(page.nbytes for page in self.pages) + nbytes - limit
            for page in [page for page in self.pages if page.unused]:
                if excess <= 0:
                    break
                self._drop(page)
                excess -= page.nbytes
        return super()._grow(nbytes)


class PersistentPool(_ExactPool):
    """Keeps every page until a cleanup."""


def make_pool(kind: PoolLayout, source: PageSource) -> Pool:
    """The pool of a (normalized) kind."""
    match kind:
        case Sliced():
            return SlicedPool(kind, source)
        case Exclusive():
            return ExclusivePool(kind, source)
        case Direct():
            return DirectPool(kind, source)
        case Persistent():
            return PersistentPool(kind, source)
