"""When host bytes are copied aside before a transfer, and when what transfers hold is let go.

Owns the thresholds (contracts C24) and the drop queue of a stream (C26): a double buffer of things that the device may
still read or write. Must not know what the things are, or how copies are made.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from ..core.event import Event
from ..core.stream import Stream
from ..errors import DevicePoisoned

MIB = 1 << 20
STAGE_BELOW = 100 * MIB
FLUSH_ABOVE = 10 * MIB
DROP_COUNT = 64
DROP_BYTES = 64 * MIB


class Source(Enum):
    """Where the bytes of an upload lie."""

    FILE = "file"  # mapped from a file: reading it may block, and the file may be truncated under us
    PINNED = "pinned"
    OTHER = "other"


class Staging(NamedTuple):
    """What happens with the bytes of an upload."""

    staged: bool  # copied to memory of ours first
    flush: bool  # the drop queue is flushed after


def staging(nbytes: int, source: Source) -> Staging:
    """The decision for ``nbytes`` bytes."""
    if source is Source.FILE:
        return Staging(True, True)
    return Staging(source is Source.OTHER and nbytes < STAGE_BELOW, nbytes > FLUSH_ABOVE)


class _Batch(NamedTuple):
    """What one flush found, and the fence that it put behind the work that needs it."""

    fence: Event
    things: list[tuple[Any, int]]


class DropQueue:
    """What work queued on one stream still needs, in two halves: staged since the last flush, and pending before.

    A flush waits for the fence of the flush before it, lets go what was pending then, and sets a new fence. So nothing
    is let go before the device is done with it, and a flush rarely blocks.

    Threads share it without a lock: whatever is pending has the fence that was recorded after it came, and nothing is
    called between taking a thing from one half and adding it elsewhere. A queue that is dropped leaves what it holds to
    the device's retire queue.

    Attributes:
        due: whether enough was staged that it should be flushed.
    """

    __slots__ = ("_batches", "_staged", "_staged_bytes", "_stream", "due")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._staged: deque[tuple[Any, int]] = deque()  # with its bytes
        self._staged_bytes = 0
        self._batches: deque[_Batch] = deque()  # oldest first; more than one where threads flush at once
        self.due = False

    def push(self, thing: Any, nbytes: int) -> None:
        """Keep ``thing`` until the work queued until now is done."""
        self._staged.append((thing, nbytes))
        self._staged_bytes += nbytes
        if len(self._staged) >= DROP_COUNT or self._staged_bytes >= DROP_BYTES:
            self.due = True

    @property
    def staged(self) -> tuple[Any, ...]:
        """What came since the last flush."""
        return tuple(thing for thing, _ in self._staged.copy())

    @property
    def pending(self) -> tuple[Any, ...]:
        """What flushes put behind their fences."""
        return tuple(thing for batch in self._batches.copy() for thing, _ in batch.things)

    def __len__(self) -> int:
        return len(self._staged) + len(self._batches)

    def flush(self) -> None:
        """One rotation. Does nothing if nothing is held.

        Ordering: blocks the host until the work before the previous flush is done.

        Raises:
            DriverError: the fence revealed a fault. What is held is kept, unless the device is lost: then nothing uses
                it any more.
        """
        try:
            for batch in self._batches.copy():
                batch.fence.synchronize()
                self._let_go(batch)
            if self._staged:
                self._seal(self._stream.record)
        except DevicePoisoned:
            self._staged.clear()
            self._batches.clear()
            raise

    def collect(self) -> None:
        """Let go what the device is done with, and never wait for it."""
        for batch in self._batches.copy():
            if not batch.fence.query():
                return
            self._let_go(batch)
        if self._staged and not self._batches:
            self._seal(self._stream.record)

    def _let_go(self, batch: _Batch) -> None:
        if self._batches and self._batches[0] is batch:  # else another thread was quicker
            del self._batches[0]

    def _seal(self, fence: Callable[[], Event | None]) -> None:
        """Put what is staged now behind a new fence; where ``fence`` makes none, the device is done with it."""
        things: list[tuple[Any, int]] = []
        self.due = False
        try:
            try:
                while True:
                    things += (self._staged[0],)
                    del self._staged[0]
            except IndexError:
                pass  # that was all
            made = fence()
            if made is not None:
                self._batches += (_Batch(made, things),)
        except BaseException:
            self._staged += things
            raise
        self._staged_bytes = sum(nbytes for _, nbytes in self._staged.copy()) if self._staged else 0

    def drain(self) -> None:
        """Two rotations: nothing is held afterwards. Blocks the host."""
        if self._staged and not self._stream.nameable():
            self._seal(self._stream.synchronize)  # its handle may be dead by now: nobody has just named it
        self.flush()
        self.flush()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Whoever had the lane still may have queued work since it was drained last. Always, for what dies together with
        # this comes in any order.
        if hasattr(self, "due") and not _ending():
            left = partial(_outlive, self._stream, self._staged, self._batches)
            self._stream.state.retire.forget(left)


def _outlive(stream: Stream, *held: deque[Any]) -> None:
    """Keep what a queue held until all that its stream got is done."""
    for things in held:
        if things:
            stream.state.retire.push([(stream, stream.seq)], things.clear)
