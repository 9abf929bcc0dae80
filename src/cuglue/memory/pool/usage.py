"""What pools say of themselves: figures of now, and of the worst moment so far.

Owns the values. Must not know pools.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layouts import PoolLayout


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory at one moment; all sizes in bytes.

    Attributes:
        number_allocs: pieces handed out and not given back.
        bytes_in_use: what was asked for in them.
        bytes_padding: what they are larger than that.
        bytes_reserved: what was taken from upstream for them and for the next ones.
    """

    number_allocs: int = 0
    bytes_in_use: int = 0
    bytes_padding: int = 0
    bytes_reserved: int = 0

    def combine(self, other: MemoryUsage) -> MemoryUsage:
        """The sum of both."""
        return MemoryUsage(
            self.number_allocs + other.number_allocs,
            self.bytes_in_use + other.bytes_in_use,
            self.bytes_padding + other.bytes_padding,
            self.bytes_reserved + other.bytes_reserved,
        )


def total(usages: Iterable[MemoryUsage]) -> MemoryUsage:
    """The sum of all."""
    sum_ = MemoryUsage()
    for usage in usages:
        sum_ = sum_.combine(usage)
    return sum_


@dataclass(frozen=True, slots=True)
class PoolReport:
    """One pool of a layout.

    Attributes:
        kind: the pool as configured.
        usage: now.
        pages: pieces taken from upstream.
        pages_peak: the most there ever were at once; cleaning up does not lower it.
        pages_unmapped: pages of a dry run that nobody has looked at yet, without memory.
        largest_alloc: the most that was ever asked for at once, in bytes.
    """

    kind: PoolLayout
    usage: MemoryUsage
    pages: int
    pages_peak: int
    pages_unmapped: int
    largest_alloc: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The pools of one stream.

    Attributes:
        dynamic: the pools of the layout, in the order in which a request tries them.
        persistent: the pool behind ``persistent()`` windows.
    """

    dynamic: tuple[PoolReport, ...]
    persistent: PoolReport

    @property
    def usage(self) -> MemoryUsage:
        """Of all pools together."""
        return total(pool.usage for pool in (*self.dynamic, self.persistent))
