"""Random programs over streams, threads and the collector: no byte is anybody else's, and no access unordered."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from racing import race

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    Direct,
    DirectCudaResource,
    Exclusive,
    PoolResource,
    Sliced,
    as_stream,
)
from cuglue.core.device import device_state
from cuglue.driver.sim import SimDriver
from cuglue.errors import OutOfMemory
from cuglue.memory.cupy_plug import block_of
from cuglue.memory.pool import arena, bins, ladder

KIB, MIB = 1 << 10, 1 << 20
LAYOUTS: dict[str, Any] = {
    "arena": None,
    "sliced": [Sliced(MIB), Direct()],
    "mixed": [Sliced(256 * KIB, 64 * KIB, MIB), Exclusive(2 * MIB, 5), Direct(8 * MIB)],
}
OPERATIONS = ("allocate", "malloc", "free", "free", "use", "use", "trim", "reap", "collect")


class Program:
    """Runs operations chosen by a generator of random numbers; every piece holds its own value while it is alive."""

    def __init__(self, sim: SimDriver, pool: PoolResource, seed: int, operations: Any = OPERATIONS) -> None:
        self.sim = sim
        self.operations = operations
        self.pool = pool
        self.choose = random.Random(seed)
        self.objects = [sim.Stream() for _ in range(4)]
        self.streams = [as_stream(stream) for stream in self.objects]
        self.live: list[tuple[Any, Any]] = []  # (block, what keeps it alive)

    def size(self) -> int:
        return self.choose.choice(
            [1, 700, 5000, 40_000, 130 * KIB, 600 * KIB, 3 * MIB]
        ) + self.choose.randrange(600)

    def write(self, block: Any, stream: Any) -> None:
        block.prepare(stream, Access.WRITE)
        self.sim.fill_async(block.ptr, block.generation % 251, block.nbytes, stream.handle)
        block.finish(stream, Access.WRITE)

    def check(self, block: Any, stream: Any) -> None:
        block.prepare(stream, Access.READ)
        host = np.zeros(block.nbytes, np.uint8)
        self.sim.copy_async(
            host.ctypes.data, block.ptr, block.nbytes, cuglue.driver.protocol.CopyKind.D2H, stream.handle
        )
        block.finish(stream, Access.READ)
        stream.synchronize()
        assert (host == block.generation % 251).all()

    def step(self) -> None:
        what = self.choose.choice(self.operations)
        try:
            if what == "allocate":
                stream = self.choose.choice(self.streams)
                block = self.pool.allocate(self.size(), stream)
                self.write(block, stream)
                self.live.append((block, None))
            elif what == "malloc":
                with self.choose.choice(self.objects):
                    pointer = self.pool.malloc(self.size())
                block = block_of(pointer.mem)
                self.write(block, block.stream)  # type: ignore[union-attr]
                self.live.append((block, pointer))
            elif what == "free" and self.live:
                block, pointer = self.live.pop(self.choose.randrange(len(self.live)))
                if pointer is None:
                    self.pool.deallocate(block)
            elif what == "use" and self.live:
                block, _ = self.choose.choice(self.live)
                stream = self.choose.choice(self.streams)
                (self.write if self.choose.random() < 0.5 else self.check)(block, stream)
            elif what == "trim":
                self.pool.trim()
            elif what == "reap":
                self.pool.reap_pending(block=self.choose.random() < 0.5)
            elif what == "collect":
                gc.collect()
            elif what == "finish":
                self.choose.choice(self.streams).synchronize()
        except OutOfMemory:
            if self.live:
                block, pointer = self.live.pop()
                if pointer is None:
                    self.pool.deallocate(block)

    def finish(self) -> None:
        for block, pointer in self.live:
            self.check(block, block.stream)
            if pointer is None:
                self.pool.deallocate(block)
        self.live.clear()


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30), limit=st.sampled_from([None, 8 * MIB, 20 * MIB]), ordered=st.booleans())
def test_no_hazard_in_any_program(layout: str, seed: int, limit: int | None, ordered: bool) -> None:
    sim = SimDriver(seed=seed, memory_bytes=64 * MIB)
    with cuglue.use_driver(sim):
        source = AsyncCudaResource() if ordered else DirectCudaResource(mode="sync")
        pool = PoolResource(source, layout=LAYOUTS[layout], max_bytes=limit)
        program = Program(sim, pool, seed)
        for _ in range(60):
            program.step()
            assert (
                pool.bytes_reserved >= pool.bytes_outstanding >= sum(block.size for block, _ in program.live)
            )
            assert limit is None or pool.bytes_reserved <= limit
        program.finish()
        device_state(sim, 0).retire.run_forgotten()
        sim.device_synchronize(0)
        device_state(sim, 0).retire.drain(block=True)
        assert pool.bytes_outstanding == 0
        pool.close()
        assert sim.hazards == []
        held = {k: n for k, n in sim.inventory().items() if k in ("malloc", "malloc_async") and n}
        assert not held


LENDING = ("allocate", "malloc", "free", "free", "use", "finish", "finish", "finish")


@pytest.fixture
def lending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams lend each other pages from the first byte on and never tire of it; a mebibyte is large."""
    monkeypatch.setattr(ladder, "WORTH_BORROWING", 0)
    monkeypatch.setattr(ladder, "FIRST_EFFORTS", 1 << 40)
    for module in (ladder, arena, bins):
        monkeypatch.setattr(module, "LARGE", MIB)


