"""Commands over configured pools: figures, windows and exchange (contracts C8-C13), and without pools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver_calls import Calls
from sample_kernels import INCREMENT

from cuglue import (
    Direct,
    InOut,
    MemoryAllocationMode,
    MemoryConfiguration,
    MemoryUsage,
    PoolResource,
    Runtime,
    Sliced,
)
from cuglue.driver.protocol import CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    BufferTooBig,
    CaptureError,
    OutOfMemory,
    PoolCapacityExceeded,
    PoolsInUse,
    UnsupportedError,
)
from cuglue.lifecycle import BlockState
from cuglue.testing.faults import fail

KIB, MIB = 1 << 10, 1 << 20
PAGES = [Sliced(MIB)]


@pytest.fixture
def pooled(driver: Any) -> Any:
    with Runtime(driver=driver, memory=PAGES) as rt:
        yield rt


def test_C8b_slices_and_pages(pooled: Runtime) -> None:
    with pooled.command() as cmd:
        buffers = [cmd.empty(600 * KIB) for _ in range(2)]
        usage = cmd.memory_usage()
        assert usage == MemoryUsage(2, 1200 * KIB, 0, 2 * MIB)
        buffers.pop().close()
        usage = cmd.memory_usage()
        assert (usage.number_allocs, usage.bytes_in_use, usage.bytes_reserved) == (1, 600 * KIB, 2 * MIB)
        cmd.memory_cleanup()
        assert cmd.memory_usage().bytes_reserved == MIB
        odd = cmd.empty(1000)
        assert cmd.memory_usage().bytes_padding == 24
        buffers.clear()
        odd.close()
        cmd.memory_cleanup()
        assert cmd.memory_usage() == MemoryUsage()


def test_C8_only_this_stream_counts(pooled: Runtime) -> None:
    here, there = pooled.stream(0), pooled.stream(1)
    x = pooled.empty(1024, stream=here)
    assert pooled.command(stream=there).memory_usage().number_allocs == 0
    assert pooled.command(stream=here).memory_usage().number_allocs == 1
    x.close()


def test_C9_a_plan_is_measured_capped_and_replayed(pooled: Runtime) -> None:
    def run() -> None:
        a, b = cmd.empty(600 * KIB), cmd.empty(600 * KIB)
        a.close()
        c = cmd.empty(900 * KIB)
        b.close()
        c.close()

    with pooled.command() as cmd:
        run()
        (pool,) = cmd.memory_report().dynamic
        assert (pool.pages_peak, pool.largest_alloc) == (2, 900 * KIB)
        cmd.memory_cleanup()
        assert cmd.memory_report().dynamic[0].pages_peak == 2
        cmd.install_memory_pools([Sliced(MIB, max_pool_size=2 * MIB)])
        assert cmd.memory_report().dynamic[0].pages_peak == 0
        run()
        assert cmd.memory_report().dynamic[0].pages_peak == 2


def test_C9_a_dry_run_counts_buffers_and_maps_those_that_are_looked_at(driver: Any) -> None:
    plan = MemoryConfiguration((Sliced(MIB),), dry_run=True)
    with Runtime(driver=driver, memory=plan) as rt, rt.command() as cmd:

        def unmapped() -> int:
            return cmd.memory_report().dynamic[0].pages_unmapped

        buffers = [rt.empty(900_000) for _ in range(4)]
        repr(buffers), [b.part(1).descriptor(10) for b in buffers], buffers[0].stream  # none of these looks
        assert repr(buffers[0]) == "Buffer(planned, nbytes=900000, device=0)"
        usage = cmd.memory_usage()
        assert (unmapped(), usage.number_allocs, usage.bytes_reserved) == (4, 4, 4 * MIB)
        cmd.write_to_gpu(buffers[0].descriptor(4), b"abcd")
        assert unmapped() == 3
        assert cmd.resource(buffers[1]).ptr
        assert unmapped() == 2
        rt.launch(INCREMENT, 1, 1, InOut(buffers[2]), 1, 1)
        assert unmapped() == 1
        assert bytes(rt.read(buffers[0], 4).result()) == b"abcd"
        peak = cmd.memory_report().dynamic[0].pages_peak
        for buffer in buffers:
            buffer.close()
        cmd.memory_cleanup()
        report = cmd.memory_report().dynamic[0]
        assert (report.pages, report.pages_peak, cmd.memory_usage().bytes_reserved) == (0, peak, 0)
        cmd.install_memory_pools([Sliced(MIB, max_pool_size=peak * MIB)])  # the plan, for real
        assert len([rt.empty(900_000) for _ in range(peak)]) == 4


def test_C9_a_planned_buffer_that_goes_unseen(sim: SimDriver) -> None:
    with Runtime(memory=MemoryConfiguration((Sliced(MIB),), dry_run=True)) as rt:
        x = rt.empty(1000)
        block = x.block
        x.close()
        assert (block.state, block.ptr, sim.inventory()["bytes"]) == (BlockState.FREED, 0, 0)
        assert rt.command().memory_usage().number_allocs == 0


def test_C9_a_planned_buffer_for_which_there_is_no_memory_says_so_when_it_is_looked_at(
    sim: SimDriver,
) -> None:
    plan = MemoryConfiguration((Sliced(MIB),), dry_run=True)
    with Runtime(memory=plan) as rt, rt.command() as cmd:
        x = rt.empty(1000)
        with fail("malloc_async", persistent=True), pytest.raises(OutOfMemory):
            cmd.write_to_gpu(x.descriptor(4), b"abcd")
        cmd.write_to_gpu(x.descriptor(4), b"efgh")
        assert bytes(rt.read(x, 4).result()) == b"efgh"


def test_C10_pools_in_use_stay(pooled: Runtime) -> None:
    with pooled.command() as cmd:
        x = cmd.create_with_data(bytes(range(256)))
        with pytest.raises(PoolsInUse) as caught:
            cmd.install_memory_pools([Direct()])
        assert (caught.value.bytes_in_use, caught.value.number_allocs) == (256, 1)
        assert isinstance(cmd.memory_report().dynamic[0].kind, Sliced)
        assert bytes(cmd.read_async(x.descriptor(256)).result()) == bytes(range(256))  # type: ignore[arg-type]
        x.close()
        cmd.install_memory_pools([Direct()])
        assert isinstance(cmd.memory_report().dynamic[0].kind, Direct)
        with pytest.raises(ValueError, match="no pools"):
            cmd.install_memory_pools([])


def test_C11_a_capped_pool_refuses_with_figures(driver: Any) -> None:
    with Runtime(driver=driver, memory=[Sliced(MIB, max_pool_size=MIB)]) as rt, rt.command() as cmd:
        kept = cmd.empty(900 * KIB)
        with pytest.raises(PoolCapacityExceeded) as caught:
            cmd.empty(200 * KIB)
        assert (caught.value.requested, caught.value.capacity) == (200 * KIB, MIB)
        with pytest.raises(BufferTooBig):
            cmd.empty(2 * MIB)
        kept.close()
        assert cmd.empty(200 * KIB).bound


def test_C12_windows_nest(pooled: Runtime) -> None:
    with pooled.command() as cmd:
        with cmd.persistent():
            with cmd.persistent():
                inner = cmd.empty(1000)
            outer = cmd.empty(1000)
        outside = cmd.empty(1000)
        report = cmd.memory_report()
        assert report.persistent.usage.number_allocs == 2
        assert report.dynamic[0].usage.number_allocs == 1
        cmd.allocation_mode(MemoryAllocationMode.PERSISTENT)
        late = cmd.empty(1000)
        cmd.allocation_mode(MemoryAllocationMode.AUTO)
        assert cmd.memory_report().persistent.usage.number_allocs == 3
        for buffer in (inner, outer, outside, late):
            buffer.close()
        cmd.install_memory_pools(MemoryConfiguration((Direct(),)))


def test_C13_everything_goes_when_nothing_is_live(sim: SimDriver) -> None:
    with Runtime(memory=PAGES) as rt:
        for index in range(3):
            rt.empty(1000, stream=rt.stream(index)).close()
            rt.command(stream=rt.stream(index)).memory_cleanup()
            assert rt.command(stream=rt.stream(index)).memory_usage().bytes_reserved == 0
        assert sim.inventory()["malloc_async"] == 0


def test_C10_C13_refused_while_a_capture_is_under_way(pooled: Runtime, calls: Calls) -> None:
    stream = pooled.stream(0)
    pooled.create(bytes(4), stream=pooled.stream(1)).close()
    capture = pooled.capture(stream)
    capture.prepare()
    with pooled.command(stream=stream) as cmd, pytest.raises(CaptureError):
        cmd.install_memory_pools([Direct()])
    capture.begin()
    calls.clear()
    for other in (stream, pooled.stream(1)):
        with pooled.command(stream=other) as cmd, pytest.raises(CaptureError):
            cmd.install_memory_pools([Direct()])
    assert {call.method for call in calls.made} <= {"capture_status"}  # nothing was touched
    capture.end().close()


def test_C3_one_stamp_rule_for_every_pool(driver: Any) -> None:
    """Memory of any kind of pool is waited for when another stream uses it, every time it is written."""
    for memory in (None, [Direct()], PAGES):
        with Runtime(driver=driver, memory=memory) as rt:
            a, b = rt.stream(1), rt.stream(2)
            for value in range(5):
                x = rt.create(np.full(64, value, "i4"), stream=a)
                rt.launch(INCREMENT, 1, 64, InOut(x), 64, 10, stream=b)
                assert set(rt.read(x, dtype="i4", stream=a).result()) == {value + 10}
                x.close()


def test_no_memory_of_a_pool_inside_somebody_elses_capture(sim: SimDriver) -> None:
    with Runtime(memory=[Direct()]) as rt:
        stream = rt.stream(0)
        rt.empty(4096, stream=stream).close()  # lies ready
        sim.capture_begin(stream.handle, CaptureMode.RELAXED)
        with pytest.raises(CaptureError, match="allocate memory"):
            rt.empty(4096, stream=stream)
        sim.graph_destroy(sim.capture_end(stream.handle))
        rt.empty(4096, stream=stream).close()


def test_graphs_over_pools(pooled: Runtime) -> None:
    stream = pooled.stream(0)
    x = pooled.create(np.zeros(64, "i4"), stream=stream)

    def step() -> None:
        with pooled.command(stream=stream) as cmd:
            temporary = cmd.empty(256)
            cmd.kernel(INCREMENT, 1, 64, InOut(temporary), 64, 1)
            cmd.kernel(INCREMENT, 1, 64, InOut(x), 64, 1)
            temporary.close()

    with pooled.capture(stream) as capture:
        with capture.warmup():
            step()
        step()
    with capture.graph as graph:
        graph.replay()
        graph.replay()
        assert set(pooled.read(x, dtype="i4", stream=stream).result()) == {3}
    x.close()


def test_without_pools_there_are_figures_and_clear_refusals(rt: Runtime) -> None:
    stream = rt.stream(0)
    with rt.command(stream=stream) as cmd:
        x = cmd.empty(1000)
        assert cmd.memory_usage() == MemoryUsage(1, 1000, 0, 1000)
        x.close()
        assert cmd.memory_usage() == MemoryUsage()
        for refused in (
            cmd.memory_report,
            lambda: cmd.allocation_mode(MemoryAllocationMode.AUTO),
            lambda: cmd.install_memory_pools(PAGES),
            cmd.persistent().__enter__,
        ):
            with pytest.raises(UnsupportedError, match="memory="):
                refused()


def test_a_pool_that_was_given_is_used_and_left_open(sim: SimDriver) -> None:
    from cuglue import DirectCudaResource

    with PoolResource(DirectCudaResource(), layout=PAGES) as pool:
        with Runtime(resource=pool) as rt, rt.command() as cmd:
            x = cmd.empty(1000)
            assert cmd.memory_report().usage.bytes_reserved == MIB
            x.close()
        assert not pool.closed
        assert pool.stream_memory().usage().bytes_reserved == MIB


def test_the_resource_of_a_user_outlives_a_runtime_with_pools(sim: SimDriver) -> None:
    from cuglue import DirectCudaResource

    with DirectCudaResource() as resource:
        with Runtime(resource=resource, memory=PAGES) as rt:
            rt.empty(1000).close()
            assert resource.bytes_outstanding == MIB
        assert not resource.closed
        assert resource.bytes_outstanding == 0
