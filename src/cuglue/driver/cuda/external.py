"""Memory and semaphores that Vulkan, D3D12 or another process allocated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...arguments import shown
from ...errors import UnsupportedError, UsageError
from ..protocol import ArrayInfo
from .arrays import array_descriptor
from .calls import call, cu, nonzero
from .contexts import Contexts

_DEDICATED = 0x1  # CUDA_EXTERNAL_MEMORY_DEDICATED

_WIN32_MEMORY = {
    "opaque": "OPAQUE_WIN32",
    "opaque_kmt": "OPAQUE_WIN32_KMT",
    "d3d12_heap": "D3D12_HEAP",
    "d3d12_resource": "D3D12_RESOURCE",
    "d3d11": "D3D11_RESOURCE",
}
_WIN32_SEMAPHORES = {"d3d12_fence": "D3D12_FENCE", "d3d11_fence": "D3D11_FENCE", "opaque": "OPAQUE_WIN32"}


class External(Contexts):
    """External memory and semaphores of the CUDA driver."""

    def import_memory_fd(self, fd: int, nbytes: int, dedicated: bool, dma_buf: bool, device: int) -> int:
        """Inherited."""
        description = _memory("DMABUF_FD" if dma_buf else "OPAQUE_FD", nbytes, dedicated)
        with _copy_of(fd) as description.handle.fd:
            return self._import_memory(description, device)

    def import_memory_win32(self, kind: str, handle: int, nbytes: int, dedicated: bool, device: int) -> int:
        """Inherited."""
        description = _memory(_known(_WIN32_MEMORY, kind), nbytes, dedicated)
        description.handle.win32.handle = handle
        return self._import_memory(description, device)

    def _import_memory(self, description: Any, device: int) -> int:
        with self._on(device):
            memory = nonzero(call(cu.cuImportExternalMemory, description), "cuImportExternalMemory")
        return self._own("external memory", memory, device)

    def external_buffer(self, memory: int, offset: int, nbytes: int) -> int:
        """Inherited."""
        description = cu.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
        description.offset, description.size = offset, nbytes
        with self._on(self._owner("external memory", memory, "cuExternalMemoryGetMappedBuffer")):
            pointer = call(cu.cuExternalMemoryGetMappedBuffer, memory, description)
        return nonzero(pointer, "cuExternalMemoryGetMappedBuffer")

    def external_buffer_free(self, ptr: int, device: int) -> None:
        """Inherited."""
        with self._on(device):
            call(cu.cuCtxSynchronize)
            call(cu.cuMemFree, ptr)

    def external_array(self, memory: int, offset: int, info: ArrayInfo) -> tuple[int, int]:
        """Inherited."""
        description = cu.CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC()
        description.offset, description.arrayDesc, description.numLevels = offset, array_descriptor(info), 1
        device = self._owner("external memory", memory, "cuExternalMemoryGetMappedMipmappedArray")
        with self._on(device):
            mipmapped = call(cu.cuExternalMemoryGetMappedMipmappedArray, memory, description)
            try:
                array = nonzero(call(cu.cuMipmappedArrayGetLevel, mipmapped, 0), "cuMipmappedArrayGetLevel")
            except BaseException:
                cu.cuMipmappedArrayDestroy(mipmapped)
                raise
        return self._own("mipmapped array", int(mipmapped), device), array

    def external_array_free(self, mipmapped: int) -> None:
        """Inherited."""
        with self._disowning("mipmapped array", mipmapped, "cuMipmappedArrayDestroy"):
            call(cu.cuCtxSynchronize)
            call(cu.cuMipmappedArrayDestroy, mipmapped)

    def external_memory_destroy(self, memory: int) -> None:
        """Inherited."""
        with self._disowning("external memory", memory, "cuDestroyExternalMemory"):
            call(cu.cuDestroyExternalMemory, memory)

    def import_semaphore_fd(self, fd: int, timeline: bool, device: int) -> int:
        """Inherited."""
        description = _semaphore("TIMELINE_SEMAPHORE_FD" if timeline else "OPAQUE_FD")
        with _copy_of(fd) as description.handle.fd:
            return self._import_semaphore(description, device)

    def import_semaphore_win32(self, kind: str, handle: int, device: int) -> int:
        """Inherited."""
        description = _semaphore(_known(_WIN32_SEMAPHORES, kind))
        description.handle.win32.handle = handle
        return self._import_semaphore(description, device)

    def _import_semaphore(self, description: Any, device: int) -> int:
        with self._on(device):
            semaphore = nonzero(call(cu.cuImportExternalSemaphore, description), "cuImportExternalSemaphore")
        return self._own("semaphore", semaphore, device)

    def semaphore_signal(self, semaphore: int, value: int, stream: int) -> None:
        """Inherited."""
        parameters = cu.CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS()
        self._fence(cu.cuSignalExternalSemaphoresAsync, semaphore, parameters, value, stream)

    def semaphore_wait(self, semaphore: int, value: int, stream: int) -> None:
        """Inherited."""
        parameters = cu.CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS()
        self._fence(cu.cuWaitExternalSemaphoresAsync, semaphore, parameters, value, stream)

    def _fence(self, function: Any, semaphore: int, parameters: Any, value: int, stream: int) -> None:
        parameters.params.fence.value = value
        with self._on(self._owner("semaphore", semaphore, function.__name__)):
            call(function, [cu.CUexternalSemaphore(semaphore)], [parameters], 1, stream)

    def semaphore_destroy(self, semaphore: int) -> None:
        """Inherited."""
        with self._disowning("semaphore", semaphore, "cuDestroyExternalSemaphore"):
            call(cu.cuDestroyExternalSemaphore, semaphore)


@contextmanager
def _copy_of(fd: int) -> Iterator[int]:
    """A copy of ``fd`` for the driver to take; ``fd`` itself is closed if it does, and stays the caller's if not.

    The driver closes some of the fds that it refuses (seen of 580.159), so it never gets the caller's own.
    """
    try:
        copy = os.dup(fd)
    except OSError as error:
        raise UsageError("file descriptor", got=f"{fd} ({error.strerror})", expected="an open one") from None
    try:
        yield copy
    except BaseException:
        if _same_file(copy, fd):
            os.close(copy)
        raise
    os.close(fd)


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False


def _memory(kind: str, nbytes: int, dedicated: bool) -> Any:
    description = cu.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
    description.type = getattr(cu.CUexternalMemoryHandleType, f"CU_EXTERNAL_MEMORY_HANDLE_TYPE_{kind}")
    description.size = nbytes
    description.flags = _DEDICATED if dedicated else 0
    return description


def _semaphore(kind: str) -> Any:
    description = cu.CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC()
    description.type = getattr(cu.CUexternalSemaphoreHandleType, f"CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_{kind}")
    return description


def _known(kinds: dict[str, str], kind: str) -> str:
    try:
        return kinds[kind]
    except KeyError:
        raise UnsupportedError(
            "external handle",
            got=f"kind {shown(kind)}",
            expected=f"one of {', '.join(kinds)}",
            reason="handle_kind",
        ) from None
