"""How the resources of this library call each other, in whatever order they are put over one another.

Owns the class that all of them derive from, the way from one layer to the next, and which of them are alive. Must not
know any driver or any decorator.

There are two ways into a resource. ``allocate`` and ``deallocate`` are public and checked. ``_allocate`` and
``_deallocate`` are how our own layers call each other: arguments are resolved, and the caller says which kind of block
it wants, so that a CuPy array costs one object however many layers there are. :func:`entry` picks the way.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from ..arguments import shown
from ..core import process
from ..core.block import BlockId, BlockLife
from ..core.stream import Stream, as_stream
from ..errors import StreamMisuse, UsageError
from . import cupy_plug, hot
from .block import UNTAGGED, DeviceBlock, as_size
from .resource import Allocate, Deallocate, DeviceMemoryResource, public_calls
from .table import wrong_device

if TYPE_CHECKING:
    from .cupy_plug import Malloc
    from .entries import Entry
    from .hot import Way

_lock = threading.RLock()
_living: WeakSet[LayeredResource] = WeakSet()


def _forked() -> None:
    """In a forked child: nobody has the lock, which another thread may have held at the fork."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)


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
            raise UsageError("tag", got=shown(tag), expected="a str")
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
        raise UsageError("block", got=shown(block), expected="a block that a resource allocated")
    return block


def check_block_id(resource: DeviceMemoryResource, block_id: object, call: str) -> None:
    """Refuse what is no id, or one of another device.

    Raises:
        StreamMisuse: no :class:`BlockId`.
        DriverError: another device.
    """
    if not isinstance(block_id, BlockId):
        raise StreamMisuse(call, got=shown(block_id), expected="a BlockId: give block.id")
    if block_id.device_ordinal not in (resource.device_ordinal, resource.device):
        raise wrong_device(resource, block_id.device_ordinal, call)


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

    return public_calls(resource)


def _gives_for(owner: object, asked: DeviceMemoryResource) -> bool:
    """Whether ``owner`` is a layer of ours over the memory that ``asked`` has its own of."""
    plain = isinstance(owner, LayeredResource) and type(owner).deallocate is LayeredResource.deallocate
    return plain and _bottom(owner) is _bottom(asked)


def _bottom(resource: Any) -> Any:
    """What the memory of a stack of resources comes from."""
    while (below := getattr(resource, "upstream", None)) is not None:
        resource = below
    return resource
