"""Kernels: compiled once, launched by handle."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import count
from typing import Any

import cupy
from cupy.cuda.compiler import CompileException
from cupy.cuda.function import Function

from ...errors import CuglueError, DriverError, LaunchError, UnsupportedError, UsageError
from ..protocol import SimFunction, Span, SurfaceArg
from .calls import (
    INVALID_VALUE,
    NO_CONTEXT,
    CUDADriverError,
    CUDARuntimeError,
    call,
    cu,
    cupy_driver,
    failure_of,
    runtime,
    unknown_handle,
)
from .contexts import Contexts
from .packing import Packing, can_pack

_DEFAULT_SHARED = 48 << 10  # bytes of dynamic shared memory that need no asking


class _Kernel:
    """A loaded function and how many asked for it."""

    __slots__ = (
        "cooperative",
        "device",
        "function",
        "handle",
        "key",
        "packings",
        "shared",
        "source",
        "users",
    )

    def __init__(self, key: Any, source: Any, function: Any, device: int, cooperative: bool) -> None:
        self.key = key
        self.source = source  # kept alive: the cache key may be its id
        self.function = function
        self.handle = int(function.ptr)
        self.packings: dict[tuple[type, ...], Packing | None] = {}  # None: CuPy packs these types
        self.device = device
        self.cooperative = cooperative
        self.shared = _DEFAULT_SHARED
        self.users = 1


class _StreamHandle:
    """A stream as CuPy's launch takes it."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Kernels(Contexts):
    """Kernels of the CUDA driver."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels: dict[int, _Kernel] = {}
        self._loaded: dict[Any, int] = {}
        self._next_kernel = count(1)

    def kernel_load(
        self, name: str, source: str, options: Sequence[str], device: int, sim: SimFunction | None = None
    ) -> int:
        """Inherited. Compiles now; the same kernel again is the same handle, unloaded as often as it was loaded."""
        key = (source, name, tuple(options), device)
        with self._lock:
            handle = self._loaded.get(key)
            if handle is not None:
                self._kernels[handle].users += 1
                return handle
            raw = cupy.RawKernel(source, name, tuple(options))
            return self._add(key, raw, _function_of(raw, name, self._on(device)), device)

    def kernel_adopt(self, function: Any, device: int) -> int:
        """Inherited. Takes a ``cupy.RawKernel`` (also of a ``RawModule``) or ``cupy.cuda.Function``."""
        key = ("adopted", id(function), device)
        with self._lock:
            handle = self._loaded.get(key)
            if handle is not None:
                self._kernels[handle].users += 1
                return handle
            if isinstance(function, Function):
                return self._add(key, function, function, device)
            if not isinstance(function, cupy.RawKernel):
                raise UsageError(
                    "kernel",
                    got=type(function).__name__,
                    expected="cupy.RawKernel or a function of a cupy.RawModule",
                )
            return self._add(key, function, _function_of(function, function.name, self._on(device)), device)

    def _add(self, key: Any, source: Any, function: Any, device: int) -> int:
        handle = next(self._next_kernel)
        cooperative = bool(getattr(source, "enable_cooperative_groups", False))
        self._kernels[handle] = _Kernel(key, source, function, device, cooperative)
        self._loaded[key] = handle
        return handle

    def kernel_unload(self, kernel: int) -> None:
        """Inherited."""
        with self._lock:
            entry = self._kernels.get(kernel)
            if entry is None:
                raise unknown_handle("kernel", kernel, "cuModuleUnload")
            entry.users -= 1
            if not entry.users:
                del self._kernels[kernel], self._loaded[entry.key]

    def kernel_launch(
        self,
        kernel: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        values: tuple[Any, ...],
        spans: tuple[Span | SurfaceArg | None, ...],
        shared: int,
        stream: int,
    ) -> None:
        """Inherited."""
        try:
            entry = self._kernels[kernel]
        except KeyError:
            raise unknown_handle("kernel", kernel, "cuLaunchKernel") from None
        if entry.device != self._only and runtime.getDevice() != entry.device:
            with self._on(entry.device):
                return self.kernel_launch(kernel, grid, block, values, spans, shared, stream)
        if shared > entry.shared:
            self._allow_shared(entry, shared)
        types = tuple(map(type, values))
        try:
            packing = entry.packings[types]
        except KeyError:
            packing = entry.packings[types] = self._packing(entry, types)
        if packing is None or entry.cooperative:
            return _launch_by_cupy(entry, grid, block, values, shared, stream)
        buffer = packing.pack(values)
        launch = entry.handle, *grid, *block, shared, stream, buffer.parameters, 0
        try:
            try:  # CuPy's function: the bindings wrap handle and status in objects, which costs as much as the launch
                cupy_driver.launchKernel(*launch)
            except CUDADriverError as error:
                if error.status != NO_CONTEXT:
                    raise
                with self._on(entry.device):  # a thread that never called CUDA
                    cupy_driver.launchKernel(*launch)
        except CUDADriverError as error:
            refusal = failure_of(error, "cuLaunchKernel")
            refusal.got = f"grid {grid}, block {block}, {shared} bytes of shared memory"
            raise refusal from error
        except OverflowError as error:  # no number that CUDA could be given
            raise _no_launch(grid, block, shared) from error
        finally:
            packing.give_back(buffer)

    def _packing(self, entry: _Kernel, types: tuple[type, ...]) -> Packing | None:
        """How arguments of these types are packed; checked against the kernel's parameters once."""
        return Packing(types, self._parameter_sizes(entry)) if can_pack(types) else None

    def _parameter_sizes(self, entry: _Kernel) -> tuple[int, ...] | None:
        """Bytes of each parameter of a kernel, or None from a driver or bindings too old to tell."""
        ask = getattr(cu, "cuFuncGetParamInfo", None)
        if ask is None:
            return None
        sizes: list[int] = []
        with self._on(entry.device):
            while True:
                status, _, size = ask(cu.CUfunction(entry.handle), len(sizes))
                if status:  # invalid value: past the last one
                    return tuple(sizes) if int(status) == INVALID_VALUE else None
                sizes.append(size)

    def _allow_shared(self, entry: _Kernel, nbytes: int) -> None:
        """Ask for more dynamic shared memory than a kernel gets by default."""
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        try:
            with self._on(entry.device):
                call(cu.cuFuncSetAttribute, entry.function.ptr, attribute, nbytes)
        except DriverError as error:
            raise LaunchError(
                f"{nbytes} bytes of shared memory", code=error.code, name=error.name, call=error.call
            ) from error
        entry.shared = nbytes


