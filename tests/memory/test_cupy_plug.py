"""Resources as CuPy's allocator, point by point of what CuPy demands (P1 to P15).

On the simulated device the arrays lie in host memory, so nothing here computes with them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import cupy
import numpy as np
import pytest
from memory_tools import fill, in_thread, make_current, new_stream

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    DebugGuardResource,
    DeviceMemoryResource,
    DirectCudaResource,
    GlobalDeviceBudget,
    PoolResource,
    StatisticsResource,
    testing,
)
from cuglue.driver.sim import SimDriver
from cuglue.errors import DriverError, LayoutError, OutOfMemory, UsageError
from cuglue.memory.cupy_plug import block_of, block_types
from cuglue.memory.pool.layouts import Direct, Sliced

FREES = {"free", "free_async"}


@pytest.fixture(params=[DirectCudaResource, AsyncCudaResource])
def resource(request: pytest.FixtureRequest, driver: Any) -> DeviceMemoryResource:
    made: DeviceMemoryResource = request.param()
    return made


@pytest.fixture(autouse=True)
def _allocator_is_restored() -> Iterator[None]:
    before = cupy.cuda.get_allocator()
    yield
    assert cupy.cuda.get_allocator() == before


def drain(resource: Any) -> None:
    """What the next call on our side does."""
    resource._state.retire.run_forgotten()


# --- P1 to P4: the call -----------------------------------------------------------------------------------------


def test_P1_one_positional_size(resource: Any) -> None:
    with resource.as_cupy_allocator():
        pointer = cupy.cuda.alloc(1000)
        array = cupy.ndarray((10, 10), "f4")
    assert resource.bytes_outstanding == 1400
    assert {block.size for block in resource.live_blocks()} == {1000, 400}
    del pointer, array
    drain(resource)


def test_P1_set_allocator(resource: Any) -> None:
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(resource.malloc)
    try:
        assert cupy.cuda.get_allocator() is resource.malloc, "one function, however often it is asked for"
        array = cupy.ndarray(100, "u1")
        assert block_of(array.data.mem) in resource.live_blocks()
    finally:
        cupy.cuda.set_allocator(before)
    del array
    drain(resource)


def test_P2_a_memory_pointer(resource: Any) -> None:
    pointer = resource.malloc(512)
    assert type(pointer) is cupy.cuda.MemoryPointer
    assert pointer.ptr == pointer.mem.ptr != 0
    assert pointer.device_id == 0


def test_P3_the_memory_object_is_the_block(resource: Any) -> None:
    block: Any = resource.malloc(1000).mem
    assert type(block) is block_types()[0]
    assert isinstance(block, cupy.cuda.BaseMemory)
    assert not hasattr(block, "__dict__")
    assert (block.size, block.nbytes, block.device_id, block.device_ordinal) == (1000, 1000, 0, 0)
    assert block.ptr % 512 == 0
    assert block.align >= 256
    assert block.state is BlockState.LIVE
    assert block.tag == "untagged"
    assert weakref.ref(block)() is block
    assert "live" in repr(block)
    assert block.id.ptr == block.ptr


def test_P3_every_address_is_aligned(resource: Any) -> None:
    pointers = [resource.malloc(n) for n in (1, 3, 511, 513, 4097, 100_000)]
    assert all(p.ptr % 512 == 0 for p in pointers)


def test_P4_zero_bytes_know_their_device(resource: Any) -> None:
    with testing.faults.counts() as counted:
        pointer = resource.malloc(0)
    assert not {"malloc", "malloc_async"} & set(counted)
    assert type(pointer) is cupy.cuda.MemoryPointer
    assert (pointer.ptr, pointer.mem.size, pointer.device_id) == (0, 0, 0)
    assert resource.bytes_outstanding == 0


def test_report_M58_M59_empty_arrays(resource: Any) -> None:
    with resource.as_cupy_allocator():
        for shape in (0, (0,), (0, 3), (2, 0, 5)):
            array = cupy.ndarray(shape, "f8")
            assert array.size == 0
            assert array.data.device_id == 0
            assert array.data.mem is not None
            assert array.reshape(-1).shape == (0,)
    assert resource.bytes_outstanding == 0


@pytest.mark.parametrize("size", [-1, -(2**63), np.int64(-5)])
def test_P4_negative_sizes(resource: Any, size: Any) -> None:
    with pytest.raises(LayoutError, match="overflowed"):
        resource.malloc(size)
    assert resource.bytes_outstanding == 0


def test_report_M62_a_shape_that_overflows(resource: Any) -> None:
    """(2**60,) f8 asks for -2**63 bytes; (2**61,) asks for 0, which nobody can see."""
    with resource.as_cupy_allocator(), pytest.raises(ValueError):
        cupy.ndarray((2**60,), "f8")
    assert resource.bytes_outstanding == 0


@pytest.mark.parametrize("size", [1.0, float("nan"), "1", None, True])
def test_P4_sizes_that_are_no_ints(resource: Any, size: Any) -> None:
    with pytest.raises(TypeError, match="int of bytes"):
        resource.malloc(size)


def test_P4_numpy_ints(resource: Any) -> None:
    assert resource.malloc(np.int64(100)).mem.size == 100


@pytest.mark.parametrize("size", [2**63 - 1, 2**63, 2**64 - 511, 2**64 - 4, 2**64, 2**100])
def test_report_M60_sizes_beyond_any_device(resource: Any, size: int) -> None:
    with testing.faults.counts() as counted, pytest.raises(OutOfMemory) as caught:
        resource.malloc(size)
    assert not {"malloc", "malloc_async"} & set(counted)
    assert caught.value.requested == size
    with pytest.raises(MemoryError):
        resource.allocate(size)


# --- P5, P6: who keeps it, who frees it -------------------------------------------------------------------------


def test_P5_views_share_the_block(resource: Any) -> None:
    with resource.as_cupy_allocator():
        array = cupy.ndarray((8, 8), "f4")
    view = array[2:5, ::2].T
    assert block_of(view.data.mem) is block_of(array.data.mem)
    del array
    drain(resource)
    assert len(resource.live_blocks()) == 1
    del view
    drain(resource)
    assert resource.live_blocks() == []


def test_P5_report_M36_memory_goes_back_where_it_came_from(driver: Any) -> None:
    one, two = AsyncCudaResource(), AsyncCudaResource()
    with one.as_cupy_allocator():
        a = cupy.ndarray(100, "u1")
        with two.as_cupy_allocator():
            b = cupy.ndarray(200, "u1")
    assert (one.live_bytes, two.live_bytes) == (100, 200)
    del a, b
    drain(one)
    assert (one.live_bytes, two.live_bytes) == (0, 0)
    one.reap_pending()
    two.reap_pending()
    assert (one.bytes_outstanding, two.bytes_outstanding) == (0, 0)


def test_report_M09_data_keeps_resource_and_stream_alive(driver: Any) -> None:
    def make() -> Any:
        stream = new_stream()
        with make_current(stream):
            return AsyncCudaResource().malloc(64)

    pointer = make()
    gc.collect()
    block = pointer.mem
    handle = block.stream.handle
    fill(block, 1, block.stream)
    retire = block.stream.state.retire
    with testing.trace(only=FREES) as calls:
        del pointer, block
        retire.run_forgotten()
    assert [call.args[1] for call in calls] == [handle]


def test_P6_the_finaliser_only_appends(resource: Any) -> None:
    pointer = resource.malloc(64)
    block = pointer.mem
    retire = resource._state.retire
    before = len(retire)
    with testing.faults.counts() as counted:
        del pointer, block
    assert not counted
    assert len(retire) == before + 1
    assert resource.bytes_outstanding == 64
    with testing.faults.counts() as counted:
        resource.malloc(32)
    assert counted["free_async"] == 1, "the next allocation frees it"
    retire.drain()
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


def test_report_M10_freed_on_the_stream_of_the_allocation(resource: Any) -> None:
    home, other = new_stream(), new_stream()
    with make_current(home):
        pointer = resource.malloc(64)
    with testing.trace(only=FREES) as calls, make_current(other):
        del pointer
        drain(resource)
    assert [call.args[1] for call in calls] == [home.ptr]


def test_report_M11_dropped_on_a_fresh_thread(resource: Any) -> None:
    home = new_stream()
    with make_current(home):
        holder = [resource.malloc(64)]

    def work() -> None:
        holder.clear()
        resource.malloc(16)

    with testing.trace(only=FREES) as calls:
        in_thread(work)
    assert [call.args[1] for call in calls] == [home.ptr]
    drain(resource)


def test_P6_a_use_on_another_stream_delays_the_free(driver: Any) -> None:
    """What cuglue.use does underneath: a free never runs under another stream's kernel."""
    resource = AsyncCudaResource()
    home, other = new_stream(), cuglue.as_stream(new_stream())
    with make_current(home):
        pointer = resource.malloc(4096)
    block: Any = pointer.mem
    other.wait_for(block.stream, block.write_seq)
    fill(block, 5, other)
    resource.record_block_use(block, other)
    del block
    with testing.trace(only={"stream_wait_event", "free_async"}) as calls:
        del pointer
        drain(resource)
    assert [(c.method, c.args[0 if c.method == "stream_wait_event" else 1]) for c in calls] == [
        ("stream_wait_event", home.ptr),
        ("free_async", home.ptr),
    ]


