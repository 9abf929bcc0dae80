"""Kernel arguments as CUDA reads them: an array of addresses, one a parameter.

Owns the bytes of arguments while a launch reads them, and the check that they fit the kernel. Must not know how a
kernel is launched. CuPy wraps each argument in an object of its own at each launch and never compares it with the
parameter; here one call packs them all, into buffers that are kept.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from ...errors import LaunchError

#: How each type of argument is packed. What is not here (complex numbers, structures) CuPy packs.
_CODES: dict[type, str] = {
    int: "q",
    bool: "?",
    float: "d",
    np.bool_: "?",
    np.int8: "b",
    np.uint8: "B",
    np.int16: "h",
    np.uint16: "H",
    np.int32: "i",
    np.uint32: "I",
    np.int64: "q",
    np.uint64: "Q",
    np.longlong: "q",
    np.ulonglong: "Q",
    np.float16: "e",
    np.float32: "f",
    np.float64: "d",
}


class Packing:
    """How arguments of these types go into memory for one kernel.

    Args:
        types: of the arguments, each known to :func:`can_pack`.
        sizes: bytes of the kernel's parameters, or None where the driver does not tell.

    Raises:
        LaunchError: the arguments do not fit the parameters.
    """

    __slots__ = ("_offsets", "_spare", "_struct")

    def __init__(self, types: tuple[type, ...], sizes: tuple[int, ...] | None) -> None:
        if sizes is not None and len(types) != len(sizes):
            raise _misfit(f"{len(types)} arguments", f"{len(sizes)}")
        layout = "@"
        offsets: list[int] = []
        for position, kind in enumerate(types):
            code = _CODES[kind]
            if sizes is not None:
                code = _fitting(kind, code, sizes[position], position)
            layout += code
            offsets.append(struct.calcsize(layout) - struct.calcsize(code))
        self._struct = struct.Struct(layout)
        self._offsets = offsets
        self._spare: list[_Buffer] = []

    def pack(self, values: tuple[Any, ...]) -> _Buffer:
        """The arguments in a buffer nobody else uses; :meth:`give_back` it after the launch, which copies them."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = _Buffer(self._struct.size, self._offsets)
        try:
            self._struct.pack_into(buffer.data, 0, *values)
        except struct.error as error:
            self._spare.append(buffer)
            raise _misfit(f"{values} ({error})", "values that fit the kernel's parameters") from None
        return buffer

    def give_back(self, buffer: _Buffer) -> None:
        """Keep the buffer for the next launch."""
        self._spare.append(buffer)


class _Buffer:
    """Packed arguments and the array of their addresses."""

    __slots__ = ("_addresses", "data", "parameters")

    def __init__(self, size: int, offsets: list[int]) -> None:
        self.data = ctypes.create_string_buffer(max(size, 1))
        base = ctypes.addressof(self.data)
        self._addresses = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))
        self.parameters = ctypes.addressof(self._addresses)


def can_pack(types: tuple[type, ...]) -> bool:
    """True if :class:`Packing` knows all of these types."""
    return all(kind in _CODES for kind in types)


def _fitting(kind: type, code: str, size: int, position: int) -> str:
    """The code of an argument for a parameter of ``size`` bytes.

    A plain int fits any integer: the parameter takes its low bytes. A plain float fits both widths.
    """
    if kind is float and size == 4:
        return "f"
    width = struct.calcsize(code)
    if width == size or (kind is int and size < width):
        return code
    raise _misfit(f"{kind.__name__} of {width} bytes as argument {position}", f"a parameter of {size} bytes")


def _misfit(got: str, expected: str) -> LaunchError:
    return LaunchError(
        "arguments do not fit the kernel",
        got=got,
        expected=expected,
        code=1,
        name="CUDA_ERROR_INVALID_VALUE",
        call="cuLaunchKernel",
    )
