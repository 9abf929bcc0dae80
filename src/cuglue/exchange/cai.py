"""The array interface dictionaries: ``__cuda_array_interface__`` and NumPy's ``__array_interface__``.

Owns their fields. Must not know drivers, streams as objects or tokens; building one does nothing else, because
consumers read the attribute twice and ``hasattr`` reads it too.
"""

from __future__ import annotations

from typing import Any

from ..layout import Layout


def array_interface(ptr: int, layout: Layout, *, readonly: bool) -> dict[str, Any]:
    """The fields that both interfaces share.

    Args:
        ptr: address of the first element; an empty array says 0.
        layout: shape, strides (bytes) and dtype.
        readonly: the flag that consumers get.
    """
    return {
        "shape": layout.shape,
        "typestr": layout.dtype.str,
        "data": (ptr if layout.size else 0, readonly),
        "strides": None if layout.is_c_contiguous else layout.strides,
        "version": 3,
    }


def cuda_array_interface(ptr: int, layout: Layout, *, stream: int | None) -> dict[str, Any]:
    """``__cuda_array_interface__`` version 3 of writable memory.

    There is no read-only one: PyTorch raises on the flag and everybody else ignores it.

    Args:
        ptr: address of the first element.
        layout: shape, strides (bytes) and dtype.
        stream: where work on the memory may be pending; None: nowhere. Never 0.
    """
    return {**array_interface(ptr, layout, readonly=False), "stream": stream}
