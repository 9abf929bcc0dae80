"""What CuPy looks at of memory: the exact class of a pointer.

Its kernels that take memory as it is (reductions by CUB, sorts, FFTs) look the class up in a table and fail on any
other, a subclass of MemoryPointer too: ``AssertionError: <class '...PoolPointer'>`` from ``cupy/_core/_kernel.pyx`` on
an H200. A memory object may be of any class below BaseMemory.
"""

from __future__ import annotations

import pytest

import cuglue

cupy = pytest.importorskip("cupy", exc_type=ImportError)


def test_a_pointer_is_of_the_class_that_cupys_kernels_know(sim: object) -> None:
    with cuglue.PoolResource(cuglue.AsyncCudaResource()) as pool:
        for nbytes in (0, 100, 100, 1 << 20):
            assert type(pool.malloc(nbytes)) is cupy.cuda.MemoryPointer
