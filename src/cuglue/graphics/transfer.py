"""Whole contents in one line: a map's bytes into an array of the caller's own, and an array's bytes into a map.

Owns what :meth:`CudaHandle.read` and :meth:`CudaHandle.write` do between mapping and leaving. Knows array libraries
only by their protocols, and by what is loaded already.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..core.stream import as_stream
from ..errors import LayoutError
from ..exchange.copies import on_host
from .mapping import CudaMap


def take(m: CudaMap, *, flip: bool) -> Any:
    """A copy of the map's contents: CuPy's, or NumPy's where the memory is on the host; ordered on the map's stream."""
    if on_host(m):
        array = m.numpy()
        return array[::-1].copy() if flip else array
    view = m.cupy()
    copy = (view[::-1] if flip else view).copy()
    del view
    # The copy ran on CuPy's current stream.
    m.stream.join(as_stream(None, device=m.device, driver=m.driver))
    return copy


def check(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any], what: object) -> None:
    """Refuse an array that is not exactly what the object holds.

    Raises:
        LayoutError: another shape or element type.
    """
    found = tuple(getattr(array, "shape", ())), str(getattr(array, "dtype", type(array).__name__))
    found = found[0], found[1].removeprefix("torch.")
    if found != (shape, str(dtype)):
        raise LayoutError(
            f"writing {what}",
            got=f"{found[1]} of shape {found[0]}",
            expected=f"{dtype} of shape {shape}",
            hint="Convert the array first; images have the channels that the driver stores (RGB8 has four)",
        )


def fill(m: CudaMap, array: Any, *, flip: bool) -> None:
    """Copy ``array``, which was checked, into the map."""
    if on_host(m):
        source = np.asarray(array)
        np.asarray(m)[...] = source[::-1] if flip else source
        return
    target = m.cupy()
    if isinstance(array, np.ndarray):
        target.set(np.ascontiguousarray(array[::-1] if flip else array))
        return
    # CuPy made ``target``, in order on its current stream, which waits for the map's, where ``array`` is ready.
    source = sys.modules["cupy"].asarray(array)
    target[...] = source[::-1] if flip else source
