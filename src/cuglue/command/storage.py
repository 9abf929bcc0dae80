"""Memory of a runtime: freed in stream order when the last one that refers to it lets go.

Owns :class:`Storage` and what giving its memory back takes. Must not know buffers, or where memory comes from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ..core.block import Block, BlockLife
from ..core.stream import Stream
from ..errors import UsageError
from ..exchange.owner import BlockOwner
from ..lifecycle import BlockState

Release = Callable[[Any], None]


class Storage(BlockOwner):
    """Memory of a runtime. Dropped by its last holder (a Buffer, an array made from one, a graph), it is freed on its
    home stream after everything known to use it.

    Attributes:
        exported: whether anybody but commands may use the memory.
    """

    __slots__ = ("_release", "exported")

    def __init__(self, block: BlockLife, release: Release | None) -> None:
        self.block, self._consumers, self.exported = block, {}, False
        self._release = release  # None: nothing to free. From here on an interrupt loses nothing
        super().__init__(block)

    def note_consumer(self, stream: Stream) -> None:
        """Inherited."""
        self.exported = True
        super().note_consumer(stream)

    def note_cai_reader(self) -> None:
        """Inherited."""
        self.exported = True
        super().note_cai_reader()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "device memory", got="a copy or a pickle of it", expected="its bytes: runtime.read(buffer)"
        )

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_release", None) is not None and not _ending():
            give_back = _GiveBack(self.block, self.consumers, self._release)  # type: ignore[arg-type] # asked above
            self.block.stream.state.retire.forget(give_back)  # in a finaliser: nothing but this


class _GiveBack:
    """What freeing takes; run by the retire queue."""

    __slots__ = ("_block", "_consumers", "_release")

    def __init__(self, block: BlockLife, consumers: tuple[Stream, ...], release: Release) -> None:
        self._block = block
        self._consumers = consumers
        self._release = release

    def __call__(self) -> None:
        block = self._block
        if block.state is not BlockState.LIVE:
            return  # the resource was closed meanwhile
        home = block.stream
        uses = [*block.uses(), *((stream, stream.submit()) for stream in self._consumers)]
        if not home.nameable() or home.capturing or any(stream.capturing for stream, _ in uses):
            # Nothing from outside may reach a capture, and nothing a handle that may mean another stream by now.
            home.state.retire.push(uses, self._free, nbytes=block.size)
            return
        for stream, seq in uses:
            home.wait_for(stream, seq)
        self._free()

    def _free(self) -> None:
        if self._block.state is BlockState.LIVE:  # its resource may have been closed while this waited
            self._release(self._block)


def unallocated(stream: Stream) -> Storage:
    """The memory of an empty buffer: none."""
    return Storage(Block(0, 0, stream), None)
