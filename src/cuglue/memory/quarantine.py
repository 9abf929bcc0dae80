"""What is held back for a while: oldest first, until there is too much of it or it is too old.

Owns the line and its bytes. Must not know what is held, nor what happens to it afterwards.

There is no lock: lines that change the two together have no call between them, so that neither another thread nor an
interrupt comes between (see :mod:`.budget`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Held(NamedTuple, Generic[T]):
    """One thing in the line."""

    since: float
    nbytes: int
    thing: T


class Quarantine(Generic[T]):
    """A line of things with their bytes.

    Args:
        most_bytes: more than that is due.
        most_age: seconds after which the oldest is due.
    """

    def __init__(self, most_bytes: int, most_age: float) -> None:
        self._most_bytes = most_bytes
        self._most_age = most_age
        self._line: deque[Held[T]] = deque()
        self.nbytes = 0  # summed anew each time, it would cost more with each thing that is held

    def add(self, thing: T, nbytes: int) -> None:
        """Hold ``thing`` from now on."""
        held = Held(time.monotonic(), nbytes, thing)
        self._line += (held,)
        self.nbytes += nbytes

    def take(self, *, due: bool, at: int = 0) -> Held[T] | None:
        """The oldest, which is held no longer; None if there is none.

        Args:
            due: only if it has to leave.
            at: so many at the front cannot leave now, and are passed by.
        """
        now, line = time.monotonic(), self._line
        try:
            held = line[at]
        except IndexError:
            return None
        if due and self.nbytes <= self._most_bytes and now - held.since <= self._most_age:
            return None
        del line[at]
        self.nbytes -= held.nbytes
        return held

    def put_back(self, held: Held[T], at: int = 0) -> None:
        """It could not leave: it is in its place again."""
        self.nbytes += held.nbytes
        self._line.insert(at, held)

    def end(self) -> None:
        """All that is held, and will be, is due."""
        self._most_bytes = -1

    def __iter__(self) -> Iterator[T]:
        return iter([held.thing for held in list(self._line)])

    def __len__(self) -> int:
        return len(self._line)
