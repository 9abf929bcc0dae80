"""The default layout: the free memory of one stream, in bins and behind them in order of address.

Owns size classes, bins, the two heaps (small and large) and when bins are emptied into them. Must not know drivers,
streams or resources; pages are given to it.

A request first looks into the bin of its size class (that is all that :mod:`.hot` does). Behind the bins a span is cut
from the best fit, small ones in runs and from pages of their own, so that they never carve up large memory. Spans go
back to their bin whole; they are merged with their neighbours before more is taken from upstream.
"""

from __future__ import annotations

from .spans import ALIGN, BestFit, Page, Span, padded
from .usage import MemoryUsage

SMALL = 128 << 10  # bytes; up to here requests share small pages
SMALL_PAGE = 2 << 20
RUN = 32 << 10  # bytes of one size class that are cut at once
LARGE = 8 << 20  # from here on a page is kept for requests of nearly its size
EXACT = 4 << 10  # up to here every multiple of the alignment is a class
# Above, so many classes lie between a power of two and the next, and the bins of so many larger ones serve it too.
CLASSES_SMALL, CLASSES_MIDDLE, CLASSES_LARGE = 8, 16, 64
NEAR_SMALL, NEAR_MIDDLE, NEAR_LARGE = 2, 8, 2
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
_KEYS = 1 << 14  # sizes whose bin is known by the size itself


def class_size(nbytes: int) -> int:
    """Bytes that a request of ``nbytes`` gets: at most an eighth (small), 1/16 (middle) or 1/64 (large) more."""
    if nbytes <= EXACT:
        return padded(nbytes) or ALIGN
    step = _step(nbytes)
    return padded((nbytes + step - 1) & -step)


def class_below(size: int) -> int:
    """The largest class whose requests fit into a span of ``size`` bytes."""
    return size if size <= EXACT else size & -max(_step(size), ALIGN)


def _step(nbytes: int) -> int:
    """Bytes between the classes around ``nbytes``."""
    power: int = 1 << ((nbytes - 1).bit_length() - 1)
    return power // (
        CLASSES_SMALL if nbytes <= SMALL else CLASSES_MIDDLE if nbytes <= LARGE else CLASSES_LARGE
    )


def _near(size: int) -> int:
    """How many classes above ``size`` serve its requests too."""
    if size <= EXACT:
        return 0
    return NEAR_SMALL if size <= SMALL else NEAR_MIDDLE if size < LARGE else NEAR_LARGE


