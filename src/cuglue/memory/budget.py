"""A limit on the bytes that a stack of resources may have out at once.

Owns the limit, the ledger of what is charged, and reservations. Must not know how memory is allocated.

A block is charged from the moment before it is allocated until it is free in fact: what was given back but may still be
in use on the device counts. ``Budget(Pool)`` so limits live bytes, ``Pool(Budget)`` the bytes a pool has reserved.

The figures have no lock. CPython changes threads, and looks at signals, only at calls and loops: lines that move bytes
from one figure to another have no call between them, so that nobody comes between and Ctrl-C loses none.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ..arguments import shown
from ..core.device import device_state
from ..core.stream import Stream
from ..errors import CuglueError, DriverError, OutOfBudget, OutOfMemory
from ..lifecycle import BlockState
from . import report
from .adaptor import Adaptor
from .block import as_size
from .cupy_plug import cupy_error
from .desks import Desk, Home, forget_closed
from .entries import Entry
from .hot import Way
from .reservation import BudgetReservation
from .resource import BudgetSnapshot, DeviceMemoryResource

_NOT_FREE_YET = (BlockState.RETIRED, BlockState.QUARANTINED)
_SETTLE_ABOVE = 4096  # blocks given back and still charged
_MOST_WAITS = 64  # for pending frees, while other threads take the room each time


class GlobalDeviceBudget(Adaptor):
    """Refuses what would bring the bytes out above ``limit``.

    Near the limit it first looks what is free by now, then waits for pending frees, and only then refuses. Budgets
    nest: the inner one limits everybody who uses it, the outer one its own callers.
    """

    def __init__(self, upstream: DeviceMemoryResource, limit: int) -> None:
        """Put a budget over ``upstream``; what that has out already is charged.

        Args:
            upstream: where memory comes from.
            limit: bytes.
        """
        super().__init__(upstream)
        self._limit = as_size(limit, "limit")
        self._before = upstream.bytes_outstanding  # not allocated through this budget
        self._reserved = self._before
        self._ledger: dict[int, int] = {}  # by generation: the bytes charged for a live block
        self._pending: dict[int, tuple[Any, int]] = {}  # by generation: given back and still charged
        self._settle_at = _SETTLE_ABOVE
        self._desks: list[Desk] = []  # of the allocator functions over this budget
        self._given_by_arrays = 0  # bytes given back there and still charged
        self._settling = threading.RLock()  # who goes through what is pending; others only append
        self._returned: deque[int] = deque()  # of reservations that were dropped; finalisers append

    def __repr__(self) -> str:
        return f"GlobalDeviceBudget({self.upstream!r}, limit={self._limit})"

    # --- figures ------------------------------------------------------------------------------------------------
    @property
    def limit(self) -> int:
        """Bytes that may be out at once."""
        return self._limit

    @property
    def reserved_bytes(self) -> int:
        """Bytes charged: live, given back but not free yet, reserved, and what was out before this budget."""
        self._settle()
        return self._reserved

    @property
    def remaining(self) -> int:
        """Bytes that may still be allocated."""
        return max(0, self._limit - self.reserved_bytes)

    def budget_snapshot(self) -> BudgetSnapshot:
        """Inherited. Of this budget, not of one below it."""
        return BudgetSnapshot(self._limit, self.reserved_bytes)

    # --- allocate, deallocate -----------------------------------------------------------------------------------
    def _allocate(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        reserved = self._reserved + nbytes
        if reserved <= self._limit:
            self._reserved = reserved
        else:
            self._claim(nbytes)
        try:
            return self._obtain(nbytes, stream, tag, kind)
        except BaseException:
            self._discharge(nbytes)
            raise

    def _obtain(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        """A block for bytes that are charged already; if that fails they stay charged."""
        block = self._fetch(nbytes, stream, tag, kind)
        size = block.size
        self._reserved += size - nbytes  # upstream rounded up: charge what is really out
        self._ledger[block.generation] = size
        return block

    def _way(self, take_back: Callable[[Entry], None]) -> Way | None:
        way = self._way_below(GlobalDeviceBudget, take_back)
        if way is None:
            return None
        desk, take_below, give_below = way[:3]
        forget_closed(self._desks)
        self._desks.append(desk)
        limit = self._limit

        def take(nbytes: int, home: Home, quiet: bool) -> Entry:
            reserved = self._reserved + nbytes
            if reserved <= limit:
                self._reserved = reserved
            else:
                self._claim(nbytes)
            try:
                try:
                    return take_below(nbytes, home, quiet)
                except OutOfMemory as error:
                    again = partial(take_below, nbytes, home, quiet)
                    entry: Entry = self._once_more(error, home.stream, again)
                    return entry
            except BaseException:
                self._discharge(nbytes)
                raise

        def give(entry: Entry) -> None:
            try:
                give_below(entry)
            finally:
                if not entry[1]:
                    self._given_by_arrays += entry[2]

        return way.wrapped(take, give)

    def _given(self, block: Any) -> None:
        if len(self._pending) > self._settle_at:
            self._settle()
            self._settle_at = max(_SETTLE_ABOVE, 2 * len(self._pending))
        desk = getattr(block, "desk", None)
        # No call from here on: interrupted before, it is told again.
        generation, size = block.generation, block.size
        if generation in self._ledger:
            size = self._ledger[generation]
            del self._ledger[generation]
        elif desk not in self._desks:  # not of an array that somebody asked about: out before this budget
            size = size if size < self._before else self._before
            self._before -= size
        if block.state in _NOT_FREE_YET:
            self._pending[generation] = block, size
        else:
            self._reserved -= size

    def _fetch(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        """A block from upstream; where the device has no memory, once more after pending frees."""
        try:
            return self._take(nbytes, stream, tag, kind)
        except OutOfMemory as error:
            return self._once_more(error, stream, partial(self._take, nbytes, stream, tag, kind))

    def _once_more(self, error: OutOfMemory, stream: Stream, again: Callable[[], Any]) -> Any:
        """What ``again`` gives after pending frees; ``error`` if there is no sense in that."""
        try:
            if isinstance(error, OutOfBudget) or stream.capturing:  # a budget below has tried that
                raise error
            try:
                self.upstream.reap_pending()
            except CuglueError as second:
                error.add_note(f"waiting for pending frees failed too: {second}")
                raise error from second
            return again()
        finally:
            del error  # else it and this frame keep each other alive

    # --- room ---------------------------------------------------------------------------------------------------
    def _claim(self, nbytes: int) -> None:
        """Charge ``nbytes``, after making room if that is needed.

        Raises:
            OutOfBudget: there is no room; nothing is charged.
        """
        if nbytes > self._limit:
            raise self._refusal(nbytes, ["nothing, because the limit is lower"])
        if self._try_claim(nbytes):
            return
        try:
            self._look()
        except CuglueError:
            pass  # waiting for it, below, says what is wrong
        if self._try_claim(nbytes):
            return
        gc.collect()  # arrays in cycles; no lock is held
        failed: CuglueError | None = None
        try:
            for _ in range(_MOST_WAITS):
                try:
                    device_state(self.driver, self.device).retire.run_forgotten()
                    self.upstream.reap_pending()
                except CuglueError as error:
                    failed = error
                if self._try_claim(nbytes):
                    return
                if failed is not None or not self._outrun(nbytes):
                    break
            tried = ["looked what is free by now", "collected garbage", "waited for pending frees"]
            raise self._refusal(nbytes, tried) from failed
        finally:
            del failed  # else it and this frame keep each other alive

    def _outrun(self, nbytes: int) -> bool:
        """Whether only pending frees are in the way: other threads took the room that was waited for."""
        with self._settling:
            held = list(self._pending.values())
            pending = sum(size for block, size in held if block.state in _NOT_FREE_YET)
            pending += self._given_by_arrays
            return pending > 0 and self._reserved - pending + nbytes <= self._limit

    def _try_claim(self, nbytes: int) -> bool:
        self._settle()
        reserved = self._reserved + nbytes
        if reserved > self._limit:
            return False
        self._reserved = reserved
        return True

    def _refusal(self, nbytes: int, tried: list[str]) -> OutOfMemory:
        below: Any = self.upstream  # a decorator cannot tell: the first that can
        while below is not None and not hasattr(below, "pending_per_stream"):
            below = getattr(below, "upstream", None)
        return cupy_error(
            OutOfBudget(
                current=self._reserved,
                requested=nbytes,
                limit=self._limit,
                in_use=self.upstream.bytes_outstanding,
                report=None if below is None else report.explain(below, nbytes, tried),
            )
        )

    def _discharge(self, nbytes: int) -> None:
        self._reserved -= nbytes

    def _settle(self) -> None:
        """Discharge what is free by now. Other threads may free meanwhile."""
        with self._settling:
            # Read before what is pending: others add to that first.
            given = self._given_by_arrays
            free = given - sum(desk.pending for desk in self._desks) if given else 0
            if free > 0:
                self._given_by_arrays -= free
                self._reserved -= free
            for generation, (block, size) in list(self._pending.items()):
                if block.state not in _NOT_FREE_YET and generation in self._pending:
                    del self._pending[generation]
                    self._reserved -= size
            while self._returned:
                self._reserved -= self._returned[0]
                del self._returned[0]
            if self._before:
                own = sum(list(self._ledger.values())) + sum(size for _, size in list(self._pending.values()))
                own += self._given_by_arrays + sum(desk.live for desk in self._desks)
                gone = self._before - max(0, self.upstream.bytes_outstanding - own)
                if gone > 0:
                    self._before -= gone
                    self._reserved -= gone

    # --- reservations -------------------------------------------------------------------------------------------
    def reserve(self, nbytes: int) -> BudgetReservation:
        """Charge ``nbytes`` now, to allocate them later without being refused.

        Ordering: blocks the host if room has to be made. Ownership: close it (or use ``with``) to give the rest back.

        Raises:
            OutOfBudget: there is no room.
        """
        size = as_size(nbytes)
        reservation = BudgetReservation(self)
        self._claim(size)
        reservation.total = reservation.remaining = size
        return reservation


def reserve(resource: DeviceMemoryResource, nbytes: int) -> BudgetReservation:
    """Reserve in the nearest budget of a stack.

    Ordering: see :meth:`GlobalDeviceBudget.reserve`.

    Raises:
        DriverError: there is no budget in it.
    """
    below: Any = resource
    while not isinstance(below, GlobalDeviceBudget):
        below = getattr(below, "upstream", None)
        if below is None:
            raise DriverError(
                f"reservation of {shown(nbytes)} bytes in {shown(resource)}",
                got="a stack without a budget",
                expected="a GlobalDeviceBudget in it",
                code=801,
                name="cudaErrorNotSupported",
            )
    budget: GlobalDeviceBudget = below
    return budget.reserve(nbytes)
