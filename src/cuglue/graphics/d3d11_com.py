"""The few COM calls that a Direct3D 11 texture needs: what it is, keeping it alive, and a device that bears threads.

Owns the binary layouts (the places of methods in their tables, one structure, one interface identifier) and nothing
else. Must not know CUDA or handles. A COM object is an address whose first word points to a table of functions, on
every platform that has a C compiler; so the same code runs against objects that a test builds.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..errors import DriverError, UnsupportedError

# Places of methods in the tables of d3d11.h and d3d11_4.h.
QUERY_INTERFACE, ADD_REF, RELEASE = 0, 1, 2  # IUnknown
GET_DEVICE = 3  # ID3D11DeviceChild
GET_TYPE = 7  # ID3D11Resource
GET_DESC = 10  # ID3D11Texture2D
GET_IMMEDIATE_CONTEXT = 40  # ID3D11Device
SET_MULTITHREAD_PROTECTED = 5  # ID3D11Multithread

TEXTURE2D = 3  # D3D11_RESOURCE_DIMENSION_TEXTURE2D
IID_MULTITHREAD = uuid.UUID("9b7e4e00-342c-4106-a19f-4f2704f689f0")  # ID3D11Multithread

_Out = ctypes.POINTER(ctypes.c_void_p)
_KINDS = {1: "a buffer", 2: "a 1D texture", 4: "a 3D texture"}


class Texture2DDesc(ctypes.Structure):
    """``D3D11_TEXTURE2D_DESC``."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in (
            "Width",
            "Height",
            "MipLevels",
            "ArraySize",
            "Format",
            "SampleCount",
            "SampleQuality",
            "Usage",
            "BindFlags",
            "CPUAccessFlags",
            "MiscFlags",
        )
    )


class Description(NamedTuple):
    """What a 2D texture is: extents in texels, counts, and the numbers of its format and flags."""

    width: int
    height: int
    levels: int
    layers: int
    dxgi: int
    samples: int
    bind_flags: int
    misc_flags: int


def call(pointer: int, place: int, result: Any, *arguments: tuple[Any, Any]) -> Any:
    """Call a method: ``arguments`` are (type, value) pairs after the object itself."""
    table = ctypes.c_void_p.from_address(pointer).value
    assert table is not None, "a COM object without a table"
    address = ctypes.c_void_p.from_address(table + place * ctypes.sizeof(ctypes.c_void_p)).value
    assert address is not None, "a table without the method"
    # On 64-bit Windows there is one calling convention, so this is the one of COM.
    function = ctypes.CFUNCTYPE(result, ctypes.c_void_p, *(kind for kind, _ in arguments))(address)
    return function(pointer, *(value for _, value in arguments))


def add_ref(pointer: int) -> None:
    """Keep an object alive."""
    call(pointer, ADD_REF, ctypes.c_uint32)


def release(pointer: int) -> None:
    """Give back :func:`add_ref`, or a reference that a method gave."""
    call(pointer, RELEASE, ctypes.c_uint32)


def describe(texture: int) -> Description:
    """What a resource is.

    Raises:
        UnsupportedError: no 2D texture.
    """
    kind = ctypes.c_int(0)
    call(texture, GET_TYPE, None, (ctypes.POINTER(ctypes.c_int), ctypes.byref(kind)))
    if kind.value != TEXTURE2D:
        raise UnsupportedError(
            "Direct3D 11 resource",
            got=_KINDS.get(kind.value, f"a resource of dimension {kind.value}"),
            expected="an ID3D11Texture2D",
            hint="Copy to a 2D texture",
            reason="target",
        )
    desc = Texture2DDesc()
    call(texture, GET_DESC, None, (ctypes.POINTER(Texture2DDesc), ctypes.byref(desc)))
    return Description(
        desc.Width,
        desc.Height,
        desc.MipLevels,
        desc.ArraySize,
        desc.Format,
        desc.SampleCount,
        desc.BindFlags,
        desc.MiscFlags,
    )


def protect_device(texture: int) -> None:
    """Let several threads use the immediate context of the texture's device.

    CUDA uses that context when it maps and unmaps, on whatever thread maps. Without protection that would be a race
    with the program's own thread.

    Raises:
        DriverError: the device has no such protection (Windows before version 10).
    """
    with (
        _given(texture, GET_DEVICE) as device,
        _given(device, GET_IMMEDIATE_CONTEXT) as context,
        _interface(context, IID_MULTITHREAD) as multithread,
    ):
        call(multithread, SET_MULTITHREAD_PROTECTED, ctypes.c_int, (ctypes.c_int, 1))


@contextmanager
def _given(pointer: int, place: int) -> Iterator[int]:
    """The object that a method gives in its only argument; released afterwards."""
    out = ctypes.c_void_p()
    call(pointer, place, None, (_Out, ctypes.byref(out)))
    assert out.value is not None, "a method that gives nothing"
    try:
        yield out.value
    finally:
        release(out.value)


@contextmanager
def _interface(pointer: int, identifier: uuid.UUID) -> Iterator[int]:
    """Another interface of an object; released afterwards."""
    out = ctypes.c_void_p()
    name = (ctypes.c_ubyte * 16).from_buffer_copy(identifier.bytes_le)
    status = call(
        pointer,
        QUERY_INTERFACE,
        ctypes.c_int32,
        (ctypes.POINTER(ctypes.c_ubyte * 16), ctypes.byref(name)),
        (_Out, ctypes.byref(out)),
    )
    if status < 0 or out.value is None:
        raise DriverError(
            "the Direct3D 11 device cannot be used by several threads",
            hint="Needs Windows 10 or newer",
            code=status,
            name=f"HRESULT 0x{status & 0xFFFFFFFF:08X}",
            call="QueryInterface(ID3D11Multithread)",
        )
    try:
        yield out.value
    finally:
        release(out.value)
