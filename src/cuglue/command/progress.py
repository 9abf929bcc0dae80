"""How far a transfer is, told to whoever asked.

Owns :class:`Progress` and the count of what callables raised. Must not know transfers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ..arguments import shown
from ..core.event import Event
from ..errors import CuglueError, UsageError
from .futures import Future

Report = Callable[[int, int], object]
#: Bytes that are moved between two calls at most, where the device moves them in one go.
STRIDE = 64 << 20

_log = logging.getLogger(__name__)


class Failures:
    """How many calls raised. One for each runtime."""

    __slots__ = ("_lock", "count")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self) -> None:
        """One more."""
        with self._lock:
            self.count += 1


class Progress:
    """Calls ``report(done_bytes, total_bytes)`` as a transfer goes on: ``done_bytes`` only grows, up to the total.

    What the callable raises is counted and logged; the transfer does not notice.

    Args:
        report: of the user.
        total: bytes of the whole transfer.
        failures: where to count.

    Raises:
        UsageError: ``report`` cannot be called.
    """

    def __init__(self, report: Report, total: int, failures: Failures) -> None:
        if not callable(report):
            raise UsageError(
                "progress",
                got=shown(report)[:80],
                expected="a function of (done_bytes, total_bytes), or None",
            )
        self._report = report
        self._failures = failures
        self._lock = threading.Lock()
        self._told = 0
        self.total = total

    def reach(self, done: int) -> None:
        """``done`` bytes are through. Calls the user's function on this thread, with no lock held."""
        with self._lock:
            if done <= self._told:
                return  # told by a later one already
            self._told = done
        try:
            self._report(done, self.total)
        except Exception:  # noqa: BLE001 - somebody else's function
            self._failures.add()
            _log.exception("progress callback %r failed", self._report)

    def reach_after(self, event: Event, done: int) -> None:
        """``done`` bytes are through once ``event`` is complete: told on the library's thread, not on the driver's."""

        def tell(arrived: Future[Any]) -> None:
            try:
                arrived.result()
            except CuglueError:
                return  # the fault is for whoever waits for the transfer
            self.reach(done)

        Future(event, _nothing).add_done_callback(tell)


def _nothing() -> None:
    return None
