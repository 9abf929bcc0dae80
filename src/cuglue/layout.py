"""Where the elements of an array lie in memory: shape, strides in bytes, element type.

Owns :class:`Layout` and the rule for which layouts one copy can move. Pure arithmetic over NumPy's dtypes: it must
not know pointers, devices, drivers or array libraries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self

import numpy as np

from .arguments import shown, whole
from .errors import LayoutError


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-contiguous array; a zero extent counts as one, as NumPy has it."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Layout:
    """Shape, strides and element type of an array, without its address.

    What follows from them is worked out once: every export of an array asks.

    Args:
        shape: extents in elements; ``()`` is one element.
        strides: distance between neighbours along each axis, in bytes; never negative, and never zero along an axis
            that is longer than one: an element is at one place, and a place holds at most one element of an axis.
        dtype: anything NumPy takes for a dtype.

    Raises:
        LayoutError: extents and strides do not match, or are refused as above.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # the one way to normalise the fields of a frozen dataclass
        set_(self, "shape", integers("shape", self.shape))
        set_(self, "strides", integers("strides", self.strides))
        set_(self, "dtype", np.dtype(self.dtype))
        if len(self.shape) != len(self.strides):
            raise LayoutError(
                "an array layout",
                got=f"{len(self.shape)} extents {self.shape} and {len(self.strides)} strides {self.strides}",
                expected="one stride (in bytes) for each extent",
            )
        if any(extent < 0 for extent in self.shape):
            raise LayoutError("an array layout", got=f"shape {self.shape}", expected="no negative extent")
        if any(stride < 0 for stride in self.strides):
            raise LayoutError(
                "an array layout",
                got=f"strides {self.strides}",
                expected="no negative stride",
                hint="Copy the flipped array first (numpy.ascontiguousarray, .copy())",
            )
        if any(s == 0 and n > 1 for n, s in zip(self.shape, self.strides, strict=True)) and self.size:
            raise LayoutError(
                "an array layout",
                got=f"shape {self.shape} with strides {self.strides}",
                expected="no stride of zero along an axis longer than 1",
                hint="Copy the broadcast array first (numpy.ascontiguousarray, .copy())",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.shape, self.strides, self.dtype
        return type(self), fields  # and nothing of what was worked out

    # --- ways to make one

    @classmethod
    def of(cls, shape: Sequence[int], dtype: Any, strides: Sequence[int] | None = None) -> Self:
        """A layout from ``strides`` in bytes, or the C-contiguous one for None."""
        item: np.dtype[Any] = np.dtype(dtype)
        if strides is None:
            strides = contiguous_strides(integers("shape", shape), item.itemsize)
        return cls(tuple(shape), tuple(strides), item)

    @classmethod
    def from_elements(cls, shape: Sequence[int], strides: Sequence[int], dtype: Any) -> Self:
        """A layout whose ``strides`` are given in elements, as DLPack and PyTorch have them."""
        item: np.dtype[Any] = np.dtype(dtype)
        return cls(tuple(shape), tuple(n * item.itemsize for n in integers("strides", strides)), item)

    # --- what it says

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the elements alone, without the gaps between rows."""
        return self.size * self.dtype.itemsize

    @cached_property
    def nbytes(self) -> int:
        """Bytes from the first one of the first element to the last one of the last; 0 for an empty array."""
        if not self.size:
            return 0
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.itemsize

    @cached_property
    def is_c_contiguous(self) -> bool:
        """True when the elements lie without gaps, last axis fastest. Strides of axes of length 1 do not matter."""
        if not self.size:
            return True
        step = self.itemsize
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step:
                return False
            step *= extent
        return True

    @cached_property
    def cuts_elements(self) -> bool:
        """Whether a stride is no multiple of the element's size."""
        return any(stride % self.itemsize for stride in self.strides)

    def element_strides(self) -> tuple[int, ...]:
        """The strides in elements.

        Raises:
            LayoutError: a stride is no multiple of the element's size.
        """
        if self.cuts_elements:
            raise LayoutError(
                f"strides of {self.dtype} elements",
                got=f"{self.strides} bytes",
                expected=f"multiples of {self.itemsize} bytes",
                hint="Copy the array into a contiguous one, or view it as bytes",
            )
        return self._element_strides

    @cached_property
    def _element_strides(self) -> tuple[int, ...]:
        return tuple(stride // self.itemsize for stride in self.strides)

    def fits(self, offset: int, nbytes: int) -> None:
        """Check that the array, ``offset`` bytes into memory of ``nbytes`` bytes, stays inside.

        Raises:
            LayoutError: it begins before or ends after that memory.
        """
        if offset < 0 or offset + self.nbytes > nbytes:
            raise LayoutError(
                f"an array of shape {self.shape}, {self.dtype}, strides {self.strides}",
                got=f"bytes {offset} to {offset + self.nbytes}",
                expected=f"within the {nbytes} bytes of the memory",
            )


class CopyShape(NamedTuple):
    """What one copy moves: ``height`` rows of ``width`` bytes, ``pitch`` bytes apart. One row is a linear copy."""

    width: int
    height: int
    pitch: int

    @property
    def linear(self) -> bool:
        """True when one linear copy of ``width`` bytes does it."""
        return self.height <= 1

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return self.width * self.height


def linear(nbytes: int) -> CopyShape:
    """One linear copy of so many bytes. Past the constructor of named tuples, which takes twice as long."""
    return tuple.__new__(CopyShape, (nbytes, 1, nbytes))


def pitched(shape: Sequence[int], strides: Sequence[int], elem_size: int) -> CopyShape:
    """How one copy moves a row-major array whose rows may be padded, and nothing else (contracts C19).

    Args:
        shape: extents in elements.
        strides: strides in elements.
        elem_size: bytes of one element.

    Returns:
        A linear shape (one row) when there are no gaps, however tall the array; else rows, all leading axes folded
        into the height. A shape with a zero extent moves nothing, whatever its strides.

    Raises:
        LayoutError: rank 0, ranks that differ, a last stride other than 1, a zero stride, rows that overlap, or gaps
            anywhere but between rows.
    """
    shape, strides = integers("shape", shape), integers("strides", strides)
    if not shape or len(shape) != len(strides) or elem_size < 1 or min(shape) < 0:
        raise _unsupported(shape, strides, "a rank of at least 1, and one stride in elements for each extent")
    if 0 in shape:
        return CopyShape(0, 0, 0)
    if strides[-1] != 1:
        raise _unsupported(shape, strides, "a last stride of 1 element")
    if min(strides) < 1:
        raise _unsupported(shape, strides, "strides of at least 1 element")
    row = shape[-1]
    if len(shape) == 1:
        return CopyShape(row * elem_size, 1, row * elem_size)
    if strides[-2] < row:
        raise _unsupported(shape, strides, f"rows at least {row} elements apart")
    for axis in range(len(shape) - 2):
        if strides[axis] != strides[axis + 1] * shape[axis + 1]:
            raise _unsupported(shape, strides, "gaps between rows only")
    height = math.prod(shape[:-1])
    if strides[-2] == row:
        return CopyShape(row * height * elem_size, 1, row * height * elem_size)
    return CopyShape(row * elem_size, height, strides[-2] * elem_size)


def _unsupported(shape: tuple[int, ...], strides: tuple[int, ...], expected: str) -> LayoutError:
    return LayoutError(
        "copying an array",
        got=f"shape {shape} with strides {strides} (elements)",
        expected=expected,
        hint="Copy it into a row-major array first",
    )


def integers(what: str, values: Iterable[Any]) -> tuple[int, ...]:
    """A sequence of whole numbers.

    Raises:
        LayoutError: it is none.
    """
    try:
        given = tuple(values)
    except TypeError:
        raise _no_integers(what, values) from None
    found = tuple(map(whole, given))
    if None in found:
        raise _no_integers(what, values)
    return found  # type: ignore[return-value] # just asked


def extents(shape: Any) -> tuple[int, ...]:
    """The extents of a shape given as a whole number or a sequence of them.

    Raises:
        LayoutError: it is neither, or one is negative.
    """
    if type(shape) is int and shape >= 0:
        return (shape,)
    one = whole(shape)
    found = integers("shape", shape) if one is None else (one,)
    if found and min(found) < 0:
        raise LayoutError("an array layout", got=f"shape {found}", expected="no negative extent")
    return found


def element(dtype: Any) -> np.dtype[Any]:
    """The element type that ``dtype`` names, if its elements are bytes in memory.

    Raises:
        LayoutError: NumPy knows no such type, or its elements are Python objects, empty, or arrays.
    """
    return _element_named(dtype) if type(dtype) is str else _element(dtype)


def _element(dtype: Any) -> np.dtype[Any]:
    try:
        item: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise LayoutError("element type", got=shown(dtype), expected="a dtype that NumPy knows") from error
    if item.hasobject or not item.itemsize:
        raise LayoutError("element type", got=repr(item), expected="numbers, or other bytes of a fixed size")
    if item.subdtype is not None:
        base, sides = item.subdtype
        raise LayoutError(
            "element type", got=repr(item), expected=f"{base}", hint=f"Put {sides} at the end of the shape"
        )
    return item


_element_named = lru_cache(_element)


def _no_integers(what: str, values: object) -> LayoutError:
    return LayoutError(f"{what} of an array layout", got=shown(values), expected="a sequence of integers")
