"""Opaque arrays, and the surface and texture objects made of them."""

from __future__ import annotations

from typing import Any

from ...errors import UnsupportedError
from ..protocol import ArrayInfo, TexelKind
from .calls import call, cu, nonzero
from .contexts import Contexts

SURFACE_LDST = 0x02  # CUDA_ARRAY3D_SURFACE_LDST
_READ_AS_INTEGER = 0x01  # CU_TRSF_READ_AS_INTEGER

_FORMATS = {
    (8, TexelKind.UINT): cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8,
    (16, TexelKind.UINT): cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT16,
    (32, TexelKind.UINT): cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT32,
    (8, TexelKind.SINT): cu.CUarray_format.CU_AD_FORMAT_SIGNED_INT8,
    (16, TexelKind.SINT): cu.CUarray_format.CU_AD_FORMAT_SIGNED_INT16,
    (32, TexelKind.SINT): cu.CUarray_format.CU_AD_FORMAT_SIGNED_INT32,
    (16, TexelKind.FLOAT): cu.CUarray_format.CU_AD_FORMAT_HALF,
    (32, TexelKind.FLOAT): cu.CUarray_format.CU_AD_FORMAT_FLOAT,
}

#: Formats of arrays made elsewhere: normalised ones read as the integers that they store.
_TEXELS = {int(number): texel for texel, number in _FORMATS.items()} | {
    getattr(cu.CUarray_format, f"CU_AD_FORMAT_{sign}NORM_INT{bits}X{channels}").value: (bits, kind)
    for sign, kind in (("U", TexelKind.UINT), ("S", TexelKind.SINT))
    for bits in (8, 16)
    for channels in (1, 2, 4)
}


class Arrays(Contexts):
    """Arrays, surfaces and textures of the CUDA driver."""

    def array_create(self, info: ArrayInfo, device: int) -> int:
        """Inherited."""
        nbytes = max(info.width, 1) * max(info.height, 1) * max(info.depth, 1) * info.texel_bytes
        with self._on(device):
            array = call(cu.cuArray3DCreate, array_descriptor(info), requested=nbytes)
        return self._own("array", nonzero(array, "cuArray3DCreate"), device)

    def array_destroy(self, array: int) -> None:
        """Inherited."""
        with self._disowning("array", array, "cuArrayDestroy"):
            call(cu.cuCtxSynchronize)
            call(cu.cuArrayDestroy, array)

    def array_info(self, array: int, device: int) -> ArrayInfo:
        """Inherited."""
        with self._on(device):
            found = call(cu.cuArray3DGetDescriptor, array)
        texel = _TEXELS.get(int(found.Format))
        if texel is None:
            raise UnsupportedError(
                f"array {array:#x}",
                got=f"texels of format {found.Format.name}",
                expected="1, 2 or 4 channels of 8, 16 or 32 bits",
                hint="Copy it to a plain format",
                reason="format",
            )
        return ArrayInfo(found.Width, found.Height, found.Depth, texel[0], found.NumChannels, texel[1])

    def surface_create(self, array: int, device: int) -> int:
        """Inherited."""
        with self._on(device):
            surface = nonzero(call(cu.cuSurfObjectCreate, _resource(array)), "cuSurfObjectCreate")
        return self._own("surface", surface, device)

    def surface_destroy(self, surface: int) -> None:
        """Inherited."""
        with self._disowning("surface", surface, "cuSurfObjectDestroy"):
            call(cu.cuSurfObjectDestroy, surface)

    def texture_create(self, array: int, device: int, normalized: bool = False, linear: bool = False) -> int:
        """Inherited. Coordinates are texels, clamped to the edge."""
        how = cu.CUDA_TEXTURE_DESC()
        how.addressMode = [cu.CUaddress_mode.CU_TR_ADDRESS_MODE_CLAMP] * 3
        filters = cu.CUfilter_mode
        how.filterMode = filters.CU_TR_FILTER_MODE_LINEAR if linear else filters.CU_TR_FILTER_MODE_POINT
        how.flags = 0 if normalized else _READ_AS_INTEGER
        with self._on(device):
            texture = nonzero(call(cu.cuTexObjectCreate, _resource(array), how, None), "cuTexObjectCreate")
        return self._own("texture", texture, device)

    def texture_destroy(self, texture: int) -> None:
        """Inherited."""
        with self._disowning("texture", texture, "cuTexObjectDestroy"):
            call(cu.cuTexObjectDestroy, texture)


def array_descriptor(info: ArrayInfo) -> Any:
    """``CUDA_ARRAY3D_DESCRIPTOR`` of an array that surfaces can use.

    Raises:
        UnsupportedError: no array has such texels.
    """
    texel = _FORMATS.get((info.bits, info.kind))
    if texel is None or info.channels not in (1, 2, 4):
        raise UnsupportedError(
            "array",
            got=f"{info.channels} channels of {info.bits} bits ({info.kind.name})",
            expected="1, 2 or 4 channels of 8, 16 or 32 bits, floats of 16 or 32",
            reason="format",
        )
    descriptor = cu.CUDA_ARRAY3D_DESCRIPTOR()
    descriptor.Width, descriptor.Height, descriptor.Depth = info.width, info.height, info.depth
    descriptor.Format = texel
    descriptor.NumChannels = info.channels
    descriptor.Flags = SURFACE_LDST
    return descriptor


def _resource(array: int) -> Any:
    resource = cu.CUDA_RESOURCE_DESC()
    resource.resType = cu.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
    resource.res.array.hArray = cu.CUarray(array)
    return resource
