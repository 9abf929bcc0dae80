"""PyTorch over memory of a resource: its tensors are followed by address, its own allocator is left alone (P15)."""

from __future__ import annotations

import gc
import threading
import time

import cupy
import pytest

import cuglue
from cuglue import Access, AsyncCudaResource, BlockState, testing
from cuglue.errors import UseAfterFree
from cuglue.memory.lookup import block_behind

pytestmark = [pytest.mark.gpu, pytest.mark.interop]


def test_report_M57_P15_what_pytorch_says_of_its_own_memory_goes_on_working() -> None:
    """A pluggable allocator would take all this away, and be called under PyTorch's lock."""
    import torch

    resource = AsyncCudaResource()
    with resource.as_cupy_allocator():
        array = cupy.ones(1000, "f4")
        before = torch.cuda.memory_allocated()
        tensor = torch.from_dlpack(array)
        assert torch.cuda.memory_allocated() == before, "the tensor's memory is the resource's"
        own = torch.ones(1 << 20, device="cuda")
        assert torch.cuda.memory_allocated() == before + (4 << 20)
        assert torch.cuda.get_allocator_backend() == "native"
        assert torch.cuda.memory_stats()["num_ooms"] >= 0
        assert torch.cuda.memory_summary()
        assert isinstance(torch.cuda.memory_snapshot(), list)
        assert float((own[:1000] + tensor).sum()) == 2000
    assert resource.bytes_outstanding >= 4000
    del array, tensor, own


def test_P15_a_tensor_keeps_its_block_and_is_found_by_its_address() -> None:
    import torch

    resource = AsyncCudaResource()
    with resource.as_cupy_allocator():
        array = cupy.zeros(1000, "f4")
    tensor = torch.from_dlpack(array)
    block = array.data.mem
    assert block_behind(tensor[10:]) is block_behind(array)
    del array, block
    gc.collect()
    cuglue.as_stream(0).state.retire.drain()
    assert resource.live_bytes == 4000
    thread = threading.Thread(target=lambda held: held.clear(), args=([tensor],))
    address = tensor.data_ptr()
    del tensor
    thread.start()
    thread.join(20)
    gc.collect()
    cuglue.as_stream(0).state.retire.drain()
    assert resource.live_bytes == 0
    assert resource.block_at(address) is None


def test_P15_a_use_of_a_tensor_is_waited_for_by_the_free() -> None:
    import torch

    resource = AsyncCudaResource()
    home, side = cupy.cuda.Stream(non_blocking=True), torch.cuda.Stream()
    with resource.as_cupy_allocator(), home:
        array = cupy.ones(1 << 18, "u1")
    tensor = torch.from_dlpack(array)
    seen = torch.zeros(1 << 18, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(side):
        seen.copy_(tensor)  # loads its kernel, which waits for whatever runs
    with resource.as_cupy_allocator(), home:
        cupy.full(1 << 18, 2, "u1")
    seen.zero_()
    torch.cuda.synchronize()
    home.synchronize()
    with testing.Latch(side.cuda_stream) as latch:
        with torch.cuda.stream(side):
            seen.copy_(tensor)
        cuglue.use(tensor, side, Access.READ)
        del tensor, array
        with resource.as_cupy_allocator(), home:
            again = cupy.full(1 << 18, 2, "u1")
        time.sleep(0.05)
        early = home.done
        latch.release()
    torch.cuda.synchronize()
    assert not early, "the free did not wait for PyTorch's stream"
    assert int(seen.sum()) == 1 << 18
    del again


def test_P15_a_tensor_of_a_block_that_was_given_back_is_nobodys() -> None:
    import torch

    resource = AsyncCudaResource()
    with resource.as_cupy_allocator():
        array = cupy.zeros(1000, "f4")
    tensor = torch.from_dlpack(array)
    block = block_behind(array)
    assert block is not None
    resource.deallocate(block)  # type: ignore[arg-type]
    assert block.state is not BlockState.LIVE
    with pytest.raises((UseAfterFree, cuglue.errors.StreamMisuse)):
        cuglue.use(tensor, 0)
    del tensor, array
