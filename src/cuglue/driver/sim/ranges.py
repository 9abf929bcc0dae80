"""Byte ranges of one allocation: contiguous, or rows at a pitch.

Owns the question "do these two touch a common byte". Must not know what lies in the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Range(NamedTuple):
    """``rows`` runs of ``width`` bytes, ``pitch`` apart, the first one at ``start`` (bytes from the allocation)."""

    start: int
    width: int
    rows: int = 1
    pitch: int = 0

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + (self.rows - 1) * self.pitch + self.width if self.rows else self.start

    @property
    def nbytes(self) -> int:
        """Extent from the first to the last byte."""
        return self.end - self.start

    def shifted(self, offset: int) -> Range:
        """The same range ``offset`` bytes later."""
        return self._replace(start=self.start + offset)

    def within(self, low: int, high: int) -> list[Range]:
        """Its bytes from ``low`` up to ``high``: whole rows as one range, those that are cut one by one."""
        if self.rows == 1:
            start, end = max(self.start, low), min(self.end, high)
            return [Range(start, end - start)] if start < end else []
        first = max(0, -((self.start - low) // self.pitch))  # that begins at ``low`` or later
        last = min(
            self.rows, (high - self.width - self.start) // self.pitch + 1
        )  # past those that end by ``high``
        cut = [
            Range(self.start + i * self.pitch, self.width) for i in {first - 1, last} if 0 <= i < self.rows
        ]
        parts = [part for row in cut for part in row.within(low, high)]
        if first < last:
            parts.append(pitched(self.start + first * self.pitch, self.width, last - first, self.pitch))
        return parts

    def overlaps(self, other: Range) -> bool:
        """True if some byte belongs to both."""
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.rows == 1 and other.rows == 1:
            return True
        if self.rows > 1 and other.rows > 1 and self.pitch != other.pitch:
            few, many = (self, other) if self.rows <= other.rows else (other, self)
            return any(many.overlaps(Range(few.start + i * few.pitch, few.width)) for i in range(few.rows))
        # Row i of self meets row j of other where -other.width < distance - (i - j) * pitch < self.width.
        pitch = self.pitch if self.rows > 1 else other.pitch
        distance = other.start - self.start
        low = (distance - self.width) // pitch + 1
        high = -((-distance - other.width) // pitch) - 1
        return max(low, 1 - other.rows) <= min(high, self.rows - 1)

    def covers(self, other: Range) -> bool:
        """True only if every byte of ``other`` belongs to this range (may say False where it holds)."""
        return self == other or (self.rows == 1 and self.start <= other.start and other.end <= self.end)


def linear(start: int, nbytes: int) -> Range:
    """``nbytes`` from ``start``."""
    return Range(start, nbytes)


def pitched(start: int, width: int, rows: int, pitch: int) -> Range:
    """Rows at a pitch; one run where they touch each other."""
    return Range(start, width * rows) if rows == 1 or pitch == width else Range(start, width, rows, pitch)


def strided(start: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Range:
    """The bytes of an array whose element 0 lies at ``start``; exact for one outer stride, else their extent."""
    if 0 in shape:
        return Range(start, 0)
    low = start + sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    extent = itemsize + sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True))
    run = itemsize
    outer: list[tuple[int, int]] = []
    for n, s in sorted(
        ((n, abs(s)) for n, s in zip(shape, strides, strict=True) if n > 1), key=lambda p: p[1]
    ):
        if not outer and s <= run:
            run = max(run, (n - 1) * s + run)
        else:
            outer.append((n, s))
    if len(outer) == 1:
        return pitched(low, run, outer[0][0], outer[0][1])
    return Range(low, extent)
