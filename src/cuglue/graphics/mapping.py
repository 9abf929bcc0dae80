"""A live map: device memory of somebody else's object, as an array, until it is left.

Owns the exports of one map, the streams known to use its memory, and leaving it. Must not know what the object is
(:mod:`backings`) nor who else has it mapped (:mod:`handle`).

Leaving waits, on the GPU, for every consumer known: streams that exports were made for, streams named by
:meth:`CudaMap.record`, the array library's current stream, and, where a library that names no stream read the CUDA
array interface, every stream of the device. The host never waits.
"""

from __future__ import annotations

import os
import sys
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..core.stream import Stream, as_stream
from ..driver.protocol import Access, Driver, MemoryType
from ..errors import ClosedError, CuglueError
from ..exchange.tokens import ExportLedger
from ..exchange.view import ArrayView, Exporter
from ..layout import Layout
from ..lifecycle import MAP, MapState, step
from .backings import Share

if TYPE_CHECKING:
    from ..core.block import BlockLife
    from .life import Life

#: Libraries that read the CUDA array interface on streams of their own, and do not say on which.
_UNANNOUNCED = ("torch", "numba", "jax", "warp", "pycuda")


def unannounced_readers() -> bool:
    """Whether a library is loaded that may read the CUDA array interface on a stream that nobody names."""
    return any(name in sys.modules for name in _UNANNOUNCED)


