"""What image the texels of an array carry: its format, its shape, and the planes that make it up.

Owns the step from "the driver's array has these texels" (and what the caller says of them) to the layout that maps
have. Must not know where the array comes from.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal, NamedTuple

from ..arguments import shown, whole
from ..driver.protocol import ArrayInfo, TexelKind
from ..errors import LayoutError, UnsupportedError, UsageError
from ..formats import (
    FORMATS,
    Format,
    Packing,
    PlaneView,
    Texel,
    by_name,
    check_carrier,
    from_descriptor,
    plane_views,
    tight_geometry,
)
from ..layout import Layout

KINDS: dict[TexelKind, Literal["u", "s", "f"]] = {
    TexelKind.UINT: "u",
    TexelKind.SINT: "s",
    TexelKind.FLOAT: "f",
}
TEXEL_KINDS = {"u": TexelKind.UINT, "i": TexelKind.SINT, "f": TexelKind.FLOAT}


class Carried(NamedTuple):
    """The image that texels carry, as the caller says it; None: they are the image."""

    format: Format | None = None
    width: int | None = None
    height: int | None = None


class ImageLayout(NamedTuple):
    """Format, layout and planes of an image; ``planes`` is None where it has one, which is the whole."""

    format: Format
    layout: Layout
    planes: dict[str, PlaneView] | None


def format_of(what: object, format: str | Format) -> Format:
    """The format that a caller named or gave.

    Raises:
        UsageError: it is none. UnsupportedError: no format of that name.
    """
    found = by_name(format) if isinstance(format, str) else format
    if not isinstance(found, Format):
        raise UsageError(f"{what}: format", got=shown(format), expected="the name of a format, or a Format")
    return found


def carried(
    what: object, format: str | Format | None, width: int | None = None, height: int | None = None
) -> Carried:
    """What the caller says of an image.

    Raises:
        UsageError: a size without a format that it is the size of, or what is no format or size.
        UnsupportedError: no such format.
    """
    found = None if format is None else format_of(what, format)
    if found is None and (width, height) != (None, None):
        raise UsageError(f"{what}", got="width or height", expected="a format that they are the size of")
    sides = whole(width), whole(height)
    if (sides[0] is None) != (width is None) or (sides[1] is None) != (height is None):
        raise UsageError(f"{what}", got=f"{shown(width)} x {shown(height)} pixels", expected="two ints")
    return Carried(found, *sides)


def image_layout(found: Format, carried: Carried, texels: int, rows: int) -> ImageLayout:
    """What maps of an image show.

    Args:
        found: what the texels are.
        carried: what the caller says that they carry.
        texels, rows: extents in texels.

    Raises:
        LayoutError: texels of that kind and number cannot carry such an image.
    """
    if carried.format is None:
        return ImageLayout(found, Layout.of((rows, texels, found.channels), found.dtype), None)
    format = carried.format
    width = texels if carried.width is None else carried.width
    height = _height(format, width, rows) if carried.height is None else carried.height
    geometry = check_carrier(format, width, height, found.texel, texels, rows)
    planes = plane_views(format, width, height, texels if format.packing is Packing.SEMI_PLANAR else None)
    if format.packing is Packing.SEMI_PLANAR:
        shape: tuple[int, ...] = (geometry.rows, geometry.row_bytes)
    elif format.packing is Packing.PLANAR:
        shape = (format.channels, height, width)
    else:
        shape = (height, width, format.channels)
    return ImageLayout(format, Layout.of(shape, format.dtype), planes)


def _height(format: Format, width: int, rows: int) -> int:
    """Height in pixels of the image that so many rows of texels hold, planes one below the other; rows if of none."""
    found = bisect_left(range(1, rows), rows, key=lambda height: tight_geometry(format, width, height).rows)
    return 1 + found


def texel_of(info: ArrayInfo) -> Texel:
    """The texel type of a driver's array.

    Raises:
        UnsupportedError: one that has no NumPy type.
    """
    return from_descriptor(info.bits, KINDS[info.kind], info.channels)


def plain_format(texel: Texel) -> Format:
    """The format whose texels are just that: of float32 x 4 "RGBA32F", of uint8 x 1 "R8"."""
    return next(
        f
        for f in FORMATS
        if f.registers and f.packing is Packing.PLAIN and f.texel == texel and f.gl is not None
    )


def array_info(what: object, format: Format, texels: int, rows: int) -> ArrayInfo:
    """The array that holds ``texels`` x ``rows`` texels of a format.

    Raises:
        LayoutError: no extents of an image.
        UnsupportedError: a format that arrays do not have.
    """
    if not format.channels or format.packing is not Packing.PLAIN:
        raise UnsupportedError(
            f"{what} of {format}",
            got=format.reason or f"{format.packing.value}",
            expected="a format whose texels are pixels of 1, 2 or 4 channels",
            hint=format.way_out or "Import the texels that carry it, and give the handle format=",
            reason="format",
        )
    if texels < 1 or rows < 1:
        raise LayoutError(f"{what}", got=f"{texels} x {rows} texels", expected="at least 1 x 1")
    dtype = Layout.of((), format.texel.dtype).dtype
    return ArrayInfo(texels, rows, 0, dtype.itemsize * 8, format.texel.channels, TEXEL_KINDS[dtype.kind])
