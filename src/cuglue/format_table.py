"""The table of image formats: what a texel is, which numbers name it, and whether CUDA registers it.

Owns the data and nothing else; lookups and arithmetic are in :mod:`cuglue.formats`. The numbers are written out
so that neither OpenGL nor DirectX need be there to read them; tests compare them with OpenGL's own.

Two kinds of rows: *texture formats* (what OpenGL stores: ``RGBA8``) and *carried formats* (an image packed into the
texels of such a texture: ``NV12`` in ``R8`` texels). ``channels`` of a texture format are those of the driver's
array, which has four where OpenGL has three.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np


class Packing(Enum):
    """How an image lies in the texels that carry it."""

    PLAIN = "one texel is one pixel"
    PACKED = "three-channel pixels back to back in four-channel texels"
    PLANAR = "one plane after the other, in four-element texels"
    SEMI_PLANAR = "a luma plane, then interleaved chroma, in one-byte texels"


@dataclass(frozen=True, slots=True)
class Texel:
    """Type of one texel of an array: ``channels`` elements of the NumPy type ``dtype``."""

    dtype: str
    channels: int

    @property
    def nbytes(self) -> int:
        """Bytes of one texel."""
        return np.dtype(self.dtype).itemsize * self.channels

    def __str__(self) -> str:
        return f"{self.dtype} x {self.channels}"


@dataclass(frozen=True, slots=True)
class Plane:
    """A plane of an image: its channels, and how many pixels share one of its elements along each axis."""

    name: str
    channels: int
    x_step: int = 1
    y_step: int = 1


@dataclass(frozen=True, slots=True)
class Format:
    """One row of the table.

    Attributes:
        name: the OpenGL name without ``GL_``, or the name of a carried format.
        dtype: NumPy type of one element.
        channels: elements of one texel, as the driver's array has them.
        components: channels that hold image data; a texel's fourth element of ``RGB8`` holds nothing.
        gl, dxgi: the internal format and DXGI format numbers, where there is one.
        fourcc: the FourCC of the same bytes in memory (DRM's little-endian names, else V4L2's).
        integer: True for unnormalised integers (``*_INTEGER`` transfers).
        registers: whether the CUDA driver registers a texture of this format; of a carried format, whether its
            carrier does. ``reason`` and ``way_out`` say why not and what to do.
        colorspace: "srgb" when the bytes are sRGB-encoded. CUDA sees the encoded bytes: nothing is linearised.
        packing, planes: how a carried image lies in its texels, and its planes where it has several.
    """

    name: str
    dtype: str
    channels: int
    components: int = 0
    gl: int | None = None
    dxgi: int | None = None
    fourcc: str | None = None
    integer: bool = False
    registers: bool = True
    reason: str = ""
    way_out: str = ""
    colorspace: str = "linear"
    packing: Packing = Packing.PLAIN
    planes: tuple[Plane, ...] = ()

    def __post_init__(self) -> None:
        if not self.components:
            object.__setattr__(self, "components", self.channels)

    @property
    def texel(self) -> Texel:
        """Type of the texels that hold or carry the image."""
        wide = self.packing in (Packing.PACKED, Packing.PLANAR)
        return Texel(self.dtype, 4 if wide else self.channels)

    @property
    def texel_bytes(self) -> int:
        """Bytes of one texel."""
        return self.texel.nbytes

    def __str__(self) -> str:
        return self.name


# --- the table ------------------------------------------------------------------------------------------------


def _row(
    name: str, dtype: str, channels: int, gl: int, dxgi: int | None, fourcc: str | None = None
) -> Format:
    return Format(name, dtype, channels, gl=gl, dxgi=dxgi, fourcc=fourcc, integer=name.endswith("I"))


def _refused(name: str, gl: int, dxgi: int | None, why: tuple[str, str], fourcc: str | None = None) -> Format:
    reason, way_out = why
    return Format(
        name, "uint8", 0, gl=gl, dxgi=dxgi, fourcc=fourcc, registers=False, reason=reason, way_out=way_out
    )


_DEPTH = (
    "depth and stencil formats do not register",
    "Draw the depth into an R32F texture with a shader and register that",
)
_BITS = (
    "texels whose channels share bytes do not register",
    "Use RGBA8, RGBA16 or RGBA16F, or copy into such a texture",
)
_SNORM = (
    "signed normalised formats do not register",
    "Use the float or unsigned format of the same channels",
)
_THREE = (
    "this three-channel format is not known to register",
    "Use the four-channel format, or a buffer (buffers hold any bytes)",
)

_TEXTURES = (
    _row("R8", "uint8", 1, 0x8229, 61, "R8  "),
    _row("RG8", "uint8", 2, 0x822B, 49, "GR88"),
    _row("RGBA8", "uint8", 4, 0x8058, 28, "AB24"),
    Format("RGB8", "uint8", 4, 3, gl=0x8051, fourcc="XB24"),
    Format("SRGB8_ALPHA8", "uint8", 4, gl=0x8C43, dxgi=29, colorspace="srgb"),
    _row("R16", "uint16", 1, 0x822A, 56, "R16 "),
    _row("RG16", "uint16", 2, 0x822C, 35, "GR32"),
    _row("RGBA16", "uint16", 4, 0x805B, 11, "AB48"),
    _row("R16F", "float16", 1, 0x822D, 54, "R  H"),
    _row("RG16F", "float16", 2, 0x822F, 34, "GR H"),
    _row("RGBA16F", "float16", 4, 0x881A, 10, "AB4H"),
    _row("R32F", "float32", 1, 0x822E, 41, "R  F"),
    _row("RG32F", "float32", 2, 0x8230, 16, "GR F"),
    Format("RGB32F", "float32", 4, 3, gl=0x8815),
    _row("RGBA32F", "float32", 4, 0x8814, 2, "AB8F"),
    _row("R8UI", "uint8", 1, 0x8232, 62),
    _row("RG8UI", "uint8", 2, 0x8238, 50),
    _row("RGBA8UI", "uint8", 4, 0x8D7C, 30),
    _row("R16UI", "uint16", 1, 0x8234, 57),
    _row("RG16UI", "uint16", 2, 0x823A, 36),
    _row("RGBA16UI", "uint16", 4, 0x8D76, 12),
    _row("R32UI", "uint32", 1, 0x8236, 42),
    _row("RG32UI", "uint32", 2, 0x823C, 17),
    _row("RGBA32UI", "uint32", 4, 0x8D70, 3),
    _row("R8I", "int8", 1, 0x8231, 64),
    _row("RG8I", "int8", 2, 0x8237, 52),
    _row("RGBA8I", "int8", 4, 0x8D8E, 32),
    _row("R16I", "int16", 1, 0x8233, 59),
    _row("RG16I", "int16", 2, 0x8239, 38),
    _row("RGBA16I", "int16", 4, 0x8D88, 14),
    _row("R32I", "int32", 1, 0x8235, 43),
    _row("RG32I", "int32", 2, 0x823B, 18),
    _row("RGBA32I", "int32", 4, 0x8D82, 4),
)

_UNREGISTRABLE = (
    _refused("DEPTH_COMPONENT16", 0x81A5, 55, _DEPTH),
    _refused("DEPTH_COMPONENT24", 0x81A6, None, _DEPTH),
    _refused("DEPTH_COMPONENT32", 0x81A7, None, _DEPTH),
    _refused("DEPTH_COMPONENT32F", 0x8CAC, 40, _DEPTH),
    _refused("DEPTH24_STENCIL8", 0x88F0, 45, _DEPTH),
    _refused("DEPTH32F_STENCIL8", 0x8CAD, 20, _DEPTH),
    _refused("STENCIL_INDEX8", 0x8D48, None, _DEPTH),
    _refused("DEPTH_COMPONENT", 0x1902, None, _DEPTH),
    _refused("DEPTH_STENCIL", 0x84F9, None, _DEPTH),
    _refused("RGB10_A2", 0x8059, 24, _BITS, "AB30"),
    _refused("RGB10_A2UI", 0x906F, 25, _BITS),
    _refused("R11F_G11F_B10F", 0x8C3A, 26, _BITS),
    _refused("RGB9_E5", 0x8C3D, 67, _BITS),
    _refused("RGB5_A1", 0x8057, None, _BITS),
    _refused("RGB565", 0x8D62, None, _BITS),
    _refused("RGB5", 0x8050, None, _BITS),
    _refused("RGBA4", 0x8056, None, _BITS),
    _refused("R8_SNORM", 0x8F94, 63, _SNORM),
    _refused("RG8_SNORM", 0x8F95, 51, _SNORM),
    _refused("RGB8_SNORM", 0x8F96, None, _SNORM),
    _refused("RGBA8_SNORM", 0x8F97, 31, _SNORM),
    _refused("R16_SNORM", 0x8F98, 58, _SNORM),
    _refused("RG16_SNORM", 0x8F99, 37, _SNORM),
    _refused("RGB16_SNORM", 0x8F9A, None, _SNORM),
    _refused("RGBA16_SNORM", 0x8F9B, 13, _SNORM),
    _refused("RGB16F", 0x881B, None, ("the driver refuses RGB16F", "Use RGBA16F")),
    _refused("SRGB8", 0x8C41, None, _THREE),
    _refused("RGB16", 0x8054, None, _THREE),
    _refused("RGB8UI", 0x8D7D, None, _THREE),
    _refused("RGB16UI", 0x8D77, None, _THREE),
    _refused("RGB32UI", 0x8D71, None, _THREE),
    _refused("RGB8I", 0x8D8F, None, _THREE),
    _refused("RGB16I", 0x8D89, None, _THREE),
    _refused("RGB32I", 0x8D83, None, _THREE),
)


def _semi_planar(name: str, dxgi: int | None, x_step: int, y_step: int) -> Format:
    planes = (Plane("y", 1), Plane("uv", 2, x_step, y_step))
    return Format(name, "uint8", 1, dxgi=dxgi, fourcc=name, packing=Packing.SEMI_PLANAR, planes=planes)


def _planar(name: str, dtype: str, channels: str) -> Format:
    planes = tuple(Plane(letter, 1) for letter in channels)
    return Format(name, dtype, len(channels), packing=Packing.PLANAR, planes=planes)


_CARRIED = (
    Format("BGRA8", "uint8", 4, dxgi=87, fourcc="AR24"),
    Format("GREY", "uint8", 1, fourcc="GREY"),
    Format("YUYV", "uint8", 2, dxgi=107, fourcc="YUYV"),
    Format("RGB8_PACKED", "uint8", 3, fourcc="BG24", packing=Packing.PACKED),
    Format("RGB16F_PACKED", "float16", 3, packing=Packing.PACKED),
    Format("RGB32F_PACKED", "float32", 3, packing=Packing.PACKED),
    _semi_planar("NV12", 103, 2, 2),
    _semi_planar("NV16", None, 2, 1),
    _semi_planar("NV24", None, 1, 1),
    _planar("RGB16F_PLANAR", "float16", "rgb"),
    _planar("RGB32F_PLANAR", "float32", "rgb"),
    _planar("RGBA16F_PLANAR", "float16", "rgba"),
    _planar("RGBA32F_PLANAR", "float32", "rgba"),
)

#: Every format known, texture formats first.
FORMATS: tuple[Format, ...] = _TEXTURES + _UNREGISTRABLE + _CARRIED
