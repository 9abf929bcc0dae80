"""Stream-ordered device memory whose frees come after every use, on whatever stream.

Owns the uses that callers tell of, and the bytes given back that the device still has. Must not know arrays or kernels.

What waits for what is decided by :class:`~cuglue.core.block.BlockLife`; here are the public calls around it, with the
tickets that tie a ``prepare`` to its ``finish``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from ..core.block import BlockId, BlockLife
from ..core.stream import Stream
from ..driver.protocol import Access
from ..errors import SeveralErrors, StreamMisuse, UnsupportedError
from ..lifecycle import BlockState
from .source import SourceResource, wrong_device
from .tickets import Tickets

_RETIRED = BlockState.RETIRED
_FREED = BlockState.FREED
_REAP_ABOVE = 4096  # blocks of one stream waiting to be counted as free


class AsyncCudaResource(SourceResource):
    """Stream-ordered device memory from the driver's own pool, with exact uses."""

    def __init__(self, device: int = 0, device_ordinal: int | None = None, *, check: bool = True) -> None:
        """Make the resource; calls no driver. See :class:`DirectCudaResource` for the arguments."""
        super().__init__(device, device_ordinal, check=check)
        self._retired: deque[Any] = deque()  # blocks given back that the device may still have
        self._tickets: Tickets | None = None  # made at the first use that is told

    # --- accounting ---------------------------------------------------------------------------------------------
    # Counted when asked for: a counter would need a lock on every allocation, a deque's append needs none.
    @property
    def live_bytes(self) -> int:
        """Bytes handed out and not given back."""
        return self._table.nbytes

    @property
    def pending_free_bytes(self) -> int:
        """Bytes given back and not known to be free yet."""
        return sum(block.size for block in list(self._retired))

    @property
    def bytes_outstanding(self) -> int:
        """Inherited."""
        return self.live_bytes + self.pending_free_bytes

    def pending_per_stream(self) -> dict[int, int]:
        """Inherited."""
        found: defaultdict[int, int] = defaultdict(int)
        for block in list(self._retired):
            found[block.write_stream.id] += block.size
        return dict(found)

    @property
    def pending_per_stream_total(self) -> int:
        """Sum of :meth:`pending_per_stream`."""
        return sum(self.pending_per_stream().values())

    # --- allocate, deallocate -----------------------------------------------------------------------------------
    def _get_ready(self, nbytes: int) -> None:
        super()._get_ready(nbytes)
        if not self._state.capabilities.async_memory:
            self._ready = False
            raise UnsupportedError(
                repr(self),
                got="a device without stream-ordered memory",
                hint="Use DirectCudaResource, or a pool over it",
                reason="async_memory",
            )
        if len(self._retired) > _REAP_ABOVE:
            self.reap_pending(block=False)

    def _take(self, nbytes: int, stream: Stream) -> int:
        return self._driver.malloc_async(nbytes, stream.handle, self._device)

    def _drop(self, ptr: int, stream: Stream) -> None:
        self._driver.free_async(ptr, stream.handle, self._device)

    def _deallocate(self, block: Any) -> None:
        stream = self._release(block)
        if self._tickets is not None:
            self._tickets.forget(block)
        block.state = _RETIRED
        block.reads = None
        block.write_stream, block.write_seq = stream, stream.submit()  # its last use is its free
        self._retired.append(block)
        if len(self._retired) > _REAP_ABOVE:
            self._ready = False  # the next allocation looks which of them are free

    # --- reap ---------------------------------------------------------------------------------------------------
    def reap_pending(self, *, block: bool = True) -> None:
        """Count as free what the device is done with.

        Args:
            block: wait for the streams that have frees pending (blocks the host); else only look. Streams that
                capture are left alone either way.

        Every stream is tried; what failed stays pending.

        Raises:
            SeveralErrors: more than one stream failed; a single failure is raised as it is.
        """
        self._check_process()
        self._state.retire.run_forgotten()
        newest: dict[Stream, int] = {}
        for entry in list(self._retired):
            newest[entry.write_stream] = max(entry.write_seq, newest.get(entry.write_stream, 0))
        done: dict[Stream, int] = {}
        errors: list[BaseException] = []
        for stream, seq in newest.items():
            try:
                if block and seq > stream.completed and not stream.capturing:
                    stream.synchronize()
                    done[stream] = seq
                else:
                    done[stream] = seq if stream.done(seq) else stream.completed
            except Exception as error:  # noqa: BLE001 - every stream is tried; raised below
                errors.append(error)
        self._settle(done)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise SeveralErrors(f"reaping {self!r}", errors=errors) from errors[0]

    def _settle(self, done: dict[Stream, int]) -> None:
        """What was freed up to these operations is free now. Other threads may free, and reap, meanwhile."""
        for _ in range(len(self._retired)):
            try:
                block = self._retired.popleft()
            except IndexError:
                return  # another thread reaps too
            if block.write_seq <= done.get(block.write_stream, 0):
                block.state = _FREED
            else:
                self._retired.append(block)

    # --- uses ---------------------------------------------------------------------------------------------------
    def supports_block_use_tracking(self) -> bool:
        """Inherited."""
        return True

    def pending_use_event_count(self, ptr: int) -> int | None:
        """Uses that a free of the block at ``ptr`` has to come after; None if no block starts there."""
        block = self._table.at(ptr)
        return None if block is None else block.use_count()

    def prepare_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Inherited. Another thread's conflicting use of the block, prepared but not finished, is waited for."""
        user, block = self._used(block_id, stream, "prepare_block_use")
        self._uses.open(block, user, Access(access))

    def finish_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Inherited. A write that was not prepared keeps the uses before it: a free still waits for them."""
        user, block = self._used(block_id, stream, "finish_block_use")
        self._uses.close(block, user, Access(access))

    def cancel_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Inherited."""
        user, block = self._used(block_id, stream, "cancel_block_use")
        self._uses.cancel(block, user, Access(access))

    def record_block_use(self, block: Any, stream: object) -> None:
        """Inherited."""
        user, found = self._used(block.id, stream, "record_block_use")
        self._uses.note(found, user)

    @property
    def _uses(self) -> Tickets:
        with self._state.ordering:
            if self._tickets is None:
                self._tickets = Tickets(self._state.ordering)
            return self._tickets

    def _used(self, block_id: BlockId, stream: object, call: str) -> tuple[Stream, BlockLife]:
        if not isinstance(block_id, BlockId):
            raise StreamMisuse(call, got=repr(block_id), expected="a BlockId: give block.id")
        if block_id.device_ordinal not in (self._ordinal, self._device):
            raise wrong_device(self, block_id.device_ordinal, call)
        return self._stream(stream), self._table.find(block_id)
