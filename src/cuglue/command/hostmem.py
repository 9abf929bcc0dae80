"""Host memory that copies go through: pinned where there is some, ordinary otherwise.

Owns :class:`HostBuffer`, and the pool that pinned memory comes from and goes back to. Must not know copies, streams or
futures: whoever lets the device use a buffer keeps it alive until the device is done.
"""

from __future__ import annotations

import ctypes
import threading
import types
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..arguments import whole_of
from ..core.device import DeviceState
from ..errors import CuglueError, LayoutError, OutOfMemory

_BYTES = np.dtype(np.uint8)
_SMALLEST = 4096  # bytes of one pinned allocation
_KEEP = 1 << 30  # bytes of pinned memory that may lie idle


class HostBuffer(np.ndarray[Any, Any]):
    """Bytes of host memory as an array: what a read gives, and what :meth:`Command.reserve_cpu` gives.

    It has the buffer protocol, and ``numpy.asarray`` makes a plain array of it without a copy. Arithmetic gives plain
    arrays. Views and copies (``astype``, ``deepcopy``, an index) are of this class, too; a copy is ordinary memory.
    """

    _ptr = 0  # the address where it is known, of the whole alone: views have no such attribute of their own

    @property
    def pinned(self) -> bool:
        """True if it is pinned memory: the device reaches it without an intermediate copy."""
        return isinstance(root_of(self), PinnedMemory)

    def __array_wrap__(
        self, array: npt.NDArray[Any], context: Any = None, return_scalar: bool = False
    ) -> Any:
        return array[()] if return_scalar else np.asarray(array)


def root_of(array: Any) -> Any:
    """What owns the memory of an array, through all views of views."""
    while isinstance(array, (np.ndarray, memoryview)):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return array


class PinnedMemory:
    """One pinned allocation, as the end of the chain of arrays that use it; goes back to its pool when dropped.

    Every one is an array of ctypes, too: NumPy takes those in half the time of an array interface.
    """

    __slots__ = ()
    pool: HostPool | None = None
    capacity = 0

    def __del__(self) -> None:
        if self.pool is not None:
            self.pool.give(self.capacity, ctypes.addressof(self))  # type: ignore[arg-type] # an array


@cache
def _pinned(capacity: int) -> Any:
    """The type of pinned allocations of so many bytes."""
    plain = ctypes.c_ubyte * capacity
    made: Any = types.new_class("PinnedMemory", (PinnedMemory, plain))
    made.capacity = capacity
    return made


