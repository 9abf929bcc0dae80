"""What lies behind a driver's bare error code in graphics interop: findings, collected where the call failed.

Owns the codes that say too little by themselves, and the questions asked to say more: thread, context, renderer,
device, memory, missing libraries. Must not know handles or maps. It asks only after a failure, never changes anything,
and a question that fails itself is left out.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..driver.protocol import Driver
from ..errors import CuglueError, DriverError
from .glcontext import current
from .glcurrent import ThreadRef, current_context

#: Codes that say too little, with what they usually mean in graphics interop.
MEANINGS = {
    1: "an argument or format that does not register, or a thread without the object's OpenGL context",
    2: "no device memory left for the registration",
    100: "no CUDA device behind the current OpenGL context",
    101: "a device that the current OpenGL context does not render on",
    201: "no CUDA context, or one that was destroyed",
    208: "the object is mapped already, by somebody else",
    213: "the object is an image: it has an array, no address",
    219: "no OpenGL context of the CUDA device's maker is current on this thread",
    304: "an operating system call failed: mostly OpenGL on another GPU or on the CPU",
    400: "no such object any more, or one without storage",
    709: "the CUDA context is gone; so is everything that belonged to it",
    801: "not supported here; also reported where device memory is short",
    900: "a stream captures a graph",
    999: "unknown to the driver: mostly OpenGL on another GPU, or a session without direct rendering",
}
_DEVICE_CODES = frozenset({1, 100, 101, 219, 304, 801, 999})
_MEMORY_CODES = frozenset({2, 304, 801, 999})
_NVIDIA_LIBRARIES = ("libEGL_nvidia.so.0", "libGLX_nvidia.so.0", "libXext.so.6")
_SHORT = 0.05  # of the device's memory


@contextmanager
def explained(driver: Driver, device: int) -> Iterator[None]:
    """Let driver errors that leave this block carry findings. Costs nothing where nothing fails."""
    try:
        yield
    except DriverError as error:
        explain(error, driver, device)
        raise


def explain(error: DriverError, driver: Driver, device: int) -> None:
    """Add findings to an error whose code says too little; one that has some keeps them."""
    if error.code in MEANINGS and not error.findings:
        error.findings = findings(error.code, driver, device)


def findings(code: int, driver: Driver, device: int) -> dict[str, str]:
    """What can be said about ``code`` here and now, on the thread and in the context where the call failed."""
    found = {"meaning": MEANINGS[code], "thread": str(ThreadRef.current())}
    questions: dict[str, Callable[[], str | None]] = {
        "context": lambda: str(current_context() or "no OpenGL context is current on this thread"),
        "renderer": _renderer,
        "device": lambda: f"{driver.device_name(device)} (CUDA device {device}, {driver.name} driver)",
    }
    if code in _DEVICE_CODES:
        questions["devices of the context"] = lambda: _devices(driver)
        if not driver.capabilities(device).simulated:
            questions["missing libraries"] = _missing_libraries
            questions["platform"] = _platform
    if code in _MEMORY_CODES:
        questions["memory"] = lambda: _memory(driver, device)
    for name, ask in questions.items():
        try:
            answer = ask()
        except CuglueError:
            continue
        if answer:
            found[name] = answer
    return found


def _renderer() -> str | None:
    if current_context() is None:
        return None
    context = current()
    kind = " - a software renderer: CUDA cannot share memory with it" if context.software else ""
    return f"{context.renderer} ({context.vendor}){kind}"


def _devices(driver: Driver) -> str:
    devices = driver.gl_devices()
    return ", ".join(f"CUDA device {n} ({driver.device_name(n)})" for n in devices) or "none of CUDA's"


def _memory(driver: Driver, device: int) -> str:
    free, total = driver.memory_info(device)
    text = f"{free} of {total} bytes free"
    if free < total * _SHORT:
        text += ": possibly out of memory; try cupy.get_default_memory_pool().free_all_blocks()"
    return text


def _missing_libraries() -> str | None:
    """Shared libraries of the vendor's OpenGL that do not load."""
    if sys.platform != "linux":
        return None
    missing = []
    for name in _NVIDIA_LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(name)
    return ", ".join(missing) or None


def _platform() -> str | None:
    try:
        wsl = "microsoft" in Path("/proc/sys/kernel/osrelease").read_text(encoding="utf-8").lower()
    except OSError:
        return None
    return "WSL: CUDA-OpenGL interop is not supported there" if wsl else None
