"""``with resource.as_cupy_allocator():``, for a thread, or for one asyncio task on it.

Owns which allocator is chosen where. Must not know resources or blocks, nor import CuPy.

CuPy keeps its allocator per thread and so does not see which task runs. The choice is therefore a context variable, and
CuPy gets a function that asks it.

A scope may be left on another thread than it was entered on: a suspended generator is closed, or collected, anywhere.
That thread cannot take anything out of CuPy or out of a context variable, so a choice that ended is marked and counts
for nothing from then on; the function that CuPy still has passes requests on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from ..errors import UsageError
from . import cupy_plug


class Allocates(Protocol):
    """What can be installed."""

    @property
    def malloc(self) -> Callable[[int], Any]:
        """CuPy's allocator function."""


R_co = TypeVar("R_co", bound=Allocates, covariant=True)


class _Choice:
    """What one scope chose; no ``malloc`` once that scope was left."""

    __slots__ = ("malloc",)

    def __init__(self, malloc: Callable[[int], Any]) -> None:
        self.malloc: Callable[[int], Any] | None = malloc


# Of all scopes that are open, innermost last. A scope takes out its own: they may be left in any order, as those of
# generators are.
_chosen: ContextVar[tuple[_Choice, ...]] = ContextVar("cuglue_cupy_allocator", default=())


class _Levels(threading.local):
    """What this thread has installed in CuPy, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Dispatch] = []


_levels = _Levels()


class _Dispatch:
    """The function that CuPy gets, and the choices that rely on it."""

    def __init__(self) -> None:
        self.former = cupy_plug.get_allocator()
        self.users: set[_Choice] = set()
        self.scope: AbstractContextManager[Any] = cupy_plug.using_allocator(self)

    def __call__(self, nbytes: int) -> Any:
        chosen = _chosen.get()
        malloc = chosen[-1].malloc if chosen else None
        return (malloc or self._other())(nbytes)

    def _other(self) -> Callable[[int], Any]:
        """What allocates where nothing was chosen, or what was chosen last was left on another thread."""
        chosen = _forget_left()
        if not self.users:
            _uninstall()
        return (chosen[-1].malloc if chosen else None) or self.former


def _forget_left() -> tuple[_Choice, ...]:
    """Drop the choices whose scopes were left; those that count, innermost last."""
    kept = tuple(choice for choice in _chosen.get() if choice.malloc is not None)
    _chosen.set(kept)
    return kept


def _uninstall() -> None:
    """Give CuPy back, on this thread, what it had before the functions that nobody relies on any more."""
    stack = _levels.stack
    while stack and not stack[-1].users and cupy_plug.get_allocator() is stack[-1]:
        stack.pop().scope.__exit__(None, None, None)


class Scope(Generic[R_co]):
    """Installs a resource on the way in, and on the way out what was there before. Entering again nests."""

    def __init__(self, resource: R_co) -> None:
        self._resource = resource
        self._entered: list[tuple[_Dispatch, _Choice]] = []

    def __enter__(self) -> R_co:
        choice = _Choice(self._resource.malloc)
        _uninstall()
        stack = _levels.stack
        if not stack or cupy_plug.get_allocator() is not stack[-1]:
            level = _Dispatch()
            level.scope.__enter__()
            stack.append(level)
        level = stack[-1]
        level.users.add(choice)
        _chosen.set((*_forget_left(), choice))
        self._entered.append((level, choice))
        return self._resource

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._entered:
            raise UsageError(
                f"CuPy allocator scope of {self._resource!r}",
                got="left once more",
                expected="one exit for each entry",
            )
        here = _chosen.get()
        # Several threads and tasks may have entered by the same object: of these, the one that is left here.
        entry = next((e for e in reversed(self._entered) if e[1] in here), self._entered[-1])
        self._entered.remove(entry)
        level, choice = entry
        choice.malloc = None
        level.users.discard(choice)
        if not sys.is_finalizing():  # a suspended generator ends then, and CuPy cannot be asked any more
            _uninstall()
