"""Driver calls that fail when a test wants them to.

Owns which call fails and with what. A failing call does nothing, as the protocol promises of a refused one. Must not
know what is tested.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..driver.protocol import Driver
from ..driver.registry import current_driver
from ..errors import CuglueError, DevicePoisoned, DriverError, LaunchError, OutOfMemory, UsageError
from .interpose import METHODS, Method, interposed

ALLOCATE = frozenset(
    ["malloc", "malloc_async", "malloc_managed", "host_alloc", "array_create", "vmm_create", "vmm_reserve"]
)
_NAMES = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    208: "cudaErrorAlreadyMapped",
    304: "cudaErrorOperatingSystem",
    400: "cudaErrorInvalidResourceHandle",
    700: "cudaErrorIllegalAddress",
    719: "cudaErrorLaunchFailure",
    801: "cudaErrorNotSupported",
    900: "cudaErrorStreamCaptureUnsupported",
    999: "cudaErrorUnknown",
}
_STICKY = frozenset([700, 719])


class Failure:
    """What :func:`fail` gives: how often the method was called and made to fail in its block."""

    def __init__(self, method: str, on: int, persistent: bool, code: int) -> None:
        self.method = method
        self.calls = 0
        self.raised = 0
        self._on = on
        self._persistent = persistent
        self._code = code
        self._lock = threading.Lock()

    def wrap(self, name: str, method: Method) -> Method:
        """The method that fails at the chosen call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls += 1
                now = self.calls == self._on or (self._persistent and self.calls > self._on)
                self.raised += now
            if now:
                raise error_of(name, self._code)
            return method(*args, **kwargs)

        return call


@contextmanager
def fail(
    method: str,
    on: int = 1,
    persistent: bool = False,
    *,
    code: int | None = None,
    driver: Driver | None = None,
) -> Iterator[Failure]:
    """Let the ``on``-th call of ``method`` in this block fail, before it does anything.

    Args:
        method: name of a driver method.
        on: which call, from 1.
        persistent: all calls after it fail too.
        code: CUDA error code; None: out of memory for an allocation, else 999. 700 and 719 raise DevicePoisoned.
        driver: the driver; None: the current one.

    Raises:
        UsageError: no such method, or ``on`` below 1.
    """
    if on < 1:
        raise UsageError("call to fail", got=on, expected="1 for the first, 2 for the second, ...")
    failure = Failure(method, on, persistent, code if code is not None else 2 if method in ALLOCATE else 999)
    with interposed(driver or current_driver(), [method], failure.wrap):
        yield failure


@contextmanager
def counts(*, driver: Driver | None = None) -> Iterator[Counter[str]]:
    """Count the driver calls of this block by method name.

    Args:
        driver: the driver; None: the current one.
    """
    counted: Counter[str] = Counter()

    def make(name: str, method: Method) -> Method:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return method(*args, **kwargs)

        return call

    with interposed(driver or current_driver(), METHODS, make):
        yield counted


def error_of(method: str, code: int) -> CuglueError:
    """The error with which a driver's ``method`` reports ``code``."""
    if code == 2 and method in ALLOCATE:
        return OutOfMemory(f"{method} was made to fail", requested=0, in_use=0)
    kind = LaunchError if method == "kernel_launch" else DriverError
    if code in _STICKY:
        kind = DevicePoisoned
    return kind(
        f"{method} was made to fail", code=code, name=_NAMES.get(code, f"cudaError{code}"), call=method
    )
