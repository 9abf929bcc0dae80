"""When host bytes are copied aside before a transfer, and when what transfers hold is let go.

Owns the thresholds (contracts C24) and the drop queue of a stream (C26): a double buffer of things that the device may
still read or write. Must not know what the things are, or how copies are made.
"""

from __future__ import annotations

from enum import Enum
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


class DropQueue:
    """What work queued on one stream still needs, in two halves: staged since the last flush, and pending before.

    A flush waits for the fence of the flush before it, lets go what was pending then, and sets a new fence. So nothing
    is let go before the device is done with it, and a flush rarely blocks.

    Attributes:
        due: whether enough was staged that it should be flushed.
    """

    __slots__ = ("_fence", "_pending", "_staged", "_staged_bytes", "_stream", "due")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._staged: list[Any] = []
        self._staged_bytes = 0
        self._pending: list[Any] = []
        self._fence: Event | None = None
        self.due = False

    def push(self, thing: Any, nbytes: int) -> None:
        """Keep ``thing`` until the work queued until now is done."""
        self._staged.append(thing)
        self._staged_bytes += nbytes
        if len(self._staged) >= DROP_COUNT or self._staged_bytes >= DROP_BYTES:
            self.due = True

    @property
    def staged(self) -> tuple[Any, ...]:
        """What came since the last flush."""
        return tuple(self._staged)

    @property
    def pending(self) -> tuple[Any, ...]:
        """What the last flush put behind its fence."""
        return tuple(self._pending)

    def flush(self) -> None:
        """One rotation. Does nothing if nothing is held.

        Ordering: blocks the host until the work before the previous flush is done.

        Raises:
            DriverError: the fence revealed a fault. What it guarded is kept, unless the device is lost: then nothing
                uses it any more.
        """
        if not self._staged and not self._pending:
            return
        if self._pending:
            if self._fence is None:
                self._fence = self._stream.record()
            try:
                self._fence.synchronize()
            except DevicePoisoned:
                self._let_go()
                raise
            self._let_go()
        if self._staged:
            self._pending, self._staged, self._staged_bytes = self._staged, [], 0
            self.due = False
            self._fence = self._stream.record()

    def collect(self) -> None:
        """Let go what the device is done with, and never wait for it."""
        if self._pending and self._fence is not None and self._fence.query():
            self._let_go()
        if self._staged and not self._pending:
            self.flush()

    def _let_go(self) -> None:
        self._pending = []
        self._fence = None

    def drain(self) -> None:
        """Two rotations: nothing is held afterwards. Blocks the host."""
        if not self._stream.nameable() and (self._staged or self._pending):
            self._stream.synchronize()  # its handle may be dead by now: nobody has just named it
            self._let_go()
            self._staged, self._staged_bytes, self.due = [], 0, False
        self.flush()
        self.flush()