def _launch_by_cupy(
    entry: _Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    values: tuple[Any, ...],
    shared: int,
    stream: int,
) -> None:
    """For arguments that only CuPy packs and for cooperative kernels."""
    if 0 in grid or 0 in block:  # CuPy would launch one block where CUDA refuses
        raise _no_launch(grid, block, shared)
    try:
        entry.function(grid, block, values, shared, _StreamHandle(stream), entry.cooperative)
    except (CUDADriverError, CUDARuntimeError) as error:
        raise failure_of(error, "cuLaunchKernel") from error


def _no_launch(grid: tuple[int, int, int], block: tuple[int, int, int], shared: int) -> LaunchError:
    return LaunchError(
        got=f"grid {grid}, block {block}, {shared} bytes of shared memory",
        code=INVALID_VALUE,
        name="CUDA_ERROR_INVALID_VALUE",
        call="cuLaunchKernel",
    )


def _function_of(raw: Any, name: str, context: Any) -> Any:
    """The compiled function of a RawKernel on one device."""
    try:
        with context:
            function = raw.kernel
        # CuPy keeps it as long as the process lives. Unloaded where the device is gone, at the end of the process or of
        # a forked child, it would write to stderr: it is never unloaded.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(function.module))
        return function
    except CompileException as error:
        log = [line for line in str(error).splitlines() if line.strip()]
        raise DriverError(
            f"kernel {name} does not compile",
            code=6,
            name="NVRTC_ERROR_COMPILATION",
            call="nvrtcCompileProgram",
            findings=log[:20],
        ) from error
    except CUDADriverError as error:
        failed: CuglueError = failure_of(error, "cuModuleGetFunction")
        failed.hint = f'Declare it extern "C" __global__ and name it {name!r}'
        raise failed from error
    except RuntimeError as error:
        if hasattr(error, "status"):  # NVRTC's other failures
            status: int = error.status
            text = str(error).partition(" ")[0]
            raise DriverError(f"kernel {name}", code=status, name=text, call="nvrtcCompileProgram") from error
        raise UnsupportedError(
            f"compiling kernel {name}",
            got=str(error),
            hint="Install NVRTC: it comes with cuglue[cuda13] and cuglue[cuda12]",
            reason="no_compiler",
        ) from error
