"""The public calls by which a caller tells of uses of a block, for every resource that tracks them.

Owns the calls and the tickets that tie a ``prepare`` to its ``finish``. Must not know where memory comes from. What
waits for what is decided by :class:`~cuglue.core.block.BlockLife`.
"""

from __future__ import annotations

from typing import Any

from ..arguments import shown, whole_of
from ..core.block import BlockId, BlockLife
from ..core.device import DeviceState
from ..core.stream import Stream
from ..driver.protocol import Access
from ..errors import ArgumentError
from .layered import LayeredResource, check_block, check_block_id
from .table import BlockTable
from .tickets import Tickets


class TracksUses(LayeredResource):
    """A resource with a table of live blocks, whose uses it is told."""

    _table: BlockTable
    _tickets: Tickets | None = None  # made at the first use that is told

    @property
    def _state(self) -> DeviceState:
        raise NotImplementedError

    def supports_block_use_tracking(self) -> bool:
        """Inherited."""
        return True

    def pending_use_event_count(self, ptr: int) -> int | None:
        """Uses that a free of the block at ``ptr`` has to come after; None if no block starts there."""
        block = self._table.at(whole_of("address", ptr))
        return None if block is None else block.use_count()

    def prepare_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Inherited. Another thread's conflicting use of the block, prepared but not finished, is waited for."""
        user, block = self._used(block_id, stream, "prepare_block_use")
        self._uses.open(block, user, check_access(access))

    def finish_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Inherited. A write that was not prepared keeps the uses before it: a free still waits for them."""
        user, block = self._used(block_id, stream, "finish_block_use")
        self._uses.close(block, user, check_access(access))

    def cancel_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Inherited."""
        user, block = self._used(block_id, stream, "cancel_block_use")
        self._uses.cancel(block, user, check_access(access))

    def record_block_use(self, block: Any, stream: object) -> None:
        """Inherited."""
        user, found = self._used(check_block(block).id, stream, "record_block_use")
        self._uses.note(found, user)

    @property
    def _uses(self) -> Tickets:
        tickets = self._tickets
        if tickets is None:
            with self._state.ordering:
                tickets = self._tickets = self._tickets or Tickets(self._state.ordering)
        return tickets

    def _used(self, block_id: BlockId, stream: object, call: str) -> tuple[Stream, BlockLife]:
        check_block_id(self, block_id, call)
        return self._stream(stream), self._table.find(block_id)


def check_access(access: object) -> Access:
    """``access``, if it is an :class:`Access`: its numbers are not, nor is what equals them (``True``, ``2.0``).

    Raises:
        ArgumentError: it is none (a ValueError).
    """
    if not isinstance(access, Access):
        raise ArgumentError("access", got=shown(access), expected="Access.READ, WRITE or READ_WRITE")
    return access
