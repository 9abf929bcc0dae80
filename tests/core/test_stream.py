"""Streams: identity, the arithmetic of waits (contracts C1, C1b), progress, captures and other threads."""

from __future__ import annotations

import gc
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from driver_calls import recorded
from interrupts import interrupted

import cuglue
from cuglue import testing
from cuglue.core.device import device_state
from cuglue.core.event import Event
from cuglue.core.stream import Stream, as_stream
from cuglue.driver.protocol import PER_THREAD_STREAM, CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.errors import CaptureError, DriverError, StreamMisuse, UsageError

ORDER = {"event_record", "stream_wait_event", "context_record", "context_wait", "device_synchronize"}


def ordering(calls: list[Any]) -> list[str]:
    return [call.method for call in calls if call.method in ORDER]


# --- identity ---------------------------------------------------------------------------------------------------


def test_a_stream_has_one_record(sim: SimDriver) -> None:
    own = sim.Stream()
    assert as_stream(own) is as_stream(own) is as_stream(own.ptr)
    assert as_stream(as_stream(own)) is as_stream(own)


def test_a_stream_of_another_driver_is_refused(sim: SimDriver) -> None:
    with cuglue.use_driver(other := SimDriver()):
        theirs = other.Stream()
        record = as_stream(theirs)
    for stream in (theirs, record):
        with pytest.raises(StreamMisuse, match=r"a stream of .*SimDriver.*expected one of .*SimDriver"):
            as_stream(stream, driver=sim)
    with pytest.raises(StreamMisuse, match="a stream of"):
        as_stream(theirs)
    assert as_stream(record) is record  # it says whose it is


def test_ids_are_never_handles_and_never_reused(sim: SimDriver) -> None:
    seen = set()
    for _ in range(5):
        stream = as_stream(sim.Stream())  # the simulated device gives the same handle out again
        seen.add(stream.id)
        del stream
        gc.collect()
    assert len(seen) == 5


def test_a_record_keeps_its_owner_alive(sim: SimDriver) -> None:
    record = as_stream(sim.Stream())
    gc.collect()
    assert sim.inventory()["streams"] == 1
    del record
    gc.collect()
    assert sim.inventory()["streams"] == 0


def test_nothing_is_kept_of_streams_that_are_gone(sim: SimDriver) -> None:
    """A program may wait for new streams for ever."""
    waiting = as_stream(sim.Stream())
    for _ in range(5):
        gone = as_stream(sim.Stream())
        assert waiting.join(gone)
        del gone
    gc.collect()
    assert waiting.synced == {}


def test_the_record_of_the_default_stream_stays(sim: SimDriver) -> None:
    """Every map on another stream asks for it: a new one each time would start its counts again."""
    number = as_stream(None).id
    gc.collect()
    assert as_stream(0).id == number


def test_an_int_finds_the_live_object(sim: SimDriver) -> None:
    own = sim.Stream()
    record = as_stream(own)
    assert as_stream(own.ptr) is record
    assert record.owner is own


def test_a_record_known_by_number_is_not_adopted(sim: SimDriver) -> None:
    handle = sim.stream_create(0)
    by_number = as_stream(handle)
    sim.stream_destroy(handle)
    again = sim.Stream()
    assert again.ptr == handle, "the handle must be reused for this test to mean anything"
    named = as_stream(again)
    assert named is not by_number
    assert as_stream(handle) is named


def test_default_streams_are_adopted(sim: SimDriver) -> None:
    by_number = as_stream(0)
    null = SimpleNamespace(ptr=0, device_id=-1)
    assert as_stream(null) is by_number
    assert by_number.owner is null
    assert as_stream(1) is by_number


@pytest.mark.parametrize("bad", [-1, "s", 1.5, True, object()])
def test_what_is_no_stream(sim: SimDriver, bad: object) -> None:
    with pytest.raises(StreamMisuse):
        as_stream(bad)


def test_foreign_protocols(sim: SimDriver) -> None:
    own = sim.Stream()
    record = as_stream(own)
    torch_like = SimpleNamespace(cuda_stream=own.ptr, device=SimpleNamespace(index=0))
    assert as_stream(torch_like) is record
    assert as_stream(SimpleNamespace(__cuda_stream__=lambda: (0, own.ptr))) is record
    assert as_stream(SimpleNamespace(__cuda_stream__=(0, own.ptr))) is record
    with pytest.raises(UsageError, match="version 1"):
        as_stream(SimpleNamespace(__cuda_stream__=lambda: (1, own.ptr)))


