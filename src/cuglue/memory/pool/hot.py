"""The way of an array's memory that is taken on nearly every allocation: out of a bin, and back into it.

Owns :func:`make_malloc` and nothing else. No driver call, no event, no lock, no count of bytes: what is live is what
lies neither in bins nor in heaps, and is counted when somebody asks.

What a compiled twin of this module must keep:
    * The current stream is asked for once, and its *object* decides (handles are reused): the ``owner`` of a home.
      Others go the long way: per-thread default streams, integers, streams seen for the first time.
    * A bin is popped and appended to in one step each: other threads, and finalisers inside any allocation of a Python
      object, use the same bin. No span may be in two places, nor in none without a memory object that has it.
    * The finaliser runs on any thread, with any device current, inside the collector, or while the interpreter ends. It
      appends, to the bin or to the retire queue, and does nothing else.
    * Memory that a command or a caller has looked at (``life`` is not None) never goes straight back to its bin: its
      uses on other streams have to be waited for first.
    * The memory object keeps the pool alive, and the pool's finaliser must not run before it.
    * A pointer is of CuPy's own class and of none below it: its kernels know no other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from ...core import process
from ..cupy_plug import current_device_of, no_copy, wrong_current_device


def make_malloc(pool: Any, types: Any) -> Callable[[int], Any]:
    """CuPy's allocator over ``pool``.

    Args:
        pool: the resource.
        types: CuPy's classes, see :func:`cuglue.memory.cupy_plug.cupy_types`.
    """
    pointer = types.MemoryPointer
    driver, device = pool.driver, pool.device
    stream_current = driver.stream_current
    retire = pool.homes.state.retire
    forgotten = retire.forgotten
    take_back, long_way = pool.take_back, pool.span_for
    later = partial  # names of a module may be gone when the last arrays go
    fast, last = pool.homes.fast, SimpleNamespace(owner=None)
    ordinal = pool.device_ordinal
    current_device = current_device_of(driver)
    empty = pointer(types.UnownedMemory(0, 0, None, device), 0)
    life = process.life

    class PoolMemory(types.UnownedMemory):  # type: ignore[misc] # a class that CuPy gives at run time
        """Memory of CuPy arrays. Made by one call, which takes less than setting the fields one by one."""

        __slots__ = ("__weakref__",)
        __reduce_ex__ = no_copy

        @property
        def span(self) -> Any:
            """What it lies in."""
            return self._owner

        @property
        def block(self) -> Any:
            """The block behind it, made at the first question."""
            return pool.block_in(self)

        def __del__(self) -> None:
            span = self._owner
            block = span.life
            if block is None:
                span.stack.append(span)
            else:
                forgotten.append(later(take_back, span, block))

        def __repr__(self) -> str:
            return f"PoolMemory(ptr={self.ptr:#x}, nbytes={self.size}, device={self.device_id})"

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
        return pointer(PoolMemory(span.ptr, span.size, span, ordinal), 0)

    return malloc
