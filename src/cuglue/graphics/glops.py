"""How GL calls reach the thread where their OpenGL context lives.

Owns three ways of getting there: *inline* (only that thread may call), *worker* (a thread of our own, calls are
routed), *pumped* (the application runs what was queued). Must not know what the calls do, nor how a context is made.

Every way keeps two promises: a call never waits for a thread that is gone, and :meth:`GlOps.post` may be called by a
finaliser (it takes no lock, waits for nothing and raises nothing).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from ..arguments import seconds
from ..core import process
from ..errors import BusyError, ClosedError, WrongThreadError
from .glcurrent import ContextId, ThreadRef, current_context, question, require_context
from .glqueue import Posted, Queue, Request, check_process, drain, gone, refuse, run
from .glworker import OwnedContext, Start, check_owned, close_at_exit, living, serve

T = TypeVar("T")

#: How long closing waits for a worker that is inside a GL call, in seconds.
JOIN_SECONDS = 10.0
#: How often a waiting call looks whether the pumping thread still lives, in seconds.
ALIVE_CHECK_SECONDS = 0.2


class GlOps(ABC):
    """Runs functions where an OpenGL context is current. Made by :meth:`inline`, :meth:`worker`, :meth:`pumped`."""

    def __init__(self) -> None:
        self._queue: Queue = queue.SimpleQueue()
        self._pid, self._process = os.getpid(), process.life
        self._closed = False

    # --- the three ways

    @staticmethod
    def inline(context: OwnedContext | ContextId | None = None) -> InlineOps:
        """Calls run at once on this thread, where ``context`` (default: the current one) must be current.

        Raises:
            NoContextError: no context is current here, or another one.
        """
        wanted = context if isinstance(context, ContextId | None) else check_owned(context).id
        return InlineOps(require_context(wanted))

    @staticmethod
    def worker(context: OwnedContext | Callable[[], OwnedContext]) -> WorkerOps:
        """Calls run on a daemon thread of our own, to which the context belongs from now on.

        Args:
            context: a context (released on the calling thread first), or a function that makes one; it runs on the
                new thread.

        Ordering: blocks until the context is current on the new thread.
        Ownership: closing the ops frees the context.
        """
        return WorkerOps(context)

    @staticmethod
    def pumped(*, time_limit: float = 30.0) -> PumpedOps:
        """Calls wait until the application calls :meth:`PumpedOps.pump` on the thread that has the context.

        Args:
            time_limit: seconds that a call waits to be started before it is withdrawn with ``TimeoutError``.
        """
        return PumpedOps(seconds("time_limit", time_limit))

    # --- the common protocol

    @property
    @abstractmethod
    def context_id(self) -> ContextId | None:
        """The context calls run in; None while pumped ops have not met theirs."""

    @property
    @abstractmethod
    def thread(self) -> ThreadRef | None:
        """The thread calls run on; None while pumped ops have not met it."""

    @property
    def alive(self) -> bool:
        """False once closed, in a forked child, or when the thread is gone."""
        return not self._closed and self._process is process.life

    def here(self) -> bool:
        """Whether it is known that a call would run at once on this thread, with nothing to be done before it."""
        return False

    @abstractmethod
    def call(self, fn: Callable[..., T], *args: Any) -> T:
        """Run ``fn(*args)`` on the context's thread; returns its value or raises what it raised.

        Ordering: blocks the host until ``fn`` has returned. Runs at once when already on that thread.

        Raises:
            ClosedError: the ops were closed or their thread is gone; ``fn`` did not run.
            WrongThreadError, NoContextError: inline or pumped ops on the wrong thread or with another context.
            UsageError: in a forked child, where the context does not exist.
        """

    def post(self, fn: Callable[[], object]) -> None:
        """Queue ``fn`` for the context's thread and return: for finalisers. Never blocks and never raises."""
        self._queue.put(Posted(fn))

    @abstractmethod
    def close(self) -> None:
        """Run what was posted where that is possible, then refuse all further calls. Idempotent."""

    # --- shared

    def _check_alive(self) -> None:
        check_process(self, self._process, self._pid)
        if not self.alive:
            raise self._gone()

    def _gone(self) -> BaseException:
        how = "is closed" if self._closed else "has lost its thread"
        hint = "Keep the context and its thread alive as long as anything registered in it"
        return gone(ClosedError(f"{self} {how}", hint=hint))

    def _wrong_thread(self, hint: str) -> WrongThreadError:
        owner, caller = self.thread, ThreadRef.current()
        return WrongThreadError(str(self), owner=owner, caller=caller, got=caller, expected=owner, hint=hint)

    def __repr__(self) -> str:
        where = self.thread or "a thread not met yet"
        return f"<{type(self).__name__} for {self.context_id or 'no context yet'} on {where}>"


class InlineOps(GlOps):
    """Calls run on the thread that made these ops; see :meth:`GlOps.inline`."""

    def __init__(self, context_id: ContextId) -> None:
        super().__init__()
        self._context_id = context_id
        self._context_now, self._context = question(context_id)
        self.move_here()

    @property
    def context_id(self) -> ContextId:
        return self._context_id

    @property
    def thread(self) -> ThreadRef:
        return self._thread

    @property
    def alive(self) -> bool:
        return super().alive and living(self._owner)

    def move_here(self) -> None:
        """Follow the context, which was made current on this thread."""
        self._owner, self._thread = threading.current_thread(), ThreadRef.current()

    def here(self) -> bool:
        # The owner lives if it asks this, except while the interpreter ends.
        return (
            threading.current_thread() is self._owner
            and not (self._closed or sys.is_finalizing())
            and self._process is process.life
            and self._queue.empty()
            and self._context_now() == self._context
        )

    def call(self, fn: Callable[..., T], *args: Any) -> T:
        if not self.here():
            self._check_alive()
            if threading.current_thread() is not self._owner:
                raise self._wrong_thread("Call there, or make the context with gl.headless(thread='worker')")
            require_context(self._context_id)
            drain(self._queue, run)
        return fn(*args)

    def close(self) -> None:
        mine = self.alive and threading.current_thread() is self._owner
        if mine and current_context() == self._context_id:
            drain(self._queue, run)  # while still open: what was posted may itself make calls
        self._closed = True
        drain(self._queue, refuse)


