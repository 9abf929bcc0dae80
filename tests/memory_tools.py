"""What the tests of memory resources share: streams, contents, and every resource there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cuglue
from cuglue.driver.protocol import CopyKind

#: Every decorator, by a short name.
LAYERS: dict[str, Any] = {
    "budget": lambda upstream: cuglue.GlobalDeviceBudget(upstream, 64 << 20),
    "logging": lambda upstream: cuglue.LoggingResource(upstream, cuglue.InMemorySink()),
    "statistics": cuglue.StatisticsResource,
    "tracking": cuglue.TrackingResource,
    "guard": cuglue.DebugGuardResource,
    "callback": lambda upstream: cuglue.FailureCallbackResource(upstream, lambda failure: False),
}


def new_stream(device: int = 0) -> Any:
    """A non-blocking stream of the current driver, as its own object."""
    driver: Any = cuglue.current_driver()
    if driver.name == "sim":
        return driver.Stream(device)
    import cupy

    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True)


def fill(block: Any, value: int, stream: Any, nbytes: int | None = None) -> None:
    """Queue a fill of ``block`` (the caller orders it)."""
    record = cuglue.as_stream(stream)
    record.driver.fill_async(block.ptr, value, nbytes or block.nbytes, record.handle)
    record.submit()


def contents(block: Any, stream: Any, nbytes: int | None = None) -> np.ndarray:
    """The bytes of ``block`` once ``stream`` got there."""
    record = cuglue.as_stream(stream)
    size = nbytes or block.nbytes
    host = np.zeros(size, np.uint8)
    record.driver.copy_async(host.ctypes.data, block.ptr, size, CopyKind.D2H, record.handle)
    record.submit()
    record.synchronize()
    return host


def make_current(stream: Any) -> Any:
    """``with`` this, ``stream`` is the current one of the array library."""
    driver: Any = cuglue.current_driver()
    return driver.current_stream(stream) if driver.name == "sim" else stream


def in_thread(function: Callable[[], Any]) -> Any:
    """Result of ``function`` on another thread; what it raises is raised here."""
    import threading

    result: list[Any] = []

    def run() -> None:
        try:
            result.append((function(), None))
        except BaseException as error:  # noqa: BLE001 - raised below
            result.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert result, "the thread hangs"
    value, error = result[0]
    if error is not None:
        raise error
    return value
