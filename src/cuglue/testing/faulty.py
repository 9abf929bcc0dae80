"""A driver in front of a driver: numbers its calls and makes chosen ones fail.

Owns which calls can fail and the errors that they fail with. Must not know why one is chosen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ..driver.protocol import Driver
from ..errors import CuglueError, DriverError, LaunchError, OutOfMemory

#: Answers from what the process knows already: no device is asked, so none can refuse.
NEVER_FAIL = frozenset(["capabilities", "device_count", "device_name", "stream_current", "host_view"])
CAN_FAIL = frozenset(n for n, f in vars(Driver).items() if callable(f) and n[0] != "_") - NEVER_FAIL
_ALLOCATES = frozenset(["malloc", "malloc_async", "malloc_managed", "host_alloc"])

Chooser = Callable[[int, str], int | None]


class FaultyDriver:
    """Passes every call on to ``driver``; while armed it numbers those that can fail, and fails the chosen ones.

    A failing call does nothing: that is what :class:`~cuglue.driver.protocol.Driver` promises of a refused call.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._choose: Chooser | None = None
        self._calls: list[str] = []
        self._lock = threading.Lock()

    def arm(self, choose: Chooser) -> None:
        """Number calls from 1; ``choose(number, name)`` gives the kind of failure, or None to let it pass."""
        self._calls = []
        self._choose = choose

    def disarm(self) -> tuple[str, ...]:
        """Let everything pass again; the calls that were numbered."""
        self._choose = None
        return tuple(self._calls)

    @staticmethod
    def kinds_of_failure(call: str) -> int:
        """In how many ways a call can fail: an allocation also by finding no memory, which callers may answer."""
        return 2 if call in _ALLOCATES else 1

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        if name in CAN_FAIL:
            found = functools.partial(self._call, name, found)
            setattr(self, name, found)
        return found

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        choose = self._choose
        if choose is not None:
            with self._lock:
                self._calls.append(name)
                number = len(self._calls)
            kind = choose(number, name)
            if kind is not None:
                raise failure(name, kind)
        return call(*args, **kwargs)


def failure(call: str, kind: int = 0) -> CuglueError:
    """The error of a call that was made to fail."""
    if kind == 1:
        return OutOfMemory(
            f"{call} was made to fail", got="no memory", expected="memory", requested=0, in_use=0
        )
    error = LaunchError if call == "kernel_launch" else DriverError
    return error(f"{call} was made to fail", code=999, name="cudaErrorUnknown", call=call)
