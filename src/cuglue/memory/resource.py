"""What a device memory resource is, for whoever takes one and for whoever writes one.

Owns the abstract class, its defaults, and how one layer calls the next. Must not know any driver or any decorator.

There are two ways into a resource. ``allocate`` and ``deallocate`` are public and checked. ``_allocate`` and
``_deallocate`` are how our own layers call each other: arguments are resolved, and the caller says which kind of block
it wants, so that a CuPy array costs one object however many layers there are. :func:`entry` picks the way.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakSet

from ..core import process
from ..core.block import BlockId, BlockLife
from ..core.stream import Stream, as_stream
from ..driver.protocol import Access
from ..driver.registry import current_driver
from ..errors import StreamMisuse, UsageError
from ..lifecycle import leave
from . import cupy_plug, hot
from .block import UNTAGGED, DeviceBlock, as_size
from .cupy_scope import Scope

if TYPE_CHECKING:
    from ..driver.protocol import Driver
    from .cupy_plug import Malloc
    from .entries import Entry
    from .hot import Way

#: ``(nbytes, stream, tag, kind of block) -> block``, arguments resolved.
Allocate = Callable[[int, Stream, str, Any], Any]
Deallocate = Callable[[Any], None]


_lock = threading.RLock()
_living: WeakSet[LayeredResource] = WeakSet()


def _forked() -> None:
    """In a forked child: nobody has the lock, which another thread may have held at the fork."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)


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
        return cupy_plug.make_malloc(self, *entry(self))

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


class LayeredResource(DeviceMemoryResource):
    """A resource that makes blocks of whatever kind the caller wants: all of ours. See the module's docstring."""

    _process: object  # that made it

    def __new__(cls, *args: Any, **options: Any) -> Self:
        made = super().__new__(cls)
        made._process = process.life
        with _lock:
            _living.add(made)
        return made

    @abstractmethod
    def _allocate(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        """A live block of class ``kind``. ``nbytes`` is an int of 0 or more, ``stream`` a record of our device."""

    @abstractmethod
    def _deallocate(self, block: Any) -> None:
        """Take a block back; :meth:`deallocate` without the check of its type."""

    def allocate(self, nbytes: int, stream: object = None, tag: str = UNTAGGED) -> DeviceBlock:
        """Inherited."""
        if not isinstance(tag, str):
            raise UsageError("tag", got=repr(tag), expected="a str")
        size = as_size(nbytes)
        block: DeviceBlock = self._allocate(size, self._stream(stream), tag, DeviceBlock)
        try:
            if isinstance(block, DeviceBlock):
                block.resource = self
        except BaseException:  # interrupted: nobody gets it
            self._deallocate(block)
            raise
        return block

    def deallocate(self, block: DeviceBlock) -> None:
        """Inherited. A block of another layer over the same memory goes back the way it came: those layers count it."""
        found = check_block(block)
        owner: Any = getattr(found, "resource", None)
        if owner is self or not _gives_for(owner, self):
            self._deallocate(found)
        else:
            owner._deallocate(found)

    @cached_property
    def malloc(self) -> Malloc:
        """Inherited."""
        return hot.make_malloc(self, cupy_plug.cupy_types(), *entry(self))

    def _way(self, take_back: Callable[[Entry], None]) -> Way | None:
        """How memory of arrays is allocated and freed without questions; None: it is not (see :mod:`.hot`)."""
        return None

    def _look(self) -> None:
        """Count as free what the device is done with, without waiting, without a record of it."""
        self.reap_pending(block=False)

    def live_blocks(self) -> list[BlockLife]:
        """The blocks handed out and not given back, memory of CuPy arrays included; [] if nobody keeps count."""
        return []

    def block_at(self, address: int) -> BlockLife | None:
        """The live block that ``address`` lies in."""
        return None

    def _stream(self, stream: object) -> Stream:
        if self._process is not process.life:
            raise process.forked_child(self)  # before the driver is asked for the current stream
        return as_stream(stream, device=self.device, driver=self.driver)


def living_resources() -> list[LayeredResource]:
    """Every resource of ours that is alive."""
    with _lock:
        return list(_living)


def check_block(block: object) -> Any:
    """``block``, if it is one of any kind; of the memory of a CuPy array, the block behind it.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(block, BlockLife):
        found = cupy_plug.block_of(block)
        if found is not None:
            return found
        raise UsageError("block", got=repr(block), expected="a block that a resource allocated")
    return block


def keeps(resource: LayeredResource, cls: type, *names: str) -> bool:
    """Whether the class of ``resource`` has these methods, and the public two, as ``cls`` has them."""
    own = type(resource)
    return all(getattr(own, name) is getattr(cls, name) for name in (*names, "allocate", "deallocate"))


def entry(resource: DeviceMemoryResource) -> tuple[Allocate, Deallocate]:
    """How another layer calls ``resource``: past its public methods, unless somebody overrides those."""
    if isinstance(resource, LayeredResource):
        own = type(resource)
        if own.allocate is LayeredResource.allocate and own.deallocate is LayeredResource.deallocate:
            return resource._allocate, resource._deallocate

    def allocate(nbytes: int, stream: Stream, tag: str, kind: object) -> Any:
        return resource.allocate(nbytes, stream, tag)

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


def _gives_for(owner: object, asked: DeviceMemoryResource) -> bool:
    """Whether ``owner`` is a layer of ours over the memory that ``asked`` has its own of."""
    plain = isinstance(owner, LayeredResource) and type(owner).deallocate is LayeredResource.deallocate
    return plain and _bottom(owner) is _bottom(asked)


def _bottom(resource: Any) -> Any:
    """What the memory of a stack of resources comes from."""
    while (below := getattr(resource, "upstream", None)) is not None:
        resource = below
    return resource
