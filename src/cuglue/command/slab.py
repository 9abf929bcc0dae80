"""The memory that small transfers go through, so that none of them has to ask for some.

Owns one piece of host memory a stream, and how much of it is used. Must not know copies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.event import Event
from ..core.stream import Stream
from .hostmem import HostPool, address_of
from .staging import DropQueue

_NONE = np.empty(0, np.uint8)
_NO_VIEW = _NONE.data
_NEVER = sys.maxsize


class Slab:
    """Host memory that small transfers of a stream go through, one behind the other, in two halves by turns.

    Once the device is known to be done with all of them the next one takes the first place again: its bytes are in the
    processor's cache, and copying them takes half the time. While it is not, a half comes again when the device is done
    with what it had last; if it is not even that, new memory takes the place of both.

    Args:
        stream: whose transfers.
        host: gives the memory.
        drops: keeps it, once it is used up, until the device is done with it.

    Attributes:
        bytes: the memory; none before the first :meth:`place`.
        view: the same, quicker to copy to.
        address: of its first byte.
        until: the seq of the stream after which the device uses none of it; set by whoever queued work on a place.
        readers: who still copies from it what the device wrote.
    """

    __slots__ = (
        "_at",
        "_drops",
        "_end",
        "_host",
        "_other",
        "_stream",
        "address",
        "bytes",
        "readers",
        "until",
        "view",
    )

    _at: int  # of the half in use: the next place
    _end: int  # of the half in use
    _other: Event | None  # behind the last work on the other half; None: there was none
    view: Any
    until: int
    readers: int

    HALF = 512 << 10  # bytes
    LARGEST = HALF  # bytes of a transfer that goes through it

    def __init__(self, stream: Stream, host: HostPool, drops: DropQueue) -> None:
        self._stream = stream
        self._host = host
        self._drops = drops
        self.bytes: npt.NDArray[np.uint8] = _NONE
        self.address = 0
        self._release()

    def place(self, nbytes: int) -> int:
        """Where in :attr:`bytes` there are ``nbytes`` for nobody else, until the device has read or written them.

        Under the device's ordering lock, which is held until the work on them is queued: what lets the memory go looks
        at what is queued. Not while the stream captures: a replay would use them again.

        Raises:
            DriverError: the device cannot say how far it is; there is no place.
        """
        if self._stream.completed >= self.until and not self.readers:
            self._at, self._end, self._other = 0, self.HALF, None
        if self._at + nbytes > self._end:
            self._turn()
        start = self._at
        self.until = _NEVER  # until it is known when the device is done with this one
        self._at = start + nbytes + -nbytes % 64  # the next one begins a cache line
        if self._host.simulated:
            self._host.note_use(self.bytes[start : start + nbytes])
        return start

    def _turn(self) -> None:
        """Go on in the other half, or in new memory."""
        half, other = self.HALF, self._other
        if self._end and (other is None or (not self.readers and other.query())):
            self._other = Event(self._stream)
            self._at, self._end = (half, 2 * half) if self._end == half else (0, half)
            return
        self._release()
        taken = self._host.take(2 * half, reclaim=self._drops.collect)
        self.address, self.bytes = address_of(taken), np.asarray(taken)
        self.view = self.bytes.data
        self._at, self._end = 0, half

    def copy_out(self, memory: npt.NDArray[np.uint8], start: int, target: npt.NDArray[np.uint8]) -> None:
        """Copy what the device wrote to a place, and be no reader any more.

        Args:
            memory: :attr:`bytes` when the place was given, which may have been let go since.
            start: the place.
            target: as many bytes as it has.
        """
        arrived = memory[start : start + target.nbytes]
        if self._host.simulated:
            self._host.note_use(arrived)
        target[...] = arrived
        if self.bytes is memory:
            self.readers -= 1

    def close(self) -> None:
        """Let the memory go once the device has read it; the next transfer takes some again."""
        with self._stream.state.ordering:  # not between the place of another thread and its copy
            self._release()

    def _release(self) -> None:
        buffer, self.bytes, self._at, self._end, self._other = self.bytes, _NONE, 0, 0, None
        self.view, self.until, self.readers = _NO_VIEW, _NEVER, 0
        if buffer is _NONE:
            return
        try:
            self._drops.push(buffer, buffer.nbytes)
        except BaseException:  # interrupted, and the device may read it still
            self._drops.push(buffer, buffer.nbytes)
            raise

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "readers") and not _ending():
            self._release()  # a finaliser only appends: whoever had the lane last may have used it since it was closed
