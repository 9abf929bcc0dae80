"""Memory that grows in place: addresses reserved once, pages put behind them as they are needed.

Owns the mappings of each block. Must not know pools: those call :meth:`ExpandableCudaResource.extend` and
:meth:`ExpandableCudaResource.shrink` where they find them, and so have one long page for each stream instead of many
that cannot be merged.

Unmapping waits for the device, so this is memory to keep, under a pool, and not to allocate and free.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from ...arguments import whole_of
from ...core.stream import Stream
from ...errors import ArgumentError, CuglueError, OutOfMemory, UnsupportedError
from ...lifecycle import BlockState
from ..layered import check_block
from ..source import SourceResource
from ..table import gone

PIECE = 32 << 20  # bytes of one mapping at most: what can be given back from the end on its own


@dataclass(slots=True)
class _Segment:
    """Reserved addresses and what lies behind them, from the start without gaps: ``(bytes, handle)``."""

    ptr: int
    reserved: int
    mapped: list[tuple[int, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.mapped)


class ExpandableCudaResource(SourceResource):
    """Device memory whose blocks can be extended where they are. For use under a :class:`PoolResource`."""

    _ordered = False

    def __init__(self, device: int = 0, *, shareable: bool = False, most: int | None = None) -> None:
        """Make the resource; calls no driver.

        Args:
            device: ordinal.
            shareable: memory that :meth:`export_fds` can share with other processes.
            most: bytes that one block can grow to; None, or more than that: as much as the device has.
        """
        if not isinstance(shareable, bool):
            raise ArgumentError("shareable", got=shareable, expected="True or False")
        if most is not None:
            most = whole_of("most", most, 1, expected="bytes, 1 or more, or None", error=ArgumentError)
        super().__init__(device)
        self.shareable = shareable
        self._most = most
        self._segments: dict[int, _Segment] = {}

    def _get_ready(self, nbytes: int) -> None:
        super()._get_ready(nbytes)
        self._ready = False
        self._check_able()
        self._ready = True

    def _check_able(self) -> None:
        able = self._state.capabilities
        if not able.virtual_memory or (self.shareable and not able.external_fd):
            raise UnsupportedError(
                repr(self),
                got="a device without " + ("shareable " if able.virtual_memory else "") + "virtual memory",
                hint="Use AsyncCudaResource",
                reason="external_fd" if able.virtual_memory else "virtual_memory",
            )

    @property
    def bytes_outstanding(self) -> int:
        """Inherited. Whole pages."""
        return sum(segment.nbytes for segment in list(self._segments.values()))

    # --- blocks -------------------------------------------------------------------------------------------------
    def _take(self, nbytes: int, stream: Stream) -> int:
        size = self.whole(nbytes)
        total = self._driver.memory_info(self._device).total
        reserved = max(size, self.whole(min(self._most or total, total)))
        segment = _Segment(self._driver.vmm_reserve(reserved, self._device), reserved)
        try:
            self._map(segment, size)
        except BaseException:
            self._let_go(segment)
            raise
        self._segments[segment.ptr] = segment
        return segment.ptr

    def _drop(self, ptr: int, stream: Stream) -> None:
        # Before the address is free: another thread may be given it at once, and that entry must stay.
        segment = self._segments.pop(ptr)
        whole = segment.nbytes
        try:
            self._end(segment)
        except CuglueError:
            if segment.nbytes == whole:
                self._segments[ptr] = segment
                raise  # the block is as it was
            self._let_go(segment)

    def _end(self, segment: _Segment) -> None:
        self._unmap(segment, segment.nbytes)
        self._driver.vmm_free(segment.ptr, segment.reserved)

    def _let_go(self, segment: _Segment) -> None:
        """End a segment that nobody may use any more; what fails is tried again when the device's queue is drained."""
        try:
            self._end(segment)
        except CuglueError:
            self._state.retire.push((), partial(self._end, segment))

    def _deallocate(self, block: Any) -> None:
        self._release(block)
        block.state = BlockState.FREED

    @cached_property
    def granule(self) -> int:
        """Bytes that every mapping is a multiple of."""
        self._check_able()
        return self._driver.vmm_granularity(self._device)

    def whole(self, nbytes: int) -> int:
        """``nbytes`` rounded up to what can be mapped."""
        return -(-nbytes // self.granule) * self.granule

    # --- growing in place ---------------------------------------------------------------------------------------
    def extend(self, block: Any, length: int, nbytes: int) -> None:
        """Put ``nbytes`` more bytes, whole pages, behind the first ``length`` of ``block``.

        Ordering: usable at once, on every stream.

        Raises:
            OutOfMemory: no memory, or no addresses; nothing has changed.
        """
        segment = self._segment(block)
        if length + nbytes > segment.reserved:
            raise OutOfMemory(
                repr(self),
                got=f"{nbytes} bytes to extend {length} by",
                expected=f"at most {segment.reserved} in one block",
                requested=nbytes,
                in_use=self.bytes_outstanding,
            )
        self._map(segment, length + nbytes - segment.nbytes)

    def ending(self, block: Any, length: int) -> int:
        """By how many bytes the first ``length`` of ``block`` can be shrunk at once; 0: its first mapping stays."""
        starts = itertools.accumulate(nbytes for nbytes, _ in self._segment(block).mapped)
        return min((length - start for start in starts if start < length), default=0)

    def shrink(self, block: Any, length: int, nbytes: int) -> None:
        """Take away the last ``nbytes`` (an :meth:`ending`) of the first ``length`` bytes of ``block``.

        Ordering: blocks the host until the device is done with them. If it fails, the block is as it was.
        """
        segment = self._segment(block)
        self._unmap(segment, segment.nbytes - length)  # what a failed extension left
        self._unmap(segment, nbytes)

    def _segment(self, block: Any) -> _Segment:
        """What lies behind a live block.

        Raises:
            UsageError: no block.
            UseAfterFree: no block of this resource.
        """
        found = self._segments.get(check_block(block).ptr)
        if found is None or self._table.at(block.ptr) is not block:
            raise gone(block.ptr, block.generation)
        return found

    def _map(self, segment: _Segment, nbytes: int) -> None:
        before = len(segment.mapped)
        try:
            while nbytes > 0:
                piece = min(nbytes, max(PIECE, self.granule))
                self._map_one(segment, piece)
                nbytes -= piece
        except BaseException as error:
            self._undo(segment, before, error)
            raise

    def _map_one(self, segment: _Segment, nbytes: int) -> None:
        handle = self._driver.vmm_create(nbytes, self._device, self.shareable)
        try:
            self._driver.vmm_map(segment.ptr + segment.nbytes, nbytes, handle, self._device)
        except BaseException:
            self._release_handle(handle)
            raise
        segment.mapped.append((nbytes, handle))

    def _undo(self, segment: _Segment, before: int, error: BaseException) -> None:
        """Unmap what came after the first ``before`` mappings; what cannot be stays, as memory of the block."""
        try:
            self._unmap(segment, sum(nbytes for nbytes, _ in segment.mapped[before:]))
        except CuglueError as second:
            error.add_note(f"taking back what was mapped failed too: {second}")

    def _unmap(self, segment: _Segment, nbytes: int) -> None:
        while nbytes > 0:
            size, handle = segment.mapped[-1]
            self._driver.vmm_unmap(segment.ptr + segment.nbytes - size, size)
            segment.mapped.pop()
            nbytes -= size
            self._release_handle(handle)

    def _release_handle(self, handle: int) -> None:
        try:
            self._driver.vmm_release(handle)
        except CuglueError:
            self._state.retire.push((), partial(self._driver.vmm_release, handle))

    # --- sharing ------------------------------------------------------------------------------------------------
    def export_fds(self, block: Any) -> list[tuple[int, int]]:
        """``(fd, bytes)`` of the memory of ``block`` in order of address; the caller closes the fds.

        Raises:
            UnsupportedError: the resource was not made ``shareable``.
        """
        if not self.shareable:
            raise UnsupportedError(
                repr(self),
                got="memory that is not shareable",
                hint="Pass shareable=True",
                reason="external_fd",
            )
        made: list[tuple[int, int]] = []
        try:
            for nbytes, handle in self._segment(block).mapped:
                made.append((self._driver.vmm_export_fd(handle), nbytes))
        except BaseException:
            for fd, _ in made:
                os.close(fd)
            raise
        return made
