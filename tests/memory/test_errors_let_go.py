"""An error that was handled keeps no frame, and so no array, alive until the collector comes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import cuglue
from cuglue import AsyncCudaResource, FailureCallbackResource, GlobalDeviceBudget, LaunchRecorder, testing
from cuglue.errors import CuglueError


class Marker:
    """Stands for an array in a variable of the caller."""


def frees_its_callers(call: Callable[[], Any]) -> bool:
    return attempt(call)() is None


def attempt(call: Callable[[], Any]) -> weakref.ref[Marker]:
    """The marker lies in this frame, which an error in a cycle would keep."""
    marker = Marker()
    try:
        call()
    except CuglueError:
        return weakref.ref(marker)
    raise AssertionError("nothing was raised")


@pytest.fixture
def _no_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def several_streams(resource: Any, sim: Any) -> list[Any]:
    kept = [sim.Stream() for _ in range(3)]
    for stream in kept:
        resource.deallocate(resource.allocate(64, stream))
    return kept


CASES: dict[str, Callable[[Any, Any], Callable[[], Any]]] = {
    "too large": lambda resource, sim: lambda: resource.allocate(2**63),
    "no memory": lambda resource, sim: lambda: resource.allocate(64),
    "no memory for an array": lambda resource, sim: lambda: resource.malloc(64),
    "budget": lambda resource, sim: lambda: GlobalDeviceBudget(resource, 10).malloc(64),
    "callback": lambda resource, sim: lambda: FailureCallbackResource(resource, lambda f: True).malloc(64),
    "reap": lambda resource, sim: resource.reap_pending,
    "recorder": lambda resource, sim: LaunchRecorder(sim.Stream()).read("stranger").preflight,
}


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("case", CASES)
def test_a_handled_error_lets_go(sim: Any, case: str) -> None:
    resource = AsyncCudaResource()
    kept = several_streams(resource, sim)
    call = CASES[case](resource, sim)
    broken = "stream_synchronize" if case == "reap" else "malloc_async"
    with testing.faults.fail(broken, persistent=True):
        assert frees_its_callers(call)
    del kept
    resource.reap_pending()


@pytest.mark.usefixtures("_no_collector")
def test_a_drain_lets_go(sim: Any) -> None:
    queue = cuglue.as_stream(0).state.retire
    broken = [True]

    def action() -> None:
        if broken[0]:
            raise cuglue.errors.UsageError("no")

    for number in (1, 2):
        for _ in range(number):
            queue.push((), action)
        assert frees_its_callers(queue.drain)
    broken.clear()
    broken.append(False)
    queue.drain()
