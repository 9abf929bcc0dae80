"""The pool as a resource: blocks and arrays over spans.

Owns the way from a request to a block and back, and what the pool tells of itself. Must not know how memory is divided
(:mod:`.arena`, :mod:`.planned`) nor what happens when it is short (:mod:`.homes`).

Memory that is given back may be handed out again at once on the same stream, without an event: later work there comes
after earlier work. Work on other streams that is known is waited for when the memory is given back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

from ...arguments import seconds, shown
from ...core import process
from ...core.device import device_state
from ...core.stream import Stream, as_stream
from ...errors import (
    ArgumentError,
    CaptureError,
    ClosedError,
    DriverError,
    OutOfMemory,
    UsageError,
    UseAfterFree,
)
from ...lifecycle import BlockState
from ..block import LARGEST, ArrayBlock, as_size
from ..cupy_plug import cupy_types, make_malloc
from ..resource import DeviceMemoryResource
from ..table import BlockTable, gone, wrong_device
from . import hot
from .closing import PoolClosing
from .graphs import GraphMemory
from .homes import Home
from .ladder import Ladder
from .layouts import MemoryConfiguration, PoolLayout
from .plans import Plans
from .shortage import explain
from .spans import Span
from .stream_memory import StreamMemory
from .upstream import Upstream

_LIVE, _RETIRED = BlockState.LIVE, BlockState.RETIRED
_made: WeakSet[PoolResource] = WeakSet()


def _disown() -> None:
    """In a forked child: all memory belongs to the parent."""
    for pool in _made:
        pool._ready = False
        pool.homes.forget_all_fast()


os.register_at_fork(after_in_child=_disown)


class PoolResource(PoolClosing):
    """Keeps memory that is given back, and hands it out again without asking the driver.

    Without a layout it is made for CuPy: ``cupy.cuda.set_allocator(pool.malloc)``. With one, each stream has the pools
    of that layout: see :meth:`stream_memory`.

    ``PoolResource(GlobalDeviceBudget(r, limit))`` limits what the pool keeps; ``GlobalDeviceBudget(PoolResource(r),
    limit)`` limits what is in use.
    """

    def __init__(
        self,
        upstream: DeviceMemoryResource,
        *,
        layout: MemoryConfiguration | Sequence[PoolLayout] | None = None,
        max_bytes: int | None = None,
        idle_seconds: float | None = 60.0,
    ) -> None:
        """Make the pool; takes nothing from upstream yet.

        Args:
            upstream: where memory comes from; closed with the pool.
            layout: pools of each stream; None: bins and a best fit, for arrays.
            max_bytes: bytes kept at most, in use or not; None: no limit.
            idle_seconds: memory unused for so long goes back to upstream, at the next request that no bin serves; None:
                never. Only without a layout.
        """
        if not isinstance(upstream, DeviceMemoryResource):
            raise UsageError("upstream of a pool", got=shown(upstream), expected="a DeviceMemoryResource")
        if max_bytes is not None and as_size(max_bytes, "max_bytes") < 1:
            raise ArgumentError("max_bytes", got=max_bytes, expected="1 or more, or None")
        if idle_seconds is not None and not seconds("idle_seconds", idle_seconds):
            raise ArgumentError("idle_seconds", got=idle_seconds, expected="more than 0, or None")
        self.upstream = upstream
        self._driver = upstream.driver
        self._device = upstream.device
        self._ordinal = upstream.device_ordinal
        self._known_state = device_state(self._driver, self._device)
        self._pages = Upstream(upstream, max_bytes)
        self.homes = Ladder(self._known_state, self._pages, idle_seconds)
        self._plans = (
            None if layout is None else Plans(self._known_state, self._pages, MemoryConfiguration.of(layout))
        )
        self._table = BlockTable()
        self._spans: dict[int, tuple[Span, Home | StreamMemory]] = {}  # as the table
        self._asking = threading.RLock()  # two threads that ask for the block of an array get the same
        self._life = process.life
        self._ready = True  # one flag for whatever keeps the next request from going straight to its span
        self._own()
        _made.add(self)

    # --- allocate -----------------------------------------------------------------------------------------------
    def _allocate(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        span, home = self._span(nbytes, stream)
        try:
            block = kind(span.ptr, nbytes, stream, stream.submit(), tag)
            block.device_id = self._ordinal
            self._spans[span.ptr] = span, home
            self._table.add(block)
        except BaseException as error:
            if isinstance(error, DriverError) and self._was_asked_about(span):
                return self._allocate(nbytes, stream, tag, kind)
            if not isinstance(error, DriverError):
                self._table.forget(span.ptr)  # interrupted: nobody gets the block
            self._spans.pop(span.ptr, None)
            home.put(span)
            raise
        if not self._ready:  # closed meanwhile
            with suppress(UseAfterFree):  # close() saw it, and took it back
                self._take_in(block)
            self._refuse(nbytes)
        return block

    def _span(self, nbytes: int, stream: Stream) -> tuple[Span, Home | StreamMemory]:
        if not self._ready or not 0 < nbytes <= LARGEST:
            self._refuse(nbytes)
        try:
            if self._plans is not None:
                memory = self._plans.of(stream)
                return self._plans.supply(memory, nbytes), memory
            home = self.homes.of(stream)
            span = home.pop(nbytes)
            if span is not None:
                home.hits += 1
                return span, home
            return self.homes.supply(home, nbytes), home
        except OutOfMemory as error:
            raise explain(self, nbytes, error) from error

    def _refuse(self, nbytes: int) -> None:
        if self._life is not process.life:
            raise process.forked_child(self)
        if not self._ready:
            self._state.retire.run_forgotten()  # what came back meanwhile
            raise ClosedError(repr(self), got="a call after close()", expected="an open pool")
        if nbytes == 0:
            raise DriverError(
                repr(self), got="0 bytes", expected="1 or more", code=1, name="cudaErrorInvalidValue"
            )
        if nbytes > LARGEST:
            raise explain(self, nbytes, OutOfMemory("pool", requested=nbytes))

    # --- deallocate ---------------------------------------------------------------------------------------------
    def _deallocate(self, block: Any) -> None:
        if isinstance(block, ArrayBlock):
            raise UsageError(
                repr(block),
                got="deallocate()",
                expected="a block from allocate()",
                hint="Drop the array instead",
            )
        self._take_in(block)

    def _take_in(self, block: Any) -> None:
        """Take a block back, that of an array too."""
        if self._life is not process.life:
            self._refuse(1)
        if block.state is not _LIVE or not self._table.remove(block):
            if block.device_id not in (self._ordinal, self._device):
                raise wrong_device(self, block.device_id, "deallocate")
            raise gone(block.ptr, block.generation)
        span, home = self._spans[block.ptr]
        try:
            ready = self._order(block, home.stream)
            if self._tickets is not None:
                self._tickets.forget(block)
            if not ready:
                late = block.uses(), partial(self._late, block, span, home)
            del self._spans[block.ptr]
            if ready:
                home.put(span, block)  # by way of RETIRED: work on its stream comes after what used it
        except BaseException:
            if block.state is _LIVE:
                self._spans[block.ptr] = span, home
                self._table.add(block)
            raise
        if not ready:
            block.state = _RETIRED
            self._state.retire.push(*late, nbytes=block.size)

    def _order(self, block: Any, stream: Stream) -> bool:
        """Queue on ``stream`` the waits for uses elsewhere; False if they have to be over first."""
        if block.reads is None and block.write_stream is stream:
            return True
        if not stream.nameable():
            return False  # gone, or of another thread: its handle must not be touched
        try:
            with self._state.ordering:
                block.join_uses(stream)
        except CaptureError:
            return False
        return True

    def _late(self, block: Any, span: Span, home: Home | StreamMemory) -> None:
        home.put(span, block)

    # --- arrays -------------------------------------------------------------------------------------------------
    @cached_property
    def malloc(self) -> Callable[[int], Any]:
        """Inherited. Memory of 0 bytes is an empty pointer; memory that is kept is handed out without a driver call."""
        if self._plans is not None:
            return make_malloc(self, self._allocate, self._deallocate)
        return hot.make_malloc(self, cupy_types())

    def span_for(self, current: object, nbytes: Any) -> Span | None:
        """A span on the stream ``current`` for an array; None for 0 bytes. The long way of :mod:`.hot`."""
        size = as_size(nbytes)
        if size == 0:
            return None
        home = self.homes.fast.get(id(current))
        if home is None or not self._ready or size > LARGEST:
            span, _ = self._span(size, as_stream(current, device=self._device, driver=self._driver))
        else:
            try:
                span = self.homes.supply(home, size)
            except OutOfMemory as error:
                raise explain(self, size, error) from error
        if not self._ready:  # closed meanwhile
            if not self._was_asked_about(span):
                span.home.put(span)
            self._refuse(size)
        return span

    # --- streams ------------------------------------------------------------------------------------------------
    def stream_memory(self, stream: object = None) -> StreamMemory:
        """The configured pools of one stream: usage, reports, persistent windows, another layout.

        Args:
            stream: anything :func:`~cuglue.as_stream` takes.

        Ordering: queues nothing. Ownership: lives as long as the pool.

        Raises:
            UsageError: the pool has no layout.
        """
        if self._plans is None:
            raise UsageError(repr(self), got="no layout", expected="PoolResource(upstream, layout=[...])")
        return self._plans.of(self._stream(stream))

    def install(self, layout: MemoryConfiguration | Sequence[PoolLayout], stream: object = None) -> None:
        """Exchange the pools of ``stream``. Streams that come later get the new ones even if that is refused.

        Ordering: only enqueues, unless upstream blocks to free.

        Raises:
            LayoutError: no such layout (a ValueError).
            PoolsInUse: memory of the old pools of ``stream`` is in use.
            CaptureError: a stream of the device captures a graph.
        """
        if self._plans is None:
            raise UsageError(repr(self), got="no layout", expected="PoolResource(upstream, layout=[...])")
        self._plans.install(self._stream(stream), layout)

    @contextmanager
    def graph_memory(self, stream: object = None) -> Iterator[GraphMemory]:
        """What is allocated on ``stream`` in this block stays out of general use until :meth:`GraphMemory.close`.

        Run the work once in the block before it is captured: while a stream captures, memory that is free here is
        handed out again, and none is taken from upstream.

        Blocks of one stream may overlap: it takes its memory from the block entered last of those not left.

        Ordering: queues nothing.
        """
        if self._plans is not None:
            raise UsageError(repr(self), got="a layout", expected="a pool without one")
        memory = GraphMemory(self.homes, self._stream(stream))
        try:
            yield memory
        finally:
            memory.leave()

    # --- giving back --------------------------------------------------------------------------------------------
    def trim(self, keep: int = 0) -> int:
        """Give unused memory back to upstream until ``keep`` bytes are reserved; the bytes given back.

        Ordering: only enqueues, unless upstream blocks to free.

        Raises:
            CaptureError: a stream captures a graph and its pages stay; those of all others were given back.
        """
        self._state.retire.run_forgotten()
        return self._keeper.trim(as_size(keep))

    def reap_pending(self, *, block: bool = True) -> None:
        """Inherited. Looks for memory of dead arrays, and for what was unused for long; then upstream does its part."""
        self._state.retire.run_forgotten()
        self.homes.look_at_ages()
        self.upstream.reap_pending(block=block)
