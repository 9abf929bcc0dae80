"""A lock for short sections that many threads of one interpreter enter all the time.

Owns how they wait for each other. Must not know what is protected.
"""

from __future__ import annotations

import threading
import time

_PAUSES = (0.0, 0.0, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3)  # seconds


class Turns:
    """A re-entrant lock whose waiters do not line up, at first.

    In a line each waiter is handed the lock before it has the interpreter, and everybody else stands behind it: one
    thread that is interrupted inside makes every later section cost two switches of threads, for good. So who finds the
    lock taken sleeps and asks again, and lines up only where somebody holds it for long.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            self._wait()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def _wait(self) -> None:
        for pause in _PAUSES:
            time.sleep(pause)
            if self._lock.acquire(False):
                return
        self._lock.acquire()
