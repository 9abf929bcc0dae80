"""Eight threads on four streams: no overlap, no corruption, counters exact."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from memory_tools import fill, new_stream

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    GlobalDeviceBudget,
    InMemorySink,
    LoggingResource,
    PinnedHostResource,
    StatisticsResource,
    TrackingResource,
)
from cuglue.driver.protocol import CopyKind

THREADS = 8
STREAMS = 4
HELD = 6
LARGEST = 4096
TOGETHER = 32  # blocks looked at after one wait


class Looks:
    """What blocks held, copied to pinned memory in stream order and compared many at a time.

    A wait for each block would take nearly all of the time, and would keep the host from running ahead of the device,
    which is where frees that come too early show.
    """

    def __init__(self, pinned: PinnedHostResource, streams: list[Any]) -> None:
        self._pinned = pinned
        self._streams = streams
        self._block = pinned.allocate(TOGETHER * LARGEST, streams[0])
        self._bytes = np.frombuffer(pinned.view(self._block), np.uint8).reshape(TOGETHER, LARGEST)
        self._expected: list[tuple[int, int]] = []
        self.looked = 0
        self.wrong: list[str] = []

    def queue(self, block: Any, value: int, stream: Any) -> None:
        """Look at ``block`` on ``stream``, which comes after its last write."""
        row = len(self._expected)
        self._bytes[row, : block.size] = 255 - value  # a copy that never ran shows
        address = self._block.ptr + row * LARGEST
        stream.driver.copy_async(address, block.ptr, block.size, CopyKind.D2H, stream.handle)
        stream.submit()
        self._expected.append((value, block.size))
        if row + 1 == TOGETHER:
            self.compare()

    def compare(self) -> None:
        """Wait, and look at all that was queued."""
        for stream in self._streams:
            stream.synchronize()
        for row, (value, size) in enumerate(self._expected):
            seen = self._bytes[row, :size]
            if not (seen == value).all():
                self.wrong.append(f"{value} in {size} bytes became {np.unique(seen)}")
        self.looked += len(self._expected)
        self._expected.clear()

    def close(self) -> None:
        """Look at the rest and give the pinned memory back."""
        self.compare()
        del self._bytes
        self._pinned.deallocate(self._block)


class Worker:
    """Allocates, writes, uses elsewhere, looks, frees; counts its calls of the resource."""

    def __init__(self, seed: int, resource: Any, streams: list[Any], looks: Looks, operations: int) -> None:
        self.choose = random.Random(seed)
        self.resource = resource
        self.streams = streams
        self.looks = looks
        self.operations = operations
        self.allocated = 0
        self.allocated_bytes = 0
        self.done = 0
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
            self.looks.close()
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self.failure = error

    def take(self) -> tuple[Any, int]:
        value = self.choose.randrange(256)
        stream = self.choose.choice(self.streams)
        block = self.resource.allocate(self.choose.choice([256, 1000, LARGEST]), stream)
        self.allocated += 1
        self.allocated_bytes += block.nbytes
        user = self.choose.choice(self.streams)
        self.resource.prepare_block_use(block.id, user, Access.WRITE)
        fill(block, value, user)
        self.resource.finish_block_use(block.id, user, Access.WRITE)
        self.done += 3
        return block, value

    def give_back(self, block: Any, value: int) -> None:
        reader = self.choose.choice(self.streams)
        self.resource.prepare_block_use(block.id, reader, Access.READ)
        self.looks.queue(block, value, reader)
        self.resource.finish_block_use(block.id, reader, Access.READ)
        self.resource.deallocate(block)  # under the copy, which has hardly begun
        self.done += 3


def join_all(threads: list[threading.Thread], seconds: float) -> None:
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


@pytest.mark.timeout(400)
def test_threads_and_streams(driver: Any) -> None:
    """10^5 operations in all on the simulated device, 10^6 on a real one."""
    operations = (10**5 if driver.name == "sim" else 10**6) // THREADS
    source, pinned = AsyncCudaResource(), PinnedHostResource()
    sink = InMemorySink()
    statistics = StatisticsResource(GlobalDeviceBudget(source, 1 << 30))
    resource = LoggingResource(TrackingResource(statistics), sink)
    streams = [cuglue.as_stream(new_stream()) for _ in range(STREAMS)]
    workers = [Worker(seed, resource, streams, Looks(pinned, streams), operations) for seed in range(THREADS)]
    join_all([threading.Thread(target=worker, daemon=True) for worker in workers], 350)
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure
        assert worker.looks.wrong == []
        assert worker.looks.looked == worker.allocated
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
    pinned.reap_pending()
    assert pinned.bytes_outstanding == 0


@pytest.mark.timeout(200)
def test_threads_and_arrays(driver: Any) -> None:
    """Arrays made and dropped on every thread, also by another one than made them."""
    operations = 4000 if driver.name == "sim" else 100_000
    resource, pinned = AsyncCudaResource(), PinnedHostResource()
    streams = [cuglue.as_stream(new_stream()) for _ in range(STREAMS)]
    parked: list[Any] = []
    looked: list[Looks] = []
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        looks = Looks(pinned, streams)
        looked.append(looks)
        try:
            for _ in range(operations // THREADS):
                value, stream = choose.randrange(256), choose.choice(streams)
                pointer = resource.malloc(choose.choice([512, 1500, 4000]))
                block: Any = pointer.mem
                with stream.state.ordering:
                    block.prepare(stream, Access.WRITE)
                    fill(block, value, stream, block.size)
                    looks.queue(block, value, stream)
                    block.finish(stream, Access.WRITE)
                parked.append(pointer)
                del block, pointer
                if len(parked) > 40:
                    try:
                        parked.pop(choose.randrange(len(parked)))
                    except (IndexError, ValueError):
                        pass  # other threads take from it too
            looks.close()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    join_all([threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(THREADS)], 150)
    if failures:
        raise failures[0]
    assert [looks.wrong for looks in looked] == [[]] * THREADS
    assert sum(looks.looked for looks in looked) == operations
    assert all(pointer.mem.state is BlockState.LIVE for pointer in parked)
    parked.clear()
    gc.collect()
    streams[0].state.retire.drain()
    resource.reap_pending()
    assert resource.bytes_outstanding == 0
    pinned.reap_pending()