def test_P6_an_explicit_deallocate_is_not_repeated(resource: Any) -> None:
    pointer = resource.malloc(64)
    resource.deallocate(pointer.mem)
    with testing.trace(only=FREES) as calls:
        del pointer
        drain(resource)
    assert calls == []


def test_report_M69_a_failing_free_is_kept_and_logged(
    resource: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pointer = resource.malloc(64)
    with testing.faults.fail("free_async") as failure:
        del pointer
        other = resource.malloc(32)
    assert failure.raised == 1
    assert "tried again" in caplog.text
    assert resource.bytes_outstanding == 96
    del other
    resource._state.retire.drain()
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


# --- P7: the collector ------------------------------------------------------------------------------------------


class Node:
    """Something that can be part of a cycle."""

    array: Any
    other: Any


def cycle(malloc: Callable[[int], Any]) -> None:
    a, b = Node(), Node()
    a.other, b.other = b, a
    a.array, b.array = malloc(64), malloc(128)


def test_P7_arrays_in_cycles_come_back(resource: Any) -> None:
    gc.disable()
    try:
        for _ in range(10):
            cycle(resource.malloc)
        assert resource.bytes_outstanding == 10 * 192
    finally:
        gc.enable()
    gc.collect()
    drain(resource)
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


def test_P7_a_block_found_by_the_collector_is_freed_once(resource: Any) -> None:
    """The collector clears weak references before finalisers run: the table must know the block all the same."""
    cycle(resource.malloc)
    with testing.trace(only=FREES) as calls:
        gc.collect()
        drain(resource)
        gc.collect()
        drain(resource)
    assert len(calls) == 2


def test_report_M50_an_exception_cycle_leaks_nothing(resource: Any) -> None:
    def work() -> None:
        with resource.as_cupy_allocator():
            array = cupy.ndarray(100, "u1")
            try:
                raise ValueError(array.nbytes)
            except ValueError as error:
                kept = error
                kept.array = array  # type: ignore[attr-defined]

    work()
    gc.collect()
    drain(resource)
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


def test_P14_the_collector_runs_everywhere(driver: Any) -> None:
    """gc.set_threshold(1), cycles, eight threads, a watchdog: no deadlock, nothing lost."""
    resource = AsyncCudaResource()
    finished = []

    def work() -> None:
        for _ in range(150):
            cycle(resource.malloc)
            block = resource.allocate(64)
            resource.deallocate(block)
        finished.append(1)

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    finally:
        gc.set_threshold(*threshold)
    assert len(finished) == 8, "a thread hangs"
    gc.collect()
    drain(resource)
    resource.reap_pending()
    assert resource.bytes_outstanding == 0
    assert resource.live_blocks() == []


# --- P9: the current stream -------------------------------------------------------------------------------------


def test_P9_the_current_stream_is_asked_once(resource: Any) -> None:
    stream = new_stream()
    with make_current(stream):
        resource.malloc(64)
        with testing.faults.counts() as counted:
            resource.malloc(64)
    assert counted["stream_current"] == 1
    assert counted["malloc_async"] == 1
    assert counted["capture_status"] == 2, (
        "of the allocation's stream, and of the one that memory is freed on"
    )
    assert not {"event_record", "stream_wait_event"} & set(counted)


def test_P13_the_default_stream_is_not_asked_whether_it_captures(resource: Any) -> None:
    """It cannot, so an allocation and a free there are one driver call each, and the question for the stream."""
    keep = resource.malloc(64)
    pointer = resource.malloc(64)
    with testing.faults.counts() as counted:
        del pointer
        pointer = resource.malloc(64)
    assert dict(counted) == {"stream_current": 1, "free_async": 1, "malloc_async": 1}
    del keep, pointer


def test_P9_home_is_the_stream_current_at_the_call(resource: Any) -> None:
    for _ in range(3):
        stream = new_stream()
        with make_current(stream):
            block = resource.malloc(64).mem
        assert block.stream is cuglue.as_stream(stream)
        assert block.stream.handle == stream.ptr


def test_P9_the_default_stream(resource: Any) -> None:
    assert resource.malloc(64).mem.stream.handle == 0


# --- P10: scope -------------------------------------------------------------------------------------------------


def test_report_M45_M77_scopes_nest_and_are_restored(driver: Any) -> None:
    outer, inner = AsyncCudaResource(), AsyncCudaResource()
    kept: list[Any] = []

    def fail() -> None:
        with inner.as_cupy_allocator():
            kept.append(cupy.ndarray(2, "u1"))
            raise ZeroDivisionError

    with outer.as_cupy_allocator() as entered:
        assert entered is outer
        kept.append(cupy.ndarray(1, "u1"))
        with pytest.raises(ZeroDivisionError):
            fail()
        kept.append(cupy.ndarray(4, "u1"))
    assert (outer.live_bytes, inner.live_bytes) == (5, 2)
    kept.clear()


def test_P10_one_scope_object_nests_in_itself(driver: Any) -> None:
    resource, other = AsyncCudaResource(), AsyncCudaResource()
    scope = resource.as_cupy_allocator()
    with scope, other.as_cupy_allocator(), scope:
        a = cupy.ndarray(1, "u1")
    assert (resource.live_bytes, other.live_bytes) == (1, 0)
    del a


def test_report_M77_other_threads_are_unaffected(driver: Any) -> None:
    resource = AsyncCudaResource()
    with resource.as_cupy_allocator():
        here = cupy.cuda.get_allocator()
        assert in_thread(cupy.cuda.get_allocator) != here
        with pytest.raises(ValueError, match="using_allocator"):
            cupy.cuda.set_allocator(None)


def test_P10_foreign_scopes_in_between(driver: Any) -> None:
    resource, other = AsyncCudaResource(), AsyncCudaResource()
    foreign: list[int] = []

    def allocate(nbytes: int) -> Any:
        foreign.append(nbytes)
        return other.malloc(nbytes)

    with resource.as_cupy_allocator():
        with cupy.cuda.using_allocator(allocate):
            a = cupy.ndarray(1, "u1")
            with resource.as_cupy_allocator():
                b = cupy.ndarray(2, "u1")
            c = cupy.ndarray(4, "u1")
        d = cupy.ndarray(8, "u1")
    assert foreign == [1, 4]
    assert (resource.live_bytes, other.live_bytes) == (10, 5)
    del a, b, c, d


def test_P10_a_suspended_generator(driver: Any) -> None:
    """Its scope reaches its caller until it is closed (CuPy's does as well); after that all is as before."""
    resource, outer = AsyncCudaResource(), AsyncCudaResource()

    def generate() -> Iterator[Any]:
        with resource.as_cupy_allocator():
            yield cupy.ndarray(1, "u1")
            yield cupy.ndarray(2, "u1")

    with outer.as_cupy_allocator():
        generator = generate()
        first = next(generator)
        generator.close()  # type: ignore[attr-defined]
        second = cupy.ndarray(4, "u1")
    assert (resource.live_bytes, outer.live_bytes) == (1, 4)
    del first, second


def test_P10_tasks_do_not_see_each_others_scope(driver: Any) -> None:
    a, b = AsyncCudaResource(), AsyncCudaResource()
    outer = AsyncCudaResource()
    made: list[Any] = []

    async def work(resource: Any, nbytes: int, first: asyncio.Event, then: asyncio.Event) -> None:
        await first.wait()
        with resource.as_cupy_allocator():
            made.append(cupy.ndarray(nbytes, "u1"))
            then.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            made.append(cupy.ndarray(nbytes, "u1"))
        made.append(cupy.ndarray(100 * nbytes, "u1"))

    async def main() -> None:
        go, second, third = asyncio.Event(), asyncio.Event(), asyncio.Event()
        tasks = [
            asyncio.create_task(work(a, 1, go, second)),
            asyncio.create_task(work(b, 2, second, third)),
        ]
        go.set()
        await third.wait()
        made.append(cupy.ndarray(1000, "u1"))  # this task chose nothing
        await asyncio.gather(*tasks)

    with outer.as_cupy_allocator():
        asyncio.run(main())
    assert (a.live_bytes, b.live_bytes, outer.live_bytes) == (2, 4, 1300)
    made.clear()


@pytest.fixture
def everywhere(driver: Any) -> Iterator[AsyncCudaResource]:
    """What CuPy allocates from where nobody chose anything."""
    former = cupy.cuda.get_allocator()
    resource = AsyncCudaResource()
    cupy.cuda.set_allocator(resource.malloc)
    yield resource
    cupy.cuda.set_allocator(former)


def test_P10_a_generator_closed_on_another_thread_leaves_no_choice_behind(everywhere: Any) -> None:
    """Its choice ends at once, and CuPy has its former function from the next request on."""
    resource, outer = AsyncCudaResource(), AsyncCudaResource()

    def generate() -> Iterator[Any]:
        with resource.as_cupy_allocator():
            yield cupy.ndarray(1, "u1")
            yield cupy.ndarray(2, "u1")

    former = cupy.cuda.get_allocator()
    generator = generate()
    first = next(generator)
    in_thread(generator.close)  # type: ignore[attr-defined]
    kept = [cupy.ndarray(16, "u1")]
    assert cupy.cuda.get_allocator() is former
    with outer.as_cupy_allocator():
        generator = generate()
        second = next(generator)
        in_thread(generator.close)  # type: ignore[attr-defined]
        third = cupy.ndarray(4, "u1")
    assert cupy.cuda.get_allocator() is former
    assert (resource.live_bytes, outer.live_bytes) == (2, 4)
    generator = generate()
    fourth = next(generator)
    in_thread(generator.close)  # type: ignore[attr-defined]
    with outer.as_cupy_allocator():  # comes before any request
        fifth = cupy.ndarray(8, "u1")
    assert cupy.cuda.get_allocator() is former
    assert (resource.live_bytes, outer.live_bytes, everywhere.live_bytes) == (3, 12, 16)
    del first, second, third, fourth, fifth, kept


def test_P10_one_scope_object_on_two_threads(everywhere: Any) -> None:
    """Each leaves what it entered itself, in whatever order."""
    resource = AsyncCudaResource()
    scope = resource.as_cupy_allocator()
    entered, left = threading.Event(), threading.Event()
    kept: list[Any] = []

    def other() -> None:
        with scope:
            entered.set()
            left.wait(20)
            kept.append(cupy.ndarray(4, "u1"))
        kept.append(cupy.ndarray(8, "u1"))

    with scope:
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        assert entered.wait(20)
    kept.append(cupy.ndarray(1, "u1"))
    left.set()
    thread.join(20)
    assert (resource.live_bytes, everywhere.live_bytes) == (4, 9)
    with pytest.raises(UsageError, match="left once more"):
        scope.__exit__(None, None, None)
    kept.clear()


def test_P10_a_scope_left_inside_a_foreign_one(everywhere: Any) -> None:
    """CuPy has the foreign allocator until that scope ends, and then, from the next request on, the former one."""
    resource, other = AsyncCudaResource(), AsyncCudaResource()
    former = cupy.cuda.get_allocator()
    scope, foreign = resource.as_cupy_allocator(), cupy.cuda.using_allocator(other.malloc)
    scope.__enter__()
    foreign.__enter__()
    scope.__exit__(None, None, None)
    a = cupy.ndarray(1, "u1")
    assert (resource.live_bytes, other.live_bytes) == (0, 1)
    foreign.__exit__(None, None, None)
    b = cupy.ndarray(16, "u1")
    assert cupy.cuda.get_allocator() is former
    assert everywhere.live_bytes == 16
    del a, b


def test_report_M38_a_swap_while_allocating(driver: Any) -> None:
    """Each array goes back to the resource that made it, whatever is installed meanwhile."""
    one, two = AsyncCudaResource(), AsyncCudaResource()
    before = cupy.cuda.get_allocator()
    stop = threading.Event()
    kept: list[Any] = []

    def allocate() -> None:
        while not stop.is_set():
            kept.append(cupy.ndarray(64, "u1"))
            if len(kept) > 50:
                kept.clear()

    cupy.cuda.set_allocator(one.malloc)
    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        for number in range(200):
            cupy.cuda.set_allocator((one, two)[number % 2].malloc)
    finally:
        stop.set()
        thread.join(60)
        cupy.cuda.set_allocator(before)
    kept.clear()
    for resource in (one, two):
        drain(resource)
        resource.reap_pending()
        assert resource.bytes_outstanding == 0
        assert resource.live_blocks() == []


def test_report_M40_importing_installs_nothing(driver: Any) -> None:
    before = cupy.cuda.get_allocator()
    resource = AsyncCudaResource()
    _ = resource.malloc
    assert cupy.cuda.get_allocator() == before


# --- P11: no memory ---------------------------------------------------------------------------------------------


def test_report_M56_P11_the_error_is_cupys_too(driver: Any) -> None:
    resource = AsyncCudaResource()
    keep = resource.malloc(64)
    with testing.faults.fail("malloc_async", persistent=True):
        with resource.as_cupy_allocator(), pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
            cupy.ndarray(1 << 20, "u1")
    error = caught.value
    assert isinstance(error, OutOfMemory)
    assert isinstance(error, MemoryError)
    assert type(error).__name__ == "OutOfMemory"
    assert (error.requested, error.in_use) == (1 << 20, 64)
    assert "1048576 bytes" in str(error)
    assert "tried:" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.requested == error.requested
    assert repr(again.report) == repr(error.report)
    del keep


def test_P11_another_failure_passes_unchanged(resource: Any) -> None:
    with testing.faults.fail("malloc_async", code=999), pytest.raises(DriverError) as caught:
        resource.malloc(64)
    assert caught.value.code == 999


# --- devices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [AsyncCudaResource, DebugGuardResource, PoolResource, "layout"])
@pytest.mark.parametrize("simulated", [True, False])
def test_report_M68_a_resource_on_another_device(
    monkeypatch: pytest.MonkeyPatch, make: Any, simulated: bool
) -> None:
    """Of a real device the question is put to CuPy's runtime, by each allocation."""
    driver = SimDriver(devices=2)
    if make == "layout":
        make = lambda upstream: PoolResource(upstream, layout=[Sliced(1 << 20), Direct()])  # noqa: E731
    with cuglue.use_driver(driver), driver.current_device(1):
        if not simulated:
            capabilities = driver.capabilities
            monkeypatch.setattr(driver, "capabilities", lambda at: replace(capabilities(at), simulated=False))
            monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 1)
        both = [AsyncCudaResource(device) for device in (0, 1)]
        over = [resource if make is AsyncCudaResource else make(resource) for resource in both]
        assert over[1].malloc(64).device_id == 1
        with pytest.raises(UsageError, match=r"device 1 is current.*PerDevice"):
            over[0].malloc(64)
        drain(both[1])
        for resource in (*over, *both):
            resource.close()


