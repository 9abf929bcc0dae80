"""Items by the bytes they concern, so that a question about a few bytes looks at few of them.

Owns where an item is kept. Must not know what the items are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .ranges import Range

T = TypeVar("T")
_PAGE = 4096


class Pages(Generic[T]):
    """A collection of items, each with a range: those within one page are kept by page, the others together."""

    __slots__ = ("_near", "_wide")

    def __init__(self) -> None:
        self._near: dict[int, list[T]] = {}
        self._wide: list[T] = []

    def add(self, range: Range, item: T) -> None:
        """Keep ``item``, which concerns these bytes."""
        first, last = _pages(range)
        (self._near.setdefault(first, []) if first == last else self._wide).append(item)

    def around(self, range: Range) -> Iterator[T]:
        """All items that concern a byte of ``range``, and others nearby."""
        yield from self._wide
        for page in self._within(range):
            yield from self._near[page]

    def keep(self, wanted: Callable[[T], bool], range: Range | None = None) -> None:
        """Drop what is not wanted, of everything or of what is :meth:`around` ``range``."""
        self._wide = [item for item in self._wide if wanted(item)]
        for page in list(self._near) if range is None else self._within(range):
            left = [item for item in self._near[page] if wanted(item)]
            if left:
                self._near[page] = left
            else:
                del self._near[page]

    def _within(self, range: Range) -> list[int]:
        """The pages of ``range`` that hold something."""
        first, last = _pages(range)
        if last - first < len(self._near):
            return [page for page in _numbers(first, last + 1) if page in self._near]
        return [page for page in self._near if first <= page <= last]

    def __iter__(self) -> Iterator[T]:
        yield from self._wide
        for items in self._near.values():
            yield from items

    def __len__(self) -> int:
        return len(self._wide) + sum(map(len, self._near.values()))


_numbers = range


def _pages(range: Range) -> tuple[int, int]:
    return range.start // _PAGE, max(range.start, range.end - 1) // _PAGE
