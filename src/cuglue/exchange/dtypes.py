"""Element types as DLPack numbers them.

Owns the table from NumPy dtypes, and from the names of types that NumPy lacks, to DLPack's (code, bits). Must not
know memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..layout import Layout


class DLType(NamedTuple):
    """A DLPack element type of one lane."""

    code: int
    bits: int


#: Types that NumPy has only with ``ml_dtypes``. They travel as unsigned integers of the same size.
NARROW = {
    "bfloat16": DLType(4, 16),
    "float8_e3m4": DLType(7, 8),
    "float8_e4m3": DLType(8, 8),
    "float8_e4m3b11fnuz": DLType(9, 8),
    "float8_e4m3fn": DLType(10, 8),
    "float8_e4m3fnuz": DLType(11, 8),
    "float8_e5m2": DLType(12, 8),
    "float8_e5m2fnuz": DLType(13, 8),
    "float8_e8m0fnu": DLType(14, 8),
}

_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_BITS = {"i": (8, 16, 32, 64), "u": (8, 16, 32, 64), "f": (16, 32, 64), "c": (64, 128), "b": (8,)}


def narrow_name(dtype: np.dtype[Any]) -> str | None:
    """The name of a type of :data:`NARROW` (an ``ml_dtypes`` one), or None."""
    return dtype.name if dtype.kind not in _CODES and dtype.name in NARROW else None


def carrier(name: str) -> np.dtype[Any]:
    """The unsigned integers that a type of :data:`NARROW` travels as."""
    return np.dtype(f"u{NARROW[name].bits // 8}")


def travelling(layout: Layout, narrow: str | None = None) -> tuple[DLType, Layout]:
    """The DLPack type of an array's elements, and its layout in dtypes of NumPy's own.

    Types of ``ml_dtypes`` travel as unsigned integers. Worked out once a layout.

    Args:
        layout: the array's.
        narrow: name of an element type that NumPy lacks; ``layout`` holds unsigned integers then.

    Raises:
        BufferError: DLPack has no such type, or strides cut elements.
    """
    if narrow is None and (known := vars(layout).get("_travelling")) is not None:
        return known  # type: ignore[no-any-return] # put there below
    if layout.cuts_elements:
        raise BufferError(
            f"DLPack strides count elements: {layout.strides} bytes are no multiples of {layout.itemsize}. "
            "View the memory as bytes"
        )
    if narrow is not None:
        return NARROW[narrow], layout
    name = narrow_name(layout.dtype)
    whole = layout if name is None else Layout(layout.shape, layout.strides, carrier(name))
    found = vars(layout)["_travelling"] = dl_type(layout.dtype), whole
    return found


@lru_cache(maxsize=64)
def dl_type(dtype: np.dtype[Any]) -> DLType:
    """The DLPack type of a NumPy dtype.

    Raises:
        BufferError: DLPack has none: strings, times, objects, records, swapped bytes, padded floats.
    """
    name = narrow_name(dtype)
    if name is not None:
        return NARROW[name]
    bits = dtype.itemsize * 8
    if not dtype.isnative or bits not in _BITS.get(dtype.kind, ()):
        raise BufferError(f"DLPack has no element type for {dtype!r}; view the memory as one that it has")
    return DLType(_CODES[dtype.kind], bits)
