"""Who uses the memory of a map: arrays made from it, streams that were named, and readers that nobody named.

Owns the exports of one map and the streams known to use its memory, as :class:`~cuglue.exchange.owner.ExportOwner`
wants it. Must not know what the memory is, nor how a map is left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Self

from ..core.foreign import interface_number
from ..core.stream import Stream, as_stream
from ..driver.protocol import Access, Driver, MemoryType
from ..errors import CaptureError
from ..exchange.tokens import ExportLedger
from ..exchange.view import Exporter
from ..layout import Layout
from .backings import Share
from .exports import export_again

READ, READ_WRITE = Access.READ, Access.READ_WRITE  # to look a member up costs as much as a call


def unannounced_readers() -> bool:
    """Whether a library is loaded that may read the CUDA array interface on a stream of its own, and not say which."""
    loaded = sys.modules  # asked by every map: a loop over the names costs twice as much
    return "torch" in loaded or "numba" in loaded or "jax" in loaded or "warp" in loaded or "pycuda" in loaded


def order_everybody(maps: Iterable[MapUsers], stream: Stream) -> None:
    """Order all streams of the device after maps on ``stream``, for readers that name none.

    While any of them captures, which that would break, readers are told the maps' stream instead.
    """
    try:
        stream.hold_context()
    except CaptureError:
        return
    for m in maps:
        m.everybody = True


def is_record_of(stream: Stream, obj: object) -> bool:
    """Whether ``stream`` surely is the record of a foreign stream; one object means each thread's default stream."""
    return stream.owner is obj and stream.thread is None


class MapUsers(Exporter):
    """The users of one map's memory; see :class:`~cuglue.graphics.mapping.CudaMap`.

    Attributes:
        share: the memory, shared by all maps of the same part.
        layout: shape, strides in bytes and element type: tight rows, row 0 is OpenGL's bottom row.
        stream: the stream the map is ordered on.
        driver, device: the driver that the memory belongs to, and the ordinal of its device.
        memory_type: where the memory lies, as DLPack says it: on the host for the simulated device.
        readonly: exports say that the memory may not be written.
        everybody: True where every stream of the device is ordered after the map already.
    """

    __slots__ = (
        "_cai_read",
        "_consumers",
        "_interface",
        "_ledger",
        "device",
        "driver",
        "everybody",
        "layout",
        "memory_type",
        "readonly",
        "share",
        "stream",
    )

    share: Share
    layout: Layout
    stream: Stream
    driver: Driver
    device: int
    memory_type: MemoryType
    readonly: bool
    everybody: bool
    # Streams besides the map's own that exports were made for, or that were named; a set that keeps its order.
    _consumers: dict[Stream, None] | None
    _cai_read: bool
    _interface: dict[str, Any] | None  # what the CUDA array interface says, but for the stream
    _ledger: ExportLedger | None  # made by the first export

    def check_live(self) -> None:
        """Raise ClosedError if the map was left."""
        raise NotImplementedError

    def check_exportable(self) -> None:
        """Raise if there is no memory to export."""
        raise NotImplementedError

    # --- as the owner of exported memory ----------------------------------------------------------------------------
    @property
    def export_owner(self) -> Self:
        """The map answers for its exports itself."""
        return self

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Inherited."""
        if type(stream) is int and dl_device is None and copy is None:
            capsule = export_again(self, stream, max_version)
            if capsule is not None:
                return capsule
        return super().__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    @property
    def ledger(self) -> ExportLedger:
        """The live exports of this map."""
        if self._ledger is None:
            self._ledger = ExportLedger()
            self.share.note_reader(self)
        return self._ledger

    def order_consumer(self, stream: Stream) -> None:
        """Order later work of ``stream`` after all pending work on the memory, also what others queued uncounted.

        Ordering: only enqueues; nothing where ``stream`` is the map's own and no other stream was named.
        """
        for other in self.consumers:  # first: what they queued since covers the uses that the block knows
            stream.join(other)
        self.share.prepare(stream, READ if self.readonly else READ_WRITE)

    def note_consumer(self, stream: Stream) -> None:
        """``stream`` uses the memory from now on: leaving waits for it.

        Ordering: queues nothing now.
        """
        self.share.finish(stream, READ if self.readonly else READ_WRITE)
        self._add_consumer(stream)

    def order_host(self) -> None:
        """Block the host until all pending work on the memory is done."""
        for stream in {**dict(self.share.block.uses()), **dict.fromkeys(self.consumers)}:
            stream.synchronize()

    def cai_stream(self) -> int | None:
        """None where the reader is in order already: all streams are, or the map's is the current one."""
        if self.everybody or self.current_stream() is self.stream:
            return None
        return interface_number(self.stream)

    def current_stream(self) -> Stream:
        """The array library's current stream on this thread; mostly the map's own, which then is seen at once."""
        current = self.driver.stream_current(self.device)
        if is_record_of(self.stream, current):
            return self.stream
        return as_stream(current, device=self.device, driver=self.driver)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Inherited. Worked out once a map, but for the stream: consumers read it twice each."""
        if self._interface is None:
            self._interface = super().__cuda_array_interface__
        return {**self._interface, "stream": self.cai_stream()}

    @property
    def consumers(self) -> tuple[Stream, ...]:
        """Streams that the memory may be used on without telling: the map's own, and those exports were made for."""
        return (self.stream, *(self._consumers or ()))

    def _add_consumer(self, stream: Stream) -> None:
        if stream is not self.stream:
            if self._consumers is None:
                self._consumers = {}
            self._consumers[stream] = None

    @property
    def cai_read(self) -> bool:
        """Whether somebody may use the memory on streams that nobody named."""
        return self._cai_read

    def note_cai_reader(self) -> None:
        """The CUDA array interface was read; only sets a mark."""
        if not self._cai_read:
            self._cai_read = True
            self.share.note_reader(self)

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
        self.check_live()
        user = as_stream(stream, device=self.device, driver=self.driver)
        self.share.block.finish(user, READ)
        self._add_consumer(user)

    def note_uses(self, stream: Stream, current: Stream) -> None:
        """Make every consumer known a use of the memory, with all it queued so far. Called on leaving.

        Args:
            stream: the stream that the map is left on.
            current: the array library's current stream of the leaving thread.

        Ordering: queues nothing, unless the CUDA array interface was read by nobody knows whom: then ``stream`` waits
            for every stream of the device.
        """
        block = self.share.block
        for user in dict.fromkeys((*self.consumers, current)):
            # As reads, which are kept per stream: a write would stand for the uses before it, unordered as they are.
            block.finish(user, READ)
        if self._cai_read and unannounced_readers():
            stream.join_context()
            block.finish(stream, READ)
