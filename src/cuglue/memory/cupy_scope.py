"""``with resource.as_cupy_allocator():``, for a thread, or for one asyncio task on it.

Owns which allocator is chosen where. Must not know resources or blocks, nor import CuPy.

CuPy keeps its allocator per thread and so does not see which task runs. The choice is therefore a context variable, and
CuPy gets a function that asks it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from ..errors import UsageError, WrongThreadError
from . import cupy_plug


class Allocates(Protocol):
    """What can be installed."""

    @property
    def malloc(self) -> Callable[[int], Any]:
        """CuPy's allocator function."""


R_co = TypeVar("R_co", bound=Allocates, covariant=True)


class _Choice:
    """What one scope chose."""

    __slots__ = ("malloc",)

    def __init__(self, malloc: Callable[[int], Any]) -> None:
        self.malloc = malloc


# Of all scopes that are open, innermost last. A scope takes out its own: they may be left in any order, as those of
# generators are.
_chosen: ContextVar[tuple[_Choice, ...]] = ContextVar("cuglue_cupy_allocator", default=())


class _Levels(threading.local):
    """What this thread has installed in CuPy, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Dispatch] = []


_levels = _Levels()


class _Dispatch:
    """The function that CuPy gets, and how many scopes rely on it."""

    def __init__(self) -> None:
        self.former = cupy_plug.get_allocator()
        self.users = 0
        self.scope: AbstractContextManager[Any] = cupy_plug.using_allocator(self)

    def __call__(self, nbytes: int) -> Any:
        chosen = _chosen.get()
        return (chosen[-1].malloc if chosen else self.former)(nbytes)


class Scope(Generic[R_co]):
    """Installs a resource on the way in, and on the way out what was there before. Entering again nests."""

    def __init__(self, resource: R_co) -> None:
        self._resource = resource
        self._entered: list[tuple[_Dispatch, _Choice, threading.Thread]] = []

    def __enter__(self) -> R_co:
        choice = _Choice(self._resource.malloc)
        stack = _levels.stack
        if not stack or cupy_plug.get_allocator() is not stack[-1]:
            level = _Dispatch()
            level.scope.__enter__()
            stack.append(level)
        level = stack[-1]
        level.users += 1
        _chosen.set((*_chosen.get(), choice))
        self._entered.append((level, choice, threading.current_thread()))
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
        level, choice, thread = self._entered[-1]
        if thread is not threading.current_thread():
            raise WrongThreadError(
                f"CuPy allocator scope of {self._resource!r}",
                got=f"left on {threading.current_thread().name}",
                expected=f"{thread.name}, where it was entered",
                owner=thread,
                caller=threading.current_thread(),
            )
        self._entered.pop()
        _chosen.set(
            tuple(c for c in _chosen.get() if c is not choice)
        )  # in another task or context it is not there
        level.users -= 1
        if not level.users:
            _levels.stack.remove(level)
            level.scope.__exit__(kind, error, trace)
