"""The configurable pools, as algorithms: contracts C9, C11."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuglue.errors import OutOfMemory
from cuglue.memory.pool.layouts import Direct, Exclusive, Persistent, PoolLayout, Sliced
from cuglue.memory.pool.planned import Pool, make_pool
from cuglue.memory.pool.usage import MemoryUsage

from .bytemap import ByteMap, covered

KIB, MIB = 1 << 10, 1 << 20


def sliced(memory: ByteMap, page: int = MIB, most: int | None = None, cap: int | None = None) -> Any:
    return make_pool(Sliced(page, most, cap).normalized(), memory)


# --- sliced ---------------------------------------------------------------------------------------------------------


def test_C11_sliced_is_first_fit_in_the_order_of_pages() -> None:
    pool = sliced(ByteMap())
    a, b, c = (pool.take(400 * KIB) for _ in range(3))
    assert (a.page, a.offset, b.page, b.offset) == (pool.pages[0], 0, pool.pages[0], 400 * KIB)
    assert c.page is pool.pages[1]
    pool.give(a)
    assert pool.take(100 * KIB).offset == 0
    assert pool.take(350 * KIB).page is pool.pages[1]
    assert pool.take(300 * KIB) is not None
    assert len(pool.pages) == 2


def test_C11_sliced_merges_neighbours_on_both_sides() -> None:
    pool = sliced(ByteMap())
    a, b, c = (pool.take(300 * KIB) for _ in range(3))
    for span in (a, c, b):
        pool.give(span)
    assert pool.pages[0].unused
    assert pool.take(MIB).size == MIB
    assert len(pool.pages) == 1


def test_C11_a_cap_is_hard() -> None:
    pool = sliced(ByteMap(), cap=2 * MIB)
    assert [pool.take(MIB) is not None for _ in range(3)] == [True, True, False]
    assert pool.capacity == 2 * MIB


def test_C11_a_cap_below_the_alignment_means_no_pages() -> None:
    pool = make_pool(Sliced(MIB, MIB, 100), ByteMap())
    assert pool.take(512) is None
    assert pool.capacity == 0


@pytest.mark.parametrize(
    ("cap", "size", "accepted"),
    [
        (None, 100 * KIB, True),
        (None, 100 * KIB + 1, False),
        (None, int(0.79 * MIB), False),
        (None, int(0.81 * MIB), True),
        (None, MIB, True),
        (None, MIB + 1, False),
        (4 * MIB, int(0.81 * MIB), False),
        (4 * MIB, 100 * KIB, True),
    ],
)
def test_C11_an_unbounded_sliced_pool_takes_what_nearly_fills_a_page(
    cap: int | None, size: int, accepted: bool
) -> None:
    assert sliced(ByteMap(), MIB, 100 * KIB, cap).accepts(size) is accepted


def test_C9_the_reported_cap_is_whole_pages() -> None:
    assert sliced(ByteMap(), cap=int(3.7 * MIB)).report().kind.max_pool_size == 3 * MIB


def test_C8b_counts_slices_and_keeps_pages() -> None:
    pool = sliced(ByteMap())
    a, b = pool.take(600 * KIB), pool.take(600 * KIB)
    assert pool.usage == MemoryUsage(2, 1200 * KIB, 0, 2 * MIB)
    pool.give(a)
    assert pool.usage == MemoryUsage(1, 600 * KIB, 0, 2 * MIB)
    pool.cleanup()
    assert pool.usage == MemoryUsage(1, 600 * KIB, 0, MIB)
    pool.give(b)
    assert pool.take(1000).size == 1024
    assert pool.usage.bytes_padding == 24


def test_C9_a_measured_plan_replays_with_the_same_peak() -> None:
    def program(pool: Pool) -> list[tuple[int, int]]:
        a = pool.take(600 * KIB)
        b = pool.take(600 * KIB)
        pool.give(a)
        c = pool.take(900 * KIB)
        return [(pool.pages.index(span.page), span.offset) for span in (a, b, c)]

    memory = ByteMap()
    growable = sliced(memory)
    places = program(growable)
    # 600 KiB in each of two pages, then 900 KiB into the first
    assert growable.report().pages_peak == 2
    capped = sliced(memory, cap=growable.report().pages_peak * MIB)
    assert program(capped) == places
    assert capped.report().pages_peak == 2


def test_C9_peaks_survive_a_cleanup() -> None:
    pool = sliced(ByteMap())
    for span in [pool.take(MIB) for _ in range(3)]:
        pool.give(span)
    pool.cleanup()
    report = pool.report()
    assert (report.pages, report.pages_peak, report.largest_alloc) == (0, 3, MIB)


# --- exclusive ------------------------------------------------------------------------------------------------------


def test_C11_exclusive_has_a_page_for_each_request_and_uses_it_again() -> None:
    memory = ByteMap()
    pool = make_pool(Exclusive(MIB).normalized(), memory)
    a, b = pool.take(1000), pool.take(3000)
    assert memory.grown == [1024, 3072]
    pool.give(a)
    pool.give(b)
    assert pool.take(2000).page is b.page
    assert pool.take(3 * MIB // 4).page not in (a.page, b.page)
    assert not pool.accepts(MIB + 1)


def test_C11_exclusive_leaves_a_far_larger_page_alone() -> None:
    pool = make_pool(Exclusive(MIB).normalized(), ByteMap())
    pool.give(pool.take(MIB))
    pool.take(512)
    assert len(pool.pages) == 2


def test_C11_exclusive_frees_what_stayed_idle() -> None:
    memory = ByteMap()
    pool = make_pool(Exclusive(MIB, dealloc_period=3).normalized(), memory)
    pool.give(pool.take(4096))
    for _ in range(3):
        pool.tick()
    assert memory.dropped == []
    used = pool.take(4096)  # used again: the period starts anew
    pool.give(used)
    for _ in range(3):
        pool.tick()
    assert memory.dropped == []
    pool.tick()
    assert memory.dropped == [4096]


# --- direct, persistent ---------------------------------------------------------------------------------------------


def test_C11_direct_uses_pages_of_exactly_that_size_again() -> None:
    memory = ByteMap()
    pool = make_pool(Direct(), memory)
    a = pool.take(5000)
    pool.give(a)
    assert pool.take(5100).page is a.page  # the same padded size
    assert pool.take(4000).page is not a.page
    assert memory.grown == [5120, 4096]


def test_C11_direct_reclaims_just_enough() -> None:
    memory = ByteMap()
    pool = make_pool(Direct(reclaim_at=10 * KIB), memory)
    held = [pool.take(KIB * n) for n in (1, 2, 3, 4)]
    for span in held[:3]:
        pool.give(span)
    pool.take(5 * KIB)  # 10 + 5 - 10: five KiB have to go, one and two and three
    assert memory.dropped == [KIB, 2 * KIB, 3 * KIB]
    pool.take(KIB)
    assert memory.dropped == [KIB, 2 * KIB, 3 * KIB]


def test_C11_persistent_uses_odd_sizes_again_and_frees_only_at_a_cleanup() -> None:
    memory = ByteMap()
    pool = make_pool(Persistent(), memory)
    a = pool.take(12_345)
    pool.give(a)
    for _ in range(1000):
        pool.tick()
    assert memory.dropped == []
    assert pool.take(12_345).page is a.page
    pool.give(a)
    pool.cleanup()
    assert memory.dropped == [12_800]
    assert memory.reserved == 0


# --- all of them ----------------------------------------------------------------------------------------------------

KINDS: list[PoolLayout] = [
    Sliced(64 * KIB, 16 * KIB),
    Sliced(64 * KIB, 64 * KIB, 256 * KIB),
    Exclusive(64 * KIB, dealloc_period=5),
    Exclusive(64 * KIB),
    Direct(),
    Direct(reclaim_at=128 * KIB),
    Persistent(),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=60, deadline=None)
@given(
    program=st.lists(
        st.tuples(st.sampled_from("atttgggc"), st.integers(1, 64 * KIB), st.integers(0, 1 << 20)), max_size=60
    )
)
def test_any_program_keeps_bytes_apart(kind: PoolLayout, program: list[tuple[str, int, int]]) -> None:
    memory = ByteMap(limit=2 * MIB)
    pool = make_pool(kind.normalized(), memory)
    live: dict[int, Any] = {}
    for number, (what, nbytes, pick) in enumerate(program):
        if what == "t" and pool.accepts(nbytes):
            pool.tick()
            try:
                span = pool.take(nbytes)
            except OutOfMemory:
                continue
            if span is None:
                assert pool.capacity is not None
                continue
            assert span.size >= nbytes
            memory.hold(number, span.ptr, span.size)
            live[number] = span
        elif what == "g" and live:
            key = sorted(live)[pick % len(live)]
            memory.let_go(key)
            pool.give(live.pop(key))
        elif what == "c":
            pool.cleanup()
            assert not any(page.unused for page in pool.pages)
        usage = pool.usage
        assert usage.number_allocs == len(live)
        assert usage.bytes_in_use + usage.bytes_padding == len(memory.held) * 512
        assert usage.bytes_reserved == memory.reserved
        assert usage.bytes_in_use <= usage.bytes_reserved
        assert all(covered(page) for page in pool.pages)
        assert pool.capacity is None or memory.reserved <= pool.capacity
    for span in live.values():
        pool.give(span)
    memory.held.clear()
    pool.cleanup()
    assert memory.pages == {}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_page_that_upstream_does_not_take_back_stays(
    kind: PoolLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ByteMap()
    pool = make_pool(kind.normalized(), memory)
    pool.give(pool.take(4096))

    def refuse(page: object) -> None:
        raise OutOfMemory("no")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "drop", refuse)
        with pytest.raises(OutOfMemory):
            pool.cleanup()
    assert pool.usage.bytes_reserved == memory.reserved > 0
    assert pool.take(4096) is not None
