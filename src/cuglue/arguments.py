"""Numbers as callers give them: NumPy's count, bools and floats are no whole numbers, and NaN is no time.

Owns these checks, and the words for a refusal where a caller has none of its own: :func:`shown` is how an error shows
what it was given. Must not know what is counted.
"""

from __future__ import annotations

from operator import index
from reprlib import Repr
from typing import Any

from numpy import ndarray

from .errors import CuglueError, UsageError


class _Words(Repr):
    """Short words for anything: what is long is cut, and what fails while it is printed is named."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = 8
        self.maxstring = self.maxother = 400

    def repr1(self, x: object, level: int) -> str:
        """By its type, whose name alone the standard library goes by."""
        return super().repr1(x, level) if type(x).__module__ == "builtins" else self.repr_instance(x, level)

    def repr_int(self, x: int, level: int) -> str:
        """A whole number; of thousands of digits, which Python refuses to print, the size."""
        return repr(x) if x.bit_length() <= _LONGEST else f"an int of {x.bit_length()} bits"

    def repr_instance(self, x: object, level: int) -> str:
        """Whatever is no container of Python's."""
        if isinstance(x, bytes | bytearray | memoryview) and memoryview(x).nbytes > _LONGEST:
            return f"a {type(x).__name__} of {memoryview(x).nbytes} bytes"
        return _array(x) or super().repr_instance(x, level)


_LONGEST = 256  # bits of an int, bytes of a buffer, that are printed
_words = _Words()


def shown(value: object) -> str:
    """``value`` for the message of an error: short, whatever it is.

    An array is named, with its address, and not printed: printing one of a device copies it to the host, which waits
    for the device, breaks a capture under way, and takes a GPU. An object whose own text fails hides no error of ours.
    """
    return _words.repr(value)


def _array(value: object) -> str | None:
    """Type, shape, elements and address of an array of some library; None of anything else."""
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    if library == "cuglue" or not (
        hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__") or isinstance(value, ndarray)
    ):
        return None
    shape, element = getattr(value, "shape", "?"), getattr(value, "dtype", "?")
    address = _address(value)
    where = "" if address is None else f" at {address:#x}"
    return f"a {library}.{kind.__name__} of shape {shape}, {element}{where}"


def _address(array: Any) -> int | None:
    """Where the memory of an array starts, from what costs no device anything; None if it does not say."""
    try:
        if isinstance(array, ndarray):
            found = array.ctypes.data
        elif hasattr(array, "data_ptr"):
            found = array.data_ptr()  # PyTorch
        else:
            found = array.data.ptr  # CuPy
    except Exception:  # noqa: BLE001 - this is for the text of an error, which it must not hide
        return None
    return found if isinstance(found, int) else None


def whole(value: object) -> int | None:
    """``value`` as an int if it is a whole number, NumPy's too; None for bools, floats and all else."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # type: ignore[arg-type] # that is the question
    except TypeError:
        return None


def whole_of(
    what: str,
    value: object,
    lowest: int = 0,
    *,
    expected: str | None = None,
    error: type[CuglueError] = UsageError,
) -> int:
    """``value`` as an int of ``lowest`` or more.

    Raises:
        UsageError: or another ``error``: it is none; the message names ``what`` and what was ``expected``.
    """
    number = whole(value)
    if number is None or number < lowest:
        raise error(what, got=shown(value), expected=expected or f"an int of {lowest} or more")
    return number


def seconds(what: str, value: object) -> float:
    """``value`` as a time in seconds.

    Raises:
        UsageError: no number, NaN, or negative.
    """
    try:
        if not isinstance(value, bool) and value >= 0:  # type: ignore[operator] # that is the question
            return float(value)  # type: ignore[arg-type] # the same
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageError(what, got=shown(value), expected="0 or more seconds")
