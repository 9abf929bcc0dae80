"""Memory of arrays on the way that asks no questions: through CuPy's allocator, on a stream that was used before."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import cupy
import pytest
from memory_tools import contents, fill, make_current, new_stream

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    DirectCudaResource,
    FailureCallbackResource,
    GlobalDeviceBudget,
    InMemorySink,
    LoggingResource,
    StatisticsResource,
    TrackingResource,
    testing,
)
from cuglue.driver.protocol import CaptureMode, CaptureStatus
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    CaptureError,
    ClosedError,
    DriverError,
    OutOfBudget,
    OutOfMemory,
    StreamMisuse,
    UsageError,
    UseAfterFree,
)
from cuglue.memory.cupy_plug import block_of
from cuglue.memory.lookup import block_behind
from cuglue.memory.records import Action

MIB = 1 << 20
PAIR = {"malloc_async", "free_async", "stream_wait_event"}


@pytest.fixture(params=[DirectCudaResource, AsyncCudaResource])
def resource(request: pytest.FixtureRequest, driver: Any) -> Any:
    return request.param()


@pytest.fixture
def stream(driver: Any) -> Any:
    """Current for the whole test."""
    made = new_stream()
    with make_current(made):
        yield made


class Refused(RuntimeError):
    """What CuPy raises in the place of our errors."""

    def __init__(self, code: int) -> None:
        super().__init__(f"cudaError{code}: refused")
        self.code = code


class Shortcuts:
    """As those of the CUDA driver: functions without a device, by way of the simulated driver's methods."""

    on = True
    error = Refused
    refusals = (OutOfMemory, DriverError, Refused)

    def __init__(self, driver: Any) -> None:
        self.malloc = lambda nbytes, stream: driver.malloc_async(nbytes, stream, 0)
        self.free = lambda ptr, stream: driver.free_async(ptr, stream, 0)
        self.current = lambda device: driver.stream_current(device)
        self.captures = lambda stream: driver.capture_status(stream) is not CaptureStatus.NONE

    def failure(self, error: Any, call: str, nbytes: int | None = None) -> Any:
        if not isinstance(error, Refused):
            return error
        if error.code == 2:
            return OutOfMemory("device memory", requested=nbytes or 0)
        return DriverError(str(error), code=error.code, name="refused", call=call)


