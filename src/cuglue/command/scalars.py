"""C types of kernel parameters, and turning Python scalars into values of their exact width.

Owns the table of C scalar types and the conversion with its checks. Must not know sources, arrays or devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ..arguments import shown
from ..errors import LaunchError

Convert = Callable[[Any], Any]

_KNOWN = 1024  # values of each type that are kept

_LONG = ctypes.sizeof(ctypes.c_long)  # 4 on Windows, 8 elsewhere, on the device as on the host

#: C spelling with its words in sorted order -> NumPy dtype. ``signed`` and ``int`` are dropped where redundant.
C_TYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "bool": "?",
        "char": "i1",
        "char unsigned": "u1",
        "char8_t": "u1",
        "uchar": "u1",
        "short": "i2",
        "short unsigned": "u2",
        "ushort": "u2",
        "int": "i4",
        "unsigned": "u4",
        "uint": "u4",
        "long": f"i{_LONG}",
        "long unsigned": f"u{_LONG}",
        "ulong": f"u{_LONG}",
        "long long": "i8",
        "long long unsigned": "u8",
        "size_t": "u8",
        "ptrdiff_t": "i8",
        "ssize_t": "i8",
        "intptr_t": "i8",
        "uintptr_t": "u8",
        "half": "f2",
        "__half": "f2",
        "float": "f4",
        "double": "f8",
        "complex<float>": "c8",
        "complex<double>": "c16",
        "cuFloatComplex": "c8",
        "cuComplex": "c8",
        "cuDoubleComplex": "c16",
        **{f"int{bits}_t": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
        **{f"uint{bits}_t": f"u{bits // 8}" for bits in (8, 16, 32, 64)},
    }.items()
}

_VECTOR_BASES = {
    "char": "i1",
    "uchar": "u1",
    "short": "i2",
    "ushort": "u2",
    "int": "i4",
    "uint": "u4",
    "long": f"i{_LONG}",
    "ulong": f"u{_LONG}",
    "longlong": "i8",
    "ulonglong": "u8",
    "float": "f4",
    "double": "f8",
    "half": "f2",
    "__half": "f2",
}


def c_type(words: list[str]) -> tuple[np.dtype[Any] | None, int]:
    """``(dtype, components)`` of a C type given as its words without qualifiers; ``(None, 1)`` if unknown.

    Vector types such as ``float4`` have their component's dtype and 2 to 4 components.
    """
    kept = [word for word in words if word != "signed"]
    if len(kept) > 1 or len(kept) < len(words):
        kept = [word for word in kept if word != "int"] or ["int"]
    name = " ".join(sorted(kept))
    if name in C_TYPES:
        return C_TYPES[name], 1
    if name[-1:] in ("1", "2", "3", "4") and name[:-1] in _VECTOR_BASES:
        return np.dtype(_VECTOR_BASES[name[:-1]]), int(name[-1])
    return None, 1


@cache
def converter(dtype: np.dtype[Any]) -> Convert:
    """A function that makes a value of exactly this type, or raises LaunchError with what would have been right.

    Integers must fit. A float is no integer, whatever its value. An integer or a wider float is rounded to a floating
    type, as C does at a call; a finite value that would become infinite does not fit.
    """
    make = dtype.type
    if dtype.kind == "b":
        return _to_bool
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        low, high = int(limits.min), int(limits.max)
        known: dict[
            int, Any
        ] = {}  # the same numbers come again, and making one costs three times a look here

        def to_integer(value: Any) -> Any:
            if type(value) is int:
                if value in known:
                    return known[value]
                if low <= value <= high:
                    made = make(value)
                    if len(known) < _KNOWN:
                        known[value] = made
                    return made
            elif isinstance(value, (int, np.integer, np.bool_)) and low <= int(value) <= high:
                return make(value)
            raise _misfit(value, f"an integer from {low} to {high}", (int, np.integer, np.bool_))

        return to_integer
    if dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        seen: dict[float, Any] = {}

        def to_float(value: Any) -> Any:
            if type(value) is float and -most <= value <= most:
                if value in seen and value:  # not 0.0, which equals -0.0
                    return seen[value]
                made = make(value)
                if len(seen) < _KNOWN:
                    seen[value] = made
                return made
            if isinstance(value, (float, int, np.integer, np.floating)) and not isinstance(value, bool):
                try:
                    number = float(value)
                except OverflowError:  # an int beyond every float
                    raise _misfit(value, f"a number within ±{most:.4g}", (int,)) from None
                if -most <= number <= most or number in (np.inf, -np.inf) or number != number:
                    return make(value)
            raise _misfit(value, f"a number within ±{most:.4g}", (float, int, np.number))

        return to_float

    def to_complex(value: Any) -> Any:
        if isinstance(value, (complex, float, int, np.number)) and not isinstance(value, bool):
            return make(value)
        raise _misfit(value, "a complex number", (complex, float, int, np.number))

    return to_complex


def by_value(value: Any) -> Any:
    """A scalar for a parameter whose type nobody told us, as CuPy passes it: int 8 bytes, float 8, bool 1.

    NumPy scalars, structured ones too, keep their own width.
    """
    if isinstance(value, np.generic):
        return value
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise _misfit(value, "an integer of 8 bytes", (int,))
        return np.int64(value)
    if isinstance(value, float):
        return np.float64(value)
    if isinstance(value, complex):
        return np.complex128(value)
    raise _misfit(value, "a number or a NumPy scalar", ())


def _to_bool(value: Any) -> Any:
    if isinstance(value, (bool, np.bool_)):
        return np.bool_(value)
    raise _misfit(value, "True or False", (bool, np.bool_))


def _misfit(value: Any, expected: str, kinds: tuple[type, ...]) -> LaunchError:
    got = shown(value) if isinstance(value, kinds) else f"{shown(value)} ({type(value).__name__})"
    return LaunchError("scalar", got=got, expected=expected)
