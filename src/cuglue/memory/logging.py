"""A record of every allocation, free and reap (contracts B30).

Owns when a record is made. Must not know where it goes: a sink does.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ..core.stream import Stream
from ..errors import UsageError
from .adaptor import Adaptor
from .records import Action, AllocationRecord, Failure, Sink, failure_of, next_order
from .resource import DeviceMemoryResource

_ALLOCATE, _DEALLOCATE, _REAP = Action.ALLOCATE, Action.DEALLOCATE, Action.REAP_PENDING


class LoggingResource(Adaptor):
    """Emits one record per ``allocate``, ``deallocate`` and ``reap_pending``, after it, successful or not.

    A sink that raises is counted in :attr:`dropped_records`; the resource goes on.
    """

    def __init__(self, upstream: DeviceMemoryResource, sink: Sink) -> None:
        super().__init__(upstream)
        if not callable(getattr(sink, "emit", None)):
            raise UsageError("sink of a log", got=repr(sink), expected="something with emit(record)")
        self.sink = sink
        self._ordinal = upstream.device_ordinal
        self._dropped = 0

    @property
    def dropped_records(self) -> int:
        """Records that the sink refused."""
        return self._dropped

    def _allocate(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        try:
            block = self._take(nbytes, stream, tag, kind)
        except BaseException as error:
            self._emit(_ALLOCATE, stream.id, None, nbytes, tag, None, failure_of(error))
            raise
        try:
            self._emit(_ALLOCATE, stream.id, block.ptr, block.size, tag, block.generation, None)
        except BaseException as error:  # the sink was interrupted: nobody gets this block
            self._return(block, error)
            raise
        return block

    def _deallocate(self, block: Any) -> None:
        identity = (block.stream.id, block.ptr, block.size, block.tag, block.generation)
        try:
            self._give(block)
        except BaseException as error:
            self._emit(_DEALLOCATE, *identity, failure_of(error))
            raise
        self._emit(_DEALLOCATE, *identity, None)

    def reap_pending(self, *, block: bool = True) -> None:
        """Inherited."""
        try:
            self.upstream.reap_pending(block=block)
        except BaseException as error:
            self._emit(_REAP, None, None, None, None, None, failure_of(error))
            raise
        self._emit(_REAP, None, None, None, None, None, None)

    def _emit(
        self,
        action: Action,
        stream: int | None,
        ptr: int | None,
        nbytes: int | None,
        tag: str | None,
        generation: int | None,
        result: Failure | None,
    ) -> None:
        try:
            self.sink.emit(
                AllocationRecord(
                    action,
                    self._ordinal,
                    stream,
                    ptr,
                    nbytes,
                    tag,
                    generation,
                    threading.get_ident(),
                    next_order(),
                    time.time_ns(),
                    result,
                )
            )
        except Exception:  # noqa: BLE001 - whatever a sink does, memory goes on
            self._dropped += 1
