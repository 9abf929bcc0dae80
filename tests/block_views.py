"""Views over a plain block of the current driver's memory, for tests of exports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import cuglue
from cuglue.core.block import Block
from cuglue.core.stream import Stream
from cuglue.driver.protocol import CopyKind, MemoryType
from cuglue.exchange import ArrayView, BlockOwner
from cuglue.layout import Layout


def new_stream(driver: Any = None) -> Stream:
    """A stream that waits for no other by itself, with an owner."""
    driver = driver or cuglue.current_driver()
    if driver.name == "sim":
        return cuglue.as_stream(driver.Stream())
    import cupy

    return cuglue.as_stream(cupy.cuda.Stream(non_blocking=True), driver=driver)


@contextmanager
def block_view(
    array: np.ndarray,
    *,
    readonly: bool = False,
    layout: Layout | None = None,
    narrow: str | None = None,
    memory_type: MemoryType | None = None,
    offset: int = 0,
) -> Iterator[ArrayView]:
    """A view of fresh memory that ``array`` was copied into, on a stream of its own; freed at the end.

    ``memory_type`` PINNED and MANAGED allocate that kind; ``offset`` bytes lie before the first element.
    """
    driver: Any = cuglue.current_driver()
    stream = new_stream(driver)
    layout = layout or Layout.of(array.shape, array.dtype)
    nbytes = layout.nbytes + offset + 1
    if memory_type is MemoryType.PINNED:
        base = driver.host_alloc(nbytes)
    elif memory_type is MemoryType.MANAGED:
        base = driver.malloc_managed(nbytes, 0)
    else:
        base = driver.malloc(nbytes, 0)
    block = Block(base, nbytes, stream)
    if layout.size:
        packed = np.zeros(layout.nbytes, np.uint8)
        np.ndarray(layout.shape, layout.dtype, packed, 0, layout.strides)[...] = np.asarray(array).astype(
            layout.dtype
        )
        if memory_type is MemoryType.PINNED:
            np.asarray(driver.host_view(base + offset, packed.nbytes, True))[:] = packed
        else:
            driver.copy_async(base + offset, packed.ctypes.data, packed.nbytes, CopyKind.H2D, stream.handle)
            block.finish(stream, cuglue.Access.WRITE)
    owner = BlockOwner(block, readonly=readonly, memory_type=memory_type)
    try:
        yield ArrayView(owner, base + offset, layout, narrow=narrow)
    finally:
        for user, _ in owner.uses():
            user.synchronize()
        block.advance("deallocate")
        if memory_type is MemoryType.PINNED:
            driver.host_free(base)
        else:
            driver.free(base, 0)


def numbers(code: str = "f4", shape: tuple[int, ...] = (3, 4)) -> np.ndarray:
    """0, 1, 2, ... of a type and shape."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(code)
