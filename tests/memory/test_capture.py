"""While a stream captures: nothing of ours gets into the graph, and nothing of ours breaks the capture (P13)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    DebugGuardResource,
    DirectCudaResource,
    GlobalDeviceBudget,
    LaunchRecorder,
    ManagedResource,
    PinnedHostResource,
    PoolResource,
    testing,
)
from cuglue.driver.protocol import CaptureMode, CaptureStatus
from cuglue.errors import CaptureError, OutOfBounds, OutOfMemory

MODES = list(CaptureMode)


@contextmanager
def capture(sim: Any, stream: Any, mode: CaptureMode = CaptureMode.RELAXED) -> Iterator[None]:
    """The capture must be valid at its end, and the graph empty of memory nodes."""
    sim.capture_begin(stream.ptr, mode)
    yield
    assert sim.capture_status(stream.ptr) is CaptureStatus.ACTIVE, "the capture was lost"
    graph = sim.capture_end(stream.ptr)
    assert sim.graph_memory_nodes(graph) == 0
    sim.graph_destroy(graph)


@pytest.fixture(params=[AsyncCudaResource, DirectCudaResource])
def resource(request: pytest.FixtureRequest, sim: Any) -> Iterator[Any]:
    made = request.param()
    yield made
    made._state.retire.drain()
    made.reap_pending()
    assert made.bytes_outstanding == 0
    assert len(made._state.retire) == 0


@pytest.mark.parametrize("mode", MODES)
def test_an_allocation_in_a_capture_is_refused(sim: Any, resource: Any, mode: CaptureMode) -> None:
    stream = sim.Stream()
    with capture(sim, stream, mode):
        with testing.faults.counts() as counted, pytest.raises(CaptureError, match="graph_memory"):
            resource.allocate(64, stream)
        with sim.current_stream(stream), pytest.raises(CaptureError):
            resource.malloc(64)
        assert counted["malloc_async"] == 0


def test_elsewhere_memory_is_to_be_had(sim: Any, resource: Any) -> None:
    stream, other = sim.Stream(), sim.Stream()
    with capture(sim, stream):
        block = resource.allocate(64, other)
        resource.deallocate(block)


def test_report_M13_frees_wait_for_the_end_of_the_capture(
    sim: Any, resource: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An array from before, dropped in the capture: a free node would fire at every replay."""
    stream, other = sim.Stream(), sim.Stream()
    with sim.current_stream(stream):
        pointers = [resource.malloc(64) for _ in range(3)]
    queue = resource._state.retire
    with capture(sim, stream), caplog.at_level(logging.WARNING):
        pointers.clear()
        with sim.current_stream(other):
            for _ in range(3):
                del_me = resource.malloc(16)
        del del_me
        queue.run_forgotten()
        assert queue.drain() == 0, "not a failure, and not yet its time"
        assert {b.size for b in resource.live_blocks()} == {64}
        assert len(queue) == 3
    assert caplog.text == ""
    with testing.trace(only={"free_async"}) as calls:
        queue.drain()
    assert [call.args[1] for call in calls if call.args[1] == stream.ptr] == [stream.ptr] * 3
    assert resource.live_blocks() == []


def test_deferred_frees_are_resumed_by_the_next_allocation(sim: Any, resource: Any) -> None:
    stream, other = sim.Stream(), sim.Stream()
    with sim.current_stream(stream):
        pointer = resource.malloc(64)
    with capture(sim, stream):
        del pointer
        resource._state.retire.run_forgotten()
    with sim.current_stream(other):
        first = resource.malloc(16)
        del first
        with testing.trace(only={"free_async"}) as calls:
            second = resource.malloc(16)
    assert [call.args[1] for call in calls] == [stream.ptr, other.ptr], "the older one first"
    del second


