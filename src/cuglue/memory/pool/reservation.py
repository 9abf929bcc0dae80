"""Memory that was reserved in the pools of a stream.

Owns who has the span: the reservation until it is released, its memory after it was dropped. Must not know pools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UsageError
from ...lifecycle import BlockState
from .spans import Span

if TYPE_CHECKING:
    from .stream_memory import StreamMemory


class Reservation:
    """Memory of a stream that need not be there yet. Give it back with :meth:`release`.

    That of a reservation which is dropped instead stays out of use until the pool is closed.

    Attributes:
        nbytes: bytes asked for.
        span: what it has, as long as it is LIVE.
        state: FREED once it was released.
    """

    __slots__ = ("_memory", "nbytes", "span", "state")

    span: Span

    def __init__(self, memory: StreamMemory, nbytes: int) -> None:
        self._memory = memory
        self.nbytes = nbytes
        self.state = BlockState.FREED

    def resolve(self) -> int:
        """The address; in a dry run, the memory behind it is taken now.

        Raises:
            OutOfMemory: there is none.
            UsageError: released.
        """
        if self.state is not BlockState.LIVE:
            raise UsageError(repr(self), got="resolve()", expected="a reservation that was not released")
        return self._memory.address(self.span)

    def release(self) -> None:
        """Give it back, after the work on its stream so far. Releasing again does nothing."""
        self._memory.put(self.span, self)

    def __del__(self) -> None:
        if getattr(self, "state", None) is BlockState.LIVE:
            self._memory.abandon(self.span)

    def __repr__(self) -> str:
        return f"Reservation({self.nbytes} bytes{', released' if self.state is not BlockState.LIVE else ''})"
