"""The body of a GL worker thread, and what it may hold.

Owns the loop: take the context, run what arrives, free the context when told to stop. It holds the queue and the
native context, never the ops or the context object: both must be forgettable, so that a finaliser can stop it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from cuglue.errors import CuglueError
from cuglue.graphics.glcurrent import ContextId, current_context
from cuglue.graphics.glqueue import Posted, Queue, Request, drain, refuse

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


def moving(context: OwnedContext) -> Callable[[], OwnedContext]:
    """Take the context off the calling thread now, so that it can be made current on another one."""
    context.native.release()

    def arrive() -> OwnedContext:
        context.native.make_current()
        return context

    return arrive


def serve(items: Queue, ended: threading.Event, start: Request[OwnedContext]) -> None:
    """Body of a worker thread: make the context, run what arrives until told to stop, free the context."""
    start.run()
    if start.value is None:
        ended.set()
        return
    native = start.value.native
    del start

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
