"""Pinned and managed memory, and one allocator for several devices."""

from __future__ import annotations

import threading
from typing import Any

import cupy
import numpy as np
import pytest
from memory_tools import new_stream

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    ManagedResource,
    PerDevice,
    PinnedHostResource,
    TrackingResource,
    testing,
)
from cuglue.driver.protocol import CaptureMode, CopyKind, MemoryType
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    BusyError,
    CaptureError,
    DriverError,
    SeveralErrors,
    UnsupportedError,
    UsageError,
    UseAfterFree,
)
from cuglue.memory import host


def test_pinned_memory_is_pinned(driver: Any) -> None:
    resource = PinnedHostResource()
    block = resource.allocate(1000)
    assert driver.pointer_info(block.ptr).type is MemoryType.PINNED
    view = np.asarray(resource.view(block))
    view[:] = 7
    assert (np.asarray(resource.view(block)) == 7).all()
    assert view.nbytes == 1000
    del view
    resource.deallocate(block)
    with pytest.raises(UseAfterFree):
        resource.view(block)
    resource.reap_pending()


def test_report_M70_pinned_memory_is_not_rounded_up(driver: Any) -> None:
    resource = PinnedHostResource()
    with testing.trace(only={"host_alloc"}) as calls:
        block = resource.allocate(10 * 1000 * 1000)
    assert [call.args[0] for call in calls] == [10_000_000]
    assert resource.bytes_outstanding == 10_000_000
    resource.deallocate(block)
    resource.reap_pending()


def test_pinned_memory_waits_for_its_uses(driver: Any) -> None:
    """A copy in flight reads it: it must not be freed under the copy."""
    resource = PinnedHostResource()
    stream = cuglue.as_stream(new_stream())
    device = AsyncCudaResource()
    target = device.allocate(4096, stream)
    block = resource.allocate(4096)
    np.asarray(resource.view(block))[:] = 3
    with testing.Latch(stream) as latch:
        driver.copy_async(target.ptr, block.ptr, 4096, CopyKind.H2D, stream.handle)
        resource.record_block_use(block, stream)
        resource.deallocate(block)
        assert block.state is BlockState.RETIRED
        with testing.faults.counts() as counted:
            resource.reap_pending(block=False)
        assert counted["host_free"] == 0
        assert resource.bytes_outstanding == 4096
        assert sum(resource.pending_per_stream().values()) == 4096
        latch.release()
    resource.reap_pending()
    assert block.state is BlockState.FREED
    assert resource.bytes_outstanding == 0
    device.deallocate(target)


def test_pinned_memory_waits_for_its_own_stream(driver: Any) -> None:
    """CuPy tells nobody what it queues: whatever is on the home stream counts."""
    resource = PinnedHostResource()
    stream = cuglue.as_stream(new_stream())
    block = resource.allocate(64, stream)
    with testing.Latch(stream):
        resource.deallocate(block)
        resource.reap_pending(block=False)
        assert block.state is BlockState.RETIRED
    resource.reap_pending()
    assert block.state is BlockState.FREED


