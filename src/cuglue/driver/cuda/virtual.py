"""Virtual memory: addresses and physical memory apart, shareable with other processes by fd."""

from __future__ import annotations

from typing import Any

from .calls import call, cu, nonzero
from .contexts import Contexts


class Virtual(Contexts):
    """Virtual memory of the CUDA driver."""

    def vmm_granularity(self, device: int) -> int:
        """Inherited."""
        smallest = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with self._on(device):
            return int(call(cu.cuMemGetAllocationGranularity, _property(device, True), smallest))

    def vmm_create(self, nbytes: int, device: int, shareable: bool) -> int:
        """Inherited."""
        with self._on(device):
            handle = call(cu.cuMemCreate, nbytes, _property(device, shareable), 0, requested=nbytes)
        return self._own("physical memory", nonzero(handle, "cuMemCreate"), device)

    def vmm_release(self, handle: int) -> None:
        """Inherited."""
        with self._disowning("physical memory", handle, "cuMemRelease"):
            call(cu.cuMemRelease, handle)

    def vmm_export_fd(self, handle: int) -> int:
        """Inherited."""
        with self._on(self._owner("physical memory", handle, "cuMemExportToShareableHandle")):
            return int(call(cu.cuMemExportToShareableHandle, handle, _fd_type(), 0))

    def vmm_import_fd(self, fd: int, device: int) -> int:
        """Inherited."""
        with self._on(device):
            handle = call(cu.cuMemImportFromShareableHandle, fd, _fd_type())
        return self._own("physical memory", nonzero(handle, "cuMemImportFromShareableHandle"), device)

    def vmm_reserve(self, nbytes: int, device: int) -> int:
        """Inherited."""
        with self._on(device):
            ptr = call(cu.cuMemAddressReserve, nbytes, 0, 0, 0, requested=nbytes)
        return self._own("address range", nonzero(ptr, "cuMemAddressReserve"), device)

    def vmm_free(self, ptr: int, nbytes: int) -> None:
        """Inherited."""
        with self._disowning("address range", ptr, "cuMemAddressFree"):
            call(cu.cuMemAddressFree, ptr, nbytes)

    def vmm_map(self, ptr: int, nbytes: int, handle: int, device: int) -> None:
        """Inherited."""
        access = cu.CUmemAccessDesc()
        access.location = _property(device, False).location
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with self._on(device):
            call(cu.cuMemMap, ptr, nbytes, 0, handle, 0)
            try:
                call(cu.cuMemSetAccess, ptr, nbytes, [access], 1)
            except BaseException:
                cu.cuMemUnmap(ptr, nbytes)
                raise
        self._own("mapped range", ptr, device)

    def vmm_unmap(self, ptr: int, nbytes: int) -> None:
        """Inherited."""
        with self._disowning("mapped range", ptr, "cuMemUnmap"):
            call(cu.cuCtxSynchronize)
            call(cu.cuMemUnmap, ptr, nbytes)


def _fd_type() -> Any:
    return cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _property(device: int, shareable: bool) -> Any:
    """``CUmemAllocationProp`` of memory on one device."""
    wanted = cu.CUmemAllocationProp()
    wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    if shareable:
        wanted.requestedHandleTypes = _fd_type()
    return wanted
