"""Copies of exported memory: into host memory, and into memory of the same device that the consumer owns.

Owns these two and the life of the device copy. Must not know capsules or array libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.device import DeviceState
from ..core.stream import Stream
from ..driver.protocol import CopyKind, MemoryType
from ..layout import Layout
from .owner import ExportOwner
from .tokens import ExportToken


def on_host(owner: ExportOwner) -> bool:
    """Whether the memory is exported as host memory."""
    kind = owner.memory_type
    return kind is MemoryType.HOST or kind is MemoryType.PINNED


class HostSpan:
    """Host-addressable memory as NumPy sees it; arrays made from it keep it, and it the token."""

    __slots__ = ("__array_interface__", "token", "view")

    def __init__(self, interface: dict[str, Any], token: ExportToken, view: memoryview) -> None:
        self.__array_interface__ = interface
        self.token = token
        self.view = view  # the driver's: a simulated device sees by it how long the host looks on


def host_bytes(
    owner: ExportOwner, ptr: int, nbytes: int, *, how: str, readonly: bool
) -> np.ndarray[Any, Any]:
    """Exported host memory as an array of bytes that holds a token. Blocks the host until pending work is done."""
    owner.check_exportable()
    owner.order_host()
    token = owner.ledger.issue(owner, how)
    view = owner.driver.host_view(ptr, nbytes, not readonly)
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (ptr, readonly), "version": 3}
    return np.asarray(HostSpan(interface, token, view))


def host_view(
    owner: ExportOwner, ptr: int, layout: Layout, *, how: str, readonly: bool
) -> np.ndarray[Any, Any]:
    """Exported host memory as an array of ``layout``; else as :func:`host_bytes`."""
    if not layout.size:  # no memory, so nothing to hold
        owner.check_exportable()
        empty = np.empty(layout.shape, layout.dtype)
        empty.flags.writeable = not readonly
        return empty
    span = host_bytes(owner, ptr, layout.nbytes, how=how, readonly=readonly)
    return np.ndarray(layout.shape, layout.dtype, span, 0, layout.strides)


def copy_to_host(owner: ExportOwner, ptr: int, layout: Layout) -> np.ndarray[Any, Any]:
    """A C-contiguous NumPy array with the elements. Blocks the host until pending work and the copy are done."""
    owner.check_exportable()
    if not layout.size:
        return np.empty(layout.shape, layout.dtype)
    if on_host(owner):
        view = host_view(owner, ptr, layout, how="numpy()", readonly=True)
        return np.array(view, order="C", copy=True)
    stream = owner.stream
    stream.refuse_capture("copy to the host")
    span = np.empty(layout.nbytes, np.uint8)
    with stream.state.ordering:
        owner.order_consumer(stream)
        owner.driver.copy_async(span.ctypes.data, ptr, layout.nbytes, CopyKind.D2H, stream.handle)
        owner.note_consumer(stream)
    stream.synchronize()
    array: np.ndarray[Any, Any] = np.ndarray(layout.shape, layout.dtype, span, 0, layout.strides)
    return array if layout.is_c_contiguous else array.copy(order="C")


class DeviceCopy:
    """A copy of exported memory on its device, owned by whoever holds this object.

    When the last holder drops it, the memory is freed once all that was queued by then on the consumer's stream is
    done: by the next drain of the device's retire queue.
    """

    __slots__ = ("__weakref__", "_forget", "_released", "nbytes", "ptr")

    def __init__(self, ptr: int, nbytes: int, state: DeviceState, released: Callable[[], None]) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self._forget = state.retire.forget
        self._released = released

    def __del__(self) -> None:
        self._forget(self._released)


def copy_on_device(owner: ExportOwner, ptr: int, nbytes: int, stream: Stream | None) -> DeviceCopy:
    """Copy ``nbytes`` bytes into fresh memory, in the order of ``stream``. Only enqueues.

    Args:
        owner: of the bytes.
        ptr, nbytes: the bytes.
        stream: the consumer's; None: it orders itself after the owner's stream, where the copy is made then.
    """
    owner.check_exportable()
    stream = stream or owner.stream
    stream.refuse_capture("copy exported memory")
    state = stream.state
    driver, device = owner.driver, owner.device
    state.retire.drain()
    if state.capabilities.async_memory:
        copy = driver.malloc_async(nbytes, stream.handle, device)
    else:
        copy = driver.malloc(nbytes, device)
    home = owner.stream

    def free() -> None:
        if state.capabilities.async_memory:
            driver.free_async(copy, home.handle, device)
        else:
            driver.free(copy, device)

    def released() -> None:
        state.retire.push([(stream, stream.submit())], free, nbytes=nbytes)

    try:
        with state.ordering:
            owner.order_consumer(stream)
            driver.copy_async(copy, ptr, nbytes, CopyKind.D2D, stream.handle)
            owner.note_consumer(stream)
    except BaseException:
        state.retire.forget(released)
        raise
    return DeviceCopy(copy, nbytes, state, released)
