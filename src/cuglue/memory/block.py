"""The block that a memory resource hands out, and the sizes that it accepts.

Owns :class:`DeviceBlock` and the check of a size. Must not know any resource.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from ..arguments import shown
from ..core.block import Block, BlockLife
from ..errors import LayoutError, SizeTypeError, UseAfterFree

UNTAGGED = "untagged"
#: More than any device has, and still an int that a driver can take after rounding up.
LARGEST = 2**63 - 4096
_MOST_BITS = 256  # of a size: of thousands, Python would refuse to print it in the error that refuses it


def as_size(nbytes: object, what: str = "size") -> int:
    """``nbytes`` as an int of 0 or more; NumPy integers are taken, floats (and so NaN) are not.

    Args:
        nbytes: a number of bytes.
        what: name of the argument, if it is another than the size of an allocation.

    Raises:
        SizeTypeError: not an int (a ValueError and a TypeError).
        LayoutError: negative, or a number that is no size of anything (a ValueError).
    """
    if isinstance(nbytes, bool):
        raise SizeTypeError(what, got=shown(nbytes), expected="an int of bytes")
    try:
        size = operator.index(nbytes)  # type: ignore[arg-type] # that is the question
    except TypeError:
        raise SizeTypeError(what, got=shown(nbytes), expected="an int of bytes") from None
    if size < 0:
        hint = "A product of a shape overflowed, perhaps" if what == "size" else ""
        raise LayoutError(what, got=f"{shown(size)} bytes", expected="0 or more", hint=hint)
    if size.bit_length() > _MOST_BITS:
        raise LayoutError(what, got=shown(size), expected="a number of bytes")
    return size


def _once(slot: Any) -> property:
    """A property over ``slot`` that is set once: what identifies a block must not change under a resource."""
    read: Callable[[object], Any] = slot.__get__
    write: Callable[[object, Any], None] = slot.__set__
    name: str = slot.__name__

    def set_once(self: object, value: Any) -> None:
        try:
            read(self)
        except AttributeError:
            write(self, value)
            return
        raise AttributeError(f"{name} of {self!r} is read-only")

    return property(read, set_once)


class DeviceBlock(Block):
    """Memory that a resource handed out. Dropping it frees nothing: give it to ``resource.deallocate``.

    Attributes:
        ptr: address.
        nbytes: size in bytes.
        device_ordinal: ordinal that the resource goes by.
        alloc_stream: stream that the block was allocated on and is freed on.
        tag: what it is for; may be changed while the block lives.
        generation: never used twice in a process.
        state: see :class:`~cuglue.BlockState`.
        id: the block as a value (:class:`~cuglue.BlockId`).
        resource: who gets it back; the block keeps it alive.
    """

    __slots__ = ("resource",)
    HELD: ClassVar[bool] = True  # the resource keeps it alive: losing the object loses no memory
    PLAIN: ClassVar[bool] = False  # memory of CuPy arrays: its stream gets work that nobody counts

    ptr = _once(Block.ptr)
    size = _once(Block.size)
    generation = _once(Block.generation)
    resource: Any

    @property
    def device_ordinal(self) -> int:
        """Inherited."""
        resource = getattr(self, "resource", None)
        return self.device_id if resource is None else int(resource.device_ordinal)

    @property
    def align(self) -> int:
        """Bytes that :attr:`ptr` is a multiple of."""
        return alignment(self)


class UnderBlock(DeviceBlock):
    """Memory below the blocks of another layer, which gives it back itself, also after its resource was closed."""

    __slots__ = ()


class ArrayBlock(DeviceBlock):
    """The block behind a CuPy array, for whoever asks for it. The array gives it back.

    Attributes:
        desk: of the allocator function that handed it out; a pool has none.
    """

    __slots__ = ("desk",)
    desk: Any
    PLAIN = True


def handed_out(blocks: Iterable[BlockLife]) -> list[DeviceBlock]:
    """Those that a caller of ``allocate`` has to give back: no memory of arrays, nor below another layer."""
    return [b for b in blocks if isinstance(b, DeviceBlock) and not (isinstance(b, UnderBlock) or b.PLAIN)]


def give_back(block: DeviceBlock, resource: Any) -> None:
    """Take ``block`` out of ``resource``, which closes, by way of the layers that it came through: they count it."""
    try:
        getattr(block, "resource", resource).deallocate(block)
    except UseAfterFree as error:
        if getattr(error, "generation", None) != block.generation:
            raise  # what a guard found; else another thread gave it back meanwhile


def alignment(block: BlockLife) -> int:
    """Bytes that the address of ``block`` is a multiple of."""
    return block.stream.state.capabilities.alignment
