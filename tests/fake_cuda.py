"""CuPy's runtime and driver API and ``cuda.bindings.driver`` without a device.

Types, enums and constants are the real ones; functions only note how they were called and answer from a script. So the
arguments that the CUDA driver builds are checked where there is no GPU.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest

#: The context of device 0; that of device 1 is one more.
CONTEXT = 100


class Script:
    """Calls in order, and what to answer: ``answers[name]`` is a value, a tuple of values or an exception.

    Without an entry a function answers with what ``default`` gives for its name.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def only(self, name: str) -> tuple[Any, ...]:
        """Arguments of the one call of this name."""
        (found,) = [call[1:] for call in self.calls if call[0] == name]
        return found

    def of(self, name: str, default: Any) -> Any:
        answer = self.answers.get(name, default)
        if isinstance(answer, Callable):  # type: ignore[arg-type]
            answer = answer()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class FakeRuntime:
    """``cupy.cuda.runtime``; the current device follows the context stack of :class:`FakeBindings`."""

    def __init__(self, real: Any, script: Script, devices: int) -> None:
        self._real, self._script, self._devices = real, script, devices
        self.stack: list[int] = []
        self.current = 0

    def getDeviceCount(self) -> int:
        return self._devices

    def getDevice(self) -> int:
        return self.stack[-1] - CONTEXT if self.stack else self.current

    def check_status(self, status: int) -> None:
        self._script.calls.append(("check_status", status))
        self._real.check_status(status)

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if not callable(real) or isinstance(real, type):
            return real

        def function(*args: Any) -> Any:
            self._script.calls.append((name, *args, f"on {self.getDevice()}"))
            return self._script.of(name, 1000 + len(self._script.calls))

        function.__name__ = name
        return function


class Refusal(Exception):
    """``CUDADriverError``, which cannot be made where there is no driver library."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"CUDA_ERROR_{status}: refused")


class FakeCupyDriver:
    """``cupy.cuda.driver``."""

    def __init__(self, script: Script, runtime: FakeRuntime) -> None:
        self._script, self._runtime = script, runtime

    def ctxGetCurrent(self) -> int:
        return self._runtime.stack[-1] if self._runtime.stack else 0

    def launchKernel(self, *args: Any) -> Any:
        self._script.calls.append(("launchKernel", *args, f"on {self._runtime.getDevice()}"))
        return self._script.of("launchKernel", None)


class FakeBindings:
    """``cuda.bindings.driver``."""

    def __init__(self, real: Any, script: Script, runtime: FakeRuntime) -> None:
        self._real, self._script, self._runtime = real, script, runtime

    def __dir__(self) -> list[str]:
        return dir(self._real)

    def cuInit(self, flags: int) -> tuple[Any]:
        return (self._real.CUresult.CUDA_SUCCESS,)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, int]:
        return self._real.CUresult.CUDA_SUCCESS, CONTEXT + device

    def cuCtxGetCurrent(self) -> tuple[Any, int]:
        return self._real.CUresult.CUDA_SUCCESS, self._runtime.stack[-1] if self._runtime.stack else 0

    def cuCtxPushCurrent(self, context: int) -> tuple[Any]:
        self._runtime.stack.append(context)
        return (self._real.CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, int]:
        return self._real.CUresult.CUDA_SUCCESS, self._runtime.stack.pop()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if not name.startswith("cu"):
            return real

        def function(*args: Any) -> Any:
            self._script.calls.append((name, *args, f"on {self._runtime.getDevice()}"))
            answer = self._script.of(name, 1000 + len(self._script.calls))
            if isinstance(answer, self._real.CUresult):
                return answer, 0, 0
            values = answer if isinstance(answer, tuple) else () if answer is None else (answer,)
            return (self._real.CUresult.CUDA_SUCCESS, *values)

        function.__name__ = name
        return function


def install(monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> tuple[Any, Script, FakeRuntime]:
    """A ``CudaDriver`` over the fakes, the script, and the fake runtime with its context stack."""
    package = importlib.import_module("cuglue.driver.cuda")
    calls = importlib.import_module("cuglue.driver.cuda.calls")
    script = Script()
    runtime = FakeRuntime(calls.runtime, script, devices)
    bindings = FakeBindings(calls.cu, script, runtime)
    driver = FakeCupyDriver(script, runtime)
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        if hasattr(module, "runtime"):
            monkeypatch.setattr(module, "runtime", runtime)
        if hasattr(module, "cu"):
            monkeypatch.setattr(module, "cu", bindings)
        if hasattr(module, "cupy_driver"):
            monkeypatch.setattr(module, "cupy_driver", driver)
        if hasattr(module, "CUDADriverError"):
            monkeypatch.setattr(module, "CUDADriverError", Refusal)
    several = importlib.import_module("cuglue.driver.cuda.several")
    return several.open_cuda(), script, runtime