@pytest.fixture(autouse=True, params=["methods", "shortcuts"])
def shortcuts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The simulated driver with its methods only, and with shortcuts past them."""
    if request.param == "methods":
        return None
    made: list[Shortcuts] = []

    def of(driver: Any) -> Shortcuts:
        made[:] = made or [Shortcuts(driver)]
        return made[0]

    monkeypatch.setattr(SimDriver, "shortcuts", property(of), raising=False)
    return of


def bottom(resource: Any) -> Any:
    while hasattr(resource, "upstream"):
        resource = resource.upstream
    return resource


def warm(resource: Any) -> None:
    """The first allocation on a stream goes the long way, and is given back."""
    resource.malloc(1)
    drain(resource)
    assert on_the_hot_way(resource.malloc(1)), "what follows would test nothing"
    drain(resource)


def drain(resource: Any) -> None:
    bottom(resource)._state.retire.run_forgotten()


def on_the_hot_way(pointer: Any) -> bool:
    return type(pointer.mem).__name__ == "ArrayMemory"


# --- the memory object and its block ----------------------------------------------------------------------------


def test_a_pair_is_two_driver_calls_and_one_question(resource: Any, stream: Any) -> None:
    warm(resource)
    pointer = resource.malloc(64)
    with testing.faults.counts() as counted:
        del pointer
        again = resource.malloc(64)
    assert dict(counted) == {"stream_current": 1, "free_async": 1, "malloc_async": 1}
    assert on_the_hot_way(again)
    with testing.faults.counts() as counted:
        more = resource.malloc(64)
    assert dict(counted) == {"stream_current": 1, "capture_status": 1, "malloc_async": 1}, (
        "no free has answered"
    )
    del more


def test_a_free_on_another_stream_says_nothing_of_this_one(resource: Any, stream: Any) -> None:
    warm(resource)
    with make_current(new_stream()):
        warm(resource)
        pointer = resource.malloc(64)
    resource.driver.capture_begin(stream.ptr, CaptureMode.RELAXED)
    try:
        del pointer
        with pytest.raises(CaptureError):
            resource.malloc(64)
    finally:
        resource.driver.graph_destroy(resource.driver.capture_end(stream.ptr))
    assert resource.live_bytes == 0, "that one was freed"


def test_two_layers_that_count_count_each_what_goes_through_them(driver: Any, stream: Any) -> None:
    lower = StatisticsResource(AsyncCudaResource())
    upper = StatisticsResource(GlobalDeviceBudget(lower, 1 << 20))
    for resource in lower, upper:
        warm(resource)
    before = [resource.statistics() for resource in (upper, lower)]
    pointers = [upper.malloc(100), upper.malloc(100), lower.malloc(10)]
    assert all(map(on_the_hot_way, pointers))
    counted = [resource.statistics() for resource in (upper, lower)]
    assert [(s.current_bytes, s.current_count) for s in counted] == [(200, 2), (210, 3)]
    assert [s.total_count - b.total_count for s, b in zip(counted, before, strict=True)] == [2, 3]
    pointers.clear()
    upper.malloc(50)
    drain(upper)
    assert [(s.statistics().current_bytes, s.statistics().current_count) for s in (upper, lower)] == [
        (0, 0)
    ] * 2


@pytest.mark.parametrize("layer", [lambda below: below, StatisticsResource])
def test_an_entry_that_is_queued_twice_is_freed_and_counted_once(
    driver: Any, stream: Any, layer: Any
) -> None:
    """As after an interrupt, or when somebody asks about an array while it dies."""
    resource = layer(AsyncCudaResource())
    warm(resource)
    retire = bottom(resource)._state.retire
    for queue in (resource.malloc, lambda nbytes: retire.run_forgotten()):
        pointer = resource.malloc(64)
        entry = pointer.mem.entry
        del pointer
        retire.forgotten.append(entry)
        with testing.trace(only={"free_async"}) as calls:
            queue(32)
        assert len(calls) == 1
        assert not any(left is entry for left in retire.forgotten)
        drain(resource)
        assert bottom(resource).live_bytes == 0
        if resource is not bottom(resource):
            assert (resource.statistics().current_bytes, resource.statistics().current_count) == (0, 0)


def test_memory_that_is_asked_about_while_it_is_taken_back_goes_back_as_a_block(
    driver: Any, stream: Any
) -> None:
    resource = AsyncCudaResource()
    warm(resource)
    pointer = resource.malloc(64)
    entry = pointer.mem.entry
    made: list[Any] = []

    def another_thread(frame: Any, event: str, function: Any) -> None:
        taken = event == "c_call" and frame.f_code.co_name == "malloc" and function.__name__ == "pop"
        if taken and not made:
            made.append(resource._arrays.block_in(entry))

    del pointer
    former = sys.getprofile()
    sys.setprofile(another_thread)
    try:
        resource.malloc(32)
    finally:
        sys.setprofile(former)
    (block,) = made
    assert block.state is BlockState.RETIRED
    drain(resource)
    assert resource.live_bytes == 0


def test_the_block_is_made_at_the_first_question(resource: Any, stream: Any) -> None:
    warm(resource)
    before = cuglue.as_stream(stream).seq
    pointer = resource.malloc(1000)
    memory = pointer.mem
    assert isinstance(memory, cupy.cuda.BaseMemory)
    assert not hasattr(memory, "__dict__")
    assert weakref.ref(memory)() is memory
    assert (memory.ptr, memory.size, memory.device_id) == (pointer.ptr, 1000, 0)
    assert cuglue.as_stream(stream).seq == before, "nobody asked yet"
    block: Any = block_of(memory)
    assert block is block_of(memory) is memory.block
    assert block in resource.live_blocks()
    assert (block.ptr, block.nbytes, block.tag, block.state) == (
        pointer.ptr,
        1000,
        "untagged",
        BlockState.LIVE,
    )
    assert block.stream is cuglue.as_stream(stream)
    assert block.resource is resource
    assert "0x" in repr(memory)


def test_a_memory_object_answers_as_its_block(resource: Any, stream: Any) -> None:
    warm(resource)
    memory = resource.malloc(64).mem
    block = memory.block
    assert (memory.state, memory.id, memory.nbytes, memory.generation) == (
        block.state,
        block.id,
        64,
        block.generation,
    )
    assert memory.stream is block.stream
    memory.finish(block.stream, Access.READ)
    assert block.reads


def test_what_lives_is_found_by_its_address(resource: Any, stream: Any) -> None:
    """As for a tensor of PyTorch over our memory."""
    warm(resource)
    first, second = resource.malloc(4096), resource.malloc(4096)
    inside = SimpleNamespace(__cuda_array_interface__={"data": (second.ptr + 100, False)})
    assert block_behind(inside) is block_of(second.mem)
    assert resource.block_at(first.ptr) is block_of(first.mem)
    assert resource.block_at(max(first.ptr, second.ptr) + 4096 * 64) is None
    del second
    drain(resource)
    assert block_behind(inside) is None


def test_two_threads_that_ask_get_the_same_block(driver: Any, stream: Any) -> None:
    resource = AsyncCudaResource()
    warm(resource)
    for _ in range(50):
        memory = resource.malloc(64).mem
        found: list[Any] = []
        threads = [threading.Thread(target=lambda m=memory, f=found: f.append(m.block)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(found) == 4
        assert len(set(map(id, found))) == 1
    del memory, found
    drain(resource)


# --- bytes ------------------------------------------------------------------------------------------------------


def test_B25_bytes_are_exact(driver: Any, stream: Any) -> None:
    resource = AsyncCudaResource()
    other = new_stream()
    warm(resource)
    with make_current(other):
        warm(resource)
    resource.reap_pending()
    warm(resource)
    with make_current(other):
        warm(resource)
        far = resource.malloc(30)
    near, asked = resource.malloc(100), resource.malloc(1000)
    assert block_of(asked.mem) is not None
    base = resource.pending_free_bytes
    assert resource.live_bytes == 1130
    del near, far, asked
    assert resource.live_bytes == 1130, "the finaliser frees nothing"
    drain(resource)
    assert resource.live_bytes == 0
    assert resource.pending_free_bytes == base + 1130 == resource.bytes_outstanding
    assert sum(resource.pending_per_stream().values()) == resource.pending_per_stream_total == base + 1130
    assert resource.pending_per_stream()[cuglue.as_stream(other).id] >= 30
    resource.reap_pending()
    assert resource.bytes_outstanding == 0
    assert resource.pending_per_stream() == {}


def test_B26_looking_counts_what_is_done(driver: Any, stream: Any) -> None:
    resource = AsyncCudaResource()
    warm(resource)
    resource.reap_pending()
    warm(resource)
    pointer = resource.malloc(100)
    del pointer
    drain(resource)
    assert resource.bytes_outstanding > 0
    for _ in range(200):
        resource.reap_pending(block=False)
        if resource.bytes_outstanding == 0:
            break
    assert resource.bytes_outstanding == 0


def test_B26_what_is_done_says_nothing_of_a_later_free(driver: Any, stream: Any) -> None:
    resource = AsyncCudaResource()
    warm(resource)
    home = cuglue.as_stream(stream)
    pointer = resource.malloc(100)
    home.submit()
    home.synchronize()
    del pointer
    drain(resource)
    with testing.faults.counts() as counted:
        resource.reap_pending(block=False)
    assert counted["event_record"] == 1


def test_B20_memory_is_there_only_after_its_allocation(driver: Any, stream: Any) -> None:
    """However much of its stream was waited for before."""
    resource = AsyncCudaResource()
    warm(resource)
    home, other = cuglue.as_stream(stream), cuglue.as_stream(new_stream())
    other.wait_for(home, home.submit())
    pointer = resource.malloc(100)
    assert pointer.mem.prepare(other, Access.WRITE) == 1
    assert pointer.mem.prepare(other, Access.WRITE) == 0


def test_B26_a_stream_that_fails_stays_pending(driver: Any, stream: Any) -> None:
    resource = AsyncCudaResource()
    warm(resource)
    pending = resource.pending_free_bytes
    assert pending > 0
    with testing.faults.fail("stream_synchronize"), pytest.raises(DriverError):
        resource.reap_pending()
    assert resource.pending_free_bytes == pending
    resource.reap_pending()
    assert resource.pending_free_bytes == 0


def test_B26_reaping_frees_dead_arrays_first(driver: Any, stream: Any) -> None:
    resource = AsyncCudaResource()
    warm(resource)
    pointer = resource.malloc(100)
    del pointer
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


def test_a_direct_resource_counts_only_what_lives(driver: Any, stream: Any) -> None:
    resource = DirectCudaResource()
    warm(resource)
    pointer = resource.malloc(100)
    assert resource.bytes_outstanding == 100
    del pointer
    drain(resource)
    assert resource.bytes_outstanding == 0


def test_reaping_lets_go_of_streams(driver: Any) -> None:
    resource = AsyncCudaResource()
    made = new_stream()
    with make_current(made):
        warm(resource)
        kept = resource.malloc(64)
    resource.reap_pending()
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is not None, "memory of it lives"
    del kept
    drain(resource)
    assert resource.pending_free_bytes == 64, "also what is given back on a stream that was left"
    resource.reap_pending()
    assert resource.pending_free_bytes == 0
    gc.collect()
    assert gone() is None


def test_many_streams(driver: Any) -> None:
    """More than are remembered: all of them are given back on, and counted."""
    resource = AsyncCudaResource()
    kept = []
    streams = [new_stream() for _ in range(70)]
    for made in streams:
        with make_current(made):
            resource.malloc(8)
            kept.append(resource.malloc(64))
            assert on_the_hot_way(kept[-1])
    assert resource.live_bytes >= 70 * 64
    kept.clear()
    drain(resource)
    assert resource.live_bytes == 0
    assert resource.pending_free_bytes == 70 * 72
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


# --- freeing ----------------------------------------------------------------------------------------------------


def test_P6_the_finaliser_only_appends(resource: Any, stream: Any) -> None:
    warm(resource)
    pointer = resource.malloc(64)
    retire = resource._state.retire
    before = len(retire)
    with testing.faults.counts() as counted:
        del pointer
    assert not counted
    assert len(retire) == before + 1
    assert retire.drain() == 1


def test_uses_elsewhere_are_waited_for(driver: Any, stream: Any) -> None:
    resource = AsyncCudaResource()
    warm(resource)
    other = cuglue.as_stream(new_stream())
    pointer = resource.malloc(4096)
    other.wait_for(cuglue.as_stream(stream), cuglue.as_stream(stream).submit())
    fill(pointer.mem, 5, other, 4096)
    resource.record_block_use(pointer.mem, other)
    with testing.trace(only=PAIR) as calls:
        del pointer
        drain(resource)
    assert [call.method for call in calls] == ["stream_wait_event", "free_async"]
    assert calls[1].args[1] == stream.ptr


def test_report_M69_a_refused_free_stays_live_and_is_repeated(
    resource: Any, stream: Any, caplog: pytest.LogCaptureFixture
) -> None:
    warm(resource)
    pointer = resource.malloc(64)
    live = bottom(resource).live_bytes
    with testing.faults.fail("free_async") as failure:
        del pointer
        other = resource.malloc(32)
    assert failure.raised == 1
    assert "tried again" in caplog.text
    assert resource.live_bytes == live + 32
    del other
    resource._state.retire.drain()
    assert resource.live_bytes == 0


def test_an_explicit_deallocate_is_not_repeated(resource: Any, stream: Any) -> None:
    warm(resource)
    pointer = resource.malloc(64)
    resource.deallocate(pointer.mem)
    assert pointer.mem.state is not BlockState.LIVE
    with pytest.raises(UseAfterFree):
        resource.deallocate(pointer.mem)
    with testing.trace(only=PAIR) as calls:
        del pointer
        drain(resource)
        gc.collect()
        drain(resource)
    assert calls == []


def test_B13_a_stale_block_does_not_take_the_next_owners_memory(resource: Any, stream: Any) -> None:
    warm(resource)
    pointer = resource.malloc(4096)
    stale: Any = block_of(pointer.mem)
    address = pointer.ptr
    del pointer
    drain(resource)
    new = resource.malloc(4096)
    assert new.ptr == address, "the address must be reused for this test to mean anything"
    with pytest.raises(UseAfterFree):
        resource.deallocate(stale)
    assert resource.live_bytes == 4096
    fill(new.mem, 7, stream, 4096)
    assert (contents(new.mem, stream, 4096) == 7).all()
    assert block_of(new.mem) is not stale
    assert new.mem.generation > stale.generation


def test_an_address_that_is_live_is_never_replaced(
    resource: Any, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(resource)
    pointer = resource.malloc(64)
    monkeypatch.setattr(resource.driver, "malloc_async", lambda *args: pointer.ptr)
    with pytest.raises(DriverError, match="gave it out again"):
        resource.malloc(64)
    with pytest.raises(DriverError, match="gave it out again"):
        resource.allocate(64)
    block = block_of(pointer.mem)
    with pytest.raises(DriverError, match="gave it out again"):
        resource.malloc(64)
    monkeypatch.undo()
    assert resource.live_bytes == 64
    assert block in resource.live_blocks()


def test_another_resources_memory_is_freed_too(driver: Any, stream: Any) -> None:
    one, two = AsyncCudaResource(), DirectCudaResource()
    warm(one)
    warm(two)
    pointer = one.malloc(64)
    del pointer
    with testing.faults.counts() as counted:
        kept = two.malloc(64)
    assert counted["free_async"] == 1
    assert one.live_bytes == 0
    del kept


# --- what is refused --------------------------------------------------------------------------------------------


def test_P13_a_stream_that_captures(resource: Any, stream: Any) -> None:
    """Nothing is allocated there, and frees wait for its end."""
    warm(resource)
    other = new_stream()
    with make_current(other):
        warm(resource)
    pointer = resource.malloc(64)
    driver = resource.driver
    driver.capture_begin(stream.ptr, CaptureMode.RELAXED)
    try:
        with pytest.raises(CaptureError):
            resource.malloc(64)
        with testing.trace(only=PAIR) as calls, make_current(other):
            del pointer
            kept = resource.malloc(32)
        assert [call.method for call in calls] == ["free_async", "malloc_async"], "the first one is refused"
        assert resource.live_bytes == 96
        assert driver.capture_status(stream.ptr) is CaptureStatus.ACTIVE
    finally:
        graph = driver.capture_end(stream.ptr)
        assert driver.graph_memory_nodes(graph) == 0
        driver.graph_destroy(graph)
    drain(resource)
    assert resource.live_bytes == 32
    del kept


def test_P13_a_dead_array_and_an_allocation_on_the_stream_that_captures(
    resource: Any, stream: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its free is refused by the capture, which answers for the allocation too."""
    warm(resource)
    pointers = [resource.malloc(64) for _ in range(3)]
    driver = resource.driver
    driver.capture_begin(stream.ptr, CaptureMode.RELAXED)
    try:
        for _ in range(2):
            pointers.pop()
            with pytest.raises(CaptureError, match="graph_memory"):
                resource.malloc(64)
            assert resource.live_bytes == 192
        assert driver.capture_status(stream.ptr) is CaptureStatus.ACTIVE
    finally:
        graph = driver.capture_end(stream.ptr)
        assert driver.graph_memory_nodes(graph) == 0
        driver.graph_destroy(graph)
    assert caplog.text == "", "no failure: they wait for the end"
    drain(resource)
    assert resource.live_bytes == 64


