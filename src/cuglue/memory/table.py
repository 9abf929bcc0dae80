"""Which blocks are live: the truth about what a resource owns.

Owns the table from address to block. Blocks that callers hold may be stale, doubled, foreign or forged; only what the
table says is freed. Must not know streams or drivers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref

from ..core.block import BlockId, BlockLife
from ..errors import DriverError, UseAfterFree


class BlockTable:
    """Live blocks by address. A dictionary's own steps are atomic, so there is no lock to hold.

    Attributes:
        entries: the blocks, or weak references to them.
        plain: by address, what is live and has no block (:mod:`.entries`).
    """

    __slots__ = ("_sizes", "entries", "plain")

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # summed on demand: a counter would need a lock on every allocation
        # A block of an array must die with the array, so it is held weakly; all others are kept alive here.
        self.entries: dict[int, BlockLife | ref[BlockLife]] = {}
        self.plain: dict[int, Any] = {}

    def add(self, block: Any) -> None:
        """Take a new block in.

        Raises:
            DriverError: the address is live; the block there stays.
        """
        ptr = block.ptr
        if ptr in self.entries or ptr in self.plain:
            raise address_is_live(ptr)
        self.entries[ptr] = block if block.HELD else ref(block)
        self._sizes[ptr] = block.size

    def remove(self, block: BlockLife) -> bool:
        """Take a live block out; False if it is not one of this table, which is then as it was."""
        ptr = block.ptr
        entry = self.entries.get(ptr)
        if entry is not block:
            # The collector clears weak references before finalisers run: no answer means the same block.
            found = entry() if entry.__class__ is ref else entry
            if entry is None or (found is not block and found is not None):
                return False
        try:
            taken = self.entries.pop(ptr, None)
            if taken is not entry:  # another thread was quicker, and the address may have a new owner already
                if taken is not None:
                    self.entries[ptr] = taken
                return False
            self._sizes.pop(ptr, None)
        except BaseException:  # interrupted: nobody learns that it was taken out
            self.entries.setdefault(ptr, entry)
            self._sizes.setdefault(ptr, block.size)
            raise
        return True

    def forget(self, address: int) -> None:
        """Take out what starts at ``address``, if anything does: its making was interrupted."""
        self.entries.pop(address, None)
        self._sizes.pop(address, None)

    def find(self, block: BlockId) -> BlockLife:
        """The live block with this id.

        Raises:
            UseAfterFree: there is none.
        """
        found = self.at(block.ptr)
        if found is None or found.generation != block.generation:
            raise gone(block.ptr, block.generation)
        return found

    def at(self, address: int) -> BlockLife | None:
        """The live block that starts at ``address``."""
        entry = self.entries.get(address)
        return entry() if isinstance(entry, ref) else entry

    def around(self, address: int) -> BlockLife | None:
        """The live block that ``address`` lies in."""
        found = self.at(address)
        if found is not None:
            return found
        return next((b for b in self if b.ptr <= address < b.ptr + b.size), None)

    def __iter__(self) -> Iterator[BlockLife]:
        for entry in list(self.entries.values()):
            block = entry() if isinstance(entry, ref) else entry
            if block is not None:
                yield block

    @property
    def nbytes(self) -> int:
        """Bytes of all live blocks."""
        return sum(list(self._sizes.values()))

    def __len__(self) -> int:
        return len(self.entries)


def address_is_live(ptr: int) -> DriverError:
    """The error for an address that came again although it was not given back."""
    return DriverError(
        f"address {ptr:#x}",
        got="the driver gave it out again",
        expected="an address that is not live",
        code=1,
        name="cudaErrorInvalidValue",
    )


def gone(ptr: int, generation: int) -> UseAfterFree:
    """The error for a block that is not live here."""
    return UseAfterFree(
        f"block at {ptr:#x} of generation {generation}",
        got="a block that is not live in this resource",
        expected="one that it allocated and did not get back",
        generation=generation,
    )


def wrong_device(resource: object, given: int, call: str) -> DriverError:
    """The error for a block of another device."""
    return DriverError(
        f"{resource!r}: block of device {given}",
        got=f"device {given}",
        expected="a block of this resource's device",
        code=101,
        name="cudaErrorInvalidDevice",
        call=call,
    )
