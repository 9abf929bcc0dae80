"""Numbers as callers give them: NumPy's count, bools and floats are no whole numbers, and NaN is no time.

Owns these checks, and the words for a refusal where a caller has none of its own: :func:`shown` is how an error shows
what it was given. Must not know what is counted.
"""

from __future__ import annotations

from operator import index

from .errors import CuglueError, UsageError


def shown(value: object) -> str:
    """``value`` for the message of an error.

    An array of a library is named, not printed: printing it copies it to the host, which waits for the device, breaks a
    capture under way, and takes a GPU.
    """
    kind = type(value)
    if kind in (list, tuple):
        few = [shown(item) for item in value[:8]]  # type: ignore[index] # of one of the two
        few += ["..."] * (len(value) > 8)  # type: ignore[arg-type] # the same
        listed = ", ".join(few)
        return f"[{listed}]" if kind is list else f"({listed}{',' * (len(few) == 1)})"
    library = kind.__module__.partition(".")[0]
    if library not in ("numpy", "cuglue") and (
        hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__")
    ):
        shape, element = getattr(value, "shape", "?"), getattr(value, "dtype", "?")
        return f"a {library}.{kind.__name__} of shape {shape}, {element}"
    return repr(value)


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
