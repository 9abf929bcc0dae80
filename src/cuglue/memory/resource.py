"""What a device memory resource is, for whoever takes one and for whoever writes one.

Owns the abstract class and its defaults. Must not know any driver or any decorator, nor how ours call each other: see
:mod:`.layered`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ..arguments import shown
from ..core.block import BlockId, BlockLife
from ..core.stream import Stream
from ..driver.protocol import Access
from ..driver.registry import current_driver
from ..errors import StreamMisuse, UsageError
from ..lifecycle import leave
from . import cupy_plug
from .block import UNTAGGED, DeviceBlock
from .cupy_scope import Scope

if TYPE_CHECKING:
    from ..driver.protocol import Driver
    from .cupy_plug import Malloc

#: ``(nbytes, stream, tag, kind of block) -> block``, arguments resolved.
Allocate = Callable[[int, Stream, str, Any], Any]
Deallocate = Callable[[Any], None]


class BudgetSnapshot(NamedTuple):
    """State of a budget, in bytes."""

    limit: int
    reserved: int

    @property
    def remaining(self) -> int:
        """What may still be reserved."""
        return max(0, self.limit - self.reserved)


class DeviceMemoryResource(ABC):
    """Gives out and takes back memory of one device, in stream order.

    Every resource is a CuPy allocator: ``cupy.cuda.set_allocator(resource.malloc)``. A subclass needs the four
    abstract members; the defaults say "no" where a resource cannot do something, and never pretend.
    """

    @abstractmethod
    def allocate(self, nbytes: int, stream: object = None, tag: str = UNTAGGED) -> DeviceBlock:
        """A live block of ``nbytes`` bytes.

        Args:
            nbytes: size in bytes, 1 or more.
            stream: anything :func:`~cuglue.as_stream` takes; the block may be used there at once.
            tag: what it is for; shown in reports.

        Ordering: only enqueues, except where memory is scarce or the resource says otherwise.
        Ownership: until it is given to :meth:`deallocate`; dropping the object frees nothing.

        Raises:
            DriverError: 0 bytes, or the driver refused.
            LayoutError: negative, or no int.
            OutOfMemory: none left; nothing has changed.
            StreamMisuse: no such stream, or one of another device.
        """

    @abstractmethod
    def deallocate(self, block: DeviceBlock) -> None:
        """Take ``block`` back, after every use of it that is known.

        Ordering: only enqueues, except where the resource says otherwise.

        Raises:
            UseAfterFree: not live, or never a block of this resource; nothing has changed.
            DriverError: another device, or the driver refused; the block stays live and this can be repeated.
        """

    @property
    @abstractmethod
    def device_ordinal(self) -> int:
        """Ordinal of the one device this resource serves."""

    @property
    @abstractmethod
    def bytes_outstanding(self) -> int:
        """Bytes live, and given back but not known to be free yet."""

    def reap_pending(self, *, block: bool = True) -> None:  # noqa: B027 - a default, not a gap
        """Count as free what the device is done with.

        Args:
            block: wait for it (blocks the host); else only look.

        A resource that frees at once has nothing to do here.
        """

    def budget_snapshot(self) -> BudgetSnapshot | None:
        """State of the nearest budget, or None if there is none."""
        return None

    def supports_block_use_tracking(self) -> bool:
        """Whether uses of a block on other streams can be told with :meth:`record_block_use` and its like."""
        return False

    def record_block_use(self, block: DeviceBlock, stream: object) -> None:
        """Tell that work already queued on ``stream`` uses ``block``: its free comes after that work.

        Ordering: only enqueues; the work itself is ordered after nothing.

        Raises:
            StreamMisuse: unsupported by this resource.
            UseAfterFree: not live.
        """
        raise self._no_tracking()

    def prepare_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Queue on ``stream`` the waits that an access needs. Call it *before* the work is enqueued.

        Ordering: only enqueues.

        Raises:
            StreamMisuse: unsupported by this resource.
            UseAfterFree: not live.
        """
        raise self._no_tracking()

    def finish_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Note the work that was enqueued since :meth:`prepare_block_use`. Call it *after* it is enqueued.

        Ordering: only enqueues.

        Raises:
            StreamMisuse: unsupported by this resource.
            UseAfterFree: not live.
        """
        raise self._no_tracking()

    def cancel_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Take back a :meth:`prepare_block_use`: nothing was enqueued.

        Ordering: queues nothing; the waits queued by the prepare stay.

        Raises:
            StreamMisuse: unsupported by this resource.
            UseAfterFree: not live.
        """
        raise self._no_tracking()

    def _no_tracking(self) -> StreamMisuse:
        return StreamMisuse(
            f"{self!r}: block use tracking is unsupported",
            expected="a resource that tracks uses",
            hint="Use AsyncCudaResource, or a pool over it",
        )

    # --- CuPy ---------------------------------------------------------------------------------------------------
    @cached_property
    def malloc(self) -> Malloc:
        """``malloc(nbytes) -> cupy.cuda.MemoryPointer``: this resource as CuPy's allocator.

        Memory lives as long as an array uses it, on CuPy's stream current at the call, and keeps this resource alive.
        0 bytes give an empty pointer. Only enqueues.
        """
        return cupy_plug.make_malloc(self, *public_calls(self))

    def as_cupy_allocator(self) -> AbstractContextManager[Self]:
        """``with`` this, CuPy allocates here: this thread and task only, innermost wins, restored on the way out."""
        return Scope(self)

    # --- layers -------------------------------------------------------------------------------------------------
    @property
    def driver(self) -> Driver:
        """The driver whose memory this is."""
        return current_driver()

    @property
    def device(self) -> int:
        """Ordinal that the driver knows the device by."""
        return self.device_ordinal

    def close(self) -> None:  # noqa: B027 - a default, not a gap
        """Give everything back. Closing again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self.close, error, "closing", self)


def public_calls(resource: DeviceMemoryResource) -> tuple[Allocate, Deallocate]:
    """How a layer calls a ``resource`` of which it knows no more than what everybody may call."""

    def allocate(nbytes: int, stream: Stream, tag: str, kind: object) -> Any:
        block = resource.allocate(nbytes, stream, tag)
        if not isinstance(block, BlockLife):
            raise UsageError(f"allocate() of {shown(resource)}", got=shown(block), expected="a DeviceBlock")
        return block

    def deallocate(block: Any) -> None:
        owner = getattr(block, "resource", None)
        if owner is None:
            return resource.deallocate(block)
        block.resource = None  # on its way through public methods, which must not send it round again
        try:
            resource.deallocate(block)
        finally:
            block.resource = owner

    return allocate, deallocate
