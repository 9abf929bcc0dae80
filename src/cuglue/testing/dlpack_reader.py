"""A DLPack consumer written out in ctypes, to look at every field of what an exporter gives.

Owns the reading of capsules. Must not know who exports. A consumer may be in Python: it calls the producer's deleter,
and has none of its own.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

READ_ONLY, IS_COPIED = 1, 2


class DLTensor(ctypes.Structure):
    """The tensor itself."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


class Legacy(ctypes.Structure):
    """``DLManagedTensor``: no version, no flags."""

    _fields_ = (("tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_api = ctypes.pythonapi
_api.PyCapsule_GetName.restype, _api.PyCapsule_GetName.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)

_USED = {
    b"dltensor": b"used_dltensor",
    b"dltensor_versioned": b"used_dltensor_versioned",
}  # must outlive capsules


def capsule_name(capsule: object) -> str:
    """Its name; "used_..." once it was consumed."""
    name: bytes = _api.PyCapsule_GetName(capsule)
    return name.decode()


@dataclass
class Fields:
    """The fields of a capsule, as numbers."""

    name: str
    version: tuple[int, int] | None
    flags: int
    data: int | None
    device: tuple[int, int]
    dtype: tuple[int, int, int]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    byte_offset: int
    deleter: int


def read(capsule: object) -> Fields:
    """Look at an unconsumed capsule without consuming it."""
    managed, tensor = _managed(capsule)
    n = tensor.ndim
    return Fields(
        name=capsule_name(capsule),
        version=(managed.major, managed.minor) if isinstance(managed, Versioned) else None,
        flags=managed.flags if isinstance(managed, Versioned) else 0,
        data=tensor.data,
        device=(tensor.device_type, tensor.device_id),
        dtype=(tensor.code, tensor.bits, tensor.lanes),
        shape=tuple(tensor.shape[:n]) if n else (),
        strides=tuple(tensor.strides[:n]) if n and tensor.strides else None,
        byte_offset=tensor.byte_offset,
        deleter=managed.deleter or 0,
    )


def consume(capsule: object) -> ReleasedByHand:
    """Take the tensor out of the capsule, as a library does."""
    managed, _ = _managed(capsule)
    _api.PyCapsule_SetName(capsule, _USED[_api.PyCapsule_GetName(capsule)])
    return ReleasedByHand(managed)


class ReleasedByHand:
    """A consumed tensor: :meth:`release` calls the producer's deleter, with the GIL given up."""

    def __init__(self, managed: Versioned | Legacy) -> None:
        self._managed = managed

    def release(self) -> None:
        """Call the deleter, once."""
        deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._managed.deleter)
        deleter(ctypes.addressof(self._managed))


def _managed(capsule: object) -> tuple[Versioned | Legacy, DLTensor]:
    name = _api.PyCapsule_GetName(capsule)
    address = _api.PyCapsule_GetPointer(capsule, name)
    kind: Any = {b"dltensor": Legacy, b"dltensor_versioned": Versioned}[name]
    managed = kind.from_address(address)
    return managed, managed.tensor
