"""What a log says of one operation, and where it may go.

Owns the record and the sinks. Must not know resources. A sink may raise: the logging resource counts that.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import threading
from enum import Enum
from io import TextIOWrapper
from os import PathLike
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol, Self, TextIO, cast
from weakref import WeakSet

from ..arguments import shown
from ..core import process
from ..errors import (
    CuglueError,
    DriverError,
    OutOfBounds,
    OutOfBudget,
    OutOfMemory,
    StreamMisuse,
    UsageError,
    UseAfterFree,
)
from ..lifecycle import leave

MESSAGE_BYTES = 256
_ELLIPSIS = "\u2026"


class Action(Enum):
    """What was asked of a resource."""

    ALLOCATE = "allocate"
    DEALLOCATE = "deallocate"
    REAP_PENDING = "reap_pending"


class Failure(NamedTuple):
    """How an operation failed: ``kind`` is a stable word, ``message`` at most 256 bytes and an ellipsis."""

    kind: str
    message: str


class AllocationRecord(NamedTuple):
    """One operation. Sort by ``order_counter``: the time is the wall clock's and may go back.

    Attributes:
        action: what was asked.
        device_ordinal: of the resource.
        stream_id: id of the block's stream; None of a reap.
        ptr, generation: of the block; None where there is none.
        bytes: of the block; of a refused allocation what was asked for; None of a reap.
        tag: of the block, or of the request; None of a reap.
        thread_id: ident of the calling thread.
        order_counter: strictly increasing in the process.
        timestamp_nanos: nanoseconds since the epoch.
        result: None if it succeeded.
    """

    action: Action
    device_ordinal: int
    stream_id: int | None
    ptr: int | None
    bytes: int | None
    tag: str | None
    generation: int | None
    thread_id: int
    order_counter: int
    timestamp_nanos: int
    result: Failure | None

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.result is None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for files."""
        result = "ok" if self.result is None else {"kind": self.result.kind, "message": self.result.message}
        return {**self._asdict(), "action": self.action.value, "result": result}


#: Gives the next ``order_counter``.
next_order = itertools.count(1).__next__  # process-wide


_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (OutOfBudget, "OutOfBudget"),
    (OutOfMemory, "OutOfMemory"),
    (UseAfterFree, "UseAfterFree"),
    (OutOfBounds, "OutOfBounds"),
    (StreamMisuse, "StreamMisuse"),
    (DriverError, "Driver"),
    (CuglueError, "Usage"),
)


def failure_of(error: BaseException) -> Failure:
    """What a log says of ``error``."""
    kind = next((word for cls, word in _KINDS if isinstance(error, cls)), type(error).__name__)
    return Failure(kind, truncated(str(error), MESSAGE_BYTES))


