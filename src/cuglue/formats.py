"""Image formats: looking them up, and how many bytes an image takes.

Owns the lookups by name, OpenGL internal format, DXGI format, FourCC and array descriptor, the answer to "does it
register", and the geometry of images carried by textures. Pure arithmetic over :mod:`cuglue.format_table`: it must
not know OpenGL calls, drivers or devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .arguments import shown
from .errors import LayoutError, UnsupportedError
from .format_table import FORMATS, Format, Packing, Plane, Texel
from .layout import Layout

_BY_NAME = {f.name: f for f in FORMATS}
_BY_GL = {f.gl: f for f in FORMATS if f.gl is not None}
_BY_DXGI = {f.dxgi: f for f in FORMATS if f.dxgi is not None}
_BY_FOURCC = {f.fourcc: f for f in FORMATS if f.fourcc is not None}
# Unsized internal formats: what every driver stores for them.
_UNSIZED = {
    0x1903: "R8",
    0x8227: "RG8",
    0x1907: "RGB8",
    0x1908: "RGBA8",
    0x8C40: "SRGB8",
    0x8C42: "SRGB8_ALPHA8",
}
_DXGI_TYPELESS = {
    1: "R32G32B32A32_TYPELESS",
    5: "R32G32B32_TYPELESS",
    9: "R16G16B16A16_TYPELESS",
    15: "R32G32_TYPELESS",
    19: "R32G8X24_TYPELESS",
    23: "R10G10B10A2_TYPELESS",
    27: "R8G8B8A8_TYPELESS",
    33: "R16G16_TYPELESS",
    39: "R32_TYPELESS",
    44: "R24G8_TYPELESS",
    48: "R8G8_TYPELESS",
    53: "R16_TYPELESS",
    60: "R8_TYPELESS",
    90: "B8G8R8A8_TYPELESS",
    92: "B8G8R8X8_TYPELESS",
}

_NEVER_TARGETS = {0x0DE0: "GL_TEXTURE_1D", 0x8C18: "GL_TEXTURE_1D_ARRAY", 0x8C2A: "GL_TEXTURE_BUFFER"}
_MULTISAMPLE_TARGETS = {0x9100: "GL_TEXTURE_2D_MULTISAMPLE", 0x9102: "GL_TEXTURE_2D_MULTISAMPLE_ARRAY"}


def by_name(name: str) -> Format:
    """The format called ``name`` ("RGBA8", "GL_RGBA8", "NV12").

    Raises:
        UnsupportedError: no such format; the message lists the names known.
    """
    try:
        return _BY_NAME[name.removeprefix("GL_")]
    except KeyError:
        raise UnsupportedError(
            "image format", reason="format", got=shown(name), expected=f"one of {', '.join(_BY_NAME)}"
        ) from None


def by_gl(internal_format: int) -> Format:
    """The format of an OpenGL internal format number; unsized ones (``GL_RGBA``) mean their 8-bit form.

    Raises:
        UnsupportedError: a number that is not in the table, such as a compressed or legacy format.
    """
    found = _BY_GL.get(internal_format) or _BY_NAME.get(_UNSIZED.get(internal_format, ""))
    if found is None:
        raise UnsupportedError(
            "OpenGL internal format",
            reason="format",
            got=f"0x{internal_format:04X} (compressed, legacy or unknown)",
            expected="a sized R, RG or RGBA colour format",
            hint="Copy the image into a texture of such a format",
        )
    return found


def by_dxgi(number: int) -> Format:
    """The format of a DXGI_FORMAT number.

    Raises:
        UnsupportedError: a typeless or unknown format.
    """
    found = _BY_DXGI.get(number)
    if found is None:
        typeless = _DXGI_TYPELESS.get(number)
        raise UnsupportedError(
            "DXGI format",
            reason="format",
            got=f"DXGI_FORMAT_{typeless} ({number})" if typeless else number,
            expected="a typed colour format",
            hint="Copy to a typed texture of the same layout first" if typeless else None,
        )
    return found


def by_fourcc(code: str | int) -> Format:
    """The format of a FourCC, as text ("NV12") or as its little-endian number.

    Raises:
        UnsupportedError: a code that is not in the table.
    """
    text = code if isinstance(code, str) else code.to_bytes(4, "little").decode("latin-1")
    found = _BY_FOURCC.get(text.ljust(4))
    if found is None:
        raise UnsupportedError(
            "FourCC", reason="format", got=shown(text), expected=f"one of {', '.join(sorted(_BY_FOURCC))}"
        )
    return found


def from_descriptor(bits: int, kind: Literal["u", "s", "f"], channels: int) -> Texel:
    """The texel type of a driver's array.

    Args:
        bits: bits of one channel: 8, 16 or 32.
        kind: "u" unsigned, "s" signed, "f" float.
        channels: 1, 2 or 4.

    Raises:
        UnsupportedError: no NumPy type, or a number of channels that an array cannot have.
    """
    base = {"u": "uint", "s": "int", "f": "float"}.get(kind)
    widths = (16, 32) if kind == "f" else (8, 16, 32)
    if base is None or bits not in widths or channels not in (1, 2, 4):
        raise UnsupportedError(
            "array descriptor",
            reason="format",
            got=f"{channels} channels of {bits} bits, kind {kind!r}",
            expected="1, 2 or 4 channels of 8, 16 or 32 bits (float: 16 or 32)",
        )
    return Texel(f"{base}{bits}", channels)


def check_registrable(internal_format: int, *, target: int | None = None, samples: int = 0) -> Format:
    """The format of a GL image that the CUDA driver can register; asked before the driver, which says only "invalid".

    Args:
        internal_format: the GL internal format of the level registered.
        target: the texture target, or None for a renderbuffer.
        samples: samples per pixel; 0 or 1 is not multisampled.

    Raises:
        UnsupportedError: it does not register; the message names the format and the way out.
    """
    if samples > 1 or target in _MULTISAMPLE_TARGETS:
        raise UnsupportedError(
            "a multisampled image does not register",
            reason="multisample",
            got=f"{samples} samples",
            expected="one sample per pixel",
            hint="Resolve it into a plain texture first (glBlitFramebuffer)",
        )
    if target in _NEVER_TARGETS:
        raise UnsupportedError(
            f"a {_NEVER_TARGETS[target]} image does not register",
            reason="target",
            expected="a 2D, rectangle, 3D, 2D array or cube map texture",
            hint="Use a GL_TEXTURE_2D of height 1, or a buffer",
        )
    found = by_gl(internal_format)
    if not found.registers:
        raise UnsupportedError(
            f"GL_{found.name} (0x{internal_format:04X}): {found.reason}", reason="format", hint=found.way_out
        )
    return found


# --- geometry -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Geometry:
    """The tight rows of an image (contracts A11): row ``n`` begins at byte ``n * row_bytes``."""

    texels_per_row: int
    texel_bytes: int
    rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, without any padding."""
        return self.texels_per_row * self.texel_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows: the length of a mapping."""
        return self.row_bytes * self.rows


def tight_geometry(format: Format, width: int, height: int, pitch: int | None = None) -> Geometry:
    """How many texels carry an image.

    Args:
        format: a format of the table.
        width, height: size of the image in pixels.
        pitch: of a semi-planar image only: the row length in bytes that the driver insists on. Rows are as wide as
            that, never narrower than the image. Every other image has tight rows whatever a driver's pitch.

    Raises:
        LayoutError: an empty image, or a width or pitch that does not fit the format.
        UnsupportedError: a format without a texel type, such as depth.
    """
    if not format.channels:
        raise UnsupportedError(f"{format}: {format.reason}", reason="format", hint=format.way_out)
    if width < 1 or height < 1:
        raise LayoutError(f"a {format} image", got=f"{width} x {height} pixels", expected="at least 1 x 1")
    if format.packing is Packing.SEMI_PLANAR:
        texels = max(width + width % 2, pitch or 0)
        if texels % 2:
            raise LayoutError(
                f"a {format} image of width {width}",
                got=f"a pitch of {pitch} bytes",
                expected="an even pitch: chroma comes in pairs",
            )
        return Geometry(texels, format.texel_bytes, height + _chroma_rows(format, height))
    if format.packing is Packing.PACKED:
        return Geometry(_quarter(format, width * 3, width), format.texel_bytes, height)
    if format.packing is Packing.PLANAR:
        return Geometry(_quarter(format, width, width), format.texel_bytes, height * format.channels)
    return Geometry(width, format.texel_bytes, height)


def _quarter(format: Format, elements: int, width: int) -> int:
    if elements % 4:
        raise LayoutError(
            f"a {format} image of width {width}",
            got=f"rows of {elements} elements",
            expected="a multiple of 4: four elements make one texel",
            hint="Pad the width to a multiple of 4",
        )
    return elements // 4


def _chroma_rows(format: Format, height: int) -> int:
    """Rows below the luma plane: NV24 has as many chroma pairs as pixels, so one row of them takes two."""
    chroma = format.planes[1]
    return -(-height // chroma.y_step) * (2 // chroma.x_step)


def settle_pitch(format: Format, width: int, pitch_of: Callable[[int], int]) -> int:
    """The row length at which a driver's pitch and a semi-planar image agree (contracts A13).

    Args:
        format: a semi-planar format.
        width: width of the image in pixels.
        pitch_of: the pitch in bytes that the driver reports for a texture that many texels wide.

    Raises:
        LayoutError: the pitch of a texture as wide as its pitch is another one: no width would be its own pitch.
    """
    first = tight_geometry(format, width, 1, pitch_of(width + width % 2)).texels_per_row
    second = pitch_of(first)
    if second > first:
        raise LayoutError(
            f"a {format} image of width {width}",
            got=f"a pitch of {second} bytes for rows of {first}",
            expected="a pitch equal to the row length",
            hint="Choose a width that is a multiple of the driver's pitch alignment",
        )
    return first


@dataclass(frozen=True, slots=True)
class PlaneView:
    """Where a plane lies in an image's bytes: ``offset`` in bytes, and its layout there."""

    offset: int
    layout: Layout


