"""A resource as CuPy's allocator: the memory object behind every array, and what CuPy wants of it.

Owns the class that is both CuPy's ``BaseMemory`` and our block, the ``malloc`` that makes it, the installing of an
allocator and the errors that are CuPy's too. Must not know how any resource gets its memory. The only module of
``memory`` that imports CuPy, and only once somebody asks for an allocator.

What CuPy demands shapes it: one positional size, no stream and no device in the call; the object dies on any thread,
inside the collector, or while the interpreter ends, so its finaliser appends to the device's retire queue and returns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..core import process
from ..core.block import BLOCK_SLOTS, BlockLife, next_generation
from ..core.device import device_state
from ..core.stream import Stream, as_stream
from ..errors import OutOfMemory, UsageError
from ..lifecycle import BlockState
from .block import UNTAGGED, alignment, as_size

if TYPE_CHECKING:
    from cupy.cuda import MemoryPointer

    from ..driver.protocol import Driver
    from .resource import DeviceMemoryResource

    Malloc = Callable[[int], MemoryPointer]

_LIVE = BlockState.LIVE


def no_copy(memory: object, protocol: object) -> NoReturn:
    """``__reduce_ex__`` of memory behind arrays: a copy of the object would give the memory back a second time."""
    raise UsageError(repr(memory), got="a copy or pickle of it", expected="a copy of the array")


@cache
def block_types() -> tuple[type[Any], type[Any]]:
    """``(CupyBlock, AdoptedBlock)``, made at the first use because they derive from a CuPy class."""
    from cupy.cuda import BaseMemory

    class CupyBlock(BlockLife, BaseMemory):
        """Memory of CuPy arrays, and a block of ours: one object for both."""

        __slots__ = (*BLOCK_SLOTS, "release")
        HELD = False  # alive as long as an array uses it
        PLAIN = True
        __reduce_ex__ = no_copy

        def __init__(self, ptr: int, size: int, stream: Stream, seq: int, tag: str) -> None:
            self.ptr = ptr
            self.size = size
            self.device_id = stream.device
            self.release: Any = None  # until the allocation is complete; keeps the resource alive
            # As BlockLife.begin, without a call: every temporary array of a program pays for it.
            self.generation = next_generation()
            self.stream = self.write_stream = stream
            self.write_seq = seq
            self.state = _LIVE
            self.reads = self.taint = None
            self.tag = tag

        @property
        def align(self) -> int:
            """Bytes that :attr:`ptr` is a multiple of."""
            return alignment(self)

        @property
        def block(self) -> Any:
            """Itself: every memory object of ours says so which block it has."""
            return self

        @property
        def resource(self) -> Any:
            """Who gets it back."""
            return getattr(self.release, "__self__", None)

        def give_back(self) -> None:
            """Return the memory; a later call on our side runs this for a dead array."""
            if self.state is _LIVE:  # not so at a second attempt, after a guard took the block and complained
                self.release(self)

        def __del__(self) -> None:
            # Any thread, any device, the collector, or the end of the interpreter: append, and nothing else.
            try:
                if self.state is _LIVE and self.release is not None:
                    self.stream.state.retire.forgotten.append(self.give_back)
            except AttributeError:
                pass  # its making was interrupted

        def __repr__(self) -> str:
            return (
                f"CupyBlock(ptr={self.ptr:#x}, nbytes={self.size}, device={self.device_id}, "
                f"generation={self.generation}, {self.state.value}, tag={self.tag!r})"
            )

    class AdoptedBlock(BaseMemory):
        """Memory of CuPy arrays over a block that some other resource made as it pleased."""

        __slots__ = ("__weakref__", "block", "release", "retire")
        __reduce_ex__ = no_copy

        def __init__(self, block: Any, release: Callable[[Any], None], retire: Any) -> None:
            self.ptr = block.ptr
            self.size = block.nbytes
            self.device_id = block.device_ordinal
            self.block = block
            self.release = release
            self.retire = retire

        def give_back(self) -> None:
            """Return the memory."""
            if self.block.state is _LIVE:
                self.release(self.block)

        def __del__(self) -> None:
            try:
                if self.block.state is _LIVE:
                    self.retire.forgotten.append(self.give_back)
            except AttributeError:
                pass  # its making was interrupted

    return CupyBlock, AdoptedBlock


def make_malloc(
    resource: DeviceMemoryResource, allocate: Callable[..., Any], deallocate: Callable[[Any], None]
) -> Malloc:
    """CuPy's allocator over ``resource``, for every resource."""
    return make_slow_malloc(resource, make_long_way(resource, allocate, deallocate))


def make_slow_malloc(resource: DeviceMemoryResource, long_way: Callable[[Any, Any], MemoryPointer]) -> Malloc:
    """CuPy's allocator that goes the long way each time."""
    driver, device = resource.driver, resource.device
    current_device = current_device_of(driver)
    life = process.life

    def malloc(nbytes: int) -> MemoryPointer:
        if current_device is not None and current_device() != device:
            raise wrong_current_device(resource, current_device())
        try:
            current = driver.stream_current(device)
        except Exception:
            if process.life is not life:
                raise process.forked_child(resource) from None
            raise
        return long_way(current, nbytes)

    return malloc


