"""Memory of the simulated device: allocations at real host addresses, poisoned when they come and when they go.

Owns addresses, storage and its reuse. Must not know streams or the order of work: callers say when bytes are free.
Freed addresses stay known (as dead allocations) until they are handed out again, so that a late use can be named.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...errors import OutOfMemory
from ..protocol import MemoryType
from .hazards import Operation
from .shadow import UseLog
from .watch import Watch

Bytes = npt.NDArray[np.uint8]

NEW = 0xCD
DEAD = 0xDD
_EDGE = 1 << 20  # of an allocation over _POISON_WHOLE only this much is poisoned at either end
_POISON_WHOLE = 16 << 20
_KEEP = 256 << 20  # bytes of freed storage kept for reuse and for late readers


@dataclass(eq=False, slots=True)
class Allocation:
    """Bytes at an address. ``kind`` says which call gave them; ``end`` is the operation that ended their life."""

    ptr: int
    nbytes: int
    device: int
    type: MemoryType
    kind: str
    data: Bytes
    began: Operation
    live: bool = True
    end: Operation | None = None
    read_only: bool = False
    log: UseLog = field(default_factory=UseLog)
    watch: Watch | None = None


def poison(data: Bytes, value: int) -> None:
    """Overwrite ``data``; of a large one only both ends, so that it does not become resident."""
    if data.nbytes <= _POISON_WHOLE:
        data.fill(value)
    else:
        data[:_EDGE].fill(value)
        data[-_EDGE:].fill(value)


class Storage:
    """Page-aligned host memory, reused last in first out so that addresses come back at once."""

    def __init__(self, forget: Callable[[int, int], None]) -> None:
        self._forget = forget  # told what goes to the operating system: its addresses may become anybody's
        self._free: dict[int, list[Bytes]] = {}
        self._kept = 0
        self._parked: deque[Bytes] = deque()
        self._parked_bytes = 0

    def take(self, nbytes: int, *, fresh: bool = False) -> Bytes:
        """Memory of ``nbytes``; ``fresh`` gives an address that no freed allocation had."""
        size = _pages(nbytes)
        cached = self._free.get(size)
        if cached and not fresh:
            self._kept -= size
            return cached.pop()[:nbytes]
        try:
            return np.frombuffer(mmap.mmap(-1, size), np.uint8)[:nbytes]
        except (OSError, OverflowError) as error:
            raise OutOfMemory(
                "memory of the host", got=f"{nbytes} bytes asked for", requested=nbytes
            ) from error

    def park(self, data: Bytes) -> None:
        """Take storage back without reusing it for a while: a late use finds poison, not somebody else's bytes."""
        whole = data.base if isinstance(data.base, np.ndarray) else data
        self._parked.append(whole)
        self._parked_bytes += whole.nbytes
        while self._parked_bytes > _KEEP:
            oldest = self._parked.popleft()
            self._parked_bytes -= oldest.nbytes
            self._forget(oldest.ctypes.data, oldest.nbytes)

    def give(self, data: Bytes) -> None:
        """Take storage back; beyond a bound the largest goes to the operating system."""
        whole = data.base if isinstance(data.base, np.ndarray) else data
        self._free.setdefault(whole.nbytes, []).append(whole)
        self._kept += whole.nbytes
        while self._kept > _KEEP:
            largest = max(size for size, blocks in self._free.items() if blocks)
            oldest = self._free[largest].pop(0)
            self._forget(oldest.ctypes.data, largest)
            self._kept -= largest


class AddressSpace:
    """Which allocation an address belongs to, dead ones included."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._at: dict[int, Allocation] = {}

    def add(self, allocation: Allocation) -> None:
        """Put an allocation in; dead ones that it covers are forgotten."""
        self.forget(allocation.ptr, allocation.nbytes)
        insort(self._bases, allocation.ptr)
        self._at[allocation.ptr] = allocation

    def forget(self, ptr: int, nbytes: int) -> None:
        """Nothing dead is known of these addresses any more."""
        index = max(bisect_right(self._bases, ptr) - 1, 0)
        while index < len(self._bases) and self._bases[index] < ptr + nbytes:
            base = self._bases[index]
            old = self._at[base]
            if base + old.nbytes > ptr and not old.live:
                del self._bases[index], self._at[base]
            else:
                index += 1

    def find(self, ptr: int) -> Allocation | None:
        """The live or dead allocation that holds ``ptr``."""
        index = bisect_right(self._bases, ptr) - 1
        if index < 0:
            return None
        found = self._at[self._bases[index]]
        return found if ptr < found.ptr + found.nbytes else None

    def exact(self, ptr: int) -> Allocation | None:
        """The live allocation that starts at ``ptr``."""
        found = self._at.get(ptr)
        return found if found is not None and found.live else None

    def live(self) -> list[Allocation]:
        """All live allocations."""
        return [a for a in self._at.values() if a.live]


def host_bytes(ptr: int, nbytes: int) -> Bytes:
    """Bytes of ordinary host memory that the caller keeps alive."""
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(ptr))


def _pages(nbytes: int) -> int:
    page = mmap.PAGESIZE
    return max(page, (nbytes + page - 1) // page * page)
