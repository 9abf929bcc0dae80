"""What keeps an error keeps no frame: the arrays of who met it die with their function."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sample_kernels import INCREMENT

from cuglue import Kernel, Out, Runtime
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    CuglueError,
    DevicePoisoned,
    LaunchError,
    MapUnavailableError,
    UnsupportedError,
    UsageError,
)
from cuglue.graphics import makers
from cuglue.graphics.handle import CudaHandle


class Marker:
    """Stands for an array in a variable of the caller."""


def met(call: Callable[[], Any]) -> tuple[weakref.ref[Marker], Any]:
    """A marker of a frame that was there, and what is kept."""
    marker = Marker()
    try:
        kept = call()
    except CuglueError:
        kept = None
    return weakref.ref(marker), kept


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_profile_keeps_none(sim: SimDriver) -> None:
    with Runtime() as rt:
        x = rt.empty(4)
        profile = rt.profile()

        def call() -> None:
            with profile:
                rt.launch(INCREMENT, 1, 4096, Out(x), 1, 1)

        gone, _ = met(call)
        assert isinstance(profile.failure, LaunchError)
        assert gone() is None
        with pytest.raises(UsageError, match="LaunchError"):
            _ = profile.milliseconds


def test_a_future_keeps_none(sim: SimDriver) -> None:
    def broken(grid: Any, block: Any, x: Any) -> None:
        raise RuntimeError("illegal address")

    kernel = Kernel("broken", 'extern "C" __global__ void broken(int* x) { }', sim=broken)
    rt = Runtime()
    rt.launch(kernel, 1, 1, Out(rt.empty(4)))
    future = rt.command().sync()

    def call() -> Any:
        while not future.done():
            pass

    gone, _ = met(call)
    assert gone() is None
    for _ in range(2):
        with pytest.raises(DevicePoisoned, match="illegal address"):
            future.result()
    rt.close()


def test_a_handle_without_a_device_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(_: object) -> Any:
        raise UnsupportedError("no driver library", reason="no_runtime")

    class Ops:
        def map(self, resource: int) -> None: ...
        def unmap(self, resource: int) -> None: ...
        def unregister(self, resource: int) -> None: ...

    monkeypatch.setattr(makers, "driver_of", no_driver)
    gone, handle = met(lambda: CudaHandle.from_gl(7, 16, Ops()))
    assert gone() is None
    with pytest.raises(MapUnavailableError, match="no driver library"):
        handle.map()
    handle.close()
