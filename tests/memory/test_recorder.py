"""LaunchRecorder, cuglue.use, the way from an array to its block, and StreamPool (contracts B31, B34-B40)."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import cupy
import pytest
from memory_tools import contents, fill, in_thread, make_current, new_stream

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    DebugGuardResource,
    DirectCudaResource,
    GlobalDeviceBudget,
    LaunchRecorder,
    StreamPool,
    testing,
)
from cuglue.core.block import OPEN, Block
from cuglue.driver.protocol import CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    CaptureError,
    DriverError,
    SeveralErrors,
    StreamMisuse,
    StreamPoolCapacity,
    UseAfterFree,
)
from cuglue.exchange import ArrayView, BlockOwner
from cuglue.layout import Layout
from cuglue.memory.cupy_plug import block_of
from cuglue.memory.lookup import block_at, block_behind

READ, WRITE = Access.READ, Access.WRITE
WAITS = {"stream_wait_event"}


@pytest.fixture
def resource(driver: Any) -> AsyncCudaResource:
    return AsyncCudaResource()


@pytest.fixture
def streams(driver: Any) -> list[Any]:
    return [cuglue.as_stream(new_stream()) for _ in range(3)]


def entries(block: Any) -> dict[Any, int]:
    return dict(block.reads or {})


# --- recorder ---------------------------------------------------------------------------------------------------


def test_B35_it_keeps_no_block_alive(resource: Any, streams: Any) -> None:
    pointer = resource.malloc(64)
    gone = weakref.ref(pointer.mem)
    recorder = LaunchRecorder(streams[0]).read(pointer.mem)
    assert recorder.recorded_count == 1
    del pointer
    resource._state.retire.run_forgotten()
    resource.reap_pending()
    gc.collect()
    assert gone() is None


def test_B35_calls_chain(resource: Any, streams: Any) -> None:
    a, b, c = (resource.allocate(64) for _ in range(3))
    recorder = LaunchRecorder(streams[0])
    assert recorder.read(a).write(b).read_write(c) is recorder
    assert recorder.recorded_count == 3
    recorder.preflight()
    recorder.commit()
    for block in (a, b, c):
        resource.deallocate(block)


def test_B35_permissive_leaves_strangers_out(driver: Any, streams: Any) -> None:
    stranger = SimpleNamespace(__cuda_array_interface__={"data": (0x1234, False)}, nbytes=4)
    recorder = LaunchRecorder(streams[0], strict=False).read(stranger).write(object())
    assert recorder.recorded_count == 0
    recorder.preflight()
    recorder.commit()


def test_B35_strict_remembers_the_first_stranger(resource: Any, streams: Any) -> None:
    block = resource.allocate(64)
    recorder = LaunchRecorder(streams[0]).read(block).write("one").read(2)
    assert recorder.recorded_count == 1
    with testing.trace(only=WAITS) as calls:
        for _ in range(2):
            with pytest.raises(StreamMisuse, match="untracked buffer rejected: str"):
                recorder.preflight()
    assert calls == []
    resource.deallocate(block)


def test_B35_empty_arrays_are_no_strangers(resource: Any, streams: Any) -> None:
    with resource.as_cupy_allocator():
        empty = cupy.ndarray((0, 3), "f4")
    recorder = LaunchRecorder(streams[0]).read(empty)
    recorder.preflight()
    recorder.commit()


def test_B35_exports_of_ours_are_accepted(resource: Any, streams: Any) -> None:
    block = resource.allocate(64, streams[1])
    view = ArrayView(BlockOwner(block), block.ptr, Layout.of((16,), "f4"))
    with LaunchRecorder(streams[0]).write(view) as recorder:
        assert recorder.recorded_count == 1
    assert block.write_stream is streams[0]
    del view
    resource.deallocate(block)


def test_B36_in_order_another_resource_a_stranger_no_tracking(resource: Any, streams: Any) -> None:
    direct = DirectCudaResource()
    block, other = direct.allocate(64), resource.allocate(64)
    recorder = LaunchRecorder(streams[0]).read(block).read(other).read("stranger")
    with testing.faults.counts() as counted:
        with pytest.raises(StreamMisuse, match="memory of"):
            recorder.preflight(resource)
        with pytest.raises(StreamMisuse, match="untracked buffer"):
            recorder.preflight()
        with pytest.raises(StreamMisuse, match="unsupported"):
            LaunchRecorder(streams[0]).read(other).read(block).preflight()
    assert not counted, "refused before any work"
    assert resource._tickets is None
    direct.deallocate(block)
    resource.deallocate(other)


def test_B36_one_prepare_for_each_block(resource: Any, streams: Any) -> None:
    home, user, _ = streams
    blocks = [resource.allocate(64, home) for _ in range(3)]
    recorder = LaunchRecorder(user)
    for block in (*blocks, *blocks):
        recorder.read(block)
    with testing.trace(only={"stream_wait_event", "event_record"}) as calls:
        recorder.preflight(resource)
    assert [call.method for call in calls] == ["event_record", "stream_wait_event"], (
        "one event covers all three"
    )
    recorder.commit()
    assert all(user in entries(block) for block in blocks)
    for block in blocks:
        resource.deallocate(block)


def test_B36_a_failed_preflight_is_none(resource: Any, streams: Any) -> None:
    home, user, _ = streams
    good, bad = resource.allocate(64, home), resource.allocate(64, home)
    recorder = LaunchRecorder(user).write(good).write(bad)
    resource.deallocate(bad)
    with pytest.raises(UseAfterFree):
        recorder.preflight()
    assert resource._tickets._open == {}, "what was prepared is taken back"
    recorder.read(good)
    with pytest.raises(StreamMisuse, match="without a successful preflight"):
        recorder.commit()
    assert good.write_stream is home
    resource.deallocate(good)


def test_B37_accesses_of_one_block_merge(resource: Any, streams: Any) -> None:
    home, user, _ = streams
    block = resource.allocate(64, home)
    recorder = LaunchRecorder(user).read(block).write(block)
    assert recorder.recorded_count == 1
    assert [use.access for use in recorder._uses.values()] == [Access.READ_WRITE]
    recorder.preflight()
    recorder.commit()
    assert (block.write_stream, entries(block)) == (user, {})
    resource.deallocate(block)


def test_B37_another_generation_is_another_block(resource: Any, streams: Any) -> None:
    stream = streams[0]
    old = resource.allocate(4096, stream)
    resource.deallocate(old)
    new = resource.allocate(4096, stream)
    assert new.ptr == old.ptr, "the address must be reused for this test to mean anything"
    recorder = LaunchRecorder(stream).read(new)
    first = next(iter(recorder._uses))
    resource.deallocate(new)
    newest = resource.allocate(4096, stream)
    recorder.read(newest)
    assert recorder.recorded_count == 2
    assert list(recorder._uses) == [first, newest.id], "in order of appearance"
    resource.deallocate(newest)


@pytest.mark.parametrize("strict", [True, False])
def test_B38_recorded_after_preflight(resource: Any, streams: Any, strict: bool) -> None:
    """An error at the call, and the launch in flight is noted all the same."""
    home, user, _ = streams
    a, late = resource.allocate(64, home), resource.allocate(64, home)
    recorder = LaunchRecorder(user, strict=strict).write(a)
    recorder.preflight()
    fill(a, 1, user)
    with pytest.raises(StreamMisuse, match="recorded after preflight"):
        recorder.read(late)
    recorder.commit()
    assert a.write_stream is user
    assert entries(late) == {}
    for block in (a, late):
        resource.deallocate(block)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("preflight", [True, False])
def test_B39_an_empty_recorder(driver: Any, streams: Any, strict: bool, preflight: bool) -> None:
    recorder = LaunchRecorder(streams[0], strict=strict)
    if preflight:
        recorder.preflight()
    recorder.commit()


def test_B39_without_preflight_nothing_is_noted(resource: Any, streams: Any) -> None:
    block = resource.allocate(64, streams[0])
    recorder = LaunchRecorder(streams[1]).write(block)
    with pytest.raises(StreamMisuse, match="without a successful preflight"):
        recorder.commit()
    assert block.write_stream is streams[0]
    resource.deallocate(block)


def test_B39_a_recorder_is_for_one_launch(resource: Any, streams: Any) -> None:
    block = resource.allocate(64, streams[0])
    recorder = LaunchRecorder(streams[1]).read(block)
    recorder.preflight()
    recorder.commit()
    for call in (recorder.commit, recorder.preflight):
        with pytest.raises(StreamMisuse, match=r"after commit"):
            call()
    with pytest.raises(StreamMisuse):
        recorder.read(block)
    resource.deallocate(block)


def test_B39_a_failing_finish_leaves_no_other_block_unnoted(driver: Any, resource: Any, streams: Any) -> None:
    home, user, _ = streams
    a, gone, b = (resource.allocate(64, home) for _ in range(3))
    recorder = LaunchRecorder(user).write(a).write(gone).write(b)
    recorder.preflight()
    resource.deallocate(gone)
    with testing.trace(only={"stream_synchronize"}) as calls, pytest.raises(UseAfterFree):
        recorder.commit()
    assert [call.args[0] for call in calls] == [user.handle], "what is not noted is waited for"
    assert a.write_stream is b.write_stream is user
    for block in (a, b):
        resource.deallocate(block)


def test_B39_several_failures_are_one_error(resource: Any, streams: Any) -> None:
    blocks = [resource.allocate(64, streams[0]) for _ in range(2)]
    recorder = LaunchRecorder(streams[1]).write(blocks[0]).write(blocks[1])
    recorder.preflight()
    for block in blocks:
        resource.deallocate(block)
    with pytest.raises(SeveralErrors) as caught:
        recorder.commit()
    assert [type(e) for e in caught.value.errors] == [UseAfterFree, UseAfterFree]


def test_B40_dropped_without_commit(resource: Any, streams: Any) -> None:
    """No exception, and nobody waits for a finish that never comes."""
    block = resource.allocate(64, streams[0])
    recorder = LaunchRecorder(streams[1]).write(block)
    recorder.preflight()
    del recorder
    gc.collect()
    resource._state.retire.drain()
    assert resource._tickets._open == {}
    LaunchRecorder(streams[1]).write(block)
    gc.collect()
    resource.deallocate(block)


def test_B40_as_a_context_manager(driver: Any, resource: Any, streams: Any) -> None:
    home, user, _ = streams
    block = resource.allocate(4096, home)
    fill(block, 1, home)
    with LaunchRecorder(user).write(block):
        fill(block, 2, user)
    assert block.write_stream is user
    with LaunchRecorder(home).read(block):
        assert (contents(block, home) == 2).all()
    resource.deallocate(block)


def test_B40_an_exception_before_the_end(resource: Any, streams: Any) -> None:
    """Work may be in flight, so it is noted; the body's exception is the one that leaves."""
    home, user, _ = streams
    block = resource.allocate(64, home)
    recorder = LaunchRecorder(user).write(block)

    def body() -> None:
        with recorder:
            fill(block, 2, user)
            raise KeyError("body")

    with pytest.raises(KeyError):
        body()
    assert block.write_stream is user
    other = resource.allocate(64, home)
    second = LaunchRecorder(user).write(other)

    def lost() -> None:
        with second:
            resource.deallocate(other)
            raise KeyError("body")

    with pytest.raises(KeyError) as caught:
        lost()
    assert "failed too" in "".join(caught.value.__notes__)
    resource.deallocate(block)


