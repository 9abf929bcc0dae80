"""A live map: device memory of somebody else's object, as an array, until it is left.

Owns what a map says of itself, and leaving it. Must not know what the object is (:mod:`backings`), who else has it
mapped (:mod:`life`), nor how its users are told apart (:mod:`users`).

Leaving waits, on the GPU, for every consumer known: streams that exports were made for, streams named by
:meth:`CudaMap.record`, the array library's current stream, and, where a library that names no stream read the CUDA
array interface, every stream of the device. The host never waits.
"""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..core import process
from ..core.stream import Stream, as_stream
from ..errors import ClosedError, UnsupportedError, UsageError
from ..exchange.view import ArrayView
from ..lifecycle import MAP, MapState, leave, step
from .backings import OpaqueBacking, Share
from .inplace import ImageObject, ImageObjects
from .users import MapUsers

if TYPE_CHECKING:
    from ..core.block import BlockLife
    from .life import Life
    from .plan import Plan


_RELEASED = MapState.RELEASED  # to look a member up costs as much as a call


class CudaMap(MapUsers):
    """One map of a :class:`~cuglue.graphics.handle.CudaHandle`, as a context manager and as an array.

    ``cupy.asarray(m)``, ``torch.from_dlpack(m)``, ``numpy.asarray(m)`` (simulated device) and the shortcuts
    ``m.cupy()`` and ``m.torch()`` see the mapped memory itself; ``m.numpy()`` is a copy on the host.

    Attributes:
        stream: the stream the map is ordered on; work queued there needs no further order.
        writable: True if leaving publishes what was written.
        handle: what was mapped; a live map keeps it, and with it the owner of the object that it may keep.

    Ownership: arrays made from a map keep it, and with it the memory if that outlives the map (images); of memory
    that goes away (buffers) they must be dropped before the map is left.
    """

    __slots__ = (
        "__weakref__",
        "_hidden",
        "_life",
        "_plan",
        "_process",
        "_state",
        "handle",
        "published",
        "writable",
    )

    def __init__(self, life: Life, share: Share, stream: Stream, writable: bool, readonly: bool) -> None:
        """Made by a handle's ``map()`` and ``map_mut()``; live once those have noted it everywhere.

        Args:
            life: of the handle whose map it is.
            share: the memory.
            stream: the stream that the map is ordered on.
            writable: leaving publishes.
            readonly: exports say that the memory may not be written.
        """
        # The fields of MapUsers too: every frame makes maps, and each call is a tenth of one.
        self._life = life
        self.share = share
        self.layout = share.layout
        self.stream = stream
        self.driver = stream.driver
        self.device = stream.device
        self.memory_type = stream.state.capabilities.device_type
        self.writable = writable
        self.readonly = readonly
        self.handle: object = None
        self.everybody = self.published = False
        self._consumers = self._interface = self._ledger = None
        self._cai_read = False
        self._hidden = False  # out of the caller's reach: nobody could have left it
        self._process = process.life
        self._plan: Plan | None = None  # how to leave it at once
        self._state = _RELEASED

    # --- what it is -----------------------------------------------------------------------------------------------
    @property
    def released(self) -> bool:
        """True once the map was left."""
        return self._state is _RELEASED

    @property
    def device_ptr(self) -> int:
        """Device address of the first byte; 0 in place, and after the map was left."""
        return 0 if self._state is _RELEASED else self.share.ptr

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
    def untyped(self) -> bool:
        """Whether the memory is bytes without an element type, a buffer's: a kernel may take it as any pointer."""
        return len(self.layout.shape) == 1

    @property
    def in_place(self) -> bool:
        """Whether kernels work on the image itself (:meth:`surface`, :meth:`texture`), and there is no linear copy."""
        return self.share.part.in_place

    @property
    def block(self) -> BlockLife:
        """The memory with everything known to use it, for code that orders its own work; in place, the image."""
        self.check_live()
        return self.share.block

    @property
    def planes(self) -> dict[str, ArrayView]:
        """The arrays that make up an image, by name: "y" and "uv" of NV12, NV16 and NV24, else "image"."""
        self.check_exportable()
        base = self.share.ptr
        return {name: ArrayView(self, base + p.offset, p.layout) for name, p in self.share.planes.items()}

    def __repr__(self) -> str:
        what = "released"
        if not self.released:
            what = f"shape={self.shape}, dtype={self.dtype}, stream={self.stream.id}"
            if self._state is MapState.FAILED:
                what += ", could not be left yet"
        return f"CudaMap({self._life.name}, {what}{', writable' if self.writable else ''})"

    # --- in place -------------------------------------------------------------------------------------------------
    def surface(self) -> ImageObject:
        """The image as a ``cudaSurfaceObject_t``: kernels read it, and write it if the map is writable.

        Ordering: queues nothing. Ownership: ends with the map.

        Raises:
            UsageError: the map is not in place.
            UnsupportedError: this driver makes no surfaces of the image.
        """
        objects = self._objects("surface()")
        return ImageObject(self, "surface", objects.surface())

    def texture(self, *, normalized: bool = False, linear: bool = False) -> ImageObject:
        """The image as a ``cudaTextureObject_t``, for reading.

        Args:
            normalized: integers are read as floats of 0 to 1 (-1 to 1).
            linear: reads between texels are interpolated.

        Ordering, Ownership, Raises: as :meth:`surface`.
        """
        objects = self._objects("texture()")
        return ImageObject(self, "texture", objects.texture(normalized=normalized, linear=linear))

    def _objects(self, what: str) -> ImageObjects:
        self.check_live()
        backing = self._life.backing
        if not self.in_place or not isinstance(backing, OpaqueBacking):
            raise UsageError(
                f"{self!r}", got=what, expected="a map of an image in place", hint="Map it with in_place=True"
            )
        if not backing.surfaces:
            raise UnsupportedError(f"{self!r}: {what}", reason="surfaces", hint="Use the linear copy")
        return backing.objects(self.share)

    # --- whether it may be used -----------------------------------------------------------------------------------
    def check_exportable(self) -> None:
        """Raise ClosedError if the map was left, UsageError if it is in place: then there is no memory to export."""
        if self._state is _RELEASED:
            self.check_live()
        if self.share.part.in_place:
            raise UsageError(
                f"{self!r} is mapped in place",
                got="a use of its memory",
                expected="m.surface() or m.texture()",
                hint="Map without in_place=True for an array",
            )

    def check_live(self) -> None:
        """Raise ClosedError if the map was left."""
        if self._state is _RELEASED:
            raise ClosedError(
                f"{self!r}",
                got="a use of its memory",
                expected="a live map",
                hint="Use it inside its with statement",
            )

    # --- leaving ----------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        if self._state is _RELEASED:
            self.check_live()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.release()
        else:
            leave(self.release, error, "leaving", self)

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
        if stream is not None or self._plan is None or not self._plan.leave((self,)):
            self._leave(stream, publish=True)
        elif self._cai_read or self._ledger is not None:
            self.report_exports()

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
        current = self.current_stream()
        if stream is not None:
            where = as_stream(stream, device=self.device, driver=self.driver)
        else:
            # Never a handle that may be dead by now.
            where = self.stream if self.stream.nameable() else current
        self._life.leave(self, where, current, publish)
        self.report_exports()

    def report_exports(self) -> None:
        """Warn, or in strict mode raise BusyError, of arrays that are alive while their memory is gone."""
        if (self._cai_read or self._ledger is not None) and not self._life.backing.survives:
            self.ledger.check_leave(self._life.name, reader=self if self._cai_read else None)

    def advance(self, event: str) -> None:
        """Move along the table of map states."""
        self._state = step(MAP, self._state, event, self)
        if self._state is _RELEASED:
            self.handle = None  # last, so that its owner outlives the hand-over
            self._interface = None  # whoever asks again is told that the map was left

    def __reduce__(self) -> tuple[Any, ...]:
        # For copies and pickles both: the end of a copy would leave the map.
        raise UsageError(
            repr(self), got="a copy or pickle of it", expected="a copy of its contents: m.numpy()"
        )

    def __del__(self) -> None:
        try:
            if self._state is _RELEASED or self._process is not process.life:
                return
        except AttributeError:
            return  # its making was interrupted
        if self._hidden or sys.is_finalizing():
            return
        self._life.leave_later(self, publish=True)
        warnings.warn(f"{self!r} was never released", ResourceWarning, stacklevel=1, source=self)
