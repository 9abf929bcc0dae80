"""Buffers: what they name, parts, binding, and the life of their memory (contracts C6, C7, C15-C17)."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from driver_calls import Calls, recorded
from sample_kernels import INCREMENT

from cuglue import Buffer, DirectCudaResource, In, InOut, Runtime
from cuglue.core.device import device_state
from cuglue.driver.protocol import CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    ArgumentError,
    BufferTooBig,
    CaptureError,
    ClosedError,
    LayoutError,
    OutOfMemory,
    StorageHandleNotFound,
    UsageError,
)


def test_C16_empty_of_any_size(rt: Runtime) -> None:
    with rt.command(stream=rt.stream(1)) as cmd:
        x = cmd.empty(1000)
        assert (x.nbytes, len(x), x.stream, x.ptr % 512, x.bound) == (1000, 1000, rt.stream(1), 0, True)
        nothing = cmd.empty(0)
        assert (nothing.nbytes, nothing.ptr, nothing.bound) == (0, 0, True)
        for wrong in (-1, 1.5, "4", True):
            with pytest.raises(UsageError):
                cmd.empty(wrong)  # type: ignore[arg-type]


def test_C6_resource_is_where_the_buffer_lies_on_whatever_stream(rt: Runtime) -> None:
    x = rt.create(np.arange(100, dtype="u1"), stream=rt.stream(1))
    with rt.command(In(x), stream=rt.stream(2)) as cmd:
        whole = cmd.resource(x)
        assert (whole.ptr, whole.size) == (x.ptr, 100)
        trimmed = cmd.resource(x.part(10, 20))
        assert (trimmed.ptr, trimmed.size) == (x.ptr + 10, 70)
        empty = cmd.resource(x.part(100))
        assert empty.size == 0
        view = cmd.resource(x.array((50,), "u2"))
        assert (view.ptr, view.size) == (x.ptr, 100)


def test_C6_a_resource_owns_its_value_and_keeps_the_memory(rt: Runtime) -> None:
    with rt.command() as cmd:
        kept = [cmd.resource(rt.create(np.full(64, i, "u1"))) for i in range(20)]
        assert len({resource.ptr for resource in kept}) == 20


def test_C6_what_names_no_live_allocation(rt: Runtime, driver: Any) -> None:
    with rt.command() as cmd:
        with pytest.raises(StorageHandleNotFound) as caught:
            cmd.resource(rt.buffer(16))
        assert isinstance(caught.value, LookupError)
        closed = rt.empty(16)
        closed.close()
        with pytest.raises(ClosedError):
            cmd.resource(closed)
        stale = rt.empty(16)
        moved = rt.buffer(16)
        cmd.bind(stale, moved)
        with pytest.raises(StorageHandleNotFound, match="no memory"):
            cmd.resource(stale)
        with Runtime(driver=driver) as other, pytest.raises(ValueError, match="another runtime"):
            cmd.resource(other.empty(16))


def test_C6_memory_freed_with_its_resource_is_found_out() -> None:
    with Runtime(driver=SimDriver()) as rt:
        x = rt.empty(16)
        x.block.advance("deallocate")
        with pytest.raises(StorageHandleNotFound, match="freed"):
            rt.command().resource(x)


@pytest.mark.parametrize(("start", "end"), [(-1, 0), (0, -1), (101, 0), (60, 41), (1.5, 0)])
def test_C6_parts_stay_inside(rt: Runtime, start: Any, end: Any) -> None:
    with pytest.raises(ValueError, match="part of"):
        rt.empty(100).part(start, end)


def test_parts_of_parts_and_their_bytes(rt: Runtime) -> None:
    x = rt.create(np.arange(100, dtype="u1"))
    inner = x.part(10, 10).part(5, 5)
    assert bytes(rt.read(inner).result()) == bytes(range(15, 85))
    x.close()
    assert bytes(rt.read(inner).result()) == bytes(range(15, 85))  # a part keeps the memory


def test_C17_bind_moves_the_memory(rt: Runtime) -> None:
    new = rt.buffer(64)
    part = new.part(32)
    assert not new.bound
    with rt.command() as cmd:
        reserved = cmd.reserve(64)
        cmd.write_to_gpu(reserved.descriptor(64), bytes(range(64)))
        cmd.bind(reserved, new)
        assert (reserved.bound, new.bound) == (False, True)
        with pytest.raises(StorageHandleNotFound):
            cmd.bind(reserved, rt.buffer(64))
    assert bytes(rt.read(new).result()) == bytes(range(64))
    assert bytes(rt.read(part).result()) == bytes(range(32, 64))


def test_C17_what_cannot_be_bound(rt: Runtime, driver: Any) -> None:
    with rt.command() as cmd, Runtime(driver=driver) as other:
        for new in (cmd.empty(64), rt.buffer(65), other.buffer(64)):
            reserved = cmd.reserve(64)
            with pytest.raises(ArgumentError):
                cmd.bind(reserved, new)
            assert reserved.bound
        gone = rt.buffer(64)
        gone.close()
        with pytest.raises(ClosedError):
            cmd.bind(reserved, gone)


def test_C7_memory_lives_while_anything_refers_to_it(sim: SimDriver) -> None:
    with Runtime() as rt:
        x = rt.create(np.arange(16, dtype="u1"))
        assert rt.resource.bytes_outstanding == 16
        array = np.asarray(x.array())
        x.close()
        rt.empty(0)
        assert rt.resource.bytes_outstanding == 16
        assert array.tolist() == list(range(16))
        del array
        rt.empty(16).close()
        assert rt.resource.bytes_outstanding == 0


def test_C7_dropping_the_last_one_frees_in_stream_order(sim: SimDriver) -> None:
    with Runtime() as rt, recorded(sim) as calls:
        stream = rt.stream(1)
        x = rt.create(np.zeros(64, "i4"), stream=stream)
        rt.launch(INCREMENT, 1, 64, InOut(x), 64, 1, stream=rt.stream(2))
        calls.clear()
        x.close()
        assert [name for name, _ in calls.of("stream_wait_event", "free_async", "stream_synchronize")] == [
            "stream_wait_event",
            "free_async",
        ]


def test_closing_twice_and_using_afterwards(rt: Runtime) -> None:
    x = rt.empty(16)
    with x:
        pass
    x.close()
    assert x.closed
    assert not x.bound
    assert repr(x) == "Buffer(closed)"
    for use in (lambda: x.ptr, lambda: x.stream, lambda: x.array(), lambda: rt.read(x)):
        with pytest.raises(ClosedError):
            use()


def test_finalisers_call_no_driver(sim: SimDriver) -> None:
    with Runtime() as rt, recorded(sim) as calls:
        x = rt.empty(64)
        cycle: list[Any] = [x]
        cycle.append(cycle)
        gone = weakref.ref(x)
        calls.clear()
        del x, cycle
        gc.collect()
        assert gone() is None
        assert calls.made == []
        rt.empty(0)
        rt.empty(64)
        assert calls.count("free_async") == 1


def test_a_launch_frees_what_finalisers_left(sim: SimDriver) -> None:
    with Runtime() as rt:
        x = rt.create(np.zeros(64, "i4"))
        gone = rt.empty(64)
        del gone
        with recorded(sim) as calls:
            rt.launch(INCREMENT, 1, 64, InOut(x), 64, 1)
        assert calls.count("free_async") == 1


def test_memory_outlives_its_runtime(sim: SimDriver) -> None:
    rt = Runtime()
    x = rt.create(b"1234")
    array = x.array()
    rt.close()
    assert bytes(np.asarray(array)) == b"1234"
    x.close()
    del array
    sim._cuglue_devices[0].retire.drain()  # type: ignore[attr-defined]
    assert sim.inventory()["bytes"] == 0


def test_a_free_waits_for_what_consumers_queued_uncounted(sim: SimDriver) -> None:
    """A library that got the memory may use it until its array is dropped; nobody counts that work."""
    with Runtime() as rt:
        home, consumer = rt.stream(1), rt.stream(2)
        x = rt.create(np.zeros(64, "i4"), stream=home)
        x.storage.order_consumer(consumer)
        x.storage.note_consumer(consumer)
        sim.fill_async(x.ptr, 1, 256, consumer.handle)
        rt.launch(INCREMENT, 1, 64, InOut(x), 64, 1, stream=home)  # now home has waited for all of that
        sim.fill_async(x.ptr, 2, 256, consumer.handle)
        with recorded(sim) as calls:
            x.close()
        assert [c.method for c in calls.of("stream_wait_event", "free_async")] == [
            "stream_wait_event",
            "free_async",
        ]
        rt.synchronize()


def test_a_buffer_whose_resource_was_closed_is_not_freed_twice(sim: SimDriver) -> None:
    resource = DirectCudaResource()
    with Runtime(resource=resource) as rt:
        x = rt.empty(16)
        with pytest.warns(ResourceWarning, match="1 blocks live"):
            resource.close()
        x.close()
        rt._state.retire.drain()
        assert len(rt._state.retire) == 0


def test_a_free_while_the_home_stream_captures_waits_for_its_end(sim: SimDriver) -> None:
    with Runtime() as rt:
        stream = rt.stream(1)
        x = rt.create(bytes(64), stream=stream)
        rt.synchronize()
        sim.capture_begin(stream.handle, CaptureMode.THREAD_LOCAL)
        with recorded(sim) as calls:
            x.close()
            assert calls.count("free_async") == 0
        graph = sim.capture_end(stream.handle)
        assert sim.graph_memory_nodes(graph) == 0
        sim.graph_destroy(graph)
        rt.synchronize()
        sim._cuglue_devices[0].retire.drain()  # type: ignore[attr-defined]
        assert rt.resource.bytes_outstanding == 0


def test_memory_that_its_resource_took_back_while_a_free_waited_is_not_freed_again(sim: SimDriver) -> None:
    with Runtime() as rt:
        stream = rt.stream(1)
        x = rt.create(bytes(64), stream=stream)
        rt.synchronize()
        block = x.block
        sim.capture_begin(stream.handle, CaptureMode.THREAD_LOCAL)
        x.close()  # waits for the end of the capture
        sim.graph_destroy(sim.capture_end(stream.handle))
        rt.resource.deallocate(block)  # as a resource does that is closed
        device_state(sim, 0).retire.drain(block=True)
        assert rt.resource.bytes_outstanding == 0


# --- allocation -------------------------------------------------------------------------------------------------


class Scarce(DirectCudaResource):
    """A resource that fails as often as told."""

    def __init__(self, errors: list[Exception]) -> None:
        super().__init__()
        self.errors = errors
        self.attempts = 0

    def allocate(self, nbytes: int, stream: object = None, tag: str = "") -> Any:
        self.attempts += 1
        if self.errors:
            raise self.errors.pop(0)
        return super().allocate(nbytes, stream, tag)


def test_C15_a_shortage_is_cleaned_up_and_tried_once_more(sim: SimDriver) -> None:
    with Scarce([OutOfMemory("none", requested=1, in_use=0)]) as resource, Runtime(resource=resource) as rt:
        assert rt.empty(64).nbytes == 64
        assert resource.attempts == 2


def test_C15_the_second_failure_is_raised(sim: SimDriver) -> None:
    errors: list[Exception] = [
        OutOfMemory(text, requested=1, in_use=0) for text in ("first", "second", "third")
    ]
    with Scarce(errors) as resource, Runtime(resource=resource) as rt:
        with pytest.raises(OutOfMemory, match="second") as caught:
            rt.empty(64)
        assert isinstance(caught.value, MemoryError)
        assert "first" in caught.value.__notes__[0]
        assert resource.attempts == 2


def test_C15_too_big_is_not_retried(sim: SimDriver) -> None:
    with Scarce([BufferTooBig("pools", requested=1)]) as resource, Runtime(resource=resource) as rt:
        with pytest.raises(BufferTooBig, match="pools"):
            rt.empty(64)
        assert resource.attempts == 1
        with pytest.raises(BufferTooBig, match=str(2**40)) as caught:
            rt.empty(2**40)
        assert caught.value.requested == 2**40
        assert resource.attempts == 1
        assert rt.empty(64).bound


def test_C15_freed_memory_that_is_still_resident_is_found(sim: SimDriver) -> None:
    driver = SimDriver(memory_bytes=1 << 20)
    with Runtime(driver=driver) as rt:
        for _ in range(20):
            rt.empty(900 << 10, stream=rt.stream(1)).close()
            rt.empty(800 << 10, stream=rt.stream(2)).close()


def test_a_resource_of_elsewhere_is_refused(sim: SimDriver) -> None:
    with DirectCudaResource() as resource, pytest.raises(UsageError, match="resource of a runtime"):
        Runtime(driver=SimDriver(), resource=resource)


def test_a_given_resource_stays_open(sim: SimDriver) -> None:
    with DirectCudaResource() as resource:
        with Runtime(resource=resource) as rt:
            rt.empty(64).close()
        assert not resource.closed


def test_descriptors_and_views_of_a_buffer(rt: Runtime) -> None:
    x = rt.create(np.arange(24, dtype="i4"))
    descriptor = x.descriptor((4, 6), "i4")
    assert (descriptor.strides, descriptor.elem_size, descriptor.nbytes) == ((6, 1), 4, 96)
    assert x.descriptor((4, 5), "i4", (6, 1)).nbytes == 80
    assert x.array((4, 6), "i4").shape == (4, 6)
    assert x.array(dtype="i4").shape == (24,)
    with pytest.raises(LayoutError):
        x.array((25,), "i4")
    with pytest.raises(LayoutError):
        x.part(4).array((24,), "i4")
    assert isinstance(x, Buffer)


# --- cleaning up ------------------------------------------------------------------------------------------------


def test_C13_cleanup_frees_what_nothing_needs_and_touches_nothing_else(sim: SimDriver) -> None:
    with Runtime() as rt:
        x = rt.create(np.arange(64, dtype="u1"))
        for _ in range(10):
            rt.read(x)
            rt.create(bytes(5000))
        with rt.command() as cmd:
            cmd.memory_cleanup()
        lane = rt._lanes.lane()
        assert (lane.drops.staged, lane.drops.pending, rt._lanes.host.idle_bytes) == ((), (), 0)
        assert rt.resource.bytes_outstanding == 64
        assert sim.inventory()["host_alloc"] == 0
        assert bytes(rt.read(x).result()) == bytes(range(64))


def test_C13_cleanup_is_refused_while_any_stream_records(sim: SimDriver) -> None:
    with Runtime() as rt:
        x = rt.create(rt.command().reserve_cpu(64))  # pinned memory is held until the device has read it
        with rt.capture(rt.stream(1)) as capture, recorded(sim) as calls:
            with rt.command() as cmd, pytest.raises(CaptureError):
                cmd.memory_cleanup()
            assert calls.count("event_record") == calls.count("stream_synchronize") == 0
        capture.graph.close()
        assert rt._lanes.lane().drops.staged
        x.close()


def test_C13_cleanup_is_refused_where_somebody_else_captures(sim: SimDriver) -> None:
    with Runtime() as rt:
        stream = rt.stream(0)
        sim.capture_begin(stream.handle, CaptureMode.RELAXED)
        with rt.command(stream=stream) as cmd, pytest.raises(CaptureError, match="clean up memory"):
            cmd.memory_cleanup()
        sim.graph_destroy(sim.capture_end(stream.handle))


def test_C13_what_a_warmup_holds_survives_a_cleanup(rt: Runtime) -> None:
    stream = rt.stream(0)
    capture = rt.capture(stream)
    capture.prepare()
    rt.empty(64, stream=stream).close()
    rt.command(stream=stream).memory_cleanup()
    assert capture._primed is not None
    assert capture._primed.sizes == {64: 1}
    capture.begin()
    rt.empty(64, stream=stream)
    capture.end().close()


def test_C14_flushing_drops(rt: Runtime, calls: Calls) -> None:
    def fences() -> tuple[int, int]:
        counted = calls.count("event_record"), calls.count("event_synchronize")
        calls.clear()
        return counted

    with rt.command(stream=rt.stream(1)) as cmd:
        calls.clear()
        cmd.flush_drops()
        assert fences() == (0, 0)
        cmd.create_with_data(cmd.reserve_cpu(64))
        calls.clear()
        cmd.flush_drops()
        assert fences() == (1, 0)
        cmd.flush_drops()
        assert fences() == (0, 1)
        cmd.flush_drops()
        assert fences() == (0, 0)