@pytest.mark.parametrize("source", [AsyncCudaResource, lambda: DirectCudaResource(mode="sync")])
def test_no_hazard_where_streams_lend_pages(lending: None, source: Any) -> None:
    counters = []
    for seed in range(12):
        sim = SimDriver(seed=seed, memory_bytes=256 * MIB)
        with cuglue.use_driver(sim):
            pool = PoolResource(source())
            program = Program(sim, pool, seed, LENDING)
            for _ in range(120):
                program.step()
            program.finish()
            device_state(sim, 0).retire.run_forgotten()
            sim.device_synchronize(0)
            device_state(sim, 0).retire.drain(block=True)
            assert pool.bytes_outstanding == 0
            counters.append(pool.counters)
            pool.close()
            assert sim.hazards == []
            assert not any(sim.inventory()[kind] for kind in ("malloc", "malloc_async"))
    moved = sum(one.stolen for one in counters)
    assert (moved > 0) == (source is AsyncCudaResource), (
        "a resource that is told of no uses keeps its pages in place"
    )
    assert sum(one.drained for one in counters) > 0


def test_threads_whose_streams_lend_pages(lending: None, device: Any) -> None:
    sim = device(mib=256)
    pool = PoolResource(AsyncCudaResource(), max_bytes=128 * MIB)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            program = Program(sim, pool, seed, LENDING)
            for _ in range(150):
                program.step()
            program.finish()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    race(work, switch=1e-5)
    assert errors == []
    device_state(sim, 0).retire.run_forgotten()
    assert pool.bytes_outstanding == 0
    assert pool.counters.stolen > 0
    pool.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_with_streams_of_their_own_and_shared_blocks(device: Any, layout: str) -> None:
    sim = device(mib=256)
    pool = PoolResource(AsyncCudaResource(), layout=LAYOUTS[layout], max_bytes=64 * MIB)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            program = Program(sim, pool, seed)
            for _ in range(60):
                program.step()
            program.finish()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    device_state(sim, 0).retire.run_forgotten()
    assert pool.bytes_outstanding == 0
    pool.close()


def test_threads_on_one_stream_never_get_the_same_memory(device: Any) -> None:
    sim = device()
    pool = PoolResource(AsyncCudaResource())
    stream = sim.Stream()
    seen: dict[int, int] = {}
    clashes: list[int] = []
    guard = threading.Lock()

    def work(number: int) -> None:
        choose = random.Random(number)
        with stream:
            for _ in range(400):
                pointers = [
                    pool.malloc(choose.choice([512, 1000, 70_000, MIB]))
                    for _ in range(choose.randrange(1, 5))
                ]
                with guard:
                    clashes.extend(p.ptr for p in pointers if seen.setdefault(p.ptr, number) != number)
                with guard:
                    for pointer in pointers:
                        seen.pop(pointer.ptr, None)
                del pointers, pointer

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert pool.bytes_outstanding == 0
    pool.close()


def test_a_storm_of_the_collector(device: Any) -> None:
    """The collector runs at every object made, so that finalisers run inside every call of the pool."""
    sim = device(mib=128)
    pool = PoolResource(AsyncCudaResource(), max_bytes=48 * MIB)
    streams = [sim.Stream() for _ in range(3)]
    choose = random.Random(5)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        kept: list[Any] = []
        for _ in range(250):
            with choose.choice(streams):
                cycle: list[Any] = [pool.malloc(choose.choice([1000, 90_000, MIB, 5 * MIB]))]
            block = block_of(cycle[0].mem) if choose.random() < 0.3 else None
            if block is not None:
                other = as_stream(choose.choice(streams))
                block.prepare(other, Access.WRITE)
                sim.fill_async(block.ptr, 1, block.nbytes, other.handle)
                block.finish(other, Access.WRITE)
            cycle.append(cycle)
            if choose.random() < 0.1:
                kept.append(cycle[0])
            if len(kept) > 5:
                kept.pop(0)
            del cycle, block
    finally:
        gc.set_threshold(*before)
    kept.clear()
    gc.collect()
    device_state(sim, 0).retire.run_forgotten()
    assert pool.bytes_outstanding == 0
    pool.close()


def test_finalisers_during_finalisers_lose_nothing(device: Any) -> None:
    device()
    pool = PoolResource(AsyncCudaResource())

    class Parent:
        def __init__(self, child: Any) -> None:
            self.child = child

        def __del__(self) -> None:
            pool.malloc(5000)  # an allocation inside a finaliser

    for _ in range(100):
        parent = Parent(pool.malloc(5000))
        parent.me = parent  # type: ignore[attr-defined]
        del parent
    gc.collect()
    assert pool.bytes_outstanding == 0
    pool.close()


def test_a_per_thread_default_stream_belongs_to_its_thread(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = device()

    class PerThread:
        ptr = 2
        device_id = 0

    shared = PerThread()
    monkeypatch.setattr(sim, "stream_current", lambda device: shared)
    pool = PoolResource(AsyncCudaResource())
    addresses: list[int] = []

    def work() -> None:
        addresses.append(pool.malloc(1000).ptr)
        addresses.append(pool.malloc(1000).ptr)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert addresses[0] == addresses[1]
    assert addresses[2] == addresses[3] != addresses[0]
    monkeypatch.undo()
    pool.close()
