"""Memory of every kind, copies and fills."""

from __future__ import annotations

import ctypes

from ...errors import UnsupportedError
from ..protocol import CopyKind, MemoryType
from .calls import CUDARuntimeError, call_runtime, failure_of, nonzero, runtime
from .contexts import Relaxed
from .devices import Devices
from .shortcuts import HasShortcuts, Shortcuts

_PORTABLE = 1  # cudaHostAllocPortable: pinned for every device

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE


class Memory(HasShortcuts, Devices):
    """Allocation, copies and fills of the CUDA driver."""

    def __init__(self) -> None:
        super().__init__()
        if self._only == 0:
            self.shortcuts = Shortcuts()

    def malloc(self, nbytes: int, device: int) -> int:
        """Inherited."""
        if self._elsewhere(device):
            with self._on(device):
                return self.malloc(nbytes, device)
        with Relaxed():
            return nonzero(call_runtime(runtime.malloc, nbytes, requested=nbytes), "cudaMalloc")

    def free(self, ptr: int, device: int) -> None:
        """Inherited."""
        if self._elsewhere(device):
            with self._on(device):
                return self.free(ptr, device)
        with Relaxed():
            call_runtime(runtime.free, ptr)

    def malloc_async(self, nbytes: int, stream: int, device: int) -> int:
        """Inherited."""
        if device != self._only and runtime.getDevice() != device:
            with self._on(device):
                return self.malloc_async(nbytes, stream, device)
        try:
            ptr: int = runtime.mallocAsync(nbytes, stream)
        except CUDARuntimeError as error:
            raise failure_of(error, "cudaMallocAsync", nbytes) from error
        return ptr or nonzero(ptr, "cudaMallocAsync")

    def free_async(self, ptr: int, stream: int, device: int) -> None:
        """Inherited."""
        if device != self._only and runtime.getDevice() != device:
            with self._on(device):
                return self.free_async(ptr, stream, device)
        try:
            runtime.freeAsync(ptr, stream)
        except CUDARuntimeError as error:
            raise failure_of(error, "cudaFreeAsync") from error

    def pool_trim(self, keep: int, device: int) -> None:
        """Inherited."""
        with self._on(device), Relaxed():
            call_runtime(runtime.memPoolTrimTo, call_runtime(runtime.deviceGetMemPool, device), keep)

    def malloc_managed(self, nbytes: int, device: int) -> int:
        """Inherited."""
        with self._on(device), Relaxed():
            return nonzero(call_runtime(runtime.mallocManaged, nbytes, requested=nbytes), "cudaMallocManaged")

    def host_alloc(self, nbytes: int) -> int:
        """Inherited."""
        with Relaxed():
            return nonzero(
                call_runtime(runtime.hostAlloc, nbytes, _PORTABLE, requested=nbytes), "cudaHostAlloc"
            )

    def host_free(self, ptr: int) -> None:
        """Inherited."""
        with Relaxed():
            call_runtime(runtime.freeHost, ptr)

    def host_view(self, ptr: int, nbytes: int, writable: bool) -> memoryview:
        """Inherited."""
        if self.pointer_info(ptr).type is MemoryType.DEVICE:
            raise UnsupportedError(
                f"host view of {nbytes} bytes at {ptr:#x}",
                got="device memory",
                expected="pinned or managed memory",
                hint="Copy it to the host",
                reason="device_memory",
            )
        view: memoryview = _view_memory(ptr, nbytes, _WRITE if writable else _READ)
        return view

    def copy_async(self, dst: int, src: int, nbytes: int, kind: CopyKind, stream: int) -> None:
        """Inherited."""
        try:
            runtime.memcpyAsync(dst, src, nbytes, kind, stream)
        except CUDARuntimeError as error:
            raise failure_of(error, "cudaMemcpyAsync") from error

    def copy_2d_async(
        self,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        height: int,
        kind: CopyKind,
        stream: int,
    ) -> None:
        """Inherited."""
        call_runtime(runtime.memcpy2DAsync, dst, dst_pitch, src, src_pitch, width, height, kind, stream)

    def copy_from_array_async(
        self, dst: int, dst_pitch: int, array: int, width: int, height: int, stream: int
    ) -> None:
        """Inherited."""
        kind = runtime.memcpyDeviceToDevice
        call_runtime(runtime.memcpy2DFromArrayAsync, dst, dst_pitch, array, 0, 0, width, height, kind, stream)

    def copy_to_array_async(
        self, array: int, src: int, src_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Inherited."""
        kind = runtime.memcpyDeviceToDevice
        call_runtime(runtime.memcpy2DToArrayAsync, array, 0, 0, src, src_pitch, width, height, kind, stream)

    def fill_async(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """Inherited."""
        call_runtime(runtime.memsetAsync, ptr, value, nbytes, stream)
