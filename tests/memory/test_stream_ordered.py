"""AsyncCudaResource: exact waits, exact uses, exact accounting (contracts B19-B27b)."""

from __future__ import annotations

import gc
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_tools import contents, fill, in_thread, new_stream

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    DebugGuardResource,
    PoolResource,
    StatisticsResource,
    testing,
)
from cuglue.core.block import BlockId
from cuglue.driver.protocol import PER_THREAD_STREAM, CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    ClosedError,
    DriverError,
    OutOfMemory,
    SeveralErrors,
    StreamMisuse,
    UnsupportedError,
    UsageError,
    UseAfterFree,
)
from cuglue.memory import tickets

SRC = Path(__file__).resolve().parents[2] / "src"
READ, WRITE, READ_WRITE = Access.READ, Access.WRITE, Access.READ_WRITE
WAITS = {"stream_wait_event"}


@pytest.fixture
def resource(driver: Any) -> AsyncCudaResource:
    return AsyncCudaResource()


@pytest.fixture
def streams(driver: Any) -> list[Any]:
    return [cuglue.as_stream(new_stream()) for _ in range(3)]


def use(resource: Any, block: Any, stream: Any, access: Access) -> int:
    """prepare and finish; the number of waits queued, all of them on ``stream``."""
    with testing.trace(only=WAITS) as calls:
        resource.prepare_block_use(block.id, stream, access)
    assert all(call.args[0] == stream.handle for call in calls)
    resource.finish_block_use(block.id, stream, access)
    return len(calls)


def accounting(resource: AsyncCudaResource) -> tuple[int, int, int]:
    live, pending = resource.live_bytes, resource.pending_free_bytes
    assert live + pending == resource.bytes_outstanding
    assert resource.pending_per_stream_total == pending == sum(resource.pending_per_stream().values())
    return live, pending, resource.bytes_outstanding


# --- allocate ---------------------------------------------------------------------------------------------------


def test_B19_the_allocation_is_one_use_of_its_stream(resource: AsyncCudaResource, streams: Any) -> None:
    block = resource.allocate(64, streams[0])
    assert resource.pending_use_event_count(block.ptr) == 1
    assert (block.write_stream, block.reads) == (streams[0], None)
    resource.deallocate(block)
    assert resource.pending_use_event_count(block.ptr) is None


def test_B19_streams_it_cannot_take(driver: Any, resource: AsyncCudaResource) -> None:
    for bad in ("s", -1, 99, object()):
        with testing.faults.counts() as counted, pytest.raises(StreamMisuse):
            resource.allocate(64, bad)
        assert counted["malloc_async"] == 0
    if driver.name == "sim":
        with pytest.raises(StreamMisuse, match="does not know"):
            resource.allocate(64, 0x12345000)
    assert accounting(resource) == (0, 0, 0)


def test_B19_the_size_is_looked_at_first(resource: AsyncCudaResource) -> None:
    with pytest.raises(ValueError, match="-1"):
        resource.allocate(-1, "no stream either")
    with pytest.raises(DriverError, match="0 bytes"):
        resource.allocate(0)


def test_a_device_without_stream_ordered_memory() -> None:
    with cuglue.use_driver(SimDriver(disable=["async_memory"])):
        resource = AsyncCudaResource()
        for _ in range(2):
            with pytest.raises(UnsupportedError) as caught:
                resource.allocate(64)
            assert caught.value.reason == "async_memory"


# --- prepare ----------------------------------------------------------------------------------------------------


def test_B20_validation_in_order(driver: Any, resource: AsyncCudaResource, streams: Any) -> None:
    block = resource.allocate(64, streams[0])
    stale = block.id._replace(generation=block.generation + 10**9)
    with testing.faults.counts() as counted:
        for call in (resource.prepare_block_use, resource.finish_block_use, resource.cancel_block_use):
            with pytest.raises(DriverError) as wrong_device:
                call(stale._replace(device_ordinal=5), "no stream", READ)
            assert wrong_device.value.code == 101
            with pytest.raises(StreamMisuse):
                call(stale, "no stream", READ)
            with pytest.raises(UseAfterFree) as gone:
                call(stale, streams[1], READ)
            assert gone.value.generation == stale.generation
            with pytest.raises(StreamMisuse, match=r"block\.id"):
                call(block, streams[1], READ)
            with pytest.raises(ValueError, match="7"):
                call(block.id, streams[1], 7)
    assert not counted
    resource.deallocate(block)