def test_report_M71_a_quick_loop_is_bounded(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_MOST_PENDING", 10_000)
    resource = PinnedHostResource()
    stream = cuglue.as_stream(new_stream())
    most = 0
    for _ in range(50):
        block = resource.allocate(4000, stream)
        resource.record_block_use(block, stream)
        resource.deallocate(block)
        most = max(most, resource.bytes_outstanding)
    assert most <= 10_000 + 2 * 4000
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


def test_pinned_memory_in_use_does_not_hold_up_an_allocation_for_ever(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a stream captures, and while bytes are lent, nothing can be freed however long one waits."""
    monkeypatch.setattr(host, "_MOST_PENDING", 1000)
    resource = PinnedHostResource()
    blocks = [resource.allocate(600) for _ in range(3)]
    lent = resource.view(blocks[0])
    for block in blocks:
        resource.deallocate(block)
    stream = cuglue.as_stream(sim.Stream())
    sim.capture_begin(stream.handle, CaptureMode.RELAXED)
    with pytest.raises(CaptureError):
        resource.allocate(600)
    sim.graph_destroy(sim.capture_end(stream.handle))
    block = resource.allocate(2000)
    assert [b.state for b in blocks] == [BlockState.RETIRED, BlockState.FREED, BlockState.FREED]
    resource.deallocate(block)
    del lent
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


def test_pinned_memory_that_is_done_with_goes_at_the_next_allocation(driver: Any) -> None:
    """Nobody has to reap."""
    resource = PinnedHostResource()
    first = resource.allocate(600)
    resource.deallocate(first)
    cuglue.as_stream(0).synchronize()
    resource.deallocate(resource.allocate(64))
    assert first.state is BlockState.FREED
    resource.reap_pending()


def test_pinned_memory_that_is_waited_for_is_freed_before_more_is_taken(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_MOST_PENDING", 1000)
    resource = PinnedHostResource()
    stream = cuglue.as_stream(new_stream())
    with testing.Latch(stream) as latch:
        blocks = [resource.allocate(900, stream) for _ in range(2)]
        for block in blocks:
            resource.deallocate(block)
        threading.Timer(0.1, latch.release).start()
        last = resource.allocate(64)
        assert blocks[0].state is BlockState.FREED
    resource.deallocate(last)
    resource.reap_pending()


def test_pinned_memory_is_not_freed_under_a_view(driver: Any) -> None:
    """Nor under an array over the view: reading it would end the process."""
    resource = PinnedHostResource()
    block = resource.allocate(64)
    view = resource.view(block)
    view[:] = bytes(range(64))
    array = np.frombuffer(view, np.uint8)[10:]
    resource.deallocate(block)
    del view
    resource.reap_pending()
    assert (block.state, resource.bytes_outstanding) == (BlockState.RETIRED, 64)
    assert array.tolist() == list(range(10, 64))
    with pytest.raises(UseAfterFree):
        resource.view(block)
    del array
    resource.reap_pending()
    assert (block.state, resource.bytes_outstanding) == (BlockState.FREED, 0)
    assert resource._lent == {}


def test_managed_memory_is_not_given_back_under_a_view(driver: Any) -> None:
    """It would be free at once."""
    resource = ManagedResource()
    block = resource.allocate(64)
    view = resource.view(block)
    view[:] = b"x" * 64
    with pytest.raises(BusyError, match="view"):
        resource.deallocate(block)
    assert (block.state, bytes(view[:2])) == (BlockState.LIVE, b"xx")
    del view
    resource.deallocate(block)
    with pytest.raises(UseAfterFree):
        resource.deallocate(block)
    assert resource.bytes_outstanding == 0


def test_pinned_failures(driver: Any) -> None:
    resource = PinnedHostResource()
    streams = [cuglue.as_stream(new_stream()) for _ in range(2)]
    blocks = [resource.allocate(64, stream) for stream in streams]
    for block in blocks:
        resource.deallocate(block)
    with testing.faults.fail("stream_synchronize"), pytest.raises(DriverError):
        resource.reap_pending()
    with (
        testing.faults.fail("stream_synchronize", persistent=True),
        testing.faults.fail("host_free", persistent=True),
    ):
        resource.deallocate(resource.allocate(16, streams[0]))
        with pytest.raises((DriverError, SeveralErrors)):
            resource.reap_pending()
    resource.reap_pending()
    assert resource.bytes_outstanding == 0
    with pytest.raises(UseAfterFree):
        resource.deallocate(blocks[0])
    with testing.faults.fail("host_alloc", persistent=True), pytest.raises(MemoryError) as caught:
        resource.allocate(64)
    report: Any = caught.value.report  # type: ignore[attr-defined]
    assert not any("driver's pool" in step for step in report.tried)


def test_pinned_memory_tracks_uses(driver: Any) -> None:
    resource = PinnedHostResource()
    assert resource.supports_block_use_tracking()
    block = resource.allocate(64)
    stream = new_stream()
    resource.prepare_block_use(block.id, stream, Access.WRITE)
    resource.finish_block_use(block.id, stream, Access.WRITE)
    resource.deallocate(block)
    resource.reap_pending()


def test_report_M76_managed_memory_is_an_explicit_resource(driver: Any) -> None:
    resource = ManagedResource()
    block = resource.allocate(4096, tag="shared")
    assert driver.pointer_info(block.ptr).type is MemoryType.MANAGED
    np.asarray(resource.view(block))[:] = 5
    stream = cuglue.as_stream(new_stream())
    driver.fill_async(block.ptr, 9, 2048, stream.handle)
    stream.submit()
    stream.synchronize()
    seen = np.array(resource.view(block))
    assert (seen[:2048] == 9).all()
    assert (seen[2048:] == 5).all()
    resource.deallocate(block)
    assert block.state is BlockState.FREED
    assert resource.bytes_outstanding == 0
    assert not resource.supports_block_use_tracking()


def test_report_M72_managed_memory_is_refused_where_there_is_none() -> None:
    with cuglue.use_driver(SimDriver(disable=["managed_memory"])):
        with pytest.raises(UnsupportedError) as caught:
            ManagedResource()
        assert caught.value.reason == "managed_memory"


# --- several devices --------------------------------------------------------------------------------------------


def test_per_device_asks_which_device_is_current() -> None:
    driver = SimDriver(devices=3)
    with cuglue.use_driver(driver):
        resources = {0: AsyncCudaResource(0), 1: AsyncCudaResource(1)}
        both = PerDevice(resources)
        assert both.malloc is both.malloc
        with both.as_cupy_allocator() as entered:
            assert entered is both
            a = cupy.cuda.alloc(100)
            with driver.Stream(1):
                b = cupy.cuda.alloc(200)
                empty = cupy.cuda.alloc(0)
            with driver.Stream(2), pytest.raises(UsageError, match="device 2"):
                cupy.cuda.alloc(300)
        assert (a.device_id, b.device_id, empty.device_id) == (0, 1, 1)
        assert (resources[0].live_bytes, resources[1].live_bytes) == (100, 200)
        assert both[1] is resources[1]
        assert "PerDevice" in repr(both)
        del a, b, empty
        for resource in resources.values():
            resource._state.retire.run_forgotten()
        both.close()
        assert all(resource.closed for resource in resources.values())


def test_per_device_needs_no_gpu_on_the_simulated_device(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu() -> int:
        raise cupy.cuda.runtime.CUDARuntimeError(35)

    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", no_gpu)
    both = PerDevice({0: AsyncCudaResource(0)})
    pointer = both.malloc(100)
    assert both[0].bytes_outstanding == 100
    del pointer
    both.close()
    assert PerDevice({}).resources == {}
    with pytest.raises(UsageError, match="device 0"):
        PerDevice({}).malloc(100)


def test_per_device_takes_each_resource_for_its_own_device(driver: Any) -> None:
    with pytest.raises(UsageError, match="device 1"):
        PerDevice({1: AsyncCudaResource(0)})
    with pytest.raises(UsageError, match="device 0"):
        PerDevice({0: object()})  # type: ignore[dict-item]


def test_closing_all_devices_although_one_fails() -> None:
    with cuglue.use_driver(SimDriver(devices=2)):
        resources = PerDevice({0: AsyncCudaResource(0), 1: AsyncCudaResource(1)})
        blocks = [resources[device].allocate(64) for device in (0, 1)]
        with (
            testing.faults.fail("free_async", on=1),
            pytest.raises(DriverError),
            pytest.warns(ResourceWarning),
        ):
            resources.close()
        assert [resources[device].bytes_outstanding for device in (0, 1)] == [64, 0]
        with pytest.warns(ResourceWarning, match="1 blocks live"):
            resources.close()
        assert [block.state for block in blocks] == [BlockState.FREED] * 2


def test_report_M39_closing_one_device_leaves_the_other(driver: Any) -> None:
    two = SimDriver(devices=2)
    with cuglue.use_driver(two):
        a, b = AsyncCudaResource(0), AsyncCudaResource(1)
        block = b.allocate(64, two.Stream(1))
        a.close()
        assert block.state is BlockState.LIVE
        b.deallocate(block)
        b.close()


@pytest.mark.parametrize("make", [PinnedHostResource, ManagedResource])
@pytest.mark.parametrize("junk", [None, 5, "block"])
def test_a_view_of_what_is_no_block(driver: Any, make: Any, junk: Any) -> None:
    with pytest.raises(UsageError, match="expected a block"):
        make().view(junk)
    with pytest.raises(UsageError, match="expected a block"):
        TrackingResource(make()).annotate(junk, "note")
