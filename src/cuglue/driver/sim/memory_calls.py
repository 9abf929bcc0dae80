"""Driver calls that give and take memory.

Owns accounting, the stream-ordered pool and what may be freed by which call. Must not know copies or kernels.
"""

from __future__ import annotations

from ...errors import OutOfMemory, UnsupportedError
from ..protocol import Access, MemoryInfo, MemoryType, PointerInfo
from . import codes
from .core import Core
from .memory import DEAD, NEW, Allocation, Bytes, poison
from .queues import Mark, Queue
from .ranges import linear
from .shadow import join
from .state import Device, Touch, driver_call

#: Kinds of allocations that somebody outside of this driver reaches too.
SHARED = ("external", "vmm")


class MemoryCalls(Core):
    """malloc, free, their stream-ordered forms, pinned and managed memory, and views of it."""

    @driver_call
    def memory_info(self, device: int) -> MemoryInfo:
        """Free and total bytes."""
        own = self._device(device, "memory_info")
        return MemoryInfo(own.limit - own.used, own.limit)

    @driver_call
    def pointer_info(self, ptr: int) -> PointerInfo:
        """Where an address lives. Memory that was mapped and no longer is still counts as the device's."""
        found = self._space.find(ptr)
        if found is None or not (found.live or found.kind == "mapped"):
            return PointerInfo(MemoryType.HOST, 0)
        return PointerInfo(found.type, found.device)

    @driver_call
    def malloc(self, nbytes: int, device: int) -> int:
        """Allocate device memory; its bytes are 0xCD."""
        return self._malloc(nbytes, device, MemoryType.DEVICE, "malloc")

    @driver_call
    def malloc_managed(self, nbytes: int, device: int) -> int:
        """Allocate memory that host and device share."""
        self._needs("managed_memory", "malloc_managed")
        return self._malloc(nbytes, device, MemoryType.MANAGED, "malloc_managed")

    @driver_call
    def free(self, ptr: int, device: int) -> None:
        """Run everything queued on the device, then free. It orders no later work: rely on a wait for that."""
        own = self._device(device, "free")
        self._unsafe_in_capture("free")
        if ptr == 0:
            return
        allocation = self._owned(ptr, ("malloc", "malloc_managed", "malloc_async"), "free", device)
        self._drain([device], "free")
        self._reveal([device], "free")
        self._end(allocation, self._operation("free"))
        poison(allocation.data, DEAD)
        self._discharge(own, allocation)

    @driver_call
    def malloc_async(self, nbytes: int, stream: int, device: int) -> int:
        """Allocate in stream order; what this stream freed last comes back first, at the same address."""
        self._needs("async_memory", "malloc_async")
        own = self._device(device, "malloc_async")
        queue = self._queue(stream, "malloc_async", device)
        if self._check_size(nbytes, "malloc_async") == 0:
            return 0
        if queue.capture is None:
            self._unsafe_in_capture("malloc_async")
        data = self._from_pool(own, nbytes, queue)
        began = self._operation("malloc_async", queue)
        allocation = self._admit(data, device, MemoryType.DEVICE, "malloc_async", began)
        if queue.capture is not None:
            queue.capture.owned.append(allocation)
        touch = Touch(allocation, linear(0, nbytes), Access.WRITE)
        self._submit(queue, "malloc_async", lambda: poison(data, NEW), [touch], memory_node=True)
        return allocation.ptr

    @driver_call
    def free_async(self, ptr: int, stream: int, device: int) -> None:
        """Free in stream order; every use must come before this point of ``stream``.

        In a capture only memory that the capture allocated; refusing other memory leaves the capture as it was.
        """
        self._needs("async_memory", "free_async")
        own = self._device(device, "free_async")
        queue = self._queue(stream, "free_async", device)
        allocation = self._owned(ptr, ("malloc_async",), "free_async", device)
        if queue.capture is None:
            self._unsafe_in_capture("free_async")
        elif allocation not in queue.capture.owned:
            raise codes.refused(codes.INVALID_VALUE, "free_async", "memory from outside the capture")
        touch = Touch(allocation, linear(0, allocation.nbytes), Access.WRITE)
        point = self._submit(
            queue, "free_async", lambda: poison(allocation.data, DEAD), [touch], memory_node=True
        )
        self._end(allocation, point.operation)
        if queue.capture is None:
            own.pooled.append((allocation, point, Mark(queue)))

    @driver_call
    def pool_trim(self, keep: int, device: int) -> None:
        """Give back what is freed, done with and beyond ``keep`` bytes."""
        self._needs("async_memory", "pool_trim")
        self._trim(self._device(device, "pool_trim"), keep)

    @driver_call
    def host_alloc(self, nbytes: int) -> int:
        """Allocate pinned host memory; its bytes are 0xCD."""
        self._unsafe_in_capture("host_alloc")
        if self._check_size(nbytes, "host_alloc") == 0:
            return 0
        data = self._storage.take(nbytes)
        poison(data, NEW)
        return self._admit(data, 0, MemoryType.PINNED, "host_alloc", self._operation("host_alloc")).ptr

    @driver_call
    def host_free(self, ptr: int) -> None:
        """Free pinned memory; a queued use of it that the host has not waited for is a hazard."""
        self._unsafe_in_capture("host_free")
        if ptr == 0:
            return
        allocation = self._owned(ptr, ("host_alloc",), "host_free", None)
        operation = self._host_use(allocation, linear(0, allocation.nbytes), Access.WRITE, "host_free")
        self._drain(range(len(self._devices)), "host_free")
        self._end(allocation, operation)
        poison(allocation.data, DEAD)
        self._storage.give(allocation.data)

    @driver_call
    def host_view(self, ptr: int, nbytes: int, writable: bool) -> memoryview:
        """Bytes at ``ptr``. Taking a view is a host access now; later host writes are found by checksum."""
        if self._space.find(ptr) is None:
            raise UnsupportedError(
                f"host view of {ptr:#x}",
                got="memory of somebody else",
                expected="memory of this driver",
                reason="address",
            )
        touch = self._touch(
            ptr, linear(0, nbytes), Access.READ_WRITE if writable else Access.READ, "host_view"
        )
        allocation, own, access = touch
        operation = self._host_use(allocation, own, access, "host_view")
        view = allocation.data[own.start : own.end].data
        if not writable:
            view = view.toreadonly()
        if allocation.live and allocation.kind not in SHARED:  # another owner writes to that as it likes
            self._watch(allocation).note_view(own, writable, operation, view)
        return view

    # --- shared ---------------------------------------------------------------------------------------------------
    def _malloc(self, nbytes: int, device: int, type: MemoryType, call: str) -> int:
        own = self._device(device, call)
        self._unsafe_in_capture(call)
        if self._check_size(nbytes, call) == 0:
            return 0
        data = self._charge(own, nbytes)
        poison(data, NEW)
        return self._admit(data, device, type, call, self._operation(call)).ptr

    def _check_size(self, nbytes: int, call: str) -> int:
        if nbytes < 0:
            raise codes.refused(codes.INVALID_VALUE, call, "size", got=nbytes, expected="0 or more bytes")
        return nbytes

    def _owned(self, ptr: int, kinds: tuple[str, ...], call: str, device: int | None) -> Allocation:
        found = self._space.exact(ptr)
        if found is None or found.kind not in kinds or (device is not None and found.device != device):
            raise codes.refused(
                codes.INVALID_VALUE,
                call,
                f"address {ptr:#x}",
                expected=f"live memory from {' or '.join(kinds)}",
            )
        return found

    def _charge(self, device: Device, nbytes: int, *, fresh: bool = False) -> Bytes:
        """Storage counted against the device's memory."""
        size = _rounded(nbytes)
        if device.used + size > device.limit:
            self._trim(device, 0)
        if device.used + size > device.limit:
            raise OutOfMemory(
                f"memory of simulated device {device.ordinal}",
                got=f"{nbytes} bytes asked for",
                expected=f"at most {device.limit - device.used} of {device.limit}",
                requested=nbytes,
                in_use=device.used,
            )
        data = self._storage.take(nbytes, fresh=fresh)
        device.used += size
        return data

    def _discharge(self, device: Device, allocation: Allocation) -> None:
        device.used -= _rounded(allocation.nbytes)
        self._storage.give(allocation.data)

    def _from_pool(self, device: Device, nbytes: int, queue: Queue) -> Bytes:
        """Storage freed on this stream, or freed before a point this stream waits for, or whose free has run."""
        clock = dict(queue.clock)
        join(clock, self._host)
        for index in range(len(device.pooled) - 1, -1, -1):
            old, freed, mark = device.pooled[index]
            if _rounded(old.nbytes) == _rounded(nbytes) and (freed.known_to(clock) or mark.reached):
                del device.pooled[index]
                data = old.data.base if old.data.base is not None else old.data
                return data[:nbytes]
        return self._charge(device, nbytes)

    def _trim(self, device: Device, keep: int) -> None:
        pooled = sum(_rounded(a.nbytes) for a, _, _ in device.pooled)
        for entry in [e for e in device.pooled if e[2].reached]:
            if pooled <= keep:
                return
            device.pooled.remove(entry)
            pooled -= _rounded(entry[0].nbytes)
            self._discharge(device, entry[0])


def _rounded(nbytes: int) -> int:
    return (nbytes + 511) // 512 * 512
