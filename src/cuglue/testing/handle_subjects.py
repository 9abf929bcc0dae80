"""What a test of handles needs beside a handle: the object's bytes by another way, streams, and what a driver holds.

Owns the :class:`Subject` protocol and small helpers. Must not know what is tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..core.stream import Stream, as_stream
from ..driver.protocol import CopyKind, Driver
from ..graphics.handle import CudaHandle
from ..graphics.mapping import CudaMap

Bytes = npt.NDArray[np.uint8]


class Subject(Protocol):
    """A handle under test, and another way to its object's bytes."""

    @property
    def handle(self) -> CudaHandle:
        """The handle."""

    @property
    def driver(self) -> Driver:
        """The driver that maps it."""

    @property
    def opaque(self) -> bool:
        """Whether maps see a copy."""

    def get(self) -> Bytes:
        """All bytes that the object holds, rows tight, past the code under test."""

    def put(self, data: Bytes) -> None:
        """Replace them."""


def peek(m: CudaMap) -> Bytes:
    """The bytes of a map, on the host."""
    return m.numpy().reshape(-1).view(np.uint8)


def poke(m: CudaMap, data: Bytes, offset: int = 0, stream: Stream | None = None) -> None:
    """Write bytes to a map with a copy on its stream (or another one), and wait for it."""
    where = stream or m.stream
    source = np.ascontiguousarray(data)
    m.driver.copy_async(m.device_ptr + offset, source.ctypes.data, source.nbytes, CopyKind.H2D, where.handle)
    where.synchronize()


def raised(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    """The error of that kind that ``call`` raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def holdings(driver: Driver, device: int) -> dict[str, int]:
    """What the driver holds for the process: its own inventory where it keeps one, else the handles it has not ended.

    Events are left out: a few spare ones are kept. What others hold on the device is not seen.
    """
    inventory = getattr(driver, "inventory", None)
    if inventory is not None:
        return {kind: n for kind, n in inventory().items() if kind != "events"}
    driver.device_synchronize(device)
    return dict(Counter(kind for kind, _ in vars(driver)["_owners"] if kind != "event"))


class new_stream:
    """``with new_stream(subject) as stream``: a stream of the subject's device, with an owner that keeps it."""

    def __init__(self, subject: Subject) -> None:
        self._driver = subject.driver
        self._device = subject.handle.device

    def __enter__(self) -> Stream:
        self._owner = _Owned(self._driver.stream_create(self._device), self._device)
        self._stream = as_stream(self._owner, device=self._device, driver=self._driver)
        return self._stream

    def __exit__(self, *exception: object) -> None:
        self._stream.synchronize()
        self._stream.owner = None  # the handle is about to mean nothing
        self._driver.stream_destroy(self._owner.ptr)


class _Owned:
    """A stream object as array libraries have them."""

    def __init__(self, ptr: int, device: int) -> None:
        self.ptr = ptr
        self.device_id = device
