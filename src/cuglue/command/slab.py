"""The memory that small transfers go through, so that none of them has to ask for some.

Owns one piece of host memory a stream, and how much of it is used. Must not know copies.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.stream import Stream
from .hostmem import HostPool, address_of
from .staging import DropQueue

_NONE = np.empty(0, np.uint8)
_NO_VIEW = _NONE.data
_NEVER = sys.maxsize


class Slab:
    """Host memory that small transfers of a stream go through, one behind the other.

    Once the device is known to be done with all of them the next one takes the first place again: its bytes are in the
    processor's cache, and copying them takes half the time.

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

    __slots__ = ("_at", "_drops", "_host", "_stream", "address", "bytes", "readers", "until", "view")

    SIZE = 1 << 20
    LARGEST = 512 << 10  # bytes of a transfer that goes through it

    def __init__(self, stream: Stream, host: HostPool, drops: DropQueue) -> None:
        self._stream = stream
        self._host = host
        self._drops = drops
        self.bytes: npt.NDArray[np.uint8] = _NONE
        self.view: Any = _NO_VIEW
        self.address = 0
        self._at = self.SIZE
        self.until = _NEVER
        self.readers = 0

    def place(self, nbytes: int) -> int:
        """Where in :attr:`bytes` there are ``nbytes`` for nobody else, until the device has read or written them.

        Under the device's ordering lock, which is held until the work on them is queued: what lets the memory go looks
        at what is queued. Not while the stream captures: a replay would use them again.
        """
        start = 0 if self._stream.completed >= self.until and not self.readers else self._at
        self.until = _NEVER  # until it is known when the device is done with this one
        if start + nbytes > self.SIZE:
            self.close()
            taken = self._host.take(self.SIZE, reclaim=self._drops.collect)
            self.address, self.bytes = address_of(taken), np.asarray(taken)
            self.view = self.bytes.data
            start = 0
        self._at = start + nbytes + -nbytes % 64  # the next one begins a cache line
        if self._host.simulated:
            self._host.note_use(self.bytes[start : start + nbytes])
        return start

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
        buffer, self.bytes, self._at = self.bytes, _NONE, self.SIZE
        self.view, self.until, self.readers = _NO_VIEW, _NEVER, 0
        if buffer is _NONE:
            return
        try:
            self._drops.push(buffer, self.SIZE)
        except BaseException:  # interrupted, and the device may read it still
            self._drops.push(buffer, self.SIZE)
            raise
