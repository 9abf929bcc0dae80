"""Driver calls for kernels.

Owns what a launch may ask for and the NumPy views its ``sim`` function gets. Must not know what kernels compute. A
``sim`` function that writes outside the spans it was given cannot be seen doing so: it has only those views.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import DriverError, UnsupportedError
from ..protocol import SimFunction, Span, SurfaceArg
from . import codes
from .core import Core
from .queues import Handles, Queue, StillRunning
from .ranges import strided
from .shadow import Use
from .state import Fault, Touch, driver_call

_MOST_THREADS = 1024
_MOST_SHARED = 232_448  # bytes
_MOST_BLOCK = (1024, 1024, 64)
_MOST_GRID = (2**31 - 1, 65535, 65535)


@dataclass(eq=False, slots=True)
class Kernel:
    """A loaded kernel."""

    name: str
    device: int
    function: SimFunction
    signature: inspect.Signature | None


class KernelCalls(Core):
    """Loading and launching."""

    _kernels: Handles[Kernel]

    @driver_call
    def kernel_load(
        self, name: str, source: str, options: Sequence[str], device: int, sim: SimFunction | None = None
    ) -> int:
        """Take ``sim`` as the kernel; the source is not read."""
        self._device(device, "kernel_load")
        if sim is None:
            raise UnsupportedError(
                f"kernel {name}",
                got="no sim function",
                expected="one",
                hint="Give the kernel sim=function: it does to NumPy views what the kernel does to device memory",
                reason="no_sim_function",
            )
        try:
            signature = inspect.signature(sim)
        except (TypeError, ValueError):  # some callables written in C have none
            signature = None
        return self._kernels.add(Kernel(name, device, sim, signature))

    @driver_call
    def kernel_adopt(self, function: Any, device: int) -> int:
        """Take an object that carries a ``sim`` function, as the simulated kernel that it stands for."""
        self._device(device, "kernel_adopt")
        sim = getattr(function, "sim", None)
        if not callable(sim):
            raise UnsupportedError(
                f"compiled kernel {function!r}",
                got="no sim function",
                expected="an object whose attribute sim is one",
                hint="Use cuglue.Kernel(name, source, sim=function)",
                reason="no_sim_function",
            )
        return self._kernels.add(Kernel(getattr(function, "name", "kernel"), device, sim, None))

    @driver_call
    def kernel_unload(self, kernel: int) -> None:
        """Forget the handle; launches already queued keep the function."""
        self._kernel(kernel, "kernel_unload")
        self._kernels.pop(kernel)

    @driver_call
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
        """Queue ``sim(grid, block, *args)``; an exception in it is an execution fault."""
        own = self._kernel(kernel, "kernel_launch")
        queue = self._queue(stream, "kernel_launch", own.device if stream in (0, 1, 2) else None)
        if queue.device != own.device:
            raise codes.launch_refused(
                codes.INVALID_RESOURCE_HANDLE,
                f"kernel {own.name} of device {own.device} on a stream of another device",
            )
        _check_extent(own.name, grid, block, shared)
        if len(values) != len(spans):
            raise codes.launch_refused(
                codes.INVALID_VALUE,
                f"kernel {own.name}",
                got=f"{len(spans)} spans",
                expected=f"{len(values)}",
            )
        fault: Fault | None = None
        arguments: list[Any] = []
        touches: list[Touch] = []
        images: list[Any] = []
        for value, span in zip(values, spans, strict=True):
            if isinstance(span, Span):
                try:
                    argument, uses = self._span(span)
                except DriverError as error:
                    fault = Fault(codes.ILLEGAL_ADDRESS, f"kernel {own.name}: {error.what}")
                    continue
                arguments.append(argument)
                touches += uses
            elif isinstance(span, SurfaceArg):
                argument, touch, image = self._image_argument(span)
                arguments.append(argument)
                touches.append(touch)
                images.append(image)
            else:
                arguments.append(value)
        if fault is None:
            _check_arguments(own, grid, block, arguments)
        run = _launch(own, grid, block, arguments) if fault is None else _raiser(fault)
        self._launched(queue, images, self._submit(queue, f"kernel {own.name}", run, touches))

    def _kernel(self, handle: int, call: str) -> Kernel:
        kernel = self._kernels.get(handle)
        if kernel is None:
            raise codes.refused(codes.INVALID_RESOURCE_HANDLE, call, "kernel", got=f"{handle:#x}")
        self._device(kernel.device, call)
        return kernel

    def _span(self, span: Span) -> tuple[npt.NDArray[Any], list[Touch]]:
        """The view and the uses that a span stands for; DriverError if it leaves its allocation."""
        dtype = np.dtype(span.dtype)
        range = strided(0, span.shape, span.strides, dtype.itemsize)
        reach = self._reach(span.ptr, range, span.access, "kernel_launch")
        offset = reach.range.start - range.start  # of element 0
        view = np.ndarray(span.shape, dtype, reach.data.data, offset, span.strides)
        view.flags.writeable = span.access.writes
        return view, reach.touches

    def _image_argument(self, argument: SurfaceArg) -> tuple[Any, Touch, Any]:
        """The object that a ``sim`` function gets, the use, and the object behind the handle (``array_calls``)."""
        raise NotImplementedError

    def _launched(self, queue: Queue, images: list[Any], point: Use) -> None:
        """Note that the launch at ``point`` uses ``images`` (``array_calls``)."""
        raise NotImplementedError


def _launch(
    kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], arguments: list[Any]
) -> Callable[[], None]:
    def run() -> None:
        try:
            kernel.function(grid, block, *arguments)
        except StillRunning:
            raise
        except Exception as error:
            raise Fault(codes.LAUNCH_FAILURE, f"kernel {kernel.name} raised {error!r}") from error

    return run


def _raiser(fault: Fault) -> Callable[[], None]:
    def run() -> None:
        raise fault

    return run


def _check_extent(name: str, grid: tuple[int, ...], block: tuple[int, ...], shared: int) -> None:
    fits = all(0 < n <= most for n, most in zip((*grid, *block), (*_MOST_GRID, *_MOST_BLOCK), strict=True))
    threads = block[0] * block[1] * block[2]
    if not fits or threads > _MOST_THREADS:
        raise codes.launch_refused(
            codes.INVALID_CONFIGURATION,
            f"kernel {name}",
            got=f"grid {grid}, block {block} ({threads} threads)",
            expected=f"1 to {_MOST_THREADS} threads a block, grid up to {_MOST_GRID}, block up to {_MOST_BLOCK}",
        )
    if not 0 <= shared <= _MOST_SHARED:
        raise codes.launch_refused(
            codes.INVALID_VALUE,
            f"kernel {name}",
            got=f"{shared} bytes shared",
            expected=f"0 to {_MOST_SHARED}",
        )


def _check_arguments(
    kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], arguments: list[Any]
) -> None:
    if kernel.signature is None:
        return
    try:
        kernel.signature.bind(grid, block, *arguments)
    except TypeError as error:
        raise codes.launch_refused(
            codes.INVALID_VALUE, f"kernel {kernel.name}", got=f"{len(arguments)} arguments ({error})"
        ) from None
