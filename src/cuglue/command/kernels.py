"""Kernels: what one is, and where its compiled form is kept.

Owns :class:`Kernel` and :class:`KernelContext`, which compiles once per source, options and device. Must not know
arguments or streams.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..arguments import shown, whole
from ..core.device import DeviceState, device_state
from ..driver.protocol import Driver, SimFunction
from ..errors import LaunchError, UnsupportedError, UsageError
from .signature import Parameter, signature

_ADOPTED = 256  # functions of array libraries kept loaded; more than a program has, less than a leak


class Kernel:
    """A CUDA C++ kernel, and what it does to NumPy arrays on the simulated device.

    Args:
        name: of the ``extern "C"`` kernel in ``source``.
        source: CUDA C++; compiled for a device when first launched there, then kept.
        options: for the compiler.
        sim: ``sim(grid, block, *args)``, called on the simulated device with grid and block as tuples of three, a
            NumPy view for each pointer, a NumPy scalar for each value, and for each surface or texture an object whose
            ``texels`` are a NumPy view of shape ([depth,] height, width, channels), read-only of a texture.

    Raises:
        LaunchError: the source has no such kernel, or its name would be changed by the compiler.
        UsageError: wrong types.
    """

    __slots__ = ("__weakref__", "name", "options", "parameters", "sim", "source")

    def __init__(
        self, name: str, source: str, *, options: Sequence[str] = (), sim: SimFunction | None = None
    ) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError("kernel name", got=shown(name), expected="the name of a function in the source")
        if not isinstance(source, str):
            raise UsageError(
                f"source of kernel {name!r}", got=type(source).__name__, expected="CUDA C++ as a str"
            )
        listed = isinstance(options, Sequence) and not isinstance(options, str)
        if not listed or not all(isinstance(option, str) for option in options):
            raise UsageError(f"options of kernel {name!r}", got=shown(options), expected="a sequence of str")
        if sim is not None and not callable(sim):
            raise UsageError(f"sim of kernel {name!r}", got=shown(sim), expected="a function or None")
        self.name = name
        self.source = source
        self.options = tuple(options)
        self.sim = sim
        self.parameters: tuple[Parameter, ...] | None = signature(name, source)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.name, self.source, self.options, self.sim)

    def __repr__(self) -> str:
        listed = "..." if self.parameters is None else ", ".join(str(p) for p in self.parameters)
        return f"Kernel({self.name}({listed}))"


def _again(name: str, source: str, options: tuple[str, ...], sim: SimFunction | None) -> Kernel:
    """A kernel from what was pickled of it."""
    return Kernel(name, source, options=options, sim=sim)


class Loaded:
    """A kernel that the driver has. Unloaded once nobody may launch it any more: no context, and no graph.

    Attributes:
        handle: what the driver calls it.
    """

    __slots__ = ("_state", "handle")

    def __init__(self, state: DeviceState, handle: int) -> None:
        self._state = state
        self.handle = handle

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "handle") and not _ending():  # without, its making was interrupted
            self._state.retire.forget(partial(self._state.driver.kernel_unload, self.handle))


class KernelContext:
    """The compiled kernels of one device.

    Attributes:
        loaded: kernels compiled so far.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self.simulated = driver.capabilities(device).simulated
        self._state = device_state(driver, device)
        self._lock = threading.Lock()
        self.loaded: dict[Kernel, Loaded] = {}
        self._adopted: OrderedDict[int, tuple[Any, Loaded]] = (
            OrderedDict()
        )  # by id; the function is kept alive

    def find(self, kernel: Any) -> Loaded:
        """The driver's side of a :class:`Kernel`, ``cupy.RawKernel`` or RawModule function; compiles at first use.

        Ordering: touches no stream. Blocks while it compiles.

        Raises:
            UsageError: no kernel.
            UnsupportedError: the simulated device has no way to run it.
            DriverError: it does not compile.
        """
        if isinstance(kernel, Kernel):
            return self.loaded.get(kernel) or self._load(kernel)
        found = self._adopted.get(id(kernel))
        return found[1] if found is not None else self._adopt(kernel)

    def _load(self, kernel: Kernel) -> Loaded:
        if self.simulated and kernel.sim is None:
            raise UnsupportedError(
                f"{kernel!r} on the simulated device",
                expected="a kernel with sim=",
                hint="Give Kernel(..., sim=function), which does the same to NumPy arrays",
                reason="simulated",
            )
        with self._lock:
            if kernel not in self.loaded:
                handle = self.driver.kernel_load(
                    kernel.name, kernel.source, kernel.options, self.device, kernel.sim
                )
                self.loaded[kernel] = Loaded(self._state, handle)
            return self.loaded[kernel]

    def _adopt(self, function: Any) -> Loaded:
        if type(function).__module__.partition(".")[0] != "cupy" or not callable(function):
            raise UsageError(
                "kernel",
                got=shown(function)[:80],
                expected="a Kernel, cupy.RawKernel or function of a cupy.RawModule",
            )
        if self.simulated:
            raise UnsupportedError(
                f"{type(function).__name__} on the simulated device",
                expected="a Kernel with sim=",
                hint="Wrap its source: Kernel(name, source, sim=function)",
                reason="simulated",
            )
        with self._lock:
            loaded = Loaded(self._state, self.driver.kernel_adopt(function, self.device))
            self._adopted[id(function)] = function, loaded
            if len(self._adopted) > _ADOPTED:
                self._adopted.popitem(last=False)
            return loaded

    def close(self) -> None:
        """Forget every kernel; the driver unloads those that no graph launches."""
        with self._lock:
            self.loaded.clear()
            self._adopted.clear()
        self._state.retire.run_forgotten()


Dimensions = tuple[int, int, int]


def dimensions(what: str, value: Any) -> Dimensions:
    """A grid or block given as an int or up to three ints.

    Raises:
        LaunchError: anything else, or a negative extent.
    """
    if type(value) is tuple and len(value) == 3:
        x, y, z = value
        if type(x) is type(y) is type(z) is int and x >= 0 and y >= 0 and z >= 0:
            return value
    listed = tuple(value) if isinstance(value, Sequence) else (value,)
    found = [n for n in map(whole, listed) if n is not None and n >= 0]
    full = (*found, 1, 1)[: max(3, len(listed))]
    if not found or len(found) != len(listed) or len(full) != 3:
        raise LaunchError(what, got=shown(value), expected="an int of 0 or more, or one to three of them")
    return full[0], full[1], full[2]


__all__ = ["Dimensions", "Kernel", "KernelContext", "Loaded", "dimensions"]
