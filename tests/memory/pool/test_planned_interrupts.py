"""Ctrl-C at every point of a pool with a layout: nothing is lost or handed out twice, nobody waits for a lock."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from interrupts import interrupted, interrupted_after

import cuglue
from cuglue import AsyncCudaResource, Direct, Exclusive, MemoryUsage, PoolResource, Sliced
from cuglue.core.device import device_state
from cuglue.lifecycle import BlockState
from cuglue.testing import SimDriver

from .bytemap import covered

KIB = 1 << 10
PLANS = tuple(
    f"memory/pool/{name}.py" for name in ("planned", "plans", "reservation", "stream_memory", "windows")
)
LAYOUTS = {
    "sliced": [Sliced(64 * KIB)],
    "exclusive": [Exclusive(64 * KIB, dealloc_period=1)],
    "direct": [Direct(reclaim_at=48 * KIB)],
    "several": [Sliced(16 * KIB, max_pool_size=16 * KIB), Direct()],
}


def blocks(pool: PoolResource, kept: list[Any]) -> None:
    for nbytes in (12 * KIB, 3 * KIB, 12 * KIB):
        kept.append(pool.allocate(nbytes))
    for at in (1, 0, 2):
        pool.deallocate(kept[at])
    kept.clear()
    kept.append(pool.allocate(12 * KIB))


def reservations(pool: PoolResource, kept: list[Any]) -> None:
    memory = pool.stream_memory()
    for nbytes in (12 * KIB, 3 * KIB):
        kept.append(memory.reserve(nbytes))
        kept[-1].resolve()
    for one in kept:
        one.release()
    kept.clear()
    with memory.persistent():
        kept.append(memory.reserve(KIB))


def cleaned_up(pool: PoolResource, kept: list[Any]) -> None:
    for nbytes in (12 * KIB, 30 * KIB):
        pool.deallocate(pool.allocate(nbytes))
    pool.stream_memory().cleanup()
    for _ in range(3):
        pool.deallocate(pool.allocate(12 * KIB))


def give_all(pool: PoolResource, kept: list[Any]) -> None:
    for one in kept:
        if one.state is BlockState.LIVE:
            one.release() if isinstance(one, cuglue.Reservation) else pool.deallocate(one)
    kept.clear()
    for one in list(pool._table):  # whose caller was interrupted
        pool.deallocate(one)


@pytest.mark.parametrize(("interrupt", "stride"), [(interrupted, 1), (interrupted_after, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", [blocks, reservations, cleaned_up])
def test_an_interrupt_loses_nothing_of_a_layouts_pools(
    program: Callable[[PoolResource, list[Any]], None], layout: str, interrupt: Any, stride: int
) -> None:
    for step in itertools.count(1, stride):
        sim = SimDriver()
        with cuglue.use_driver(sim):
            pool = PoolResource(AsyncCudaResource(), layout=LAYOUTS[layout])
            memory, kept = pool.stream_memory(), list[Any]()
            program(pool, kept)
            give_all(pool, kept)
            where = interrupt(lambda p=pool, k=kept: program(p, k), step, *PLANS)
            sys.last_exc = None  # type: ignore[assignment]
            give_all(pool, kept)
            at = f"interrupted at step {step}, {where}"
            assert memory.usage().number_allocs == 0, at
            assert memory.usage().bytes_reserved == pool.bytes_reserved, at
            program(pool, kept)
            spans = sorted((span.ptr, span.size) for span in memory.live_spans())
            assert all(ptr + size <= other for (ptr, size), (other, _) in itertools.pairwise(spans))
            assert all(covered(page) for kind in (*memory._pools, memory._persistent) for page in kind.pages)
            give_all(pool, kept)
            figures: list[MemoryUsage] = []
            thread = threading.Thread(
                target=lambda m=memory, f=figures: f.append((m.cleanup(), m.usage())[1])
            )  # type: ignore[misc]
            thread.start()
            thread.join(20)
            assert figures == [MemoryUsage()], f"{at}: a lock is held, or something is lost"
            pool.close()
            device_state(sim, 0).retire.run_forgotten()
            assert sim.hazards == []
            assert sim.inventory()["bytes"] == 0, at
        if where is None:
            break
    gc.collect()
    assert step > 20
