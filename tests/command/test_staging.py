"""Staging decisions and the drop queue, exactly (contracts C24, C26, C27)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from driver_calls import Calls, recorded
from interrupts import interrupted
from racing import race

from cuglue import Out, Runtime
from cuglue.command.slab import Slab
from cuglue.command.staging import DROP_BYTES, DROP_COUNT, MIB, DropQueue, Source, staging
from cuglue.driver.sim import SimDriver
from cuglue.driver.sim.hazards import HazardError
from cuglue.errors import DevicePoisoned, DriverError, UnwrittenError
from cuglue.testing import Latch
from cuglue.testing.faults import fail


@pytest.mark.parametrize(
    ("nbytes", "source", "staged", "flush"),
    [
        (1, Source.FILE, True, True),
        (200 * MIB, Source.FILE, True, True),
        (1, Source.PINNED, False, False),
        (10 * MIB, Source.PINNED, False, False),
        (10 * MIB + 1, Source.PINNED, False, True),
        (1, Source.OTHER, True, False),
        (10 * MIB, Source.OTHER, True, False),
        (10 * MIB + 1, Source.OTHER, True, True),
        (100 * MIB - 1, Source.OTHER, True, True),
        (100 * MIB, Source.OTHER, False, True),
    ],
)
def test_C24_the_table(nbytes: int, source: Source, staged: bool, flush: bool) -> None:
    assert staging(nbytes, source) == (staged, flush)


@pytest.fixture
def queue(rt: Runtime) -> DropQueue:
    return DropQueue(rt.stream(0))


def test_C26b_the_reference_trace(queue: DropQueue, calls: Calls) -> None:
    def fences() -> tuple[int, int]:
        counted = calls.count("event_record"), calls.count("event_synchronize")
        calls.clear()
        return counted

    queue.push("a", 1)
    calls.clear()
    queue.flush()
    assert (fences(), queue.pending, queue.staged) == ((1, 0), ("a",), ())
    queue.push("b", 1)
    queue.flush()
    assert (fences(), queue.pending, queue.staged) == ((1, 1), ("b",), ())
    queue.flush()
    assert (fences(), queue.pending, queue.staged) == ((0, 1), (), ())
    queue.flush()
    assert fences() == (0, 0)


def test_C26_n_flushes_wait_n_less_one_times(queue: DropQueue, calls: Calls) -> None:
    for value in range(5):
        queue.push(value, 1)
        queue.flush()
    assert (calls.count("event_record"), calls.count("event_synchronize")) == (5, 4)
    assert queue.pending == (4,)


def test_C26_an_idle_queue_makes_no_fence(queue: DropQueue, calls: Calls) -> None:
    for _ in range(3):
        queue.flush()
    queue.drain()
    assert calls.count("event_record") == calls.count("event_synchronize") == 0


def test_C26_a_drain_holds_nothing(queue: DropQueue) -> None:
    queue.push("a", 1)
    queue.flush()
    queue.push("b", 1)
    queue.drain()
    assert (queue.staged, queue.pending) == ((), ())


def test_C26_when_a_flush_is_due(queue: DropQueue) -> None:
    for _ in range(DROP_COUNT - 1):
        queue.push(None, 0)
    assert not queue.due
    queue.push(None, 0)
    assert queue.due
    queue.flush()
    assert not queue.due
    queue.push(None, DROP_BYTES - 1)
    assert not queue.due
    queue.push(None, 2**40)
    assert queue.due


def test_C26_a_failing_fence_keeps_what_it_guards(queue: DropQueue, driver: Any) -> None:
    queue.push("a", 1)
    queue.flush()
    with fail("event_synchronize", driver=driver), pytest.raises(DriverError):
        queue.flush()
    assert queue.pending == ("a",)
    queue.flush()
    assert queue.pending == ()


def test_C26_a_lost_device_uses_nothing_any_more(queue: DropQueue, driver: Any) -> None:
    queue.push("a", 1)
    queue.flush()
    with fail("event_synchronize", code=700, driver=driver), pytest.raises(DevicePoisoned):
        queue.flush()
    assert queue.pending == ()


def test_C26_pending_without_a_fence_gets_one(queue: DropQueue, driver: Any, calls: Calls) -> None:
    queue.push("a", 1)
    with fail("event_record", driver=driver), pytest.raises(DriverError):
        queue.flush()
    assert queue.pending + queue.staged == ("a",)
    calls.clear()
    queue.flush()
    assert calls.count("event_record") == 1
    assert queue.pending + queue.staged == ("a",) or calls.count("event_synchronize") == 1
    queue.drain()
    assert (queue.pending, queue.staged) == ((), ())


def test_C26_an_interrupted_flush_loses_nothing_that_the_device_uses(sim: SimDriver) -> None:
    with Runtime() as rt:
        stream = rt.stream(0)
        for step in range(1, 100):
            queue = DropQueue(stream)
            with Latch(stream) as latch:
                for thing in ("a", "b"):
                    queue.push(thing, 1)
                where = interrupted(queue.flush, step)
                queue.collect()
                assert {*queue.staged, *queue.pending} == {"a", "b"}
                latch.release()
            queue.drain()
            assert (queue.staged, queue.pending, queue.due) == ((), (), False)
            if where is None:
                break
        assert 5 < step < 99


def test_C26_work_lets_go_what_is_due(sim: SimDriver) -> None:
    with Runtime() as rt:
        x = rt.empty(16)
        drops = rt._lanes.lane().drops
        for _ in range(DROP_COUNT * 3):
            with rt.command() as cmd:
                cmd.write_to_cpu(x.descriptor(16), bytearray(16))
        assert len(drops.staged) + len(drops.pending) <= 2 * DROP_COUNT


# --- small writes ---------------------------------------------------------------------------------------------------


def test_small_writes_share_memory_and_ask_for_none(rt: Runtime, calls: Calls) -> None:
    stream = rt.stream(0)
    x = rt.create(bytes(64), stream=stream)
    rt.synchronize()
    calls.clear()
    with rt.command(stream=stream) as cmd:
        for number in range(300):
            cmd.write_to_gpu(x.descriptor(64), bytes([number % 256]) * 64)
    assert {call.method for call in calls.made} <= {"copy_async", "capture_status", "host_view"}
    assert set(rt.read(x, stream=stream).result()) == {299 % 256}


def test_a_slab_is_kept_until_the_device_has_read_it(sim: SimDriver) -> None:
    with Runtime() as rt:
        stream, nbytes = rt.stream(0), 64 << 10
        many = [rt.create(bytes(nbytes), stream=stream) for _ in range(40)]
        rt.synchronize()
        with Latch(stream) as latch:
            for number, buffer in enumerate(many):  # more than two slabs
                with rt.command(stream=stream) as cmd:
                    cmd.write_to_gpu(buffer.descriptor(nbytes), bytes([number]) * nbytes)
            latch.release()
        for number, buffer in enumerate(many):
            assert set(rt.read(buffer, stream=stream).result()) == {number}
        slabs = sim.inventory()["host_alloc"]
        for _ in range(10):
            for number, buffer in enumerate(many):
                with rt.command(stream=stream) as cmd:
                    cmd.write_to_gpu(buffer.descriptor(nbytes), bytes([number]) * nbytes)
            rt.synchronize()
        assert sim.inventory()["host_alloc"] <= slabs + 1  # they come again


def test_the_largest_small_write_and_the_one_above(rt: Runtime) -> None:
    for nbytes in (Slab.LARGEST, Slab.LARGEST + 1):
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, "u1")
        x = rt.create(data)
        expected = data.tobytes()
        data[:] = 0
        assert bytes(rt.read(x).result()) == expected


def test_a_place_of_a_slab_that_is_used_too_early_is_seen() -> None:
    """A fault of this library, planted: the device has not read the bytes that were there."""
    driver = SimDriver()
    with Runtime(driver=driver) as rt, rt.command() as cmd:
        x = rt.create(bytes(64))
        rt.synchronize()
        cmd.write_to_gpu(x.descriptor(64), bytes(64))
        rt._lanes.lane().slab._at -= 64
        cmd.write_to_gpu(x.descriptor(64), bytes(64))
        with pytest.raises(HazardError, match="host_view"):
            cmd.synchronize()


def test_C26_a_stream_known_by_its_number_is_waited_for_with_the_device(sim: SimDriver) -> None:
    with Runtime() as rt:
        owner = sim.Stream()
        lane = rt._lanes.lane(owner.ptr)
        x = rt.create(bytes(64), stream=owner.ptr)
        with rt.command(stream=owner.ptr) as cmd:
            cmd.write_to_gpu(x.descriptor(64), cmd.reserve_cpu(64))
        with recorded(sim) as calls:
            lane.drops.drain()
        assert (calls.count("device_synchronize"), calls.count("event_record")) == (1, 0)
        assert (lane.drops.staged, lane.drops.pending, lane.drops.due) == ((), (), False)


def test_threads_share_the_slab_of_a_stream(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own command, all on one stream; the slab is used up after every few transfers."""
    for owner, name, value in ((Slab, "LARGEST", 256), (Slab, "HALF", 512)):
        monkeypatch.setattr(owner, name, value)
    stream, wrong = rt.stream(0), []
    buffers = [rt.empty(256, stream=stream) for _ in range(4)]
    rt.synchronize()

    def work(number: int) -> None:
        target, whole = np.zeros(256, "u1"), buffers[number].descriptor(256)
        for turn in range(150):
            with rt.command(stream=stream) as cmd:
                cmd.write_to_gpu(whole, np.full(256, (turn + 50 * number) % 256, "u1"))
                cmd.write_to_cpu(whole, target)
            if set(target.tolist()) != {(turn + 50 * number) % 256}:
                wrong.append((number, turn))

    race(work)
    assert wrong == []