def truncated(text: str, limit: int) -> str:
    """``text`` cut to ``limit`` bytes of UTF-8 on a character boundary, with an ellipsis if anything was cut."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit:
        return text
    return raw[:limit].decode("utf-8", "ignore") + _ELLIPSIS


# --- sinks ------------------------------------------------------------------------------------------------------


class Sink(Protocol):
    """Takes records, on any thread."""

    def emit(self, record: AllocationRecord) -> None:
        """Take one record."""


class NullSink:
    """Takes records and keeps none."""

    def emit(self, record: AllocationRecord) -> None:
        """Inherited."""


class InMemorySink:
    """Keeps records in memory."""

    def __init__(self) -> None:
        self._records: list[AllocationRecord] = []
        self.emit = self._records.append  # one call, and atomic

    def snapshot(self) -> list[AllocationRecord]:
        """The records so far, oldest first."""
        return sorted(self._records, key=lambda record: record.order_counter)

    def clear(self) -> None:
        """Forget all records."""
        self._records.clear()

    def __len__(self) -> int:
        return len(self._records)


class _FileSink:
    """A sink that writes to a text file; usable in ``with``. A forked child has no part in it, nor in its lock."""

    def __init__(self, target: str | PathLike[str] | TextIO) -> None:
        """Open the file, or write to an open one, which stays open.

        Args:
            target: path (replaced if it exists), or a text file.

        Raises:
            UsageError: neither. OSError: the file cannot be written.
        """
        self._own = isinstance(target, str | PathLike)
        if not self._own:
            try:
                cast("TextIO", target).write("")  # a binary file says so now, and not at the first record
            except (AttributeError, TypeError):
                raise UsageError(
                    type(self).__name__, got=shown(target), expected="a path, or an open text file"
                ) from None
        self._file: IO[str] = (
            open(cast("str", target), "w", encoding="utf-8", newline="")  # noqa: SIM115 - closed by close()
            if self._own
            else cast("TextIOWrapper", target)
        )
        self._lock = threading.RLock()
        self._closed = False
        self._life = process.life
        self._begin()
        if self._own:
            _files.add(self)

    def _begin(self) -> None:
        """Write what comes before the records."""

    def _write(self, record: AllocationRecord) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """Write what comes after the records."""

    def emit(self, record: AllocationRecord) -> None:
        """Inherited.

        Raises:
            UsageError: in a forked child: the file is the parent's.
        """
        if self._life is not process.life:
            raise process.forked_child(self)
        with self._lock:
            self._write(record)

    def flush(self) -> None:
        """Hand everything to the operating system. In a forked child: nothing."""
        if self._life is not process.life:
            return
        with self._lock:
            self._file.flush()

    def close(self) -> None:
        """Complete the file. Closing again does nothing, nor does closing in a forked child."""
        if self._life is not process.life:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._end()
            self._file.flush()
            if self._own:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self.close, error, "closing", self)


_files: WeakSet[_FileSink] = WeakSet()  # that sinks opened


def _leave_files() -> None:
    """In a forked child: what the parent has not written yet would be written a second time when the child ends."""
    files = [sink._file for sink in _files if not sink._file.closed]
    if files:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in files:
            os.dup2(nowhere, file.fileno(), inheritable=False)
        os.close(nowhere)


os.register_at_fork(after_in_child=_leave_files)


class CsvSink(_FileSink):
    """Writes records as comma-separated values, with a header line."""

    def _begin(self) -> None:
        self._rows = csv.writer(self._file)
        self._rows.writerow([*AllocationRecord._fields[:-1], "result", "message"])

    def _write(self, record: AllocationRecord) -> None:
        kind, message = ("ok", "") if record.result is None else record.result
        self._rows.writerow([record.action.value, *record[1:-1], kind, message])


class JsonLinesSink(_FileSink):
    """Writes one JSON object per line."""

    def _write(self, record: AllocationRecord) -> None:
        self._file.write(json.dumps(record.as_dict()) + "\n")


class TraceSink(_FileSink):
    """Writes a trace that Perfetto and ``chrome://tracing`` open: blocks as spans, bytes out as a counter."""

    def _begin(self) -> None:
        self._first = True
        self._live: dict[int, int] = {}
        self._bytes = 0  # live
        self._file.write("[")

    def _event(self, **event: Any) -> None:
        self._file.write(("\n" if self._first else ",\n") + json.dumps(event))
        self._first = False

    def _write(self, record: AllocationRecord) -> None:
        micros = record.timestamp_nanos / 1000
        common = {"pid": record.device_ordinal, "tid": record.thread_id, "ts": micros}
        if record.action is Action.REAP_PENDING or record.result is not None:
            self._event(
                name=record.action.value, ph="i", s="t", cat="memory", args=record.as_dict(), **common
            )
            return
        allocate = record.action is Action.ALLOCATE
        assert record.generation is not None  # of every operation that succeeded
        if allocate:
            self._live[record.generation] = record.bytes or 0
            self._bytes += record.bytes or 0
        else:
            self._bytes -= self._live.pop(record.generation, 0)
        self._event(
            name=record.tag,
            ph="b" if allocate else "e",
            cat="memory",
            id=record.generation,
            args=record.as_dict(),
            **common,
        )
        self._event(name="bytes live", ph="C", args={"bytes": self._bytes}, **common)

    def _end(self) -> None:
        self._file.write("\n]\n")
