"""The default layout as an algorithm: size classes, bins, small and large memory."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cuglue.memory.pool import arena
from cuglue.memory.pool.arena import SMALL, SMALL_PAGE, Arena, class_size
from cuglue.memory.pool.spans import ALIGN, Span

from .bytemap import ByteMap, covered

MIB = 1 << 20


@given(st.integers(1, 1 << 40))
def test_a_class_is_never_too_small_and_wastes_a_thirty_second_at_most(nbytes: int) -> None:
    size = class_size(nbytes)
    assert size >= nbytes
    assert size % ALIGN == 0
    assert class_size(size) == size
    assert size - nbytes < nbytes / 32 + ALIGN


@given(st.integers(MIB, 1 << 40))
def test_report_M70_at_most_an_eighth_of_slack_above_a_mebibyte(nbytes: int) -> None:
    assert class_size(nbytes) <= nbytes * 1.125


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_classes_keep_the_order_of_sizes(a: int, b: int) -> None:
    assert (class_size(a) <= class_size(b)) == (a <= b) or class_size(a) == class_size(b)


class Grown:
    """An arena that takes pages from a map of bytes."""

    def __init__(self) -> None:
        self.memory = ByteMap()
        self.arena = Arena()

    def take(self, nbytes: int) -> Span:
        span = self.arena.find(nbytes)
        if span is None:
            for page in self.arena.replaceable(nbytes, record=True):
                self.arena.drop(page)
                self.memory.drop(page)
            good, _ = self.arena.page_sizes(nbytes)
            self.arena.add(self.memory.grow(good), small=class_size(nbytes) <= SMALL)
            span = self.arena.take(nbytes, whole=True)
        assert span is not None
        return span


def test_small_requests_share_pages_and_come_in_runs() -> None:
    grown = Grown()
    spans = [grown.take(1000) for _ in range(100)]
    assert grown.memory.grown == [SMALL_PAGE]
    assert len({span.ptr for span in spans}) == 100
    assert len(grown.arena.bin_of(1000)) == 128 - 100


def test_report_M20_small_blocks_never_carve_up_a_large_one() -> None:
    grown = Grown()
    big = grown.take(200 * MIB)
    big.stack.append(big)
    kept = [grown.take(n) for n in (512, 5000, 100_000) for _ in range(50)]
    assert all(span.page is not big.page for span in kept)
    again = grown.take(200 * MIB)
    assert again is big


def test_report_M20_a_far_larger_block_is_not_cut_while_there_is_more_memory() -> None:
    grown = Grown()
    big = grown.take(400 * MIB)
    big.stack.append(big)
    kept = [grown.take(2 * MIB) for _ in range(4)]
    assert all(span.page is not big.page for span in kept)
    assert grown.take(400 * MIB) is big


def test_report_M19_growing_sizes_keep_bounded_memory() -> None:
    grown = Grown()
    peak = 0
    for i in range(1, 200):
        span = grown.take(i * 300_000)
        peak = max(peak, grown.memory.reserved / (i * 300_000))
        span.stack.append(span)
    assert peak < 1.1 or grown.memory.reserved < 8 * MIB
    assert grown.memory.reserved < 1.1 * 200 * 300_000


def test_memory_in_bins_is_merged_before_more_is_taken() -> None:
    grown = Grown()
    spans = [grown.take(3 * MIB) for _ in range(8)]
    for span in spans:
        span.stack.append(span)
    before = grown.memory.reserved
    grown.take(3 * MIB)
    assert grown.arena.flushes == 0
    for _ in range(3):
        grown.take(3 * MIB // 2)
    assert grown.arena.flushes == 1
    assert grown.memory.reserved == before


def test_a_size_near_by_is_served_from_the_bin_above() -> None:
    grown = Grown()
    span = grown.take(1_000_000)
    span.stack.append(span)
    assert grown.arena.pop(950_000) is span
    span.stack.append(span)
    assert grown.arena.pop(500_000) is None
    assert grown.arena.pop(1_100_000) is None


def test_the_table_of_sizes_stays_small(monkeypatch: object) -> None:
    grown = Grown()
    for n in range(1, arena._KEYS * 2):
        grown.arena.bin_of(n * ALIGN)
    assert len(grown.arena.bins) <= arena._KEYS
    assert len(grown.arena._stacks) < 500


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.booleans(), st.one_of(st.integers(1, 20_000), st.integers(1, 3 * MIB)), st.integers(0, 1 << 20)
        ),
        max_size=150,
    )
)
def test_any_program_keeps_bytes_apart(program: list[tuple[bool, int, int]]) -> None:
    grown = Grown()
    live: dict[int, Span] = {}
    for number, (take, nbytes, pick) in enumerate(program):
        if take or not live:
            span = grown.take(nbytes)
            assert span.size >= nbytes
            grown.memory.hold(number, span.ptr, span.size)
            live[number] = span
        else:
            key = sorted(live)[pick % len(live)]
            grown.memory.let_go(key)
            span = live.pop(key)
            span.stack.append(span)
        usage = grown.arena.usage
        assert usage.number_allocs == len(live)
        assert usage.bytes_reserved == grown.memory.reserved == grown.arena.reserved
        assert usage.bytes_in_use + grown.arena.free_bytes == usage.bytes_reserved
        assert all(covered(page) for page in grown.arena.pages)
    for span in live.values():
        span.stack.append(span)
    grown.arena.flush()
    assert len(grown.arena.unused()) == len(grown.arena.pages)
