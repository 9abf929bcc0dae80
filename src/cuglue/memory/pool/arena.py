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
EXACT = 8 << 10  # up to here every multiple of the alignment is a class; above there are 32 per power of two
NEAR = 4  # classes above that of a request whose bins serve it too, so that it gets at most 1/6 too much
SHARE = 64  # a large page is at least this part of all memory, so that few pages hold many requests
LARGEST_SHARED = 64 << 20
# A free span both larger than this and so many times larger than a request waits for a larger one, if upstream gives.
UNDIVIDED = 16 << 20
SPLIT_RATIO = 16
# Parts of the memory: what has to lie in bins to be worth merging, and in unused pages to be worth replacing.
WORTH_FLUSHING = 128
WORTH_REPLACING = 16
_KEYS = 1 << 14  # sizes whose bin is known by the size itself


def class_size(nbytes: int) -> int:
    """Bytes that a request of ``nbytes`` gets: at most 1/32 more than asked for, beyond the alignment."""
    if nbytes <= EXACT:
        return padded(nbytes) or ALIGN
    step = 1 << ((nbytes - 1).bit_length() - 6)
    return padded((nbytes + step - 1) & -step)


class Arena:
    """Free memory that one stream may use at once. Its owner's lock is held for every call; bins need none.

    Attributes:
        bins: by size in alignments, the stacks of free spans for it: its own, which near sizes share, and those a
            little larger.
        pages, reserved: those taken for it, and their bytes; spans of them may have gone to other arenas.
        hits, misses, flushes: requests served from a bin, and behind it; how often bins were emptied.
    """

    def __init__(self) -> None:
        self.bins: dict[int, tuple[list[Span], ...]] = {}
        self._stacks: dict[int, list[Span]] = {}
        self.small = BestFit()
        self.large = BestFit()
        self.pages: dict[Page, None] = {}
        self.reserved = 0
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
        size = class_size(nbytes)
        sizes = [size]
        for _ in range(NEAR if size > EXACT else 0):
            sizes.append(class_size(sizes[-1] + 1))
        if len(self.bins) >= _KEYS:
            self.bins.clear()
        stacks = tuple(self._stacks.setdefault(size, []) for size in sizes)
        self.bins[(nbytes + ALIGN - 1) // ALIGN] = stacks
        return stacks

    def binned(self, small: bool) -> int:
        """Bytes in bins, of small classes or of large ones."""
        stacks = list(self._stacks.items())
        return sum(size * len(stack) for size, stack in stacks if (size <= SMALL) is small)

    def binned_spans(self) -> list[Span]:
        """The spans in bins."""
        return [span for stack in list(self._stacks.values()) for span in list(stack)]

    def flush(self, small: bool | None = None) -> int:
        """Empty the bins (of small classes, of large ones, or all) into the heaps; the number of spans moved."""
        moved = 0
        for size, stack in list(self._stacks.items()):
            if small is not None and (size <= SMALL) is not small:
                continue
            while stack:
                try:
                    span = stack.pop()
                except IndexError:
                    break  # another thread was quicker
                self.give(span)
                moved += 1
        self.flushes += moved > 0
        return moved

    # --- heaps --------------------------------------------------------------------------------------------------
    def find(self, nbytes: int) -> Span | None:
        """A span for ``nbytes`` bytes out of what is here, merging what lies in bins if that is worth it."""
        span = self.pop(nbytes) or self.take(nbytes)
        if span is None:
            small = class_size(nbytes) <= SMALL
            binned = self.binned(small)
            if binned and binned * WORTH_FLUSHING >= self.reserved:
                self.flush(small)
                span = self.take(nbytes)
        return span

    def take(self, nbytes: int, *, whole: bool = False) -> Span | None:
        """A span for ``nbytes`` bytes from the heaps, None if there is none.

        Args:
            nbytes: bytes.
            whole: cut up anything that fits; else small requests leave large memory alone, and large ones leave alone
                what is much larger.
        """
        size = class_size(nbytes)
        span = self._take_small(nbytes, size) if size <= SMALL else None
        if span is None and (whole or size > SMALL):
            span = self.large.take(size, 0 if whole else max(size * SPLIT_RATIO, UNDIVIDED))
            span = span and self.adopt(span, nbytes)
        return span

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
        first = self.adopt(span, nbytes)
        while span.size > size:
            rest = span.split(size)
            rest.free = False
            rest.stack = first.stack
            if span is not first:
                first.stack.append(span)
            span = rest
        if span is not first:
            first.stack.append(span)
        return first

    def adopt(self, span: Span, nbytes: int) -> Span:
        """Make ``span``, which is in no heap, one for requests of ``nbytes`` bytes of this arena."""
        span.home = self
        span.stack = self.bin_of(nbytes)
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
        self.pages[page] = None
        self.reserved += page.nbytes
        self.give(page.first)

    def last(self, *, small: bool) -> Page | None:
        """The page taken last, for small requests or for large ones."""
        return next((page for page in reversed(self.pages) if page.small is small), None)

    def unused(self) -> list[Page]:
        """The pages that are one free span of this arena; spans in bins are not free."""
        return [page for page in self.pages if page.unused and page.first.home is self]

    def replaceable(self, nbytes: int, *, record: bool) -> list[Page]:
        """The unused pages that should go before there is a page for ``nbytes`` bytes, which fit none of them.

        Args:
            nbytes: bytes asked for.
            record: the pool would hold more than it ever did: everything unused goes. Else only what is worth it.
        """
        size = class_size(nbytes)
        if size <= SMALL:
            return []
        unused = [page for page in self.unused() if not page.small and page.nbytes < size]
        worth = record or sum(page.nbytes for page in unused) * WORTH_REPLACING >= self.reserved
        return unused if worth else []

    def extended(self, page: Page, more: Span) -> None:
        """A page got longer by ``more``."""
        self.reserved += more.size
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

    def shortened(self, nbytes: int) -> None:
        """A page lost ``nbytes`` at its end."""
        self.reserved -= nbytes

    def drop(self, page: Page) -> None:
        """Forget an unused page."""
        self.remove(page.first)
        del self.pages[page]
        self.reserved -= page.nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes in bins and heaps."""
        return self.binned(True) + self.binned(False) + self.small.nbytes + self.large.nbytes

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
