"""Devices: what there is, what it can do, where an address lives."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from ..protocol import Capabilities, MemoryInfo, MemoryType, PointerInfo
from .calls import call, call_runtime, cu, runtime
from .contexts import Contexts

_POINTER_TYPES = {
    runtime.memoryTypeUnregistered: MemoryType.HOST,
    runtime.memoryTypeHost: MemoryType.PINNED,
    runtime.memoryTypeDevice: MemoryType.DEVICE,
    runtime.memoryTypeManaged: MemoryType.MANAGED,
}


class Devices(Contexts):
    """Device queries of the CUDA driver."""

    def __init__(self) -> None:
        super().__init__()
        self._capabilities: dict[int, Capabilities] = {}

    def device_count(self) -> int:
        """Inherited."""
        return self._count

    def device_current(self) -> int:
        """Inherited."""
        device: int = call_runtime(runtime.getDevice)
        return device

    def capabilities(self, device: int) -> Capabilities:
        """Inherited."""
        known = self._capabilities.get(device)
        if known is None:
            with self._on(device):  # also refuses a wrong ordinal
                known = self._capabilities[device] = _ask_capabilities(device)
        return known

    def device_name(self, device: int) -> str:
        """Inherited."""
        with self._on(device):
            name: bytes = call(cu.cuDeviceGetName, 256, device)
        return name.partition(b"\0")[0].decode()

    def device_uuid(self, device: int) -> bytes:
        """Inherited."""
        with self._on(device):
            return bytes(call(cu.cuDeviceGetUuid, device).bytes)

    def memory_info(self, device: int) -> MemoryInfo:
        """Inherited."""
        with self._on(device):
            return MemoryInfo(*call_runtime(runtime.memGetInfo))

    def device_synchronize(self, device: int) -> None:
        """Inherited."""
        with self._on(device):
            call_runtime(runtime.deviceSynchronize)

    def pointer_info(self, ptr: int) -> PointerInfo:
        """Inherited. Pinned memory belongs to every device and says 0, as DLPack wants it."""
        attributes = call_runtime(runtime.pointerGetAttributes, ptr)
        kind = _POINTER_TYPES[attributes.type]
        on_device = kind is MemoryType.DEVICE or kind is MemoryType.MANAGED
        return PointerInfo(kind, attributes.device if on_device else 0)


def _ask_capabilities(device: int) -> Capabilities:
    attributes = cu.CUdevice_attribute
    version: int = call(cu.cuDriverGetVersion)

    def has(attribute: str) -> bool:
        # Older bindings lack the newer attributes.
        member = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{attribute}", None)
        if member is None:
            return False
        status, value = cu.cuDeviceGetAttribute(member, device)
        return not status and bool(value)

    linux, windows = sys.platform == "linux", sys.platform == "win32"
    posix_fd = linux and has("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
    dma_buf_type = "CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD" in dir(cu.CUexternalMemoryHandleType)
    return Capabilities(
        device_type=MemoryType.DEVICE,
        async_memory=has("MEMORY_POOLS_SUPPORTED"),
        managed_memory=has("MANAGED_MEMORY"),
        graphs=True,
        surfaces=True,
        graphics_gl=not _under_wsl(),
        graphics_d3d11=windows,
        external_fd=posix_fd,
        external_dma_buf=linux and dma_buf_type and version >= 13000 and has("DMA_BUF_SUPPORTED"),
        external_win32=windows,
        timeline_semaphores=has("TIMELINE_SEMAPHORE_INTEROP_SUPPORTED"),
        virtual_memory=posix_fd and has("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
        context_events="cuCtxRecordEvent" in dir(cu) and version >= 12050,
        host_callbacks=True,
        # A device that cannot reach ordinary memory gets copies of it from the processor, made in the call.
        pageable_read_at_once=not has("PAGEABLE_MEMORY_ACCESS"),
        # cudaMalloc promises memory that a texture can be bound to without an offset: 512 on every known device.
        alignment=call(cu.cuDeviceGetAttribute, attributes.CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, device),
    )


@cache
def _under_wsl() -> bool:
    """The driver under WSL has no OpenGL interop."""
    return Path("/dev/dxg").exists()