def test_no_memory(resource: Any, stream: Any) -> None:
    warm(resource)
    keep = resource.malloc(64)
    with testing.faults.fail("malloc_async", persistent=True), pytest.raises(OutOfMemory) as caught:
        resource.malloc(MIB)
    assert isinstance(caught.value, cupy.cuda.memory.OutOfMemoryError)
    assert caught.value.in_use == 64
    with testing.faults.fail("malloc_async"):
        second = resource.malloc(MIB)
    assert resource.live_bytes == 64 + MIB
    del keep, second


def test_another_failure_passes_unchanged(resource: Any, stream: Any) -> None:
    warm(resource)
    with testing.faults.fail("malloc_async", code=999), pytest.raises(DriverError) as caught:
        resource.malloc(64)
    assert caught.value.code == 999
    assert resource.live_bytes == 0


def refuse(patch: pytest.MonkeyPatch, driver: Any, method: str, *codes: int) -> None:
    """Let the function behind ``method`` raise CuPy's errors, one code a call."""
    left = list(codes)

    def call(*args: Any) -> Any:
        raise Refused(left.pop(0))

    patch.setattr(driver, method, call)


@pytest.mark.parametrize("shortcuts", ["shortcuts"], indirect=True)
@pytest.mark.parametrize("layers", [False, True])
def test_what_shortcuts_raise_becomes_ours(sim: Any, shortcuts: Any, layers: bool) -> None:
    def no_memory(*args: Any) -> int:
        raise OutOfMemory("device memory", requested=100)

    source, sink = AsyncCudaResource(), InMemorySink()
    resource: Any = LoggingResource(source, sink) if layers else source
    with make_current(new_stream()):
        for code, kind in (2, OutOfMemory), (400, StreamMisuse), (999, DriverError):
            warm(resource)
            with pytest.MonkeyPatch.context() as patch:
                refuse(patch, sim, "malloc_async", code)
                if code == 2:  # it tries once more, by the driver's method
                    patch.setattr(source, "_take", no_memory)
                with pytest.raises(kind) as caught:
                    resource.malloc(100)
            assert source.live_bytes == 0
            if code == 999:
                assert (caught.value.code, caught.value.call) == (999, "cudaMallocAsync")
        pointer = resource.malloc(64)
        with pytest.MonkeyPatch.context() as patch:
            refuse(patch, sim, "free_async", 999)
            del pointer
            kept = resource.malloc(32)
        assert source.live_bytes == 96
        source._state.retire.drain()
        assert source.live_bytes == 32
        if layers:
            refused = [record.result.kind for record in sink.snapshot() if record.result]
            assert refused == ["OutOfMemory", "StreamMisuse", "Driver", "Driver"]
        del kept
        drain(resource)