class WorkerOps(GlOps):
    """Calls are routed to a thread of our own; see :meth:`GlOps.worker`."""

    def __init__(self, context: OwnedContext | Callable[[], OwnedContext]) -> None:
        super().__init__()
        owned = None if callable(context) else check_owned(context)
        here = owned.native if owned is not None and current_context() == owned.id else None
        if here is not None:
            here.release()  # a context is current on one thread at most
        self._ended = threading.Event()
        # The thread holds the queue and the native context, never these ops or the context object: forgetting
        # those two must be possible, so that a finaliser can report it and stop the thread.
        start = Start(context)
        self._owner = threading.Thread(
            target=serve, args=(self._queue, self._ended, start), name="cuglue-gl", daemon=True
        )
        self._owner.start()
        try:
            start.request.wait()
            self._context = start.request.answer()
        except BaseException:
            self.stop()
            if here is not None:
                here.make_current()
            raise
        self._thread = ThreadRef(self._owner.ident or 0, self._owner.name)
        self._context.hand_over(self)
        close_at_exit(self)

    @property
    def context(self) -> OwnedContext:
        """The context that the thread owns."""
        return self._context

    @property
    def context_id(self) -> ContextId:
        return self._context.id

    @property
    def thread(self) -> ThreadRef:
        return self._thread

    @property
    def alive(self) -> bool:
        return super().alive and not self._ended.is_set() and self._owner.is_alive()

    def call(self, fn: Callable[..., T], *args: Any) -> T:
        if threading.current_thread() is self._owner:
            return fn(*args)  # also while closing: what was posted may itself make calls
        self._check_alive()
        request = Request(fn, args)
        self._queue.put(request)
        if self._ended.is_set():
            drain(self._queue, refuse)  # the thread may have emptied the queue just before our put
        request.wait()
        return request.answer()

    def stop(self) -> None:
        """Ask the thread to end after what is queued; does not wait. For finalisers."""
        self._queue.put(None)

    def close(self) -> None:
        self._closed = True
        self.stop()
        if threading.current_thread() is self._owner:
            return  # it ends after the running call
        self._owner.join(JOIN_SECONDS)
        if self._owner.is_alive():
            raise BusyError(str(self), got="a GL call still running", hint="Close again once it has returned")


class PumpedOps(GlOps):
    """Calls run inside :meth:`pump`; see :meth:`GlOps.pumped`."""

    def __init__(self, time_limit: float) -> None:
        super().__init__()
        self._time_limit = time_limit
        self._owner = threading.current_thread()
        self._thread: ThreadRef | None = None
        self._context_id: ContextId | None = None
        self._meet()

    @property
    def context_id(self) -> ContextId | None:
        return self._context_id

    @property
    def thread(self) -> ThreadRef | None:
        return self._thread

    @property
    def alive(self) -> bool:
        return super().alive and (self._thread is None or living(self._owner))

    def _meet(self) -> None:
        """Take this thread and the context current on it, if any, for ours."""
        self._context_id = current_context()
        if self._context_id is not None:
            self._owner, self._thread = threading.current_thread(), ThreadRef.current()

    def call(self, fn: Callable[..., T], *args: Any) -> T:
        self._check_alive()
        if threading.current_thread() is self._owner:
            if self._thread is None:
                self._meet()
            require_context(self._context_id)  # to wait here for ourselves would never end
            return fn(*args)
        request = Request(fn, args)
        self._queue.put(request)
        if self._closed:
            drain(self._queue, refuse)
        deadline = time.monotonic() + self._time_limit
        while not request.wait(min(ALIVE_CHECK_SECONDS, max(0.0, deadline - time.monotonic()))):
            if self.alive and time.monotonic() < deadline:
                continue
            if request.withdraw():
                raise self._late() if self.alive else self._gone()
            request.wait()  # it has started: what comes of it is the caller's
        return request.answer()

    def _late(self) -> TimeoutError:
        return TimeoutError(f"{self} did not run a call within {self._time_limit} s. Call ops.pump() there")

    def pump(self, timeout: float = 0.0) -> int:
        """Run what was queued, on the thread and in the context of these ops; returns how many calls ran.

        Args:
            timeout: seconds to wait for a first call; 0 returns at once.

        Ordering: blocks the host for the calls run, and up to ``timeout`` for the first one.

        Raises:
            NoContextError: no context, or another one, is current here.
            WrongThreadError: these ops were pumped on another thread before. UsageError: no time.
        """
        timeout = min(seconds("timeout of pump()", timeout), threading.TIMEOUT_MAX)
        self._check_alive()
        if self._thread is None:
            self._meet()
        elif threading.current_thread() is not self._owner:
            raise self._wrong_thread("Pump on that thread")
        require_context(self._context_id)
        try:
            first = self._queue.get(timeout=timeout)
        except queue.Empty:
            return 0
        if first is not None:
            first.run()
        return 1 + drain(self._queue, run)

    def close(self) -> None:
        here = self.alive and threading.current_thread() is self._owner
        if here and self._context_id is not None and current_context() == self._context_id:
            drain(self._queue, run)
        self._closed = True
        drain(self._queue, refuse)
