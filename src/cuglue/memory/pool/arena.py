"""The default layout: the free memory of one stream, in bins and behind them in order of address.

Owns size classes, bins, the two heaps (small and large) and when bins are emptied into them. Must not know drivers,
streams or resources; pages are given to it.

A request first looks into the bin of its size class (that is all that :mod:`.hot` does). Behind the bins a span is cut
from the best fit, small ones in runs and from pages of their own, so that they never carve up large memory. Spans go
back to their bin whole; they are merged with their neighbours before more is taken from upstream.
"""

from __future__ import annotations

from collections.abc import Iterable

from .bins import LARGE, SMALL, Bins, class_size
from .spans import BestFit, Page, Span
from .usage import MemoryUsage

SMALL_PAGE = 2 << 20
RUN = 32 << 10  # bytes of one size class that are cut at once
CLOSE = 5 / 4  # a large request is given a span at most so many times its size, while there is more memory
SPARE_MIDDLE, SPARE_LARGE = 16, 64  # a rest smaller than such a part of the request is not cut off
SHARE = (
    128  # a page of middle sizes is at least this part of all memory, so that few pages hold many requests
)
LARGEST_SHARED = 64 << 20
# A free span both larger than this and so many times larger than a request waits for a larger one, if upstream gives.
UNDIVIDED = 16 << 20
SPLIT_RATIO = 16
SMALL_PART = 10  # small pages that are less than such a part of all memory are not worth merging
WORTH_MERGING = 8  # part of the small pages that has to lie in bins
SLACK = 5 / 4  # up to so many times what was ever in use, more is taken for middle sizes before any is merged


