"""Uses: everything that one operation touches, waited for before it is enqueued and stamped after.

Owns the merging of uses, and the order with streams that others use memory on without telling. Must not know
arguments, kernels, copies or taint.
"""

from __future__ import annotations

from typing import Any, Self

from ..core.block import BlockLife, finish_all, prepare_all
from ..core.stream import Stream
from ..driver.protocol import Access
from ..errors import CuglueError
from ..layout import CopyShape
from .operands import Operand

#: ``(array, operand, access, shape)``: what the operand was made from, the operand, what is done with it, and the bytes
#: touched from the operand's first one on; None: all of them. A plain tuple, because every launch makes some.
Use = tuple[Any, Operand, Access, CopyShape | None]


class Uses:
    """What one operation (or one command) does with memory. A block used twice is used once, in both ways."""

    __slots__ = ("blocks", "entries", "partners")

    def __init__(self) -> None:
        self.entries: list[Use] = []
        self.blocks: dict[BlockLife, Access] = {}  # blocks compare by identity
        self.partners: tuple[Stream, ...] = ()

    @classmethod
    def of(cls, array: Any, operand: Operand, access: Access, shape: CopyShape | None) -> Self:
        """One use alone."""
        uses = cls()
        uses.add(array, operand, access, shape)
        return uses

    def add(self, array: Any, operand: Operand, access: Access, shape: CopyShape | None = None) -> None:
        """Add a use."""
        self.entries.append((array, operand, access, shape))
        block = operand.block
        if block is not None:
            known = self.blocks.get(block)
            self.blocks[block] = access if known is None or known == access else Access.READ_WRITE
        if operand.partners:
            self.partners += tuple(p for p in operand.partners if p not in self.partners)

    def quiet(self, stream: Stream) -> bool:
        """Whether no question is open on ``stream``: nobody to wait for, and no byte that was never written."""
        for block, access in self.blocks.items():
            if block.write_stream is not stream or (access & 2 and block.reads) or block.taint is not None:
                return False
        for partner in self.partners:  # noqa: SIM110 - on every launch, and a generator costs more than the loop
            if partner is not stream:
                return False
        return True

    @property
    def tainted(self) -> bool:
        """Whether any block has bytes that were never written: the quick question before the exact one."""
        return any(block.taint is not None for block in self.blocks)

    def prepare(self, stream: Stream) -> int:
        """Queue on ``stream`` every wait that the operation needs; the number queued.

        Raises:
            CaptureError: a wait would cross a capture; nothing was queued on a stream that captures.
        """
        waits = 0
        for partner in self.partners:  # first: all that was queued there covers what the blocks know of it
            waits += stream.join(partner)
        return waits + prepare_all(self.blocks, stream)

    def finish(self, stream: Stream) -> int:
        """Note that the operation was enqueued; the seq it got. Partners come after it from now on."""
        seq = stream.submit()
        finish_all(self.blocks, stream, seq)
        if self.partners:
            self._hold_partners(stream)
        return seq

    def _hold_partners(self, stream: Stream) -> None:
        """Make every partner wait; where one cannot, the host waits instead, so that nothing is left unordered."""
        failed: CuglueError | None = None
        for partner in self.partners:
            try:
                partner.join(stream)
            except CuglueError as error:
                failed = failed or error
        if failed is not None:
            stream.synchronize()
            try:
                raise failed
            finally:
                failed = None  # else the error and this frame keep each other, and the buffers, alive
