"""Layouts against NumPy's own arithmetic, and the one-copy rule of C19 against a brute-force copy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuglue.errors import LayoutError
from cuglue.layout import CopyShape, Layout, contiguous_strides, element, pitched

DTYPES = st.sampled_from(["u1", "i2", "f2", "f4", "f8", "c16"])
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(SHAPES, DTYPES)
def test_contiguous_layouts_are_numpys(shape: tuple[int, ...], dtype: str) -> None:
    array = np.empty(shape, dtype)
    layout = Layout.of(shape, dtype)
    assert layout.shape == array.shape
    assert layout.strides == contiguous_strides(shape, array.itemsize)
    assert layout.size == 0 or layout.strides == array.strides
    assert layout.nbytes == layout.packed_nbytes == array.nbytes
    assert (layout.ndim, layout.size, layout.itemsize) == (array.ndim, array.size, array.itemsize)
    assert layout.is_c_contiguous
    assert Layout.from_elements(shape, layout.element_strides(), dtype) == layout


@given(st.data(), SHAPES.filter(len), DTYPES)
def test_contiguity_and_span_of_views_are_numpys(
    data: st.DataObject, shape: tuple[int, ...], dtype: str
) -> None:
    array = np.empty(shape, dtype)
    steps = data.draw(st.tuples(*[st.integers(1, 3)] * len(shape)))
    order = data.draw(st.permutations(range(len(shape))))
    view = array[tuple(slice(None, None, step) for step in steps)].transpose(order)
    layout = Layout.of(view.shape, dtype, view.strides)
    assert layout.is_c_contiguous == view.flags.c_contiguous
    low, high = np.lib.array_utils.byte_bounds(view) if view.size else (0, 0)
    assert layout.nbytes == high - low
    assert layout.packed_nbytes == view.nbytes


def test_a_layout_is_a_value() -> None:
    a, b = Layout.of((2, 3), np.float32), Layout((2, 3), (12, 4), np.dtype("f4"))
    assert a == b == Layout((2, 3), (12, 4), "f4")  # type: ignore[arg-type]
    assert hash(a) == hash(b)
    with pytest.raises(AttributeError):
        a.shape = (1,)  # type: ignore[misc]
    assert (a.size, a.nbytes, a.is_c_contiguous) == (6, 24, True)
    assert (a, hash(a)) == (b, hash(b))  # what was worked out is no part of the value


def test_numpy_integers_become_plain_ones() -> None:
    layout = Layout.of(np.array([2, 3]), "f4", np.array([16, 4]))
    assert [type(n) for n in layout.shape + layout.strides] == [int] * 4


@pytest.mark.parametrize(
    ("shape", "strides", "words"),
    [
        ((2, 3), (12,), "one stride"),
        ((-1,), (4,), "no negative extent"),
        ((4,), (-4,), "no negative stride"),
        ((4, 2), (0, 4), "no stride of zero"),
        ((2.5,), (4,), "sequence of integers"),
        ((2,), (None,), "sequence of integers"),
    ],
)
def test_layouts_that_are_refused(shape: Any, strides: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words) as caught:
        Layout.of(shape, "f4", strides)
    assert isinstance(caught.value, ValueError)


def test_a_flipped_array_is_refused_with_the_way_out() -> None:
    flipped = np.zeros((4, 4), np.uint8)[::-1]
    with pytest.raises(LayoutError, match=r"strides \(-4, 1\).*numpy\.ascontiguousarray"):
        Layout.of(flipped.shape, flipped.dtype, flipped.strides)


def test_zero_strides_are_right_where_nothing_repeats() -> None:
    assert Layout.of((1, 4), "f4", (0, 4)).is_c_contiguous
    assert Layout.of((0, 8), "f4", (0, 0)).nbytes == 0


def test_element_strides_must_divide() -> None:
    assert Layout.of((2, 2), "f4", (16, 4)).element_strides() == (4, 1)
    with pytest.raises(LayoutError, match=r"\(6, 4\) bytes, expected multiples of 4 bytes"):
        Layout.of((2, 1), "f4", (6, 4)).element_strides()


def test_an_array_must_lie_inside_its_memory() -> None:
    layout = Layout.of((2, 3), "u1", (8, 1))  # 11 bytes from first to last
    layout.fits(5, 16)
    for offset, nbytes in ((6, 16), (0, 10), (-1, 16)):
        with pytest.raises(LayoutError, match=f"within the {nbytes} bytes"):
            layout.fits(offset, nbytes)


# --- C19 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "size", "expected"),
    [
        ((4, 8), (12, 1), 4, CopyShape(32, 4, 48)),
        ((2, 3, 8), (36, 12, 1), 4, CopyShape(32, 6, 48)),
        ((4, 8), (8, 1), 4, CopyShape(128, 1, 128)),
        ((2, 3, 8), (24, 8, 1), 2, CopyShape(96, 1, 96)),
        ((7,), (1,), 8, CopyShape(56, 1, 56)),
        ((1, 8), (12, 1), 1, CopyShape(8, 1, 12)),
        ((0, 8), (0, 0), 4, CopyShape(0, 0, 0)),
        ((3, 0), (5, 7), 4, CopyShape(0, 0, 0)),
    ],
)
def test_C19_one_copy_moves(
    shape: tuple[int, ...], strides: tuple[int, ...], size: int, expected: CopyShape
) -> None:
    assert pitched(shape, strides, size) == expected


def test_C19_a_very_tall_contiguous_array_is_one_linear_copy() -> None:
    shape = pitched((1 << 24, 1), (1, 1), 4)
    assert shape.linear
    assert shape.nbytes == shape.width == 4 << 24


@pytest.mark.parametrize(
    ("shape", "strides", "words"),
    [
        ((), (), "a rank of at least 1"),
        ((4, 4), (4,), "one stride"),
        ((4,), (2,), "a last stride of 1"),
        ((4, 8), (8, 2), "a last stride of 1"),
        ((4, 8), (0, 1), "at least 1 element"),
        ((4, 8), (7, 1), "at least 8 elements apart"),
        ((2, 3, 8), (40, 12, 1), "gaps between rows only"),
        ((8, 4), (1, 8), "a last stride of 1"),
        ((4, 8), (-8, 1), "at least 1 element"),
    ],
)
def test_C19_layouts_that_no_copy_moves(shape: tuple[int, ...], strides: tuple[int, ...], words: str) -> None:
    with pytest.raises(LayoutError, match=words) as caught:
        pitched(shape, strides, 4)
    assert isinstance(caught.value, ValueError)


@given(st.data())
def test_C19_the_rows_are_the_elements(data: st.DataObject) -> None:
    """What the copy would move, byte by byte, is exactly what the strides address, in order."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    strides = [1] if len(shape) == 1 else [shape[-1] + data.draw(st.integers(0, 3)), 1]
    for extent in reversed(shape[1:-1]):
        strides.insert(0, strides[0] * extent)
    size = data.draw(st.sampled_from([1, 2, 4]))
    copy = pitched(shape, tuple(strides), size)
    moved = [row * copy.pitch + byte for row in range(copy.height) for byte in range(copy.width)]
    addressed = [
        sum(i * s for i, s in zip(position, strides, strict=True)) * size + byte
        for position in np.ndindex(shape)
        for byte in range(size)
    ]
    assert moved == addressed
    assert copy.nbytes == math.prod(shape) * size


@pytest.mark.parametrize("dtype", ["2f4", ("f4", (2,)), np.dtype(("u1", (2, 3)))], ids=str)
def test_an_element_is_no_array(dtype: Any) -> None:
    with pytest.raises(LayoutError, match=r"Put \(2,.*\) at the end of the shape"):
        element(dtype)
