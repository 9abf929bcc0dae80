"""What is held back for a while: oldest first, until there is too much of it or it is too old.

Owns the line and its bytes. Must not know what is held, nor what happens to it afterwards.
"""

from __future__ import annotations

import threading
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
        self._lock = threading.RLock()
        self.nbytes = 0  # summed anew each time, it would cost more with each thing that is held

    def add(self, thing: T, nbytes: int) -> None:
        """Hold ``thing`` from now on."""
        with self._lock:
            self._line.append(Held(time.monotonic(), nbytes, thing))
            self.nbytes += nbytes

    def due(self) -> bool:
        """Whether the oldest has to leave."""
        with self._lock:
            if not self._line:
                return False
            return self.nbytes > self._most_bytes or time.monotonic() - self._line[0].since > self._most_age

    def take(self) -> Held[T] | None:
        """The oldest, which is held no longer; None if there is none."""
        with self._lock:
            if not self._line:
                return None
            held = self._line.popleft()
            self.nbytes -= held.nbytes
            return held

    def put_back(self, held: Held[T]) -> None:
        """It could not leave: it is the oldest again."""
        with self._lock:
            self._line.appendleft(held)
            self.nbytes += held.nbytes

    def end(self) -> None:
        """All that is held, and will be, is due."""
        self._most_bytes = -1

    def __iter__(self) -> Iterator[T]:
        return iter([held.thing for held in list(self._line)])

    def __len__(self) -> int:
        return len(self._line)