@pytest.mark.parametrize("shortcuts", ["shortcuts"], indirect=True)
def test_a_question_that_a_shortcut_cannot_answer_is_put_to_the_method(sim: Any, shortcuts: Any) -> None:
    resource = AsyncCudaResource()
    with make_current(new_stream()):
        warm(resource)
        asked: list[int] = []

        def captures(stream: int) -> bool:
            asked.append(stream)
            raise Refused(901)

        quick = shortcuts(sim)
        quick.captures = captures
        other = StatisticsResource(resource)
        warm(other)
        kept = other.malloc(64)
        assert asked
        assert on_the_hot_way(kept)
        quick.on = False
        asked.clear()
        more = other.malloc(64)
        assert not asked
        del kept, more
    drain(resource)


def test_closing_under_living_arrays(resource: Any, stream: Any) -> None:
    warm(resource)
    pointer = resource.malloc(64)
    with pytest.warns(ResourceWarning, match="1 in use by CuPy arrays"):
        resource.close()
    with pytest.raises(ClosedError):
        resource.malloc(64)
    fill(pointer.mem, 1, stream, 64)
    del pointer
    drain(resource)
    assert resource.live_bytes == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_report_M67_a_forked_child(sim: Any) -> None:
    """Calls no driver, also where the parent asks no questions any more."""
    resource = AsyncCudaResource()
    made = new_stream()
    with make_current(made):
        warm(resource)
        pointer, dead = resource.malloc(64), resource.malloc(32)
        del dead
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            sim.stream_current = lambda device: made  # as CuPy does, which does not notice
            said = "nothing"
            try:
                with testing.faults.counts() as counted:
                    try:
                        resource.malloc(64)
                    except UsageError as error:
                        said = "refused" if "forked child" in str(error) else str(error)
                    del pointer
                    gc.collect()
                    drain(resource)
                said += f" {counted['malloc_async']} {counted['free_async']}"
            finally:
                os.write(write, said.encode())
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
    assert said == "refused 0 0"
    assert resource.live_bytes == 96
    del pointer
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


