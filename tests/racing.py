"""Threads that get in each other's way as often as they can."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def race(work: Callable[[int], None], threads: int = 4, *, switch: float = 1e-6) -> None:
    """Run ``work(0)``, ``work(1)``, ... each on a thread, which change every ``switch`` seconds, and wait for all."""
    racers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(switch)
    try:
        for thread in racers:
            thread.start()
        for thread in racers:
            thread.join()
    finally:
        sys.setswitchinterval(before)
