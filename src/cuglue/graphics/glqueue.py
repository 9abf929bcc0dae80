"""What travels to an OpenGL context's thread: requests that wait for an answer, and posts that do not.

Owns their life: exactly one party runs, withdraws or refuses each. Must not know threads' loops or contexts.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from ..core import process
from ..errors import ClosedError, UsageError

T = TypeVar("T")
log = logging.getLogger(__name__)


class Request(Generic[T]):
    """One call on its way to the context's thread. Whoever claims it first runs it, withdraws it or refuses it."""

    __slots__ = ("_claim", "args", "done", "error", "fn", "value")

    def __init__(self, fn: Callable[..., T], args: tuple[Any, ...]) -> None:
        self.fn, self.args = fn, args
        self.done = threading.Event()
        self.value: T | None = None
        self.error: BaseException | None = None
        self._claim = threading.Lock()

    def claim(self) -> bool:
        return self._claim.acquire(blocking=False)

    def run(self) -> None:
        if not self.claim():
            return
        fn, args = self.fn, self.args
        del self.fn, self.args  # whoever waits may keep the request, but not what it worked on
        try:
            self.value = fn(*args)
        except BaseException as error:  # noqa: BLE001 - the caller's to handle, whatever it is
            self.error = error
        self.done.set()

    def refuse(self, error: BaseException) -> None:
        if self.claim():
            self.error = error
            self.done.set()

    def withdraw(self) -> bool:
        """Take the request back. False: it has started (or ended), and its outcome belongs to the caller."""
        return self.claim()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the answer, at most ``seconds``; an interrupted wait (Ctrl-C) withdraws the request."""
        try:
            return self.done.wait(seconds)
        except BaseException:
            self.withdraw()
            raise

    def answer(self) -> T:
        """The value, or the error raised; only once ``done`` is set."""
        if self.error is None:
            value, self.value = self.value, None
            return cast(T, value)
        try:
            raise self.error
        finally:
            self.error = None  # the traceback holds this frame: do not keep a cycle


class Posted:
    """A call that nobody waits for; its failure is logged."""

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[[], object]) -> None:
        self.fn = fn

    def run(self) -> None:
        try:
            self.fn()
        except Exception:
            log.exception("queued GL work failed: %r", self.fn)

    def refuse(self, error: BaseException) -> None:
        if not isinstance(error, SystemExit):
            log.warning("queued GL work was dropped (%s): %r", error, self.fn)


# SimpleQueue.put is re-entrant and takes no lock that a finaliser could find held: that is what post() needs.
Queue = queue.SimpleQueue[Request[Any] | Posted | None]


def drain(items: Queue, each: Callable[[Request[Any] | Posted], None]) -> int:
    count = 0
    while not items.empty():  # mostly it is, and an exception costs more than the question
        try:
            item = items.get_nowait()
        except queue.Empty:
            break  # somebody else was quicker
        if item is not None:
            each(item)
            count += 1
    return count


def run(item: Request[Any] | Posted) -> None:
    item.run()


_process_ends = threading.Event()


def end_quietly() -> None:
    """From now on ``atexit`` functions close contexts under daemon threads, which cannot know it."""
    _process_ends.set()


def gone(error: ClosedError) -> BaseException:
    """``error``; for a thread that goes on while the process ends, what ends it without a word on stderr."""
    daemon = threading.current_thread().daemon
    return SystemExit() if daemon and _process_ends.is_set() else error


def refuse(item: Request[Any] | Posted) -> None:
    if _process_ends.is_set():
        return item.refuse(
            SystemExit()
        )  # whoever waits is such a thread: the main one runs the atexit functions
    item.refuse(
        ClosedError("the GL context's thread has ended", hint="Keep the context open as long as it is used")
    )


def check_process(who: object, life: object, pid: int) -> None:
    """Refuse to use in a forked child what the parent, process ``pid`` with this ``process.life``, made."""
    if life is not process.life:
        raise UsageError(
            f"{who} in a forked child",
            got=f"process {os.getpid()}",
            expected=f"process {pid}",
            hint="An OpenGL context does not survive fork: start children with 'spawn', or make the context there",
        )
