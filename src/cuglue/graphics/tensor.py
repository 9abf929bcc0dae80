"""An image in host memory with, perhaps, a GPU object behind it: the owner of a handle.

Owns the pitched host memory, the handle, and what passes between the two when the host maps the tensor. Must not know
what the handle's object is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np

from ..arguments import shown, whole_of
from ..driver.protocol import CopyKind
from ..errors import BusyError, ClosedError, LayoutError, MapConflictError, UnsupportedError, UsageError
from ..exchange.copies import in_flight
from ..formats import Format, Packing, tight_geometry
from ..layout import Layout, contiguous_strides, integers
from ..lifecycle import leave
from .backings import WHOLE
from .fences import check_value
from .handle import CudaHandle
from .life import Wish
from .mapping import CudaMap
from .parts import CudaClientParts
from .planes import format_of
from .transfer import unseen


class Tensor:
    """An image that the host sees with padded rows, and CUDA with tight ones.

    Without a handle it is host memory; with one (:meth:`attach`, ``cuda=``) the handle's object holds the contents, and
    a host map is a copy of it with rows :attr:`row_stride` bytes apart.

    Attributes:
        shape: (height, width, channels); of planar images (channels, height, width); of semi-planar ones (rows, bytes).
        format: what a pixel is.
        row_stride: bytes from one row of a host map to the next. Never of a CUDA map: its rows are tight
            (``m.row_bytes``), but for semi-planar images, which are as wide as this.
        nbytes: bytes of the tight rows; what a CUDA map has at least.

    Ownership: the tensor owns its handle; close it.
    """

    def __init__(
        self,
        shape: Sequence[int],
        format: str | Format,
        *,
        row_stride: int | None = None,
        cuda: CudaHandle | None = None,
    ) -> None:
        """Make a tensor of zeros.

        Args:
            shape: (height, width) in pixels, or (height, width, channels).
            format: such as "RGBA8" or "NV12".
            row_stride: bytes from row to row on the host; None: tight rows.
            cuda: a handle of the object that holds the contents; the tensor owns it from now on.

        Raises:
            LayoutError: no image of that shape, rows that overlap, more than the host has room for, an object too
                small for it, or an image with other rows.
            UnsupportedError: a format without a type. UsageError: ``cuda`` is no handle.
        """
        self.format = format_of("tensor", format)
        height, width = _size(shape, self.format)
        if row_stride is not None:
            row_stride = whole_of("row_stride", row_stride, 1, error=LayoutError)
        semi_planar = self.format.packing is Packing.SEMI_PLANAR
        self._geometry = tight_geometry(self.format, width, height, row_stride if semi_planar else None)
        tight = self._geometry.row_bytes
        self.row_stride = tight if row_stride is None else row_stride
        itemsize = np.dtype(self.format.dtype).itemsize
        if self.row_stride < tight or self.row_stride % itemsize:
            raise LayoutError(
                f"row_stride of a {self.format} image of width {width}",
                got=f"{self.row_stride} bytes",
                expected=f"a multiple of {itemsize}, and at least {tight}",
            )
        if semi_planar:
            self.shape: tuple[int, ...] = (self._geometry.rows, tight)
        elif self.format.packing is Packing.PLANAR:
            self.shape = (self.format.channels, height, width)
        else:
            self.shape = (height, width, self.format.channels)
        self.nbytes = self._geometry.nbytes
        needed = self.row_stride * self._geometry.rows
        try:
            self._memory = np.zeros(needed, np.uint8)
        except (ValueError, MemoryError) as error:
            raise LayoutError(
                f"a {self.format} tensor", got=f"{needed} bytes", expected="what the host has room for"
            ) from error
        self._recorded = 0
        self._host_maps = 0
        self._closed = False
        self._cuda: CudaHandle | None = None
        if cuda is not None:
            if not isinstance(cuda, CudaHandle):
                raise UsageError("cuda of a tensor", got=shown(cuda), expected="a CudaHandle, or None")
            self._check_size(cuda.size, cuda)
            self._check_rows(cuda)
            self._cuda = cuda

    # --- what it is -----------------------------------------------------------------------------------------------
    @property
    def cuda(self) -> CudaHandle | None:
        """The handle; None where only the host holds the image."""
        return self._cuda

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return np.dtype(self.format.dtype)

    @property
    def rows(self) -> int:
        """Rows of a map; of planar and semi-planar images those of all planes."""
        return self._geometry.rows

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._closed

    def __repr__(self) -> str:
        return f"Tensor({self.shape}, {self.format}, row_stride={self.row_stride}, cuda={self._cuda!r})"

    def _check_size(self, nbytes: int, what: object) -> None:
        if nbytes < self.nbytes:
            raise LayoutError(
                f"{what} for {self!r}", got=f"{nbytes} bytes", expected=f"at least {self.nbytes}"
            )

    def _check_rows(self, handle: CudaHandle) -> None:
        """Refuse an image whose rows are not the tensor's: copies between them would shear it. Buffers have no rows."""
        if len(handle.shape) == 1:
            return
        rows, row_bytes = handle.shape[0], handle.size // handle.shape[0]
        expected = self._geometry.rows, self._geometry.row_bytes
        if (rows, row_bytes) != expected:
            raise LayoutError(
                f"{handle} for {self!r}",
                got=f"{rows} rows of {row_bytes} bytes",
                expected=f"{expected[0]} rows of {expected[1]} bytes",
            )

    # --- the host -------------------------------------------------------------------------------------------------
    @contextmanager
    def map(self, stream: Any = None, *, readonly: bool = False) -> Iterator[np.ndarray[Any, Any]]:
        """The image on the host, as a NumPy array whose rows are :attr:`row_stride` apart. Use it in ``with``.

        Args:
            stream: where to copy from and to the handle's object; None: the array library's current stream.
            readonly: nothing is written back; the array says so. Nor is it when the map is dropped without being left.

        Ordering: with a handle, blocks the host for the copy in, and for the copy back on leaving; else touches no
            stream.

        Raises:
            ClosedError: the tensor was closed.
            MapConflictError: with a handle, a host map that writes beside any other map, or one that reads beside one
                that writes: of the two on the host, both would use one copy; beside one of CUDA, what either writes
                would be torn, or undone. Else as :meth:`CudaHandle.map`.
        """
        self._check_open()
        handle, key = self._cuda, object()  # the key stands for this map
        self._host_maps += 1
        try:
            if handle is not None:
                wish = "map(readonly=True)" if readonly else "map()"
                handle._call(handle._life.begin_host, key, not readonly, wish, self)
                with unseen(handle._map(stream, Wish(WHOLE, host=True), None)) as m:
                    self._copy(m, CopyKind.D2H)
            array = self._array()
            array.flags.writeable = not readonly
            try:
                yield array
            except GeneratorExit:
                readonly = True  # dropped, not left: by a collector, on any thread, or when the process ends
                raise
            finally:
                if handle is not None and not readonly:
                    load = handle.size != self.nbytes
                    with unseen(handle._map(stream, Wish(WHOLE, True, load, host=True), None)) as m:
                        self._copy(m, CopyKind.H2D)
        finally:
            self._host_maps -= 1
            if handle is not None:
                handle._life.host.pop(key, None)

    def _array(self) -> np.ndarray[Any, Any]:
        """The host memory in the tensor's shape."""
        strides = list(contiguous_strides(self.shape, self.dtype.itemsize))
        row = 1 if self.format.packing is Packing.PLANAR else 0
        strides[row] = self.row_stride
        if row:
            strides[0] = self.row_stride * self.shape[1]
        layout = Layout.of(self.shape, self.dtype, strides)
        return np.ndarray(layout.shape, layout.dtype, self._memory.data, strides=layout.strides)

    def _copy(self, m: CudaMap, kind: CopyKind) -> None:
        """Copy rows between a map and the host memory, and wait for it."""
        host, tight = self._memory.ctypes.data, self._geometry.row_bytes
        ends = (m.device_ptr, tight, host, self.row_stride)
        if kind is CopyKind.D2H:
            ends = (host, self.row_stride, m.device_ptr, tight)
        with in_flight(self._memory, m.stream):
            m.driver.copy_2d_async(*ends, tight, self.rows, kind, m.stream.handle)

    # --- CUDA -----------------------------------------------------------------------------------------------------
    def cuda_map(self, stream: Any = None, **options: Any) -> CudaMap | None:
        """:meth:`CudaHandle.try_map` of the handle; None without one.

        Ordering: as there; without a handle nothing is asked or queued.

        Raises:
            MapConflictError: a host map writes, and the object has none of it yet. Else as there.
        """
        self._check_open()
        if self._cuda is None:
            return None
        return self._cuda.try_map(stream, **options)

    def cuda_map_mut(self, stream: Any = None, **options: Any) -> CudaMap | None:
        """:meth:`CudaHandle.try_map_mut` of the handle; None without one.

        Ordering: as there; without a handle nothing is asked or queued.

        Raises:
            MapConflictError: the host has it mapped: it would not see what is written here, or undo it. Else as there.
        """
        self._check_open()
        if self._cuda is None:
            return None
        return self._cuda.try_map_mut(stream, **options)

    def record_write(self, value: int) -> None:
        """As :meth:`CudaHandle.record_write`; kept for a handle that is attached later."""
        check_value(self, value)
        self._check_open()
        self._recorded = max(self._recorded, value)
        if self._cuda is not None:
            self._cuda.record_write(value)

    def attach(self, parts: CudaClientParts, *, device: int | None = None) -> None:
        """Take a registration that was given away: its buffer holds the contents from now on.

        A handle that the tensor had is closed.

        Args:
            parts: retained before this returns; the caller's own count is untouched: close them.
            device: ordinal of the CUDA device; None: the one that the parts say, else the first.

        Ordering: queues nothing. Ownership: the tensor ends the registration.

        Raises:
            AlreadyTransferredError: somebody has them already.
            UsageError, LayoutError: something is missing, or the buffer is too small.
            MapConflictError: the tensor is mapped. In each case nothing was taken.
        """
        self._check_open()
        if not isinstance(parts, CudaClientParts):
            raise UsageError("client parts", got=shown(parts), expected="CudaClientParts")
        parts.check()
        self._check_size(parts.size, parts)
        self._check_idle("attach()")
        device = parts.device_for(device)
        if self._cuda is not None:
            self._cuda.close()
            self._cuda = None
        self._cuda = CudaHandle.from_client_parts(parts, device=device)
        self._cuda.record_write(self._recorded)

    def _check_idle(self, what: str) -> None:
        if self._host_maps or (self._cuda is not None and self._cuda.mapped):
            raise MapConflictError(
                f"{self!r} is mapped", got=what, expected="no live map", hint="Leave the maps first"
            )

    # --- the end --------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Close the handle, if there is one. Closing again does nothing. Ordering: as :meth:`CudaHandle.close`.

        Raises:
            BusyError: the host has it mapped.
            DriverError: the handle could not be closed; the tensor can be closed again.
        """
        if self._host_maps:
            raise BusyError(f"{self!r}", got="close()", expected="no live host map")
        if self._cuda is not None:
            self._cuda.close()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed", got="a call", expected="an open tensor")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self.close, error, "closing", self)


def _size(shape: Sequence[int], format: Format) -> tuple[int, int]:
    """``(height, width)``.

    Raises:
        LayoutError: neither of the two forms of a shape. UnsupportedError: a format that has no channels.
    """
    if not format.channels:
        raise UnsupportedError(f"{format}: {format.reason}", reason="format", hint=format.way_out)
    sizes = integers("shape", shape)
    if len(sizes) not in (2, 3) or sizes[2:] not in ((), (format.channels,)):
        raise LayoutError(
            f"a {format} tensor",
            got=f"shape {sizes}",
            expected=f"(height, width) or (height, width, {format.channels})",
        )
    return sizes[0], sizes[1]
