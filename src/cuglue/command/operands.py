"""What a command works on, as values: declarations, operands, and the place where operands have to be.

Owns ``In``, ``Out`` and ``InOut``, and the one record (:class:`Operand`) that pointers, shapes, blocks and streams of
arrays and buffers of every maker are turned into. Must not know these makers (:mod:`.makers` does) or kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.block import BlockLife
from ..core.device import device_state
from ..core.stream import Stream, as_stream
from ..driver.protocol import Access, Driver


class Declared:
    """An argument and what the work does with it. Use :class:`In`, :class:`Out` or :class:`InOut`.

    Args:
        array: a Buffer, CudaMap, ArrayView, CuPy array, torch tensor, surface or texture of a map, or anything with
            ``__cuda_array_interface__``.
        strided: the kernel knows the strides; without it an array must be C-contiguous.

    Ownership: keeps the array alive.
    """

    __slots__ = ("array", "strided")
    access = Access.READ_WRITE

    def __init__(self, array: Any, *, strided: bool = False) -> None:
        self.array = array
        self.strided = strided

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.array).__name__})"


class In(Declared):
    """The work reads it."""

    __slots__ = ()
    access = Access.READ


class Out(Declared):
    """The work writes all of it and reads nothing."""

    __slots__ = ()
    access = Access.WRITE


class InOut(Declared):
    """The work reads and writes it, or writes a part of it."""

    __slots__ = ()


class Operand:
    """One piece of device memory (or a surface) as commands see it.

    Attributes:
        ptr: address of its first byte; of a surface or texture, the object handle.
        nbytes: bytes from the first to the last one.
        shape, strides: elements, bytes; ``dtype`` None: plain bytes, whatever the kernel says they are.
        block: the record its uses are kept in; None if nobody tracks it.
        partners: streams that others may use it on without telling: joined both ways, never elided.
        kind: "memory", "surface" or "texture".
        writable: whether work may write it.
        fitted: the parameter of a kernel that it was found to fit last, whatever is done with it; None: none yet.
        keep: what keeps the memory, up to the stamp of the work, if another thread closes the array meanwhile.
    """

    __slots__ = (
        "block",
        "dtype",
        "fitted",
        "keep",
        "kind",
        "nbytes",
        "partners",
        "ptr",
        "shape",
        "strides",
        "writable",
    )

    def __init__(
        self,
        ptr: int,
        nbytes: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any] | None,
        strides: tuple[int, ...] | None,
        block: BlockLife | None,
        partners: tuple[Stream, ...] = (),
        *,
        kind: str = "memory",
        writable: bool = True,
        keep: object = None,
    ) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self.shape = shape
        self.dtype = dtype
        self.strides = strides  # None: C-contiguous
        self.block = block
        self.partners = partners
        self.kind = kind
        self.writable = writable
        self.fitted: object = None
        self.keep = keep

    def at(self, offset: int) -> Operand:
        """The operand from its byte ``offset`` on; this one keeps its memory."""
        left = self.nbytes - offset
        return Operand(
            self.ptr + offset, left, (left,), None, None, self.block, self.partners, writable=self.writable
        )


class Place:
    """Where operands have to be: the driver and device of a runtime, and which runtime it is."""

    __slots__ = ("block_at", "device", "driver", "service", "streams")

    def __init__(self, driver: Driver, device: int, service: int) -> None:
        self.driver = driver
        self.device = device
        self.service = service
        self.streams = device_state(driver, device).streams
        #: The block at an address: for tensors, which do not say whose memory they are.
        self.block_at: Callable[[int], BlockLife | None] = lambda address: None

    def current(self) -> Stream:
        """The array library's current stream here: ``as_stream(None)``, quicker where it is known."""
        current = self.driver.stream_current(self.device)
        known = self.streams.get(getattr(current, "ptr", None))
        stream = known() if known is not None else None
        if stream is None or stream.owner is not current:
            return as_stream(current, device=self.device, driver=self.driver)
        return stream