def test_a_recorder_orders_arrays_with_their_home_stream(driver: Any, resource: Any) -> None:
    """CuPy tells nobody what it queues there: joined both ways, never elided."""
    home, user = new_stream(), cuglue.as_stream(new_stream())
    with make_current(home), resource.as_cupy_allocator():
        array = cupy.ndarray(4096, "u1")
    block: Any = array.data.mem
    for value in (1, 2):
        driver.fill_async(block.ptr, value, 4096, home.ptr)  # as CuPy does it: nobody counts
        with LaunchRecorder(user).read_write(array[::2]):
            driver.fill_async(block.ptr, value + 10, 4096, user.handle)
        driver.fill_async(block.ptr, value + 20, 4096, home.ptr)
    assert (contents(block, home, 4096) == 22).all()
    del array, block


def test_recorders_over_every_decorator(driver: Any, streams: Any) -> None:
    stack = GlobalDeviceBudget(DebugGuardResource(AsyncCudaResource()), 1 << 20)
    block = stack.allocate(64, streams[0])
    with LaunchRecorder(streams[1]).write(block):
        fill(block, 3, streams[1])
    with LaunchRecorder(streams[2]).read(block):
        assert (contents(block, streams[2]) == 3).all()
    stack.deallocate(block)
    stack.reap_pending()


