"""Windows handles as types, so that memory cannot be imported as a semaphore, nor a heap as a texture.

Owns which kind of driver import each class means. Must not know the driver's numbers, nor import what does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..arguments import shown
from ..errors import UsageError


@dataclass(frozen=True, slots=True)
class WindowsHandle:
    """A handle shared by Direct3D or another API. Use one of the classes below.

    Attributes:
        value: the handle as an int. An NT handle stays the caller's, who closes it after the import.
    """

    value: int

    #: The driver's word for it.
    kind: ClassVar[str] = ""
    #: Whether it always stands for one resource that fills its allocation.
    dedicated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if type(self) in (WindowsHandle, MemoryHandle, FenceHandle):
            raise UsageError(f"{type(self).__name__}", expected="one of its subclasses")
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value <= 0:
            raise UsageError(
                f"{type(self).__name__}", got=shown(self.value), expected="a handle: an int above 0"
            )

    @property
    def driver_kind(self) -> str:
        """The driver's word for this handle."""
        return self.kind


class MemoryHandle(WindowsHandle):
    """A handle of memory."""

    __slots__ = ()


class FenceHandle(WindowsHandle):
    """A handle of a fence or semaphore.

    Class attributes:
        timeline: whether it counts.
    """

    __slots__ = ()
    timeline: ClassVar[bool] = True


class D3D12Heap(MemoryHandle):
    """NT handle of an ``ID3D12Heap`` (``ID3D12Device::CreateSharedHandle``)."""

    __slots__ = ()
    kind = "d3d12_heap"


class D3D12Resource(MemoryHandle):
    """NT handle of a committed ``ID3D12Resource``."""

    __slots__ = ()
    kind = "d3d12_resource"
    dedicated = True


class D3D11Texture(MemoryHandle):
    """NT handle of an ``ID3D11Texture2D`` made with ``SHARED_NTHANDLE`` (``IDXGIResource1::CreateSharedHandle``)."""

    __slots__ = ()
    kind = "d3d11"
    dedicated = True


@dataclass(frozen=True, slots=True)
class OpaqueWin32(MemoryHandle):
    """Handle of a Vulkan allocation.

    Attributes:
        kmt: a global KMT handle (``VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_WIN32_KMT_BIT``), not an NT handle.
    """

    kmt: bool = False

    @property
    def driver_kind(self) -> str:
        """Inherited."""
        return "opaque_kmt" if self.kmt else "opaque"


class D3D12Fence(FenceHandle):
    """NT handle of an ``ID3D12Fence``."""

    __slots__ = ()
    kind = "d3d12_fence"


class D3D11Fence(FenceHandle):
    """NT handle of an ``ID3D11Fence`` (``ID3D11Fence::CreateSharedHandle``)."""

    __slots__ = ()
    kind = "d3d11_fence"


class OpaqueSemaphoreWin32(FenceHandle):
    """NT handle of a binary Vulkan semaphore."""

    __slots__ = ()
    kind = "opaque"
    timeline = False
