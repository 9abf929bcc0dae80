"""LoggingResource and its sinks (contracts B30)."""

from __future__ import annotations

import csv
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from memory_tools import new_stream

import cuglue
from cuglue import (
    Access,
    AllocationRecord,
    AsyncCudaResource,
    CsvSink,
    GlobalDeviceBudget,
    InMemorySink,
    JsonLinesSink,
    LoggingResource,
    NullSink,
    TraceSink,
    testing,
)
from cuglue.errors import DriverError, OutOfBounds, OutOfBudget, StreamMisuse, UseAfterFree
from cuglue.memory.records import Action, Failure, failure_of, truncated

FIELDS = (
    "action",
    "device_ordinal",
    "stream_id",
    "ptr",
    "bytes",
    "tag",
    "generation",
    "thread_id",
    "order_counter",
    "timestamp_nanos",
    "result",
)


@pytest.fixture
def sink() -> InMemorySink:
    return InMemorySink()


@pytest.fixture
def resource(driver: Any, sink: InMemorySink) -> LoggingResource:
    return LoggingResource(AsyncCudaResource(), sink)


def test_B30_the_fields_of_a_success(resource: Any, sink: InMemorySink) -> None:
    assert AllocationRecord._fields == FIELDS
    before = time.time_ns()
    stream = cuglue.as_stream(new_stream())
    block = resource.allocate(1000, stream, "weights")
    resource.deallocate(block)
    resource.reap_pending()
    allocate, deallocate, reap = sink.snapshot()
    identity = (0, stream.id, block.ptr, 1000, "weights", block.generation, threading.get_ident())
    assert allocate[:8] == (Action.ALLOCATE, *identity)
    assert deallocate[:8] == (Action.DEALLOCATE, *identity)
    assert reap[:8] == (Action.REAP_PENDING, 0, None, None, None, None, None, threading.get_ident())
    assert all(record.ok for record in (allocate, deallocate, reap))
    assert before <= allocate.timestamp_nanos <= time.time_ns()
    orders = [record.order_counter for record in (allocate, deallocate, reap)]
    assert orders == sorted(set(orders))


def test_B30_a_refused_allocation(resource: Any, sink: InMemorySink) -> None:
    stream = cuglue.as_stream(new_stream())
    with testing.faults.fail("malloc_async", code=999), pytest.raises(DriverError):
        resource.allocate(500, stream, "big")
    (record,) = sink.snapshot()
    assert (record.action, record.stream_id, record.tag, record.bytes) == (
        Action.ALLOCATE,
        stream.id,
        "big",
        500,
    )
    assert record.ptr is record.generation is None
    assert record.result is not None
    assert record.result.kind == "Driver"
    assert "cudaErrorUnknown" in record.result.message


def test_B30_a_refused_deallocate_names_the_block(resource: Any, sink: InMemorySink) -> None:
    block = resource.allocate(64)
    resource.deallocate(block)
    sink.clear()
    with pytest.raises(UseAfterFree):
        resource.deallocate(block)
    (record,) = sink.snapshot()
    assert (record.action, record.ptr, record.generation) == (Action.DEALLOCATE, block.ptr, block.generation)
    assert record.result is not None
    assert record.result.kind == "UseAfterFree"


def test_B30_a_failed_reap(resource: Any, sink: InMemorySink) -> None:
    resource.deallocate(resource.allocate(64, new_stream()))
    sink.clear()
    with testing.faults.fail("stream_synchronize"), pytest.raises(DriverError):
        resource.reap_pending()
    resource.reap_pending()
    assert [r.ok for r in sink.snapshot()] == [False, True]


def test_B30_no_record_of_anything_else(resource: Any, sink: InMemorySink) -> None:
    block = resource.allocate(64)
    sink.clear()
    stream = new_stream()
    resource.record_block_use(block, stream)
    resource.prepare_block_use(block.id, stream, Access.READ)
    resource.finish_block_use(block.id, stream, Access.READ)
    assert resource.supports_block_use_tracking()
    assert resource.budget_snapshot() is None
    assert resource.bytes_outstanding == 64
    assert resource.device_ordinal == 0
    assert len(sink) == 0
    resource.deallocate(block)


