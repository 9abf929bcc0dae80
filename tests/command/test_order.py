"""Resolution and the waits it queues: exact counts, by clause (contracts C1-C5, B20-B23)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from driver_calls import Calls, recorded
from sample_kernels import INCREMENT, SAXPY

from cuglue import Command, DirectCudaResource, In, InOut, Out, Runtime
from cuglue.command.kernels import KernelContext
from cuglue.driver.protocol import Access, CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    ArgumentError,
    CaptureError,
    ClosedError,
    DriverError,
    LaunchError,
    UsageError,
    WrongThreadError,
)
from cuglue.testing.faults import fail

ORDERING = ("event_record", "stream_wait_event")
N = 64


def waits(calls: Calls) -> tuple[int, int]:
    """(events recorded, waits queued) since the last look."""
    counted = calls.count("event_record"), calls.count("stream_wait_event")
    calls.clear()
    return counted


def test_C1b_the_reference_trace(driver: Any, calls: Calls) -> None:
    with Runtime(driver=driver, max_streams=4) as rt:
        one, two = rt.stream(1), rt.stream(2)
        calls.clear()
        first = rt.command(stream=one)
        second = rt.command(stream=two)
        b2 = second.empty(N)
        assert (first.cursor, second.cursor, b2.block.write_seq) == (1, 1, 1)
        assert waits(calls) == (0, 0)
        with rt.command(In(b2), stream=one) as cmd:
            assert cmd.cursor == 2
        assert (waits(calls), one.synced[two.id]) == ((1, 1), 1)
        with rt.command(In(b2), stream=one) as cmd:
            assert cmd.cursor == 3
        assert waits(calls) == (0, 0)
        with rt.command(stream=two) as cmd:
            assert cmd.cursor == 2
            c2 = cmd.empty(N)
        assert c2.block.write_seq == 2
        calls.clear()
        rt.command(In(c2), In(c2), In(b2), stream=one)
        assert (waits(calls), one.synced[two.id]) == ((1, 1), 2)
        assert two.synced == {}


def test_C1_own_stream_bindings_need_nothing(rt: Runtime, calls: Calls) -> None:
    stream = rt.stream(1)
    buffers = [rt.empty(N, stream=stream) for _ in range(3)]
    foreign = rt.empty(N, stream=rt.stream(2))
    calls.clear()
    rt.command(*map(In, buffers), stream=stream)
    assert waits(calls) == (0, 0)
    rt.command(*map(In, [*buffers, foreign]), stream=stream)
    assert waits(calls) == (1, 1)


def test_C1b_ids_that_share_a_slot_are_one_stream(rt: Runtime) -> None:
    with Runtime(driver=rt.driver, max_streams=4) as four:
        assert four.stream(1) is four.stream(5)
        assert four.stream(1) is not four.stream(2)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_C3_memory_of_either_path_is_stamped_when_it_is_bound(driver: Any, calls: Calls, mode: Any) -> None:
    with DirectCudaResource(mode=mode) as resource, Runtime(driver=driver, resource=resource) as rt:
        one, two = rt.stream(1), rt.stream(2)
        x = rt.empty(N, stream=two)
        assert (x.block.write_stream, x.block.write_seq) == (two, two.seq)
        calls.clear()
        rt.command(In(x), stream=one)
        assert waits(calls) == (1, 1)
        x.close()


def test_lanes_of_other_peoples_streams_go_when_nothing_is_lost(sim: SimDriver) -> None:
    with Runtime() as rt:
        own = rt._lanes.lane(rt.stream(0))
        streams = [sim.Stream() for _ in range(100)]
        busy = rt.capture(streams[0])
        busy.prepare()
        lane = rt._lanes.lane(streams[0])
        holding = rt._lanes.lane(streams[1])
        holding.hold(b"", 0)
        profiled = rt._lanes.lane(streams[2])
        with rt.profile(streams[2]):
            for stream in streams:
                rt.command(stream=stream)
        assert len(rt._lanes.all()) < 80
        kept = rt._lanes.all()
        assert {own, lane, holding, profiled} <= set(kept)
        busy.begin()
        busy.end().close()


def test_B27b_waits_of_launches(rt: Runtime, calls: Calls) -> None:
    """The table of B27b with launches in place of prepare and finish."""
    s0, s1, s2 = rt.stream(0), rt.stream(1), rt.stream(2)
    buffer = rt.empty(4 * N, stream=s0)
    outs = {s: rt.empty(4 * N, stream=s) for s in (s0, s1, s2)}
    calls.clear()

    def read(stream: Any) -> int:
        rt.launch(SAXPY, 1, N, In(buffer), Out(outs[stream]), 1.0, N, stream=stream)
        return waits(calls)[1]

    def write(stream: Any, how: Any = InOut) -> int:
        rt.launch(INCREMENT, 1, N, how(buffer), N, 1, stream=stream)
        return waits(calls)[1]

    block = buffer.block
    assert (read(s1), block.use_count()) == (1, 2)
    assert (read(s2), block.use_count()) == (1, 3)
    assert (write(s0, Out), block.use_count()) == (2, 1)
    assert (write(s1, Out), block.use_count()) == (1, 1)
    assert (write(s1, InOut), block.use_count()) == (0, 1)
    assert (read(s0), block.use_count()) == (1, 2)
    buffer.close()
    assert waits(calls)[1] == 0


def test_a_repeat_on_one_stream_makes_no_event(rt: Runtime, calls: Calls) -> None:
    x, y = rt.empty(4 * N), rt.empty(4 * N)
    calls.clear()
    for _ in range(20):
        rt.launch(SAXPY, 1, N, In(x), Out(y), 1.0, N)
    assert waits(calls) == (0, 0)


def test_C3_a_buffer_rewritten_by_its_owner_is_waited_for_again(rt: Runtime, calls: Calls) -> None:
    a, b = rt.stream(1), rt.stream(2)
    x = rt.create(np.zeros(N, "i4"), stream=a)
    rt.command(In(x), stream=b)
    rt.launch(INCREMENT, 1, N, InOut(x), N, 5, stream=a)
    calls.clear()
    with rt.command(In(x), stream=b) as cmd:
        assert waits(calls) == (1, 1)
        result = cmd.read_async(x.descriptor(N, "i4"))
    assert set(result.result()) == {5}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(Out, In, 1), (In, Out, 1), (Out, Out, 1), (In, In, 0), (InOut, InOut, 1)],
    ids=["RAW", "WAR", "WAW", "RAR", "RMW"],
)
def test_C3_edges_both_ways(rt: Runtime, calls: Calls, first: Any, second: Any, expected: int) -> None:
    """What the owner reads that another stream wrote, and what it overwrites that another still reads."""
    owner, other = rt.stream(1), rt.stream(2)
    x = rt.empty(4 * N, stream=owner)
    out = {s: rt.empty(4 * N, stream=s) for s in (owner, other)}

    def use(how: Any, stream: Any) -> None:
        if how is In:
            rt.launch(SAXPY, 1, N, In(x), Out(out[stream]), 1.0, N, stream=stream)
        else:
            rt.launch(INCREMENT, 1, N, how(x), N, 1, stream=stream)

    use(first, other)
    calls.clear()
    use(second, owner)
    assert waits(calls)[1] == expected


@pytest.mark.parametrize("seed", range(20))
def test_C3_results_are_right_in_any_order(seed: int) -> None:
    driver = SimDriver(seed=seed)
    with Runtime(driver=driver) as rt:
        x = rt.create(np.zeros(N, "i4"), stream=rt.stream(0))
        for step in range(12):
            rt.launch(INCREMENT, 1, N, InOut(x), N, 1, stream=rt.stream(step % 3))
        assert set(rt.read(x, dtype="i4", stream=rt.stream(3)).result()) == {12}
        x.close()
    driver.check()


def test_C2_a_buffer_dropped_at_once_keeps_its_bytes_until_the_consumer_is_done(rt: Runtime) -> None:
    owner, consumer = rt.stream(1), rt.stream(2)
    futures = []
    for value in range(1, 20):
        x = rt.create(np.full(N, value, "i4"), stream=owner)
        with rt.command(In(x), stream=consumer) as cmd:
            futures.append(cmd.read_async(x.descriptor(N, "i4")))
        x.close()
        rt.create(np.full(N, -value, "i4"), stream=owner)  # may get the same memory
    assert [set(f.result()) for f in futures] == [{value} for value in range(1, 20)]


def test_the_same_buffer_twice_merges_its_uses(rt: Runtime) -> None:
    x = rt.create(np.ones(N, "f4"), stream=rt.stream(1))
    rt.launch(SAXPY, 1, N // 2, In(x.part(0, 2 * N)), Out(x.part(2 * N)), 3.0, N // 2, stream=rt.stream(2))
    block = x.block
    assert (block.write_stream, block.reads) == (rt.stream(2), None)
    assert list(rt.read(x, dtype="f4").result()) == [1.0] * (N // 2) + [3.0] * (N // 2)


def test_declared_once_given_bare(rt: Runtime) -> None:
    x, y, z = rt.create(np.ones(N, "f4")), rt.empty(4 * N), rt.empty(4 * N)
    with rt.command(In(x), InOut(y)) as cmd:
        cmd.kernel(SAXPY, 1, N, x, y, 2.0, N)
        with pytest.raises(UsageError, match="without a declaration"):
            cmd.kernel(SAXPY, 1, N, x, z, 2.0, N)
        cmd.kernel(SAXPY, 1, N, x, Out(z), 4.0, N)
    assert set(rt.read(y, dtype="f4").result()) == {2.0}
    assert set(rt.read(z, dtype="f4").result()) == {4.0}


def test_what_a_command_writes_may_be_read_by_its_later_kernels(rt: Runtime) -> None:
    x, y, z = rt.create(np.full(N, 3, "f4")), rt.empty(4 * N), rt.empty(4 * N)
    with rt.command(In(x), Out(y), Out(z)) as cmd:
        cmd.kernel(SAXPY, 1, N, x, y, 2.0, N)
        cmd.kernel(SAXPY, 1, N, y, z, 2.0, N)  # y is Out of the command, and const here
        with pytest.raises(LaunchError, match="const"):
            cmd.kernel(SAXPY, 1, N, Out(y), z, 2.0, N)
    assert y.block.reads is not None
    assert set(rt.read(z, dtype="f4").result()) == {12.0}


def test_commands_take_only_declarations(rt: Runtime) -> None:
    with pytest.raises(UsageError, match="In"):
        rt.command(rt.empty(4))  # type: ignore[arg-type]


def test_C3_single_use_bound_to_its_thread_and_invalid_afterwards(rt: Runtime) -> None:
    cmd = rt.command()
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            cmd.empty(4)
        except WrongThreadError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert str(threading.get_ident()) in str(caught[0])
    with cmd:
        with pytest.raises(UsageError, match="second"), cmd:
            pass
        cmd.empty(4)
    for use in (
        lambda: cmd.empty(4),
        lambda: cmd.sync(),
        lambda: cmd.stream,
        lambda: cmd.cursor,
        lambda: cmd.kernel(INCREMENT, 1, 1),
        lambda: cmd.__enter__(),
    ):
        with pytest.raises(ClosedError):
            use()
    cmd.close()


def test_C3_the_constructor_takes_kernels_streams_and_service_of_one_runtime(rt: Runtime) -> None:
    context = KernelContext(rt.driver, rt.device)
    streams = rt._lanes.resolve(None)
    cmd = Command(context, streams, rt.service)
    assert cmd.stream is streams.current.stream
    assert cmd.cursor == streams.cursor
    with pytest.raises(ArgumentError):
        Command(context, streams, rt.service + 1000)
    context.close()


def test_C4_the_stream_and_its_handle(rt: Runtime) -> None:
    with rt.command(stream=rt.stream(3)) as cmd:
        assert cmd.stream is rt.stream(3)
        assert isinstance(cmd.stream.handle, int)


def test_C5_one_more_for_each_resolution(rt: Runtime) -> None:
    cursors = []
    for _ in range(3):
        with rt.command(stream=rt.stream(1)) as cmd:
            cmd.empty(N)
            cmd.sync()
            cursors.append(cmd.cursor)
    assert cursors == [1, 2, 3]
    with rt.command(stream=rt.stream(2)) as cmd:
        assert cmd.cursor == 1


def test_C3_no_foreign_binding_while_either_stream_captures(sim: SimDriver) -> None:
    with Runtime() as rt:
        ours, theirs = rt.stream(1), rt.stream(2)
        x = rt.create(np.zeros(N, "i4"), stream=theirs)
        for capturing in (ours, theirs):
            with recorded(sim) as calls:
                sim.capture_begin(capturing.handle, CaptureMode.THREAD_LOCAL)
                with pytest.raises(CaptureError, match="captures"):
                    rt.command(In(x), stream=ours)
                assert calls.of(*ORDERING) == []
                sim.graph_destroy(sim.capture_end(capturing.handle))
        rt.command(In(x), stream=ours)


@pytest.mark.parametrize("method", ORDERING)
def test_a_failing_wait_leaves_the_blocks_as_they_were(rt: Runtime, driver: Any, method: str) -> None:
    x = rt.create(np.zeros(N, "i4"), stream=rt.stream(1))
    before = list(x.block.uses())
    with fail(method, driver=driver), pytest.raises(DriverError, match="made to fail"):
        rt.launch(INCREMENT, 1, N, InOut(x), N, 1, stream=rt.stream(2))
    assert list(x.block.uses()) == before
    x.trust()
    rt.launch(INCREMENT, 1, N, InOut(x), N, 1, stream=rt.stream(2))
    assert set(rt.read(x, dtype="i4").result()) == {1}


def test_a_reader_of_an_export_waits_and_is_waited_for(sim: SimDriver) -> None:
    """An array made from a buffer may be used on its library's stream without telling."""
    with Runtime() as rt:
        a, b = rt.stream(1), rt.stream(2)
        x = rt.create(np.zeros(N, "i4"), stream=a)
        x.storage.order_consumer(b)
        x.storage.note_consumer(b)
        sim.fill_async(x.ptr, 1, 4 * N, b.handle)  # what a library would do
        rt.launch(INCREMENT, 1, N, InOut(x), N, 1, stream=a)
        sim.fill_async(x.ptr, 2, 4 * N, b.handle)
        assert set(rt.read(x, dtype="u1", stream=a).result()) == {2}
        x.close()


