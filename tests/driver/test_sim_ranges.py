"""Byte ranges against sets of bytes: the arithmetic of overlap has to be exact."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cuglue.driver.sim.ranges import Range, pitched, strided

ranges = st.builds(
    lambda start, width, rows, gap: pitched(start, width, rows, width + gap),
    st.integers(0, 40),
    st.integers(1, 8),
    st.integers(1, 6),
    st.integers(0, 6),
)


def bytes_of(range_: Range) -> set[int]:
    return {range_.start + i * range_.pitch + j for i in range(range_.rows) for j in range(range_.width)}


@given(ranges, ranges)
def test_overlap_is_exact(a: Range, b: Range) -> None:
    assert a.overlaps(b) == b.overlaps(a) == bool(bytes_of(a) & bytes_of(b))


@given(ranges, st.integers(0, 60), st.integers(0, 60))
def test_what_lies_within_bounds_is_exact_and_nothing_comes_twice(a: Range, low: int, high: int) -> None:
    parts = a.within(low, high)
    assert sum(part.width * part.rows for part in parts) == len(bytes_of(a) & set(range(low, high)))
    assert {byte for part in parts for byte in bytes_of(part)} == bytes_of(a) & set(range(low, high))


@given(ranges, ranges)
def test_covers_never_says_too_much(a: Range, b: Range) -> None:
    if a.covers(b):
        assert bytes_of(b) <= bytes_of(a)
    assert a.covers(a)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_strided_holds_every_element(shape: list[int], data: st.DataObject) -> None:
    base = np.zeros([2 * n for n in shape], "u2")
    steps = [data.draw(st.sampled_from([1, 2, -1])) for _ in shape]
    array = base[
        tuple(
            slice(None, n * abs(s), s) if s > 0 else slice(n - 1, None, s)
            for n, s in zip(shape, steps, strict=True)
        )
    ]
    got = strided(0, array.shape, array.strides, 2)
    offsets = {
        int(sum(i * s for i, s in zip(index, array.strides, strict=True))) + byte
        for index in np.ndindex(array.shape)
        for byte in (0, 1)
    }
    assert offsets <= bytes_of(got)
    assert (got.start, got.end) == (min(offsets), max(offsets) + 1)


def test_one_outer_stride_is_exact() -> None:
    assert strided(0, (4, 3), (32, 4), 4) == Range(0, 12, 4, 32)
    assert strided(0, (4, 8), (32, 4), 4) == Range(0, 128)
    assert strided(0, (2, 4, 3), (128, 32, 4), 4) == Range(0, 12 + 128 + 96)
    assert strided(5, (0, 3), (32, 4), 4).nbytes == 0