def test_a_recorder_on_memory_of_no_resource(driver: Any, streams: Any) -> None:
    """A mapped buffer, say: its block keeps the uses itself."""
    home, user, _ = streams
    ptr = driver.malloc(64, 0)
    block = Block(ptr, 64, home, home.submit())
    with LaunchRecorder(user).write(block):
        fill(block, 1, user)
    assert block.write_stream is user
    recorder = LaunchRecorder(user).write(block)
    recorder.preflight()
    block.advance("deallocate")
    with pytest.raises(UseAfterFree):
        recorder.commit()
    driver.free(ptr, 0)


# --- use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("access", [READ, WRITE])
def test_use_before_or_after_the_launch(driver: Any, when: str, access: Access) -> None:
    """report M01, M03: the memory gets no new owner before the other stream's kernel is done."""
    resource = AsyncCudaResource()
    home, other = new_stream(), cuglue.as_stream(new_stream())
    with make_current(home):
        pointer = resource.malloc(4096)
        driver.fill_async(pointer.ptr, 1, 4096, home.ptr)
        home_record = cuglue.as_stream(home)
        home_record.join(other)  # a wait that must not make the later one look needless
        if when == "before":
            cuglue.use(pointer, other, access)
        else:
            other.join(home_record)
        with testing.Latch(other.handle) as latch:
            driver.fill_async(pointer.ptr, 2, 4096, other.handle)  # nobody counts this
            if when == "after":
                cuglue.use(pointer, other, access)
            address = pointer.ptr
            del pointer
            new = resource.malloc(4096)
            assert new.ptr == address, "the address must be reused for this test to mean anything"
            driver.fill_async(new.ptr, 3, 4096, home.ptr)
            latch.release()
    assert (contents(new.mem, home, 4096) == 3).all()
    del new