class CudaMap(Exporter):
    """One map of a :class:`~cuglue.graphics.handle.CudaHandle`, as a context manager and as an array.

    ``cupy.asarray(m)``, ``torch.from_dlpack(m)``, ``numpy.asarray(m)`` (simulated device) and the shortcuts
    ``m.cupy()`` and ``m.torch()`` see the mapped memory itself; ``m.numpy()`` is a copy on the host.

    Attributes:
        stream: the stream the map is ordered on; work queued there needs no further order.
        writable: True if leaving publishes what was written.

    Ownership: arrays made from a map keep it, and with it the memory if that outlives the map (images); of memory
    that goes away (buffers) they must be dropped before the map is left.
    """

    __slots__ = (
        "__weakref__",
        "_cai_read",
        "_consumers",
        "_everybody",
        "_hidden",
        "_ledger",
        "_life",
        "_pid",
        "_state",
        "published",
        "readonly",
        "share",
        "stream",
        "writable",
    )

    def __init__(
        self, life: Life, share: Share, stream: Stream, *, writable: bool, readonly: bool, everybody: bool
    ) -> None:
        """Made by a handle's ``map()`` and ``map_mut()``.

        Args:
            life: of the handle whose map it is.
            share: the memory.
            stream: the stream that the map is ordered on.
            writable: leaving publishes.
            readonly: exports say that the memory may not be written.
            everybody: every stream of the device is ordered after the map already.
        """
        self._life = life
        self.share = share
        self._state = MapState.LIVE
        self._pid = os.getpid()
        self._hidden = False  # out of the caller's reach: nobody could have left it
        self._consumers: dict[Stream, None] = {stream: None}  # a set that keeps its order
        self._everybody = everybody
        self._cai_read = False
        self._ledger: ExportLedger | None = None  # made by the first export
        self.stream = stream
        self.writable = writable
        self.readonly = readonly
        self.published = False

    # --- what it is -----------------------------------------------------------------------------------------------
    @property
    def released(self) -> bool:
        """True once the map was left."""
        return self._state is MapState.RELEASED

    @property
    def device_ptr(self) -> int:
        """Device address of the first byte; 0 after the map was left."""
        return 0 if self.released else self.share.block.ptr

    @property
    def layout(self) -> Layout:
        """Shape, strides in bytes and element type: tight rows, row 0 is OpenGL's bottom row."""
        return self.share.layout

    @property
    def size(self) -> int:
        """Bytes mapped; 0 after the map was left."""
        return 0 if self.released else self.share.layout.nbytes

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return True  # a map of nothing is a map still

    @property
    def rows(self) -> int:
        """Rows of the image; 1 for a buffer."""
        return self.share.rows

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next: rows are tight."""
        return self.share.layout.nbytes // self.share.rows

    @property
    def block(self) -> BlockLife:
        """The memory with everything known to use it, for code that orders its own work."""
        self.check_exportable()
        return self.share.block

    @property
    def planes(self) -> dict[str, ArrayView]:
        """The arrays that make up an image, by name: "y" and "uv" of NV12, NV16 and NV24, else "image"."""
        self.check_exportable()
        base = self.share.block.ptr
        return {name: ArrayView(self, base + p.offset, p.layout) for name, p in self.share.planes.items()}

    def __repr__(self) -> str:
        what = (
            "released"
            if self.released
            else f"shape={self.shape}, dtype={self.dtype}, stream={self.stream.id}"
        )
        return f"CudaMap({self._life.name}, {what}{', writable' if self.writable else ''})"

    # --- as the owner of exported memory ----------------------------------------------------------------------------
    @property
    def export_owner(self) -> Self:
        """The map answers for its exports itself."""
        return self

    @property
    def driver(self) -> Driver:
        """The driver that the memory belongs to."""
        return self.stream.driver

    @property
    def device(self) -> int:
        """Ordinal of the memory's device."""
        return self.stream.device

    @property
    def memory_type(self) -> MemoryType:
        """Where the memory lies, as DLPack says it: on the host for the simulated device."""
        return self.stream.state.capabilities.device_type

    @property
    def ledger(self) -> ExportLedger:
        """The live exports of this map."""
        if self._ledger is None:
            self._ledger = ExportLedger()
            self.share.note_reader(self)
        return self._ledger

    def check_exportable(self) -> None:
        """Raise ClosedError if the map was left."""
        if self.released:
            raise ClosedError(
                f"{self!r}",
                got="a use of its memory",
                expected="a live map",
                hint="Use it inside its with statement",
            )

    def order_consumer(self, stream: Stream) -> None:
        """Order later work of ``stream`` after all pending work on the memory, also what others queued uncounted.

        Ordering: only enqueues; nothing where ``stream`` is the map's own and no other stream was named.
        """
        self.share.block.prepare(stream, self._access)
        for other in self._consumers:
            stream.join(other)

    def note_consumer(self, stream: Stream) -> None:
        """``stream`` uses the memory from now on: leaving waits for it.

        Ordering: queues nothing now.
        """
        self.share.block.finish(stream, self._access)
        self._consumers[stream] = None

    def order_host(self) -> None:
        """Block the host until all pending work on the memory is done."""
        for stream in (*(s for s, q in self.share.block.uses() if s.completed < q), *self._consumers):
            stream.synchronize()

    def cai_stream(self) -> int | None:
        """None where the reader is in order already: all streams are, or the map's is the current one."""
        if self._everybody or as_stream(None, device=self.device, driver=self.driver) is self.stream:
            return None
        return self.stream.handle or 1

    @property
    def consumers(self) -> tuple[Stream, ...]:
        """Streams that the memory may be used on without telling: the map's own, and those exports were made for."""
        return tuple(self._consumers)

    @property
    def cai_read(self) -> bool:
        """Whether somebody may use the memory on streams that nobody named."""
        return self._cai_read

    def note_cai_reader(self) -> None:
        """The CUDA array interface was read; only sets a mark."""
        if not self._cai_read:
            self._cai_read = True
            self.share.note_reader(self)

    @property
    def _access(self) -> Access:
        return Access.READ if self.readonly else Access.READ_WRITE

    # --- other users of the memory ----------------------------------------------------------------------------------
    def record(self, stream: Any = None) -> None:
        """Work on ``stream`` uses the memory: leaving, and the next map of the same memory, wait for it.

        Args:
            stream: anything :func:`~cuglue.as_stream` takes. Named before or after the work is queued, either is right.

        Ordering: queues nothing now; the wait is queued by whatever ends the memory.

        Raises:
            ClosedError: the map was left.
            StreamMisuse: no stream, or one of another device.
        """
        self.check_exportable()
        user = as_stream(stream, device=self.device, driver=self.driver)
        self.share.block.finish(user, Access.READ)
        self._consumers[user] = None

    def note_uses(self, stream: Stream, current: Stream) -> None:
        """Make every consumer known a use of the memory, with all it queued so far. Called on leaving.

        Args:
            stream: the stream that the map is left on.
            current: the array library's current stream of the leaving thread.

        Ordering: queues nothing, unless the CUDA array interface was read by nobody knows whom: then ``stream`` waits
            for every stream of the device.
        """
        block = self.share.block
        for user in {**self._consumers, current: None}:
            # As reads, which are kept per stream: a write would stand for the uses before it, unordered as they are.
            block.finish(user, Access.READ)
        if self._cai_read and unannounced_readers():
            stream.join_context()
            block.finish(stream, Access.READ)

    # --- leaving ----------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        self.check_exportable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except CuglueError as second:
            if error is None:
                raise
            error.add_note(f"leaving {self!r} failed too: {second}")

    def release(self, stream: Any = None) -> None:
        """Leave the map: publish what was written, give the object back. Releasing again does nothing.

        Args:
            stream: where to queue the hand-over; None: the map's own stream. Graphics work issued after this call
                comes after it, and after every consumer known.

        Ordering: only enqueues.
        Ownership: the map stays releasable where this fails, and publishes once at most.

        Raises:
            PublishError: an image could not be copied back.
            DriverError: the object could not be given back.
            CaptureError: the stream, or one that has to be waited for, captures a graph.
            BusyError: strict mode, and arrays of memory that is gone are alive; the map was left.
        """
        self._leave(stream, publish=True)

    def cancel(self) -> None:
        """Leave the map without publishing: an image keeps what it held. Else as :meth:`release`."""
        self._leave(None, publish=False)

    discard = cancel

    def leave_later(self) -> None:
        """Leave, without publishing, before the object's next call. For a map that its user cannot reach.

        Ordering: queues nothing now.
        """
        if not self.released:
            self._hidden = True
            self._life.leave_later(self, publish=False)

    def _leave(self, stream: Any, *, publish: bool) -> None:
        if self.released:
            return
        current = as_stream(None, device=self.device, driver=self.driver)
        if stream is not None:
            where = as_stream(stream, device=self.device, driver=self.driver)
        else:
            # Never a handle that may be dead by now.
            where = self.stream if self.stream.nameable() else current
        self._life.leave(self, where, current, publish)
        if (self._cai_read or self._ledger is not None) and not self._life.backing.survives:
            self.ledger.check_leave(self._life.name, reader=self if self._cai_read else None)

    def advance(self, event: str) -> None:
        """Move along the table of map states."""
        self._state = step(MAP, self._state, event, self)

    def __del__(self) -> None:
        if getattr(self, "_state", MapState.RELEASED) is MapState.RELEASED or self._pid != os.getpid():
            return
        if self._hidden or sys.is_finalizing():
            return
        self._life.leave_later(self, publish=True)
        warnings.warn(f"{self!r} was never released", ResourceWarning, stacklevel=1, source=self)