# --- layers -----------------------------------------------------------------------------------------------------


def test_layers_that_come_and_go_leave_nothing_behind(driver: Any, stream: Any) -> None:
    """The resource below may live on for ever."""
    source, made = AsyncCudaResource(), []
    inner = GlobalDeviceBudget(source, MIB)
    for _ in range(5):
        top = StatisticsResource(inner)
        warm(top)
        kept = top.malloc(1)
        made.append(weakref.ref(top))
        del top
        gc.collect()
        assert made[-1]() is not None, "its memory lives"
        del kept
        drain(source)
        assert source.pending_free_bytes > 0
        source.reap_pending()
        assert inner.reserved_bytes == 0
        gc.collect()
        assert made[-1]() is None
    warm(inner)
    assert len(source._desks) == len(inner._desks) == 1


def test_every_layer_counts(driver: Any, stream: Any) -> None:
    home = cuglue.as_stream(stream)
    sink = InMemorySink()
    budget = GlobalDeviceBudget(AsyncCudaResource(), MIB)
    counting = StatisticsResource(budget)
    top = LoggingResource(counting, sink)
    warm(top)
    budget.reap_pending()
    warm(top)
    sink.clear()
    counting.reset()
    reserved = budget.reserved_bytes
    with counting.scope() as scope:
        first, second = top.malloc(1000), top.malloc(24)
        generation = first.mem.generation
        assert counting.statistics().current_bytes == 1024
        assert budget.reserved_bytes == reserved + 1024
        del first, second
        drain(top)
    assert (scope.statistics().peak_bytes, scope.statistics().total_count) == (1024, 2)
    assert counting.statistics().current_count == 0
    assert budget.reserved_bytes == reserved + 1024, "pending still"
    budget.reap_pending()
    assert budget.reserved_bytes == 0
    records = sink.snapshot()
    assert [record.action for record in records] == [Action.ALLOCATE] * 2 + [Action.DEALLOCATE] * 2
    assert [record.bytes for record in records] == [1000, 24, 1000, 24]
    assert records[0].generation == records[2].generation == generation
    assert records[1].generation == records[3].generation != generation
    assert {(r.stream_id, r.tag, r.result) for r in records} == {(home.id, "untagged", None)}
    assert records[0].ptr == records[2].ptr


