"""Blocks: spans of device memory with their life, and the waits that their uses demand.

Owns the uses of a span (last write, newest read per stream), its generation and state, and the rule which use
waits for which (contracts B20-B23). Must not know who allocated the span or what its bytes mean.

:class:`BlockLife` is only the behaviour, so that CuPy's memory object can *be* a block (``memory.cupy_plug``)
without a second object per array.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import NamedTuple

from ..driver.protocol import Access
from ..errors import UseAfterFree
from ..lifecycle import BLOCK, BlockState, step
from .stream import Stream

_NO_SLOTS: tuple[str, ...] = ()  # behaviour only: a C base class (CuPy's) may stand beside this one
# Process-wide, never reused: tells a stale block from its address's next owner.
next_generation = itertools.count(1).__next__
_LIVE = BlockState.LIVE
#: The seq of a use that goes on: all that its stream gets until somebody has to wait for it.
OPEN = sys.maxsize


class BlockId(NamedTuple):
    """A block as a pure value: it outlives the block and never means another one."""

    ptr: int
    generation: int
    alloc_stream: int
    device_ordinal: int


class BlockLife:
    """What every block does. Subclasses give the slots of :data:`BLOCK_SLOTS` and ``ptr``, ``size``, ``device_id``."""

    __slots__ = _NO_SLOTS

    ptr: int
    size: int
    device_id: int
    stream: Stream
    generation: int
    state: BlockState
    write_stream: Stream
    write_seq: int
    reads: dict[Stream, int] | None
    tag: str
    taint: object

    def begin(self, stream: Stream, seq: int, tag: str, generation: int = 0) -> None:
        """Start the life: usable on ``stream`` after its first ``seq`` operations (0: at once, everywhere)."""
        self.stream = stream
        self.generation = generation or next_generation()
        self.state = _LIVE
        self.write_stream = stream
        self.write_seq = seq
        self.reads = None
        self.tag = tag
        self.taint = None

    # --- uses ---------------------------------------------------------------------------------------------------
    def prepare(self, stream: Stream, access: Access) -> int:
        """Queue on ``stream`` the waits that this access needs; the number queued.

        Must come before the work is enqueued. Changes nothing but ``stream``: failing half way leaves only extra
        order behind.
        """
        waits = 0
        if self.write_stream is not stream:
            waits += stream.wait_for(self.write_stream, _until(self.write_stream, self.write_seq))
        if access & 2 and self.reads:
            for reader, seq in list(self.reads.items()):  # another thread may note a read meanwhile
                waits += stream.wait_for(reader, _until(reader, seq))
        return waits

    def finish(self, stream: Stream, access: Access, seq: int | None = None) -> None:
        """Note that work with this access was enqueued on ``stream`` (as its operation ``seq``, or :data:`OPEN`).

        A write replaces the reads before it: its :meth:`prepare` waited for them.
        """
        if seq is None:
            seq = stream.submit()
        if self.write_stream is not stream:
            self.write_stream.asked = self.write_stream.seq  # what is repeated there has to look again
        if access & 2:
            self.reads = None
            self.write_stream, self.write_seq = stream, seq
        elif self.reads is None:
            self.reads = {stream: seq}
        elif self.reads.get(stream, 0) < seq:
            self.reads[stream] = seq

    def uses(self) -> Iterator[tuple[Stream, int]]:
        """Every (stream, seq) that must be done before the memory may go: the last write, the newest reads."""
        yield self.write_stream, _until(self.write_stream, self.write_seq)
        if self.reads:
            for stream, seq in list(self.reads.items()):
                yield stream, _until(stream, seq)

    def use_count(self) -> int:
        """Entries of :meth:`uses` (contracts B27b, "ev")."""
        return 1 + (len(self.reads) if self.reads else 0)

    def join_uses(self, stream: Stream) -> int:
        """Queue on ``stream`` the waits for every use; the number queued. Then a free there is safe."""
        return self.prepare(stream, Access.READ_WRITE)

    # --- life ---------------------------------------------------------------------------------------------------
    def advance(self, event: str) -> None:
        """Move along the table of contracts B4.

        Raises:
            UseAfterFree: the state has no such event.
        """
        if event not in BLOCK[self.state]:
            raise UseAfterFree(
                f"block of generation {self.generation} is {self.state.value}",
                got=f"'{event}'",
                expected="a live block",
                generation=self.generation,
            )
        self.state = step(BLOCK, self.state, event, self)

    @property
    def id(self) -> BlockId:
        """The block as a value."""
        return BlockId(self.ptr, self.generation, self.stream.id, self.device_ordinal)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size

    @property
    def device_ordinal(self) -> int:
        """Ordinal of the device the memory is on."""
        return self.device_id

    @property
    def alloc_stream(self) -> Stream:
        """The stream the block was allocated on, and is freed on."""
        return self.stream


def prepare_all(uses: dict[BlockLife, Access], stream: Stream) -> int:
    """:meth:`BlockLife.prepare` of every block; the number of waits queued."""
    return sum(block.prepare(stream, access) for block, access in uses.items())


def finish_all(uses: dict[BlockLife, Access], stream: Stream, seq: int) -> None:
    """:meth:`BlockLife.finish` of every block, in one call: every launch stamps some."""
    for block, access in uses.items():
        if access & 2:
            block.reads = None
            block.write_stream, block.write_seq = stream, seq
        else:
            block.finish(stream, access, seq)


def _until(stream: Stream, seq: int) -> int:
    """``seq``, or of a use that goes on, a number behind all that the stream has got by now."""
    return stream.submit() if seq == OPEN else seq


#: Slots a concrete block needs beside ``ptr``, ``size`` and ``device_id``.
BLOCK_SLOTS = (
    "__weakref__",
    "generation",
    "reads",
    "state",
    "stream",
    "tag",
    "taint",
    "write_seq",
    "write_stream",
)


class Block(BlockLife):
    """A block that is not a CuPy memory object."""

    __slots__ = (*BLOCK_SLOTS, "device_id", "ptr", "size")

    def __init__(
        self, ptr: int, size: int, stream: Stream, seq: int = 0, tag: str = "untagged", generation: int = 0
    ) -> None:
        self.ptr = ptr
        self.size = size
        self.device_id = stream.device
        self.begin(stream, seq, tag, generation)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(ptr={self.ptr:#x}, nbytes={self.size}, device={self.device_id}, "
            f"generation={self.generation}, {self.state.value}, tag={self.tag!r})"
        )
