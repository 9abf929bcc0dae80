"""What people trip over, memory half: the rows that no other file of this folder has, by number."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import cupy
import numpy as np
import pytest
from memory_tools import contents, fill, make_current, new_stream

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    DebugGuardResource,
    DirectCudaResource,
    FailureCallbackResource,
    testing,
)
from cuglue.driver.protocol import CaptureMode
from cuglue.driver.sim import HazardError, SimDriver
from cuglue.errors import CaptureError
from cuglue.exchange import ArrayView, BlockOwner
from cuglue.layout import Layout


def test_report_M03_one_call_no_polling(driver: Any) -> None:
    """Keeping a buffer for a consumer's stream: one call, a wait in the queue, nobody asks whether it is done."""
    resource = AsyncCudaResource()
    home, consumer = new_stream(), cuglue.as_stream(new_stream())
    with make_current(home):
        pointer = resource.malloc(4096)
        with testing.faults.counts() as counted:
            cuglue.use(pointer, consumer, Access.READ)
            del pointer
            other = resource.malloc(4096)
    assert not {"event_query", "stream_query", "event_synchronize", "stream_synchronize"} & set(counted)
    assert counted["stream_wait_event"] == 2, "the consumer for the data, the free for the consumer"
    del other


@pytest.mark.parametrize("ahead", [1, 50])
def test_report_M04_M05_the_peak_does_not_depend_on_the_hosts_lead(ahead: int) -> None:
    """Loop: allocate, use on a second stream, drop. However far the host runs ahead, one block is enough."""
    driver = SimDriver()
    with cuglue.use_driver(driver):
        resource = AsyncCudaResource()
        home, side = driver.Stream(), cuglue.as_stream(driver.Stream())
        addresses = set()
        with driver.current_stream(home), testing.Latch(side):
            for _ in range(ahead):
                pointer = resource.malloc(1 << 16)
                addresses.add(pointer.ptr)
                cuglue.use(pointer, side, Access.READ)
                del pointer
        assert len(addresses) == 1
        side.state.retire.drain()
        resource.reap_pending()
        assert driver.hazards == []


def test_report_M15_M16_a_side_stream_of_a_capture_is_in_it_too(sim: Any) -> None:
    resource = AsyncCudaResource()
    home, side = sim.Stream(), sim.Stream()
    event = sim.event_create(0)
    sim.capture_begin(home.ptr, CaptureMode.RELAXED)
    sim.event_record(event, home.ptr)
    sim.stream_wait_event(side.ptr, event)
    for stream in (home, side):
        with pytest.raises(CaptureError):
            resource.allocate(64, stream)
        with sim.current_stream(stream), pytest.raises(CaptureError):
            resource.malloc(64)
    sim.event_record(event, side.ptr)
    sim.stream_wait_event(home.ptr, event)
    graph = sim.capture_end(home.ptr)
    assert sim.graph_memory_nodes(graph) == 0
    sim.graph_destroy(graph)
    sim.event_destroy(event)
    assert resource.bytes_outstanding == 0


def test_report_M33_M37_an_allocator_made_in_a_function_lives_on(driver: Any) -> None:
    """CuPy holds the function; that keeps everything it needs."""
    former = cupy.cuda.get_allocator()

    def install() -> weakref.ref[Any]:
        resource = AsyncCudaResource()
        cupy.cuda.set_allocator(resource.malloc)
        return weakref.ref(resource)

    resource = install()
    try:
        gc.collect()
        array = cupy.ndarray(100, "u1")
        assert resource() is not None
    finally:
        cupy.cuda.set_allocator(former)
    gc.collect()
    assert resource() is not None, "the array keeps its resource"
    retire = array.data.mem.stream.state.retire
    del array
    retire.drain()
    gc.collect()
    retire.drain()
    assert resource() is None


