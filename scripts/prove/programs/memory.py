"""What bytes should be, in plain NumPy: the oracle of random programs.

Owns the bytes of one piece of memory, which of them are known, and which were never written because the work that
should have written them failed. Shares no code with the library.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


class Known(NamedTuple):
    """Bytes that a step must find; where ``known`` is False it may find anything."""

    data: Bytes
    known: Flags

    def agrees(self, found: Any) -> bool:
        """Whether ``found`` holds them."""
        got = np.asarray(found).reshape(-1).view(np.uint8)
        return got.size == self.data.size and bool(((got == self.data) | ~self.known).all())

    def difference(self, found: Any) -> str:
        """What is wrong with ``found``, in words."""
        got = np.asarray(found).reshape(-1).view(np.uint8)
        if got.size != self.data.size:
            return f"{got.size} bytes, not {self.data.size}"
        wrong = np.flatnonzero((got != self.data) & self.known)
        first = int(wrong[0])
        return (
            f"{wrong.size} of {got.size} bytes wrong, the first at {first}: "
            f"{got[first : first + 8].tolist()} instead of {self.data[first : first + 8].tolist()}"
        )


class Memory:
    """One allocation, or the bytes of one graphics object.

    Attributes:
        data, known: what it holds, and where that is known.
        unwritten: where a read is refused.
        writer, readers: streams of the last write, and of the reads since.
        going_on: streams of uses told by ``cuglue.use``, which have no end; True where the use writes.
        away: of an array, work on its home stream is not ordered after a use elsewhere.
    """

    __slots__ = ("away", "data", "going_on", "known", "readers", "unwritten", "writer")

    def __init__(self, nbytes: int, data: Bytes | None = None) -> None:
        self.data = np.zeros(nbytes, np.uint8) if data is None else data.copy()
        self.known = np.full(nbytes, data is not None)
        self.unwritten = np.zeros(nbytes, np.bool_)
        self.writer: str | None = None
        self.readers: set[str] = set()
        self.going_on: dict[str, bool] = {}
        self.away = False

    def take(self, other: Memory) -> None:
        """Hold what ``other`` holds."""
        self.data[...] = other.data
        self.known[...] = other.known

    def note(self, stream: str, *, write: bool, ends: bool = True) -> None:
        """Work on ``stream`` uses it; until the next write, if the use has no end."""
        if write:
            self.writer = stream
            self.readers.clear()
            self.going_on.clear()
        else:
            self.readers.add(stream)
        if not ends:
            self.going_on[stream] = write or self.going_on.get(stream, False)

    def users(self) -> set[str]:
        """Streams that a later write has to come after."""
        return self.readers | ({self.writer} if self.writer is not None else set())


class Piece(NamedTuple):
    """A range of a memory: what a name in a program stands for."""

    memory: Memory
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start

    def holds(self) -> Known:
        """A copy of what is there."""
        return Known(
            self.memory.data[self.start : self.end].copy(), self.memory.known[self.start : self.end].copy()
        )

    @property
    def unwritten(self) -> bool:
        """Whether a read is refused."""
        return bool(self.memory.unwritten[self.start : self.end].any())

    def spoil(self) -> None:
        """The work that should have written it failed."""
        self.memory.unwritten[self.start : self.end] = True

    def written(self) -> None:
        """Its bytes were written."""
        self.memory.unwritten[self.start : self.end] = False

    def write(self, data: Bytes) -> None:
        """Replace the bytes."""
        self.memory.data[self.start : self.end] = data
        self.memory.known[self.start : self.end] = True
        self.written()

    def fill(self, value: int) -> None:
        """Replace the bytes by one value, past the library: what counts as unwritten goes on doing so."""
        self.memory.data[self.start : self.end] = value
        self.memory.known[self.start : self.end] = True

    def copy_from(self, source: Piece) -> None:
        """Copy as many bytes as both have."""
        size = min(self.size, source.size)
        found = source.holds()
        self.memory.data[self.start : self.start + size] = found.data[:size]
        self.memory.known[self.start : self.start + size] = found.known[:size]

    def scale_from(self, source: Piece, factor: int, offset: int) -> None:
        """``self[i] = source[i % len(source)] * factor + offset``: what the kernel "scale" does."""
        found = source.holds()
        index = np.arange(self.size) % source.size
        self.memory.data[self.start : self.end] = found.data[index] * np.uint8(factor) + np.uint8(offset)
        self.memory.known[self.start : self.end] = found.known[index]
        self.written()

    def add(self, value: int) -> None:
        """``self[i] += value``: what the kernel "add" does."""
        self.memory.data[self.start : self.end] += np.uint8(value)


def pattern(number: int, nbytes: int) -> Bytes:
    """Bytes that tell one write from another."""
    return ((np.arange(nbytes) * 7 + number * 13 + number // 19) % 256).astype(np.uint8)
