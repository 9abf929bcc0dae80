"""Blocks behind CuPy arrays.

Owns how an array's memory becomes a block once somebody asks for it, and what happens to that when the array is gone.
Must not know where spans come from. Most arrays are never asked about and cost no block: see :mod:`.hot`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from ...core.block import BlockLife
from ...core.stream import Stream
from ...errors import DriverError
from ...lifecycle import BlockState
from ..block import ArrayBlock
from .figures import PoolFigures
from .homes import Home
from .spans import Span
from .stream_memory import StreamMemory

_LIVE = BlockState.LIVE


class PoolArrays(PoolFigures):
    """The part of a pool that knows the memory of arrays."""

    _spans: dict[int, tuple[Span, Home | StreamMemory]]  # of the blocks in the table, by address
    _asking: Any  # a lock that a thread may take again

    @abstractmethod
    def _take_in(self, block: Any) -> None:
        """Take a block back."""

    def block_in(self, memory: Any) -> BlockLife:
        """The block behind an array's memory: made at the first question, the same one from then on."""
        if isinstance(memory, BlockLife):  # with a layout, an array's memory is its block
            return memory
        return self._block_of(memory.span)

    def block_at(self, address: int) -> BlockLife | None:
        """Inherited. For memory of an array that nobody asked about its one block is made, as by :meth:`block_in`."""
        found = self._table.around(address)
        if found is not None or self._plans is not None:
            return found or next((b for b in self.live_blocks() if b.ptr <= address < b.ptr + b.size), None)
        with self.homes.all_locked():  # so that nothing free is merged or cut meanwhile
            live = (span for span, _ in self.homes.live_spans())
            span = next((span for span in live if span.ptr <= address < span.ptr + span.size), None)
            if span is None:
                return None
            try:
                block = self._block_of(span)
            except DriverError:  # who got it from allocate() had its own made meanwhile
                return self._table.around(address)
            if any(free is span for free in list(span.stack)):  # its array died while we looked
                self._unmake(span)
                return None
            return block

    def _unmake(self, span: Span) -> None:
        self._table.remove(span.life)
        del self._spans[span.ptr]
        span.life = None

    def _block_of(self, span: Span) -> ArrayBlock:
        with self._asking:
            if span.life is None:
                stream: Stream = span.home.stream
                block = ArrayBlock(span.ptr, span.size, stream, stream.submit())
                block.device_id = self._ordinal
                block.resource = self
                try:
                    self._table.add(block)  # first: if allocate() is quicker, what is there is its own
                    self._spans[span.ptr] = span, span.home
                    span.life = block
                except DriverError:
                    raise
                except BaseException:  # interrupted: nobody gets the block
                    self._table.forget(span.ptr)
                    self._spans.pop(span.ptr, None)
                    raise
            found: ArrayBlock = span.life
            return found

    def _was_asked_about(self, span: Span) -> bool:
        """Whether another thread made a block of ``span`` before that of allocate() was there; it is taken back."""
        with self._asking:
            life = span.life
        if life is not None:
            self._take_in(life)
        return life is not None

    def take_back(self, span: Span, block: BlockLife) -> None:
        """The array whose memory this was is gone; ``block`` was made of it. An interrupted call is repeated."""
        life = span.life
        if life is None:  # it was unmade meanwhile, or has been given back
            span.home.put(span, block)
        elif life.state is _LIVE:
            self._take_in(life)