def test_a_partner_that_cannot_be_told_is_waited_for_by_the_host(sim: SimDriver) -> None:
    with Runtime() as rt:
        a, b = rt.stream(1), rt.stream(2)
        x = rt.create(np.zeros(N, "i4"), stream=a)
        x.storage.order_consumer(b)
        x.storage.note_consumer(b)
        with recorded(sim) as calls, fail("stream_wait_event", on=2), pytest.raises(DriverError):
            rt.launch(INCREMENT, 1, N, InOut(x), N, 1, stream=a)
        assert calls.count("kernel_launch") == calls.count("stream_synchronize") == 1
        sim.fill_async(x.ptr, 2, 4 * N, b.handle)
        assert set(rt.read(x, stream=a).result()) == {2}
        x.close()


def test_one_wait_each_way_with_a_stream_that_others_use(sim: SimDriver) -> None:
    """Its untold work is waited for, which covers what is known of it: nothing is waited for twice."""
    with Runtime() as rt:
        a, b = rt.stream(1), rt.stream(2)
        x = rt.create(np.zeros(N, "i4"), stream=b)
        x.storage.order_consumer(b)
        x.storage.note_consumer(b)
        with recorded(sim) as calls:
            rt.launch(INCREMENT, 1, N, InOut(x), N, 1, stream=a)
        assert calls.count("event_record") == calls.count("stream_wait_event") == 2
        assert set(np.asarray(rt.read(x, stream=a).result()).view("i4")) == {1}
        x.close()


def test_uses_know_reads_from_writes(rt: Runtime) -> None:
    x, y = rt.empty(4 * N), rt.empty(4 * N)
    rt.launch(SAXPY, 1, N, In(x), Out(y), 1.0, N, stream=rt.stream(1))
    assert rt.stream(1) in (x.block.reads or {})
    assert y.block.write_stream is rt.stream(1)
    assert Access.READ | Access.WRITE is Access.READ_WRITE


def test_a_closed_runtime_has_no_streams(rt: Runtime) -> None:
    rt.close()
    with pytest.raises(ClosedError):
        rt.stream(1)
