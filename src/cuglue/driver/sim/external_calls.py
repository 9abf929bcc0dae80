"""Driver calls for memory and semaphores that another API or process owns.

Owns imports by descriptor or handle. The memory is really mapped and the semaphore's counter really shared, so another
process (or a test holding the descriptor) sees what the device does. Must not know who is at the other end. Two
addresses of the same bytes are different memory to the oracle: an order missing between them is not seen.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from ..protocol import Access, ArrayInfo, MemoryType
from . import codes
from .array_calls import Array, ArrayCalls, array_bytes
from .memory import Allocation, Bytes
from .queues import Handles, StillRunning
from .ranges import linear
from .shadow import Clock, Use, join, knows
from .shared import map_fd, new_fd
from .state import driver_call

_MEMORY_KINDS = ("opaque", "opaque_kmt", "d3d12_heap", "d3d12_resource", "d3d11")
_FENCE_KINDS = ("d3d12_fence", "d3d11_fence", "opaque")
_COUNTER_BYTES = 8


@dataclass(eq=False, slots=True)
class External:
    """An imported allocation; ``data`` maps it whole, ``held`` counts buffers and arrays over it."""

    data: Bytes
    device: int
    fd: int
    held: int = 0


@dataclass(eq=False, slots=True)
class Mipmapped:
    """What ``external_array`` made."""

    memory: External
    array: int


@dataclass(eq=False, slots=True)
class Semaphore:
    """An imported semaphore: a counter in shared memory, and the signals queued here that a wait may follow."""

    counter: Bytes
    timeline: bool
    device: int
    signals: list[tuple[int, Clock]] = field(default_factory=list)
    newest: Use | None = None

    @property
    def value(self) -> int:
        """The counter; of a binary semaphore 1 while signalled."""
        return int(self.counter.view(np.uint64)[0])

    def set(self, value: int) -> None:
        """Store the counter."""
        self.counter.view(np.uint64)[0] = value


class ExternalCalls(ArrayCalls):
    """External memory and semaphores."""

    _externals: Handles[External]
    _buffers: dict[int, External]
    _mipmapped: Handles[Mipmapped]
    _semaphores: Handles[Semaphore]
    _win32: dict[int, int]

    # --- what there is to import ----------------------------------------------------------------------------------
    def semaphore_fd(self, value: int = 0) -> int:
        """A descriptor that ``import_semaphore_fd`` takes: eight bytes holding the counter."""
        fd = new_fd(_COUNTER_BYTES)
        os.pwrite(fd, value.to_bytes(_COUNTER_BYTES, "little"), 0)
        return fd

    def semaphore_value(self, semaphore: int) -> int:
        """The counter of an imported semaphore now; of a binary one 1 while signalled."""
        with self._changed:
            return self._semaphore(semaphore, "semaphore_value").value

    def fake_win32(self, fd: int) -> int:
        """A handle-like number that stands for ``fd`` in the calls that take Windows handles; ``fd`` stays yours."""
        with self._changed:
            handle = 4 * (len(self._win32) + 1)
            self._win32[handle] = fd
            return handle

    # --- memory ---------------------------------------------------------------------------------------------------
    @driver_call
    def import_memory_fd(self, fd: int, nbytes: int, dedicated: bool, dma_buf: bool, device: int) -> int:
        """Map an allocation; the descriptor is the driver's if this succeeds."""
        self._needs("external_dma_buf" if dma_buf else "external_fd", "import_memory_fd")
        return self._import(fd, nbytes, device, "import_memory_fd", fd)

    @driver_call
    def import_memory_win32(self, kind: str, handle: int, nbytes: int, dedicated: bool, device: int) -> int:
        """Map what :meth:`fake_win32` stands for; the handle stays the caller's."""
        self._needs("external_win32", "import_memory_win32")
        fd = self._win32_fd(kind, _MEMORY_KINDS, handle, "import_memory_win32")
        return self._import(fd, nbytes, device, "import_memory_win32", -1)

    @driver_call
    def external_buffer(self, memory: int, offset: int, nbytes: int) -> int:
        """Address of a range; each call gives another one."""
        found = self._external(memory, "external_buffer")
        data = self._part(found, offset, nbytes, "external_buffer")
        began = self._operation("external_buffer")
        allocation = self._admit(data, found.device, MemoryType.DEVICE, "external", began)
        self._buffers[allocation.ptr] = found
        found.held += 1
        return allocation.ptr

    @driver_call
    def external_buffer_free(self, ptr: int, device: int) -> None:
        """Run everything queued on the device, then free the address."""
        self._device(device, "external_buffer_free")
        self._unsafe_in_capture("external_buffer_free")
        allocation = self._owned(ptr, ("external",), "external_buffer_free", device)
        self._drain([device], "external_buffer_free")
        self._end(allocation, self._operation("external_buffer_free"))
        self._storage.park(allocation.data)
        self._buffers.pop(ptr).held -= 1

    @driver_call
    def external_array(self, memory: int, offset: int, info: ArrayInfo) -> tuple[int, int]:
        """An array over a range, rows tight."""
        found = self._external(memory, "external_array")
        data = self._part(found, offset, array_bytes(info), "external_array")
        began = self._operation("external_array")
        allocation = Allocation(
            data.ctypes.data, data.nbytes, found.device, MemoryType.DEVICE, "external", data, began
        )
        array = self._arrays.add(Array(info, allocation, "external"))
        found.held += 1
        return self._mipmapped.add(Mipmapped(found, array)), array

    @driver_call
    def external_array_free(self, mipmapped: int) -> None:
        """Free it; a queued use that the host has not waited for is a hazard."""
        found = self._mipmapped.get(mipmapped)
        if found is None:
            raise codes.refused(
                codes.INVALID_RESOURCE_HANDLE, "external_array_free", "mipmapped array", got=f"{mipmapped:#x}"
            )
        allocation = self._array(found.array, "external_array_free").allocation
        whole = linear(0, allocation.nbytes)
        self._end(allocation, self._host_use(allocation, whole, Access.WRITE, "external_array_free"))
        self._arrays.pop(found.array)
        self._mipmapped.pop(mipmapped)
        found.memory.held -= 1

    @driver_call
    def external_memory_destroy(self, memory: int) -> None:
        """Give the import back, and with it the descriptor."""
        found = self._external(memory, "external_memory_destroy")
        if found.held:
            raise codes.refused(
                codes.INVALID_VALUE,
                "external_memory_destroy",
                "memory",
                got=f"{found.held} buffers or arrays over it",
            )
        self._externals.pop(memory)
        if found.fd >= 0:
            os.close(found.fd)

    # --- semaphores -----------------------------------------------------------------------------------------------
    @driver_call
    def import_semaphore_fd(self, fd: int, timeline: bool, device: int) -> int:
        """Share a counter; the descriptor is the driver's if this succeeds."""
        self._needs("timeline_semaphores" if timeline else "external_fd", "import_semaphore_fd")
        handle = self._import_semaphore(fd, timeline, device, "import_semaphore_fd")
        os.close(fd)
        return handle

    @driver_call
    def import_semaphore_win32(self, kind: str, handle: int, device: int) -> int:
        """Share the counter behind a handle of :meth:`fake_win32`; a fence is a timeline, an opaque one is binary."""
        self._needs("external_win32", "import_semaphore_win32")
        fd = self._win32_fd(kind, _FENCE_KINDS, handle, "import_semaphore_win32")
        return self._import_semaphore(fd, kind != "opaque", device, "import_semaphore_win32")

    @driver_call
    def semaphore_signal(self, semaphore: int, value: int, stream: int) -> None:
        """Store the value once the work before it is done; a timeline never goes back."""
        found = self._semaphore(semaphore, "semaphore_signal")
        queue = self._queue(stream, "semaphore_signal", found.device)

        def run() -> None:
            found.set(max(value, found.value) if found.timeline else 1)

        found.newest = self._submit(queue, "semaphore_signal", run)
        if queue.capture is None:
            # What the host knows, every later wait knows: those need not be remembered.
            found.signals = [s for s in found.signals if not (found.timeline and knows(self._host, s[1]))]
            found.signals.append((value, dict(queue.clock)))

    @driver_call
    def semaphore_wait(self, semaphore: int, value: int, stream: int) -> None:
        """Hold later work until the value is there, whoever stores it.

        What was queued before a signal of this driver is known to be done, if the signal was queued first.
        """
        found = self._semaphore(semaphore, "semaphore_wait")
        queue = self._queue(stream, "semaphore_wait", found.device)

        def run() -> None:
            if found.value < (value if found.timeline else 1):
                raise StillRunning
            if not found.timeline:
                found.set(0)

        if queue.capture is None:
            enough = [s for s in found.signals if s[0] >= value] if found.timeline else found.signals[:1]
            if enough:
                first = min(enough, key=lambda signal: signal[0])
                join(queue.clock, first[1])
                found.signals = [s for s in found.signals if found.timeline or s is not first]
        found.newest = self._submit(queue, "semaphore_wait", run)

    @driver_call
    def semaphore_destroy(self, semaphore: int) -> None:
        """Give the import back; a queued signal or wait that the host has not waited for is a hazard."""
        found = self._semaphore(semaphore, "semaphore_destroy")
        if found.newest is not None and not found.newest.known_to(self._host):
            operation = self._operation("semaphore_destroy")
            self._note("object destroyed while in use", 0, 0, found.newest.operation, operation)
        self._semaphores.pop(semaphore)

    # --- shared ---------------------------------------------------------------------------------------------------
    def _import(self, fd: int, nbytes: int, device: int, call: str, owned: int) -> int:
        self._device(device, call)
        return self._externals.add(External(_shared(fd, nbytes, call), device, owned))

    def _import_semaphore(self, fd: int, timeline: bool, device: int, call: str) -> int:
        self._device(device, call)
        return self._semaphores.add(Semaphore(_shared(fd, _COUNTER_BYTES, call), timeline, device))

    def _part(self, memory: External, offset: int, nbytes: int, call: str) -> Bytes:
        if offset < 0 or nbytes <= 0 or offset + nbytes > memory.data.nbytes:
            raise codes.refused(
                codes.INVALID_VALUE,
                call,
                "range",
                got=f"{nbytes} bytes at {offset}",
                expected=f"within {memory.data.nbytes} bytes",
            )
        again = map_fd(memory.fd, memory.data.nbytes) if memory.fd >= 0 else memory.data
        return again[offset : offset + nbytes]

    def _external(self, handle: int, call: str) -> External:
        found = self._externals.get(handle)
        if found is None:
            raise codes.refused(codes.INVALID_RESOURCE_HANDLE, call, "external memory", got=f"{handle:#x}")
        self._device(found.device, call)
        return found

    def _semaphore(self, handle: int, call: str) -> Semaphore:
        found = self._semaphores.get(handle)
        if found is None:
            raise codes.refused(codes.INVALID_RESOURCE_HANDLE, call, "external semaphore", got=f"{handle:#x}")
        self._device(found.device, call)
        return found

    def _win32_fd(self, kind: str, kinds: tuple[str, ...], handle: int, call: str) -> int:
        if kind not in kinds or handle not in self._win32:
            raise codes.refused(
                codes.INVALID_VALUE, call, f"{kind} handle {handle:#x}", expected=f"one of {kinds}"
            )
        return self._win32[handle]


def _shared(fd: int, nbytes: int, call: str) -> Bytes:
    """Map the whole of what a descriptor stands for; it stays the caller's if that fails."""
    try:
        size = os.fstat(fd).st_size
        if not 0 < nbytes <= size:
            raise codes.refused(
                codes.INVALID_VALUE,
                call,
                "size",
                got=f"{nbytes} bytes",
                expected=f"1 to {size}" if size else "shared memory with bytes: this has none",
            )
        return map_fd(fd, nbytes)
    except OSError as error:
        raise codes.refused(codes.INVALID_VALUE, call, f"descriptor {fd}", got=error) from None
