"""What only a removed statement showed: each test here fails if one particular line of core goes."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import cuglue
from cuglue import Access, testing
from cuglue.core.block import OPEN, Block, finish_all
from cuglue.core.device import device_state
from cuglue.driver.protocol import CaptureMode, CopyKind
from cuglue.driver.sim import SimDriver
from cuglue.errors import CaptureError

N = 4096


def test_a_blocking_drain_waits_for_the_uses(sim: SimDriver, streams: Any) -> None:
    """Not one look: the work takes more steps than a query runs."""
    (a,) = streams(1)
    ptr = sim.malloc(N, 0)
    for value in range(20):
        sim.fill_async(ptr, value, N, a.handle)
    seq = a.submit()
    ran: list[int] = []
    a.state.retire.push([(a, seq)], lambda: ran.append(1))
    assert a.state.retire.drain() == 0
    with testing.trace(only={"stream_synchronize"}) as waits:
        assert a.state.retire.drain(block=True) == 1
    assert (ran, waits) == ([1], [("stream_synchronize", (a.handle,))])
    sim.free(ptr, 0)


def test_a_blocking_drain_does_not_wait_for_work_after_the_uses(sim: SimDriver, streams: Any) -> None:
    (a,) = streams(1)
    seq = a.submit()
    a.synchronize()
    ran: list[int] = []
    a.state.retire.push([(a, seq)], lambda: ran.append(1))
    with testing.Latch(a):  # a wait for the whole stream would never end
        assert a.state.retire.drain(block=True) == 1
    assert ran == [1]


def test_hold_context_covers_what_others_queued_since_the_last_event(sim: SimDriver, streams: Any) -> None:
    """Work that bypassed the count (an array library's) came after the newest event."""
    a, b, c = streams(3)
    ptr = sim.malloc(N, 0)
    b.wait_for(a, a.submit())  # a has an event that covers everything we submitted
    sim.fill_async(ptr, 1, N, a.handle)
    a.hold_context()
    sim.fill_async(ptr, 2, N, c.handle)  # in order after the first fill, or a hazard
    sim.device_synchronize(0)
    assert sim.hazards == []
    sim.free(ptr, 0)


def test_synchronize_of_a_stream_that_may_not_be_named_waits(sim: SimDriver) -> None:
    """It was told by number only, so the device is waited for; the handle is left alone."""
    handle = sim.stream_create(0)
    a = cuglue.as_stream(handle)
    ptr = sim.malloc(N, 0)
    for _ in range(20):
        sim.fill_async(ptr, 7, N, handle)
    a.submit()
    a.synchronize()
    assert bytes(sim.host_view(ptr, N, False)) == bytes([7]) * N
    assert sim.hazards == []
    sim.free(ptr, 0)


def test_an_event_recorded_while_the_host_waits_is_kept(sim: SimDriver, streams: Any) -> None:
    """It covers more than the wait did: given away, another stream would record it before its user waits for it."""
    a, b, c = streams(3)
    a.submit()
    real = sim.stream_synchronize

    def meanwhile(handle: int) -> None:
        real(handle)
        b.wait_for(a, a.submit())  # another thread, in the middle of our wait

    sim.stream_synchronize = meanwhile  # type: ignore[method-assign]
    try:
        a.synchronize()
    finally:
        del sim.stream_synchronize  # type: ignore[attr-defined]
    with testing.trace(only={"event_record"}) as records:
        assert c.wait_for(a, a.seq)
    assert records == [], "the event of that moment is still there and covers it"


def test_wait_for_an_event_is_refused_by_a_capture_and_leaves_it_whole(sim: SimDriver, streams: Any) -> None:
    a, b = streams(2)
    event = b.record()
    sim.capture_begin(a.handle, CaptureMode.THREAD_LOCAL)
    with testing.trace(only={"stream_wait_event"}) as waits, pytest.raises(CaptureError):
        a.wait(event)
    assert waits == []
    sim.graph_destroy(sim.capture_end(a.handle))


def test_records_of_dead_streams_go(sim: SimDriver) -> None:
    known = device_state(sim, 0).streams
    for _ in range(3):
        record = cuglue.as_stream(sim.Stream())
        assert record.handle in known
        del record
        gc.collect()
        assert known == {}


def test_a_number_that_another_thread_overtook_does_not_lower_the_count(streams: Any) -> None:
    (a,) = streams(1)
    numbers = a._count
    overtaken = False

    class Racing:
        """Another thread submits between our number and our store."""

        def __next__(self) -> int:
            nonlocal overtaken
            mine = next(numbers)
            if not overtaken:
                overtaken = True
                assert a.submit() == mine + 1
            return mine

    a._count = Racing()
    assert (a.submit(), a.seq) == (1, 2)


# --- uses that go on --------------------------------------------------------------------------------------------


def copy_from(sim: SimDriver, stream: Any, ptr: int, to: int) -> None:
    """A read that nobody counts, as an array library queues it."""
    sim.copy_async(to, ptr, N, CopyKind.D2D, stream.handle)


def test_a_use_that_goes_on_covers_what_its_stream_gets_later(sim: SimDriver, streams: Any) -> None:
    """Each writer comes after all reads queued until then: also after the newest event, and also the second time."""
    reader, writer, home = streams(3)
    ptr, to = sim.malloc(N, 0), sim.malloc(N, 0)
    block = Block(ptr, N, home)
    block.finish(reader, Access.READ, OPEN)
    writer.wait_for(reader, reader.submit())  # an event that covers everything counted so far
    for value in (1, 2):
        copy_from(sim, reader, ptr, to)
        block.prepare(writer, Access.WRITE)
        sim.fill_async(ptr, value, N, writer.handle)
        reader.wait_for(writer, writer.submit())
    sim.device_synchronize(0)
    assert sim.hazards == []
    for one in ptr, to:
        sim.free(one, 0)


def test_a_use_that_goes_on_is_not_cut_short_by_one_that_ended(sim: SimDriver, streams: Any) -> None:
    reader, home = streams(2)
    block = Block(512, N, home)
    block.finish(reader, Access.READ, OPEN)
    block.finish(reader, Access.READ)
    assert block.reads == {reader: OPEN}
    block.finish(home, Access.READ)
    newest = home.submit()
    block.finish(home, Access.READ, newest)
    assert block.reads == {reader: OPEN, home: newest}


def test_the_uses_of_a_block_are_its_last_write_and_each_newest_read(sim: SimDriver, streams: Any) -> None:
    home, reader = streams(2)
    block = Block(4096, 64, home)
    block.finish(home, Access.WRITE)
    block.finish(reader, Access.READ)
    assert [stream for stream, _ in block.uses()] == [home, reader]


@pytest.mark.parametrize("owned", [True, False])
def test_an_event_of_a_stream_that_was_finalised_goes_when_it_is_done(
    sim: SimDriver, streams: Any, owned: bool
) -> None:
    """Its finaliser runs once, and what went in the same cycle may use it once more."""
    other, named = streams(2)
    stream = named if owned else cuglue.as_stream(sim.stream_create(0))
    stream.__del__()
    other.wait_for(stream, stream.submit())
    assert len(stream.events) == 1
    stream.state.retire.drain(block=True)
    assert len(stream.events) == 0


def test_a_use_elsewhere_is_told_to_the_stream_of_the_last_write(streams: Any) -> None:
    """A graph that is replayed there again looks at what its blocks were used for."""
    a, b = streams(2)
    block = Block(512, 64, a, a.submit())
    before = a.asked
    block.finish(a, Access.READ)
    assert a.asked == before
    block.finish(b, Access.READ)
    assert a.asked == a.seq > before


def test_a_join_ends_the_number_that_a_replay_goes_on_under(streams: Any) -> None:
    """As long as nobody was told of its number, one more replay is covered by that."""
    a, b = streams(2)
    last = a.submit()
    assert a.asked < last == a.seq, "what a graph asks before it goes on"
    b.join(a)
    assert not a.asked < last == a.seq
    assert b.synced[a.id] >= last


def test_a_write_among_others_replaces_the_reads_before_it(streams: Any) -> None:
    a, b = streams(2)
    block = Block(512, 64, a)
    block.finish(b, Access.READ)
    finish_all({block: Access.WRITE}, a, seq := a.submit())
    assert list(block.uses()) == [(a, seq)]


def test_orders_of_the_whole_device_use_their_event_again(sim: SimDriver) -> None:
    """A stream that nobody may name too: the whole device stands for it."""
    named, number = cuglue.as_stream(sim.Stream()), sim.stream_create(0)
    for stream in (named, cuglue.as_stream(number)):
        stream.join_context()
        with testing.trace(only={"event_create"}) as made:
            for _ in range(3):
                stream.join_context()
                stream.hold_context()
        assert made == []


def test_hold_context_of_a_stream_that_may_not_be_named(sim: SimDriver, streams: Any) -> None:
    number = sim.stream_create(0)
    (other,) = streams(1)
    ptr = sim.malloc(N, 0)
    sim.fill_async(ptr, 1, N, number)
    cuglue.as_stream(number).hold_context()
    sim.fill_async(ptr, 2, N, other.handle)  # in order after the first fill, or a hazard
    sim.device_synchronize(0)
    assert sim.hazards == []
    sim.free(ptr, 0)