@pytest.mark.parametrize(
    ("access", "waits"),
    [(READ, (0, 1)), (WRITE, (0, 1)), (READ_WRITE, (0, 1))],
)
def test_B20_a_fresh_block(resource: Any, streams: Any, access: Access, waits: tuple[int, int]) -> None:
    home, other, _ = streams
    block = resource.allocate(64, home)
    assert use(resource, block, home, access) == waits[0]
    resource.deallocate(block)
    block = resource.allocate(64, home)
    assert use(resource, block, other, access) == waits[1]
    resource.deallocate(block)


def test_B20_prepare_changes_no_state(resource: Any, streams: Any) -> None:
    home, other, third = streams
    block = resource.allocate(64, home)
    use(resource, block, other, READ)
    before = (block.write_stream, block.write_seq, dict(block.reads))
    for access in (READ, WRITE, READ_WRITE):
        resource.prepare_block_use(block.id, third, access)
        assert before == (block.write_stream, block.write_seq, dict(block.reads))
        assert resource.pending_use_event_count(block.ptr) == 2
    resource.deallocate(block)


def test_B20_readers_never_wait_for_readers(resource: Any, streams: Any) -> None:
    home, a, b = streams
    block = resource.allocate(64, home)
    use(resource, block, a, READ)
    b.wait_for(home, block.write_seq)
    assert use(resource, block, b, READ) == 0
    resource.deallocate(block)


def test_B20_a_delayed_writer_is_waited_for(driver: Any, resource: Any, streams: Any) -> None:
    home, reader, _ = streams
    block = resource.allocate(4096, home)
    with testing.Latch(home) as latch:
        resource.prepare_block_use(block.id, home, WRITE)
        fill(block, 9, home)
        resource.finish_block_use(block.id, home, WRITE)
        resource.prepare_block_use(block.id, reader, READ)
        if driver.name == "sim":
            driver.pump()
        assert not reader.query(), "the reader must be held back by the writer"
        latch.release()
        assert (contents(block, reader) == 9).all()
        resource.finish_block_use(block.id, reader, READ)
    resource.deallocate(block)


# --- finish -----------------------------------------------------------------------------------------------------


def test_B21_the_entries_of_a_sequence(resource: Any, streams: Any) -> None:
    home, a, b = streams
    block = resource.allocate(64, home)
    counts = [resource.pending_use_event_count(block.ptr)]
    for stream, access in ((a, READ), (b, READ), (home, WRITE)):
        use(resource, block, stream, access)
        counts.append(resource.pending_use_event_count(block.ptr))
    assert counts == [1, 2, 3, 1]
    resource.deallocate(block)


def test_B21_finish_after_the_block_is_gone(resource: Any, streams: Any) -> None:
    home, other, _ = streams
    block = resource.allocate(64, home)
    resource.prepare_block_use(block.id, other, READ)
    resource.deallocate(block)
    with pytest.raises(UseAfterFree) as caught:
        resource.finish_block_use(block.id, other, READ)
    assert caught.value.generation == block.generation


def test_B21_reads_are_bounded(resource: Any, streams: Any) -> None:
    home, other, _ = streams
    block = resource.allocate(64, home)
    for _ in range(1000):
        resource.record_block_use(block, other)
    assert resource.pending_use_event_count(block.ptr) == 2
    resource.deallocate(block)


def test_B21_a_write_without_prepare_keeps_the_reads(resource: Any, streams: Any) -> None:
    """Otherwise a free would run under the readers."""
    home, reader, writer = streams
    block = resource.allocate(64, home)
    use(resource, block, reader, READ)
    resource.finish_block_use(block.id, writer, WRITE)
    assert block.write_stream is writer
    assert reader in block.reads
    assert home in block.reads, "the earlier write stays too"
    with testing.trace(only=WAITS) as calls:
        resource.deallocate(block)
    assert [call.args[0] for call in calls] == [home.handle] * 2


def test_B21_a_cancelled_prepare_is_none(resource: Any, streams: Any) -> None:
    home, reader, writer = streams
    block = resource.allocate(64, home)
    use(resource, block, reader, READ)
    resource.prepare_block_use(block.id, writer, WRITE)
    resource.cancel_block_use(block.id, writer, WRITE)
    assert block.write_stream is home
    resource.finish_block_use(block.id, writer, WRITE)
    assert reader in block.reads
    resource.deallocate(block)


def test_B21_a_read_between_prepare_and_finish_of_a_write_stays(resource: Any, streams: Any) -> None:
    home, reader, writer = streams
    block = resource.allocate(64, home)
    resource.prepare_block_use(block.id, writer, WRITE)
    resource.record_block_use(block, reader)
    resource.finish_block_use(block.id, writer, WRITE)
    assert block.write_stream is writer
    assert list(block.reads) == [reader]
    resource.deallocate(block)


def test_B21_a_write_between_prepare_and_finish_of_a_write_stays(resource: Any, streams: Any) -> None:
    home, first, second = streams
    block = resource.allocate(64, home)
    resource.prepare_block_use(block.id, first, WRITE)
    resource.prepare_block_use(block.id, second, WRITE)
    resource.finish_block_use(block.id, second, WRITE)
    resource.finish_block_use(block.id, first, WRITE)
    assert block.write_stream is first
    assert list(block.reads) == [second], "first did not wait for second: a free has to"
    resource.deallocate(block)


def test_B21_a_newer_read_of_the_same_stream_stays(resource: Any, streams: Any) -> None:
    home, reader, writer = streams
    block = resource.allocate(64, home)
    use(resource, block, reader, READ)
    resource.prepare_block_use(block.id, writer, WRITE)
    resource.record_block_use(block, reader)
    newest = block.reads[reader]
    resource.finish_block_use(block.id, writer, WRITE)
    assert block.reads == {reader: newest}
    resource.deallocate(block)


def test_B21_prepare_and_finish_are_one_section(resource: Any, streams: Any) -> None:
    """A reader on another thread comes before a write or after it, never in between."""
    home, reader, writer = streams
    block = resource.allocate(64, home)
    resource.prepare_block_use(block.id, writer, WRITE)
    begun, done = threading.Event(), threading.Event()
    waits: list[int] = []

    def read() -> None:
        begun.set()
        resource.prepare_block_use(block.id, reader, READ)
        waits.append(reader.synced.get(writer.id, 0))
        resource.finish_block_use(block.id, reader, READ)
        done.set()

    thread = threading.Thread(target=read)
    thread.start()
    begun.wait(30)
    assert not done.wait(0.1), "the read must not be prepared under the write"
    resource.finish_block_use(block.id, writer, WRITE)
    assert done.wait(30)
    thread.join(30)
    assert waits == [block.write_seq]
    resource.deallocate(block)


def test_B21_readers_do_not_wait_for_each_other_on_the_host(resource: Any, streams: Any) -> None:
    home, a, b = streams
    block = resource.allocate(64, home)
    resource.prepare_block_use(block.id, a, READ)
    in_thread(lambda: resource.prepare_block_use(block.id, b, READ))
    resource.deallocate(block)


