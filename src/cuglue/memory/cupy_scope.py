"""``with resource.as_cupy_allocator():``, for a thread, or for one asyncio task on it.

Owns which allocator is chosen where. Must not know resources or blocks, nor import CuPy.

CuPy keeps its allocator per thread and so does not see which task runs. The choice is therefore a context variable, and
CuPy gets a function that asks it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from ..errors import WrongThreadError
from . import cupy_plug


class Allocates(Protocol):
    """What can be installed."""

    @property
    def malloc(self) -> Callable[[int], Any]:
        """CuPy's allocator function."""


R_co = TypeVar("R_co", bound=Allocates, covariant=True)

_chosen: ContextVar[Callable[[int], Any] | None] = ContextVar("cuglue_cupy_allocator", default=None)


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
        return (_chosen.get() or self.former)(nbytes)


class Scope(Generic[R_co]):
    """Installs a resource on the way in, and on the way out what was there before. Entering again nests."""

    def __init__(self, resource: R_co) -> None:
        self._resource = resource
        self._entered: list[tuple[_Dispatch, Token[Any], threading.Thread]] = []

    def __enter__(self) -> R_co:
        malloc = self._resource.malloc
        stack = _levels.stack
        if not stack or cupy_plug.get_allocator() is not stack[-1]:
            level = _Dispatch()
            level.scope.__enter__()
            stack.append(level)
        level = stack[-1]
        level.users += 1
        self._entered.append((level, _chosen.set(malloc), threading.current_thread()))
        return self._resource

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        level, token, thread = self._entered[-1]
        if thread is not threading.current_thread():
            raise WrongThreadError(
                f"CuPy allocator scope of {self._resource!r}",
                got=f"left on {threading.current_thread().name}",
                expected=f"{thread.name}, where it was entered",
                owner=thread,
                caller=threading.current_thread(),
            )
        self._entered.pop()
        try:
            _chosen.reset(token)
        except ValueError:
            pass  # left in another task or context, which never had the choice
        level.users -= 1
        if not level.users:
            _levels.stack.remove(level)
            level.scope.__exit__(kind, error, trace)
