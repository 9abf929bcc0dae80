"""Memory shared by file descriptor, and reserved addresses: mmap(2) at places of our choice.

Owns the calls to the C library. Must not know who shares what. Python's own ``mmap`` keeps a copy of the descriptor
open and cannot map at a given address.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

from .memory import Bytes

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    if _libc is None:
        raise OSError("shared memory of the simulated device needs mmap(2)")
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    found = _libc.mmap(address or None, nbytes, protection, flags, fd, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(found)


def unmap(address: int, nbytes: int) -> None:
    """Give addresses back to the operating system."""
    if _libc is not None:
        _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


class _Mapped:
    """A mapping that lasts as long as an array made of it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._nbytes = nbytes
        self._address = _mmap(0, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self._nbytes,), "data": (self._address, False)}

    def __del__(self) -> None:
        if "_address" in vars(self):
            unmap(self._address, self._nbytes)


def map_fd(fd: int, nbytes: int) -> Bytes:
    """The first ``nbytes`` of a file as an array of its own address; the descriptor may be closed afterwards."""
    return np.asarray(_Mapped(fd, nbytes))


def reserve(nbytes: int) -> int:
    """Addresses that nothing lies at and that nobody may touch."""
    return _mmap(0, nbytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)


def map_at(address: int, nbytes: int, fd: int) -> Bytes:
    """The first ``nbytes`` of a file at a reserved address."""
    _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))


def unmap_at(address: int, nbytes: int) -> None:
    """Take the file away; the address stays reserved."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    _mmap(address, nbytes, _PROT_NONE, flags, -1)


def new_fd(nbytes: int) -> int:
    """A descriptor of new memory that other processes can map."""
    fd = os.memfd_create("cuglue-sim", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd
