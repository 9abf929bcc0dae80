"""The memory that small writes are copied to, so that none of them has to ask for some.

Owns one piece of host memory a stream and how much of it is used up. Must not know copies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .hostmem import HostPool, address_of
from .staging import DropQueue

_NONE = np.empty(0, np.uint8)


class Slab:
    """Host memory that small writes of a stream are copied to, one behind the other.

    Args:
        host: gives the memory.
        drops: keeps it, once it is used up, until the device is done with it.

    Attributes:
        bytes: the memory; none before the first :meth:`place`.
        address: of its first byte.
    """

    __slots__ = ("_at", "_drops", "_host", "address", "bytes")

    SIZE = 1 << 20
    LARGEST = 64 << 10  # bytes of a write that goes through it

    def __init__(self, host: HostPool, drops: DropQueue) -> None:
        self._host = host
        self._drops = drops
        self.bytes: npt.NDArray[np.uint8] = _NONE
        self.address = 0
        self._at = self.SIZE

    def place(self, nbytes: int) -> int:
        """Where in :attr:`bytes` there are ``nbytes`` for nobody else, until the device has read or written them.

        Under the device's ordering lock, which is held until the work on them is queued: what lets the memory go looks
        at what is queued. Not while the stream captures: a replay would use them again.
        """
        start = self._at
        if start + nbytes > self.SIZE:
            self.close()
            taken = self._host.take(self.SIZE, reclaim=self._drops.collect)
            self.address, self.bytes = address_of(taken), np.asarray(taken)
            start = 0
        self._at = start + nbytes + -nbytes % 64  # the next one begins a cache line
        if self._host.simulated:
            self._host.note_use(self.bytes[start : start + nbytes])
        return start

    def close(self) -> None:
        """Let the memory go once the device has read it; the next write takes some again."""
        buffer, self.bytes, self._at = self.bytes, _NONE, self.SIZE
        if buffer is _NONE:
            return
        try:
            self._drops.push(buffer, self.SIZE)
        except BaseException:  # interrupted, and the device may read it still
            self._drops.push(buffer, self.SIZE)
            raise
