"""PyTorch takes views of the simulated device as CPU tensors over the same memory."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from block_views import block_view, numbers

import cuglue
from cuglue.driver.protocol import MemoryType
from cuglue.errors import ClosedError
from cuglue.layout import Layout

pytestmark = pytest.mark.interop

NUMPY_TYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]
NARROW = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.fixture(autouse=True)
def driver():
    with cuglue.use_driver("sim") as sim:
        yield sim
        sim.check()


@pytest.mark.parametrize("code", NUMPY_TYPES)
def test_from_dlpack_shares_the_memory(code):
    import torch

    array = numbers(code)
    with block_view(array) as view:
        tensor = torch.from_dlpack(view)
        assert tensor.device.type == "cpu"
        assert tensor.data_ptr() == view.device_ptr
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
        tensor.zero_()
        np.testing.assert_array_equal(np.asarray(view), np.zeros_like(array))


def test_the_shortcut():
    with block_view(numbers()) as view:
        tensor = view.torch()
        assert tensor.data_ptr() == view.device_ptr
        (export,) = view.export_owner.ledger.live()
        assert export.filename == __file__, "not PyTorch's own file"


@pytest.mark.parametrize("name", NARROW)
def test_types_that_numpy_lacks(name):
    import torch

    size = 2 if name == "bfloat16" else 1
    array = numbers(f"u{size}")
    with block_view(array) as view:
        tensor = view.view(name).torch()
        assert tensor.dtype == getattr(torch, name)
        np.testing.assert_array_equal(tensor.view(getattr(torch, f"uint{8 * size}")).numpy(), array)
        back = view.view(name).numpy()
        assert back.dtype.name == name
        np.testing.assert_array_equal(back.view(f"u{size}"), array)


def test_types_of_ml_dtypes_are_layout_types():
    import ml_dtypes
    import torch

    array = numbers("u2").view(ml_dtypes.bfloat16)
    with block_view(array) as view:
        assert torch.from_dlpack(view).dtype is torch.bfloat16
        for got in (
            view.numpy(),
            np.asarray(view),
            view.view("bfloat16").numpy(),
            np.asarray(view.view("u2").view("bfloat16")),
        ):
            assert got.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(got.view("u2"), array.view("u2"))
        assert not hasattr(view, "__array_interface__"), "it would say V2"


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 4), (32, 4)),
        ((3, 4), (4, 12)),
        ((1, 4), (1000, 4)),
        ((3, 1), (4, 60)),
        ((0, 3), (12, 4)),
        ((), ()),
    ],
)
def test_layouts(shape, strides):
    import torch

    array = numbers(shape=shape)
    with block_view(array, layout=Layout(shape, strides, "f4")) as view:
        tensor = torch.from_dlpack(view)
        assert tuple(tensor.shape) == shape
        if array.size:
            assert tensor.stride() == tuple(n // 4 for n in strides), "not normalised"
        np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("copy", [None, True, False])
def test_copies(copy):
    import torch

    with block_view(numbers()) as view:
        tensor = torch.from_dlpack(view, copy=copy)
        assert (tensor.data_ptr() == view.device_ptr) is (copy is not True)
        assert torch.from_dlpack(view, device="cpu").data_ptr() == view.device_ptr
        assert len(view.export_owner.ledger.live()) == (copy is not True)


def test_read_only_memory_and_its_copy():
    import torch

    with block_view(numbers(), readonly=True) as view:
        tensor = torch.from_dlpack(view)  # asks with a version, then ignores the flag
        np.testing.assert_array_equal(tensor.numpy(), numbers())
        np.testing.assert_array_equal(torch.from_dlpack(view, copy=True).numpy(), numbers())
        with pytest.raises(BufferError, match="read-only"):
            torch.utils.dlpack.from_dlpack(view.__dlpack__())


def test_old_and_new_capsules():
    import torch

    with block_view(numbers()) as view:
        for version in (None, (0, 8), (1, 0), (2, 0)):
            tensor = torch.utils.dlpack.from_dlpack(view.__dlpack__(max_version=version))
            assert tensor.data_ptr() == view.device_ptr
            del tensor
            assert view.export_owner.ledger.live() == ()


def test_a_capsule_is_taken_once():
    import torch

    with block_view(numbers()) as view:
        capsule = view.__dlpack__(max_version=(1, 0))
        tensor = torch.utils.dlpack.from_dlpack(capsule)
        with pytest.raises(RuntimeError):
            torch.utils.dlpack.from_dlpack(capsule)
        del tensor, capsule
        assert view.export_owner.ledger.live() == ()


def test_tensors_are_counted_until_the_last_one_is_gone():
    import torch

    with block_view(numbers()) as view:
        tensor = torch.from_dlpack(view)
        part = tensor[1:]
        del tensor
        gc.collect()
        assert len(view.export_owner.ledger.live()) == 1
        del part
        assert view.export_owner.ledger.live() == ()


def test_tensors_die_on_other_threads_and_in_cycles():
    import torch

    with block_view(numbers()) as view:
        tensors = [torch.from_dlpack(view) for _ in range(100)]
        threads = [threading.Thread(target=tensors[n::4].clear) for n in range(4)]
        del tensors
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del threads, thread
        cycle = [torch.from_dlpack(view)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert view.export_owner.ledger.live() == ()


def test_pickling_and_moving_a_tensor_needs_no_view():
    import torch

    with block_view(numbers()) as view:
        apart = torch.from_dlpack(view).clone()
    np.testing.assert_array_equal(apart.numpy(), numbers())


def test_a_refusal_comes_through():
    """PyTorch retries on TypeError with fewer keywords; our refusals must come through as they are."""
    import torch

    with block_view(numbers(), readonly=True) as view:
        view.export_owner.block.state = cuglue.BlockState.RETIRED
        with pytest.raises(ClosedError, match="an export"):
            torch.from_dlpack(view)
        view.export_owner.block.state = cuglue.BlockState.LIVE


def test_row_62_managed_and_pinned_memory_say_a_type_that_pytorch_takes():
    with block_view(numbers(), memory_type=MemoryType.PINNED) as view:
        assert view.torch().device.type == "cpu"
    with block_view(numbers(), memory_type=MemoryType.MANAGED) as view:
        assert view.__dlpack_device__() == (2, 0), "PyTorch refuses 13"