def test_an_explicit_free_is_refused_and_can_be_repeated(sim: Any, resource: Any) -> None:
    stream = sim.Stream()
    block = resource.allocate(64, stream)
    with capture(sim, stream):
        with pytest.raises(CaptureError, match="captures a graph"):
            resource.deallocate(block)
        assert block.state is BlockState.LIVE
        assert resource.live_blocks() == [block]
    resource.deallocate(block)


def test_a_free_waits_for_a_user_that_captures(sim: Any) -> None:
    resource = AsyncCudaResource()
    home, user = sim.Stream(), sim.Stream()
    block = resource.allocate(64, home)
    resource.record_block_use(block, user)
    with capture(sim, user):
        with pytest.raises(CaptureError):
            resource.deallocate(block)
        assert block.state is BlockState.LIVE
    resource.deallocate(block)
    resource.reap_pending()


def test_a_free_without_a_stream_of_its_own_waits(sim: Any, resource: Any) -> None:
    """It would be covered by an event of the whole context, which no capture survives."""
    capturing = sim.Stream()
    record = cuglue.as_stream(capturing)
    handle = sim.stream_create(0)
    block = resource.allocate(64, handle)
    sim.stream_destroy(handle)
    with capture(sim, capturing):
        with pytest.raises(CaptureError):
            resource.deallocate(block)
        with pytest.raises(CaptureError):
            cuglue.as_stream(0).join_context()
        with pytest.raises(CaptureError):
            cuglue.as_stream(0).hold_context()
        with pytest.raises(CaptureError):
            cuglue.as_stream(0).wait_for(block.alloc_stream, block.write_seq)
        with pytest.raises(CaptureError):
            block.alloc_stream.synchronize()
    assert not record.capturing
    resource.deallocate(block)


@pytest.mark.parametrize("mode", MODES)
def test_what_blocks_the_device_is_refused_while_a_stream_captures(sim: Any, mode: CaptureMode) -> None:
    capturing = sim.Stream()
    record = cuglue.as_stream(capturing)
    resources: list[Any] = [DirectCudaResource(mode="sync"), PinnedHostResource(), ManagedResource()]
    blocks = [resource.allocate(64) for resource in resources]
    with capture(sim, capturing, mode):
        assert record.state.capturing
        for resource, block in zip(resources, blocks, strict=True):
            with pytest.raises(CaptureError):
                resource.allocate(64)
            if isinstance(resource, PinnedHostResource):
                resource.deallocate(block)
                resource.reap_pending(block=False)
                assert block.state is BlockState.RETIRED
            else:
                with pytest.raises(CaptureError):
                    resource.deallocate(block)
                assert block.state is BlockState.LIVE
    assert not record.state.capturing
    for resource, block in zip(resources, blocks, strict=True):
        if block.state is BlockState.LIVE:
            resource.deallocate(block)
        resource.reap_pending()
        assert resource.bytes_outstanding == 0


def test_no_memory_while_a_stream_captures(sim: Any, resource: Any) -> None:
    """The second attempt collects garbage and waits for nothing."""
    capturing, other = sim.Stream(), sim.Stream()
    record = cuglue.as_stream(capturing)
    with capture(sim, capturing):
        with testing.faults.fail("malloc_async", persistent=True), testing.faults.counts() as counted:
            with pytest.raises(OutOfMemory) as caught:
                resource.allocate(64, other)
        assert not {"stream_synchronize", "device_synchronize", "pool_trim"} & set(counted)
    report: Any = caught.value.report
    assert "because a stream captures" in " ".join(report.tried)
    assert not record.capturing