def test_use_orders_after_what_cupy_queued(driver: Any) -> None:
    resource = AsyncCudaResource()
    home, other = new_stream(), cuglue.as_stream(new_stream())
    with make_current(home):
        pointer = resource.malloc(64)
    for value in (1, 2):
        driver.fill_async(pointer.ptr, value, 64, home.ptr)
        cuglue.use(pointer, other, READ)
        assert (contents(pointer.mem, other, 64) == value).all()
        home_record = cuglue.as_stream(home)
        home_record.join(other)
    del pointer


def test_a_use_that_goes_on_is_waited_for_each_time(driver: Any, resource: Any, streams: Any) -> None:
    home, user, other = streams
    block = resource.allocate(64, home)
    cuglue.use(block, user, READ)
    assert entries(block) == {user: OPEN}
    for _ in range(3):
        with testing.trace(only=WAITS) as calls:
            resource.prepare_block_use(block.id, other, READ)
        resource.cancel_block_use(block.id, other, READ)
    with testing.trace(only=WAITS) as calls:
        resource.prepare_block_use(block.id, other, WRITE)
    assert len(calls) == 1
    resource.cancel_block_use(block.id, other, WRITE)
    resource.record_block_use(block, user)
    assert entries(block) == {user: OPEN}, "a use that is over does not end the one that goes on"
    with testing.trace(only=WAITS) as calls:
        resource.deallocate(block)
    assert len(calls) == 1


def test_use_on_the_home_stream_costs_nothing(driver: Any, resource: Any, streams: Any) -> None:
    block = resource.allocate(64, streams[0])
    with testing.faults.counts() as counted:
        cuglue.use(block, streams[0], WRITE)
        resource.deallocate(block)
    assert not {"stream_wait_event", "event_record"} & set(counted)


def test_use_works_over_a_resource_without_tracking(driver: Any, streams: Any) -> None:
    direct = DirectCudaResource(mode="async")
    block = direct.allocate(64, streams[0])
    cuglue.use(block, streams[1], READ)
    with testing.trace(only=WAITS) as calls:
        direct.deallocate(block)
    assert len(calls) == 1


def test_B34_use_of_memory_that_nobody_tracks(driver: Any, streams: Any) -> None:
    for stranger in (object(), None, SimpleNamespace(__cuda_array_interface__={"data": (0x50, False)})):
        with pytest.raises(StreamMisuse, match="nobody tracks"):
            cuglue.use(stranger, streams[0])


def test_use_of_nothing(resource: Any, streams: Any) -> None:
    with resource.as_cupy_allocator():
        cuglue.use(cupy.ndarray(0, "f4"), streams[0])


def test_use_with_bad_arguments(resource: Any, streams: Any) -> None:
    block = resource.allocate(64)
    with pytest.raises(ValueError, match="9"):
        cuglue.use(block, streams[0], 9)  # type: ignore[arg-type]
    with pytest.raises(StreamMisuse):
        cuglue.use(block, "stream")
    resource.deallocate(block)


def test_use_while_a_stream_captures(sim: Any) -> None:
    resource = AsyncCudaResource()
    home, user = (cuglue.as_stream(sim.Stream()) for _ in range(2))
    block = resource.allocate(64, home)
    sim.capture_begin(user.handle, CaptureMode.RELAXED)
    with pytest.raises(CaptureError):
        cuglue.use(block, user)
    assert entries(block) == {}
    sim.graph_destroy(sim.capture_end(user.handle))
    resource.deallocate(block)
    resource.reap_pending()


