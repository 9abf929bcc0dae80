"""Element types as DLPack numbers them, and the array interface dictionaries."""

from __future__ import annotations

import numpy as np
import pytest

from cuglue.exchange.cai import array_interface, cuda_array_interface
from cuglue.exchange.dtypes import NARROW, carrier, dl_type, narrow_name
from cuglue.layout import Layout

NUMBERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]


@pytest.mark.parametrize("code", NUMBERS)
def test_numbers_as_numpy_exports_them(code):
    from cuglue.testing import dlpack_reader

    dtype = np.dtype(code)
    code_, bits, lanes = dlpack_reader.read(np.zeros(3, dtype).__dlpack__()).dtype
    assert dl_type(dtype) == (code_, bits)
    assert lanes == 1


@pytest.mark.parametrize(
    "dtype",
    ["M8[s]", "m8[s]", "S4", "U4", "O", "V3", [("a", "i4")], ">i4" if np.little_endian else "<i4", "g"],
)
def test_what_dlpack_cannot_name(dtype):
    if dtype == "g" and np.dtype("g").itemsize == 8:
        pytest.skip("long double is double here")
    with pytest.raises(BufferError, match="no element type"):
        dl_type(np.dtype(dtype))


def test_narrow_types_travel_as_integers_of_their_size():
    for name, (code, bits) in NARROW.items():
        assert carrier(name).itemsize * 8 == bits
        assert carrier(name).kind == "u"
        assert code == 4 or 7 <= code <= 14
    assert narrow_name(np.dtype("u2")) is None
    assert narrow_name(np.dtype("V2")) is None


@pytest.mark.parametrize(
    ("shape", "strides", "seen"),
    [
        ((2, 3), None, None),
        ((2, 3), (12, 4), None),
        ((2, 3), (16, 4), (16, 4)),
        ((2, 3), (4, 8), (4, 8)),
        ((1, 3), (999, 4), None),
        ((), (), None),
        ((0, 3), (12, 4), None),
    ],
)
def test_row_27_strides_are_none_exactly_when_contiguous(shape, strides, seen):
    fields = cuda_array_interface(0x1000, Layout.of(shape, "f4", strides), stream=None)
    assert fields["strides"] == seen
    assert fields["data"] == (0x1000 if 0 not in shape else 0, False)


def test_fields_have_the_types_of_the_specification():
    for stream in (None, 1, 0x55):
        fields = cuda_array_interface(64, Layout.of((4, 4), "u1"), stream=stream)
        assert fields == {
            "shape": (4, 4),
            "typestr": "|u1",
            "data": (64, False),
            "strides": None,
            "version": 3,
            "stream": stream,
        }
    assert all(type(n) is int for n in fields["shape"])
    assert type(fields["data"][0]) is int
    assert type(fields["data"][1]) is bool
    assert array_interface(64, Layout.of((4,), "f4"), readonly=True)["data"] == (64, True)
