"""The way of an array's memory that is taken on nearly every allocation: from the driver and back to it.

Owns what is kept of that memory, the calls to the driver, and :func:`make_malloc`. Must not know what the layers
between do: each one adds two functions of its own, see :class:`Way`.

Memory on this way is an entry in a dictionary and the small object that CuPy holds. It becomes a block, with uses,
state and generation, once somebody asks (a command, a recorder, a tensor of PyTorch looked up by address), and then
leaves this way: it is freed as any other block. Everything else goes the long way from the start: streams seen for the
first time, per-thread default streams, handles without an owner, empty arrays, resources that are closed or have to
look first what is free.

What a compiled twin of this module must keep:
    * The current stream is asked for once, and its *object* decides (handles are reused); its home keeps it alive.
    * An entry is claimed by taking it out of ``plain``, in one step: whoever does that frees it, or makes its block.
      If a free is refused the entry is put back, and the free is repeated at a later drain.
    * The finaliser runs on any thread, with any device current, inside the collector, or while the interpreter ends. It
      appends its entry, and does nothing else.
    * A free asks nobody whether its stream captures: a capture refuses memory from outside, and goes on. A free that is
      done is the answer for its stream, and an allocation there asks no more.
    * Each driver call is a call of the driver's method, looked up then, unless the driver says that nobody stands in
      front of its methods (``shortcuts.on``): tests and tools do, and must see every call.
    * ``home.freed`` is added to only once the free is queued, so that an operation submitted later comes after it.
    * The entry keeps its stream and, by way of ``take_back``, the resource alive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from ..core import process
from ..core.block import next_generation
from ..errors import CuglueError, DriverError
from ..lifecycle import BlockState
from .block import LARGEST, ArrayBlock
from .cupy_plug import current_device_of, make_long_way, make_slow_malloc, no_copy, wrong_current_device
from .desks import Desk, Home, forget_closed
from .entries import Entry
from .quick import capture_question, free_refused, shortcuts_of, take_again
from .table import address_is_live

if TYPE_CHECKING:
    from .cupy_plug import Malloc
    from .resource import Allocate, Deallocate
    from .source import SourceResource

_OF_A_BLOCK = [n for n in dir(ArrayBlock) if not n.startswith("_") and n not in ("ptr", "size", "device_id")]


class Way(NamedTuple):
    """What an allocator function calls. A layer over another one wraps the first two functions, or is told.

    Attributes:
        desk: of the allocator function.
        take: ``(bytes, home, quiet)`` to an entry: new memory. ``quiet``: the stream is known to capture nothing.
        give: ``(entry)``: free it. Who calls that has claimed it, and puts it back if it still has an address after a
            failure; without one it is free, and something above the driver failed.
        took, gave: ``(bytes)``: told of each allocation and each free that is done, or None. One layer that only counts
            costs a call less so. They count nothing if they are interrupted.
        bare: take and give call the driver, and nobody else.
    """

    desk: Desk
    take: Callable[[int, Home, bool], Entry]
    give: Callable[[Entry], None]
    took: Callable[[int], None] | None = None
    gave: Callable[[int], None] | None = None
    bare: bool = False

    def wrapped(self, take: Callable[[int, Home, bool], Entry], give: Callable[[Entry], None]) -> Way:
        """The way of a layer over this one."""
        return self._replace(take=take, give=give, bare=False)


def driver_way(source: SourceResource, take_back: Callable[[Entry], None]) -> Way:
    """The way that calls the driver.

    Args:
        source: whose memory it is.
        take_back: the allocator function's own, for the retire queue.
    """
    driver, device, pending = source.driver, source.device, source._counts_pending
    shortcuts = shortcuts_of(driver)
    quick_malloc, quick_free, refusals = shortcuts.malloc, shortcuts.free, shortcuts.refusals
    captures = capture_question(driver, shortcuts)
    setdefault, blocks = source._arrays.plain.setdefault, source._table.entries
    desk = Desk(source)
    forget_closed(source._desks)
    source._desks.append(desk)

    def take(nbytes: int, home: Home, quiet: bool) -> Entry:
        if home.asks and not quiet and captures(home.handle):
            raise source._in_capture(home.stream)
        try:
            if shortcuts.on:
                address = quick_malloc(nbytes, home.handle)
            else:
                address = driver.malloc_async(nbytes, home.handle, device)
        except refusals as error:
            address = take_again(source, shortcuts, nbytes, home, error)
        entry = [take_back, address, nbytes, home, None, next_generation() if desk.numbered else 0]
        try:
            if (blocks and address in blocks) or setdefault(address, entry) is not entry:
                raise address_is_live(address)
        except BaseException as error:
            if not isinstance(error, DriverError):  # else it is not ours to free
                give_up(way, entry, error)
            raise
        return entry

    def give(entry: Entry) -> None:
        home = entry[3]
        try:
            if shortcuts.on:
                quick_free(entry[1], home.handle)
            else:
                driver.free_async(entry[1], home.handle, device)
        except refusals as error:
            raise free_refused(shortcuts, home, error) from None
        entry[1] = 0
        if pending:
            home.freed += entry[2]
            if home.left:
                desk.left[id(home)] = home

    way = Way(desk, take, give, bare=True)
    return way


def give_up(way: Way, entry: Entry, error: BaseException) -> None:
    """Give ``entry`` back, which nobody will get because of ``error``. Raises nothing."""
    try:
        _claim_and_give(way, entry)
    except CuglueError as second:  # nobody else knows of it: the next drain tries again
        error.add_note(f"giving the memory back failed too: {second}")
        way.desk.source._state.retire.forget(partial(_claim_and_give, way, entry))


def _claim_and_give(way: Way, entry: Entry) -> None:
    way.desk.source._arrays.claim(entry)
    _give(way, entry)


def _give(way: Way, entry: Entry) -> None:
    """Give back what was claimed, if it is not free already; if that fails it is live."""
    try:
        if entry[1]:
            way.give(entry)
    finally:
        way.desk.source._arrays.put_back(entry)


def give_and_tell(way: Way, entry: Entry) -> None:
    """Give back what was claimed and told of. After an interrupt it is called again, and tells once."""
    try:
        _give(way, entry)
    finally:
        if way.gave is not None and not entry[1] and entry[2]:
            way.gave(entry[2])
            entry[2] = 0


def make_malloc(resource: Any, types: Any, allocate: Allocate, deallocate: Deallocate) -> Malloc:
    """CuPy's allocator over ``resource``.

    Args:
        resource: the top of a stack.
        types: CuPy's classes, see :func:`.cupy_plug.cupy_types`.
        allocate, deallocate: the long way, see :func:`cuglue.memory.layered.entry`.
    """

    def take_back(entry: Entry) -> None:
        """The array whose memory this was is gone."""
        block = source._arrays.claim(entry)
        if block is None:
            give_and_tell(way, entry)
        elif block.state is live:
            deallocate(block)

    found = resource._way(take_back)
    if found is None:
        return make_slow_malloc(resource, make_long_way(resource, allocate, deallocate))
    way: Way = found
    desk, take, give, took, gave, bare = way
    long_way = make_long_way(resource, allocate, deallocate, desk.open_home)
    desk.resource = ref(resource)
    source = desk.source
    arrays = source._arrays
    plain, blocks = arrays.plain, source._table.entries
    claim, setdefault = plain.pop, plain.setdefault
    pending = source._counts_pending
    pointer = types.MemoryPointer
    driver, device = resource.driver, resource.device
    retire = source._state.retire
    forgotten, deferred = retire.forgotten, retire.deferred
    forget = forgotten.append
    find_home = desk.find
    current_device = current_device_of(driver)
    life, live = process.life, BlockState.LIVE
    shortcuts = shortcuts_of(driver)
    quick_malloc, quick_free, refusals = shortcuts.malloc, shortcuts.free, shortcuts.refusals
    quick_current, captures = shortcuts.current, capture_question(driver, shortcuts)

    class ArrayMemory(types.BaseMemory):  # type: ignore[misc] # a class that CuPy gives at run time
        """Memory of CuPy arrays. Whatever else a block has it has from :attr:`block`."""

        __slots__ = ("__weakref__", "entry")
        __reduce_ex__ = no_copy

        @property
        def block(self) -> Any:
            """The block behind it, made at the first question."""
            return arrays.block_in(self.entry)

        def __del__(self) -> None:
            try:
                forget(self.entry)
            except AttributeError:
                pass  # its making was interrupted, and its maker gives the memory back

        def __repr__(self) -> str:
            return f"ArrayMemory(ptr={self.ptr:#x}, nbytes={self.size}, device={self.device_id})"

    for name in _OF_A_BLOCK:
        setattr(ArrayMemory, name, property(attrgetter(f"block.{name}")))
    new = ArrayMemory.__new__

    def malloc(nbytes: int) -> Any:
        if current_device is not None and current_device() != device:
            raise wrong_current_device(resource, current_device())
        try:
            current = quick_current(device) if shortcuts.on else driver.stream_current(device)
        except Exception:
            if process.life is not life:
                raise process.forked_child(resource) from None
            raise
        last = desk.last
        home = last if last.owner is current else find_home(current)
        if home is None or type(nbytes) is not int or not 0 < nbytes <= LARGEST:
            return long_way(current, nbytes)
        quiet = False
        while forgotten:
            # No call from here to the try: an interrupt would lose the entry, another thread take it.
            entry = forgotten[0]
            if deferred or entry.__class__ is not list or entry[0] is not take_back or entry[4] is not None:
                retire.run_forgotten()
                break
            del forgotten[0]
            try:
                claimed = claim(entry[1], None) is entry
                if claimed:
                    former = entry[3]
                    # As driver_way gives, without a call; below, as it takes.
                    if not bare:
                        give(entry)
                    else:
                        if shortcuts.on:
                            quick_free(entry[1], former.handle)
                        else:
                            driver.free_async(entry[1], former.handle, device)
                        entry[1] = 0
                        if pending:
                            former.freed += entry[2]
                            if former.left:
                                desk.left[id(former)] = former
                    if former is home:
                        quiet = True
                    if gave is not None:
                        gave(entry[2])
                        entry[2] = 0  # told
            except BaseException as error:
                if not entry[1]:  # it is free: above the driver somebody was interrupted
                    if gave is not None and entry[2]:
                        gave(entry[2])
                        entry[2] = 0
                    raise
                plain[entry[1]] = entry
                retire.keep(entry, free_refused(shortcuts, entry[3], error))
            else:
                if not claimed:  # somebody asked about it meanwhile
                    forget(entry)
                    retire.run_forgotten()
                    break
        if not bare:
            entry = take(nbytes, home, quiet)
        else:
            if home.asks and not quiet and captures(home.handle):
                raise source._in_capture(home.stream)
            try:
                if shortcuts.on:
                    address = quick_malloc(nbytes, home.handle)
                else:
                    address = driver.malloc_async(nbytes, home.handle, device)
            except refusals as error:
                address = take_again(source, shortcuts, nbytes, home, error)
            entry = [take_back, address, nbytes, home, None, 0]
            try:
                if (blocks and address in blocks) or setdefault(address, entry) is not entry:
                    raise address_is_live(address)
            except BaseException as error:
                if not isinstance(error, DriverError):  # else it is not ours to free; see below
                    give_up(way, entry, error)
                raise
        told = False
        try:
            if took is not None:
                took(nbytes)
                told = True
            memory = new(ArrayMemory)
            memory.entry = entry
        except BaseException as error:  # interrupted: nobody gets it
            give_up(way, entry, error)
            if told and gave is not None:
                gave(nbytes)
            raise
        memory.ptr = entry[1]
        memory.size = nbytes
        if device:  # it is 0 at birth
            memory.device_id = device
        return pointer(memory, 0)

    return malloc
