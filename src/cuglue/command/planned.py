"""Buffers of a dry run: they count in the pools, and get memory when somebody first looks where it is.

Owns the block of such a buffer. Must not know pools beyond a reservation, or buffers.
"""

from __future__ import annotations

from typing import cast

from ..core.block import BLOCK_SLOTS, BlockLife
from ..core.stream import Stream
from ..lifecycle import BlockState
from ..memory.block import DeviceBlock
from ..memory.pool.reservation import Reservation
from ..memory.resource import DeviceMemoryResource


def give_back(resource: DeviceMemoryResource, block: BlockLife) -> None:
    """Give a block of a runtime back to where it came from."""
    if isinstance(block, PlannedBlock):
        block.end()
    else:
        resource.deallocate(cast(DeviceBlock, block))


class PlannedBlock(BlockLife):
    """A block whose address is made at the first look (contracts C9)."""

    __slots__ = (*BLOCK_SLOTS, "_address", "_reservation", "device_id", "size")

    def __init__(self, reservation: Reservation, stream: Stream) -> None:
        self._reservation = reservation
        self._address = 0
        self.size = reservation.nbytes
        self.device_id = stream.device
        self.begin(stream, 0, "buffer")

    @property
    def ptr(self) -> int:  # type: ignore[override] # an attribute of every other block
        """The address.

        Raises:
            OutOfMemory: there is no memory to put behind it.
        """
        if not self._address and self.state is BlockState.LIVE:
            self._address = self._reservation.resolve()
        return self._address

    @property
    def planned(self) -> bool:
        """Whether there is no memory behind it yet."""
        return not self._address

    def end(self) -> None:
        """Give the reservation back, after the work on its stream so far."""
        self.advance("deallocate")
        self._reservation.release()
        self.advance("free")

    def __repr__(self) -> str:
        return f"PlannedBlock(nbytes={self.size}, generation={self.generation}, {self.state.value})"