class Arena:
    """Free memory that one stream may use at once. Its owner's lock is held for every call; bins need none.

    Attributes:
        bins: by size in alignments, the stacks of free spans for it: its own, which near sizes share, and those a
            little larger.
        pages, reserved, small_reserved: those taken for it, their bytes, and those of small pages; spans of them may
            have gone to other arenas.
        hits, misses, flushes: requests served from a bin, and behind it; how often bins were emptied.
    """

    def __init__(self) -> None:
        self.bins: dict[int, tuple[list[Span], ...]] = {}
        self._stacks: dict[int, list[Span]] = {}
        self.small = BestFit()
        self.large = BestFit()
        self.pages: dict[Page, None] = {}
        self.reserved = 0
        self.small_reserved = 0
        self.hits = 0
        self.misses = 0
        self.flushes = 0

    # --- bins ---------------------------------------------------------------------------------------------------
    def pop(self, nbytes: int) -> Span | None:
        """A span from the bin for ``nbytes`` bytes, or from that of a size little larger. Needs no lock."""
        for stack in self.bins.get((nbytes + ALIGN - 1) // ALIGN) or self._open_bins(nbytes):
            if stack:
                try:
                    return stack.pop()
                except IndexError:
                    pass  # another thread was quicker
        return None

    def bin_of(self, nbytes: int) -> list[Span]:
        """The stack that spans for ``nbytes`` bytes go back to."""
        return (self.bins.get((nbytes + ALIGN - 1) // ALIGN) or self._open_bins(nbytes))[0]

    def _open_bins(self, nbytes: int) -> tuple[list[Span], ...]:
        """The stacks for ``nbytes`` bytes, known to :attr:`bins` from now on."""
        sizes = [class_size(nbytes)]
        for _ in range(_near(sizes[0])):
            sizes.append(class_size(sizes[-1] + 1))
        if len(self.bins) >= _KEYS:
            self.bins.clear()
        stacks = tuple(self._stacks.setdefault(size, []) for size in sizes)
        self.bins[(nbytes + ALIGN - 1) // ALIGN] = stacks
        return stacks

    def binned_spans(self) -> list[Span]:
        """The spans in bins."""
        return [span for stack in list(self._stacks.values()) for span in list(stack)]

    def flush(self, small: bool | None = None) -> bool:
        """Empty the bins (of small classes, of large ones, or all) into the heaps; whether anything lay there."""
        found: list[Span] = []
        for size, stack in list(self._stacks.items()):
            if stack and (small is None or (size <= SMALL) is small):
                try:
                    while stack:
                        found.append(stack.pop())
                except IndexError:
                    pass  # another thread was quicker
        if not found:
            return False
        self.flushes += 1
        self.small.give_all([span for span in found if span.page.small])
        self.large.give_all([span for span in found if not span.page.small])
        return True

    # --- heaps --------------------------------------------------------------------------------------------------
    def find(self, nbytes: int) -> Span | None:
        """A span for ``nbytes`` bytes out of what is here, merging what lies in bins if that is worth it."""
        if (nbytes + ALIGN - 1) // ALIGN not in self.bins:
            span = self.pop(nbytes)
            if span is not None:
                return span
        span = self.take(nbytes)
        if span is None:
            small = class_size(nbytes) <= SMALL
            if (not small or self._worth_merging()) and self.flush(small):
                span = self.take(nbytes)
        return span

    def _worth_merging(self) -> bool:
        """Whether another small page costs more than merging and cutting the ones there are."""
        if self.small_reserved * SMALL_PART < self.reserved:
            return False
        stacks = list(self._stacks.items())
        binned = sum(size * len(stack) for size, stack in stacks if size <= SMALL)
        return binned * WORTH_MERGING >= self.small_reserved

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
        first = self.adopt(span)
        first.stack = stack = self.bin_of(nbytes)
        while span.size > size:
            rest = span.split(size)
            rest.free = False
            rest.stack = stack
            if span is not first:
                stack.append(span)
            span = rest
        if span is not first:
            stack.append(span)
        return first

    def adopt(self, span: Span) -> Span:
        """Make ``span``, which is in no heap, one of this arena; it goes back to the bin that it fits best."""
        span.home = self
        stack = self._stacks.get(span.size)  # a span that was cut has the size of its class
        span.stack = self._stacks.setdefault(class_below(span.size), []) if stack is None else stack
        span.page.idle_since = 0.0
        return span

    def give(self, span: Span) -> Span:
        """Take a span back past its bin, or one of another arena over; the free span that it is part of then."""
        span.home = self
        return (self.small if span.page.small else self.large).give(span)

    def remove(self, span: Span) -> None:
        """Let a free span go, whole."""
        (self.small if span.page.small else self.large).remove(span)
        span.free = False

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

    def replaceable(self, nbytes: int, *, all_sizes: bool = True) -> list[Page]:
        """The unused pages that should go before the pool holds more than ever for a request of ``nbytes``.

        It fits into none of these, but for a large one: that takes no page much larger. Without ``all_sizes`` only
        those that it does not fit into.
        """
        size = class_size(nbytes)
        if size <= SMALL:
            return []
        wanted = all_sizes and size >= LARGE
        return [page for page in self.unused() if not page.small and (wanted or page.nbytes < size)]

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
            return end
        piece = end.split(end.size - size)
        piece.free = False
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
    def has_free(self) -> bool:
        """Whether anything lies in bins or heaps."""
        return bool(len(self.large) or len(self.small) or any(list(self._stacks.values())))

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