def test_report_M34_M35_swapped_late_and_frees_arrive(driver: Any) -> None:
    """An allocator may be swapped at any time, and what it gave comes back to it."""
    resources = [AsyncCudaResource(), AsyncCudaResource()]
    arrays = []
    former = cupy.cuda.get_allocator()
    try:
        for resource in resources * 3:
            cupy.cuda.set_allocator(resource.malloc)
            arrays.append(cupy.ndarray(100, "u1"))
    finally:
        cupy.cuda.set_allocator(former)
    with testing.trace(only={"free_async"}) as calls:
        arrays.clear()
        resources[0]._state.retire.run_forgotten()
    assert len(calls) == 6
    assert [resource.live_bytes for resource in resources] == [0, 0]


@pytest.mark.alone
def test_report_M52_M75_closing_gives_everything_back(driver: Any) -> None:
    before = driver.memory_info(0).free
    for _ in range(3):
        resource = DirectCudaResource(mode="sync")
        blocks = [resource.allocate(1 << 20) for _ in range(16)]
        assert driver.memory_info(0).free <= before - (15 << 20)
        for block in blocks:
            resource.deallocate(block)
        resource.close()
    assert driver.memory_info(0).free >= before - (2 << 20)


def test_report_M65_a_use_that_nobody_told_of_is_found_with_both_lines() -> None:
    """The simulated device remembers beyond the free, so that reuse hides nothing."""
    driver = SimDriver()
    with cuglue.use_driver(driver):
        resource = AsyncCudaResource()
        home, other = cuglue.as_stream(driver.Stream()), cuglue.as_stream(driver.Stream())
        block = resource.allocate(4096, home)
        other.wait_for(home, block.write_seq)
        fill(block, 1, other)
        resource.deallocate(block)
        fill(resource.allocate(4096, home), 2, home)
        with pytest.raises(HazardError) as caught:
            home.synchronize()
        first = caught.value.hazards[0]
        assert "memory_tools.py" in str(first.first.site)
        assert "test_reports.py" in str(first.second.site)
        for left in resource.live_blocks():
            resource.deallocate(left)  # type: ignore[arg-type]


def test_report_M66_no_false_alarm_over_a_large_copy(driver: Any) -> None:
    guard = DebugGuardResource(AsyncCudaResource())
    stream = new_stream()
    block = guard.allocate((20 << 20) + 3, stream)
    fill(block, 5, stream)
    assert (contents(block, stream) == 5).all()
    guard.deallocate(block)
    guard.reap_pending()
    assert guard.reports == []


def test_report_M73_another_pool_can_be_asked_to_give_memory_back() -> None:
    """A callback trims what somebody else caches, and the request is tried again."""
    driver = SimDriver(memory_bytes=1 << 20)
    with cuglue.use_driver(driver):
        cached = [driver.malloc(700_000, 0)]

        def trim(failure: cuglue.AllocationFailure) -> bool:
            if not cached:
                return False
            driver.free(cached.pop(), 0)
            return True

        resource = FailureCallbackResource(AsyncCudaResource(), trim)
        block = resource.allocate(800_000, driver.Stream())
        assert cached == []
        resource.deallocate(block)
        resource.reap_pending()


def test_report_M74_a_view_of_an_arrays_memory_keeps_it(driver: Any) -> None:
    resource = AsyncCudaResource()
    pointer = resource.malloc(64)
    view = ArrayView(BlockOwner(pointer.mem), pointer.ptr, Layout.of((16,), "f4"))
    retire = pointer.mem.stream.state.retire
    fill(pointer.mem, 1, pointer.mem.stream, 64)
    pointer.mem.finish(pointer.mem.stream, Access.WRITE)
    del pointer
    retire.drain()
    (block,) = resource.live_blocks()
    assert block.state is BlockState.LIVE
    assert (np.asarray(view.numpy()).view("u1") == 1).all()
    del view, block
    retire.drain()
    assert resource.live_blocks() == []


def test_report_M78_the_initial_allocator_is_restored(driver: Any) -> None:
    initial = cupy.cuda.get_allocator()
    a, b = AsyncCudaResource(), DirectCudaResource()
    with a.as_cupy_allocator(), b.as_cupy_allocator(), a.as_cupy_allocator():
        assert cupy.cuda.get_allocator() != initial
    assert cupy.cuda.get_allocator() == initial
