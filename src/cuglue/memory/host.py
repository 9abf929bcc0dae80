"""Memory that the host can address: pinned, and shared with the device by migration.

Owns when pinned memory may be freed: the host has to wait, since there is no free in stream order. Must not know
copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from ..core.stream import Stream
from ..errors import UnsupportedError, raise_together
from ..lifecycle import BlockState, busy
from .layered import check_block
from .source import SourceResource
from .uses import TracksUses

_MOST_PENDING = 256 << 20  # bytes of pinned memory given back and still in use


class _Pending(NamedTuple):
    """Pinned memory given back, and the uses that have to be done before it is freed."""

    block: Any
    uses: tuple[tuple[Stream, int], ...]


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a block as they were lent: the last array or memoryview over them keeps this alive."""


class _Lends(SourceResource):
    """A resource that lends the bytes of its blocks, and frees none of them under the borrower."""

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self._lent: dict[int, list[ref[_Lent]]] = {}  # by generation

    def view(self, block: Any) -> memoryview:
        """The bytes of a live block, writable. What the device does there has to be waited for first.

        Ownership: borrowed. The memory is not freed while the view, or an array over it, is alive.

        Raises:
            UseAfterFree: not live.
        """
        found = self._table.find(check_block(block).id)
        lent = np.frombuffer(self._driver.host_view(found.ptr, found.size, True), np.uint8).view(_Lent)
        self._lent.setdefault(found.generation, []).append(ref(lent))
        return lent.data

    def _is_lent(self, block: Any) -> bool:
        """Whether anybody still has a view of ``block``."""
        views = [view for view in self._lent.get(block.generation, ()) if view() is not None]
        if views:
            self._lent[block.generation] = views
        else:
            self._lent.pop(block.generation, None)
        return bool(views)


class PinnedHostResource(_Lends, TracksUses):
    """Page-locked host memory, exactly as large as asked for. The device can use its addresses too.

    A block is freed once all uses of it are done: those it was told of, and what was queued on its own stream before it
    was given back. While more than 256 MiB wait for that, an allocation waits for the oldest.
    """

    _ordered = False

    def __init__(self, device: int = 0) -> None:
        """Make the resource; calls no driver.

        Args:
            device: ordinal whose streams its blocks are used on.
        """
        super().__init__(device)
        self._waiting: deque[_Pending] = deque()

    @property
    def bytes_outstanding(self) -> int:
        """Inherited."""
        waiting: int = sum(entry.block.size for entry in list(self._waiting))
        return self._table.nbytes + waiting

    def pending_per_stream(self) -> dict[int, int]:
        """Inherited."""
        found: dict[int, int] = {}
        for entry in list(self._waiting):
            stream = entry.uses[0][0].id
            found[stream] = found.get(stream, 0) + entry.block.size
        return found

    def _get_ready(self, nbytes: int) -> None:
        super()._get_ready(nbytes)
        if self._waiting:
            self._free_done()
            for entry in list(
                self._waiting
            ):  # the oldest first; some cannot go: lent, or a capture is in the way
                if sum(e.block.size for e in list(self._waiting)) <= _MOST_PENDING:
                    break
                self._await(entry)
                self._free_done()
            self._ready = not self._waiting

    def _take(self, nbytes: int, stream: Stream) -> int:
        self._state.refuse_captures("allocate")
        return self._driver.host_alloc(nbytes)

    def _drop(self, ptr: int, stream: Stream) -> None:
        self._driver.host_free(ptr)

    def _deallocate(self, block: Any) -> None:
        self._check_process()
        if block.state is not BlockState.LIVE or not self._table.remove(block):
            raise self._not_live(block)
        try:
            if self._tickets is not None:
                self._tickets.forget(block)
            # CuPy tells nobody what it queues: everything on the home stream counts.
            pending = _Pending(block, ((block.stream, block.stream.submit()), *block.uses()))
        except BaseException:  # interrupted
            self._table.add(block)
            raise
        self._waiting += (pending,)  # and no call up to there
        block.state = BlockState.RETIRED
        self._ready = False

    def _close(self) -> None:
        """Inherited. Refused while a capture keeps memory from being freed, which nobody would do later."""
        if self._waiting or len(self._table):
            self._state.refuse_captures("close a resource with memory to free")
        super()._close()

    def reap_pending(self, *, block: bool = True) -> None:
        """Free what the device is done with.

        Args:
            block: wait for it (blocks the host), except for streams that capture; else only look.

        Raises:
            SeveralErrors: more than one stream or free failed; a single failure is raised as it is.
        """
        self._check_process()
        self._state.retire.run_forgotten()
        errors: list[BaseException] = []
        waiting = list(self._waiting) if block else []
        waits: list[Callable[[], None]] = [partial(self._await, entry) for entry in waiting]
        for step in (*waits, self._free_done):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - every stream is tried; raised together
                errors.append(error)
        raise_together(f"reaping {self!r}", errors)

    @staticmethod
    def _await(entry: _Pending) -> None:
        for stream, seq in entry.uses:
            if stream.completed < seq and not stream.capturing:
                stream.synchronize()

    def _free_done(self) -> None:
        """Free what is done with; what fails stays. Other threads may give back, and reap, meanwhile."""
        if self._state.capturing:
            return  # freeing pinned memory would break the capture
        for _ in range(len(self._waiting)):
            if not self._waiting:
                return
            entry = self._waiting[0]
            del self._waiting[0]  # and no call before it: see quarantine
            try:
                if not self._is_lent(entry.block) and all(s.done(seq) for s, seq in entry.uses):
                    self._driver.host_free(entry.block.ptr)
                    entry.block.state = BlockState.FREED
            finally:
                if entry.block.state is not BlockState.FREED:
                    self._waiting += (entry,)

    def _make_room(self, stream: Stream) -> list[str]:
        tried = super()._make_room(stream)
        return [step for step in tried if "driver's pool" not in step]


class ManagedResource(_Lends):
    """Memory that host and device share by migration; may be more than the device has. Freeing waits for the device."""

    _ordered = False

    def __init__(self, device: int = 0) -> None:
        """Make the resource.

        Raises:
            UnsupportedError: the device has no managed memory.
        """
        super().__init__(device)
        if not self._state.capabilities.managed_memory:
            raise UnsupportedError(repr(self), got="a device without managed memory", reason="managed_memory")

    def _take(self, nbytes: int, stream: Stream) -> int:
        self._state.refuse_captures("allocate")
        return self._driver.malloc_managed(nbytes, self._device)

    def _drop(self, ptr: int, stream: Stream) -> None:
        self._state.refuse_captures("free memory")
        self._driver.free(ptr, self._device)

    def _deallocate(self, block: Any) -> None:
        if self._is_lent(block):
            raise busy(
                block, "a view of its bytes that is alive", "Drop the view, and the arrays over it, first"
            )
        self._release(block)
        block.state = BlockState.FREED