def test_a_budget_makes_no_room_on_a_stream_that_captures(sim: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    stream = sim.Stream()
    keep = budget.allocate(900, stream)
    with capture(sim, stream), pytest.raises((CaptureError, OutOfMemory)):
        budget.allocate(50, stream)
    assert budget.reserved_bytes == 900
    budget.deallocate(keep)
    budget.reap_pending()
    assert budget.reserved_bytes == 0


def test_uses_are_refused_before_anything_is_touched(sim: Any) -> None:
    resource = AsyncCudaResource()
    home, user = sim.Stream(), sim.Stream()
    block = resource.allocate(64, home)
    with capture(sim, user):
        for call in (
            lambda: resource.prepare_block_use(block.id, user, Access.WRITE),
            lambda: LaunchRecorder(user).read(block).preflight(),
            lambda: cuglue.use(block, user),
        ):
            with pytest.raises(CaptureError):
                call()
    assert block.write_stream.handle == home.ptr
    assert block.reads is None
    resource.deallocate(block)
    resource.reap_pending()


GUARDED: dict[str, Any] = {
    "async": AsyncCudaResource,
    "direct": DirectCudaResource,
    "sync": lambda: DirectCudaResource(mode="sync"),
    "managed": ManagedResource,
    "pinned": PinnedHostResource,
    "pool": lambda: PoolResource(AsyncCudaResource()),
    "guard": lambda: DebugGuardResource(AsyncCudaResource()),
}


@pytest.fixture(params=GUARDED)
def guard(request: pytest.FixtureRequest, sim: Any) -> Iterator[DebugGuardResource]:
    made = DebugGuardResource(GUARDED[request.param]())
    yield made
    cuglue.as_stream(None).state.retire.drain()
    made.reap_pending()
    assert made.reports == []
    assert made.bytes_outstanding == 0
    made.close()


@contextmanager
def capture_of_nothing(sim: Any, stream: Any) -> Iterator[None]:
    """As :func:`capture`, and no call of a driver that would be recorded."""
    with capture(sim, stream), testing.trace(only={"fill_async", "copy_async"}) as calls:
        yield
    assert calls == []


@pytest.mark.parametrize("poison", [True, False])
def test_a_guard_looks_and_poisons_in_no_graph(sim: Any, guard: DebugGuardResource, poison: bool) -> None:
    guard._patterns.poison = poison
    stream = sim.Stream()
    block = guard.allocate(64, stream)
    with sim.current_stream(stream):
        pointer = guard.malloc(64)
    with capture_of_nothing(sim, stream):
        with pytest.raises(CaptureError, match="captures a graph"):
            guard.deallocate(block)
        assert block.state is BlockState.LIVE
        del pointer
        block.alloc_stream.state.retire.run_forgotten()
        assert len(guard.live_blocks()) == 2
        guard.check()
        with pytest.raises(CaptureError):
            guard.allocate(64, stream)
        with sim.current_stream(stream), pytest.raises(CaptureError):
            guard.malloc(64)
        assert len(guard.live_blocks()) == 2
    guard.deallocate(block)


def test_a_guard_looks_at_nothing_that_a_graph_uses(sim: Any) -> None:
    guard = DebugGuardResource(AsyncCudaResource())
    home, user = sim.Stream(), sim.Stream()
    block = guard.allocate(64, home)
    guard.record_block_use(block, user)
    with capture_of_nothing(sim, user):
        guard.check()
        with pytest.raises(CaptureError):
            guard.deallocate(block)
        assert block.state is BlockState.LIVE
    guard.check()
    guard.deallocate(block)
    guard.close()


def test_a_guard_takes_no_memory_of_a_graph(sim: Any) -> None:
    """Its canaries would be written by each replay, and looked at before the first one."""
    pool = PoolResource(AsyncCudaResource())
    guard = DebugGuardResource(pool)
    stream = sim.Stream()
    with pool.graph_memory(stream) as memory:
        guard.deallocate(guard.allocate(64, stream))
        guard.flush()
        with capture_of_nothing(sim, stream), pytest.raises(CaptureError):
            guard.allocate(64, stream)
    memory.close()
    guard.close()


def test_a_reap_ends_the_quarantine_but_for_what_a_capture_is_in_the_way_of(
    sim: Any, guard: DebugGuardResource
) -> None:
    """It neither raises nor waits, and the rest goes back at the next one."""
    capturing, other = sim.Stream(), sim.Stream()
    held = [guard.allocate(64, stream) for stream in (capturing, other, capturing, other)]
    for block in held:
        guard.deallocate(block)
    with capture_of_nothing_written(sim, capturing):
        for wait in (False, True):
            guard.reap_pending(block=wait)
        guard.flush()
        assert all(block.state is not BlockState.LIVE for block in held)
        if held[0].state is not BlockState.FREED:  # a pool keeps it, and has nothing to ask the driver for
            with pytest.raises(CaptureError, match="close"):
                guard.close()
    guard.reap_pending()
    assert {block.state for block in held} == {BlockState.FREED}
    guard.deallocate(guard.allocate(64, other))


@contextmanager
def capture_of_nothing_written(sim: Any, stream: Any) -> Iterator[None]:
    """As :func:`capture`, and nothing is queued there."""
    with capture(sim, stream), testing.trace() as calls:
        yield
    assert [c.method for c in calls if c.args[1:2] == (stream.ptr,) and c.method == "free_async"] == []


def test_a_block_elsewhere_leaves_the_quarantine_while_a_stream_captures(sim: Any) -> None:
    guard = DebugGuardResource(AsyncCudaResource())
    capturing, other = sim.Stream(), sim.Stream()
    first, second = guard.allocate(64, capturing), guard.allocate(64, other)
    guard.deallocate(first)
    guard.deallocate(second)
    with capture(sim, capturing):
        guard.reap_pending()
        assert (first.state, second.state) == (BlockState.QUARANTINED, BlockState.FREED), (
            "though it is the older one"
        )
    guard.close()
    assert first.state is BlockState.FREED


def test_a_guard_looks_at_what_it_can_while_the_device_may_not_be_joined(sim: Any) -> None:
    """A block without a stream of its own is behind the whole device, which a capture keeps from being waited for."""
    guard = DebugGuardResource(AsyncCudaResource())
    home = sim.Stream()
    handle = sim.stream_create(0)
    lost, kept = guard.allocate(64, handle), guard.allocate(64, home)
    sim.stream_destroy(handle)
    capturing = cuglue.as_stream(sim.Stream())
    record = cuglue.as_stream(home)
    record.driver.fill_async(kept.ptr + 64, 7, 1, record.handle)
    record.submit()
    with capture(sim, capturing.owner), pytest.raises(OutOfBounds):
        guard.check()
    assert [report.generation for report in guard.reports] == [kept.generation]
    guard.deallocate(lost)
    with pytest.raises(OutOfBounds):
        guard.deallocate(kept)
    guard.close()


def test_pinned_memory_is_not_left_behind_by_a_close_in_a_capture(sim: Any) -> None:
    resource = PinnedHostResource()
    stream = sim.Stream()
    resource.deallocate(resource.allocate(64, stream))
    kept = cuglue.as_stream(stream)
    with capture(sim, stream):
        with pytest.raises(CaptureError, match="close"):
            resource.close()
        assert resource.bytes_outstanding == 64
    assert kept.query()
    resource.close()
    assert (resource.bytes_outstanding, sim.inventory()["host_alloc"]) == (0, 0)


def test_a_close_in_a_capture_frees_what_it_can_and_can_be_repeated(sim: Any, resource: Any) -> None:
    capturing, other = sim.Stream(), sim.Stream()
    blocked, free = resource.allocate(64, capturing), resource.allocate(32, other)
    with capture(sim, capturing):
        with pytest.raises(CaptureError, match="free memory"):
            resource.close()
        assert (blocked.state, resource.live_blocks()) == (BlockState.LIVE, [blocked])
        assert free.state is not BlockState.LIVE
        resource.deallocate(resource.allocate(16, other))
    with pytest.warns(ResourceWarning, match="1 blocks live"):
        resource.close()
    assert blocked.state is BlockState.FREED
