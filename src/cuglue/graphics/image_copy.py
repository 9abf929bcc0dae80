"""Copies between an opaque image and its linear buffer: which way is taken, and the kernels of the fast one.

Owns the surface kernels (and their twins for the simulated device), the choice between them and the driver's own
copy, and the unit a thread moves. Must not know handles, maps or OpenGL; it counts nothing and waits for nothing.

The kernels move 16 bytes a thread where rows and base allow. That runs at 2.3 to 4.8 times the rate of the driver's
2-D copy on large images, but a launch and a surface object cost more host time than a copy call: small images take
the driver's copy.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from ..core.device import DeviceState
from ..core.stream import Stream
from ..driver.protocol import Access, ArrayInfo, Span, SurfaceArg
from .inplace import ImageObjects

#: Images below this many bytes take the driver's copy, whose call costs less than a launch.
SMALL_BYTES = 256 << 10
#: Threads of a block; 16x16 writes faster than 32x8.
BLOCK = (16, 16, 1)

_UNITS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}

_SOURCE = """
extern "C" __global__ void {name}(cudaSurfaceObject_t image, {type}* linear, int units, int rows, int slice)
{{
    const int x = blockIdx.x * blockDim.x + threadIdx.x;
    const int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= units || y >= rows) return;
    {type}* const at = linear + (size_t)y * units + x;
    {body}
}}
"""
_BODIES = {
    ("load", 2): "*at = surf2Dread<{type}>(image, x * {unit}, y);",
    ("load", 3): "*at = surf3Dread<{type}>(image, x * {unit}, y, slice);",
    ("store", 2): "surf2Dwrite(*at, image, x * {unit}, y);",
    ("store", 3): "surf3Dwrite(*at, image, x * {unit}, y, slice);",
}


class CopyPath(Enum):
    """How an image is copied."""

    SURFACE = "surface"  # our kernels, through a surface object
    DRIVER = "driver"  # the driver's 2-D array copy


def kernel_name(direction: str, dimensions: int, unit: int) -> str:
    """Name of the kernel that moves ``unit`` bytes a thread; ``direction`` is "load" or "store"."""
    return f"cuglue_image_{direction}_{dimensions}d_{unit}"


def _source(direction: str, dimensions: int, unit: int) -> str:
    kind = _UNITS[unit]
    body = _BODIES[direction, dimensions].format(type=kind, unit=unit)
    return _SOURCE.format(name=kernel_name(direction, dimensions, unit), type=kind, body=body)


#: Every kernel of this module: name -> CUDA C source. One function each, of the name given.
KERNELS: dict[str, str] = {
    kernel_name(direction, dimensions, unit): _source(direction, dimensions, unit)
    for direction, dimensions in _BODIES
    for unit in _UNITS
}


def choose_path(nbytes: int, *, surfaces: bool, depth: int = 0) -> CopyPath:
    """Which way an image of ``nbytes`` bytes is copied.

    Args:
        nbytes: size of the image in bytes, rows tight.
        surfaces: whether the image may be read and written through a surface object.
        depth: slices of a 3-D image; 0 for any other. The driver's copy reaches only the first slice.
    """
    if surfaces and (nbytes >= SMALL_BYTES or depth):
        return CopyPath.SURFACE
    return CopyPath.DRIVER


def choose_unit(row_bytes: int, base: int) -> int:
    """Bytes a thread moves: the largest of 16, 8, 4, 2, 1 that divides a row and the address.

    Never less than a texel: rows are whole texels, and every texel is of such a size.
    """
    return next(unit for unit in _UNITS if row_bytes % unit == 0 and base % unit == 0)


# --- what the simulated device runs -----------------------------------------------------------------------------


def _rows_of(image: Any, row_bytes: int, rows: int, slice_: int) -> np.ndarray[Any, Any]:
    """The bytes of an image's rows: a view, so that it can be written."""
    texels: np.ndarray[Any, Any] = image.texels[slice_] if image.texels.ndim == 4 else image.texels
    return texels.view(np.uint8).reshape(texels.shape[0], -1)[:rows, :row_bytes]


def _sim_load(
    grid: object, block: object, image: Any, linear: Any, units: Any, rows: Any, slice_: Any
) -> None:
    linear[...] = _rows_of(image, linear.shape[1], int(rows), int(slice_))


