"""Memory of arrays that nobody asked about: all that is kept of it, and how it becomes a block.

Owns the entries and who may free one. Must not know the driver, nor how memory is handed out: see :mod:`.hot`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ..core.block import BlockLife
from ..core.stream import Stream
from .block import UNTAGGED, ArrayBlock
from .table import BlockTable

if TYPE_CHECKING:
    from .desks import Desk

#: ``[take_back, address (0: freed), bytes, home, block or None, generation or 0]``. A list, which is made in a third of
#: the time of an object; the retire queue calls its first item with it.
Entry = list[Any]
TAKE_BACK, ADDRESS, SIZE, HOME, BLOCK, GENERATION = range(6)


class Entries:
    """The entries of one resource.

    Attributes:
        plain: by address those that no block was made of. Taking one out is to claim it, in one step: who does that
            frees it, or makes its block.
    """

    def __init__(self, table: BlockTable) -> None:
        """Make an empty collection; blocks go to ``table``."""
        self.plain: dict[int, Entry] = table.plain
        self._table = table
        self._asking = threading.RLock()  # who makes the block of an entry; re-entrant for signal handlers

    @property
    def nbytes(self) -> int:
        """Bytes of the entries. Summed on demand: a counter would need a lock on every allocation."""
        return sum([entry[SIZE] for entry in list(self.plain.values())])

    def nbytes_of(self, desk: Desk) -> int:
        """Bytes that one allocator function handed out, those that somebody asked about too."""
        asked = sum(block.size for block in self._table if getattr(block, "desk", None) is desk)
        return asked + sum(
            int(entry[SIZE]) for entry in list(self.plain.values()) if entry[HOME].desk is desk
        )

    def __len__(self) -> int:
        return len(self.plain)

    def ask_all(self) -> None:
        """Make the block of every entry."""
        for entry in list(self.plain.values()):
            self.block_in(entry)

    def around(self, address: int) -> BlockLife | None:
        """The block of the entry that ``address`` lies in."""
        found = self.plain.get(address)
        if found is None:
            inside = (e for e in list(self.plain.values()) if e[ADDRESS] <= address < e[ADDRESS] + e[SIZE])
            found = next(inside, None)
        return None if found is None else self.block_in(found)

    def block_in(self, entry: Entry) -> BlockLife | None:
        """The block of an array's memory, made at the first question; None if that memory is being freed."""
        with self._asking:
            if entry[BLOCK] is None and self._claim(entry):
                stream: Stream = entry[HOME].stream
                try:
                    block = ArrayBlock(
                        entry[ADDRESS], entry[SIZE], stream, stream.submit(), UNTAGGED, entry[GENERATION]
                    )
                    block.desk = entry[HOME].desk
                    block.resource = block.desk.resource()
                    self._table.add(block)
                except BaseException:
                    self.put_back(entry)
                    raise
                entry[BLOCK] = block
            found: BlockLife | None = entry[BLOCK]
            return found

    def claim(self, entry: Entry) -> BlockLife | None:
        """Claim memory that goes back; its block, if somebody asked for that, and then nothing is claimed."""
        with self._asking:
            return None if entry[BLOCK] is None and self._claim(entry) else self.block_in(entry)

    def put_back(self, entry: Entry) -> None:
        """It was claimed and is live again, unless it was freed."""
        if entry[ADDRESS]:
            self.plain[entry[ADDRESS]] = entry

    def _claim(self, entry: Entry) -> bool:
        found = self.plain.pop(entry[ADDRESS], None)
        if found is not entry and found is not None:  # it is gone, and its address has a new owner
            self.plain[entry[ADDRESS]] = found
        return found is entry
