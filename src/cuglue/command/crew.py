"""Threads that copy host bytes: the hands of large transfers.

Owns the threads, and the handing over of copies to them. Must not know what is copied where, or drivers.

One core copies less than a bus takes. A piece is handed over and back by queues that are written in C, so that little
of it happens under the interpreter's lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache, partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import numpy as np

_THREADS = 8


class Crew:
    """The copies of one transfer, made by several threads. In ``with``; when it is left, no copy is under way.

    Whoever waits for a copy may have others made meanwhile: no thread waits for one transfer alone.
    """

    def __init__(self) -> None:
        self._done: SimpleQueue[Any] = SimpleQueue()
        self._under_way = 0
        self._over = False

    def begin(self, name: Any, target: Any, source: Any) -> None:
        """Have ``source`` copied to ``target``, arrays of one size. Blocks for nothing."""
        _threads().put(partial(self._copy, name, target, source))
        # After it: an interrupt in between leaves a copy that keeps its arrays alive itself.
        self._under_way += 1

    def end(self) -> Any:
        """The name of a copy that is made: of any that was begun. Blocks until there is one; raises what it raised."""
        self._under_way -= 1  # before it: an interrupt while this waits must not be waited for again
        name = self._done.get()
        if isinstance(name, BaseException):
            raise name
        return name

    def _copy(self, name: Any, target: Any, source: Any) -> None:
        try:
            if not self._over:
                np.copyto(target, source)
            self._done.put(name)
        except BaseException as error:  # noqa: BLE001 - raised by end()
            self._done.put(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True  # what nobody began is not wanted any more
        while self._under_way:
            self._under_way -= 1
            self._done.get()


@cache
def _threads() -> SimpleQueue[Callable[[], None]]:
    """Where copies are put for the threads, which are started at the first one."""
    jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
    for number in range(max(1, min(_THREADS, os.cpu_count() or 1))):
        name = f"cuglue-staging-{number}"
        threading.Thread(target=_serve, args=(jobs,), name=name, daemon=True).start()
    return jobs


def _serve(jobs: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()
