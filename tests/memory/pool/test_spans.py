"""Splitting, merging and the best fit, against a map of bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuglue.memory.pool.spans import ALIGN, BestFit, Page, Span, padded

from .bytemap import ByteMap, covered


def taken_from(heap: BestFit, size: int, **options: int) -> Any:
    """As whoever takes a span: it is no longer free."""
    span = heap.take(size, **options)
    if span is not None:
        span.free = False
    return span


def filled(*sizes: int) -> tuple[BestFit, Page]:
    page = Page(1 << 30, sum(sizes))
    heap = BestFit()
    heap.give(page.first)
    return heap, page


@pytest.mark.parametrize(("nbytes", "size"), [(0, 0), (1, 512), (512, 512), (513, 1024), (1 << 40, 1 << 40)])
def test_sizes_are_rounded_up_to_the_alignment(nbytes: int, size: int) -> None:
    assert padded(nbytes) == size


def test_the_best_fit_is_the_smallest_and_of_these_the_lowest() -> None:
    heap, page = filled(512 * 10)
    spans = [taken_from(heap, 512 * n) for n in (3, 1, 2, 1, 3)]
    for index in (0, 2, 4):
        heap.give(spans[index])
    assert [span.offset // 512 for span in page.spans()] == [0, 3, 4, 6, 7]
    assert taken_from(heap, 1024) is spans[2]
    found = taken_from(heap, 1024)
    assert found is spans[0]
    assert found.size == 1024


def test_neighbours_merge_on_both_sides() -> None:
    heap, page = filled(512 * 3)
    a, b, c = (taken_from(heap, 512) for _ in range(3))
    heap.give(a)
    heap.give(c)
    assert len(heap) == 2
    heap.give(b)
    assert len(heap) == 1
    assert heap.coalesced == 2
    assert page.unused
    assert heap.largest == heap.nbytes == 512 * 3


def test_neighbours_of_different_owners_stay_apart() -> None:
    heap, page = filled(1024)
    a, b = taken_from(heap, 512), taken_from(heap, 512)
    a.home, b.home = "one", "other"
    heap.give(a)
    heap.give(b)
    assert len(heap) == 2
    assert not page.unused


def test_spans_much_larger_than_asked_for_can_be_left_alone() -> None:
    heap, _ = filled(512 * 100)
    assert taken_from(heap, 512, most=512 * 99) is None
    assert taken_from(heap, 512, most=512 * 100) is not None


def test_a_page_grows_and_shrinks_at_its_end() -> None:
    heap, page = filled(1024)
    taken = taken_from(heap, 1024)
    heap.give(page.extend(2048))
    assert page.nbytes == 3072
    more = taken_from(heap, 2048)
    assert more is taken.after is page.end
    page.shorten()
    assert page.nbytes == 1024
    assert page.end is taken
    with pytest.raises(ValueError, match="keeps its first span"):
        page.shorten()


def test_a_page_gets_its_address_later() -> None:
    page = Page(0, 1024)
    rest = page.first.split(512)
    page.place(1 << 20, "memory")
    assert (page.first.ptr, rest.ptr) == (1 << 20, (1 << 20) + 512)


def test_the_last_span_has_nothing_to_take_over() -> None:
    with pytest.raises(ValueError, match="nothing behind"):
        Page(0, 512).first.absorb()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 1 << 30)), max_size=120))
def test_any_program_keeps_bytes_apart(program: list[tuple[bool, int, int]]) -> None:
    memory = ByteMap()
    page = memory.grow(ALIGN * 256)
    heap = BestFit()
    heap.give(page.first)
    live: dict[int, Span] = {}
    for number, (take, units, pick) in enumerate(program):
        if take or not live:
            fits = any(span.free and span.size >= units * ALIGN for span in page.spans())
            span = taken_from(heap, units * ALIGN)
            assert (span is not None) == fits
            if span is not None:
                assert span.size == units * ALIGN
                memory.hold(number, span.ptr, span.size)
                live[number] = span
        else:
            key = sorted(live)[pick % len(live)]
            memory.let_go(key)
            heap.give(live.pop(key))
        assert covered(page)
        assert heap.nbytes == sum(span.size for span in page.spans() if span.free)
        assert heap.largest == max((span.size for span in page.spans() if span.free), default=0)
    for span in live.values():
        heap.give(span)
    assert page.unused