class Map:
    """Something with a block that also wants to know its users, as a map does."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.recorded: list[Any] = []

    def record(self, stream: Any) -> None:
        self.recorded.append(stream)


def test_use_tells_a_map(resource: Any, streams: Any) -> None:
    mapped = Map(resource.allocate(64, streams[0]))
    cuglue.use(mapped, streams[1])
    assert mapped.recorded == [streams[1]]
    resource.deallocate(mapped.block)


# --- from an array to its block ---------------------------------------------------------------------------------


def test_any_view_of_an_array(resource: Any) -> None:
    with resource.as_cupy_allocator():
        array = cupy.ndarray((8, 8), "f4")
        assert block_behind(cupy.ndarray(0, "f4")) is None
    block = block_of(array.data.mem)
    for view in (
        array,
        array[2:, ::2],
        array.T,
        array.ravel(),
        array.view("u1"),
        array.data,
        array.data.mem,
        block,
    ):
        assert block_behind(view) is block
    del array, block, view


def test_arrays_made_of_arrays(resource: Any) -> None:
    """Through the owner that CuPy was given, as many times as it was given one."""
    with resource.as_cupy_allocator():
        array = cupy.ndarray(64, "u1")
    block = block_of(array.data.mem)
    for _ in range(3):
        memory = cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, array, 0)
        array = cupy.ndarray(64, "u1", memptr=cupy.cuda.MemoryPointer(memory, 0))
        assert block_behind(array[10:]) is block
    del array, memory, block


def test_arrays_of_views(resource: Any, streams: Any) -> None:
    block = resource.allocate(64, streams[0])
    view = ArrayView(BlockOwner(block), block.ptr, Layout.of((16,), "f4"))
    memory = cupy.cuda.UnownedMemory(block.ptr, 64, view, 0)
    array = cupy.ndarray(16, "f4", memptr=cupy.cuda.MemoryPointer(memory, 0))
    assert block_behind(array) is block_behind(view) is block
    del view, memory, array
    resource.deallocate(block)


def test_addresses_are_looked_up_among_the_living(resource: Any, streams: Any) -> None:
    old = resource.allocate(4096, streams[0])
    at = SimpleNamespace(__cuda_array_interface__={"data": (old.ptr + 100, False)})
    assert block_behind(at) is block_at(old.ptr + 4095) is old
    assert block_at(old.ptr + 4096) is not old
    resource.deallocate(old)
    assert block_behind(at) is None
    new = resource.allocate(4096, streams[0])
    assert new.ptr == old.ptr, "the address must be reused for this test to mean anything"
    assert block_behind(at) is new
    resource.deallocate(new)


def test_the_smallest_block_around_an_address_is_meant(driver: Any) -> None:
    """A guard's block lies in a larger one below it."""
    guard = DebugGuardResource(AsyncCudaResource())
    block = guard.allocate(64)
    assert block_at(block.ptr + 1) is block
    guard.deallocate(block)
    guard.reap_pending()


