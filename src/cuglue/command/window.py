"""What a capture remembers while it records, and the memory it was prepared with.

Owns :class:`Window` (everything recorded work touches, and the first failure) and :class:`Primed` (memory that a
warm-up used, kept for the recording). Must not know the driver's graphs or the order of a capture's steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arguments import shown
from ..core.block import BlockLife
from ..core.stream import Stream
from ..driver.protocol import Access
from ..errors import CaptureError
from ..exchange.owner import BlockOwner
from .buffers import Buffer
from .storage import Storage
from .taint import Range, ranges
from .uses import Uses

Release = Callable[[Any], None]


class Primed:
    """Memory that the warm-up of a capture allocated: what is dropped is kept, for the recording to use.

    It is not used again within the warm-up, so that there is as much of it as the recording needs at once and after
    one another: memory of a graph is never used for two buffers.
    """

    def __init__(self, release: Release) -> None:
        self._release = release
        self._free: dict[int, list[BlockLife]] = {}
        self._open = True

    def take_back(self, block: BlockLife) -> None:
        """Keep a block that nobody uses any more; once the capture is over, free it."""
        if self._open:
            self._free.setdefault(block.size, []).append(block)
        else:
            self._release(block)

    def take(self, nbytes: int) -> Storage | None:
        """Memory of exactly this size, or None. It goes back to the resource when the graph is gone."""
        blocks = self._free.get(nbytes)
        return Storage(blocks.pop(), self._release) if blocks else None

    @property
    def sizes(self) -> dict[int, int]:
        """How many pieces of each size lie ready."""
        return {size: len(blocks) for size, blocks in self._free.items() if blocks}

    def close(self) -> None:
        """Give back what the recording did not use."""
        self._open = False
        while self._free:
            _, blocks = self._free.popitem()
            while blocks:
                self._release(blocks.pop())


class Window:
    """One recording.

    Attributes:
        uses: everything that recorded work touches: what a replay is ordered by.
        writes: the bytes that recorded work writes, each range once.
        failure: the first thing that went wrong; then there will be no graph.
    """

    def __init__(self, stream: Stream, primed: Primed) -> None:
        self._stream = stream
        self._primed = primed
        self.uses = Uses()
        self.writes: dict[tuple[int, int, int], Range] = {}
        self.reads: dict[tuple[int, int, int], Range] = {}
        self.held: list[object] = []
        self.failure: BaseException | None = None
        self.operations = 0

    def doom(self, failure: BaseException) -> None:
        """There will be no graph, because of ``failure`` unless something failed before."""
        if self.failure is None:
            self.failure = failure

    def hold(self, thing: object) -> None:
        """Keep ``thing`` as long as the graph lives."""
        self.held.append(thing)

    def note(self, uses: Uses) -> None:
        """Remember recorded work.

        Raises:
            CaptureError: it uses memory that goes away with somebody's map.
        """
        self.operations += 1
        for read in ranges(uses.entries, Access.READ):
            if not self._written(read):
                self.reads.setdefault(_key(read), read)
        for write in ranges(uses.entries, Access.WRITE):
            self.writes.setdefault(_key(write), write)
        for array, operand, access, shape in uses.entries:
            # A buffer may be closed: its memory stays.
            kept = array.storage if isinstance(array, Buffer) else array
            self.uses.add(kept, operand, access, shape)

    def _written(self, read: Range) -> bool:
        block, start, end = read
        return any(b is block and low <= start and end <= high for b, low, high in self.writes.values())

    def reserve(self, nbytes: int) -> Storage:
        """Memory from the warm-up.

        Raises:
            CaptureError: there is none of this size; there will be no graph.
        """
        storage = self._primed.take(nbytes)
        if storage is None:
            ready = ", ".join(f"{n} of {size} bytes" for size, n in self._primed.sizes.items()) or "none"
            error = CaptureError(
                f"allocating {nbytes} bytes while {self._stream!r} is recorded",
                got=f"memory from the warm-up: {ready}",
                expected="memory that the warm-up used and let go",
                hint="Allocate before the capture, or run the same work in its warmup() first",
            )
            self.doom(error)
            raise error
        self.held.append(storage)
        return storage


def refuse_transient(uses: Uses) -> None:
    """Refuse memory that a graph could not rely on at its replays.

    Raises:
        CaptureError: it belongs to a map, or to an array library's stream outside the capture.
    """
    for array, operand, _, _ in uses.entries:
        owner = getattr(array, "export_owner", None)
        if operand.kind != "memory" or (owner is not None and not isinstance(owner, BlockOwner)):
            raise CaptureError(
                "recording work on a map",
                got=shown(array),
                expected="memory that stays where it is",
                hint="Copy the map into a buffer before the replay, and record work on the buffer",
            )


def _key(touched: Range) -> tuple[int, int, int]:
    return touched[0].generation, touched[1], touched[2]
