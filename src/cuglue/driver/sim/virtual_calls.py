"""Driver calls for virtual memory: physical memory, reserved addresses, and the one put at the other.

Owns all three. Physical memory is a memfd, so that an exported descriptor means the same bytes everywhere. Must not
know imports by descriptor (:mod:`external_calls`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...errors import OutOfMemory
from ..protocol import MemoryType
from . import codes
from .memory import NEW, Allocation, poison
from .memory_calls import MemoryCalls
from .queues import Handles
from .shared import map_at, map_fd, new_fd, reserve, unmap, unmap_at
from .state import driver_call

GRANULARITY = 2 << 20


@dataclass(eq=False, slots=True)
class Physical:
    """Memory without an address; ``holders`` are its handle and its mappings."""

    fd: int
    nbytes: int
    device: int
    shareable: bool
    charged: bool  # it counts against the device: not if it was imported
    holders: int = 1


class VirtualCalls(MemoryCalls):
    """vmm_*"""

    _physical: Handles[Physical]
    _reserved: dict[int, int]
    _placed: dict[int, tuple[Allocation, Physical]]

    @driver_call
    def vmm_granularity(self, device: int) -> int:
        """2 MiB, as on real devices."""
        self._needs("virtual_memory", "vmm_granularity")
        self._device(device, "vmm_granularity")
        return GRANULARITY

    @driver_call
    def vmm_create(self, nbytes: int, device: int, shareable: bool) -> int:
        """Physical memory; its bytes are 0xCD."""
        self._needs("virtual_memory", "vmm_create")
        own = self._device(device, "vmm_create")
        self._unsafe_in_capture("vmm_create")
        _check_size(nbytes, "vmm_create")
        if own.used + nbytes > own.limit:
            raise OutOfMemory(
                f"memory of simulated device {device}",
                got=f"{nbytes} bytes asked for",
                expected=f"at most {own.limit - own.used} of {own.limit}",
                requested=nbytes,
                in_use=own.used,
            )
        fd = new_fd(nbytes)
        poison(map_fd(fd, nbytes), NEW)
        own.used += nbytes
        return self._physical.add(Physical(fd, nbytes, device, shareable, charged=True))

    @driver_call
    def vmm_release(self, handle: int) -> None:
        """Drop the handle; mappings keep the memory."""
        found = self._memory(handle, "vmm_release")
        self._physical.pop(handle)
        self._let_go(found)

    @driver_call
    def vmm_export_fd(self, handle: int) -> int:
        """A new descriptor; the caller closes it."""
        found = self._memory(handle, "vmm_export_fd")
        if not found.shareable:
            raise codes.refused(
                codes.INVALID_VALUE, "vmm_export_fd", "memory", got="not shareable", expected="shareable"
            )
        return os.dup(found.fd)

    @driver_call
    def vmm_import_fd(self, fd: int, device: int) -> int:
        """Handle of exported memory; the descriptor stays the caller's."""
        self._needs("virtual_memory", "vmm_import_fd")
        self._device(device, "vmm_import_fd")
        try:
            own = os.dup(fd)
        except OSError as error:
            raise codes.refused(codes.INVALID_VALUE, "vmm_import_fd", f"descriptor {fd}", got=error) from None
        return self._physical.add(Physical(own, os.fstat(own).st_size, device, shareable=True, charged=False))

    @driver_call
    def vmm_reserve(self, nbytes: int, device: int) -> int:
        """Reserve addresses."""
        self._needs("virtual_memory", "vmm_reserve")
        self._device(device, "vmm_reserve")
        _check_size(nbytes, "vmm_reserve")
        ptr = reserve(nbytes)
        self._space.forget(ptr, nbytes)
        self._reserved[ptr] = nbytes
        return ptr

    @driver_call
    def vmm_free(self, ptr: int, nbytes: int) -> None:
        """Give reserved addresses back; nothing may lie there."""
        if self._reserved.get(ptr) != nbytes or any(ptr <= at < ptr + nbytes for at in self._placed):
            raise codes.refused(
                codes.INVALID_VALUE,
                "vmm_free",
                f"{nbytes} bytes at {ptr:#x}",
                expected="a whole, empty reservation",
            )
        del self._reserved[ptr]
        self._space.forget(ptr, nbytes)
        unmap(ptr, nbytes)

    @driver_call
    def vmm_map(self, ptr: int, nbytes: int, handle: int, device: int) -> None:
        """Put the memory at a reserved address."""
        self._device(device, "vmm_map")
        found = self._memory(handle, "vmm_map")
        inside = any(at <= ptr and ptr + nbytes <= at + size for at, size in self._reserved.items())
        taken = any(at < ptr + nbytes and ptr < at + a.nbytes for at, (a, _) in self._placed.items())
        if (
            not inside
            or taken
            or not 0 < nbytes <= found.nbytes
            or (ptr | nbytes) % os.sysconf("SC_PAGESIZE")
        ):
            raise codes.refused(
                codes.INVALID_VALUE,
                "vmm_map",
                f"{nbytes} bytes at {ptr:#x}",
                expected=f"free reserved addresses, and at most {found.nbytes} bytes",
            )
        data = map_at(ptr, nbytes, found.fd)
        allocation = self._admit(data, device, MemoryType.DEVICE, "vmm", self._operation("vmm_map"))
        found.holders += 1
        self._placed[ptr] = allocation, found

    @driver_call
    def vmm_unmap(self, ptr: int, nbytes: int) -> None:
        """Run everything queued on the device, then take the memory away."""
        placed = self._placed.get(ptr)
        if placed is None or placed[0].nbytes != nbytes:
            raise codes.refused(
                codes.INVALID_VALUE, "vmm_unmap", f"{nbytes} bytes at {ptr:#x}", expected="a whole mapping"
            )
        allocation, physical = placed
        self._device(allocation.device, "vmm_unmap")
        self._unsafe_in_capture("vmm_unmap")
        self._drain([allocation.device], "vmm_unmap")
        self._end(allocation, self._operation("vmm_unmap"))
        del self._placed[ptr]
        unmap_at(ptr, nbytes)
        self._let_go(physical)

    # --- shared ---------------------------------------------------------------------------------------------------
    def _memory(self, handle: int, call: str) -> Physical:
        found = self._physical.get(handle)
        if found is None:
            raise codes.refused(codes.INVALID_RESOURCE_HANDLE, call, "physical memory", got=f"{handle:#x}")
        self._device(found.device, call)
        return found

    def _let_go(self, physical: Physical) -> None:
        physical.holders -= 1
        if not physical.holders:
            os.close(physical.fd)
            if physical.charged:
                self._devices[physical.device].used -= physical.nbytes


def _check_size(nbytes: int, call: str) -> None:
    if nbytes <= 0 or nbytes % GRANULARITY:
        raise codes.refused(
            codes.INVALID_VALUE, call, "size", got=nbytes, expected=f"a multiple of {GRANULARITY} bytes"
        )