def test_what_was_asked_about_is_counted_like_the_rest(driver: Any, stream: Any) -> None:
    sink = InMemorySink()
    budget = GlobalDeviceBudget(StatisticsResource(DirectCudaResource()), MIB)
    top = LoggingResource(budget, sink)
    warm(top)
    pointer = top.malloc(500)
    assert block_of(pointer.mem).resource is top  # type: ignore[union-attr]
    assert budget.reserved_bytes == 500
    bottom(top).deallocate(pointer.mem)
    assert budget.reserved_bytes == 0
    assert budget.upstream.statistics().current_bytes == 0  # type: ignore[attr-defined]
    assert sink.snapshot()[-1].generation == pointer.mem.generation
    del pointer


def test_two_allocator_functions_over_one_stack(driver: Any, stream: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), MIB)
    top = StatisticsResource(budget)
    warm(budget)
    warm(top)
    top.reap_pending()
    a, b = budget.malloc(100), top.malloc(1000)
    assert budget.reserved_bytes == 1100
    assert top.statistics().current_bytes == 1000
    del a
    drain(top)
    assert budget.upstream.bytes_outstanding == 1100  # type: ignore[attr-defined]
    assert top.statistics().current_bytes == 1000
    top.reap_pending()
    assert budget.reserved_bytes == 1000
    del b
    drain(top)
    top.reap_pending()
    assert budget.reserved_bytes == 0


def test_B29_a_budget_reaps_before_it_refuses(driver: Any, stream: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), MIB)
    warm(budget)
    for _ in range(20):
        pointer = budget.malloc(700 << 10)
        del pointer
    pointer = budget.malloc(MIB - 1000)
    with pytest.raises(OutOfBudget) as caught:
        budget.malloc(2000)
    assert (caught.value.current, caught.value.requested, caught.value.limit) == (MIB - 1000, 2000, MIB)
    assert budget.reserved_bytes == MIB - 1000
    with testing.faults.fail("malloc_async", code=999), pytest.raises(DriverError):
        budget.malloc(100)
    assert budget.reserved_bytes == MIB - 1000
    with testing.faults.fail("malloc_async"):
        second = budget.malloc(100)
    assert budget.reserved_bytes == MIB - 900
    del pointer, second


