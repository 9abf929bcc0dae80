"""Scalars become values of the exact C width, or the call is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuglue.command.scalars import by_value, c_type, converter
from cuglue.errors import LaunchError

INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ("int", "i4"),
        ("signed", "i4"),
        ("signed int", "i4"),
        ("unsigned", "u4"),
        ("unsigned int", "u4"),
        ("int unsigned", "u4"),
        ("long long", "i8"),
        ("long long int", "i8"),
        ("unsigned long long int", "u8"),
        ("short int", "i2"),
        ("unsigned short", "u2"),
        ("signed char", "i1"),
        ("char", "i1"),
        ("unsigned char", "u1"),
        ("uint8_t", "u1"),
        ("int64_t", "i8"),
        ("size_t", "u8"),
        ("bool", "?"),
        ("half", "f2"),
        ("float", "f4"),
        ("double", "f8"),
        ("complex<float>", "c8"),
    ],
)
def test_c_types(written: str, dtype: str) -> None:
    assert c_type(written.split()) == (np.dtype(dtype), 1)


def test_vectors_and_unknown_types() -> None:
    assert c_type(["float4"]) == (np.dtype("f4"), 4)
    assert c_type(["uchar3"]) == (np.dtype("u1"), 3)
    assert c_type(["Particle"]) == (None, 1)


@pytest.mark.parametrize("code", INTEGERS)
def test_integers_at_their_limits(code: str) -> None:
    limits = np.iinfo(code)
    convert = converter(np.dtype(code))
    for value in (int(limits.min), int(limits.max)):
        made = convert(value)
        assert (made.dtype, int(made)) == (np.dtype(code), value)
    for value in (int(limits.min) - 1, int(limits.max) + 1):
        with pytest.raises(LaunchError, match=str(value)):
            convert(value)


@given(st.sampled_from(INTEGERS), st.integers(-(2**70), 2**70))
def test_an_integer_keeps_its_value_or_is_refused(code: str, value: int) -> None:
    convert = converter(np.dtype(code))
    limits = np.iinfo(code)
    if limits.min <= value <= limits.max:
        assert int(convert(value)) == value
    else:
        with pytest.raises(LaunchError):
            convert(value)


@pytest.mark.parametrize("value", [1.0, np.float32(1), "1", None, 1j, [1], np.array([1])])
def test_only_integers_are_integers(value: object) -> None:
    with pytest.raises(LaunchError, match="an integer from"):
        converter(np.dtype("i4"))(value)


def test_numpy_integers_and_bools_count_as_integers() -> None:
    convert = converter(np.dtype("i2"))
    assert convert(np.int64(-5)) == np.int16(-5)
    assert convert(True) == np.int16(1)
    with pytest.raises(LaunchError):
        convert(np.uint64(2**40))


def test_floats_round_as_c_does_and_do_not_overflow() -> None:
    convert = converter(np.dtype("f4"))
    assert convert(0.1) == np.float32(0.1)
    assert convert(2**24 + 1) == np.float32(2**24)
    assert convert(float("inf")) == np.inf
    assert np.isnan(convert(float("nan")))
    for value in (1e39, 10**400, np.float64(-1e300)):
        with pytest.raises(LaunchError):
            convert(value)
    for value in ("1", True, 1j, None):
        with pytest.raises(LaunchError):
            convert(value)


@pytest.mark.parametrize("code", ["f4", "f8"])
def test_numbers_that_come_again_keep_their_sign_and_their_type(code: str) -> None:
    convert = converter(np.dtype(code))
    for number in (0.0, -0.0, 0.0, 1.5, 1.5, -0.0):
        for value in (convert(number), convert(number)):
            assert (math.copysign(1, value), value) == (math.copysign(1, number), number)
    whole = converter(np.dtype("i4"))
    assert [type(whole(value)) for value in (1, 1, True, np.int8(1))] == [np.int32] * 4
    for _ in range(2):
        with pytest.raises(LaunchError):
            whole(1.0)  # equals a number that is known
        with pytest.raises(LaunchError):
            whole(1 << 31)


def test_the_numbers_that_are_kept_are_bounded() -> None:
    convert = converter(np.dtype("u2"))
    assert [int(convert(value)) for value in range(5000)] == list(range(5000))
    assert [int(convert(value)) for value in range(5000)] == list(range(5000))
    (known,) = [cell.cell_contents for cell in convert.__closure__ if isinstance(cell.cell_contents, dict)]
    assert len(known) <= 1024


def test_half_overflows_early() -> None:
    convert = converter(np.dtype("f2"))
    assert convert(65504) == np.float16(65504)
    with pytest.raises(LaunchError):
        convert(65536)


def test_bool_and_complex() -> None:
    assert converter(np.dtype("?"))(True) == np.bool_(True)
    with pytest.raises(LaunchError, match="True or False"):
        converter(np.dtype("?"))(1)
    assert converter(np.dtype("c8"))(1 + 2j).dtype == np.complex64
    with pytest.raises(LaunchError):
        converter(np.dtype("c8"))("1")


def test_scalars_of_an_unknown_kernel_go_as_cupy_sends_them() -> None:
    assert [by_value(v).dtype.str for v in (1, 1.5, True, 1j)] == ["<i8", "<f8", "|b1", "<c16"]
    assert by_value(np.int16(3)).dtype == np.int16
    for value in (2**63, "x", None):
        with pytest.raises(LaunchError):
            by_value(value)
