"""Numbers the calls of a driver and makes chosen ones fail.

Owns which calls can fail, and with which errors. Must not know why one is chosen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .faults import ALLOCATE, error_of
from .interpose import METHODS, Method, interposed

UNKNOWN, NO_MEMORY = 999, 2
#: Answered from what the process knows already: no device is asked, so none can refuse.
_NEVER_FAIL = frozenset(["capabilities", "device_count", "device_name", "stream_current", "host_view"])
_CAN_FAIL = tuple(name for name in METHODS if name not in _NEVER_FAIL)


def codes_of(call: str) -> tuple[int, ...]:
    """The errors worth trying: an allocation has two, because callers may have an answer to missing memory."""
    return (UNKNOWN, NO_MEMORY) if call in ALLOCATE else (UNKNOWN,)


class NumberedCalls:
    """The calls of one driver. While armed they are numbered, across all methods, and the chosen ones fail."""

    def __init__(self) -> None:
        self._choose: Callable[[int, str], int | None] | None = None
        self._names: list[str] = []
        self._lock = threading.Lock()

    def of(self, driver: Any) -> AbstractContextManager[None]:
        """Stand in front of ``driver`` for the time of a ``with`` block."""
        return interposed(driver, [name for name in _CAN_FAIL if hasattr(driver, name)], self._wrap)

    def arm(self, choose: Callable[[int, str], int | None]) -> None:
        """Number calls from 1; ``choose(number, name)`` gives the error code of a call, or None to let it pass."""
        self._names = []
        self._choose = choose

    def disarm(self) -> tuple[str, ...]:
        """Let everything pass again; the calls that were numbered."""
        self._choose = None
        return tuple(self._names)

    def _wrap(self, name: str, method: Method) -> Method:
        """The method to put in place of ``method``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            choose = self._choose
            if choose is not None:
                with self._lock:
                    self._names.append(name)
                    number = len(self._names)
                code = choose(number, name)
                if code is not None:
                    raise error_of(name, code)
            return method(*args, **kwargs)

        return call
