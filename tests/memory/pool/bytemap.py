"""An oracle for allocators: which bytes are whose, kept byte by byte in units of the alignment."""

from __future__ import annotations

from typing import Any

from cuglue.errors import OutOfMemory
from cuglue.memory.pool.spans import ALIGN, Page


class ByteMap:
    """Pages at addresses far apart, and who holds each of their units. Shares no code with what it judges."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.pages: dict[int, int] = {}
        self.held: dict[int, int] = {}  # unit -> number of the holder
        self.grown: list[int] = []
        self.dropped: list[int] = []
        self._next = 1 << 40

    # --- the source of pages ---
    def grow(self, nbytes: int) -> Page:
        if self.limit is not None and sum(self.pages.values()) + nbytes > self.limit:
            raise OutOfMemory("byte map", requested=nbytes)
        ptr = self._next
        self._next += nbytes + (1 << 20)
        self.pages[ptr] = nbytes
        self.grown.append(nbytes)
        return Page(ptr, nbytes, source=ptr)

    def drop(self, page: Page) -> None:
        inside = [unit for unit in self.held if page.ptr <= unit * ALIGN < page.ptr + page.nbytes]
        assert not inside, f"page at {page.ptr:#x} given back with {len(inside)} units in use"
        assert self.pages.pop(page.ptr) == page.nbytes
        self.dropped.append(page.nbytes)

    # --- holders ---
    def hold(self, number: int, ptr: int, nbytes: int) -> None:
        assert ptr % ALIGN == 0
        assert any(at <= ptr and ptr + nbytes <= at + size for at, size in self.pages.items()), (
            "outside of all pages"
        )
        for unit in range(ptr // ALIGN, -(-(ptr + nbytes) // ALIGN)):
            assert unit not in self.held, f"bytes at {unit * ALIGN:#x} belong to {self.held[unit]}"
            self.held[unit] = number

    def let_go(self, number: int) -> None:
        self.held = {unit: holder for unit, holder in self.held.items() if holder != number}

    @property
    def reserved(self) -> int:
        return sum(self.pages.values())


def covered(page: Page) -> bool:
    """The spans of a page lie end to end, each linked both ways, and no two free neighbours of one owner stay apart."""
    at: int = 0
    before: Any = None
    for span in page.spans():
        if span.offset != at or span.ptr != page.ptr + at or span.before is not before or span.size <= 0:
            return False
        if before is not None and before.free and span.free and before.home is span.home:
            return False
        at += span.size
        before = span
    return at == page.nbytes
