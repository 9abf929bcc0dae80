"""Blocks behind CuPy arrays.

Owns how an array's memory becomes a block once somebody asks for it, and what happens to that when the array is gone.
Must not know where spans come from. Most arrays are never asked about and cost no block: see :mod:`.hot`.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any

from ...core.block import BlockLife
from ...core.stream import Stream
from ...lifecycle import BlockState
from ..block import ArrayBlock as ArrayBlock
from .figures import PoolFigures
from .homes import Home
from .spans import Span
from .stream_memory import StreamMemory

_LIVE = BlockState.LIVE


class PoolArrays(PoolFigures):
    """The part of a pool that knows the memory of arrays."""

    _spans: dict[int, tuple[Span, Home | StreamMemory]]  # of the blocks in the table, by address
    _asking: threading.Lock

    @abstractmethod
    def _take_in(self, block: Any) -> None:
        """Take a block back."""

    def block_in(self, memory: Any) -> BlockLife:
        """The block behind an array's memory: made at the first question, the same one from then on."""
        if isinstance(memory, BlockLife):  # with a layout, an array's memory is its block
            return memory
        return self._block_of(memory.span)

    def _block_of(self, span: Span) -> ArrayBlock:
        with self._asking:
            if span.life is None:
                stream: Stream = span.home.stream
                block = ArrayBlock(span.ptr, span.size, stream, stream.submit())
                block.device_id = self._ordinal
                block.resource = self
                self._spans[span.ptr] = span, span.home
                self._table.add(block)
                span.life = block
            found: ArrayBlock = span.life
            return found

    def take_back(self, span: Span) -> None:
        """The array whose memory this was is gone."""
        if span.life is not None and span.life.state is _LIVE:
            self._take_in(span.life)
