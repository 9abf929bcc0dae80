"""Whole contents in one line: a map's bytes into an array of the caller's own, and an array's bytes into a map.

Owns :meth:`CudaHandle.read` and :meth:`CudaHandle.write`: a map, and what is done before it is left. Knows array
libraries only by their protocols, and by what is loaded already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.stream import Stream, as_stream
from ..errors import LayoutError
from ..exchange.copies import on_host
from .mapping import CudaMap


class WholeContents:
    """Reading and writing of a handle; its class inherits them."""

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> np.dtype[Any]: ...
        def map(self, stream: Any = None) -> CudaMap: ...
        def map_mut(self, stream: Any = None, *, overwrite: bool = False) -> CudaMap: ...
        def _stream(self, stream: Any) -> Stream: ...

    def read(self, stream: Any = None, *, flip: bool = False) -> Any:
        """The contents as an array of the caller's own: CuPy's, or NumPy's on the simulated device.

        Args:
            stream: work queued there comes after the copy; None: the array library's current stream.
            flip: turn the rows round, so that row 0 is the top one.

        Ordering: only enqueues on a CUDA device; blocks the host on the simulated one. Raises: as :meth:`map`.
        """
        where = self._stream(stream)
        with unseen(self.map(where)) as m:
            return take(m, flip=flip)

    def write(self, array: Any, stream: Any = None, *, flip: bool = False) -> None:
        """Replace the contents by ``array``, of exactly the handle's shape and element type.

        Args:
            array: NumPy's, CuPy's, PyTorch's or anything with an array protocol.
            stream: ``array`` is ready there; None: on the array library's current stream.
            flip: ``array`` has its top row first.

        Ordering: only enqueues where ``array`` is on the device; else returns when the host memory may be reused.

        Raises:
            LayoutError: another shape or element type; nothing was mapped. Else as :meth:`map_mut`.
        """
        check(array, self.shape, self.dtype, self)
        where = self._stream(stream)
        with unseen(self.map_mut(where, overwrite=True)) as m:
            try:
                fill(m, array, flip=flip)
            except BaseException:
                m.cancel()
                raise
            m.block.taint = None  # every byte was written, whatever failed before


@contextmanager
def unseen(m: CudaMap) -> Iterator[CudaMap]:
    """A map that the caller never sees: where it cannot be left, that is done before the object's next call."""
    try:
        with m:
            yield m
    except BaseException:
        m.leave_later()
        raise


def take(m: CudaMap, *, flip: bool) -> Any:
    """A copy of the map's contents: CuPy's, or NumPy's where the memory is on the host; ordered on the map's stream."""
    if on_host(m):
        array = m.numpy()
        return array[::-1].copy() if flip else array
    view = m.cupy()
    with _device_of(m, view):
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
    with _device_of(m, target):
        if isinstance(array, np.ndarray):
            target.set(np.ascontiguousarray(array[::-1] if flip else array))
            return
        # CuPy made ``target``, in order on its current stream, which waits for the map's, where ``array`` is ready.
        source = sys.modules["cupy"].asarray(array)
        target[...] = source[::-1] if flip else source


def _device_of(m: CudaMap, array: Any) -> AbstractContextManager[object]:
    """Under this CuPy works on the device of ``array``, a view of the map: it makes its copies on the current one."""
    found: AbstractContextManager[object] = nullcontext() if m.stream.state.alone else array.device
    return found