def plane_views(format: Format, width: int, height: int, pitch: int | None = None) -> dict[str, PlaneView]:
    """The arrays that make up an image: by plane name, or one called "image" of shape (height, width, channels).

    Args: as :func:`tight_geometry`. Chroma of an odd-sized image covers the last row and column.
    """
    geometry = tight_geometry(format, width, height, pitch)
    row, dtype = geometry.row_bytes, format.dtype
    if not format.planes:
        layout = Layout.of((height, width, format.channels), dtype)
        return {"image": PlaneView(0, layout)}
    if format.packing is Packing.PLANAR:
        layout = Layout.of((height, width), dtype)
        return {plane.name: PlaneView(n * row * height, layout) for n, plane in enumerate(format.planes)}
    luma, chroma = format.planes
    shape = (-(-height // chroma.y_step), -(-width // chroma.x_step), chroma.channels)
    return {
        luma.name: PlaneView(0, Layout.of((height, width), dtype, (row, 1))),
        chroma.name: PlaneView(row * height, Layout.of(shape, dtype, (row * (2 // chroma.x_step), 2, 1))),
    }


def check_carrier(format: Format, width: int, height: int, texel: Texel, texels: int, rows: int) -> Geometry:
    """Check that a texture can be read as an image of another format (contracts A11).

    Args:
        format: how the image is to be read.
        width, height: size of the image in pixels.
        texel: the texel type that the driver reports.
        texels, rows: width and height of the texture in texels.

    Raises:
        LayoutError: the texture's texels are of another type, or it has another size than the image takes.
    """
    if texel != format.texel:
        raise LayoutError(
            f"reading a texture as {format}", got=f"texels of {texel}", expected=f"{format.texel}"
        )
    semi_planar = format.packing is Packing.SEMI_PLANAR
    geometry = tight_geometry(format, width, height, texels if semi_planar else None)
    if (geometry.texels_per_row, geometry.rows) != (texels, rows):
        raise LayoutError(
            f"reading a texture as {format} of {width} x {height} pixels",
            got=f"{texels} x {rows} texels",
            expected=f"{geometry.texels_per_row} x {geometry.rows}{' (or wider)' if semi_planar else ''}",
        )
    return geometry


__all__ = [
    "FORMATS",
    "Format",
    "Geometry",
    "Packing",
    "Plane",
    "PlaneView",
    "Texel",
    "by_dxgi",
    "by_fourcc",
    "by_gl",
    "by_name",
    "check_carrier",
    "check_registrable",
    "from_descriptor",
    "plane_views",
    "settle_pitch",
    "tight_geometry",
]
