"""Taking back what was done before something failed. Owns nothing but the order; must not know what the steps are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

from ..core.retire import RetireQueue
from ..errors import CuglueError


class Undo:
    """``with Undo() as undo``: steps noted by :meth:`then` are taken back, newest first, if the block raises.

    What fails while taking back becomes a note on the first error, the other steps are taken back all the same, and
    ``retire`` tries it again later.
    """

    def __init__(self, retire: RetireQueue) -> None:
        self._retire = retire
        self._steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def then(self, function: Callable[..., None], *args: Any) -> None:
        """Call ``function(*args)`` if the block fails."""
        self._steps.append((function, args))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        for function, args in reversed(self._steps):
            try:
                function(*args)
            except CuglueError as second:
                error.add_note(f"taking back what was done before failed too: {second}")
                self._retire.push((), partial(function, *args))
