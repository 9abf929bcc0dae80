"""DLPack capsules: made by ``cuda.core`` for device memory and by NumPy for host memory, then put right.

Owns the making of a capsule from an address or an array, and the few fields of a fresh capsule's struct that its maker
cannot be told: an element type NumPy lacks, the IS_COPIED flag, the device, and a null pointer for no elements. Must
not know owners, streams or what the consumer asked for.

The structs, their memory and their deleters stay the makers': a deleter written in Python crashes at exit when a
consumer outlives it. Fields are written only where all that is known of the struct is found in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..layout import Layout
from .dlpack import VERSION
from .dtypes import DLType, dl_type

_IS_COPIED = 1 << 1
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


def host_capsule(
    array: np.ndarray[Any, Any], element: DLType, *, versioned: bool, copy: bool = False, copied: bool = False
) -> Any:
    """A capsule of host memory.

    Args:
        array: what to export; the capsule keeps it alive.
        element: the element type to say; ``array`` holds it, or unsigned integers of its size.
        versioned: which of the two capsules.
        copy: export a copy of the array.
        copied: the array is a copy already, and nobody else's.
    """
    capsule = array.__dlpack__(max_version=VERSION if versioned else None, copy=copy or None)
    made = dl_type(array.dtype)
    if element != made or copied or not array.size:
        tensor, flags = _open(capsule, versioned=versioned, ndim=array.ndim, element=made)
        _say_element(tensor, element)
        if copied and flags is not None:
            flags.flags |= _IS_COPIED
        if not array.size:
            tensor.data = None
    return capsule


def device_capsule(
    ptr: int,
    layout: Layout,
    element: DLType,
    *,
    device: int,
    keep: object,
    versioned: bool,
    readonly: bool = False,
    copied: bool = False,
    plain: bool = True,
) -> Any:
    """A capsule of device memory.

    Args:
        ptr: address of the first element.
        layout: where the elements lie; its dtype is one that NumPy has.
        element: the element type to say; ``layout`` holds it, or unsigned integers of its size.
        device: ordinal to say.
        keep: kept alive by the capsule and its consumer.
        versioned: which of the two capsules.
        readonly, copied: the flags to set, where there are flags.
        plain: the driver itself calls the address memory of that device; managed memory is said to be so too, because
            PyTorch and JAX take no other.
    """
    key = ptr, device, readonly
    known = layout.__dict__.get("_exported")
    if known is None or known[0] != key or not plain:
        # What the driver says of an address is asked once; of managed memory each time.
        known = key, _view_of(ptr, layout, readonly=readonly), dl_type(layout.dtype)
        if plain and layout.size:
            layout.__dict__["_exported"] = known
    _, view, made = known
    capsule = capsule_of(view, layout, keep=keep, versioned=versioned)
    if element != made or copied or not plain or not layout.size:
        tensor, flags = _open(capsule, versioned=versioned, ndim=layout.ndim, element=made)
        _say_element(tensor, element)
        tensor.device_type, tensor.device_id = 2, device
        if copied and flags is not None:
            flags.flags |= _IS_COPIED
    return capsule


def capsule_of(view: Any, layout: Layout, *, keep: object, versioned: bool) -> Any:
    """A capsule of the memory of a view, which keeps ``keep``."""
    # Another view over the same memory: the capsule keeps it.
    another = view.view(dtype=layout.dtype)
    another.keep = keep
    return another.__dlpack__(max_version=VERSION if versioned else None)


def known_view(ptr: int, layout: Layout, device: int) -> Any:
    """The view by which :func:`device_capsule` exported this memory last, for writing; None: of no use, or none.

    Its capsules are right as they are: there are elements, of a type that ``layout`` has from NumPy, and they are plain
    memory of that device.
    """
    known = layout.__dict__.get("_exported")
    return known[1] if known is not None and known[0] == (ptr, device, False) else None


def _view_of(ptr: int, layout: Layout, *, readonly: bool) -> Any:
    """A view that keeps nothing alive: whoever makes another one of it says what that keeps."""
    wrap, view_of = _makers()
    return view_of(
        wrap(ptr, layout.nbytes),
        shape=layout.shape,
        strides=layout.element_strides(),
        dtype=layout.dtype,
        is_readonly=readonly,
    )


@cache
def _makers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from cuda.core import Buffer
    from cuda.core.utils import StridedMemoryView

    class Exported(StridedMemoryView):  # type: ignore[misc] # it has no types
        """A view that keeps something: the capsule made of it keeps the view."""

        __slots__ = ("keep",)

    return Buffer.from_handle, Exported.from_buffer


def _say_element(tensor: _DLTensor, element: DLType) -> None:
    tensor.code, tensor.bits = element


def _open(
    capsule: object, *, versioned: bool, ndim: int, element: DLType
) -> tuple[_DLTensor, _Versioned | None]:
    """The struct of a fresh capsule, after checking that it is what we know."""
    address = _get_pointer(capsule, b"dltensor_versioned" if versioned else b"dltensor")
    managed = _Versioned.from_address(address) if versioned else None
    tensor: _DLTensor = managed.tensor if managed is not None else _DLTensor.from_address(address)
    found = (managed.major if managed is not None else 1, tensor.ndim, tensor.code, tensor.bits, tensor.lanes)
    known = (VERSION[0], ndim, *element, 1)
    if found != known:
        raise UnsupportedError(
            "a DLPack capsule of another layout",
            got=f"(major, ndim, code, bits, lanes) {found}",
            expected=known,
            reason="dlpack_layout",
        )
    return tensor, managed
