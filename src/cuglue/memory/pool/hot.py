"""The way of an array's memory that is taken on nearly every allocation: out of a bin, and back into it.

Owns :func:`make_malloc` and nothing else. No driver call, no event, no lock, no count of bytes: what is live is what
lies neither in bins nor in heaps, and is counted when somebody asks.

What a compiled twin of this module must keep:
    * The current stream is asked for once, and its *object* decides (handles are reused): the ``owner`` of a home.
      Others go the long way: per-thread default streams, integers, streams seen for the first time.
    * A bin is popped and appended to in one step each: other threads, and finalisers inside any allocation of a Python
      object, use the same bin. No span may be in two places, nor in none without an object that gives it back.
    * A memory object stays with its span until that is cut or merged. What dies with an array is its pointer, and gives
      the span back. Where somebody else still has the memory object, a view or a caller, that is left to the memory
      object itself; the span knows it no more. References are counted exactly, as the interpreter's lock is held.
    * Finalisers run on any thread, with any device current, inside the collector, or while the interpreter ends. They
      append, to the bin or to the retire queue, and do nothing else.
    * Memory that a command or a caller has looked at (``life`` is not None) never goes straight back to its bin: its
      uses on other streams have to be waited for first.
    * Pointers and memory objects in use keep the pool alive, and its finaliser must not run before theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from sys import getrefcount
from types import SimpleNamespace
from typing import Any

from ...core import process
from ..cupy_plug import current_device_of, no_copy, wrong_current_device
from .spans import Span


def make_malloc(pool: Any, types: Any) -> Callable[[int], Any]:
    """CuPy's allocator over ``pool``.

    Args:
        pool: the resource.
        types: CuPy's classes, see :func:`cuglue.memory.cupy_plug.cupy_types`.
    """
    driver, device = pool.driver, pool.device
    stream_current = driver.stream_current
    retire = pool.homes.state.retire
    forgotten = retire.forgotten
    take_back, long_way = pool.take_back, pool.span_for
    later, references = partial, getrefcount  # names of a module may be gone when the last arrays go
    fast, last = pool.homes.fast, SimpleNamespace(owner=None)
    ordinal = pool.device_ordinal
    current_device = current_device_of(driver)
    empty = types.MemoryPointer(types.UnownedMemory(0, 0, None, device), 0)
    life = process.life

    class PoolMemory(types.UnownedMemory):  # type: ignore[misc] # a class that CuPy gives at run time
        """A span for CuPy, behind one array after the other. No weak reference could tell the end of one of them."""

        __slots__ = ()
        __reduce_ex__ = no_copy

        @property
        def span(self) -> Any:
            """What it lies in."""
            return self._owner

        @property
        def block(self) -> Any:
            """The block behind it, made at the first question."""
            return pool.block_in(self)

        def __repr__(self) -> str:
            return f"PoolMemory(ptr={self.ptr:#x}, nbytes={self.size}, device={self.device_id})"

    class OutlivingMemory(PoolMemory):
        """What a memory object becomes that is still used when the pointer is gone that was handed out."""

        __slots__ = ()

        def __del__(self) -> None:
            give_back(self._owner)

    class PoolPointer(types.MemoryPointer):  # type: ignore[misc] # as above
        """What an array holds. One is made for each array anyhow, so that its end costs no object more."""

        __slots__ = ("span",)

        def __del__(self) -> None:
            try:
                span = self.span
            except AttributeError:
                return  # its making was interrupted, and its maker gives the span back
            if references(span.memory) > 3:  # the span's, this pointer's and that of the question
                span.memory = None
                self.mem.__class__ = OutlivingMemory
            elif span.life is None:
                span.stack.append(span)
            else:
                give_back(span)

    def give_back(span: Span) -> None:
        """For finalisers."""
        block = span.life
        if block is None:
            span.stack.append(span)
        else:
            forgotten.append(later(take_back, span, block))

    def memory_of(span: Span) -> PoolMemory:
        """The memory object of ``span`` from now on."""
        memory = span.memory = PoolMemory(span.ptr, span.size, span, ordinal)
        return memory

    def malloc(nbytes: int) -> Any:
        nonlocal last
        if forgotten:
            retire.run_forgotten()
        if current_device is not None and current_device() != device:
            raise wrong_current_device(pool, current_device())
        try:
            current = stream_current(device)
        except Exception:
            if process.life is not life:
                raise process.forked_child(pool) from None
            raise
        span = None
        try:
            home = last
            if home.owner is not current:
                home = last = fast[id(current)]
            stack, larger = home.bins[(nbytes + 511) >> 9]
            if not stack:
                for stack in larger:
                    if stack:
                        break
            span = stack.pop()
            home.hits += 1
        except (KeyError, IndexError, TypeError):
            pass  # a stream or a size seen for the first time; all are empty; no number of bytes
        if span is None:
            span = long_way(current, nbytes)
            if span is None:
                return empty
        try:
            made = PoolPointer(span.memory or memory_of(span), 0)
            made.span = span
        except BaseException:  # interrupted: nobody gets it
            give_back(span)
            raise
        return made

    return malloc
