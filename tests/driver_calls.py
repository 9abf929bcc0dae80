"""Which calls a driver gets, and calls that fail on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from cuglue.driver.protocol import Driver

METHODS = [name for name in vars(Driver) if not name.startswith("_") and callable(getattr(Driver, name))]


class Calls:
    """A list of ``(method, arguments)`` of every call of ``driver`` while in ``with``."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.made: list[tuple[str, tuple[Any, ...]]] = []
        self._failing: dict[str, Callable[[], BaseException]] = {}

    def __enter__(self) -> Self:
        for name in METHODS:
            if hasattr(self.driver, name):
                self._wrap(name, getattr(self.driver, name))
        return self

    def _wrap(self, name: str, real: Callable[..., Any]) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.made.append((name, args))
            if name in self._failing:
                raise self._failing.pop(name)()
            return real(*args, **kwargs)

        setattr(self.driver, name, call)

    def __exit__(self, *exception: object) -> None:
        for name in METHODS:
            vars(self.driver).pop(name, None)

    def fail_next(self, name: str, error: Callable[[], BaseException]) -> None:
        """The next call of ``name`` raises."""
        self._failing[name] = error

    def count(self, name: str) -> int:
        """How often ``name`` was called."""
        return sum(made == name for made, _ in self.made)

    def of(self, *names: str) -> list[tuple[str, tuple[Any, ...]]]:
        """The calls of these methods, in order."""
        return [(made, args) for made, args in self.made if made in names]

    def clear(self) -> None:
        """Forget what was recorded."""
        self.made.clear()
