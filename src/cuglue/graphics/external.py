"""``cuglue.external``: memory and semaphores of other APIs and processes, brought in and sent out.

Owns the public functions and what they check. Descriptors and handles given to them stay the caller's, who may close
them as soon as the call returns. Must not know maps: :meth:`CudaHandle.from_external` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, get_args

from ..arguments import shown, whole_of
from ..core.device import DeviceState, device_state
from ..driver.registry import current_driver
from ..errors import LayoutError, UsageError
from ..formats import Format
from ..memory.block import as_size
from .dmabuf import verify
from .extimage import ExternalImage, open_image
from .extmemory import ExternalMemory, Imported, Placed
from .fences import Fence, WriteTimeoutError
from .glmemory import SharedGlBuffer, gl_buffer
from .imports import (
    check_descriptor,
    memory_by_fd,
    memory_by_handle,
    needs,
    place,
    semaphore_by_fd,
    semaphore_by_handle,
)
from .planes import format_of
from .undo import Undo
from .winhandles import (
    D3D11Fence,
    D3D11Texture,
    D3D12Fence,
    D3D12Heap,
    D3D12Resource,
    FenceHandle,
    MemoryHandle,
    OpaqueSemaphoreWin32,
    OpaqueWin32,
    WindowsHandle,
)

MemoryKind = Literal["opaque", "dma_buf", "vmm"]
SemaphoreKind = Literal["timeline", "binary"]


def import_fd(
    fd: int,
    *,
    allocation_size: int,
    kind: MemoryKind = "opaque",
    dedicated: bool = False,
    device: int = 0,
) -> ExternalMemory:
    """Import an allocation by file descriptor.

    Args:
        fd: stays the caller's.
        allocation_size: bytes of the whole allocation as its owner made it, not of what lies in it.
        kind: "opaque": exported by Vulkan (``VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT``). "vmm": CUDA virtual
            memory of another process (:func:`export_fd`). "dma_buf": checked with a pattern that is written for a
            moment, since drivers may map a foreign one wrongly.
        dedicated: the owner made a dedicated allocation.
        device: ordinal of the CUDA device.

    Ordering: queues nothing; a dma-buf blocks the host for its check.
    Ownership: close the memory, or the last handle made of it.

    Raises:
        UsageError: not an open descriptor, or not a kind.
        LayoutError: not a size.
        UnsupportedError: this driver does not import such memory, or maps a dma-buf wrongly.
        DriverError: it refused; ``findings`` say what is usually wrong.
    """
    nbytes = _allocation_size(allocation_size)
    _check_choice("kind", kind, MemoryKind)
    descriptor = check_descriptor(fd)
    state = device_state(current_driver(), device)
    if kind == "vmm":
        return _import_virtual(state, descriptor, nbytes)
    handle = memory_by_fd(state, descriptor, nbytes, dedicated=dedicated, dma_buf=kind == "dma_buf")
    memory = ExternalMemory(state, Imported(state, handle), nbytes, kind)
    if kind == "dma_buf":
        with Undo(state.retire) as undo:
            undo.then(memory.close)
            verify(memory, descriptor)
    return memory


def import_win32(
    handle: MemoryHandle, *, allocation_size: int, dedicated: bool = False, device: int = 0
) -> ExternalMemory:
    """Import an allocation by Windows handle.

    Args:
        handle: a :class:`D3D12Heap`, :class:`D3D12Resource`, :class:`D3D11Texture` or :class:`OpaqueWin32`; stays the
            caller's.
        allocation_size: bytes of the whole allocation (``ID3D12Device::GetResourceAllocationInfo``), not of its image.
        dedicated: the owner made a dedicated allocation; always so for resources and textures.
        device: ordinal of the CUDA device.

    Ordering, Ownership, Raises: as for :func:`import_fd`.
    """
    _check_handle(handle, MemoryHandle)
    nbytes = _allocation_size(allocation_size)
    state = device_state(current_driver(), device)
    imported = memory_by_handle(state, handle, nbytes, dedicated=dedicated or handle.dedicated)
    return ExternalMemory(state, Imported(state, imported), nbytes, type(handle).__name__)


def import_image(
    source: int | MemoryHandle,
    *,
    width: int,
    height: int,
    format: str | Format,
    allocation_size: int | None = None,
    offset: int = 0,
    dedicated: bool = False,
    device: int = 0,
) -> ExternalImage:
    """Import an allocation that holds an image in a layout that only the device knows (Vulkan: tiling OPTIMAL).

    Args:
        source: file descriptor or Windows handle; stays the caller's.
        width, height: in texels.
        format: what a texel is ("RGBA8").
        allocation_size: bytes of the whole allocation. None: unknown; one, two and four times the image are tried, and
            what fitted is remembered for the device.
        offset: of the image in the allocation, in bytes.
        dedicated, device: as for :func:`import_fd`.

    Ordering: queues nothing. Ownership: close the handle made of it, or the image.

    Raises: as :func:`import_fd`.
    """
    texels = format_of("imported image", format)
    width, height = (whole_of(n, v, error=LayoutError) for n, v in (("width", width), ("height", height)))
    if isinstance(source, MemoryHandle):
        where: int | MemoryHandle = source
    else:
        where = check_descriptor(source)
    size = None if allocation_size is None else _allocation_size(allocation_size)
    start = as_size(offset)
    state = device_state(current_driver(), device)
    needs(state, state.capabilities.surfaces, "importing an image", "surfaces")
    return open_image(state, where, texels, width, height, size=size, offset=start, dedicated=dedicated)


def export_fd(nbytes: int, device: int = 0) -> tuple[ExternalMemory, int]:
    """Allocate memory that other processes can import.

    Args:
        nbytes: at least so many bytes; rounded up to what the device shares (2 MiB).
        device: ordinal of the CUDA device.

    Returns:
        The memory, whose ``size`` is the size to import it with, and a descriptor for ``import_fd(kind="vmm")``. Send
        that by a Unix socket or to a child process. OpenGL must not import it: its copies would reach only a part.

    Ordering: queues nothing; the contents are undefined.
    Ownership: the descriptor is the caller's to close; the memory lives while any process has it.

    Raises:
        LayoutError: not a size. UnsupportedError, OutOfMemory, DriverError: as they say; nothing is left.
    """
    wanted = _allocation_size(nbytes)
    state = device_state(current_driver(), device)
    driver = state.driver
    needs(state, state.capabilities.virtual_memory, "memory shared between processes", "virtual_memory")
    granularity = driver.vmm_granularity(device)
    size = -(-wanted // granularity) * granularity
    handle = driver.vmm_create(size, device, True)
    with Undo(state.retire) as undo:
        undo.then(driver.vmm_release, handle)
        fd = driver.vmm_export_fd(handle)
    with Undo(state.retire) as undo:
        undo.then(os.close, fd)
        ptr = place(state, handle, size)
    return ExternalMemory(state, Placed(state, ptr, size), size, "vmm"), fd


def _import_virtual(state: DeviceState, fd: int, nbytes: int) -> ExternalMemory:
    needs(state, state.capabilities.virtual_memory, "memory shared between processes", "virtual_memory")
    granularity = state.driver.vmm_granularity(state.device)
    if nbytes % granularity:
        raise LayoutError(
            "allocation_size of virtual memory",
            got=f"{nbytes} bytes",
            expected=f"a multiple of {granularity}: the size of the memory that export_fd() gave",
        )
    handle = state.driver.vmm_import_fd(fd, state.device)
    return ExternalMemory(state, Placed(state, place(state, handle, nbytes), nbytes), nbytes, "vmm")


def import_semaphore_fd(
    fd: int,
    kind: SemaphoreKind = "timeline",
    completed: Callable[[], int] | None = None,
    *,
    device: int = 0,
) -> Fence:
    """Import a semaphore by file descriptor.

    Args:
        fd: stays the caller's.
        kind: a Vulkan timeline semaphore (OpenGL: ``GL_NV_timeline_semaphore``), or a binary one.
        completed: asks the semaphore's owner which value it has reached (``vkGetSemaphoreCounterValue``); CUDA cannot
            be asked. Needed for time limits only.
        device: ordinal of the CUDA device.

    Ordering: queues nothing. Ownership: close the fence.

    Raises: as :func:`import_fd`.
    """
    _check_choice("kind", kind, SemaphoreKind)
    _check_completed(completed)
    descriptor = check_descriptor(fd)
    state = device_state(current_driver(), device)
    timeline = kind == "timeline"
    semaphore = semaphore_by_fd(state, descriptor, timeline=timeline)
    return Fence(state, semaphore, timeline=timeline, completed=completed)


def import_semaphore_win32(
    handle: FenceHandle, completed: Callable[[], int] | None = None, *, device: int = 0
) -> Fence:
    """Import a fence by Windows handle.

    Args:
        handle: a :class:`D3D12Fence`, :class:`D3D11Fence` or :class:`OpaqueSemaphoreWin32`; stays the caller's.
        completed: as for :func:`import_semaphore_fd` (``ID3D12Fence::GetCompletedValue``).
        device: ordinal of the CUDA device.

    Ordering, Ownership, Raises: as for :func:`import_semaphore_fd`.
    """
    _check_handle(handle, FenceHandle)
    _check_completed(completed)
    state = device_state(current_driver(), device)
    semaphore = semaphore_by_handle(state, handle)
    return Fence(state, semaphore, timeline=handle.timeline, completed=completed)


def _check_completed(completed: object) -> None:
    if completed is not None and not callable(completed):
        raise UsageError("completed", got=shown(completed), expected="a function, or None")


def _allocation_size(nbytes: object) -> int:
    size = as_size(nbytes)
    if not size:
        raise LayoutError("allocation size", got="0 bytes", expected="at least 1")
    return size


def _check_choice(name: str, value: object, choices: object) -> None:
    if not isinstance(value, str) or value not in get_args(choices):
        raise UsageError(name, got=shown(value), expected=f"one of {', '.join(get_args(choices))}")


def _check_handle(handle: object, kind: type[WindowsHandle]) -> None:
    if not isinstance(handle, kind):
        # A dataclass with slots is made twice, and the first one lives until the collector comes.
        classes = ", ".join(dict.fromkeys(sub.__name__ for sub in kind.__subclasses__()))
        raise UsageError("Windows handle", got=shown(handle), expected=f"one of {classes}")


__all__ = [
    "D3D11Fence",
    "D3D11Texture",
    "D3D12Fence",
    "D3D12Heap",
    "D3D12Resource",
    "ExternalImage",
    "ExternalMemory",
    "Fence",
    "OpaqueSemaphoreWin32",
    "OpaqueWin32",
    "SharedGlBuffer",
    "WriteTimeoutError",
    "export_fd",
    "gl_buffer",
    "import_fd",
    "import_image",
    "import_semaphore_fd",
    "import_semaphore_win32",
    "import_win32",
]