def make_long_way(
    resource: DeviceMemoryResource,
    allocate: Callable[..., Any],
    deallocate: Callable[[Any], None],
    seen: Callable[[Stream], None] | None = None,
) -> Callable[[Any, Any], MemoryPointer]:
    """``(current stream, bytes)`` to a pointer, for whatever stream and size.

    A closure over locals, because each look-up is paid by every temporary array of a program.

    Args:
        resource: whose memory it is.
        allocate, deallocate: its two calls.
        seen: told of the stream after an allocation.
    """
    from cupy.cuda import MemoryPointer, UnownedMemory

    block_type, adopted_type = block_types()
    driver, device = resource.driver, resource.device
    state = device_state(driver, device)
    streams, retire = state.streams, state.retire
    forgotten = retire.forgotten
    empty = UnownedMemory(0, 0, None, device)

    def long_way(current: Any, nbytes: Any) -> MemoryPointer:
        if forgotten:
            retire.run_forgotten()
        size: int = as_size(nbytes)
        if size == 0:
            return MemoryPointer(empty, 0)
        # The current stream, matched to its record without the questions that as_stream asks.
        try:
            found = streams.get(current.ptr)
        except AttributeError:
            found = None  # a default stream, by its number
        stream = found() if found is not None else None
        if stream is None or stream.owner is not current:
            stream = as_stream(current, device=device, driver=driver)
        block = allocate(size, stream, UNTAGGED, block_type)
        if block.__class__ is block_type:
            block.release = deallocate  # at once: from here on an interrupt loses the block and no memory
        else:
            block = adopted_type(block, deallocate, retire)
        if seen is not None:
            seen(stream)
        return MemoryPointer(block, 0)

    return long_way


def current_device_of(driver: Driver) -> Callable[[], int] | None:
    """What says which device is current; None where there is but one."""
    if driver.device_count() == 1:
        return None
    if driver.capabilities(0).simulated:
        return lambda: driver.device_current()
    from cupy.cuda import runtime

    return runtime.getDevice  # CuPy's own: each allocation asks


class CupyTypes(NamedTuple):
    """What a resource with an allocator function of its own needs of CuPy."""

    BaseMemory: Any
    MemoryPointer: Any
    UnownedMemory: Any


def cupy_types() -> CupyTypes:
    """CuPy's types; imports CuPy."""
    from cupy.cuda import BaseMemory, MemoryPointer, UnownedMemory

    return CupyTypes(BaseMemory, MemoryPointer, UnownedMemory)


def wrong_current_device(resource: object, current: int) -> UsageError:
    """The error for an array of a device that is not the resource's."""
    return UsageError(
        f"{resource!r} as CuPy's allocator",
        got=f"device {current} is current",
        expected="its own device",
        hint="Give CuPy PerDevice({0: a, 1: b}).malloc",
    )


def block_of(memory: object) -> BlockLife | None:
    """The block behind CuPy's memory object (``array.data.mem``), or None if it is not ours."""
    if isinstance(memory, BlockLife):
        return memory
    block = getattr(memory, "block", None)  # an AdoptedBlock
    return block if isinstance(block, BlockLife) else None


def get_allocator() -> Callable[[int], Any]:
    """What CuPy allocates with on this thread."""
    from cupy import cuda

    return cuda.get_allocator()


def using_allocator(allocator: Callable[[int], Any]) -> AbstractContextManager[Any]:
    """CuPy's own scope for an allocator of this thread."""
    from cupy import cuda

    scope: AbstractContextManager[Any] = cuda.using_allocator(allocator)
    return scope


# --- errors -----------------------------------------------------------------------------------------------------


def cupy_error(error: OutOfMemory) -> OutOfMemory:
    """``error``, as an instance of CuPy's ``OutOfMemoryError`` too if CuPy is loaded.

    CuPy, CUB and Thrust fall back to other algorithms for that class alone.
    """
    if "cupy.cuda.memory" not in sys.modules or isinstance(error, _cupy_oom()):
        return error
    both = _both(type(error))  # type: ignore[arg-type] # mypy takes the class for its instances
    made: OutOfMemory = both.__new__(both)
    made.args = error.args
    vars(made).update(vars(error))
    return made


@cache
def _cupy_oom() -> type[BaseException]:
    from cupy.cuda.memory import OutOfMemoryError

    return OutOfMemoryError


@cache
def _both(ours: type[OutOfMemory]) -> type[OutOfMemory]:
    # CuPy's class brings its own text and its own pickling, for arguments that ours does not have.
    names = {
        "__module__": ours.__module__,
        "__qualname__": ours.__qualname__,
        "__doc__": ours.__doc__,
        "__str__": ours.__str__,
        "__reduce__": lambda self: (_revive, (ours, self.args, dict(vars(self)))),
    }
    return type(ours.__name__, (ours, _cupy_oom()), names)


def _revive(ours: type[OutOfMemory], args: tuple[Any, ...], fields: dict[str, Any]) -> OutOfMemory:
    """Unpickle: without CuPy loaded, the plain class."""
    error = ours.__new__(ours)
    error.args = args
    vars(error).update(fields)
    return cupy_error(error)