class Arena(Bins):
    """Free memory that one stream may use at once. Its owner's lock is held for every call; bins need none.

    Attributes:
        pages, reserved, small_reserved: those taken for it, their bytes, and those of small pages; spans of them may
            have gone to other arenas.
        hits, misses, flushes: requests served from a bin, and behind it; how often bins were emptied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.small = BestFit()
        self.large = BestFit()
        self.pages: dict[Page, None] = {}
        self.reserved = 0
        self.small_reserved = 0
        self._most_used = 0  # bytes handed out at once, as far as it was looked
        self._leaving: list[Span] = []  # spans that left their bins and are in no heap yet
        self.hits = 0
        self.misses = 0
        self.flushes = 0

    # --- heaps --------------------------------------------------------------------------------------------------
    def flush(self, small: bool | None = None) -> bool:
        """Empty the bins (of small classes, of large ones, or all) into the heaps; whether anything lay there."""
        found = self._leaving
        self.empty_into(found, small)
        if not found:
            return False
        self.flushes += 1
        self.small.give_all([span for span in found if span.page.small])
        self.large.give_all([span for span in found if not span.page.small])
        found.clear()
        return True

    def find(self, nbytes: int) -> Span | None:
        """A span for ``nbytes`` bytes out of what is here, merging what lies in bins if that is worth it."""
        if not self.knows(nbytes):
            span = self.pop(nbytes)
            if span is not None:
                return span
        span = self.take(nbytes)
        if span is None:
            size = class_size(nbytes)
            worth = self._small_worth_merging() if size <= SMALL else size >= LARGE or self.keeps(SLACK)
            if worth and self.flush(size <= SMALL):
                span = self.take(nbytes)
        return span

    def keeps(self, times: float) -> bool:
        """Whether more is kept than ``times`` what was ever in use at once, as far as it was looked."""
        self._most_used = max(self._most_used, self.reserved - self.free_at_least)
        return self.reserved > times * self._most_used

    def _small_worth_merging(self) -> bool:
        """Whether another small page costs more than merging and cutting the ones there are."""
        if self.small_reserved * SMALL_PART < self.reserved:
            return False
        return self.binned_at_least(SMALL) * WORTH_MERGING >= self.small_reserved

    def take(self, nbytes: int, *, whole: bool = False) -> Span | None:
        """A span for ``nbytes`` bytes from the heaps, None if there is none.

        Args:
            nbytes: bytes.
            whole: cut up anything that fits; else small requests leave larger memory alone, and others leave alone what
                is much larger.
        """
        size = class_size(nbytes)
        if size <= SMALL:
            span = self._take_small(nbytes, size)
            if span is not None or not whole:
                return span
        large = size >= LARGE
        most = int(size * CLOSE) if large else max(size * SPLIT_RATIO, UNDIVIDED)
        span = self.large.take(size, 0 if whole else most, size // (SPARE_LARGE if large else SPARE_MIDDLE))
        return span and self.adopt(span)

    def lend(self, nbytes: int) -> Span | None:
        """A free span for ``nbytes`` bytes, in no heap any more, for another arena to adopt."""
        size = class_size(nbytes)
        near, far = (self.small, self.large) if size <= SMALL else (self.large, self.small)
        return near.take(size) or far.take(size)

    def _take_small(self, nbytes: int, size: int) -> Span | None:
        """A span, and the rest of a run of its class into the bin."""
        span = self.small.take(RUN // size * size) if 2 * size <= RUN else None
        span = span or self.small.take(size)
        if span is None:
            return None
        stack = self.bin_of(nbytes)
        rests: list[Span] = []
        last = span
        span.home = self
        while last.size > size:
            last = last.split(size)
            rests.append(last)
        for rest in rests:
            rest.stack = stack
            rest.free = False  # and into the bin in the same breath
            stack.append(rest)
        return self.adopt(span)

    def adopt(self, span: Span) -> Span:
        """Make ``span``, which is in no heap, one of this arena in use; it goes back to the bin that it fits best."""
        span.stack = self.bin_for(span.size)
        span.home = self
        span.page.idle_since = 0.0
        span.free = False
        return span

    def give(self, span: Span) -> Span:
        """Take a span back past its bin, or one of another arena over; the free span that it is part of then."""
        span.home = self
        return (self.small if span.page.small else self.large).give(span)

    def remove(self, span: Span) -> None:
        """Let a free span go, whole; it stays marked as free."""
        (self.small if span.page.small else self.large).remove(span)

    def mend(self, others: Iterable[Span]) -> None:
        """After an interrupt in the midst of a change: all that is free is in the heaps again, once.

        Args:
            others: spans of pages of other arenas that belong to this one.
        """
        for span in self._leaving:
            span.free = True
        self._leaving.clear()
        own = [span for page in self.pages for span in page.spans() if span.home in (self, None)]
        self.small.clear()
        self.large.clear()
        free = [span for span in (*own, *others) if span.free]
        for span in free:
            span.home = self
        self.small.give_all([span for span in free if span.page.small])
        self.large.give_all([span for span in free if not span.page.small])

    # --- pages --------------------------------------------------------------------------------------------------
    def page_sizes(self, nbytes: int) -> tuple[int, int]:
        """Bytes to ask upstream for so that there is room for ``nbytes``: what is good, and what would do."""
        size = class_size(nbytes)
        if size <= SMALL:
            return SMALL_PAGE, size
        shared = min(self.reserved // SHARE, LARGEST_SHARED)
        return max(shared // size, 1) * size, size

    def add(self, page: Page, *, small: bool) -> None:
        """Take a page in, for small requests or for large ones."""
        page.small = small
        self.small_reserved += page.nbytes if small else 0
        self.pages[page] = None
        self.reserved += page.nbytes
        self.give(page.first)

    def last(self, *, small: bool) -> Page | None:
        """The page taken last, for small requests or for large ones."""
        return next((page for page in reversed(self.pages) if page.small is small), None)

    def unused(self) -> list[Page]:
        """The pages that are one free span of this arena; spans in bins are not free."""
        return [page for page in self.pages if page.unused and page.first.home is self]

    def spare(self) -> list[Page]:
        """The pages that are one span of this arena, which is free or lies in a bin; the largest first."""
        spans = [*self.binned_spans(), *self.small, *self.large]
        pages = [span.page for span in spans if span.page.first is span and span.after is None]
        return sorted([p for p in pages if p in self.pages], key=lambda page: page.nbytes, reverse=True)

    def vacate(self, page: Page) -> bool:
        """Take a spare page out of its bin; False if another thread was quicker."""
        span = page.first
        if span.free:
            return True
        self._leaving = [span]
        try:
            span.stack.remove(span)
        except ValueError:
            self._leaving = []
            return False
        self.give(span)
        self._leaving = []
        return True

    def extended(self, page: Page, more: Span) -> None:
        """A page got longer by ``more``."""
        self.reserved += more.size
        self.small_reserved += more.size if more.page.small else 0
        self.give(more)

    def cut_end(self, page: Page, size: int) -> Span | None:
        """The last ``size`` bytes of ``page`` as a span that is in no heap, if they are not used."""
        end = page.end
        if not size or not end.free or end.home is not self or end.size < size:
            return None
        self.remove(end)
        if end.size == size:
            end.free = False
            return end
        piece = end.split(end.size - size)
        piece.free = False  # not to be merged again
        self.give(end)
        return piece

    def shortened(self, page: Page, nbytes: int) -> None:
        """``page`` lost ``nbytes`` at its end."""
        self.reserved -= nbytes
        self.small_reserved -= nbytes if page.small else 0

    def drop(self, page: Page) -> None:
        """Forget an unused page."""
        self.remove(page.first)
        del self.pages[page]
        self.reserved -= page.nbytes
        self.small_reserved -= page.nbytes if page.small else 0

    @property
    def free_bytes(self) -> int:
        """Bytes in bins and heaps."""
        return sum(span.size for span in self.binned_spans()) + self.small.nbytes + self.large.nbytes

    @property
    def free_at_least(self) -> int:
        """As :attr:`free_bytes`, but quickly."""
        return self.binned_at_least() + self.small.nbytes + self.large.nbytes

    @property
    def has_free(self) -> bool:
        """Whether anything lies in bins or heaps."""
        return bool(len(self.large) or len(self.small) or self.any_binned)

    def live_spans(self) -> list[Span]:
        """Spans of its pages that are handed out, by this arena or another one; those in other bins too."""
        binned = set(map(id, self.binned_spans()))
        spans = [span for page in list(self.pages) for span in page.spans()]
        return [span for span in spans if not span.free and id(span) not in binned]

    @property
    def usage(self) -> MemoryUsage:
        """Now. What arrays asked for is not kept: their padding counts as in use."""
        live = self.live_spans()
        return MemoryUsage(len(live), sum(span.size for span in live), 0, self.reserved)