def test_B30_two_allocations_two_frees_one_reap(resource: Any, sink: InMemorySink) -> None:
    blocks = [resource.allocate(64) for _ in range(2)]
    for block in blocks:
        resource.deallocate(block)
    resource.reap_pending()
    assert [r.action.value for r in sink.snapshot()] == [
        *["allocate"] * 2,
        *["deallocate"] * 2,
        "reap_pending",
    ]


def test_B30_order_counters_are_strictly_increasing_in_the_process(driver: Any) -> None:
    sinks = [InMemorySink() for _ in range(3)]
    resources = [LoggingResource(AsyncCudaResource(), sink) for sink in sinks]

    def work(resource: Any) -> None:
        for _ in range(50):
            resource.deallocate(resource.allocate(64))

    threads = [threading.Thread(target=work, args=(r,)) for r in resources * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    orders = [record.order_counter for sink in sinks for record in sink.snapshot()]
    assert len(set(orders)) == len(orders) == 600
    for sink in sinks:
        mine = [record.order_counter for record in sink.snapshot()]
        assert mine == sorted(mine)


def test_B30_memory_of_arrays_is_logged(resource: Any, sink: InMemorySink) -> None:
    pointer = resource.malloc(100)
    retire = pointer.mem.stream.state.retire
    generation = pointer.mem.generation
    del pointer
    retire.run_forgotten()
    assert [(r.action.value, r.bytes, r.generation) for r in sink.snapshot()] == [
        ("allocate", 100, generation),
        ("deallocate", 100, generation),
    ]


def test_B30_a_budget_outside_logs_nothing_it_refuses(driver: Any, sink: InMemorySink) -> None:
    outside = GlobalDeviceBudget(LoggingResource(AsyncCudaResource(), sink), 100)
    with pytest.raises(OutOfBudget):
        outside.allocate(101)
    assert len(sink) == 0
    inside = LoggingResource(GlobalDeviceBudget(AsyncCudaResource(), 100), sink)
    with pytest.raises(OutOfBudget):
        inside.allocate(101, tag="too much")
    (record,) = sink.snapshot()
    assert record.result is not None
    assert (record.result.kind, record.tag, record.bytes) == ("OutOfBudget", "too much", 101)


class Refusing:
    """A sink that takes nothing."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def emit(self, record: AllocationRecord) -> None:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("full"), OSError("disk"), MemoryError(), KeyError("x")])
def test_B30_a_sink_that_raises_is_counted(driver: Any, error: BaseException) -> None:
    resource = LoggingResource(AsyncCudaResource(), Refusing(error))
    block = resource.allocate(64)
    assert resource.dropped_records == 1
    resource.deallocate(block)
    assert resource.dropped_records == 2
    with pytest.raises(UseAfterFree):
        resource.deallocate(block)
    resource.reap_pending()
    assert resource.dropped_records == 4
    assert resource.bytes_outstanding == 0


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "abc\u2026"),
        ("abc", 0, "\u2026"),
        ("", 0, ""),
        ("a\u00e9b", 2, "a\u2026"),  # the second byte of the second character would be cut
        ("a\u00e9b", 3, "a\u00e9\u2026"),
        ("\U0001f600x", 3, "\u2026"),
    ],
)
def test_B30_messages_are_cut_between_characters(text: str, limit: int, expected: str) -> None:
    assert truncated(text, limit) == expected


def test_B30_messages_have_256_bytes_at_most() -> None:
    failure = failure_of(ValueError("\u00e9" * 500))
    assert failure.message == "\u00e9" * 128 + "\u2026"
    assert failure_of(ValueError("x" * 256)).message == "x" * 256


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OutOfBudget(), "OutOfBudget"),
        (DriverError("x", code=1, name="n", call="c"), "Driver"),
        (StreamMisuse("x"), "StreamMisuse"),
        (UseAfterFree("x"), "UseAfterFree"),
        (OutOfBounds("x"), "OutOfBounds"),
        (cuglue.errors.OutOfMemory("x"), "OutOfMemory"),
        (cuglue.errors.DevicePoisoned("x"), "Driver"),
        (cuglue.errors.UsageError("x"), "Usage"),
        (RuntimeError("x"), "RuntimeError"),
    ],
)
def test_B30_kinds_of_failure(error: BaseException, kind: str) -> None:
    assert failure_of(error).kind == kind


# --- sinks ------------------------------------------------------------------------------------------------------


def exercise(resource: Any) -> None:
    block = resource.allocate(64, tag='a, "quoted" tag')
    resource.deallocate(block)
    with pytest.raises(UseAfterFree):
        resource.deallocate(block)
    resource.reap_pending()


def test_in_memory_sink(resource: Any, sink: InMemorySink) -> None:
    exercise(resource)
    assert len(sink) == 4
    snapshot = sink.snapshot()
    sink.clear()
    assert len(sink) == 0
    assert len(snapshot) == 4
    NullSink().emit(snapshot[0])


def test_csv_sink(driver: Any, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with CsvSink(path) as sink:
        exercise(LoggingResource(AsyncCudaResource(), sink))
        sink.flush()
        assert len(path.read_text().splitlines()) == 5
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["action"] for row in rows] == ["allocate", "deallocate", "deallocate", "reap_pending"]
    assert rows[0]["tag"] == 'a, "quoted" tag'
    assert [row["result"] for row in rows] == ["ok", "ok", "UseAfterFree", "ok"]
    assert "generation" in rows[2]["message"]
    assert rows[3]["bytes"] == ""


def test_json_lines_sink(driver: Any, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    sink = JsonLinesSink(path)
    exercise(LoggingResource(AsyncCudaResource(), sink))
    sink.close()
    sink.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["result"] if line["result"] == "ok" else line["result"]["kind"] for line in lines] == [
        "ok",
        "ok",
        "UseAfterFree",
        "ok",
    ]
    assert set(lines[0]) == set(FIELDS)
    assert lines[0]["bytes"] == 64


def test_trace_sink(driver: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceSink(path) as sink:
        exercise(LoggingResource(AsyncCudaResource(), sink))
    events = json.loads(path.read_text())
    assert [e["ph"] for e in events] == ["b", "C", "e", "C", "i", "i"]
    begin, end = events[0], events[2]
    assert begin["id"] == end["id"]
    assert begin["ts"] <= end["ts"]
    assert begin["name"] == end["name"] == 'a, "quoted" tag'
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C"] == [64, 0]
    empty = tmp_path / "empty.json"
    TraceSink(empty).close()
    assert json.loads(empty.read_text()) == []


def test_a_sink_over_an_open_file(driver: Any, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        with JsonLinesSink(file) as sink:
            exercise(LoggingResource(AsyncCudaResource(), sink))
        assert not file.closed


def test_a_closed_sink_is_a_refusing_one(driver: Any, tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "log.csv")
    resource = LoggingResource(AsyncCudaResource(), sink)
    sink.close()
    resource.deallocate(resource.allocate(64))
    assert resource.dropped_records == 2


def test_report_M42_a_sink_may_allocate(driver: Any) -> None:
    """No lock of ours is held while Python of somebody else runs."""
    inner = AsyncCudaResource()

    class Busy:
        def emit(self, record: AllocationRecord) -> None:
            inner.deallocate(inner.allocate(16))

    resource = LoggingResource(inner, Busy())
    threads = [
        threading.Thread(
            target=lambda: [resource.deallocate(resource.allocate(64)) for _ in range(100)], daemon=True
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert resource.dropped_records == 0
    assert isinstance(Failure("a", "b"), tuple)


def test_what_a_sink_does_with_the_resource_it_logs_is_done_and_dropped(driver: Any) -> None:
    seen: list[AllocationRecord] = []

    class Counting:
        """As a sink that keeps its counters on the device."""

        def emit(self, record: AllocationRecord) -> None:
            seen.append(record)
            resource.deallocate(resource.allocate(16))
            resource.malloc(16)
            resource.reap_pending()

    resource = LoggingResource(AsyncCudaResource(), Counting())
    for action in lambda: resource.deallocate(resource.allocate(64)), lambda: resource.malloc(64):
        action()
    assert [record.action for record in seen] == [Action.ALLOCATE, Action.DEALLOCATE, Action.ALLOCATE]
    assert resource.dropped_records >= 3 * 4
    resource.sink = sink = InMemorySink()
    resource.reap_pending()
    assert [record.action for record in sink.snapshot()] == [Action.DEALLOCATE, Action.REAP_PENDING]
    assert resource.bytes_outstanding == 0