class HostPool:
    """Pinned memory of one device's copies. Sizes are rounded up by at most an eighth, so that they come again."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self.simulated = state.capabilities.simulated
        self._lock = threading.Lock()
        self._idle: dict[int, list[int]] = {}
        self._idle_bytes = 0
        self._closed = False
        self.returned: deque[tuple[int, int]] = deque()  # (capacity, ptr)

    def take(
        self, nbytes: int, *, grow: bool = True, reclaim: Callable[[], None] | None = None
    ) -> HostBuffer:
        """A buffer of exactly ``nbytes`` bytes, contents undefined. Pinned if that can be had, else ordinary memory.

        Args:
            nbytes: size in bytes.
            grow: ask the driver for more pinned memory if none lies idle; False while a stream captures.
            reclaim: called before, for memory that may come back.

        Ordering: may block in the driver when the pool grows.
        """
        if type(nbytes) is not int or nbytes < 0:
            nbytes = whole_of("host buffer", nbytes, expected="a size in bytes, 0 or more", error=LayoutError)
        memory, ptr = self.memory(nbytes, grow, reclaim)
        made: HostBuffer = HostBuffer(nbytes, _BYTES, memory)
        made._ptr = ptr
        return made

    def memory(
        self, nbytes: int, grow: bool = True, reclaim: Callable[[], None] | None = None
    ) -> tuple[Any, int]:
        """:meth:`take` without an array: ``(what keeps the bytes and is a buffer of them, address)``."""
        capacity = _SMALLEST if nbytes <= _SMALLEST else capacity_of(nbytes)
        ptr = nbytes and (self._take_idle(capacity) or self._pinned(capacity, grow, reclaim))
        if not ptr:
            ordinary = _ordinary(nbytes)
            return ordinary, address_of(ordinary)
        try:
            memory = _pinned(capacity).from_address(ptr)
            memory.pool = self
        except BaseException:  # interrupted
            self.returned += ((capacity, ptr),)
            raise
        if self.simulated:
            self._state.driver.host_view(ptr, nbytes, True)
        return memory, ptr

    def note_use(self, buffer: npt.NDArray[Any]) -> None:
        """Tell the driver that the host uses pinned bytes from now on; the simulated one judges whether it may."""
        if self.simulated and isinstance(root_of(buffer), PinnedMemory) and buffer.nbytes:
            self._state.driver.host_view(address_of(buffer), buffer.nbytes, True)

    def _pinned(self, capacity: int, grow: bool, reclaim: Callable[[], None] | None) -> int:
        """Pinned memory where none lies idle; 0 if there is none to be had."""
        if reclaim is not None:
            reclaim()
            if ptr := self._take_idle(capacity):
                return ptr
        if not grow:
            return 0
        try:
            return self._state.driver.host_alloc(capacity)
        except CuglueError:  # whatever the driver calls it: more than it can pin may be no number to it
            self.trim()
        try:
            return self._state.driver.host_alloc(capacity)
        except CuglueError:
            return 0  # ordinary memory does it too, only slower

    def _take_idle(self, capacity: int) -> int:
        # Here and below nothing is called between finding memory and keeping it: no interrupt loses it, and no other
        # thread finds it, too.
        if self.returned and self.returned[-1][0] == capacity:
            ptr = self.returned[-1][1]  # what was dropped just now, as by whoever reads again and again
            del self.returned[-1]
            return ptr
        with self._lock:
            self._collect()
            idle = self._idle.get(capacity)
        if not idle:
            return 0
        ptr = idle[-1]
        del idle[-1]
        self._idle_bytes -= capacity
        return ptr

    def give(self, capacity: int, ptr: int) -> None:
        """Take pinned memory back. Called by finalisers: only appends."""
        self.returned.append((capacity, ptr))
        if self._closed:  # asked after: whoever closes it looks at what was returned after saying so
            self._state.retire.forget(self.trim)

    def _collect(self) -> None:
        """Take back what finalisers left (lock held)."""
        try:
            while True:
                capacity, ptr = self.returned[0]
                del self.returned[0]
                if capacity not in self._idle:
                    self._idle[capacity] = []
                self._idle[capacity] += (ptr,)
                self._idle_bytes += capacity
        except IndexError:
            pass  # that was all

    def trim(self, keep: int = 0) -> None:
        """Free idle pinned memory beyond ``keep`` bytes. May block in the driver."""
        with self._lock:
            self._collect()
            sizes = sorted(self._idle, reverse=True)
        for capacity in sizes:
            idle = self._idle[capacity]
            while self._idle_bytes > keep:
                try:
                    ptr = idle[-1]
                    del idle[-1]
                    self._idle_bytes -= capacity
                except IndexError:
                    break  # that was all of this size
                try:
                    self._state.driver.host_free(ptr)
                except CuglueError:
                    self.returned += ((capacity, ptr),)  # tried again
                    raise

    def close(self) -> None:
        """Free idle memory; what is in use is freed when it is dropped. May block in the driver."""
        self._closed = True
        self.trim()

    @property
    def idle_bytes(self) -> int:
        """Bytes of pinned memory that lie idle."""
        with self._lock:
            self._collect()
            return self._idle_bytes

    def settle(self) -> None:
        """Keep the idle memory within bounds; cheap when it is."""
        if self.returned and self.idle_bytes > _KEEP:
            self.trim(_KEEP)


def _ordinary(nbytes: int) -> HostBuffer:
    try:
        return np.empty(nbytes, np.uint8).view(HostBuffer)
    except (MemoryError, ValueError) as error:  # ValueError: more than an address can say
        raise OutOfMemory(f"host memory: {nbytes} bytes", requested=nbytes, in_use=0) from error


def capacity_of(nbytes: int) -> int:
    """The size that is allocated for ``nbytes``: at least a page, then eighths of powers of two."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    unit = 1 << max((nbytes - 1).bit_length() - 4, 12)
    return (nbytes + unit - 1) // unit * unit


def address_of(array: npt.NDArray[Any]) -> int:
    """Address of the first byte of an array."""
    if known := getattr(array, "_ptr", 0):
        return known
    if array.flags.carray and array.nbytes:  # a third of the time that its interface takes
        try:
            return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
        except ValueError:
            pass  # NumPy gives no buffer of dates
    return cast(int, array.__array_interface__["data"][0])
