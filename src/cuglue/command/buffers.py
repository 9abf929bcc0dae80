"""Buffers: memory of a runtime, and how a piece of it is named for a copy.

Owns :class:`Buffer` (a handle: it may be unbound, and several may name parts of one allocation) and
:class:`CopyDescriptor`. Must not know how memory is freed, copies made or work queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

from ..arguments import shown, whole_of
from ..core.block import BlockLife
from ..core.stream import Stream
from ..errors import ArgumentError, ClosedError, LayoutError, StorageHandleNotFound, UsageError
from ..exchange.view import ArrayView
from ..layout import Layout, element, extents, integers
from ..lifecycle import BlockState, leave
from .descriptors import CopyDescriptor
from .makers import partners_of
from .operands import Operand, Place
from .storage import Storage
from .taint import clear

_LIVE = BlockState.LIVE


class _Cell:
    """What buffers of one identity share: the memory, once there is some."""

    __slots__ = ("storage",)

    def __init__(self, storage: Storage | None) -> None:
        self.storage = storage


class Buffer:
    """Bytes of device memory that a runtime manages. Made by ``runtime.create``, ``runtime.empty`` and commands.

    Ownership: the memory lives while this buffer, a part of it, an array made from it or a graph refers to it, then is
    freed in stream order; closing is optional. Threads may share it.
    """

    __slots__ = ("__weakref__", "_cell", "_closed", "_operand", "_place", "nbytes", "offset")

    def __init__(self, place: Place, nbytes: int, cell: _Cell | None = None, offset: int = 0) -> None:
        """A buffer without memory; ``Command.bind`` gives it some."""
        self._place = place
        self._cell = cell if cell is not None else _Cell(None)
        self._closed = False
        self._operand: Operand | None = None  # the last one made, for the next launch
        self.nbytes = nbytes
        self.offset = offset  # into the allocation

    @property
    def storage(self) -> Storage:
        """The memory.

        Raises:
            ClosedError: the buffer was closed.
            StorageHandleNotFound: it was never bound, or its memory went to another buffer or is gone.
        """
        storage = self._cell.storage
        if self._closed:  # asked after: a buffer that another thread closes has no memory then
            raise ClosedError(repr(self), got="a use", expected="an open buffer")
        if storage is None:
            raise StorageHandleNotFound(
                f"a buffer of {self.nbytes} bytes has no memory",
                got="never bound, or its memory was bound to another buffer",
                hint="Bind it: command.bind(command.reserve(n), buffer)",
            )
        if storage.block.state is not BlockState.LIVE:
            raise StorageHandleNotFound(
                f"the memory of {self!r} was freed", hint="Its resource was closed under it"
            )
        return storage

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._closed

    @property
    def bound(self) -> bool:
        """Whether there is memory behind it."""
        return not self._closed and self._cell.storage is not None

    @property
    def stream(self) -> Stream:
        """The stream that the memory was allocated on and is freed on."""
        return self.storage.block.stream

    @property
    def block(self) -> BlockLife:
        """The record that the uses of the memory are kept in."""
        return self.storage.block

    @property
    def ptr(self) -> int:
        """Device address of the first byte; 0 for an empty buffer."""
        return self.storage.block.ptr + self.offset

    @property
    def device(self) -> int:
        """Ordinal of the device."""
        return self._place.device

    def __len__(self) -> int:
        return self.nbytes

    def __array__(self, *arguments: object, **keywords: object) -> NoReturn:
        raise UsageError(
            repr(self),
            got="a NumPy array of it",
            expected="a copy on the host",
            hint="numpy.asarray(runtime.read(buffer, shape, dtype).result())",
        )

    def __bool__(self) -> bool:
        return True  # an empty buffer is a buffer still

    def part(self, start: int = 0, end: int = 0) -> Buffer:
        """The same memory without its first ``start`` and last ``end`` bytes.

        Raises:
            LayoutError: (a ValueError) they are negative or more than there is.
        """
        if type(start) is not int or type(end) is not int or start < 0 or end < 0:
            what, expected = f"part of {self!r}", "a number of bytes, 0 or more"
            start = whole_of(what, start, expected=expected, error=LayoutError)
            end = whole_of(what, end, expected=expected, error=LayoutError)
        if start + end > self.nbytes:
            raise LayoutError(
                f"part of {self!r}", got=f"{start} + {end} bytes left out", expected=f"at most {self.nbytes}"
            )
        made = Buffer(self._place, self.nbytes - start - end, self._cell, self.offset + start)
        made._closed = self._closed
        return made

    def descriptor(
        self, shape: Any, dtype: Any = "u1", strides: Sequence[int] | None = None
    ) -> CopyDescriptor:
        """How a read or a write sees the buffer.

        Args:
            shape: extents in elements, an int or a sequence.
            dtype: anything NumPy takes for a dtype.
            strides: in elements; None: row-major without gaps.

        Raises:
            LayoutError: no shape, type or strides.
        """
        sides, item = extents(shape), element(dtype)
        if strides is None and sides:
            return CopyDescriptor.contiguous(self, sides, item)
        return CopyDescriptor(
            self, sides, integers("strides", () if strides is None else strides), item.itemsize, item
        )

    def array(self, shape: Any = None, dtype: Any = "u1") -> ArrayView:
        """An array over the buffer, without a copy, that array libraries take. Keeps the memory alive.

        Args:
            shape: extents in elements; None: one axis over everything.
            dtype: anything NumPy takes for a dtype.

        Raises:
            LayoutError: it does not fit.
        """
        storage = self.storage
        item = element(dtype)
        layout = Layout.of(extents(self.nbytes // item.itemsize if shape is None else shape), item)
        layout.fits(0, self.nbytes)
        return ArrayView(storage, storage.block.ptr + self.offset, layout)

    def trust(self) -> None:
        """Take the bytes as they are, also those that a failed launch should have written."""
        block = self.storage.block
        clear([(block, self.offset, self.offset + self.nbytes)])

    def close(self) -> None:
        """Let the memory go; it is freed in stream order if nobody else refers to it. Closing again does nothing.

        Work that another thread hands over meanwhile raises ClosedError, or is done before the memory goes.

        Ordering: only enqueues.
        """
        if self._closed:
            return
        self._closed = True
        self._operand = None
        storage, self._cell = self._cell.storage, _Cell(None)
        if storage is not None:
            retire = storage.block.stream.state.retire
            del storage
            retire.run_forgotten()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self.close, error, "closing", self)

    def __cuglue_operand__(self, place: Place) -> Operand:
        """The buffer as an operand of the runtime at ``place``."""
        operand, storage = self._operand, self._cell.storage
        if (
            operand is not None
            and storage is not None
            and operand.keep is storage
            and storage.block.state is _LIVE
            and self._place is place
            and not storage.exported
        ):
            return operand
        storage = self.storage
        if self._place is not place and self._place.service != place.service:
            raise ArgumentError(
                repr(self), got="a buffer of another runtime", expected="one of this runtime", hint="Copy it"
            )
        partners = partners_of(storage, place) if storage.exported else ()
        ptr, size = storage.block.ptr + self.offset, self.nbytes
        operand = Operand(ptr, size, (size,), None, None, storage.block, partners, keep=storage)
        self._operand = None if partners else operand
        if self._closed:  # meanwhile, by another thread: this work is done yet, and nothing is kept after it
            self._operand = None
        return operand

    def __repr__(self) -> str:
        if self._closed:
            return "Buffer(closed)"
        storage = self._cell.storage
        if storage is None:
            where = "unbound"
        elif getattr(storage.block, "planned", False):  # looking would take memory
            where = "planned"
        else:
            where = f"ptr={storage.block.ptr + self.offset:#x}"
        return f"Buffer({where}, nbytes={self.nbytes}, device={self._place.device})"


def bind_storage(reserved: Buffer, new: Buffer) -> None:
    """Give the memory of ``reserved`` to ``new``; everything else that names ``reserved`` loses it.

    Raises:
        StorageHandleNotFound: ``reserved`` has no memory.
        ArgumentError: ``new`` has memory already, or another size, or belongs to another runtime.
    """
    for buffer in (reserved, new):
        if not isinstance(buffer, Buffer):
            raise UsageError("bind", got=shown(buffer)[:80], expected="buffers of this runtime")
    storage = reserved.storage
    if new._closed:
        raise ClosedError(repr(new), got="memory", expected="an open buffer")
    if new._cell.storage is not None:
        raise ArgumentError(repr(new), got="memory", expected="a buffer that is not bound yet")
    if new._place.service != reserved._place.service:
        raise ArgumentError(repr(new), got="a buffer of another runtime", expected="one of the same runtime")
    if new.offset + new.nbytes > storage.block.size:
        raise ArgumentError(
            repr(new), got=f"a reservation of {storage.block.size} bytes", expected="one as large"
        )
    storage.block.taint = None  # whoever binds it says that its bytes are what they should be
    reserved._cell.storage, new._cell.storage = None, storage
    reserved._operand = None
