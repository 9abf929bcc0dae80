"""The bindings that the CUDA driver calls, and how their failures become our errors.

Owns the import of CuPy's runtime and driver API and of ``cuda.bindings.driver``, and the tables of codes. Must not know
what any call does. CuPy's runtime is taken where it has the call: it is quicker, finds the context by itself and clears
the runtime's last error when it raises, so that nobody's later launch trips over our failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import cupy  # noqa: F401 - finds the CUDA libraries before anything below is loaded
from cuda.bindings import driver as cu
from cupy.cuda import driver as cupy_driver
from cupy.cuda import runtime

from ...errors import CuglueError, DevicePoisoned, DriverError, LaunchError, OutOfMemory

__all__ = [
    "INVALID_VALUE",
    "NOT_READY",
    "NO_CONTEXT",
    "CUDADriverError",
    "CUDARuntimeError",
    "call",
    "call_runtime",
    "cu",
    "cupy_driver",
    "failure",
    "failure_of",
    "nonzero",
    "runtime",
    "unknown_handle",
]

CUDARuntimeError = runtime.CUDARuntimeError
CUDADriverError: Any = cupy_driver.CUDADriverError

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
NO_CONTEXT = 201
INVALID_HANDLE = 400
NOT_READY = 600
UNKNOWN = 999
_PROCESS = os.getpid()  # CUDA belongs to the process that initialised it

#: Codes after which every call on the device fails until the process ends. 709 (context destroyed), 712 and 713
#: (host memory registration) lie between them and are no faults.
STICKY = frozenset(
    {
        214,  # ECC uncorrectable
        220,  # NVLink uncorrectable
        226,  # contained memory error
        700,  # illegal address
        702,  # launch timeout
        710,  # device assert
        714,  # hardware stack error
        715,  # illegal instruction
        716,  # misaligned address
        717,  # invalid address space
        718,  # invalid program counter
        719,  # launch failure
        721,  # tensor memory leak
    }
)

#: Calls that report what queued work did: only from these does "unknown" mean a fault. Graphics registration says
#: "unknown" of a software renderer too.
_REPORTERS = frozenset(
    {
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
        "cudaStreamQuery",
        "cudaEventSynchronize",
        "cudaEventQuery",
        "cuCtxSynchronize",
        "cuLaunchKernel",
    }
)


def failure(code: int, name: str, call: str, requested: int | None = None) -> CuglueError:
    """The error for a refused call.

    Args:
        code: the status; the runtime and the driver API agree on the numbers used here.
        name: the status as the API spells it.
        call: the API function.
        requested: bytes asked for, if the call allocates.
    """
    if code == OUT_OF_MEMORY and requested is not None:
        return OutOfMemory(
            "device memory",
            got=f"no room for {requested} bytes ({call} returned {name})",
            hint="Free arrays, or trim the pools that cache memory",
            requested=requested,
        )
    if code in STICKY or (code == UNKNOWN and call in _REPORTERS):
        return DevicePoisoned(
            "a kernel faulted on this device, which is lost to this process",
            hint="Find the kernel with compute-sanitizer, then restart the process",
            code=code,
            name=name,
            call=call,
        )
    error = LaunchError if call.startswith("cuLaunch") else DriverError
    if code == NOT_INITIALIZED and os.getpid() != _PROCESS:
        return error(
            "CUDA in a forked child",
            got=f"process {os.getpid()}",
            expected=f"process {_PROCESS}, which initialised it",
            hint="Start workers with the 'spawn' or 'forkserver' method",
            code=code,
            name=name,
            call=call,
        )
    return error(code=code, name=name, call=call)


def failure_of(error: Any, call: str, requested: int | None = None) -> CuglueError:
    """The error for an exception of CuPy's runtime or driver API, whose text starts with the name of the status."""
    return failure(int(error.status), str(error).partition(":")[0], call, requested)


def call_runtime(function: Callable[..., Any], *args: Any, requested: int | None = None) -> Any:
    """Call a function of CuPy's runtime API; its failures become ours."""
    try:
        return function(*args)
    except CUDARuntimeError as error:
        name: str = function.__name__
        raise failure_of(error, f"cuda{name[0].upper()}{name[1:]}", requested) from error


def call(function: Callable[..., Any], *args: Any, requested: int | None = None) -> Any:
    """Call a function of the driver API; its value, a tuple of its values, or None if it has none."""
    status, *values = function(*args)
    if status:
        raise failure(int(status), status.name, function.__name__, requested)
    return values[0] if len(values) == 1 else tuple(values) or None


def nonzero(handle: Any, call: str) -> int:
    """``handle`` as an int; a zero handle from a call that claims success is a failure."""
    number = int(handle)
    if not number:
        raise DriverError(
            "the driver gave a zero handle", code=INVALID_HANDLE, name="CUDA_ERROR_INVALID_HANDLE", call=call
        )
    return number


def unknown_handle(kind: str, handle: int, call: str) -> DriverError:
    """The error for a handle that is not (or no longer) ours; asking the driver about it might crash."""
    return DriverError(
        f"{kind} {handle:#x} is not alive", code=INVALID_HANDLE, name="CUDA_ERROR_INVALID_HANDLE", call=call
    )
