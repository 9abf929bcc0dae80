"""Descriptors: what a copy between device and host moves, as values.

Owns :class:`CopyDescriptor`. Must not know buffers, or how copies are made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ..arguments import shown, whole
from ..errors import LayoutError, UsageError
from ..layout import CopyShape, contiguous_strides, element, integers, linear, pitched


def descriptor_of(what: str, value: Any) -> CopyDescriptor:
    """``value``, if it is a descriptor.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(value, CopyDescriptor):
        raise UsageError(
            what,
            got=shown(value)[:80],
            expected="a CopyDescriptor",
            hint="Make one: buffer.descriptor(shape, dtype)",
        )
    return value


@dataclass(frozen=True, slots=True)
class CopyDescriptor:
    """What a copy between device and host moves.

    Args:
        buffer: a Buffer, or anything else that can be an operand: a map, a view, a CuPy array.
        shape: extents in elements.
        strides: in elements. Rows may be padded; anything else is refused by the copy, not here.
        elem_size: bytes of one element.
        dtype: of the host buffers that a read gives; None gives bytes.

    Raises:
        LayoutError: (a ValueError) rank 0, ranks that differ, negative extents, no whole numbers, or Python objects.
    """

    buffer: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    elem_size: int
    dtype: np.dtype[Any] | None = None
    #: Bytes that are moved: of the elements alone.
    nbytes: int = field(init=False, repr=False, compare=False)
    #: Bytes from the first to the last one that is moved.
    span: int = field(init=False, repr=False, compare=False)
    _moved: CopyShape | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        shape, strides = integers("shape", self.shape), integers("strides", self.strides)
        size = whole(self.elem_size) or 0
        set_(self, "shape", shape)
        set_(self, "strides", strides)
        set_(self, "elem_size", size)
        if not shape or len(shape) != len(strides) or min(shape) < 0 or size < 1:
            raise LayoutError(
                "copy descriptor",
                got=f"shape {self.shape}, strides {self.strides}, {self.elem_size} bytes an element",
                expected="a rank of at least 1 and one stride (in elements) for each extent",
            )
        if self.dtype is not None:
            set_(self, "dtype", element(self.dtype))
            if self.dtype.itemsize != size:
                raise LayoutError(
                    "copy descriptor",
                    got=f"{self.dtype} and {size} bytes an element",
                    expected="the same size",
                )
        set_(self, "nbytes", math.prod(shape) * size)
        last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        set_(self, "span", (last + 1) * size)
        set_(self, "_moved", None)

    def __repr__(self) -> str:
        layout = (
            f"shape={self.shape}, strides={self.strides}, elem_size={self.elem_size}, dtype={self.dtype!r}"
        )
        return f"CopyDescriptor(buffer={shown(self.buffer)}, {layout})"

    @classmethod
    def contiguous(cls, buffer: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Self:
        """A descriptor of elements without gaps. Shape and dtype were checked: nothing is asked again on every read."""
        made = object.__new__(cls)
        size = dtype.itemsize
        one = len(shape) == 1
        nbytes = (shape[0] if one else math.prod(shape)) * size
        _set_buffer(made, buffer)
        _set_shape(made, shape)
        _set_strides(made, _ONE_AXIS if one else contiguous_strides(shape, 1))
        _set_elem_size(made, size)
        _set_dtype(made, dtype)
        _set_nbytes(made, nbytes)
        _set_span(made, nbytes)
        _set_moved(made, linear(nbytes))
        return made

    @property
    def copy_shape(self) -> CopyShape:
        """Rows, width and pitch of the one copy that does it; LayoutError if there is none."""
        moved = self._moved
        if moved is None:
            moved = pitched(self.shape, self.strides, self.elem_size)
            object.__setattr__(self, "_moved", moved)
        return moved


_FIELDS = ("buffer", "shape", "strides", "elem_size", "dtype", "nbytes", "span", "_moved")
# Past the refusal to change a descriptor, and in a fifth of the time of object.__setattr__.
_set_buffer, _set_shape, _set_strides, _set_elem_size, _set_dtype, _set_nbytes, _set_span, _set_moved = (
    vars(CopyDescriptor)[name].__set__ for name in _FIELDS
)
_ONE_AXIS = (1,)
