"""Exports of a block of the simulated device: everything is host memory, and NumPy consumes it."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import numpy as np
import pytest
from block_views import block_view, numbers

import cuglue
from cuglue.core.block import Block
from cuglue.errors import BusyError, ClosedError, LayoutError, UnsupportedError
from cuglue.exchange import ArrayView, BlockOwner
from cuglue.exchange.dtypes import NARROW
from cuglue.layout import Layout
from cuglue.testing.dlpack_reader import IS_COPIED, consume, read
from cuglue.testing.view_suite import ViewSuite

V1 = (1, 0)


@pytest.fixture(autouse=True)
def sim():
    with cuglue.use_driver("sim") as driver:
        yield driver
        driver.check()


class TestBlockView(ViewSuite):
    def make(self, array, *, readonly=False):
        return block_view(array, readonly=readonly)


# --- NumPy's own DLPack cases ---------------------------------------------------------------------------------


def test_a_host_export_waits_for_the_pending_write():
    array = numbers(shape=(64,))
    with block_view(array) as view:
        assert view.export_owner.stream.completed == 0
        np.testing.assert_array_equal(np.asarray(view), array)
        assert view.export_owner.stream.completed > 0, "the copy in was queued, and had to be waited for"


@pytest.mark.parametrize("version", [(0, 0), None, V1, (100, 3)])
def test_a_dropped_capsule_holds_nothing(version):
    with block_view(numbers()) as view:
        before = references(view)
        capsule = view.__dlpack__(max_version=version)
        with_capsule = references(view)
        del capsule
        after = references(view)
    assert (with_capsule, after) == (before + 1, before)


@pytest.mark.parametrize("take", [np.from_dlpack, np.asarray, np.array, lambda v: v.__array__()])
def test_a_dropped_consumer_holds_nothing(take):
    with block_view(numbers()) as view:
        before = references(view)
        array = take(view)
        with_array = references(view)
        del array
        after = references(view)
    assert (with_array, after) == (before + (take is not np.array), before)


def references(view):
    """References to the owner; counted outside an assert, which would hold one itself."""
    return sys.getrefcount(view.export_owner)


def test_ten_thousand_unconsumed_capsules_leak_nothing():
    with block_view(numbers()) as view:
        for _ in range(10_000):
            view.__dlpack__(max_version=V1)
        assert view.export_owner.ledger.live() == ()


def test_old_consumers_that_pass_a_stream_only():
    array = numbers()

    class Old:
        def __init__(self, view):
            self.view = view

        def __dlpack__(self, stream=None):
            return self.view.__dlpack__(stream=None)

        def __dlpack_device__(self):
            return self.view.__dlpack_device__()

    with block_view(array) as view:
        np.testing.assert_array_equal(np.from_dlpack(Old(view)), array)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 4), (32, 4)),  # padded rows
        ((3, 4), (4, 12)),  # columns first
        ((4,), (24,)),  # a column
        ((3,), (20,)),  # a diagonal
        ((1, 4), (1000, 4)),  # odd stride of an axis of length 1
        ((3, 1), (4, 60)),
        ((1,) * 8, (4,) * 8),
    ],
)
def test_strided_views(shape, strides):
    array = numbers(shape=shape)
    layout = Layout(shape, strides, "f4")
    with block_view(array, layout=layout) as view:
        for got in (np.from_dlpack(view), np.asarray(view), view.__array__(), view.numpy()):
            np.testing.assert_array_equal(got, array)
        assert read(view.__dlpack__(max_version=V1)).strides == tuple(n // 4 for n in strides), "as they are"
        assert np.asarray(view).strides == strides or layout.is_c_contiguous
        assert view.numpy().flags.c_contiguous


@pytest.mark.parametrize("ndim", [0, 1, 5, 31, 32])
def test_number_of_axes(ndim):
    array = np.ones((1,) * ndim, "f4")
    with block_view(array) as view:
        assert np.from_dlpack(view).shape == array.shape
        assert np.asarray(view).shape == array.shape


def test_strides_that_cut_elements():
    with block_view(numbers("u1", (2, 2))) as view:
        cut = ArrayView(view.export_owner, view.device_ptr, Layout((2,), (1,), "u2"))
        with pytest.raises(BufferError, match="strides"):
            cut.__dlpack__(max_version=V1)


def test_row_26_negative_strides_never_become_a_view():
    with pytest.raises(LayoutError, match="negative"):
        Layout((3,), (-4,), "f4")


@pytest.mark.parametrize("dtype", ["M8[s]", ">i4", "S4", [("a", "i4")]])
def test_types_that_dlpack_cannot_name(dtype):
    with block_view(numbers("i4", (3,))) as view:
        other = ArrayView(view.export_owner, view.device_ptr, Layout.of((3,), dtype))
        for version in (None, V1):
            with pytest.raises(BufferError, match="no element type"):
                other.__dlpack__(max_version=version)
        assert view.export_owner.ledger.live() == ()


def test_writable_bit():
    with block_view(numbers(), readonly=True) as view:
        assert not np.from_dlpack(view).flags.writeable
        assert not np.asarray(view).flags.writeable
        assert not view.__array__().flags.writeable
        assert np.from_dlpack(view, copy=True).flags.writeable
        assert np.array(view).flags.writeable
    with block_view(numbers()) as view:
        assert np.from_dlpack(view).flags.writeable
        assert np.asarray(view).flags.writeable


def test_array_with_numpys_meaning_of_dtype_and_copy():
    array = numbers()
    with block_view(array) as view:
        assert np.may_share_memory(view.__array__(copy=False), view.__array__())
        assert not np.may_share_memory(view.__array__(copy=True), view.__array__())
        assert np.asarray(view, dtype="f8").dtype == "f8"
        assert view.__array__("f8").dtype == "f8"
        with pytest.raises(ValueError, match="copy"):
            view.__array__("f8", copy=False)
        with pytest.raises(ValueError, match="copy"):
            np.asarray(view, dtype="f8", copy=False)
        assert float(np.add(view, 1).sum()) == float((array + 1).sum())


def test_a_capsule_dropped_while_an_exception_propagates():
    with block_view(numbers()) as view:
        with pytest.raises(ZeroDivisionError):
            _raise_with(view.__dlpack__(max_version=V1))
        gc.collect()
        assert view.export_owner.ledger.live() == ()


def _raise_with(capsule):
    raise ZeroDivisionError(str(capsule)[:3])


def test_a_second_consumption_is_refused_by_the_consumer():
    with block_view(numbers()) as view:
        capsule = view.__dlpack__(max_version=V1)
        taken = consume(capsule)

        class Again:
            def __dlpack__(self, **_):
                return capsule

            def __dlpack_device__(self):
                return (1, 0)

        with pytest.raises(ValueError):
            np.from_dlpack(Again())
        taken.release()
        assert view.export_owner.ledger.live() == ()


def test_the_deleter_runs_on_a_thread_that_python_did_not_make():
    with block_view(numbers()) as view:
        taken = [consume(view.__dlpack__(max_version=v)) for v in (None, V1) for _ in range(20)]
        threads = [threading.Thread(target=t.release) for t in taken]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert view.export_owner.ledger.live() == ()


# --- what NumPy's arrays hold ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "take", [np.asarray, np.from_dlpack, lambda v: v.__array__(), lambda v: np.asarray(v)[1:]]
)
def test_the_array_keeps_the_owner_and_its_line_is_known(take):
    with block_view(numbers()) as view:
        array = take(view)
        (export,) = view.export_owner.ledger.live()
        assert export.filename == __file__
        with pytest.raises(BusyError, match="test_host_view"):
            view.export_owner.ledger.check_leave("the block", strict=True)
        del array
        assert view.export_owner.ledger.live() == ()


def test_empty_arrays_hold_nothing():
    with block_view(np.empty((0, 3), "f4")) as view:
        arrays = [np.asarray(view), view.numpy(), view.__array__()]
        assert [a.shape for a in arrays] == [(0, 3)] * 3
        assert view.export_owner.ledger.live() == ()


def test_cuda_array_interface_is_absent():
    with block_view(numbers()) as view:
        assert not hasattr(view, "__cuda_array_interface__")
        assert not view.export_owner.cai_read
        with pytest.raises(UnsupportedError) as caught:
            view.cupy()
        assert caught.value.reason == "simulated"
        assert "numpy" in str(caught.value)


# --- element types that NumPy lacks ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(NARROW))
def test_narrow_types_by_name(name):
    code, bits = NARROW[name]
    array = numbers(f"u{bits // 8}", (4, 4))
    with block_view(array) as plain:
        view = plain.view(name)
        for version, copy in ((None, None), (V1, None), (V1, True), (None, True)):
            seen = read(view.__dlpack__(max_version=version, copy=copy))
            assert seen.dtype == (code, bits, 1)
            assert bool(seen.flags & IS_COPIED) == (copy is True and version is not None)
        assert not hasattr(view, "__cuda_array_interface__")
        assert repr(view).count(name) == 1
        back = view.view(array.dtype)
        assert read(back.__dlpack__(max_version=V1)).dtype == (1, bits, 1)
        np.testing.assert_array_equal(np.asarray(back), array)


def test_records_keep_their_fields():
    array = np.array([(1, 2.5), (3, 4.5)], [("a", "i4"), ("b", "f4")])
    with block_view(array) as view:
        for got in (np.asarray(view), view.numpy(), view.__array__()):
            assert got.dtype == array.dtype
            np.testing.assert_array_equal(got, array)
        assert np.may_share_memory(np.asarray(view), view.__array__())
        with pytest.raises(BufferError):
            view.__dlpack__(max_version=V1)


def test_without_ml_dtypes_narrow_elements_are_no_numpy_array(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with block_view(numbers("u2", (4,))) as plain:
        view = plain.view("bfloat16")
        for attempt in (np.asarray, lambda v: v.numpy()):
            with pytest.raises(UnsupportedError, match="ml_dtypes"):
                attempt(view)
        np.testing.assert_array_equal(view.view("u2").numpy(), numbers("u2", (4,)))


def test_without_pytorch_there_is_no_tensor(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with block_view(numbers()) as view, pytest.raises(UnsupportedError, match="Install PyTorch") as caught:
        view.torch()
    assert caught.value.reason == "no_torch"
    with pytest.raises(ClosedError):
        view.torch()


def test_a_view_by_another_type_keeps_the_size():
    with block_view(numbers("f4", (3,))) as view:
        np.testing.assert_array_equal(np.asarray(view.view("u4")), numbers("f4", (3,)).view("u4"))
        for wrong in ("f8", "bfloat16", "u1"):
            with pytest.raises(LayoutError, match="4 bytes"):
                view.view(wrong)


# --- ends -----------------------------------------------------------------------------------------------------


def test_a_freed_block_exports_nothing():
    with block_view(numbers()) as view:
        pass
    for attempt in (
        lambda: np.asarray(view),
        lambda: np.from_dlpack(view),
        lambda: hasattr(view, "__array_interface__"),
    ):
        with pytest.raises(ClosedError):
            attempt()


def test_an_export_keeps_the_owner_and_its_block_alive():
    driver = cuglue.current_driver()
    stream = cuglue.as_stream(driver.Stream())
    ptr = driver.malloc(16, 0)
    owner = BlockOwner(Block(ptr, 16, stream))
    watched = weakref.ref(owner)
    array = np.asarray(ArrayView(owner, ptr, Layout.of((4,), "f4")))
    del owner
    gc.collect()
    assert watched() is not None
    del array
    gc.collect()
    assert watched() is None
    driver.free(ptr, 0)
