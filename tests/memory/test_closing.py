"""Closing a resource gives back what it still holds, says what that was, and ends it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import cupy
import pytest
from memory_tools import contents, fill

import cuglue
from cuglue.core.device import device_state
from cuglue.driver.sim import SimDriver
from cuglue.errors import ClosedError, OutOfBounds


@pytest.mark.parametrize("make", [cuglue.DirectCudaResource, cuglue.AsyncCudaResource])
def test_B7_close_frees_what_is_live_and_names_it(make: type[cuglue.DirectCudaResource]) -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        resource = make()
        resource.allocate(64, tag="left behind")
        with pytest.warns(ResourceWarning, match="left behind"):
            resource.close()
        assert resource.closed
        assert driver.inventory()["bytes"] == 0
        resource.close()
        with pytest.raises(ClosedError):
            resource.allocate(64)


def test_B7_leaving_with_closes() -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        with cuglue.DirectCudaResource() as resource:
            resource.deallocate(resource.allocate(64))
        assert resource.closed


LAYOUTS: list[Any] = [cuglue.Sliced(1 << 20), cuglue.Exclusive(1 << 20), cuglue.Direct(), cuglue.Persistent()]
HOLDING: dict[str, Callable[[Any], Any]] = {
    "guard": cuglue.DebugGuardResource,
    "pool": cuglue.PoolResource,
    "guard over pool": lambda r: cuglue.DebugGuardResource(cuglue.PoolResource(r)),
    "pool over guard": lambda r: cuglue.PoolResource(cuglue.DebugGuardResource(r)),
    "guard over guard": lambda r: cuglue.DebugGuardResource(cuglue.DebugGuardResource(r)),
    "pool over pool": lambda r: cuglue.PoolResource(cuglue.PoolResource(r)),
    **{type(kind).__name__: lambda r, kind=kind: cuglue.PoolResource(r, layout=[kind]) for kind in LAYOUTS},
}


def settled(driver: SimDriver) -> int:
    """Bytes that the driver still has out, after all that is dead was given back."""
    for _ in range(2):  # of layers that are garbage, each gives back in a round of its own
        gc.collect()
        driver.device_synchronize(0)
        device_state(driver, 0).retire.drain(block=True)
    return driver.inventory()["bytes"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("layer", HOLDING)
@pytest.mark.parametrize("make", [cuglue.DirectCudaResource, cuglue.AsyncCudaResource])
def test_arrays_outlive_whatever_is_closed(make: Any, layer: str) -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        resource = HOLDING[layer](make())
        array = cupy.ndarray(1000, "u1", memptr=resource.malloc(1000))
        block = resource.allocate(64)
        resource.close()
        assert block.state is not cuglue.BlockState.LIVE
        fill(array.data, 7, None, 1000)
        assert (contents(array.data, None, 1000) == 7).all()
        resource.close()
        del array
        assert settled(driver) == 0
        assert driver.hazards == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("layer", HOLDING)
@pytest.mark.parametrize("make", [cuglue.DirectCudaResource, cuglue.AsyncCudaResource])
def test_a_layer_over_a_closed_resource_keeps_its_memory_until_it_lets_go(make: Any, layer: str) -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        below = make()
        resource = HOLDING[layer](below)
        block, other = resource.allocate(1000), resource.allocate(1000)
        array = cupy.ndarray(1000, "u1", memptr=resource.malloc(1000))
        with pytest.warns(ResourceWarning, match="held by layers over it"):
            below.close()
        for memory in block, other, array.data:
            fill(memory, 9, None, 1000)
            assert (contents(memory, None, 1000) == 9).all()
        resource.deallocate(block)
        with pytest.warns(ResourceWarning, match="closed with 1 blocks live"):
            resource.close()
        del array, memory
        assert settled(driver) == 0
        assert driver.hazards == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("layer", HOLDING)
def test_a_forgotten_layer_over_a_closed_resource_leaks_nothing(layer: str) -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        below = cuglue.AsyncCudaResource()
        resource = HOLDING[layer](below)
        resource.deallocate(resource.allocate(100))
        block = resource.allocate(100)
        below.close()
        del block, resource, below
        assert settled(driver) == 0


def test_a_guard_says_what_was_live_and_looks_at_it() -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        guard = cuglue.DebugGuardResource(cuglue.AsyncCudaResource())
        fine, broken = guard.allocate(64, tag="fine"), guard.allocate(64, tag="broken")
        stream = cuglue.as_stream(None)
        driver.fill_async(broken.ptr + 64, 1, 1, stream.handle)
        stream.submit()
        with pytest.warns(ResourceWarning, match="2 blocks live \\(tags: broken, fine"):
            with pytest.raises(OutOfBounds):
                guard.close()
        assert fine.state is broken.state is cuglue.BlockState.FREED
        assert settled(driver) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            guard.close()
        with pytest.raises(ClosedError):
            guard.allocate(1)


COUNTING: dict[str, Callable[[Any], Any]] = {
    "source": lambda r: r,
    "pool": cuglue.PoolResource,
    "guard": cuglue.DebugGuardResource,
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("first", ["below", "above"])
@pytest.mark.parametrize("holding", COUNTING)
@pytest.mark.parametrize("make", [cuglue.DirectCudaResource, cuglue.AsyncCudaResource])
def test_layers_count_what_closing_gives_back(make: Any, holding: str, first: str) -> None:
    with cuglue.use_driver(SimDriver()):
        below = COUNTING[holding](make())
        budget = cuglue.GlobalDeviceBudget(below, 1 << 20)
        tracked = cuglue.TrackingResource(budget)
        counted = cuglue.StatisticsResource(tracked)
        sink = cuglue.InMemorySink()
        resource = cuglue.LoggingResource(counted, sink)
        block = resource.allocate(1000)
        (below if first == "below" else resource).close()
        assert block.state is cuglue.BlockState.FREED
        assert budget.reserved_bytes == 0
        assert tracked.live() == []
        assert counted.statistics().current_bytes == 0
        assert [record.action.name for record in sink.snapshot()] == ["ALLOCATE", "DEALLOCATE"]