def test_a_stream_of_another_device_is_refused() -> None:
    driver = SimDriver(devices=2)
    with cuglue.use_driver(driver):
        other = driver.Stream(1)
        assert as_stream(other).device == 1
        with pytest.raises(StreamMisuse, match=r"device 1.*device 0"):
            as_stream(other, device=0)
        with pytest.raises(StreamMisuse):
            as_stream(as_stream(other), device=0)
        with pytest.raises(UsageError, match="below 2"):
            device_state(driver, 2)


def test_none_is_the_current_stream(sim: SimDriver) -> None:
    own = sim.Stream()
    with sim.current_stream(own):
        assert as_stream(None) is as_stream(own)
    assert as_stream(None).handle == 0


# --- waits: C1, C1b ---------------------------------------------------------------------------------------------


def test_C1_a_stream_never_waits_for_itself(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    with testing.trace() as calls:
        assert not a.wait_for(a, a.submit())
        assert not a.join(a)
    assert ordering(calls) == []


def test_C1_one_event_and_one_wait_cover_all_issued_so_far(sim: SimDriver, streams: Any) -> None:
    a, b = streams(2)
    seqs = [b.submit() for _ in range(3)]
    with testing.trace() as calls:
        waits = [a.wait_for(b, seq) for seq in seqs]
    assert waits == [True, False, False]
    assert ordering(calls) == ["event_record", "stream_wait_event"]
    (record,) = [c for c in calls if c.method == "event_record"]
    (wait,) = [c for c in calls if c.method == "stream_wait_event"]
    assert record.args[1] == b.handle
    assert wait.args == (a.handle, record.args[0])


def test_C1b_the_reference_trace(sim: SimDriver, streams: Any) -> None:
    """cursors of streams 1 and 2; a binding is a (stream, seq) pair."""
    one, two = streams(2)

    def resolve(stream: Stream, *bindings: tuple[Stream, int]) -> list[str]:
        with testing.trace() as calls:
            for origin, seq in bindings:
                stream.wait_for(origin, seq)
            stream.submit()
        return ordering(calls)

    assert resolve(one) == []
    assert resolve(two) == []
    b2 = (two, two.seq)
    assert (one.seq, two.seq) == (1, 1)
    assert resolve(one, b2) == ["event_record", "stream_wait_event"]
    assert one.synced[two.id] == 1
    assert (one.seq, two.seq) == (2, 1)
    assert resolve(one, b2) == []
    assert resolve(two) == []
    c2 = (two, two.seq)
    assert resolve(one, c2, c2, b2) == ["event_record", "stream_wait_event"]
    assert one.synced[two.id] == 2


def test_an_event_that_covers_is_used_again(sim: SimDriver, streams: Any) -> None:
    a, b, c = streams(3)
    seq = c.submit()
    with testing.trace() as calls:
        assert a.wait_for(c, seq)
        assert b.wait_for(c, seq)
    assert ordering(calls) == ["event_record", "stream_wait_event", "stream_wait_event"]


def test_join_is_never_elided(sim: SimDriver, streams: Any) -> None:
    a, b = streams(2)
    with testing.trace() as calls:
        assert a.join(b)
        assert a.join(b)
    assert ordering(calls) == ["event_record", "stream_wait_event"] * 2


def test_a_wait_is_a_real_one(sim: SimDriver, streams: Any) -> None:
    """Unordered writes are hazards on the simulated device; ordered ones are not."""
    a, b = streams(2)
    ptr = sim.malloc(64, 0)
    sim.fill_async(ptr, 1, 64, a.handle)
    assert b.wait_for(a, a.submit())
    sim.fill_async(ptr, 2, 64, b.handle)
    b.submit()
    b.synchronize()
    assert bytes(sim.host_view(ptr, 64, False)) == b"\2" * 64
    sim.free(ptr, 0)


def test_a_failed_wait_counts_for_nothing(sim: SimDriver, streams: Any) -> None:
    a, b = streams(2)
    seq = b.submit()
    for method in ("event_create", "event_record", "stream_wait_event"):
        with testing.faults.fail(method), pytest.raises(DriverError):
            a.wait_for(b, seq)
        assert b.id not in a.synced
    assert a.wait_for(b, seq)
    a.synchronize()
    b.synchronize()
    del a, b
    gc.collect()
    state = device_state(sim, 0)
    state.close_events()
    assert sim.inventory()["events"] == 0


def test_events_go_round(sim: SimDriver, streams: Any) -> None:
    a, b = streams(2)
    with testing.faults.counts() as counted:
        for _ in range(300):
            a.wait_for(b, b.submit())
            b.synchronize()
    assert counted["event_create"] <= 2


def test_events_go_round_without_a_host_wait(sim: SimDriver, streams: Any) -> None:
    a, b = streams(2)
    with testing.faults.counts() as counted:
        for _ in range(300):
            a.wait_for(b, b.submit())
            sim.pump()
    assert counted["event_create"] <= 20


# --- events -----------------------------------------------------------------------------------------------------


def test_event_orders_and_raises_synced(sim: SimDriver, streams: Any) -> None:
    a, b = streams(2)
    b.submit()
    event = b.record()
    a.wait(event)
    assert a.synced[b.id] == b.seq
    with testing.trace() as calls:
        assert not a.wait_for(b, b.seq)
        b.wait(event)  # its own
    assert ordering(calls) == []
    event.synchronize()
    assert event.query()


def test_event_wait_is_a_real_one(sim: SimDriver, streams: Any) -> None:
    a, b = streams(2)
    ptr = sim.malloc(64, 0)
    sim.fill_async(ptr, 1, 64, b.handle)
    b.submit()
    a.wait(b.record())
    sim.fill_async(ptr, 2, 64, a.handle)
    a.submit()
    a.synchronize()
    assert bytes(sim.host_view(ptr, 64, False)) == b"\2" * 64
    sim.free(ptr, 0)


def test_event_synchronize_waits_on_the_host(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    ptr = sim.malloc(64, 0)
    sim.fill_async(ptr, 7, 64, a.handle)
    a.submit()
    event = a.record()
    event.synchronize()
    assert bytes(sim.host_view(ptr, 64, False)) == b"\7" * 64
    sim.free(ptr, 0)


def test_event_goes_back_to_the_spare_ones(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    with testing.faults.counts() as counted:
        for _ in range(10):
            Event(a)
    assert counted["event_create"] == 1
    with testing.faults.fail("event_record"), pytest.raises(DriverError):
        Event(a)
    with testing.faults.counts() as counted:
        Event(a)
    assert counted["event_create"] == 0


# --- progress ---------------------------------------------------------------------------------------------------


def test_done_never_blocks(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    with testing.Latch(a) as latch:
        ptr = sim.malloc(64, 0)
        sim.fill_async(ptr, 1, 64, a.handle)
        seq = a.submit()
        assert not a.done(seq)
        assert not a.query()
        latch.release()
        sim.pump()
        assert a.done(seq)
        assert a.completed >= seq
        assert a.query()
    a.synchronize()
    sim.free(ptr, 0)


def test_synchronize_marks_everything_done(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    seq = a.submit()
    a.synchronize()
    with testing.faults.counts() as counted:
        assert a.done(seq)
    assert not counted


# --- captures ---------------------------------------------------------------------------------------------------


def test_nothing_reaches_a_capture_from_outside(sim: SimDriver, streams: Any) -> None:
    a, b = streams(2)
    seq_a, seq_b = a.submit(), b.submit()
    sim.capture_begin(a.handle, CaptureMode.RELAXED)
    assert a.capturing
    with testing.trace() as calls:
        for forbidden in (
            lambda: a.wait_for(b, seq_b),
            lambda: b.wait_for(a, seq_a),
            lambda: a.record(),
            lambda: a.synchronize(),
            lambda: a.join_context(),
        ):
            with pytest.raises(CaptureError, match="captures a graph"):
                forbidden()
        assert not a.done(seq_a)
    assert ordering(calls) == []
    sim.graph_destroy(sim.capture_end(a.handle))
    assert b.wait_for(a, seq_a)


# --- streams that may not be named ------------------------------------------------------------------------------


def test_a_stream_known_by_number_is_never_named_again(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    handle = sim.stream_create(0)
    unknown = as_stream(handle)
    seq = unknown.submit()
    sim.stream_destroy(handle)
    with testing.trace() as calls:
        assert a.wait_for(unknown, seq)
    assert ordering(calls) == ["context_record", "stream_wait_event"]
    assert all(handle not in call.args for call in calls)
    assert not unknown.capturing
    unknown.synchronize()
    assert unknown.done(seq)


def test_a_stream_known_by_number_without_context_events(streams: Any) -> None:
    driver = SimDriver(disable=["context_events"])
    with cuglue.use_driver(driver):
        own = driver.Stream()
        a, unknown = as_stream(own), as_stream(driver.stream_create(0))
        with testing.trace() as calls:
            assert a.wait_for(unknown, unknown.submit())
            a.join_context()
        assert ordering(calls) == ["device_synchronize", "stream_wait_event", "device_synchronize"]


def test_join_context_orders_after_every_stream(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    stranger = sim.stream_create(0)
    ptr = sim.malloc(64, 0)
    sim.fill_async(ptr, 1, 64, stranger)
    a.join_context()
    sim.fill_async(ptr, 2, 64, a.handle)
    a.synchronize()
    sim.free(ptr, 0)


def test_hold_context_orders_every_stream_after(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    stranger = sim.stream_create(0)
    ptr = sim.malloc(64, 0)
    sim.fill_async(ptr, 1, 64, a.handle)
    a.submit()
    a.hold_context()
    sim.fill_async(ptr, 2, 64, stranger)
    sim.stream_synchronize(stranger)
    sim.free(ptr, 0)


def test_hold_context_without_context_events_waits_on_the_host() -> None:
    driver = SimDriver(disable=["context_events"])
    with cuglue.use_driver(driver):
        a = as_stream(driver.Stream())
        ptr = driver.malloc(64, 0)
        driver.fill_async(ptr, 1, 64, a.handle)
        a.submit()
        a.hold_context()
        stranger = driver.stream_create(0)
        driver.fill_async(ptr, 2, 64, stranger)
        driver.stream_synchronize(stranger)
        assert driver.hazards == []
        driver.free(ptr, 0)


def run_in_thread(function: Any) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join(30)
    return result[0]


def test_per_thread_streams_do_not_change_hands(sim: SimDriver) -> None:
    mine = as_stream(PER_THREAD_STREAM)
    assert as_stream(PER_THREAD_STREAM) is mine
    assert mine.nameable()
    theirs = [run_in_thread(lambda: as_stream(PER_THREAD_STREAM)) for _ in range(4)]
    assert len({mine.id, *(s.id for s in theirs)}) == 5, "idents are reused, streams are not"
    assert not any(s.nameable() for s in theirs)


def test_a_per_thread_stream_is_not_named_from_another_thread(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)

    def work() -> tuple[Stream, int]:
        stream = as_stream(PER_THREAD_STREAM)
        return stream, stream.submit()

    theirs, seq = run_in_thread(work)
    with testing.trace() as calls:
        assert a.wait_for(theirs, seq)
    assert ordering(calls) == ["context_record", "stream_wait_event"]


def test_seq_is_exact_under_threads(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    seen: list[int] = []

    def work() -> None:
        seen.extend([a.submit() for _ in range(2000)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(seen) == list(range(1, 8001))
    assert a.seq == 8000


def test_a_record_whose_making_is_interrupted_says_nothing_and_keeps_nothing(
    sim: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    owners = device_state(sim, 0).owners
    kept: list[Stream] = []  # else its end would be interrupted too
    points = 0
    for step in itertools.count(1):
        stream = sim.Stream()
        if interrupted(lambda s=stream: kept.append(as_stream(s)), step, "core/stream.py") is None:  # type: ignore[misc]
            break
        points += 1
        gc.collect()
        assert (said, owners) == ([], {}), step
    assert points > 5


def test_what_names_no_device_is_of_the_current_one() -> None:
    """The default stream, by its number or as CuPy's object of no device, and None."""
    driver = SimDriver(devices=2)
    null = SimpleNamespace(ptr=0, device_id=-1)
    protocol = SimpleNamespace(__cuda_stream__=lambda: (0, 0))
    with cuglue.use_driver(driver):
        for current in (driver.Stream(1), driver.Stream(0)):
            with driver.current_stream(current):
                assert as_stream(None) is as_stream(current)
                for default in (0, null, protocol):
                    assert as_stream(default).device == driver.device_current() == current.device
                    assert as_stream(default, device=1).device == 1
                    assert as_stream(default, device=0).device == 0


def test_a_driver_is_named_wherever_one_is_taken() -> None:
    stream = as_stream(0, driver="sim")
    assert stream.driver.name == "sim"
    with pytest.raises(UsageError, match="choice of a driver: got 'simulated'"):
        as_stream(0, driver="simulated")
    with pytest.raises(StreamMisuse):
        as_stream(stream, driver="sim")  # another simulated device


@pytest.mark.parametrize("event", [None, 3, "event"])
def test_what_is_no_event_is_not_waited_for(event: Any, sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    with recorded(sim) as calls, pytest.raises(UsageError, match="record"):
        a.wait(event)
    assert calls.made == []


def test_an_event_of_another_driver_is_not_waited_for(streams: Any) -> None:
    (a,) = streams(1)
    with pytest.raises(UsageError, match="record"):
        a.wait(as_stream(0, driver="sim").record())