def test_no_thread_takes_the_slab_from_under_another(sim: SimDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses two slabs up between the other's place and its copy, if it can."""
    for owner, name, value in ((Slab, "LARGEST", 256), (Slab, "HALF", 512)):
        monkeypatch.setattr(owner, name, value)
    with Runtime(driver=sim) as rt:
        stream, place = rt.stream(0), Slab.place
        one, two = (rt.empty(256, stream=stream) for _ in range(2))
        others: list[threading.Thread] = []

        def write_much() -> None:
            for number in range(8):
                rt.command(stream=stream).write_to_gpu(two.descriptor(256), np.full(256, number, "u1"))

        def interrupted_place(slab: Slab, nbytes: int) -> int:
            start = place(slab, nbytes)
            if not others:
                others.append(threading.Thread(target=write_much))
                others[0].start()
                others[0].join(0.3)
            return start

        monkeypatch.setattr(Slab, "place", interrupted_place)
        rt.command(stream=stream).write_to_gpu(one.descriptor(256), np.full(256, 99, "u1"))
        others[0].join()
        assert set(rt.read(one, stream=stream).result()) == {99}
        assert set(rt.read(two, stream=stream).result()) == {7}


def test_cleanup_and_close_give_slabs_back(sim: SimDriver) -> None:
    rt = Runtime()
    x = rt.create(bytes(8))
    assert sim.inventory()["host_alloc"] == 1
    rt.command().memory_cleanup()
    assert sim.inventory()["host_alloc"] == 0
    rt.create(bytes(8)).close()
    x.close()
    rt.close()
    assert sim.inventory()["host_alloc"] == 0


@pytest.mark.parametrize("nbytes", [Slab.LARGEST + 1, 1 << 20, 3 << 20])
def test_C24_the_driver_copies_aside_itself_where_nobody_is_waited_for(
    rt: Runtime, calls: Calls, nbytes: int
) -> None:
    stream = rt.stream(0)
    able = rt.driver.capabilities(0).pageable_read_at_once
    x = rt.create(np.zeros(nbytes, "u1"), stream=stream)
    rt.synchronize()
    data = np.full(nbytes, 5, "u1")
    calls.clear()
    with rt.command(stream=stream) as cmd:
        cmd.write_to_gpu(x.descriptor(nbytes), data)
    data[:] = 6
    sources = [call.args[1] for call in calls.of("copy_async")]
    assert (sources == [data.ctypes.data]) is able
    assert set(rt.read(x, stream=stream).result()) == {5}
    with Latch(stream, driver=rt.driver) as latch:  # the driver would wait for it
        start = time.monotonic()
        calls.clear()
        with rt.command(stream=stream) as cmd:
            cmd.write_to_gpu(x.descriptor(nbytes), data)
        data[:] = 7
        assert time.monotonic() - start < 10  # the latch gives way after 20 s
        assert data.ctypes.data not in [call.args[1] for call in calls.of("copy_async")]
        latch.release()
    assert set(rt.read(x, stream=stream).result()) == {6}


def test_C24_where_the_driver_reads_later_all_is_copied_aside() -> None:
    driver = SimDriver(disable=["pageable_read_at_once"])
    with Runtime(driver=driver) as rt:
        data = np.full(100_000, 5, "u1")
        with recorded(driver) as calls:
            x = rt.create(data)
            assert data.ctypes.data not in [call.args[1] for call in calls.of("copy_async")]
        assert set(rt.read(x).result()) == {5}


def test_without_pinned_memory_small_writes_go_through_ordinary_memory(sim: SimDriver) -> None:
    with Runtime() as rt, fail("host_alloc", persistent=True):
        x = rt.create(b"abcd")
        assert bytes(rt.read(x).result()) == b"abcd"


@pytest.fixture
def reader_of_later(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A device whose driver does not copy aside, and a slab that takes 256 bytes at once."""
    monkeypatch.setattr(Slab, "HALF", 256)
    monkeypatch.setattr(Slab, "LARGEST", 256)
    driver = SimDriver(disable=["pageable_read_at_once"])
    with Runtime(driver=driver) as rt:
        yield rt
    driver.check()


def test_more_than_the_slab_takes_at_once_goes_through_it_in_pieces(reader_of_later: Runtime) -> None:
    rt, data = reader_of_later, np.random.default_rng(3).integers(0, 256, 1000, "u1")
    stream, expected = rt.stream(0), data.tolist()
    x = rt.empty(1000, stream=stream)
    with recorded(rt.driver) as calls, rt.command(Out(x), stream=stream) as cmd:
        cmd.write_to_gpu(x.descriptor(1000), data)
        data[:] = 0
    copies = calls.of("copy_async")
    assert [call.args[2] for call in copies] == [128] * 7 + [104]
    assert [call.args[0] - x.ptr for call in copies] == list(range(0, 1000, 128))
    assert rt.read(x, stream=stream).result().tolist() == expected


@pytest.mark.parametrize("k", [1, 2, 8])
def test_a_piece_that_fails_leaves_all_of_it_unwritten(reader_of_later: Runtime, k: int) -> None:
    rt = reader_of_later
    stream = rt.stream(0)
    x = rt.create(np.zeros(1200, "u1"), stream=stream)
    with rt.command(stream=stream) as cmd:
        with fail("copy_async", on=k, driver=rt.driver), pytest.raises(DriverError):
            cmd.write_to_gpu(x.part(100).descriptor(1000), np.ones(1000, "u1"))
        for start in (100, 228, 1099):
            with pytest.raises(UnwrittenError):
                rt.read(x.part(start, 1199 - start), stream=stream)
        assert rt.read(x.part(0, 1100), stream=stream).result().tolist() == [0] * 100
        assert rt.read(x.part(1100), stream=stream).result().tolist() == [0] * 100
        cmd.write_to_gpu(x.part(100).descriptor(1000), np.ones(1000, "u1"))
    assert rt.read(x, stream=stream).result().tolist() == [0] * 100 + [1] * 1000 + [0] * 100


def test_rows_that_the_slab_may_not_take_are_copied_aside_whole(reader_of_later: Runtime) -> None:
    rt, data = reader_of_later, np.random.default_rng(4).integers(0, 256, (3, 400), "u1")
    x = rt.empty(3 * 500)
    with recorded(rt.driver) as calls, rt.command() as cmd:
        cmd.write_to_gpu(x.descriptor((3, 400), "u1", (500, 1)), data)
        expected = data.tolist()
        data[:] = 0
        found = cmd.read_async(x.descriptor((3, 400), "u1", (500, 1))).result()
    assert calls.count("copy_2d_async") == 2
    assert found.tolist() == expected