# --- threads and processes --------------------------------------------------------------------------------------


def test_report_M43_threads_near_the_limit() -> None:
    """Eight threads allocate and free where memory is short, so that the second attempt runs among them."""
    driver = SimDriver(memory_bytes=1 << 20)
    with cuglue.use_driver(driver):
        resource = AsyncCudaResource()
        refused = []
        problems: list[BaseException] = []

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            held: list[Any] = []
            try:
                for _ in range(60):
                    try:
                        held.append(resource.malloc(int(random.integers(1, 200_000))))
                    except OutOfMemory:
                        refused.append(1)
                        held.clear()
                    if random.random() < 0.4 and held:
                        held.pop()
            except BaseException as error:  # noqa: BLE001
                problems.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert problems == []
        gc.collect()
        drain(resource)
        resource.reap_pending()
        assert resource.bytes_outstanding == 0
        assert resource.malloc(900_000).mem.size == 900_000
        drain(resource)
        driver.device_synchronize(0)
        assert driver.hazards == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_report_M67_a_forked_child(sim: Any) -> None:
    """It gets a clear error, and never frees what the parent uses."""
    resource = AsyncCudaResource()
    pointer, block = resource.malloc(64), resource.allocate(64)
    dead = resource.malloc(32)
    del dead
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in (
            lambda: resource.malloc(64),
            lambda: resource.allocate(64),
            lambda: resource.deallocate(block),
            lambda: resource.reap_pending(),
        ):
            try:
                call()
                said.append("nothing")
            except UsageError as error:
                said.append("forked child" if "forked child" in str(error) else str(error))
        with testing.faults.counts() as counted:
            del pointer
            gc.collect()
            drain(resource)
            resource.close()
        said.append(str(sum(counted.values())))
        os.write(write, ",".join(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said == ",".join(["forked child"] * 4 + ["0"])
    drain(resource)
    resource.deallocate(block)
    del pointer
    drain(resource)
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


def test_closing_under_living_arrays(driver: Any) -> None:
    resource = AsyncCudaResource()
    pointer = resource.malloc(64)
    with pytest.warns(ResourceWarning, match="1 in use by CuPy arrays"):
        resource.close()
    block = pointer.mem
    assert block.state is BlockState.LIVE, "an array must not lose its memory"
    fill(block, 1, block.stream)
    del pointer, block
    drain(resource)
    assert resource.live_bytes == 0


# --- resources that others write --------------------------------------------------------------------------------


class Plain(DeviceMemoryResource):
    """The least that a resource is: four members over another one."""

    def __init__(self, inner: DeviceMemoryResource) -> None:
        self.inner = inner
        self.calls: list[str] = []

    def allocate(self, nbytes: int, stream: object = None, tag: str = "untagged") -> cuglue.DeviceBlock:
        self.calls.append("allocate")
        return self.inner.allocate(nbytes, stream, tag)

    def deallocate(self, block: cuglue.DeviceBlock) -> None:
        self.calls.append("deallocate")
        self.inner.deallocate(block)

    @property
    def device_ordinal(self) -> int:
        return self.inner.device_ordinal

    @property
    def bytes_outstanding(self) -> int:
        return self.inner.bytes_outstanding


def test_a_plain_resource_is_an_allocator_too(driver: Any) -> None:
    inner = AsyncCudaResource()
    resource = Plain(inner)
    with resource.as_cupy_allocator():
        array = cupy.ndarray(100, "u1")
    assert resource.calls == ["allocate"]
    block = block_of(array.data.mem)
    assert block in inner.live_blocks()
    assert array.data.mem.size == 100
    retire = inner._state.retire
    del array
    assert inner.live_bytes == 100
    retire.run_forgotten()
    assert resource.calls == ["allocate", "deallocate"]
    assert inner.live_bytes == 0
    inner.reap_pending()
    with resource as entered:
        assert entered is resource
    assert resource.malloc(0).ptr == 0
    resource.reap_pending()


def test_an_overridden_allocate_is_not_passed_by(driver: Any) -> None:
    class Counting(AsyncCudaResource):
        seen = 0

        def allocate(self, nbytes: int, stream: object = None, tag: str = "untagged") -> cuglue.DeviceBlock:
            self.seen += 1
            return super().allocate(nbytes, stream, tag)

    resource = Counting()
    pointer = resource.malloc(64)
    assert resource.seen == 1
    del pointer
    drain(resource)
    assert resource.live_bytes == 0


def test_access_by_id_reaches_the_block_of_an_array(driver: Any) -> None:
    resource = AsyncCudaResource()
    pointer = resource.malloc(64)
    block: Any = block_of(pointer.mem)
    other = cuglue.as_stream(new_stream())
    resource.prepare_block_use(block.id, other, Access.WRITE)
    resource.finish_block_use(block.id, other, Access.WRITE)
    assert block.write_stream is other
    assert resource.block_at(block.ptr + 10) is block
    assert resource.block_at(block.ptr + 64) is None
    del pointer, block
    drain(resource)


def test_no_warning_from_a_resource_without_live_blocks(driver: Any) -> None:
    resource = AsyncCudaResource()
    pointer = resource.malloc(64)
    del pointer
    drain(resource)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del resource
        gc.collect()


def test_P10_scopes_left_in_any_order(driver: Any) -> None:
    """As those of generators are: what is open counts, innermost last, and nothing stays behind."""
    first, second = AsyncCudaResource(), AsyncCudaResource()

    def chosen() -> Any:
        return cuglue.memory.cupy_plug.block_of(cupy.cuda.alloc(64).mem) in first.live_blocks()

    former = cupy.cuda.get_allocator()
    for leave in (0, 1), (1, 0):
        scopes = [first.as_cupy_allocator(), second.as_cupy_allocator()]
        for scope in scopes:
            scope.__enter__()
        assert not chosen()
        scopes[leave[0]].__exit__(None, None, None)
        assert chosen() == (leave[0] == 1), "what is left is what counts"
        scopes[leave[1]].__exit__(None, None, None)
        assert cupy.cuda.get_allocator() is former
        with second.as_cupy_allocator():
            with first.as_cupy_allocator():
                assert chosen()
            assert not chosen()
        with pytest.raises(UsageError, match="left once more"):
            scopes[0].__exit__(None, None, None)
    for resource in first, second:
        drain(resource)
        resource.close()


def test_every_memory_object_names_its_block(driver: Any) -> None:
    """The first array of a stream and those after it, and one over a resource that somebody else wrote."""
    resource = AsyncCudaResource()
    for allocator in (resource, resource, Plain(resource)):
        memory = allocator.malloc(64).mem
        assert memory.block is block_of(memory)
        assert memory.block.nbytes == 64


def test_what_gives_no_block_is_named(driver: Any) -> None:
    class Empty(Plain):
        def allocate(self, nbytes: int, stream: Any = None, tag: str = "") -> Any:
            return None

    resource = Empty(AsyncCudaResource())
    for allocate in (
        resource.malloc,
        GlobalDeviceBudget(resource, 1000).malloc,
        StatisticsResource(resource).allocate,
    ):
        with pytest.raises(UsageError, match=r"allocate\(\) of .*Empty.*: got None, expected a DeviceBlock"):
            allocate(64)
