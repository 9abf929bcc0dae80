"""Numbers as callers give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuglue.arguments import seconds, shown, whole, whole_of
from cuglue.errors import LayoutError, UsageError

NO_NUMBERS = [
    None,
    True,
    False,
    np.True_,
    1.0,
    np.float32(1),
    float("nan"),
    "1",
    b"1",
    [1],
    np.array([1, 2]),
    1j,
]


@pytest.mark.parametrize("value", [7, -7, 2**70, np.int64(7), np.uint8(7), np.array(7)])
def test_whole_numbers_are_taken_as_ints(value: Any) -> None:
    assert whole(value) == int(value)
    assert type(whole(value)) is int


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_all_else_is_no_whole_number(value: Any) -> None:
    assert whole(value) is None
    with pytest.raises(UsageError, match=r"thing: got .*, expected an int of 3 or more"):
        whole_of("thing", value, 3)


def test_a_refusal_says_what_its_caller_says() -> None:
    assert whole_of("size", np.int32(0)) == 0
    with pytest.raises(LayoutError, match="size: got -1, expected bytes"):
        whole_of("size", -1, expected="bytes", error=LayoutError)


@pytest.mark.parametrize("value", [0, 0.5, np.float32(0.5), 3, float("inf")])
def test_times(value: Any) -> None:
    assert seconds("timeout", value) == float(value)


@pytest.mark.parametrize("value", [-1, float("nan"), None, True, "1", [1], np.array([1, 2]), 1j])
def test_what_is_no_time(value: Any) -> None:
    with pytest.raises(UsageError, match=r"timeout: got .*, expected 0 or more seconds"):
        seconds("timeout", value)


def test_what_an_error_shows_is_short_and_prints_no_array_of_a_library() -> None:
    class Array:
        shape, dtype = (2,), "float32"

        def __dlpack__(self) -> None: ...

        def __repr__(self) -> str:
            raise AssertionError("printed")

    Array.__module__ = "library.core"
    named = "a library.Array of shape (2,), float32"
    assert shown(Array()) == named
    assert shown([Array(), 1]) == f"[{named}, 1]"
    assert shown((Array(),)) == f"({named},)"
    assert shown(list(range(20))) == "[0, 1, 2, 3, 4, 5, 6, 7, ...]"
    assert shown(()) == "()"
    assert shown(np.float32(1)) == repr(np.float32(1))
