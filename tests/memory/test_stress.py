"""Eight threads on four streams: no overlap, no corruption, counters exact."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import numpy as np
import pytest
from memory_tools import contents, fill, new_stream

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    GlobalDeviceBudget,
    InMemorySink,
    LoggingResource,
    StatisticsResource,
    TrackingResource,
)

THREADS = 8
STREAMS = 4
HELD = 6


class Worker:
    """Allocates, writes, uses elsewhere, looks, frees; counts what it does."""

    def __init__(self, seed: int, resource: Any, streams: list[Any], operations: int) -> None:
        self.choose = random.Random(seed)
        self.resource = resource
        self.streams = streams
        self.operations = operations
        self.allocated = 0
        self.allocated_bytes = 0
        self.done = 0
        self.wrong: list[str] = []
        self.failure: BaseException | None = None

    def __call__(self) -> None:
        held: list[tuple[Any, int]] = []
        try:
            while self.done < self.operations:
                if len(held) == HELD:
                    self.give_back(*held.pop(self.choose.randrange(HELD)))
                held.append(self.take())
            for block, value in held:
                self.give_back(block, value)
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self.failure = error

    def take(self) -> tuple[Any, int]:
        value = self.choose.randrange(256)
        stream = self.choose.choice(self.streams)
        block = self.resource.allocate(self.choose.choice([256, 1000, 4096]), stream)
        self.allocated += 1
        self.allocated_bytes += block.nbytes
        user = self.choose.choice(self.streams)
        self.resource.prepare_block_use(block.id, user, Access.WRITE)
        fill(block, value, user)
        self.resource.finish_block_use(block.id, user, Access.WRITE)
        self.done += 2
        return block, value

    def give_back(self, block: Any, value: int) -> None:
        reader = self.choose.choice(self.streams)
        self.resource.prepare_block_use(block.id, reader, Access.READ)
        seen = contents(block, reader)
        self.resource.finish_block_use(block.id, reader, Access.READ)
        if not (seen == value).all():
            self.wrong.append(f"{block}: {value} became {np.unique(seen)}")
        self.resource.deallocate(block)
        self.done += 2


@pytest.mark.timeout(1200)
def test_threads_and_streams(driver: Any) -> None:
    """10^5 operations in all on the simulated device, 10^6 on a real one."""
    operations = (10**5 if driver.name == "sim" else 10**6) // THREADS
    source = AsyncCudaResource()
    sink = InMemorySink()
    statistics = StatisticsResource(GlobalDeviceBudget(source, 1 << 30))
    resource = LoggingResource(TrackingResource(statistics), sink)
    streams = [cuglue.as_stream(new_stream()) for _ in range(STREAMS)]
    workers = [Worker(seed, resource, streams, operations) for seed in range(THREADS)]
    threads = [threading.Thread(target=worker, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1000)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure
        assert worker.wrong == []
    count = sum(worker.allocated for worker in workers)
    numbers = statistics.statistics()
    assert (numbers.total_count, numbers.total_bytes) == (count, sum(w.allocated_bytes for w in workers))
    assert (numbers.current_count, numbers.current_bytes) == (0, 0)
    assert numbers.peak_count <= THREADS * HELD
    assert len(sink) == 2 * count
    assert all(record.ok for record in sink.snapshot())
    resource.reap_pending()
    assert source.bytes_outstanding == 0
    assert statistics.budget_snapshot().reserved == 0  # type: ignore[union-attr]
    assert source.live_blocks() == []


@pytest.mark.timeout(600)
def test_threads_and_arrays(driver: Any) -> None:
    """Arrays made and dropped on every thread, also by another one than made them."""
    operations = 4000 if driver.name == "sim" else 100_000
    resource = AsyncCudaResource()
    streams = [cuglue.as_stream(new_stream()) for _ in range(STREAMS)]
    parked: list[Any] = []
    wrong: list[str] = []
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(operations // THREADS):
                value, stream = choose.randrange(256), choose.choice(streams)
                pointer = resource.malloc(choose.choice([512, 1500, 4000]))
                block: Any = pointer.mem
                with stream.state.ordering:
                    block.prepare(stream, Access.WRITE)
                    fill(block, value, stream, block.size)
                    block.finish(stream, Access.WRITE)
                if not (contents(block, stream, block.size) == value).all():
                    wrong.append(repr(block))
                parked.append(pointer)
                del block, pointer
                if len(parked) > 40:
                    try:
                        parked.pop(choose.randrange(len(parked)))
                    except (IndexError, ValueError):
                        pass  # other threads take from it too
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(500)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if failures:
        raise failures[0]
    assert wrong == []
    assert all(pointer.mem.state is BlockState.LIVE for pointer in parked)
    parked.clear()
    gc.collect()
    streams[0].state.retire.drain()
    resource.reap_pending()
    assert resource.bytes_outstanding == 0
