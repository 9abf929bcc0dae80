"""Memory of arrays through the CUDA driver's shortcuts, over a runtime without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import Script, install

import cuglue
from cuglue import AsyncCudaResource, StatisticsResource, testing
from cuglue.driver.protocol import Capabilities, MemoryType
from cuglue.errors import CaptureError, DriverError, OutOfMemory

PAIR = ["freeAsync", "mallocAsync"]


@pytest.fixture(params=[0, 0x5550_0000_0000], ids=["the default stream", "a stream of its own"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The driver, with a current stream that is no device's, and the script of its runtime."""
    driver, script, _ = install(monkeypatch)
    stream = SimpleNamespace(ptr=request.param, device_id=0)
    capabilities = Capabilities(MemoryType.DEVICE, async_memory=True)
    monkeypatch.setattr(type(driver), "stream_current", lambda self, device: stream)
    monkeypatch.setattr(type(driver), "capabilities", lambda self, device: capabilities)
    driver.shortcuts.current = lambda device: stream
    addresses = iter(range(0x7000_0000_0000, 0x7001_0000_0000, 512))
    script.answers.update(
        mallocAsync=lambda: next(addresses), streamIsCapturing=False, memGetInfo=lambda: (1, 2)
    )
    with cuglue.use_driver(driver):
        yield driver, script


@pytest.mark.parametrize("layer", [lambda below: below, StatisticsResource])
def test_a_pair_is_two_calls(cuda: tuple[Any, Script], layer: Any) -> None:
    driver, script = cuda
    resource = layer(AsyncCudaResource())
    resource.malloc(64)
    pointer = resource.malloc(64)
    script.calls.clear()
    del pointer
    pointer = resource.malloc(100)
    assert script.names() == PAIR
    assert script.only("mallocAsync")[:2] == (100, driver.shortcuts.current(0).ptr)
    script.calls.clear()
    with testing.faults.counts(driver=driver) as counted:
        del pointer
        again = resource.malloc(64)
    assert dict(counted) == {"stream_current": 1, "free_async": 1, "malloc_async": 1}, "each call is seen"
    assert script.names() == PAIR
    assert again.ptr == again.mem.ptr >= 0x7000_0000_0000


@pytest.mark.parametrize("layer", [lambda below: below, StatisticsResource])
def test_failures_are_told_in_our_words(
    cuda: tuple[Any, Script], layer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver, script = cuda
    source = AsyncCudaResource()
    resource = layer(source)
    resource.malloc(64)
    pointer = resource.malloc(64)
    error = driver.shortcuts.error
    script.answers["freeAsync"] = error(400)
    del pointer
    kept = resource.malloc(10)
    assert source.live_bytes == 74
    assert "cudaFreeAsync returned cudaErrorInvalidResourceHandle (400)" in caplog.text
    good = script.answers["mallocAsync"]
    script.answers["mallocAsync"] = error(999)
    with pytest.raises(DriverError, match=r"cudaMallocAsync returned cudaErrorUnknown \(999\)"):
        resource.malloc(10)
    script.answers.update(mallocAsync=error(2), freeAsync=None)
    with pytest.raises(OutOfMemory) as caught:
        resource.malloc(10)
    assert (caught.value.requested, caught.value.in_use >= 10) == (10, True)
    script.answers["mallocAsync"] = good
    del kept
    source._state.retire.drain()
    assert source.live_bytes == 0


@pytest.mark.parametrize("layer", [lambda below: below, StatisticsResource])
def test_what_a_capture_refuses_waits_for_its_end(
    cuda: tuple[Any, Script], layer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver calls a free of memory from outside an invalid value: only then is it asked why."""
    driver, script = cuda
    if not driver.shortcuts.current(0).ptr:
        return  # a default stream captures nothing
    source = AsyncCudaResource()
    resource = layer(source)
    resource.malloc(64)
    pointer = resource.malloc(64)
    script.answers.update(freeAsync=driver.shortcuts.error(1), streamIsCapturing=True)
    script.calls.clear()
    del pointer
    with pytest.raises(CaptureError, match="graph_memory"):
        resource.malloc(10)
    assert "mallocAsync" not in script.names()
    assert (source.live_bytes, len(source._state.retire.deferred), caplog.text) == (64, 1, "")
    script.answers.update(freeAsync=None, streamIsCapturing=False)
    source._state.retire.run_forgotten()
    assert source.live_bytes == 0
