"""Stream-ordered device memory whose frees come after every use, on whatever stream.

Owns the bytes given back that the device still has. Must not know arrays or kernels. What callers tell of uses is taken
in :mod:`.uses`; what waits for what is decided by :class:`~cuglue.core.block.BlockLife`.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from ..core.block import OPEN
from ..core.stream import Stream
from ..errors import UnsupportedError, raise_together
from ..lifecycle import BlockState
from .desks import Home
from .entries import Entry
from .hot import Way, driver_way
from .layered import keeps
from .source import SourceResource
from .stream_pool import StreamPool
from .uses import TracksUses

_RETIRED = BlockState.RETIRED
_FREED = BlockState.FREED
_REAP_ABOVE = 4096  # blocks waiting to be counted as free


class AsyncCudaResource(SourceResource, TracksUses):
    """Stream-ordered device memory from the driver's own pool, with exact uses."""

    _counts_pending = True

    def __init__(
        self,
        device: int = 0,
        device_ordinal: int | None = None,
        *,
        check: bool = True,
        stream_pool: StreamPool | None = None,
    ) -> None:
        """Make the resource; calls no driver. See :class:`DirectCudaResource` for the arguments."""
        super().__init__(device, device_ordinal, check=check, stream_pool=stream_pool)
        self._retired: deque[Any] = deque()  # blocks given back that the device may still have
        self._reap_above = _REAP_ABOVE
        self._reaping = threading.RLock()  # of who counts at the desks; re-entrant for signal handlers

    # --- accounting ---------------------------------------------------------------------------------------------
    # Counted when asked for: a counter would need a lock on every allocation, a deque's append needs none.
    @property
    def pending_free_bytes(self) -> int:
        """Bytes given back and not known to be free yet."""
        arrays = sum(desk.pending for desk in self._desks)
        return arrays + sum(int(block.size) for block in list(self._retired))

    @property
    def bytes_outstanding(self) -> int:
        """Inherited."""
        return self.live_bytes + self.pending_free_bytes

    def pending_per_stream(self) -> dict[int, int]:
        """Inherited."""
        found: defaultdict[int, int] = defaultdict(int)
        for block in list(self._retired):
            found[block.write_stream.id] += block.size
        for home in self._homes():
            found[home.stream.id] += home.pending
        return {stream: nbytes for stream, nbytes in found.items() if nbytes}

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
        if len(self._retired) > self._reap_above:
            self.reap_pending(block=False)
            self._reap_above = max(
                _REAP_ABOVE, 2 * len(self._retired)
            )  # the device is behind: look less often

    def _deallocate(self, block: Any) -> None:
        stream = self._release(block)
        block.state = _RETIRED  # at once: whatever is interrupted from here on, it is given back
        block.reads = None
        block.write_stream, block.write_seq = stream, OPEN
        self._retired.append(block)
        block.write_seq = stream.submit()  # its last use is its free
        if self._tickets is not None:
            self._tickets.forget(block)
        if len(self._retired) > self._reap_above:
            self._ready = False  # the next allocation looks which of them are free

    def _way(self, take_back: Callable[[Entry], None]) -> Way | None:
        if not keeps(self, AsyncCudaResource, "_take", "_drop", "_allocate", "_deallocate"):
            return None
        return driver_way(self, take_back)

    def _homes(self) -> list[Home]:
        return [home for desk in list(self._desks) for home in desk.homes()]

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
            if entry.write_seq == OPEN:  # whoever gives it back is in the middle of that, or was interrupted
                entry.write_seq = entry.write_stream.submit()
            newest[entry.write_stream] = max(entry.write_seq, newest.get(entry.write_stream, 0))
        with self._reaping:
            for desk in self._desks:
                desk.count()
        for home in self._homes():
            if home.batches:
                newest[home.stream] = max(home.batches[-1][0], newest.get(home.stream, 0))
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
        if block:
            for desk in self._desks:
                desk.leave()  # a stream that is not used again need not live as long as this resource
        raise_together(f"reaping {self!r}", errors)

    def _settle(self, done: dict[Stream, int]) -> None:
        """What was freed up to these operations is free now. Other threads may free, and reap, meanwhile."""
        with self._reaping:
            for desk in self._desks:
                desk.settle(done)
        for _ in range(len(self._retired)):
            try:
                block = self._retired[0]
                del self._retired[0]  # and no call up to the next lines: an interrupt would lose it
            except IndexError:
                return  # another thread reaps too
            if block.write_stream in done and block.write_seq <= done[block.write_stream]:
                block.state = _FREED
            else:
                self._retired.append(block)