def test_B21_a_finish_that_never_comes_is_an_error(
    resource: Any, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, a, b = streams
    monkeypatch.setattr(tickets, "_PATIENCE", 0.3)
    block = resource.allocate(64, home)
    resource.prepare_block_use(block.id, a, WRITE)
    began = time.monotonic()
    with pytest.raises(StreamMisuse, match="did not finish"):
        in_thread(lambda: resource.prepare_block_use(block.id, b, READ))
    assert time.monotonic() - began < 20
    resource.cancel_block_use(block.id, a, WRITE)
    in_thread(lambda: resource.prepare_block_use(block.id, b, READ))
    resource.deallocate(block)


def test_B21_a_dead_thread_holds_nobody_up(resource: Any, streams: Any) -> None:
    home, a, b = streams
    block = resource.allocate(64, home)
    in_thread(lambda: resource.prepare_block_use(block.id, a, WRITE))
    resource.prepare_block_use(block.id, b, READ)
    resource.deallocate(block)


def test_B21_prepares_pile_up_nothing(resource: Any, streams: Any) -> None:
    home, a, _ = streams
    block = resource.allocate(64, home)
    for _ in range(100):
        resource.prepare_block_use(block.id, a, READ)
        resource.prepare_block_use(block.id, a, WRITE)
    assert sum(len(t) for t in resource._tickets._open.values()) == 2
    resource.deallocate(block)
    assert resource._tickets._open == {}


def test_B20_a_failed_prepare_leaves_no_ticket(resource: Any, streams: Any) -> None:
    home, other, _ = streams
    block = resource.allocate(64, home)
    with testing.faults.fail("stream_wait_event"), pytest.raises(DriverError):
        resource.prepare_block_use(block.id, other, WRITE)
    assert resource._tickets._open == {}
    resource.finish_block_use(block.id, other, WRITE)
    assert home in block.reads
    resource.deallocate(block)


# --- record -----------------------------------------------------------------------------------------------------


def test_B22_record_is_a_read_that_queues_no_wait(resource: Any, streams: Any) -> None:
    home, other, _ = streams
    block = resource.allocate(64, home)
    with testing.faults.counts() as counted:
        resource.record_block_use(block, other)
    assert not counted
    assert resource.pending_use_event_count(block.ptr) == 2
    with testing.trace(only=WAITS) as calls:
        resource.deallocate(block)
    assert [call.args[0] for call in calls] == [home.handle]


def test_B22_64_times_across_streams_the_last_writer_is_the_new_block(driver: Any, resource: Any) -> None:
    home, other = new_stream(), new_stream()
    reused = 0
    before = None
    for cycle in range(64):
        block = resource.allocate(4096, home)
        reused += block.ptr == before
        before = block.ptr
        cuglue.as_stream(other).wait_for(block.alloc_stream, block.write_seq)
        fill(block, 200, other)
        resource.record_block_use(block, other)
        resource.deallocate(block)
        new = resource.allocate(4096, home)
        reused += new.ptr == block.ptr
        fill(new, cycle, home)
        assert (contents(new, home) == cycle).all()
        resource.deallocate(new)
    assert reused > 0, "no address was reused, so this proved nothing"


# --- deallocate -------------------------------------------------------------------------------------------------


def test_B23_the_free_waits_for_every_use_on_its_own_stream(resource: Any, streams: Any) -> None:
    home, a, b = streams
    block = resource.allocate(64, home)
    use(resource, block, a, READ)
    use(resource, block, b, READ)
    use(resource, block, home, READ)
    with testing.trace(only={*WAITS, "free_async"}) as calls:
        resource.deallocate(block)
    assert [call.method for call in calls] == ["stream_wait_event", "stream_wait_event", "free_async"]
    assert {call.args[0] for call in calls[:2]} == {home.handle}
    assert calls[2].args == (block.ptr, home.handle, 0)


def test_B22_a_use_on_a_stream_known_by_number(driver: Any, resource: Any, streams: Any) -> None:
    """The number is taken at its word, and its handle is never touched: the free waits for the whole context."""
    for impossible in (3, 99, 2**64):
        block = resource.allocate(64, streams[0])
        with pytest.raises(StreamMisuse, match="stream handle"):
            resource.record_block_use(block, impossible)
        assert resource.pending_use_event_count(block.ptr) == 1
        resource.deallocate(block)
    handle = driver.stream_create(0)
    block = resource.allocate(64, streams[0])
    resource.record_block_use(block, handle)
    driver.stream_destroy(handle)
    with testing.trace() as calls:
        resource.deallocate(block)
    assert all(handle not in call.args for call in calls)
    assert [c.method for c in calls if c.method in ("context_record", "stream_wait_event", "free_async")] == [
        "context_record",
        "stream_wait_event",
        "free_async",
    ]
    if driver.name == "sim":
        block = resource.allocate(64, streams[0])
        with pytest.raises(StreamMisuse, match="does not know"):
            resource.prepare_block_use(block.id, 0x12345000, WRITE)
        resource.deallocate(block)


@pytest.mark.parametrize("method", ["event_record", "stream_wait_event", "free_async", "capture_status"])
def test_B23_a_failed_deallocate_changes_nothing(resource: Any, streams: Any, method: str) -> None:
    home, a, _ = streams
    block = resource.allocate(64, home)
    resource.record_block_use(block, a)
    before = (accounting(resource), list(block.uses()), block.state)
    with testing.faults.fail(method) as failure, pytest.raises(DriverError):
        resource.deallocate(block)
    assert failure.raised == 1
    assert before == (accounting(resource), list(block.uses()), block.state)
    assert resource.live_blocks() == [block]
    resource.deallocate(block)
    assert block.state is BlockState.RETIRED


def test_B23_a_stale_generation_touches_nothing(resource: Any) -> None:
    stream = new_stream()
    old = resource.allocate(4096, stream)
    resource.deallocate(old)
    new = resource.allocate(4096, stream)
    assert new.ptr == old.ptr, "the address must be reused for this test to mean anything"
    before = accounting(resource)
    with testing.faults.counts() as counted:
        for call in (
            lambda: resource.deallocate(old),
            lambda: resource.record_block_use(old, stream),
            lambda: resource.prepare_block_use(old.id, stream, READ),
            lambda: resource.finish_block_use(old.id, stream, WRITE),
        ):
            with pytest.raises(UseAfterFree) as caught:
                call()
            assert caught.value.generation == old.generation
    assert not counted
    assert accounting(resource) == before
    assert resource.pending_use_event_count(new.ptr) == 1
    resource.deallocate(new)


def test_B24_reuse_is_stream_ordered(resource: Any) -> None:
    stream = new_stream()
    reused = 0
    for cycle in range(32):
        a = resource.allocate(8192, stream)
        fill(a, 255, stream)
        resource.deallocate(a)
        b = resource.allocate(8192, stream)
        reused += b.ptr == a.ptr
        pattern = np.full(8192, cycle, np.uint8)
        fill(b, cycle, stream)
        assert (contents(b, stream) == pattern).all()
        resource.deallocate(b)
    assert reused > 0


# --- accounting -------------------------------------------------------------------------------------------------


def test_B25_accounting(resource: Any, streams: Any) -> None:
    assert accounting(resource) == (0, 0, 0)
    blocks = [resource.allocate(100, stream) for stream in streams]
    assert accounting(resource) == (300, 0, 300)
    resource.deallocate(blocks[0])
    resource.deallocate(blocks[1])
    assert accounting(resource) == (100, 200, 300)
    assert resource.pending_per_stream() == {streams[0].id: 100, streams[1].id: 100}
    resource.reap_pending()
    assert accounting(resource) == (100, 0, 100)
    resource.deallocate(blocks[2])
    resource.reap_pending()
    assert accounting(resource) == (0, 0, 0)


# --- reap -------------------------------------------------------------------------------------------------------


def test_B26_reap_of_nothing_waits_for_nothing(resource: Any) -> None:
    block = resource.allocate(64)
    with testing.faults.counts() as counted:
        resource.reap_pending()
    assert not counted
    resource.deallocate(block)


def test_B26_each_stream_is_waited_for_once(resource: Any, streams: Any) -> None:
    for stream in (*streams, *streams):
        resource.deallocate(resource.allocate(64, stream))
    with testing.trace(only={"stream_synchronize"}) as calls:
        resource.reap_pending()
    assert sorted(call.args[0] for call in calls) == sorted(stream.handle for stream in streams)


def test_B26_states_become_freed(resource: Any) -> None:
    block = resource.allocate(64, new_stream())
    resource.deallocate(block)
    assert block.state is BlockState.RETIRED
    resource.reap_pending()
    assert block.state is BlockState.FREED
    with pytest.raises(UseAfterFree):
        resource.deallocate(block)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_B26_one_bad_stream_does_not_starve_the_rest(resource: Any, streams: Any, failing: int) -> None:
    for stream in streams:
        resource.deallocate(resource.allocate(64, stream))
    with testing.faults.fail("stream_synchronize", on=failing), pytest.raises(DriverError):
        resource.reap_pending()
    assert accounting(resource) == (0, 64, 64)
    resource.reap_pending()
    assert accounting(resource) == (0, 0, 0)


def test_B26_several_failures_are_one_error(resource: Any, streams: Any) -> None:
    for stream in streams:
        resource.deallocate(resource.allocate(64, stream))
    with testing.faults.fail("stream_synchronize", persistent=True), pytest.raises(SeveralErrors) as caught:
        resource.reap_pending()
    assert len(caught.value.errors) == 3
    assert accounting(resource) == (0, 192, 192)
    resource.reap_pending()
    assert accounting(resource) == (0, 0, 0)


def test_B26_without_blocking(driver: Any, resource: Any) -> None:
    stream = cuglue.as_stream(new_stream())
    done = cuglue.as_stream(new_stream())
    with testing.Latch(stream) as latch:
        resource.deallocate(resource.allocate(64, stream))
        resource.deallocate(resource.allocate(32, done))
        done.synchronize()
        with testing.faults.counts() as counted:
            resource.reap_pending(block=False)
        assert not {"stream_synchronize", "device_synchronize", "event_synchronize"} & set(counted)
        assert accounting(resource) == (0, 64, 64)
        latch.release()
    if driver.name == "sim":
        driver.pump()
    resource.reap_pending(block=False)
    assert accounting(resource) == (0, 0, 0)


def test_B26_a_racing_deallocate_is_never_lost(resource: Any) -> None:
    stop = threading.Event()
    problems: list[BaseException] = []

    def reap() -> None:
        try:
            while not stop.is_set():
                resource.reap_pending()
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    def work() -> None:
        try:
            stream = new_stream()
            for _ in range(200):
                resource.deallocate(resource.allocate(64, stream))
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    reaper = threading.Thread(target=reap)
    workers = [threading.Thread(target=work) for _ in range(4)]
    for thread in (reaper, *workers):
        thread.start()
    for thread in workers:
        thread.join(100)
    stop.set()
    reaper.join(30)
    assert problems == []
    resource.reap_pending()
    assert accounting(resource) == (0, 0, 0)


def test_B26_two_threads_free_on_one_stream_while_a_third_reaps(resource: Any) -> None:
    """The frees may be numbered in another order than they are noted in."""
    stream = new_stream()
    cuglue.as_stream(stream)

    def work() -> None:
        for _ in range(300):
            resource.deallocate(resource.allocate(64, stream))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        resource.reap_pending()
    for thread in threads:
        thread.join(100)
    resource.reap_pending()
    assert accounting(resource) == (0, 0, 0)


def test_B26_a_capturing_stream_is_left_alone(sim: Any) -> None:
    resource = AsyncCudaResource()
    a, b = (cuglue.as_stream(sim.Stream()) for _ in range(2))
    resource.deallocate(resource.allocate(64, a))
    resource.deallocate(resource.allocate(64, b))
    sim.capture_begin(a.handle, CaptureMode.RELAXED)
    resource.reap_pending()
    assert accounting(resource) == (0, 64, 64)
    sim.graph_destroy(sim.capture_end(a.handle))
    resource.reap_pending()
    assert accounting(resource) == (0, 0, 0)


def test_a_long_loop_keeps_no_dead_blocks(driver: Any, resource: Any) -> None:
    """Nobody reaps; what is done with must not pile up for ever."""
    stream = cuglue.as_stream(new_stream())
    for number in range(12000):
        resource.deallocate(resource.allocate(64, stream))
        if number % 1000 == 0:
            stream.synchronize()
    assert resource.pending_free_bytes <= 64 * 6000
    resource.reap_pending()
    gc.collect()
    assert accounting(resource) == (0, 0, 0)


def test_B27_it_tracks(resource: Any) -> None:
    assert resource.supports_block_use_tracking()


def test_B27b_the_reference_trace(resource: Any, streams: Any) -> None:
    s0, s1, s2 = streams
    names = {s0: "S0", s1: "S1", s2: "S2"}
    with testing.trace(only=WAITS) as calls:
        block = resource.allocate(256, s0)
    assert calls == []
    assert resource.pending_use_event_count(block.ptr) == 1
    table = [
        (READ, s1, 1, 2, "S0", {"S1"}),
        (READ, s2, 1, 3, "S0", {"S1", "S2"}),
        (WRITE, s0, 2, 1, "S0", set()),
        (WRITE, s1, 1, 1, "S1", set()),
        (READ_WRITE, s1, 0, 1, "S1", set()),
        (READ, s0, 1, 2, "S1", {"S0"}),
    ]
    for access, stream, waits, entries, write, reads in table:
        assert use(resource, block, stream, access) == waits
        assert resource.pending_use_event_count(block.ptr) == entries
        assert names[block.write_stream] == write
        assert {names[s] for s in block.reads or ()} == reads
    with testing.trace(only=WAITS) as calls:
        resource.deallocate(block)
    assert calls == []
    assert resource.pending_use_event_count(block.ptr) is None
    assert resource.pending_per_stream() == {s0.id: 256}


def test_speed_a_second_stream_costs_one_event_and_one_wait(resource: Any, streams: Any) -> None:
    home, other, _ = streams
    with testing.faults.counts() as alone:
        resource.deallocate(resource.allocate(64, home))
    with testing.faults.counts() as shared:
        block = resource.allocate(64, home)
        resource.record_block_use(block, other)
        resource.deallocate(block)
    asked = {"capture_status"}
    more = {m: shared[m] - alone[m] for m in shared if shared[m] != alone[m] and m not in asked}
    more.pop("event_create", None)  # only while there is no spare one
    assert more == {"event_record": 1, "stream_wait_event": 1}


# --- streams that are gone --------------------------------------------------------------------------------------


def test_a_block_keeps_its_stream_alive(driver: Any, resource: Any) -> None:
    stream = new_stream()
    block = resource.allocate(64, stream)
    handle = stream.ptr
    del stream
    gc.collect()
    with testing.trace(only={"free_async"}) as calls:
        resource.deallocate(block)
    assert calls[0].args[1] == handle


def test_a_stream_known_by_number_is_not_freed_on(driver: Any, resource: Any) -> None:
    handle = driver.stream_create(0)
    block = resource.allocate(64, handle)
    driver.stream_destroy(handle)
    again = cuglue.as_stream(new_stream())  # on the simulated device this has the same handle
    again.submit()
    with testing.trace() as calls:
        resource.deallocate(block)
    assert all(handle not in call.args for call in calls if call.method != "capture_status")
    assert [c.method for c in calls if c.method in ("context_record", "free_async")] == [
        "context_record",
        "free_async",
    ]
    resource.reap_pending()
    assert accounting(resource) == (0, 0, 0)


def test_no_free_makes_a_stream(sim: Any) -> None:
    """One is needed where the block's own may not be named any more; a driver that ends a thread may make none then."""
    resource = AsyncCudaResource()
    for stream in (PER_THREAD_STREAM, sim.stream_create(0)):
        block = in_thread(lambda s=stream: resource.allocate(64, s))
        with testing.faults.fail("stream_create", persistent=True):
            resource.deallocate(block)
            resource.reap_pending()
        if stream != PER_THREAD_STREAM:
            sim.stream_destroy(stream)
    assert accounting(resource) == (0, 0, 0)


def test_the_owner_thread_frees_on_its_own_stream(driver: Any, resource: Any) -> None:
    block = resource.allocate(64, PER_THREAD_STREAM)
    with testing.trace(only={"free_async", "context_record"}) as calls:
        resource.deallocate(block)
    assert [(c.method, c.args[1]) for c in calls] == [("free_async", PER_THREAD_STREAM)]


# --- no memory --------------------------------------------------------------------------------------------------


def test_report_M23_M24_wait_and_retry_before_giving_up(sim: Any) -> None:
    """Frees are pending on a second stream: the allocation must wait for them rather than fail."""
    driver = SimDriver(memory_bytes=1 << 20)
    with cuglue.use_driver(driver):
        resource = AsyncCudaResource()
        a, b = driver.Stream(), driver.Stream()
        resource.deallocate(resource.allocate(700_000, a))
        block = resource.allocate(800_000, b)
        assert block.state is BlockState.LIVE
        resource.deallocate(block)


def test_out_of_memory_explains_itself() -> None:
    driver = SimDriver(memory_bytes=1 << 20)
    with cuglue.use_driver(driver):
        resource = AsyncCudaResource()
        blocks = [resource.allocate(100_000, driver.Stream(), f"layer {i % 2}") for i in range(4)]
        before = accounting(resource)
        with pytest.raises(OutOfMemory) as caught:
            resource.allocate(900_000, driver.Stream())
        error = caught.value
        assert isinstance(error, MemoryError)
        assert (error.requested, error.in_use) == (900_000, 400_000)
        report: Any = error.report
        assert isinstance(report, cuglue.ShortageReport)
        assert (report.requested, report.live, report.live_blocks) == (900_000, 400_000, 4)
        assert set(report.top_tags) == {("layer 0", 200_000, 2), ("layer 1", 200_000, 2)}
        assert report.device_total == 1 << 20
        assert "collected garbage" in report.tried
        assert "waited for pending frees" in report.tried
        assert "trimmed the driver's pool" in report.tried
        for word in ("900000", "400000 bytes in 4 blocks", "layer 0", "tried:"):
            assert word in str(error)
        assert accounting(resource) == before
        for block in blocks:
            resource.deallocate(block)
        resource.reap_pending()


def test_P12_out_of_memory_collects_garbage_once() -> None:
    """Arrays in reference cycles come back only through the collector."""
    driver = SimDriver(memory_bytes=1 << 20)
    with cuglue.use_driver(driver):
        resource = AsyncCudaResource()

        class Holder:
            pass

        gc.disable()
        try:
            holder: Any = Holder()
            holder.me = holder
            holder.pointer = resource.malloc(700_000)
            del holder
            block = resource.allocate(800_000, driver.Stream())
        finally:
            gc.enable()
        resource.deallocate(block)
        resource.reap_pending()


# --- closing ----------------------------------------------------------------------------------------------------


def test_close_waits_and_frees(driver: Any, resource: Any) -> None:
    block = resource.allocate(64, new_stream(), "kept")
    resource.deallocate(resource.allocate(64, new_stream()))
    with pytest.warns(ResourceWarning, match="kept"):
        resource.close()
    assert block.state is BlockState.FREED
    assert accounting(resource) == (0, 0, 0)
    with pytest.raises(ClosedError):
        resource.allocate(64)


def test_a_failed_close_can_be_repeated(driver: Any, resource: Any) -> None:
    block = resource.allocate(64, new_stream())
    with testing.faults.fail("free_async", persistent=True), pytest.raises(DriverError):
        resource.close()
    assert not resource.closed
    assert block.state is BlockState.LIVE
    resource.deallocate(block)
    resource.close()


def test_blocks_of_a_closed_resource(driver: Any, resource: Any) -> None:
    block = resource.allocate(64, new_stream())
    resource.deallocate(block)
    resource.close()
    with pytest.raises(UseAfterFree):
        resource.deallocate(block)


def test_bad_ids(resource: Any, streams: Any) -> None:
    for bad in (None, 5, (1, 2, 3, 4), BlockId(0, 0, 0, 0)):
        with pytest.raises((StreamMisuse, UseAfterFree)):
            resource.prepare_block_use(bad, streams[0], READ)
    with pytest.raises((UsageError, AttributeError)):
        resource.record_block_use(None, streams[0])


# --- everything at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_D4_random_programs_have_no_hazard(seed: int) -> None:
    """Four streams, blocks written and read wherever, freed while in use: the simulated device judges the order."""
    driver = SimDriver(seed=seed)
    with cuglue.use_driver(driver):
        resource = AsyncCudaResource()
        streams = [cuglue.as_stream(driver.Stream()) for _ in range(4)]
        choose = random.Random(seed)
        live: dict[Any, int] = {}
        for _ in range(400):
            action = choose.random()
            if action < 0.3 or not live:
                stream = choose.choice(streams)
                block = resource.allocate(choose.choice([512, 1024, 4096]), stream)
                fill(block, 0, stream)
                block.finish(stream, WRITE)
                live[block] = 0
            elif action < 0.6:
                block, stream = choose.choice(list(live)), choose.choice(streams)
                value = choose.randrange(256)
                resource.prepare_block_use(block.id, stream, WRITE)
                fill(block, value, stream)
                resource.finish_block_use(block.id, stream, WRITE)
                live[block] = value
            elif action < 0.8:
                block, stream = choose.choice(list(live)), choose.choice(streams)
                resource.prepare_block_use(block.id, stream, READ)
                assert (contents(block, stream) == live[block]).all()
                resource.finish_block_use(block.id, stream, READ)
            elif action < 0.95:
                block = choose.choice(list(live))
                del live[block]
                resource.deallocate(block)
            else:
                resource.reap_pending(block=choose.random() < 0.5)
        for block in live:
            resource.deallocate(block)
        resource.reap_pending()
        assert accounting(resource) == (0, 0, 0)
        driver.device_synchronize(0)
        assert driver.hazards == []


@pytest.mark.parametrize("layer", [lambda r: r, PoolResource, DebugGuardResource, StatisticsResource])
@pytest.mark.parametrize("junk", [None, 5, "block", object()])
def test_what_is_no_block_has_no_uses(driver: Any, layer: Any, junk: Any) -> None:
    resource = layer(AsyncCudaResource())
    block = resource.allocate(64)
    with pytest.raises(UsageError, match="expected a block"):
        resource.record_block_use(junk, None)
    for call in resource.prepare_block_use, resource.finish_block_use, resource.cancel_block_use:
        with pytest.raises(StreamMisuse, match="expected a BlockId"):
            call(junk, None, Access.READ)
        with pytest.raises(DriverError, match="device 7"):
            call(block.id._replace(device_ordinal=7), None, Access.READ)
    resource.deallocate(block)
    resource.close()
