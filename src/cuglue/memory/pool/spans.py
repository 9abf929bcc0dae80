"""Pages and the spans that they are cut into.

Owns splitting, coalescing and the search for the best fit, as arithmetic on addresses. Must not know drivers, streams
or resources: a page is memory that somebody else got, and an address of 0 is memory that is not there yet.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

ALIGN = 512  # bytes: CuPy and the driver align to it, and a span never ends inside one


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return (nbytes + ALIGN - 1) & -ALIGN


class Page:
    """One piece of memory from upstream.

    Attributes:
        ptr: address; 0 while there is no memory behind it (a dry run).
        nbytes: size.
        first: its first span; the spans cover it from end to end.
        source: what upstream gave; whoever made the page knows what it is.
        idle_since: when it was last seen to be wholly free, by the clock of whoever asks.
        small: whether small requests share it.
        gone: whether it was given back.
    """

    __slots__ = ("first", "gone", "idle_since", "nbytes", "ptr", "small", "source")

    def __init__(self, ptr: int, nbytes: int, source: Any = None) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self.source = source
        self.idle_since = 0.0
        self.small = False
        self.gone = False
        self.first = Span(self, 0, nbytes)

    def place(self, ptr: int, source: Any) -> None:
        """There is memory now, at ``ptr``."""
        self.ptr = ptr
        self.source = source
        for span in self.spans():
            span.ptr = ptr + span.offset

    def spans(self) -> Iterator[Span]:
        """The spans in order of address."""
        span: Span | None = self.first
        while span is not None:
            yield span
            span = span.after

    @property
    def unused(self) -> bool:
        """Whether the page is one free span."""
        return self.first.free and self.first.after is None

    @property
    def end(self) -> Span:
        """The last span."""
        last = self.first
        while last.after is not None:
            last = last.after
        return last

    def extend(self, nbytes: int) -> Span:
        """The page is ``nbytes`` longer; the new span at its end, free and not merged."""
        last = self.end
        span = Span(self, self.nbytes, nbytes)
        last.after, span.before = span, last
        self.nbytes += nbytes
        return span

    def shorten(self) -> None:
        """Cut off the last span, which is in no heap and not the only one."""
        last = self.end
        if last.before is None:
            raise ValueError("a page keeps its first span")
        last.before.after = None
        self.nbytes -= last.size


class Span:
    """Consecutive bytes of a page, all of them free or all of them handed out as one.

    Attributes:
        ptr: address.
        offset, size: bytes, in the page.
        requested: bytes asked for; the rest of ``size`` is padding.
        before, after: neighbours in the page.
        free: whether it may be handed out or merged. A span in a bin is neither free nor in use. One that is free and
            in no heap is on its way; after an interrupt it is put back (:meth:`.arena.Arena.mend`).
        home: who it goes back to.
        stack: the bin it goes back to.
        life: the block made of it, where anybody asked for one.
    """

    __slots__ = (
        "after",
        "before",
        "free",
        "home",
        "life",
        "offset",
        "page",
        "ptr",
        "requested",
        "size",
        "stack",
    )

    def __init__(self, page: Page, offset: int, size: int) -> None:
        self.page = page
        self.offset = offset
        self.ptr = page.ptr + offset
        self.size = size
        self.requested = 0
        self.before: Span | None = None
        self.after: Span | None = None
        self.free = True
        self.home: Any = None
        self.stack: list[Span] = []
        self.life: Any = None

    def split(self, size: int) -> Span:
        """Keep the first ``size`` bytes; the rest as a new free span behind."""
        rest = Span(self.page, self.offset + size, self.size - size)
        rest.home = self.home
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.size = size
        return rest

    def absorb(self) -> None:
        """Take over the neighbour behind, which is no longer a span."""
        gone = self.after
        if gone is None:
            raise ValueError("the last span of a page has nothing behind it")
        self.size += gone.size
        self.after = gone.after
        if gone.after is not None:
            gone.after.before = self

    def __repr__(self) -> str:
        return f"Span({self.ptr:#x}, {self.size} bytes, {'free' if self.free else 'taken'})"


class _Taken(threading.local):
    """The span that a thread was given last, until whoever asked for it has it."""

    span: Span | None = None


taken = _Taken()


class BestFit:
    """Free spans of one owner by size, smallest and lowest first; neighbours are merged."""

    __slots__ = ("_keys", "coalesced", "splits")

    def __init__(self) -> None:
        self._keys: list[tuple[int, int, Span]] = []  # (size, address, span), sorted; addresses differ
        self.splits = 0
        self.coalesced = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Span]:
        return iter([span for _, _, span in self._keys])

    @property
    def nbytes(self) -> int:
        """Bytes of all spans."""
        return sum(size for size, _, _ in self._keys)

    @property
    def largest(self) -> int:
        """Bytes of the largest span."""
        return self._keys[-1][0] if self._keys else 0

    def take(self, size: int, most: int = 0, spare: int = 0) -> Span | None:
        """The best span for ``size`` bytes, cut to that size; None if none fits. Its new owner marks it as taken.

        Args:
            size: bytes, a multiple of the alignment.
            most: leave spans larger than this alone; 0 takes any.
            spare: cut off nothing that is no larger than this.
        """
        keys = self._keys
        at = bisect_left(keys, (size,))
        if at == len(keys):
            return None
        found, _, span = keys[at]
        if most and found > most:
            return None
        del keys[at]
        if found - size > spare:
            rest = span.split(size)
            insort(keys, (rest.size, rest.ptr, rest))
            self.splits += 1
        return span

    def give(self, span: Span) -> Span:
        """Take a span back and merge it with free neighbours of the same owner; the merged span."""
        span.free = True
        after = span.after
        if after is not None and after.free and after.home is span.home:
            self.remove(after)
            span.absorb()
            self.coalesced += 1
        before = span.before
        if before is not None and before.free and before.home is span.home:
            self.remove(before)
            before.absorb()
            span = before
            self.coalesced += 1
        insort(self._keys, (span.size, span.ptr, span))
        return span

    def give_all(self, spans: list[Span]) -> None:
        """:meth:`give` for many: each neighbourhood is merged once."""
        for span in spans:
            span.free = True
        keys = []
        for span in [*spans, *self]:
            before, home = span.before, span.home
            if before is not None and before.free and before.home is home:
                continue  # the one in front takes it over, or has
            after = span.after
            while after is not None and after.free and after.home is home:
                span.absorb()
                self.coalesced += 1
                after = span.after
            keys.append((span.size, span.ptr, span))
        keys.sort()
        self._keys = keys

    def clear(self) -> None:
        """Forget all spans."""
        self._keys = []

    def remove(self, span: Span) -> None:
        """Take a free span out, whole; it stays marked as free."""
        del self._keys[bisect_left(self._keys, (span.size, span.ptr))]
