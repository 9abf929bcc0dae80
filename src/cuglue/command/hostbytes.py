"""Bytes of the host that a copy reads or writes, whoever's they are.

Owns what counts as data and as a destination, and where their bytes lie. Must not know copies or devices.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import LayoutError, UsageError
from .buffers import Buffer
from .hostmem import HostBuffer, PinnedMemory, root_of
from .staging import Source

_BYTES = np.dtype(np.uint8)
_PLAIN = (np.ndarray, HostBuffer)  # other kinds of arrays may read and write otherwise


def readable_bytes(data: Any) -> npt.NDArray[np.uint8]:
    """The bytes of ``data`` as a flat array, without a copy if it is C-contiguous.

    Raises:
        UsageError: device memory, or nothing that has bytes.
    """
    if type(data) in _PLAIN and data.ndim == 1 and data.dtype is _BYTES and data.flags.c_contiguous:
        return data  # type: ignore[no-any-return] # an array, of bytes
    if isinstance(data, np.ndarray):
        array = data
    elif isinstance(data, str):
        raise UsageError("data", got="a str", expected="bytes", hint="Encode it: text.encode()")
    elif isinstance(data, Buffer) or hasattr(type(data), "__cuda_array_interface__"):
        raise UsageError("data", got=f"{type(data).__name__}, device memory", expected="host memory")
    else:
        try:
            array = np.frombuffer(data, np.uint8)
        except (TypeError, BufferError, ValueError):
            array = _as_array(data)
    if array.dtype.hasobject:
        raise UsageError("data", got="Python objects", expected="numbers")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _as_array(data: Any) -> npt.NDArray[Any]:
    """Lists, scalars, CPU tensors, empty buffers."""
    try:
        return np.asarray(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            "data", got=type(data).__name__, expected="bytes, an array, or anything numpy.asarray takes"
        ) from error


def writable_bytes(data: Any) -> tuple[object, npt.NDArray[np.uint8]]:
    """``(what keeps data from moving, its bytes as a flat array)``.

    Raises:
        LayoutError: read-only, or not C-contiguous.
        UsageError: nothing that can be written, or Python objects.
    """
    if type(data) in _PLAIN and data.ndim == 1 and data.dtype is _BYTES and data.flags.carray:
        return data, data
    try:
        view = memoryview(data)
    except TypeError:
        view = _array_view(data)
    except ValueError:
        view = _view_of_dates(data)
    if "O" in view.format and np.asarray(view).dtype.hasobject:
        raise UsageError("buffer of a read", got="Python objects", expected="numbers")
    if view.readonly or not view.c_contiguous:
        raise LayoutError(
            "buffer of a read",
            got="read-only bytes" if view.readonly else "a buffer with gaps",
            expected="a writable C-contiguous buffer",
        )
    if not view.nbytes:
        return view, np.empty(0, np.uint8)
    return view, np.frombuffer(view.cast("B"), np.uint8)


def _array_view(data: Any) -> memoryview:
    """The memory of a CPU tensor. Of a list there is none: NumPy would make an array that nobody sees."""
    try:
        if any(hasattr(type(data), name) for name in ("__array__", "__array_interface__")):
            return np.asarray(data).data
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UsageError("buffer of a read", got=type(data).__name__, expected="a writable buffer")


def _view_of_dates(data: npt.NDArray[Any]) -> memoryview:
    """The memory of an array of a type that NumPy gives no buffer of, as dates."""
    return data.view(f"V{data.itemsize}").data


def kind_of(source: npt.NDArray[np.uint8]) -> Source:
    """Where the bytes lie."""
    root = root_of(source.base)
    if isinstance(root, PinnedMemory):
        return Source.PINNED
    return Source.FILE if isinstance(root, mmap.mmap) else Source.OTHER
