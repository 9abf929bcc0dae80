"""Every resource, every decorator and every order of stacking them passes one suite (contracts B28)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from memory_tools import LAYERS

import cuglue
from cuglue import (
    AsyncCudaResource,
    DeviceMemoryResource,
    DirectCudaResource,
    ManagedResource,
    PinnedHostResource,
    testing,
)


class OnBoth(testing.ResourceSuite):
    """The suite on the simulated device, and marked ``gpu`` on a real one."""

    @pytest.fixture(autouse=True)
    def _on(self, driver: Any) -> None:
        self.driver = driver


class TestDirect(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return DirectCudaResource()


class TestDirectSync(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return DirectCudaResource(mode="sync")


class TestAsync(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return AsyncCudaResource()


class TestPinned(OnBoth):
    device_memory = False

    def make(self) -> DeviceMemoryResource:
        return PinnedHostResource()


class TestManaged(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return ManagedResource()


class Stacked(OnBoth):
    layers: tuple[str, ...] = ()

    def make(self) -> DeviceMemoryResource:
        resource: DeviceMemoryResource = AsyncCudaResource()
        for layer in self.layers:
            resource = LAYERS[layer](resource)
        return resource


def stack(*layers: str) -> type:
    name = "Test" + "Over".join(layer.title() for layer in reversed(layers))
    return type(name, (Stacked,), {"layers": layers, "__module__": __name__})


for _one in LAYERS:
    _made = stack(_one)
    globals()[_made.__name__] = _made
for _pair in itertools.permutations(LAYERS, 2):
    _made = stack(*_pair)
    globals()[_made.__name__] = _made


@pytest.mark.parametrize("lowest", LAYERS)
def test_B28_all_six_in_every_order(sim: Any, lowest: str) -> None:
    """A short walk through the contract for each of the 720 orders; the suite proper runs on the pairs."""
    for rest in itertools.permutations(set(LAYERS) - {lowest}):
        walk(sim, (lowest, *rest))


def walk(sim: Any, order: tuple[str, ...]) -> None:
    resource: DeviceMemoryResource = AsyncCudaResource()
    for layer in order:
        resource = LAYERS[layer](resource)
    assert resource.supports_block_use_tracking()
    snapshot = resource.budget_snapshot()
    assert snapshot is not None
    assert snapshot.limit == 64 << 20
    stream, other = (cuglue.as_stream(sim.Stream()) for _ in range(2))
    block = resource.allocate(1000, stream, "walk")
    assert (block.nbytes, block.tag, block.resource) == (1000, "walk", resource)
    resource.prepare_block_use(block.id, other, cuglue.Access.READ)
    resource.finish_block_use(block.id, other, cuglue.Access.READ)
    with pytest.raises(cuglue.errors.OutOfBudget):
        resource.allocate(100 << 20, stream)
    pointer = resource.malloc(500)
    assert pointer.mem.size == 500
    resource.deallocate(block)
    with pytest.raises(cuglue.errors.UseAfterFree):
        resource.deallocate(block)
    del pointer
    block.alloc_stream.state.retire.run_forgotten()
    resource.reap_pending()
    assert resource.bytes_outstanding == 0
    after = resource.budget_snapshot()
    assert after is not None
    assert after.reserved == 0
    resource.close()


@pytest.mark.parametrize("layer", LAYERS)
def test_B28_over_a_resource_that_does_not_track(driver: Any, layer: str) -> None:
    resource = LAYERS[layer](DirectCudaResource())
    assert not resource.supports_block_use_tracking()
    stream = cuglue.as_stream(0)
    block = resource.allocate(64, stream)
    inner = DirectCudaResource()
    below = inner.allocate(64, stream)
    with pytest.raises(cuglue.errors.StreamMisuse) as direct:
        inner.record_block_use(below, stream)
    for call in (
        lambda: resource.record_block_use(block, stream),
        lambda: resource.prepare_block_use(block.id, stream, cuglue.Access.READ),
        lambda: resource.finish_block_use(block.id, stream, cuglue.Access.READ),
        lambda: resource.cancel_block_use(block.id, stream, cuglue.Access.READ),
    ):
        with pytest.raises(cuglue.errors.StreamMisuse) as caught:
            call()
        assert str(caught.value) == str(direct.value)
    resource.deallocate(block)
    inner.deallocate(below)
    resource.close()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_decorator_goes_over_a_resource(layer: str) -> None:
    with pytest.raises(cuglue.errors.UsageError, match="DeviceMemoryResource"):
        LAYERS[layer](object())


@pytest.mark.parametrize("layer", LAYERS)
def test_a_decorator_keeps_and_shows_what_is_below(driver: Any, layer: str) -> None:
    below = AsyncCudaResource()
    resource = LAYERS[layer](below)
    assert resource.upstream is below
    assert (resource.device, resource.device_ordinal, resource.driver) == (0, 0, driver)
    block = resource.allocate(64)
    assert resource.live_blocks() == [block]
    assert resource.block_at(block.ptr + 63) is block
    resource.deallocate(block)
    resource.close()
    assert below.closed
