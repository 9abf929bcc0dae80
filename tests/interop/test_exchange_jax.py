"""JAX on the CPU takes views of the simulated device."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from block_views import block_view, numbers

import cuglue
from cuglue.layout import Layout

pytestmark = pytest.mark.interop


@pytest.fixture(autouse=True)
def driver():
    with cuglue.use_driver("sim") as sim:
        yield sim
        sim.check()


def pointer(array):
    return array.unsafe_buffer_pointer()


@pytest.mark.parametrize("code", ["i1", "i2", "i4", "u1", "u2", "u4", "f2", "f4", "c8", "?"])
def test_from_dlpack_shares_the_memory(code):
    import jax

    array = numbers(code)
    with block_view(array) as view:
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

    with block_view(numbers("u2")) as view:
        got = jax.dlpack.from_dlpack(view.view("bfloat16"))
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(got).view("u2"), numbers("u2"))


def test_memory_that_is_not_aligned_is_copied():
    import jax

    with block_view(numbers(), offset=4) as view:
        got = jax.dlpack.from_dlpack(view)
        assert pointer(got) != view.device_ptr
        np.testing.assert_array_equal(np.asarray(got), numbers())


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), ()])
def test_empty_and_single(shape):
    import jax

    with block_view(numbers(shape=shape)) as view:
        assert jax.dlpack.from_dlpack(view).shape == shape


def test_transposed_memory():
    import jax

    array = numbers(shape=(3, 4))
    with block_view(array, layout=Layout((3, 4), (4, 12), "f4")) as view:
        np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(view)), array)


def test_rows_with_gaps_are_refused_by_jax_and_leave_nothing():
    import jax

    with block_view(numbers(), layout=Layout((3, 4), (32, 4), "f4")) as view:
        with pytest.raises(Exception, match=r"(?i)stride|compact|layout"):
            jax.dlpack.from_dlpack(view)
        gc.collect()
        assert view.export_owner.ledger.live() == ()


def test_read_only_memory():
    """JAX before 0.12 asks for no version, so it cannot be told: it gets an error, or the legacy switch."""
    import jax

    old = tuple(int(n) for n in jax.__version__.split(".")[:2]) < (0, 12)
    with block_view(numbers(), readonly=True) as view:
        if old:
            with pytest.raises(BufferError, match="read-only"):
                jax.dlpack.from_dlpack(view)
        else:
            np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(view)), numbers())
    with block_view(numbers(), readonly=True) as view:
        legacy = view.view(legacy_readonly=True)
        np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(legacy)), numbers())


def test_jnp_asarray_goes_through_numpy():
    import jax.numpy as jnp

    with block_view(numbers()) as view:
        got = jnp.asarray(view)
        np.testing.assert_array_equal(np.asarray(got), numbers())
