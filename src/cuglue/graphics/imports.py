"""The driver calls that import memory and semaphores, each with what it needs checked before and explained after.

Owns whose a descriptor is at which moment (the caller's is only ever copied), and what is said where a driver refuses.
Must not know what becomes of an import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..arguments import shown
from ..core.device import DeviceState
from ..errors import DriverError, UnsupportedError, UsageError
from .undo import Undo
from .winhandles import FenceHandle, MemoryHandle

_SIZE = (
    "the size of the whole allocation, as its owner allocated it (Vulkan: VkMemoryAllocateInfo.allocationSize; not "
    "width * height * bytes per pixel)"
)
_DEDICATED = (
    "dedicated=True exactly where the owner made a dedicated allocation (one image or buffer fills it)"
)


def check_descriptor(fd: object) -> int:
    """``fd``, if it is an open file descriptor.

    Raises:
        UsageError: it is not.
    """
    if isinstance(fd, bool) or not isinstance(fd, int) or fd < 0:
        raise UsageError("file descriptor", got=shown(fd), expected="an int of 0 or more")
    try:
        os.fstat(fd)
    except (OSError, OverflowError) as error:
        raise UsageError("file descriptor", got=f"{fd} ({error})", expected="an open one") from None
    return fd


@contextmanager
def lent(fd: int) -> Iterator[int]:
    """A copy of ``fd`` for a driver that keeps it if it succeeds; closed if it fails, unless the driver did that."""
    copy = os.dup(fd)
    try:
        yield copy
    except BaseException:
        if _same_file(copy, fd):
            os.close(copy)
        raise


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False


def needs(state: DeviceState, able: bool, what: str, reason: str) -> None:
    """Refuse what the driver cannot.

    Raises:
        UnsupportedError: ``able`` is False.
    """
    if not able:
        raise UnsupportedError(
            f"{what} on device {state.device}",
            got=f"a driver ({state.driver.name}) that cannot",
            hint="Copy through host memory",
            reason=reason,
        )


def memory_by_fd(state: DeviceState, fd: int, nbytes: int, *, dedicated: bool, dma_buf: bool) -> int:
    """Import an allocation; the driver's handle. ``fd`` stays the caller's and may be closed at once."""
    able = state.capabilities
    if dma_buf:
        needs(state, able.external_dma_buf, "importing a dma-buf", "dma_buf")
    else:
        needs(state, able.external_fd, "importing memory by descriptor", "external_fd")
    kind = "a dma-buf" if dma_buf else "an opaque fd: one that Vulkan exported with OPAQUE_FD"
    with _explained(nbytes, dedicated, kind), lent(fd) as copy:
        return state.driver.import_memory_fd(copy, nbytes, dedicated, dma_buf, state.device)


def memory_by_handle(state: DeviceState, handle: MemoryHandle, nbytes: int, *, dedicated: bool) -> int:
    """Import an allocation; the driver's handle. The Windows handle stays the caller's."""
    needs(state, state.capabilities.external_win32, "importing memory by Windows handle", "external_win32")
    kind = (
        f"{type(handle).__name__} ({handle.driver_kind}). NT handles come from CreateSharedHandle; a KMT handle, from "
        "GetSharedHandle, is another kind of number: OpaqueWin32(value, kmt=True)"
    )
    with _explained(nbytes, dedicated, kind):
        return state.driver.import_memory_win32(
            handle.driver_kind, handle.value, nbytes, dedicated, state.device
        )


def semaphore_by_fd(state: DeviceState, fd: int, *, timeline: bool) -> int:
    """Import a semaphore; the driver's handle. ``fd`` stays the caller's and may be closed at once."""
    able = state.capabilities
    if timeline:
        needs(state, able.timeline_semaphores, "importing a timeline semaphore", "timeline_semaphores")
    needs(state, able.external_fd, "importing a semaphore by descriptor", "external_fd")
    with lent(fd) as copy:
        return state.driver.import_semaphore_fd(copy, timeline, state.device)


def semaphore_by_handle(state: DeviceState, handle: FenceHandle) -> int:
    """Import a fence; the driver's handle. The Windows handle stays the caller's."""
    needs(state, state.capabilities.external_win32, "importing a fence by Windows handle", "external_win32")
    return state.driver.import_semaphore_win32(handle.driver_kind, handle.value, state.device)


def place(state: DeviceState, handle: int, nbytes: int) -> int:
    """Put virtual memory at an address, which it gives, and let go of ``handle``: the address keeps the memory.

    ``handle`` is let go of where this fails, too.
    """
    driver = state.driver
    with Undo(state.retire) as undo:
        undo.then(driver.vmm_release, handle)
        ptr = driver.vmm_reserve(nbytes, state.device)
        undo.then(driver.vmm_free, ptr, nbytes)
        driver.vmm_map(ptr, nbytes, handle, state.device)
        undo.then(driver.vmm_unmap, ptr, nbytes)
        driver.vmm_release(handle)
        return ptr


@contextmanager
def _explained(nbytes: int, dedicated: bool, kind: str) -> Iterator[None]:
    """Say what usually is wrong where a driver only says "unknown error"."""
    try:
        yield
    except DriverError as error:
        if not error.findings:
            error.findings = {
                "allocation size": f"{nbytes} bytes were given; expected {_SIZE}",
                "dedicated": f"{dedicated} was given; expected {_DEDICATED}",
                "handle": kind,
            }
        raise
