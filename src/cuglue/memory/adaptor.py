"""The base of every decorator: it forwards everything, and a subclass changes one thing.

Owns the forwarding (contracts B28). Must not know what any decorator does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..arguments import shown
from ..core.block import BlockId, BlockLife
from ..core.stream import Stream
from ..driver.protocol import Access, Driver
from ..errors import CuglueError, OutOfBounds, UsageError
from ..lifecycle import BlockState
from .layered import LayeredResource, entry, keeps
from .resource import BudgetSnapshot, DeviceMemoryResource

if TYPE_CHECKING:
    from .entries import Entry
    from .hot import Way

_LIVE = BlockState.LIVE


class Adaptor(LayeredResource):
    """A resource over another one, which it keeps alive and gives as :attr:`upstream`."""

    def __init__(self, upstream: DeviceMemoryResource) -> None:
        if not isinstance(upstream, DeviceMemoryResource):
            raise UsageError(
                type(self).__name__, got=shown(upstream), expected="a DeviceMemoryResource to put it over"
            )
        self.upstream = upstream
        self._take, self._give = entry(upstream)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.upstream!r})"

    def _allocate(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        return self._take(nbytes, stream, tag, kind)

    def _deallocate(self, block: Any) -> None:
        try:
            self._give(block)
            self._given(block)
        except BaseException as error:
            # A guard below complains, or this was interrupted: upstream has the block all the same.
            if isinstance(error, OutOfBounds) or not (isinstance(error, CuglueError) or block.state is _LIVE):
                self._given(block)
            raise

    def _given(self, block: Any) -> None:
        """Upstream has ``block``; for a decorator to count. Told again after an interrupt: it counts a block once."""

    def _return(self, block: Any, error: BaseException) -> None:
        """Give ``block`` back, which nobody will get because of ``error``. Raises nothing."""
        try:
            self._give(block)
        except CuglueError as second:  # nobody else knows of it: the next drain tries again
            error.add_note(f"giving the memory back failed too: {second}")
            block.stream.state.retire.forget(partial(self._give, block))

    def _way_below(self, cls: type, take_back: Callable[[Entry], None]) -> Way | None:
        """What a decorator of class ``cls`` wraps; None if a subclass of it changes more, or below is the long way."""
        below = self.upstream
        if isinstance(below, LayeredResource) and keeps(self, cls, "_allocate", "_deallocate", "_given"):
            return below._way(take_back)
        return None

    # --- forwarded ----------------------------------------------------------------------------------------------
    @property
    def driver(self) -> Driver:
        """The driver whose memory this is."""
        return self.upstream.driver

    @property
    def device(self) -> int:
        """Ordinal that the driver knows the device by."""
        return self.upstream.device

    @property
    def device_ordinal(self) -> int:
        """Inherited."""
        return self.upstream.device_ordinal

    @property
    def bytes_outstanding(self) -> int:
        """Inherited."""
        return self.upstream.bytes_outstanding

    def reap_pending(self, *, block: bool = True) -> None:
        """Inherited."""
        self.upstream.reap_pending(block=block)

    def budget_snapshot(self) -> BudgetSnapshot | None:
        """Inherited."""
        return self.upstream.budget_snapshot()

    def supports_block_use_tracking(self) -> bool:
        """Inherited."""
        return self.upstream.supports_block_use_tracking()

    def record_block_use(self, block: Any, stream: object) -> None:
        """Inherited."""
        self.upstream.record_block_use(block, stream)

    def prepare_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Inherited."""
        self.upstream.prepare_block_use(block_id, stream, access)

    def finish_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Inherited."""
        self.upstream.finish_block_use(block_id, stream, access)

    def cancel_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Inherited."""
        self.upstream.cancel_block_use(block_id, stream, access)

    def _look(self) -> None:
        if isinstance(self.upstream, LayeredResource):
            self.upstream._look()
        else:
            self.upstream.reap_pending(block=False)

    def live_blocks(self) -> list[BlockLife]:
        """Inherited."""
        return self.upstream.live_blocks() if isinstance(self.upstream, LayeredResource) else []

    def block_at(self, address: int) -> BlockLife | None:
        """Inherited."""
        return self.upstream.block_at(address) if isinstance(self.upstream, LayeredResource) else None

    def close(self) -> None:
        """Close what lies below. Closing again does nothing."""
        self.upstream.close()
