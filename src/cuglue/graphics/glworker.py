"""The body of a GL worker thread, and what it may hold.

Owns the loop: take the context, run what arrives, free the context when told to stop. It holds the queue and the
native context, never the ops or the context object: both must be forgettable, so that a finaliser can stop it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from ..arguments import shown
from ..errors import CuglueError, UsageError
from .glcurrent import ContextId, current_context
from .glqueue import Posted, Queue, Request, drain, end_quietly, refuse

log = logging.getLogger(__name__)


class NativeContext(Protocol):
    """The context itself, as the worker thread holds it."""

    @property
    def id(self) -> ContextId: ...
    def make_current(self) -> None: ...
    def release(self) -> None: ...
    def destroy(self) -> None: ...


class OwnedContext(Protocol):
    """A context object that a worker can take over (:class:`~cuglue.graphics.glcontext.GlContext`)."""

    @property
    def id(self) -> ContextId: ...
    @property
    def native(self) -> NativeContext: ...
    def hand_over(self, ops: Any) -> None: ...


def check_owned(context: OwnedContext) -> OwnedContext:
    """``context``, if it is one. Raises UsageError."""
    if not isinstance(getattr(context, "id", None), ContextId):
        raise UsageError(
            "OpenGL context", got=shown(context), expected="a GlContext (cuglue.gl.headless, .current)"
        )
    return context


class Start:
    """How a worker begins: takes or makes its context on the new thread, and keeps the native one for the loop."""

    __slots__ = ("native", "request")

    def __init__(self, context: OwnedContext | Callable[[], OwnedContext]) -> None:
        self.native: NativeContext | None = None
        self.request: Request[OwnedContext] = Request(self._begin, (context,))

    def _begin(self, context: OwnedContext | Callable[[], OwnedContext]) -> OwnedContext:
        made = check_owned(context()) if callable(context) else context
        made.native.make_current()
        self.native = made.native
        return made


def living(thread: threading.Thread) -> bool:
    """Whether a thread can still make calls: the main one can in ``atexit`` functions, where it counts as ended."""
    return thread.is_alive() or (thread is threading.current_thread() and not sys.is_finalizing())


def serve(items: Queue, ended: threading.Event, start: Start) -> None:
    """Body of a worker thread: make the context, run what arrives until told to stop, free the context."""
    start.request.run()
    native = start.native
    if native is None:
        ended.set()
        return

    def run_current(item: Request[Any] | Posted) -> None:
        if current_context() != native.id:  # an earlier call left another context current
            try:
                native.make_current()
            except CuglueError as error:
                item.refuse(error)
                return
        item.run()

    try:
        while (item := items.get()) is not None:
            run_current(item)
            del item  # it may own GL objects: do not keep them until the next one arrives
        drain(items, lambda late: run_current(late) if isinstance(late, Posted) else refuse(late))
    finally:
        ended.set()
        drain(items, refuse)
        try:
            native.destroy()
        except CuglueError:
            log.exception("the context of a GL worker could not be freed")


class _Closable(Protocol):
    def close(self) -> None: ...


_live: weakref.WeakSet[_Closable] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: the threads are its parent's, and nobody could be waited for."""
    global _live
    _live = weakref.WeakSet()


os.register_at_fork(after_in_child=_forked)


def close_at_exit(worker: _Closable) -> None:
    """Have ``worker`` closed while Python still runs: a daemon thread is frozen later, and calls to it would hang."""
    _live.add(worker)


@atexit.register
def _close_all() -> None:
    end_quietly()
    for worker in list(_live):
        try:
            worker.close()
        except CuglueError:
            # It is still inside OpenGL and ends with the process: nothing for anybody's stderr.
            log.info("a GL worker did not end at exit", exc_info=True)
