"""Copies of exported memory: into host memory, and into memory of the same device that the consumer owns.

Owns these two, the life of the device copy, and that of host memory in use by the device. Must not know capsules or
array libraries.

An interrupt (Ctrl-C) loses nothing: what the driver may have got is a use, and what it may write stays until it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ..core.device import DeviceState
from ..core.stream import Stream
from ..driver.protocol import CopyKind, MemoryType
from ..errors import CuglueError
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
    with in_flight(span, stream):
        _copy(owner, span.ctypes.data, ptr, layout.nbytes, CopyKind.D2H, stream)
    array: np.ndarray[Any, Any] = np.ndarray(layout.shape, layout.dtype, span, 0, layout.strides)
    return array if layout.is_c_contiguous else array.copy(order="C")


@contextmanager
def in_flight(memory: object, stream: Stream) -> Iterator[None]:
    """Host memory that work queued here on ``stream`` uses. Blocks the host until that is done.

    Where it is not waited for, the memory is kept until the stream is done with all it has got by then.
    """
    try:
        yield
        stream.synchronize()
    except BaseException:
        stream.state.retire.push([(stream, stream.submit())], partial(_let_go, memory))
        raise


def _let_go(memory: object) -> None:
    """Nothing: what has to call this keeps the memory until then."""


def _copy(owner: ExportOwner, to: int, ptr: int, nbytes: int, kind: CopyKind, stream: Stream) -> None:
    """Enqueue a copy out of the owner's memory, and note it as a use of that."""
    with stream.state.ordering:
        owner.order_consumer(stream)
        try:
            owner.driver.copy_async(to, ptr, nbytes, kind, stream.handle)
            owner.note_consumer(stream)
        except BaseException as error:
            if not isinstance(error, CuglueError):
                owner.note_consumer(stream)  # interrupted: the driver may have it
            raise


class DeviceCopy:
    """Memory for a copy of exported memory on its device, owned by whoever holds this object.

    When the last holder drops it, the memory is freed once all that was queued by then on the consumer's stream is
    done: by the next drain of the device's retire queue.

    Attributes:
        ptr: address; 0 before there is memory.
    """

    __slots__ = ("__weakref__", "_forget", "_released", "ptr")

    def __init__(self, state: DeviceState, released: Callable[[list[Any]], None]) -> None:
        """``released``: called some time after the object is gone, with itself and the address."""
        self._forget = state.retire.forget
        self._released = released
        self.ptr = 0

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):  # else its making was interrupted, or nothing came of it
            self._forget([self._released, self.ptr])


def copy_on_device(owner: ExportOwner, ptr: int, nbytes: int, stream: Stream | None) -> DeviceCopy:
    """Copy ``nbytes`` bytes into fresh memory, in the order of ``stream``. Only enqueues.

    Args:
        owner: of the bytes.
        ptr, nbytes: the bytes.
        stream: the consumer's; None: it orders itself after the owner's stream, where the copy is made then.
    """
    owner.check_exportable()
    consumer, home = stream or owner.stream, owner.stream
    consumer.refuse_capture("copy exported memory")
    state = consumer.state
    driver, device = owner.driver, owner.device
    pooled = state.capabilities.async_memory
    state.retire.drain()

    def free(copy: int) -> None:
        if pooled:
            driver.free_async(copy, home.handle, device)
        else:
            driver.free(copy, device)

    def released(what: list[Any]) -> None:
        state.retire.push([(consumer, consumer.submit())], partial(free, what[1]), nbytes=nbytes)

    copy = DeviceCopy(state, released)
    copy.ptr = (
        driver.malloc_async(nbytes, consumer.handle, device) if pooled else driver.malloc(nbytes, device)
    )
    _copy(owner, copy.ptr, ptr, nbytes, CopyKind.D2D, consumer)
    return copy