def test_torch_tensors_by_address(resource: Any, streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        def __init__(self, ptr: int, kind: str) -> None:
            self._ptr, self.device = ptr, SimpleNamespace(type=kind)

        def data_ptr(self) -> int:
            return self._ptr

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    block = resource.allocate(4096, streams[0])
    assert block_behind(Tensor(block.ptr + 8, "cuda")) is block
    assert block_behind(Tensor(block.ptr + 8, "cpu")) is None
    cuglue.use(Tensor(block.ptr, "cuda"), streams[1], READ)
    assert entries(block) == {streams[1]: OPEN}
    resource.deallocate(block)


def test_exporters_that_refuse(driver: Any) -> None:
    class Refuses:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("not now")

    assert block_behind(Refuses()) is None


# --- StreamPool -------------------------------------------------------------------------------------------------


def test_B31_ids_are_distinct_from_1_to_the_limit(driver: Any) -> None:
    pool = StreamPool(max_streams=4)
    ids = [pool.acquire() for _ in range(4)]
    assert ids == [1, 2, 3, 4]
    streams = [pool.resolve(number) for number in ids]
    assert len({stream.handle for stream in streams if stream is not None}) == 4
    with pytest.raises(StreamPoolCapacity) as caught:
        pool.acquire()
    assert caught.value.max_streams == 4
    default = pool.resolve(0)
    assert default is not None
    assert default.handle == 0


def test_B31_ids_are_never_used_again(driver: Any) -> None:
    pool = StreamPool(max_streams=1)
    first = pool.acquire()
    pool.release(first)
    assert pool.resolve(first) is None
    assert pool.acquire() == 2
    pool.release(99)
    assert len(pool) == 1


def test_B31_unknown_ids(driver: Any) -> None:
    pool = StreamPool()
    assert pool.max_streams == 16
    for number in (1, -1, 99):
        assert pool.resolve(number) is None


@pytest.mark.parametrize("most", [0, -5])
def test_B31_below_one_is_one(driver: Any, most: int) -> None:
    assert StreamPool(max_streams=most).max_streams == 1


def test_B31_a_failing_driver(driver: Any) -> None:
    pool = StreamPool()
    with testing.faults.fail("stream_create"), pytest.raises(DriverError):
        pool.acquire()
    assert len(pool) == 0
    assert pool.acquire() == 1


def test_B31_threads_get_different_streams(driver: Any) -> None:
    pool = StreamPool(max_streams=8)
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(pool.acquire())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(got) == list(range(1, 9))


def test_B31_streams_are_given_back() -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        pool = StreamPool()
        for _ in range(3):
            pool.acquire()
        assert driver.inventory()["streams"] == 3
        state = cuglue.as_stream(0).state
        del pool
        gc.collect()
        state.retire.drain()
        assert driver.inventory()["streams"] == 0


@pytest.mark.parametrize("make", [AsyncCudaResource, DirectCudaResource])
def test_B12_B19_ints_are_ids_where_a_pool_is_attached(driver: Any, make: Any) -> None:
    pool = StreamPool()
    resource = make(stream_pool=pool)
    number = pool.acquire()
    block = resource.allocate(64, number)
    assert block.alloc_stream is pool.resolve(number)
    resource.deallocate(block)
    block = resource.allocate(64, 0)
    assert block.alloc_stream.handle == 0
    resource.deallocate(block)
    with testing.faults.counts() as counted, pytest.raises(StreamMisuse, match="99"):
        resource.allocate(64, 99)
    assert counted["malloc_async"] == 0


def test_B40_a_dropped_recorder_is_in_nobodys_way(driver: Any) -> None:
    """What it prepared is taken back, without anybody allocating or reaping first."""
    resource = AsyncCudaResource()
    block = resource.allocate(64)
    recorder = LaunchRecorder(new_stream()).write(block)
    recorder.preflight()
    del recorder

    def other() -> float:
        began = time.monotonic()
        with LaunchRecorder(new_stream()).write(block):
            pass
        return time.monotonic() - began

    assert in_thread(other) < 5
    resource.deallocate(block)
    resource.close()


@pytest.mark.parametrize(
    "make",
    [
        AsyncCudaResource,
        DirectCudaResource,
        lambda: DebugGuardResource(AsyncCudaResource()),
        lambda: cuglue.PoolResource(AsyncCudaResource()),
    ],
)
def test_B4_use_of_a_block_that_was_given_back(driver: Any, make: Any) -> None:
    resource = make()
    block = resource.allocate(64)
    resource.deallocate(block)
    again = resource.allocate(64)  # at the same address, mostly
    uses = again.use_count()
    with pytest.raises(UseAfterFree):
        cuglue.use(block, new_stream())
    assert again.use_count() == uses
    resource.deallocate(again)
    resource.close()
    with pytest.raises(UseAfterFree):
        cuglue.use(again, new_stream())


@pytest.mark.parametrize("data", [None, (), ("address", False), (None, False), 5])
def test_an_interface_that_names_no_address_is_nobodys(driver: Any, data: Any) -> None:
    thing = SimpleNamespace(
        __cuda_array_interface__={"data": data, "shape": (1,), "typestr": "|u1", "version": 3}
    )
    assert block_behind(thing) is None
    with pytest.raises(StreamMisuse, match="nobody tracks"):
        cuglue.use(thing, new_stream())
    del thing.__cuda_array_interface__["data"]
    assert block_behind(thing) is None


def test_B36_a_resource_that_looks_like_the_other_is_said_to_be_another(sim: Any) -> None:
    resource = AsyncCudaResource()
    block = resource.allocate(64)
    recorder = LaunchRecorder(0).read(block)
    with pytest.raises(StreamMisuse, match="another resource"):
        recorder.preflight(AsyncCudaResource())
    resource.deallocate(block)