def test_B29_a_direct_resource_discharges_at_once(driver: Any, stream: Any) -> None:
    budget = GlobalDeviceBudget(DirectCudaResource(), MIB)
    warm(budget)
    for _ in range(5):
        pointer = budget.malloc(MIB)
        assert budget.remaining == 0
        del pointer
        drain(budget)
        assert budget.remaining == MIB


def test_B29_a_budget_does_no_more_than_it_needs(
    driver: Any, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = AsyncCudaResource()
    budget = GlobalDeviceBudget(inner, MIB)
    warm(budget)
    for looks in (0, 1):
        inner.reap_pending()
        warm(budget)
        inner.reap_pending()
        pointer = budget.malloc(MIB)
        del pointer
        drain(budget)
        looked: list[int] = []

        def look(looked: list[int] = looked) -> None:
            looked.append(1)
            inner.reap_pending()
            monkeypatch.setattr(inner, "reap_pending", lambda: pytest.fail("nothing was left to wait for"))

        with monkeypatch.context() as patch:
            patch.setattr(budget, "_look", look)
            if not looks:
                inner.reap_pending()  # somebody else does
            pointer = budget.malloc(MIB)
        monkeypatch.undo()
        assert len(looked) == looks
        del pointer
        drain(budget)


def test_B30_failures_are_logged(driver: Any, stream: Any) -> None:
    sink = InMemorySink()
    top = LoggingResource(AsyncCudaResource(), sink)
    warm(top)
    pointer = top.malloc(64)
    sink.clear()
    with testing.faults.fail("malloc_async", code=999), pytest.raises(DriverError):
        top.malloc(100)
    with testing.faults.fail("free_async"):
        del pointer
        drain(top)
    refused, kept = sink.snapshot()
    assert (refused.action, refused.ptr, refused.bytes, refused.generation) == (
        Action.ALLOCATE,
        None,
        100,
        None,
    )
    assert refused.result is not None
    assert (kept.action, kept.bytes) == (Action.DEALLOCATE, 64)
    assert kept.result is not None
    assert bottom(top).live_bytes == 64
    bottom(top)._state.retire.drain()
    assert bottom(top).live_bytes == 0


def test_a_failure_callback_is_asked(driver: Any, stream: Any) -> None:
    asked: list[Any] = []
    resource = FailureCallbackResource(
        AsyncCudaResource(), lambda failure: asked.append(failure) or len(asked) < 3
    )
    warm(resource)
    with testing.faults.fail("malloc_async", persistent=True), pytest.raises(OutOfMemory):
        resource.malloc(MIB)
    assert [(failure.need, failure.attempt, failure.tag) for failure in asked] == [
        (MIB, attempt, "untagged") for attempt in (1, 2, 3)
    ]
    asked.clear()
    warm(resource)
    with testing.faults.fail("malloc_async"):
        first = resource.malloc(64)
    assert not asked, "the resource below tries once more by itself"
    warm(resource)
    with testing.faults.fail("malloc_async", persistent=True) as failure:
        resource._callback = lambda _: setattr(failure, "_persistent", False) or True
        second = resource.malloc(64)
    assert on_the_hot_way(first)
    assert on_the_hot_way(second)
    del first, second


@pytest.mark.parametrize("layer", [lambda below: LoggingResource(below, InMemorySink()), TrackingResource])
def test_who_asks_before_a_layer_noted_it_sees_the_same_generation(
    driver: Any, stream: Any, monkeypatch: pytest.MonkeyPatch, layer: Any
) -> None:
    """As another thread may, that looks at all blocks while an allocation is on its way up."""
    source = AsyncCudaResource()
    middle = StatisticsResource(source)
    resource = layer(middle)
    monkeypatch.setattr(middle, "_tell_scopes", lambda *figures: source.live_blocks())
    with middle.scope():
        warm(resource)
        pointer = resource.malloc(64)
    assert on_the_hot_way(pointer)
    noted = resource.sink.snapshot() if isinstance(resource, LoggingResource) else resource.live()
    found = noted[-1].generation if isinstance(resource, LoggingResource) else noted[-1].id.generation
    assert found == pointer.mem.generation
    del pointer, noted


def test_lines_are_tracked(driver: Any, stream: Any) -> None:
    resource = TrackingResource(StatisticsResource(AsyncCudaResource()))
    warm(resource)
    before = resource.snapshot()
    pointer, asked = resource.malloc(64), resource.malloc(128)
    resource.annotate(asked.mem, "a reason")
    leaked = resource.diff(before, resource.snapshot()).leaked
    assert [(found.nbytes, found.tag, found.notes) for found in leaked] == [
        (64, "untagged", ()),
        (128, "untagged", ("a reason",)),
    ]
    assert all("test_hot.py" in found.where and "test_lines" in found.where for found in leaked)
    assert [found.id for found in leaked] == [pointer.mem.id, asked.mem.id]
    with testing.faults.fail("free_async"):
        del pointer
        drain(resource)
    assert len(resource.live()) == 2, "it was refused"
    bottom(resource)._state.retire.drain()
    assert [found.nbytes for found in resource.live()] == [128]
    del asked
    assert resource.live() == []


class Interrupted(BaseException):
    """What stops a sink in the middle."""


class Sink(InMemorySink):
    """Can be interrupted."""

    on: Action | None = None

    def __init__(self) -> None:
        super().__init__()
        append = self.emit

        def emit(record: Any) -> None:
            if record.action is self.on:
                self.on = None
                raise Interrupted
            append(record)

        self.emit = emit  # type: ignore[assignment]


@pytest.mark.parametrize("refused", [False, True])
def test_an_interrupted_sink_loses_no_memory(driver: Any, stream: Any, refused: bool) -> None:
    sink = Sink()
    inner = LoggingResource(StatisticsResource(AsyncCudaResource()), sink)
    budget = GlobalDeviceBudget(StatisticsResource(inner), MIB)
    warm(budget)
    budget.reap_pending()
    warm(budget)
    before = budget.reserved_bytes
    sink.on = Action.ALLOCATE
    if refused:
        with testing.faults.fail("free_async"), pytest.raises(Interrupted) as caught:
            budget.malloc(100)
        assert "giving the memory back failed too" in caught.value.__notes__[0]
        bottom(budget)._state.retire.drain()
    else:
        with pytest.raises(Interrupted):
            budget.malloc(100)
    assert bottom(budget).live_bytes == 0
    assert budget.reserved_bytes == before
    pointer = budget.malloc(100)
    sink.on = Action.DEALLOCATE
    with testing.trace(only={"free_async"}) as calls:
        del pointer
        with pytest.raises(Interrupted):
            budget.malloc(10)
        drain(budget)
    assert len(calls) == 1, "it was free already"
    budget.reap_pending()
    assert budget.reserved_bytes == 0
    for counting in (budget.upstream, inner.upstream):
        assert counting.statistics().current_bytes == 0  # type: ignore[attr-defined]


def test_a_drain_that_a_sink_interrupts_frees_nothing_twice(driver: Any, stream: Any) -> None:
    sink = Sink()
    resource = StatisticsResource(LoggingResource(AsyncCudaResource(), sink))
    warm(resource)
    pointer = resource.malloc(100)
    sink.on = Action.DEALLOCATE
    with testing.trace(only={"free_async"}) as calls:
        del pointer
        with pytest.raises(Interrupted):
            drain(resource)
        drain(resource)
        bottom(resource)._state.retire.drain()
    assert len(calls) == 1
    assert resource.statistics().current_bytes == 0


def test_a_subclass_that_changes_more_goes_the_long_way(driver: Any, stream: Any) -> None:
    class Mine(StatisticsResource):
        seen = 0

        def _given(self, block: Any) -> None:
            self.seen += 1
            super()._given(block)

    resource = Mine(AsyncCudaResource())
    for number in range(3):
        assert not on_the_hot_way(resource.malloc(64))
        drain(resource)
        assert resource.seen == number + 1


def test_threads(driver: Any) -> None:
    """Counters of every layer are exact, and no memory is lost, while threads allocate, ask and drop."""
    sink = InMemorySink()
    budget = GlobalDeviceBudget(AsyncCudaResource(), 64 * MIB)
    counting = StatisticsResource(budget)
    top = LoggingResource(counting, sink)
    streams = [new_stream() for _ in range(2)]
    problems: list[BaseException] = []

    def work(number: int) -> None:
        held: list[Any] = []
        try:
            with make_current(streams[number % 2]):
                for turn in range(400):
                    held.append(top.malloc(512 + turn))
                    if turn % 5 == 0:
                        assert held[-1].mem.state is BlockState.LIVE
                    if turn % 40 == 0:
                        bottom(top).live_blocks()
                    if turn % 50 == 0:
                        top.reap_pending(block=turn % 100 == 0)
                    if len(held) > 8:
                        held.clear()
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert problems == []
    gc.collect()
    drain(top)
    top.reap_pending()
    now = counting.statistics()
    assert (now.current_bytes, now.current_count, now.total_count) == (0, 0, 1600)
    assert now.total_bytes == 4 * sum(512 + turn for turn in range(400))
    assert budget.reserved_bytes == 0
    assert bottom(top).bytes_outstanding == 0
    assert not bottom(top).live_blocks()
    done = [record for record in sink.snapshot() if record.action is not Action.REAP_PENDING]
    assert len(done) == 3200
    assert len({record.generation for record in done}) == 1600
