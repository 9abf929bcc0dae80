"""A record of every allocation, free and reap (contracts B30).

Owns when a record is made. Must not know where it goes: a sink does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ..arguments import shown
from ..core.stream import Stream
from ..errors import UsageError
from ..lifecycle import BlockState
from .adaptor import Adaptor
from .block import UNTAGGED
from .desks import Home
from .entries import Entry
from .hot import Way, give_up
from .records import Action, AllocationRecord, Failure, Sink, failure_of, next_order
from .resource import DeviceMemoryResource

_LIVE = BlockState.LIVE
_new_record = tuple.__new__  # a named tuple's own way is a third slower
_thread, _now = threading.get_ident, time.time_ns
_ALLOCATE, _DEALLOCATE, _REAP = Action.ALLOCATE, Action.DEALLOCATE, Action.REAP_PENDING


class LoggingResource(Adaptor):
    """Emits one record per ``allocate``, ``deallocate`` and ``reap_pending``, after it, successful or not.

    A sink that raises is counted in :attr:`dropped_records`; the resource goes on. What a sink does itself with this
    resource is done, and dropped from the log: its record would lead to the next one, without an end.
    """

    def __init__(self, upstream: DeviceMemoryResource, sink: Sink) -> None:
        super().__init__(upstream)
        if not callable(getattr(sink, "emit", None)):
            raise UsageError("sink of a log", got=shown(sink), expected="something with emit(record)")
        self.sink = sink
        self._ordinal = upstream.device_ordinal
        self._dropped = 0
        self._emitting: set[int] = set()  # threads that are inside the sink

    @property
    def dropped_records(self) -> int:
        """Records that the sink refused, or caused."""
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
            interrupted = not isinstance(error, Exception) and block.state is not _LIVE  # and given back
            self._emit(_DEALLOCATE, *identity, None if interrupted else failure_of(error))
            raise
        self._emit(_DEALLOCATE, *identity, None)

    def _way(self, take_back: Callable[[Entry], None]) -> Way | None:
        way = self._way_below(LoggingResource, take_back)
        if way is None:
            return None
        desk, take_below, give_below = way[:3]
        desk.numbered = True
        emit, ordinal, emitting = self._emit, self._ordinal, self._emitting

        # As _emit, without a call where nothing failed.
        def take(nbytes: int, home: Home, quiet: bool) -> Entry:
            me = _thread()
            try:
                entry = take_below(nbytes, home, quiet)
            except BaseException as error:
                emit(_ALLOCATE, home.stream.id, None, nbytes, UNTAGGED, None, failure_of(error))
                raise
            if me in emitting:
                self._dropped += 1
                return entry
            try:
                try:
                    emitting.add(me)
                    record = (
                        _ALLOCATE, ordinal, home.stream.id, entry[1], nbytes, UNTAGGED, entry[5],
                        me, next_order(), _now(), None,
                    )  # fmt: skip
                    self.sink.emit(_new_record(AllocationRecord, record))
                except Exception:  # noqa: BLE001 - whatever a sink does, memory goes on
                    self._dropped += 1
                finally:
                    emitting.discard(me)
            except BaseException as error:  # interrupted: nobody gets this memory
                give_up(way, entry, error)
                raise
            return entry

        def give(entry: Entry) -> None:
            _, address, nbytes, home, _, generation = entry
            try:
                give_below(entry)
            except BaseException as error:
                emit(_DEALLOCATE, home.stream.id, address, nbytes, UNTAGGED, generation, failure_of(error))
                raise
            me = _thread()
            if me in emitting:
                self._dropped += 1
                return
            record = (
                _DEALLOCATE, ordinal, home.stream.id, address, nbytes, UNTAGGED, generation,
                me, next_order(), _now(), None,
            )  # fmt: skip
            try:
                emitting.add(me)
                self.sink.emit(_new_record(AllocationRecord, record))
            except Exception:  # noqa: BLE001
                self._dropped += 1
            finally:
                emitting.discard(me)

        return way.wrapped(take, give)

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
        me = _thread()
        if me in self._emitting:
            self._dropped += 1
            return
        record = (
            action, self._ordinal, stream, ptr, nbytes, tag, generation,
            me, next_order(), _now(), result,
        )  # fmt: skip
        try:
            self._emitting.add(me)
            self.sink.emit(_new_record(AllocationRecord, record))
        except Exception:  # noqa: BLE001 - whatever a sink does, memory goes on
            self._dropped += 1
        finally:
            self._emitting.discard(me)
