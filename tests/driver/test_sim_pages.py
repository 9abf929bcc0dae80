"""Items kept by the bytes they concern: none is missed, few are looked at."""

from __future__ import annotations

import random

import pytest

from cuglue.driver.protocol import CopyKind
from cuglue.driver.sim import SimDriver
from cuglue.driver.sim.pages import Pages
from cuglue.driver.sim.ranges import Range, linear, pitched

N = 64


def some_range(rng: random.Random) -> Range:
    start = rng.randrange(100_000)
    if rng.random() < 0.3:
        return pitched(start, rng.randrange(1, 50), rng.randrange(1, 20), rng.randrange(50, 9000))
    return linear(start, rng.choice([0, 1, 60, 4096, 5000, 90_000]))


@pytest.mark.parametrize("seed", range(20))
def test_as_one_list_would_answer(seed: int) -> None:
    rng = random.Random(seed)
    pages: Pages[tuple[Range, int]] = Pages()
    items: list[tuple[Range, int]] = []
    for number in range(200):
        item = some_range(rng), number
        items.append(item)
        pages.add(item[0], item)
        asked = some_range(rng)
        assert [i for i in items if i[0].overlaps(asked)] == sorted(
            (i for i in pages.around(asked) if i[0].overlaps(asked)), key=lambda i: i[1]
        )
        if number % 7 == 0:
            gone = some_range(rng)
            pages.keep(lambda i, gone=gone: not i[0].overlaps(gone), gone)  # type: ignore[misc]
            items = [i for i in items if not i[0].overlaps(gone)]
        if number % 50 == 0:
            pages.keep(lambda i: i[1] % 3 > 0)
            items = [i for i in items if i[1] % 3]
        assert sorted(pages, key=lambda i: i[1]) == items
        assert len(pages) == len(items)


def test_a_call_looks_at_its_neighbours_alone() -> None:
    """The host waits for none of 2,000 copies, so that all of them count; each took a look at all before it."""
    sim, count = SimDriver(), 2000
    stream, a, pinned = sim.stream_create(0), sim.malloc(N, 0), sim.host_alloc(count * N)
    for i in range(count):
        sim.host_view(pinned + i * N, N, True)[:] = bytes([i % 256]) * N
        sim.copy_async(a, pinned + i * N, N, CopyKind.H2D, stream)
    allocation = sim._space.exact(pinned)
    assert allocation is not None
    assert allocation.watch is not None
    everything = allocation.log.uses, allocation.watch._pending
    for kept in everything:
        assert len(kept) == count
        assert len(list(kept.around(linear(1000 * N, N)))) <= 4096 // N
    sim.stream_synchronize(stream)
    assert len(allocation.watch._pending) == 0
    for _ in range(2500):  # the rest goes by and by
        sim.copy_async(a, pinned, N, CopyKind.H2D, stream)
        sim.stream_synchronize(stream)
    assert len(allocation.log.uses) < 200
