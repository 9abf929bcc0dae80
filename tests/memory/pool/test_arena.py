"""The default layout as an algorithm: size classes, bins, small and large memory."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cuglue.memory.pool import arena, bins
from cuglue.memory.pool.arena import RUN, SMALL_PAGE, Arena
from cuglue.memory.pool.bins import LARGE, SMALL, class_below, class_size
from cuglue.memory.pool.spans import ALIGN, Span

from .bytemap import ByteMap, covered

MIB = 1 << 20


@given(st.integers(1, 1 << 40))
def test_a_class_is_never_too_small_and_wastes_little(nbytes: int) -> None:
    size = class_size(nbytes)
    assert size >= nbytes
    assert size % ALIGN == 0
    assert class_size(size) == size
    most = 8 if nbytes <= SMALL else 16 if nbytes <= LARGE else 64
    assert size - nbytes < nbytes / most + ALIGN


@given(st.integers(MIB, 1 << 40))
def test_report_M70_at_most_an_eighth_of_slack_above_a_mebibyte(nbytes: int) -> None:
    assert class_size(nbytes) <= nbytes * 1.125


@given(st.integers(1, 1 << 31))
def test_a_span_goes_to_the_largest_class_that_it_serves(units: int) -> None:
    size = units * ALIGN
    below = class_below(size)
    assert below <= size
    assert class_size(below) == below
    assert class_size(below + 1) > size


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_classes_keep_the_order_of_sizes(a: int, b: int) -> None:
    assert (class_size(a) <= class_size(b)) == (a <= b) or class_size(a) == class_size(b)


class Grown:
    """An arena that takes pages from a map of bytes."""

    def __init__(self) -> None:
        self.memory = ByteMap()
        self.arena = Arena()

    def take(self, nbytes: int) -> Span:
        span = self.arena.pop(nbytes) or self.arena.find(nbytes)
        if span is None:
            for page in self.arena.spare() if nbytes > SMALL else ():
                if not page.small and (nbytes >= LARGE or page.nbytes < nbytes) and self.arena.vacate(page):
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
    assert len(grown.arena.bin_of(1000)) == -100 % (RUN // 1024)


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


def cut_in_two(grown: Grown) -> list[Span]:
    """The two parts of a page of 7 MiB, in use."""
    whole = grown.take(7 * MIB)
    whole.stack.append(whole)
    grown.arena.flush()
    parts = [grown.take(3 * MIB) for _ in range(2)]
    assert {part.page for part in parts} == {whole.page}
    return parts


def test_memory_in_bins_is_merged_before_more_is_taken() -> None:
    grown = Grown()
    for part in cut_in_two(grown):
        part.stack.append(part)
    assert grown.take(13 * MIB // 2).ptr in grown.memory.pages
    assert grown.arena.flushes == 2
    assert grown.memory.grown == [7 * MIB]


def test_a_little_more_than_was_ever_in_use_is_taken_before_any_is_merged() -> None:
    grown = Grown()
    parts = cut_in_two(grown)
    assert not grown.arena.keeps(arena.SLACK)
    for part in parts:
        part.stack.append(part)
    grown.take(13 * MIB // 2)
    assert grown.arena.flushes == 1
    assert grown.memory.grown == [7 * MIB, 13 * MIB // 2]
    assert grown.arena.keeps(arena.SLACK), "now that is enough"


def test_a_size_near_by_is_served_from_the_bin_above() -> None:
    grown = Grown()
    span = grown.take(1_000_000)
    for nbytes in (950_000, 400_000):
        span.stack.append(span)
        assert grown.arena.pop(nbytes) is span
    span.stack.append(span)
    assert grown.arena.pop(300_000) is None
    assert grown.arena.pop(1_100_000) is None


def test_the_smallest_span_that_fits_comes_first() -> None:
    grown = Grown()
    spans = [grown.take(nbytes) for nbytes in (2 * MIB, MIB, 3 * MIB // 2)]
    for span in spans:
        span.stack.append(span)
    assert [grown.arena.pop(MIB) for _ in range(3)] == [spans[1], spans[2], spans[0]]


def test_once_memory_was_short_nothing_much_larger_is_given() -> None:
    grown = Grown()
    span = grown.take(MIB)
    span.stack.append(span)
    grown.arena.memory_is_short()
    assert grown.arena.pop(3 * MIB // 4) is None
    assert grown.arena.pop(9 * MIB // 10) is span


def test_a_span_little_larger_than_asked_for_is_not_cut() -> None:
    grown = Grown()
    spans = [grown.take(4 * MIB) for _ in range(2)]
    for span in spans:
        span.stack.append(span)
    grown.arena.flush()
    given = grown.arena.take(4 * MIB * 31 // 32)
    assert given in spans
    assert given.size == 4 * MIB
    given.stack.append(given)
    assert grown.arena.pop(4 * MIB) is given, "it went back to the bin of its own size"


def test_a_large_page_waits_for_requests_of_nearly_its_size() -> None:
    grown = Grown()
    big = grown.take(40 * MIB)
    big.stack.append(big)
    grown.arena.flush()
    assert grown.arena.take(20 * MIB) is None
    assert grown.arena.take(33 * MIB) is big
    big.stack.append(big)
    grown.arena.flush()
    assert grown.arena.take(20 * MIB, whole=True) is not None


def test_few_small_pages_are_not_merged_but_more_are_taken() -> None:
    grown = Grown()
    grown.take(100 * MIB)
    spans = [grown.take(100_000) for _ in range(19)]
    for span in spans:
        span.stack.append(span)
    assert grown.memory.grown[1:] == [SMALL_PAGE]
    grown.take(60_000)
    grown.take(60_000)
    grown.take(60_000)
    assert grown.arena.flushes == 0
    assert grown.memory.grown[1:] == [SMALL_PAGE] * 2
    for span in [grown.take(1500) for _ in range(9000)]:
        span.stack.append(span)  # now they are a good part of all memory
    while not grown.arena.flushes:
        grown.take(90_000)
    assert grown.arena.small_reserved < 24 * MIB


def test_the_table_of_sizes_stays_small(monkeypatch: object) -> None:
    grown = Grown()
    for n in range(1, bins._KEYS * 2):
        grown.arena.bin_of(n * ALIGN)
    assert len(grown.arena.bins) <= bins._KEYS
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
