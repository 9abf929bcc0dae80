"""What stands behind exported memory: the questions an exporter asks of its owner.

Owns the :class:`ExportOwner` protocol, and :class:`BlockOwner`, which answers it for a plain block. Must not know
capsules, dictionaries or array libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from ..core.block import BlockLife
from ..core.foreign import interface_number
from ..core.stream import Stream, as_stream
from ..driver.protocol import LEGACY_STREAM, Access, CaptureStatus, Driver, MemoryType
from ..errors import CaptureError, ClosedError
from ..lifecycle import BlockState
from .tokens import ExportLedger

T = TypeVar("T")


class ExportOwner(Protocol):
    """Owner of memory that is exported: a map, a buffer.

    A call that exports goes through these in order: :meth:`check_exportable`; then :meth:`order_consumer` (a stream
    will use the memory) or :meth:`order_host` (the host will); then a token of :attr:`ledger` is issued, which keeps
    the owner alive as long as the export lives; last :meth:`note_consumer`. If one of them raises nothing was exported.
    The device's ordering lock is held from :meth:`order_consumer` to :meth:`note_consumer`.
    """

    @property
    def driver(self) -> Driver:
        """The driver that the memory belongs to."""

    @property
    def device(self) -> int:
        """Ordinal of the memory's device."""

    @property
    def memory_type(self) -> MemoryType:
        """HOST and PINNED memory is exported as host memory through NumPy, other memory as the device's.

        Of ordinary device memory: ``driver.capabilities(device).device_type``.
        """

    @property
    def stream(self) -> Stream:
        """The stream that copies out of the memory are made on when the consumer names none."""

    @property
    def readonly(self) -> bool:
        """The memory may not be written: READ_ONLY in DLPack, no CUDA array interface."""

    @property
    def ledger(self) -> ExportLedger:
        """Where exports are counted."""

    def check_exportable(self) -> None:
        """Raise ClosedError if the memory is no longer there to be exported."""

    def order_consumer(self, stream: Stream) -> None:
        """Order later work of ``stream`` after all pending work on the memory.

        Only enqueues; queues nothing where ``stream`` comes after it already.
        """

    def note_consumer(self, stream: Stream) -> None:
        """``stream`` uses the memory from now on, until the exports are dropped: whatever ends it must wait for it."""

    def order_host(self) -> None:
        """Block the host until all pending work on the memory is done."""

    def cai_stream(self) -> int | None:
        """``stream`` of the CUDA array interface: None where every stream is in order, else a handle (1 for 0)."""

    def note_cai_reader(self) -> None:
        """The CUDA array interface was read: streams that nobody named may use the memory. Only sets a mark."""


def consumer_stream(owner: ExportOwner, handle: int) -> Stream:
    """The record of a consumer's stream, known by its handle alone.

    Raises:
        CaptureError: it captures a graph, which a wait for work outside of it would break.
    """
    stream = owner.stream
    if handle != stream.handle or stream.thread is not None:
        known = stream.state.streams.get(0 if handle == LEGACY_STREAM else handle)
        stream = (known and known()) or as_stream(handle, device=owner.device, driver=owner.driver)
    # The consumer has just named it, so it lives and may be asked; later its number alone may not be touched.
    if stream is not owner.stream and owner.driver.capture_status(stream.handle) is not CaptureStatus.NONE:
        raise CaptureError(
            f"stream {handle:#x} captures a graph",
            got="an export that has to wait for work outside of the capture",
            expected="an export made before it, or one that waits for nothing (stream=-1)",
        )
    return stream


def export_on(owner: ExportOwner, consumer: Stream | None, make: Callable[[], T]) -> T:
    """What ``make`` makes for ``consumer``: ordered before, noted after. None orders itself and is not noted."""
    if consumer is None:
        return make()
    with consumer.state.ordering:
        owner.order_consumer(consumer)
        made = make()
        owner.note_consumer(consumer)
        return made


class BlockOwner:
    """A block of memory that is exported.

    Args:
        block: the memory; whoever frees it asks :meth:`uses` what has to be done before.
        readonly: export it as read-only.
        memory_type: where it lies; None: ordinary memory of its device.

    Ownership: exports keep this object alive, and it the block.
    """

    __slots__ = (
        "__weakref__",
        "_cai_read",
        "_consumers",
        "block",
        "driver",
        "ledger",
        "memory_type",
        "readonly",
    )

    def __init__(
        self, block: BlockLife, *, readonly: bool = False, memory_type: MemoryType | None = None
    ) -> None:
        self.block = block
        self.driver: Driver = block.stream.driver
        self.readonly = readonly
        self.memory_type = memory_type or block.stream.state.capabilities.device_type
        self.ledger = ExportLedger()
        self._consumers: dict[Stream, None] = {}  # a set that keeps its order
        self._cai_read = False

    @property
    def device(self) -> int:
        """Ordinal of the block's device."""
        return self.block.device_id

    @property
    def stream(self) -> Stream:
        """The block's home stream."""
        return self.block.stream

    @property
    def consumers(self) -> tuple[Stream, ...]:
        """Streams that exports were made for."""
        return tuple(self._consumers)

    @property
    def cai_read(self) -> bool:
        """Whether somebody may use the memory on streams that nobody named."""
        return self._cai_read

    def check_exportable(self) -> None:
        """Raise ClosedError unless the block is live."""
        if self.block.state is not BlockState.LIVE:
            raise ClosedError(f"{self.block!r}", got="an export", expected="a live block")

    def order_consumer(self, stream: Stream) -> None:
        """Order ``stream`` after the block's uses and after all that earlier consumers queued."""
        for other in self._consumers:  # first: what they queued since covers the uses that the block knows
            stream.join(other)
        self.block.prepare(stream, self._access)

    def note_consumer(self, stream: Stream) -> None:
        """Add a use; whatever the stream submits later counts too (:meth:`uses`)."""
        self.block.finish(stream, self._access)
        self._consumers[stream] = None

    def order_host(self) -> None:
        """Block the host until uses and consumers are done."""
        for stream, seq in self.uses():
            if stream.completed < seq:
                stream.synchronize()

    def uses(self) -> Iterator[tuple[Stream, int]]:
        """Every (stream, seq) to be done before the memory may go, with all that consumers queued until now."""
        yield from self.block.uses()
        for stream in self._consumers:
            yield stream, stream.submit()

    def cai_stream(self) -> int | None:
        """The home stream: nothing orders strangers here."""
        return interface_number(self.block.stream)

    def note_cai_reader(self) -> None:
        """Remember it for :attr:`cai_read`."""
        self._cai_read = True

    @property
    def _access(self) -> Access:
        return Access.READ if self.readonly else Access.READ_WRITE
