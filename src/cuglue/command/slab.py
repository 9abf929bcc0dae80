"""The memory that small writes are copied to, so that none of them has to ask for some.

Owns one piece of host memory a stream and how much of it is used up. Must not know copies.
"""

from __future__ import annotations

from typing import cast

from .hostmem import HostBuffer, HostPool, address_of
from .staging import DropQueue


class Slab:
    """Host memory that small writes of a stream are copied to, one behind the other.

    Args:
        host: gives the memory.
        drops: keeps it, once it is used up, until the device has read it.
    """

    __slots__ = ("_address", "_at", "_buffer", "_drops", "_host")

    SIZE = 1 << 20
    LARGEST = 64 << 10  # bytes of a write that goes through it

    def __init__(self, host: HostPool, drops: DropQueue) -> None:
        self._host = host
        self._drops = drops
        self._buffer: HostBuffer | None = None
        self._address = 0
        self._at = 0

    def place(self, nbytes: int) -> tuple[HostBuffer, int]:
        """``(bytes to be written, their address)``, for nobody else until the device has read them.

        Not while the stream captures: a replay would read them again.
        """
        start = self._at
        buffer = self._buffer
        if buffer is None or start + nbytes > self.SIZE:
            self.close()
            buffer = self._buffer = self._host.take(self.SIZE, reclaim=self._drops.collect)
            self._address = address_of(buffer)
            start = 0
        self._at = start + nbytes + -nbytes % 64  # the next one begins a cache line
        piece = cast(HostBuffer, buffer[start : start + nbytes])
        self._host.note_use(piece)
        return piece, self._address + start

    def close(self) -> None:
        """Let the memory go once the device has read it; the next write takes some again."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._drops.push(buffer, self.SIZE)
