"""Exports of CUDA memory as CUDA consumers see them: cuda.core, CuPy, and the ctypes reader."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from block_views import block_view, new_stream, numbers
from source_tree import ROOT

import cuglue
from cuglue.core.device import device_state
from cuglue.driver.protocol import CaptureMode, MemoryType
from cuglue.errors import UnsupportedError
from cuglue.exchange import ArrayView
from cuglue.exchange.dtypes import NARROW
from cuglue.layout import Layout
from cuglue.testing import Latch
from cuglue.testing.dlpack_reader import IS_COPIED, READ_ONLY, consume, read
from cuglue.testing.view_suite import ViewSuite

pytestmark = pytest.mark.gpu
V1 = (1, 0)


class TestCudaBlockView(ViewSuite):
    def make(self, array, *, readonly=False):
        return block_view(array, readonly=readonly)


class TestPinnedView(ViewSuite):
    def make(self, array, *, readonly=False):
        return block_view(array, readonly=readonly, memory_type=MemoryType.PINNED)


class TestManagedView(ViewSuite):
    def make(self, array, *, readonly=False):
        return block_view(array, readonly=readonly, memory_type=MemoryType.MANAGED)


@pytest.mark.parametrize("name", sorted(NARROW))
@pytest.mark.parametrize("version", [None, V1])
def test_narrow_types(name, version):
    code, bits = NARROW[name]
    with block_view(numbers(f"u{bits // 8}")) as view:
        for copy in (None, True):
            seen = read(view.view(name).__dlpack__(max_version=version, copy=copy))
            assert seen.dtype == (code, bits, 1)
            assert seen.device == (2, 0)
            assert bool(seen.flags & IS_COPIED) == (copy is True and version is not None)


@pytest.mark.parametrize("version", [None, V1])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4)])
def test_no_elements_at_no_address(shape, version):
    with block_view(np.zeros((1,), "f4")) as view:
        empty = ArrayView(view.export_owner, 0, Layout.of(shape, "f4"))
        for copy in (None, True):
            seen = read(empty.__dlpack__(max_version=version, copy=copy))
            assert (seen.data, seen.device, seen.shape) == (None, (2, 0), shape)
        assert empty.__cuda_array_interface__["data"] == (0, False)
        assert empty.cupy().shape == shape
        assert empty.numpy().shape == shape


def test_cuda_core_reads_what_was_written():
    from cuda.core.utils import StridedMemoryView

    consumer = new_stream()
    for readonly in (False, True):
        with block_view(numbers(), layout=Layout((3, 4), (32, 4), "f4"), readonly=readonly) as view:
            for number in (-1, consumer.handle):
                seen = StridedMemoryView.from_dlpack(view, stream_ptr=number)
                assert (seen.ptr, seen.shape, seen.strides) == (view.device_ptr, (3, 4), (8, 1))
                assert (seen.device_id, seen.readonly, seen.dtype) == (0, readonly, np.dtype("f4"))
                del seen
            assert view.export_owner.ledger.live() == ()
    with block_view(numbers()) as view:
        seen = StridedMemoryView.from_cuda_array_interface(view, stream_ptr=consumer.handle)
        assert (seen.ptr, seen.shape, seen.readonly) == (view.device_ptr, (3, 4), False)
        del seen


@pytest.mark.parametrize(
    "code", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]
)
def test_cupy_takes_it_by_every_way(code):
    import cupy

    array = numbers(code)
    with block_view(array) as view:
        for taken in (cupy.from_dlpack(view), cupy.asarray(view), view.cupy()):
            assert taken.data.ptr == view.device_ptr
            np.testing.assert_array_equal(taken.get(), array)
        del taken
        assert view.export_owner.ledger.live() == ()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 4), (32, 4)), ((3, 4), (4, 12)), ((1, 4), (1000, 4)), ((3, 1), (4, 60)), ((), ()), ((5,), (24,))],
)
def test_cupy_takes_strided_memory(shape, strides):
    import cupy

    array = numbers(shape=shape)
    with block_view(array, layout=Layout(shape, strides, "f4")) as view:
        for taken in (cupy.from_dlpack(view), cupy.asarray(view), view.cupy()):
            assert taken.data.ptr == view.device_ptr
            np.testing.assert_array_equal(taken.get(), array)
        del taken
        np.testing.assert_array_equal(view.numpy(), array)
        apart = cupy.from_dlpack(view, copy=True)
        assert apart.data.ptr != view.device_ptr
        np.testing.assert_array_equal(apart.get(), array)


def test_cupy_writes_are_seen_and_the_pointer_leads_back_to_the_owner():
    import cupy

    with block_view(numbers()) as view:
        taken = view.cupy()
        taken += 1
        assert taken.data.mem._owner.owner is view.export_owner
        np.testing.assert_array_equal(view.numpy(), numbers() + 1)
        again = cupy.asarray(view)
        assert again.data.mem._owner is view
        del taken, again


def test_cupy_does_not_block_on_the_array_interface_of_the_same_stream():
    import cupy

    with block_view(numbers()) as view:
        assert view.__cuda_array_interface__["stream"] == view.export_owner.stream.handle
        np.testing.assert_array_equal(cupy.asarray(view).get(), numbers())


# --- order ----------------------------------------------------------------------------------------------------


def held_view(view):
    """Work on the home stream of ``view`` that holds until released; the block knows of it."""
    owner = view.export_owner
    latch = Latch(owner.stream)
    owner.block.finish(owner.stream, cuglue.Access.WRITE)
    return latch


def test_a_consumer_stream_waits_on_the_device_and_not_on_the_host():
    with block_view(numbers()) as view:
        consumer = new_stream()
        with held_view(view):
            began = time.perf_counter()
            view.__dlpack__(stream=consumer.handle, max_version=V1)
            assert time.perf_counter() - began < 1.0, "the export only enqueues"
            assert not consumer.query()
        consumer.synchronize()


def test_the_legacy_stream_waits():
    with block_view(numbers()) as view:
        driver = cuglue.current_driver()
        driver.stream_synchronize(0)
        with held_view(view):
            view.__dlpack__(stream=1, max_version=V1)
            assert not driver.stream_query(0)
        driver.stream_synchronize(0)


def test_minus_one_waits_for_nothing():
    with block_view(numbers()) as view:
        consumer = new_stream()
        with held_view(view):
            view.__dlpack__(stream=-1, max_version=V1)
            assert consumer.query()


def test_cupy_is_ordered_on_its_current_stream():
    import cupy

    with block_view(numbers()) as view, cupy.cuda.Stream(non_blocking=True) as current:
        with held_view(view):
            taken = view.cupy()
            assert not current.done
            assert cupy.from_dlpack(view).data.ptr == taken.data.ptr
        np.testing.assert_array_equal(taken.get(), numbers())
        del taken


def test_a_copy_is_made_in_the_order_of_the_consumer():
    import cupy

    with block_view(numbers()) as view, cupy.cuda.Stream(non_blocking=True) as current:
        with held_view(view):
            apart = cupy.from_dlpack(view, copy=True)
            assert not current.done
        np.testing.assert_array_equal(apart.get(), numbers())
        ledger = view.export_owner.ledger
        assert ledger.live() == ()


@pytest.mark.alone
def test_dropped_copies_are_freed():
    import cupy

    driver = cuglue.current_driver()
    retire = device_state(driver, 0).retire
    with block_view(np.zeros(1 << 20, "u1")) as view, cupy.cuda.Stream(non_blocking=True):
        before = None
        for turn in range(40):
            taken = cupy.from_dlpack(view, copy=True)
            del taken
            gc.collect()
            retire.drain(block=True)
            if turn == 5:
                before = driver.memory_info(0).free
        assert driver.memory_info(0).free >= before - (8 << 20)
        assert len(retire) == 0


# --- captures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [True, False])
def test_a_capture_survives_an_export(same):
    with block_view(numbers()) as view:
        home = view.export_owner.stream
        home.synchronize()
        driver = cuglue.current_driver()
        with home.owner:
            taken = view.cupy()
            home.synchronize()
            driver.capture_begin(home.handle, CaptureMode.RELAXED)
            view.__dlpack__(stream=home.handle if same else -1, max_version=V1)
            driver.fill_async(view.device_ptr, 0, 4, home.handle)
            graph = driver.capture_end(home.handle)
        executable = driver.graph_instantiate(graph)
        driver.graph_launch(executable, home.handle)
        home.synchronize()
        driver.graph_exec_destroy(executable)
        driver.graph_destroy(graph)
        del taken


# --- to the host ----------------------------------------------------------------------------------------------


def test_to_the_host():
    import cupy

    with block_view(numbers(), readonly=True) as view:
        for version in (None, V1):
            seen = read(view.__dlpack__(dl_device=(1, 0), max_version=version, stream=1))
            assert seen.device == (1, 0)
        assert read(view.__dlpack__(max_version=V1)).flags == READ_ONLY
        got = np.from_dlpack(view, device="cpu")
        np.testing.assert_array_equal(got, numbers())
        assert got.flags.writeable
        with pytest.raises(BufferError):
            np.from_dlpack(view, device="cpu", copy=False)
        assert cupy.from_dlpack(view).data.ptr == view.device_ptr, (
            "CuPy asks with a version and ignores the flag"
        )


def test_pinned_memory_is_numpys():
    with block_view(numbers(), memory_type=MemoryType.PINNED) as view:
        assert np.asarray(view).ctypes.data == view.device_ptr
        with pytest.raises(UnsupportedError):
            view.cupy()


# --- ends -----------------------------------------------------------------------------------------------------


def test_row_74_deleters_on_threads_without_a_context():
    with block_view(numbers()) as view:
        taken = [consume(view.__dlpack__(max_version=v)) for v in (None, V1) for _ in range(20)]
        taken += [consume(view.__dlpack__(max_version=V1, copy=True)) for _ in range(4)]
        threads = [threading.Thread(target=t.release) for t in taken]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert view.export_owner.ledger.live() == ()
        device_state(cuglue.current_driver(), 0).retire.drain(block=True)


HOLDERS = {
    "a global CuPy array": "held = cupy.from_dlpack(view)",
    "the shortcut": "held = view.cupy()",
    "the array interface": "held = cupy.asarray(view)",
    "a cycle": "held = [cupy.from_dlpack(view)]; held.append(held)",
    "a module": "import builtins; builtins.held = cupy.from_dlpack(view)",
    "capsules": "held = [view.__dlpack__(max_version=(1, 0)), view.__dlpack__()]",
    "a copy": "held = cupy.from_dlpack(view, copy=True)",
    "a patched capsule": "held = view.view('float8_e5m2').__dlpack__(max_version=(1, 0))",
    "cuda.core": "from cuda.core.utils import StridedMemoryView as V; held = V.from_dlpack(view, stream_ptr=-1)",
}
MAKE = """
import cupy, cuglue
from cuglue.core.block import Block
from cuglue.exchange import ArrayView, BlockOwner
from cuglue.layout import Layout
from cuglue.testing import Latch
driver = cuglue.current_driver()
stream = cuglue.as_stream(cupy.cuda.Stream(non_blocking=True))
ptr = driver.malloc(64, 0)
block = Block(ptr, 64, stream)
driver.fill_async(ptr, 1, 64, stream.handle)
block.finish(stream, cuglue.Access.WRITE)
view = ArrayView(BlockOwner(block), ptr, Layout.of((64,), "u1"))
"""


@pytest.mark.parametrize("holder", HOLDERS)
def test_exit_with_a_live_consumer(holder):
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", MAKE + HOLDERS[holder]],
        cwd=ROOT / "src",
        env={**os.environ, "CUGLUE_DRIVER": "cuda"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
