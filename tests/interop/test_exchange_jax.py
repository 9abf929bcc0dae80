"""JAX on the CPU takes views of the simulated device."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import numpy as np
import pytest

import cuglue
from cuglue.core.block import Block
from cuglue.exchange import ArrayView, BlockOwner
from cuglue.layout import Layout

pytestmark = pytest.mark.interop


@pytest.fixture(autouse=True)
def driver():
    with cuglue.use_driver("sim") as sim:
        yield sim
        sim.check()


@contextmanager
def view_of(array, *, readonly=False, layout=None, offset=0, **options):
    driver = cuglue.current_driver()
    stream = cuglue.as_stream(driver.Stream())
    layout = layout or Layout.of(array.shape, array.dtype)
    base = driver.malloc(layout.nbytes + offset + 1, 0)
    block = Block(base, layout.nbytes + offset + 1, stream)
    if array.size:
        np.asarray(ArrayView(BlockOwner(block), base + offset, layout))[...] = array
    yield ArrayView(BlockOwner(block, readonly=readonly), base + offset, layout, **options)
    block.advance("deallocate")
    driver.free(base, 0)


def numbers(code="f4", shape=(3, 4)):
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(code)


def pointer(array):
    return array.unsafe_buffer_pointer()


@pytest.mark.parametrize("code", ["i1", "i2", "i4", "u1", "u2", "u4", "f2", "f4", "c8", "?"])
def test_from_dlpack_shares_the_memory(code):
    import jax

    array = numbers(code)
    with view_of(array) as view:
        got = jax.dlpack.from_dlpack(view)
        assert pointer(got) == view.device_ptr, "the memory is aligned, so nothing is copied"
        np.testing.assert_array_equal(np.asarray(got), array)
        assert len(view.export_owner.ledger.live()) == 1
        del got
        gc.collect()
        assert view.export_owner.ledger.live() == ()


def test_bfloat16():
    import jax
    import jax.numpy as jnp

    with view_of(numbers("u2")) as view:
        got = jax.dlpack.from_dlpack(view.view("bfloat16"))
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(got).view("u2"), numbers("u2"))


def test_memory_that_is_not_aligned_is_copied():
    import jax

    with view_of(numbers(), offset=4) as view:
        got = jax.dlpack.from_dlpack(view)
        assert pointer(got) != view.device_ptr
        np.testing.assert_array_equal(np.asarray(got), numbers())


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), ()])
def test_empty_and_single(shape):
    import jax

    with view_of(numbers(shape=shape)) as view:
        assert jax.dlpack.from_dlpack(view).shape == shape


def test_transposed_memory():
    import jax

    array = numbers(shape=(3, 4))
    with view_of(array, layout=Layout((3, 4), (4, 12), "f4")) as view:
        np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(view)), array)


def test_rows_with_gaps_are_refused_by_jax_and_leave_nothing():
    import jax

    with view_of(numbers(), layout=Layout((3, 4), (32, 4), "f4")) as view:
        with pytest.raises(Exception, match=r"(?i)stride|compact|layout"):
            jax.dlpack.from_dlpack(view)
        gc.collect()
        assert view.export_owner.ledger.live() == ()


def test_read_only_memory():
    """JAX before 0.12 asks for no version, so it cannot be told: it gets an error, or the legacy switch."""
    import jax

    old = tuple(int(n) for n in jax.__version__.split(".")[:2]) < (0, 12)
    with view_of(numbers(), readonly=True) as view:
        if old:
            with pytest.raises(BufferError, match="read-only"):
                jax.dlpack.from_dlpack(view)
        else:
            np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(view)), numbers())
    with view_of(numbers(), readonly=True, legacy_readonly=True) as view:
        np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(view)), numbers())


def test_jnp_asarray_goes_through_numpy():
    import jax.numpy as jnp

    with view_of(numbers()) as view:
        got = jnp.asarray(view)
        np.testing.assert_array_equal(np.asarray(got), numbers())
