"""Counting what a driver was asked, over the library's own trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cuglue.testing import trace


class Calls:
    """The driver calls made since the last :meth:`clear`."""

    def __init__(self, made: list[Any]) -> None:
        self.made = made

    def count(self, name: str) -> int:
        """How often ``name`` was called."""
        return sum(call.method == name for call in self.made)

    def of(self, *names: str) -> list[Any]:
        """The calls of these methods, in order: pairs of method and arguments."""
        return [call for call in self.made if call.method in names]

    def clear(self) -> None:
        """Forget what was recorded."""
        self.made.clear()


@contextmanager
def recorded(driver: Any) -> Iterator[Calls]:
    """The calls of ``driver`` in this block."""
    with trace(driver=driver) as made:
        yield Calls(made)