def _sim_store(
    grid: object, block: object, image: Any, linear: Any, units: Any, rows: Any, slice_: Any
) -> None:
    _rows_of(image, linear.shape[1], int(rows), int(slice_))[...] = linear


_SIM: dict[str, Callable[..., None]] = {"load": _sim_load, "store": _sim_store}


# --- the copies of one device -----------------------------------------------------------------------------------


class ImageCopier:
    """The image copies of one device. Get it with :func:`image_copier`; one per device, kernels stay loaded."""

    def __init__(self, state: DeviceState) -> None:
        self._driver = state.driver
        self._device = state.device
        self._kernels: dict[tuple[str, int, int], int] = {}

    def prepare(self, row_bytes: int, depth: int) -> None:
        """Compile what images with such rows need, so that no map pays for it. Blocks the host for the compiler."""
        for direction in ("load", "store"):
            self._kernel(direction, 3 if depth else 2, choose_unit(row_bytes, 0))

    def _kernel(self, direction: str, dimensions: int, unit: int) -> int:
        key = direction, dimensions, unit
        kernel = self._kernels.get(key)
        if kernel is None:
            name = kernel_name(*key)
            kernel = self._driver.kernel_load(name, KERNELS[name], (), self._device, _SIM[direction])
            self._kernels[key] = kernel
        return kernel

    def load(self, image: Image, linear: int, stream: Stream) -> None:
        """Enqueue image -> linear memory. The caller orders both sides and counts the operation."""
        if image.path is CopyPath.DRIVER:
            self._driver.copy_from_array_async(
                linear, image.row_bytes, image.array, image.row_bytes, image.rows, stream.handle
            )
        else:
            self._launch("load", image, linear, Access.READ, Access.WRITE, stream)

    def store(self, image: Image, linear: int, stream: Stream) -> None:
        """Enqueue linear memory -> image, every row. The caller orders both sides and counts the operation."""
        if image.path is CopyPath.DRIVER:
            self._driver.copy_to_array_async(
                image.array, linear, image.row_bytes, image.row_bytes, image.rows, stream.handle
            )
        else:
            self._launch("store", image, linear, Access.WRITE, Access.READ, stream)

    def _launch(
        self, direction: str, image: Image, linear: int, on_image: Access, on_linear: Access, stream: Stream
    ) -> None:
        row_bytes, rows = image.row_bytes, image.rows
        unit = choose_unit(row_bytes, linear)
        units = row_bytes // unit
        grid = (-(-units // BLOCK[0]), -(-rows // BLOCK[1]), 1)
        surface = image.objects.surface()
        values = (surface, linear, np.int32(units), np.int32(rows), np.int32(image.slice))
        span = Span(linear, row_bytes * rows, on_linear, (rows, row_bytes), "|u1", (row_bytes, 1))
        kernel = self._kernel(direction, 3 if image.info.depth else 2, unit)
        self._driver.kernel_launch(
            kernel,
            grid,
            BLOCK,
            values,
            (SurfaceArg(surface, on_image), span, None, None, None),
            0,
            stream.handle,
        )


class Image:
    """An opaque array while it may be used: its geometry, the way it is copied, the objects made of it.

    Args:
        state: the device.
        array: the driver's handle of the array; the caller keeps it valid.
        info: extents and texel of the array.
        slice_: slice of a 3-D array; 0 for any other.
        surfaces: whether the driver lets surfaces be made of the array.
    """

    __slots__ = ("array", "info", "objects", "path", "row_bytes", "rows", "slice")

    def __init__(
        self, state: DeviceState, array: int, info: ArrayInfo, *, slice_: int = 0, surfaces: bool = True
    ) -> None:
        self.array = array
        self.info = info
        self.objects = ImageObjects(state.driver, state.device, array)
        self.slice = slice_
        self.row_bytes = info.width * info.texel_bytes
        self.rows = max(info.height, 1)
        self.path = choose_path(self.nbytes, surfaces=surfaces, depth=info.depth)

    @property
    def nbytes(self) -> int:
        """Bytes of the image, rows tight; of one slice if it is 3-D."""
        return self.row_bytes * self.rows


def image_copier(state: DeviceState) -> ImageCopier:
    """The one :class:`ImageCopier` of a device; kept on its record, so that it dies with the driver."""
    copier: ImageCopier | None = vars(state).get("_image_copier")
    if copier is None:
        copier = vars(state).setdefault("_image_copier", ImageCopier(state))
    return copier
