"""PyTorch, JAX and Numba on CUDA memory: same address, right values, right order, and who is counted."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest
from block_views import block_view, numbers

import cuglue
from cuglue.driver.protocol import MemoryType
from cuglue.errors import CaptureError
from cuglue.layout import Layout
from cuglue.testing import Latch

pytestmark = [pytest.mark.gpu, pytest.mark.interop]


def hold(view):
    owner = view.export_owner
    latch = Latch(owner.stream)
    owner.block.finish(owner.stream, cuglue.Access.WRITE)
    return latch


# --- PyTorch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]
)
def test_torch_takes_every_type(code):
    import torch

    array = numbers(code)
    with block_view(array) as view:
        for tensor in (torch.from_dlpack(view), view.torch()):
            assert tensor.device == torch.device("cuda", 0)
            assert tensor.data_ptr() == view.device_ptr
            np.testing.assert_array_equal(tensor.cpu().numpy(), array)
        del tensor
        assert view.export_owner.ledger.live() == ()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_torch_takes_types_that_numpy_lacks(name):
    import torch

    array = numbers("u2" if name == "bfloat16" else "u1")
    with block_view(array) as view:
        tensor = view.view(name).torch()
        assert tensor.dtype == getattr(torch, name)
        assert tensor.data_ptr() == view.device_ptr
        np.testing.assert_array_equal(tensor.view(torch.uint8).cpu().numpy(), array.view("u1"))
        del tensor


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 4), (32, 4)), ((3, 4), (4, 12)), ((1, 4), (1000, 4)), ((), ()), ((0, 3), (12, 4))],
)
def test_torch_takes_layouts(shape, strides):
    import torch

    array = numbers(shape=shape)
    with block_view(array, layout=Layout(shape, strides, "f4")) as view:
        tensor = torch.from_dlpack(view)
        assert tensor.is_cuda
        assert tuple(tensor.shape) == shape
        if array.size:
            assert tensor.stride() == tuple(n // 4 for n in strides)
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
        del tensor


def test_torch_copies_and_moves():
    import torch

    with block_view(numbers(), readonly=True) as view:
        apart = torch.from_dlpack(view, copy=True)
        assert apart.data_ptr() != view.device_ptr
        on_host = torch.from_dlpack(view, device="cpu")
        assert on_host.device.type == "cpu"
        for tensor in (apart, on_host, torch.from_dlpack(view)):
            np.testing.assert_array_equal(tensor.cpu().numpy(), numbers())
        del tensor
        assert view.export_owner.ledger.live() == ()


def test_torch_as_tensor_takes_the_array_interface_and_holds_the_view():
    import sys

    import torch

    with block_view(numbers()) as view:
        view.export_owner.order_host()
        before = sys.getrefcount(view)
        tensor = torch.as_tensor(view, device="cuda")
        assert tensor.data_ptr() == view.device_ptr
        np.testing.assert_array_equal(tensor.cpu().numpy(), numbers())
        with_tensor = sys.getrefcount(view)
        del tensor
        assert with_tensor == before + 1
    with block_view(numbers(), readonly=True) as view:
        tensor = torch.as_tensor(view, device="cuda")  # no interface: it goes on to DLPack
        np.testing.assert_array_equal(tensor.cpu().numpy(), numbers())
        del tensor


@pytest.mark.parametrize("side", [False, True])
def test_torch_waits_on_its_current_stream(side):
    import contextlib

    import torch

    with block_view(numbers()) as view:
        stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
        stream.synchronize()
        with torch.cuda.stream(stream) if side else contextlib.nullcontext():
            with hold(view):
                tensor = torch.from_dlpack(view)
                assert not stream.query(), "its later work waits for the pending write"
            np.testing.assert_array_equal(tensor.cpu().numpy(), numbers())
        del tensor


def test_torch_captures_over_a_view():
    import torch

    with block_view(numbers()) as view:
        tensor = view.torch()
        tensor.add_(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.add_(1)
            view.__dlpack__(stream=-1, max_version=(1, 0))
        graph.replay()
        torch.cuda.synchronize()
        np.testing.assert_array_equal(view.numpy(), numbers() + 2)
        del tensor


def test_an_export_inside_a_capture_is_refused_and_the_capture_survives():
    import torch

    with block_view(numbers()) as view:
        tensor = view.torch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.add_(1)
            with pytest.raises(CaptureError, match="made before it"):
                torch.from_dlpack(view)
        graph.replay()
        torch.cuda.synchronize()
        np.testing.assert_array_equal(view.numpy(), numbers() + 1)
        del tensor


def test_torch_takes_managed_memory():
    import torch

    with block_view(numbers(), memory_type=MemoryType.MANAGED) as view:
        tensor = torch.from_dlpack(view)
        assert tensor.data_ptr() == view.device_ptr
        np.testing.assert_array_equal(tensor.cpu().numpy(), numbers())
        del tensor


def test_torch_frees_a_copy_on_its_own_terms():
    import torch

    with block_view(np.zeros(1 << 20, "u1")) as view:
        for _ in range(20):
            tensor = torch.from_dlpack(view, copy=True)
            tensor.add_(1)
            del tensor
        torch.cuda.synchronize()


# --- JAX ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["i1", "i2", "i4", "u1", "u2", "u4", "f2", "f4", "c8", "?"])
def test_jax_by_dlpack(code):
    import jax

    array = numbers(code)
    with block_view(array) as view:
        taken = jax.dlpack.from_dlpack(view)
        assert taken.unsafe_buffer_pointer() == view.device_ptr
        np.testing.assert_array_equal(np.asarray(taken), array)
        assert len(view.export_owner.ledger.live()) == 1
        del taken
        gc.collect()
        assert view.export_owner.ledger.live() == ()


def test_jax_waits_for_the_pending_write():
    import jax

    with block_view(numbers()) as view:
        with hold(view):
            taken = jax.dlpack.from_dlpack(view)
        np.testing.assert_array_equal(np.asarray(taken + 1), numbers() + 1)
        del taken
        gc.collect()


def test_jax_bfloat16():
    import jax
    import jax.numpy as jnp

    with block_view(numbers("u2")) as view:
        taken = jax.dlpack.from_dlpack(view.view("bfloat16"))
        assert taken.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(taken).view("u2"), numbers("u2"))
        del taken
        gc.collect()


# --- Numba ----------------------------------------------------------------------------------------------------


def numba_cuda():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy about Numba, at its import
        from numba import cuda
    return cuda


def test_numba_by_the_array_interface():
    cuda = numba_cuda()

    with block_view(numbers()) as view:
        view.export_owner.order_host()
        taken = cuda.as_cuda_array(view, sync=False)
        assert taken.__cuda_array_interface__["data"][0] == view.device_ptr
        np.testing.assert_array_equal(taken.copy_to_host(), numbers())
        del taken
        gc.collect()
        assert view.export_owner.cai_read


def test_numba_writes_through_the_array_interface():
    # A copy, not a kernel: numba-cuda 0.68 compiles none beside NumPy 2.5 (it still asks for numpy.row_stack).
    cuda = numba_cuda()
    with block_view(numbers()) as view:
        view.export_owner.order_host()
        taken = cuda.as_cuda_array(view)  # synchronises with the stream that the interface names
        taken.copy_to_device(numbers() * 2)
        cuda.synchronize()
        np.testing.assert_array_equal(view.numpy(), numbers() * 2)
        del taken
