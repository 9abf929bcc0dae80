"""Which driver this process uses.

Owns the process-wide choice and the look for a CUDA driver on this machine. The simulated device is chosen, never
fallen back to. Must not know what a driver does; CuPy and the bindings are loaded only once CUDA was chosen.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import cache
from types import TracebackType
from typing import Any

from ..arguments import shown
from ..errors import UnsupportedError, UsageError
from .protocol import Driver

_lock = threading.RLock()
_current: Driver | None = None


def _forked() -> None:
    """In a forked child: nobody has the lock, which another thread may have held at the fork."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)

#: Where the driver library may be, in the order tried; under WSL it lies outside the loader's path.
_SONAMES = (
    ("nvcuda.dll",)
    if sys.platform == "win32"
    else (
        "libcuda.so.1",
        "libcuda.so",
        "/usr/lib/wsl/lib/libcuda.so.1",
    )
)


class DriverChoice:
    """What :func:`use_driver` gives: the driver it set, restoring the former choice when used in ``with``."""

    __slots__ = ("_former", "driver")

    def __init__(self, driver: Driver, former: Driver | None) -> None:
        self.driver = driver
        self._former = former

    def __enter__(self) -> Driver:
        return self.driver

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        with _lock:
            _current = self._former


def use_driver(choice: str | Driver) -> DriverChoice:
    """Set the driver of this process, at once; in a ``with`` statement, only until its end.

    Args:
        choice: ``"cuda"``, ``"sim"`` (a fresh simulated device) or a driver object.

    Ordering: never blocks on device work. Objects made before keep the driver that they were made with.

    Raises:
        UnsupportedError: CUDA was asked for and is not here; the former choice stays.
        UsageError: no such driver.
    """
    global _current
    driver = open_driver(choice)
    with _lock:
        former, _current = _current, driver
    return DriverChoice(driver, former)


def current_driver() -> Driver:
    """The driver of this process.

    The first call decides, unless :func:`use_driver` did: the environment variable ``CUGLUE_DRIVER`` (``cuda`` or
    ``sim``), else CUDA where there is a device.

    Raises:
        UnsupportedError: ``reason`` is "no_runtime": no CUDA device, and nobody chose the simulated one.
        UsageError: ``CUGLUE_DRIVER`` names no driver.
    """
    global _current
    driver = _current
    if driver is None:
        with _lock:
            if _current is None:
                _current = open_driver(os.environ.get("CUGLUE_DRIVER") or "cuda")
            driver = _current
    return driver


def open_driver(choice: str | Driver) -> Driver:
    """The driver that ``choice`` names, without making it current. See :func:`use_driver` for the choices."""
    if choice == "cuda":
        return _cuda_driver()
    if choice == "sim":
        return _sim_driver()
    if isinstance(choice, str) or not callable(getattr(choice, "capabilities", None)):
        raise UsageError("choice of a driver", got=shown(choice), expected="'cuda', 'sim' or a driver object")
    return choice


def driver_of(choice: str | Driver | None) -> Driver:
    """The driver for an argument ``driver=``: as :func:`open_driver` chooses, None the current one."""
    return current_driver() if choice is None else open_driver(choice)


def is_cuda_available() -> bool:
    """True if a CUDA driver loads, starts and sees a device. Asked once; never loads CuPy."""
    return _probe()[0]


def runtime_path() -> str | None:
    """Path of the CUDA driver library that was found, or None; it may be there without any device."""
    return _probe()[1]


@cache
def _probe() -> tuple[bool, str | None]:
    """``(available, path)``; a library that lacks a symbol counts as absent and the next one is tried."""
    found: str | None = None
    for soname in _SONAMES:
        try:
            library = ctypes.CDLL(soname)
            init, count = library.cuInit, library.cuDeviceGetCount
        except (OSError, AttributeError):
            continue
        found = found or _path_of(library, init) or soname
        devices = ctypes.c_int(0)
        if init(0) == 0 and count(ctypes.byref(devices)) == 0 and devices.value > 0:
            return True, _path_of(library, init) or soname
    return False, found


class _SymbolInfo(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("fname", ctypes.c_char_p),
        ("fbase", ctypes.c_void_p),
        ("sname", ctypes.c_char_p),
        ("saddr", ctypes.c_void_p),
    )


def _path_of(library: ctypes.CDLL, symbol: Any) -> str | None:
    """File that a loaded library came from."""
    if sys.platform == "win32":
        name = ctypes.create_unicode_buffer(32768)
        module = ctypes.c_void_p(library._handle)
        return name.value if ctypes.windll.kernel32.GetModuleFileNameW(module, name, len(name)) else None
    info = _SymbolInfo()
    try:
        dladdr = ctypes.CDLL(None).dladdr
    except AttributeError:
        return None
    if not dladdr(ctypes.cast(symbol, ctypes.c_void_p), ctypes.byref(info)) or not info.fname:
        return None
    return os.path.realpath(os.fsdecode(info.fname))


@cache
def _cuda_driver() -> Driver:
    """The one CUDA driver of this process: its handles are the process's, so a second one would only confuse."""
    if not is_cuda_available():
        library = runtime_path()
        raise UnsupportedError(
            "CUDA",
            got=f"no device behind {library}" if library else "no driver library",
            expected="an NVIDIA driver with a device",
            hint="Install the NVIDIA driver, or choose the simulated device: CUGLUE_DRIVER=sim or use_driver('sim')",
            reason="no_runtime",
        )
    try:
        from .cuda.several import open_cuda
    except ImportError as error:
        raise UnsupportedError(
            "CUDA packages",
            got=str(error),
            expected="CuPy and cuda-bindings",
            hint="Install cuglue[cuda13] or cuglue[cuda12]",
            reason="no_runtime",
        ) from error
    return open_cuda()


def _sim_driver() -> Driver:
    """A fresh simulated device, seeded by ``CUGLUE_SIM_SEED`` if that is set."""
    from .sim import SimDriver

    seed = os.environ.get("CUGLUE_SIM_SEED")
    if not seed:
        return SimDriver()
    try:
        number = int(seed, 0)
    except ValueError:
        raise UsageError("CUGLUE_SIM_SEED", got=shown(seed), expected="an integer") from None
    return SimDriver(seed=number)
