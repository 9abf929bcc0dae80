"""Memory of arrays comes back whatever layers lie over whatever source, also after all of them were closed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from memory_tools import LAYERS

import cuglue
from cuglue import (
    AsyncCudaResource,
    DebugGuardResource,
    DirectCudaResource,
    ExpandableCudaResource,
    ManagedResource,
    PinnedHostResource,
    PoolResource,
    TrackingResource,
)
from cuglue.core.device import device_state
from cuglue.driver.sim import SimDriver
from cuglue.memory.layered import LayeredResource

TOPS: dict[str, Any] = {"nothing": lambda upstream: upstream, **LAYERS, "pool": PoolResource}
SOURCES: dict[str, Any] = {
    "direct": DirectCudaResource,
    "sync": lambda: DirectCudaResource(mode="sync"),
    "async": AsyncCudaResource,
    "expandable": ExpandableCudaResource,
    "managed": ManagedResource,
    "pinned": PinnedHostResource,
    "pool": lambda: PoolResource(AsyncCudaResource()),
    "pool of one page": lambda: PoolResource(ExpandableCudaResource()),
    "pool with a layout": lambda: PoolResource(AsyncCudaResource(), layout=[cuglue.Sliced(1 << 20)]),
    "pool over layers": lambda: PoolResource(TrackingResource(DebugGuardResource(AsyncCudaResource()))),
}
#: Bytes. Of little memory a pool gets no page of the size that it asks for first.
DEVICES = {"much memory": 64 << 20, "little memory": 1 << 20}
STACKS = [
    (top, source, device)
    for top in TOPS
    for source in SOURCES
    for device in DEVICES
    if device == "much memory"
    or source not in ("expandable", "pool of one page")  # these take 2 MiB at least
]


@pytest.fixture(params=STACKS, ids=" on ".join)
def stack(request: pytest.FixtureRequest) -> Iterator[tuple[LayeredResource, SimDriver]]:
    top, source, device = request.param
    driver = SimDriver(memory_bytes=DEVICES[device])
    with cuglue.use_driver(driver):
        yield TOPS[top](SOURCES[source]()), driver
        assert driver.hazards == []


@pytest.mark.parametrize("asked", [False, True])
def test_a_reap_finds_the_memory_of_dead_arrays(
    stack: tuple[LayeredResource, SimDriver], asked: bool
) -> None:
    resource, driver = stack
    array = resource.malloc(200)
    if asked:
        assert resource.block_at(array.ptr) is not None
    del array
    resource.reap_pending()
    assert resource.bytes_outstanding == 0
    assert resource.live_blocks() == []
    resource.close()
    assert driver.inventory()["bytes"] == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("found_by", ["reap", "drain", "another resource"])
def test_the_memory_of_arrays_that_outlive_everything(
    stack: tuple[LayeredResource, SimDriver], asked: bool, found_by: str
) -> None:
    resource, driver = stack
    array = resource.malloc(200)
    if asked:
        assert resource.block_at(array.ptr) is not None
    resource.close()
    assert resource.bytes_outstanding >= 200
    del array
    if found_by == "reap":
        resource.reap_pending()
    elif found_by == "drain":
        device_state(driver, 0).retire.drain(block=True)
    else:
        with AsyncCudaResource() as other:
            del_me = other.malloc(1)
            del del_me
    if found_by != "reap":  # what is waited for
        resource.reap_pending()
    assert resource.bytes_outstanding == 0
    assert driver.inventory()["bytes"] == 0
