"""An error that was handled keeps no frame, and so no array, alive until the collector comes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import cuglue
from cuglue import (
    AsyncCudaResource,
    DeviceMemoryResource,
    ExpandableCudaResource,
    FailureCallbackResource,
    GlobalDeviceBudget,
    LaunchRecorder,
    PoolResource,
    testing,
)
from cuglue.driver.sim import SimDriver
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


def served(call: Callable[[], Any]) -> weakref.ref[Marker]:
    """As :func:`attempt`, of a call that helps itself: nobody sees the errors on the way."""
    marker = Marker()
    kept = call()
    del kept
    return weakref.ref(marker)


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


def grow_and_shrink(pool: Any) -> None:
    """Leave a page that is in the way of a larger one."""
    pool.deallocate(pool.allocate(10 << 20))


BELOW: dict[str, Callable[[], DeviceMemoryResource]] = {
    "async": AsyncCudaResource,
    "budget": lambda: GlobalDeviceBudget(AsyncCudaResource(), 16 << 20),
    "expandable": ExpandableCudaResource,
}
CALLS: dict[str, Callable[[Any, int], Any]] = {
    "block": lambda pool, nbytes: pool.deallocate(pool.allocate(nbytes)),
    "array": lambda pool, nbytes: pool.malloc(nbytes),
}


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("below", BELOW)
def test_a_pool_lets_go_of_what_it_was_refused(below: str, call: str) -> None:
    """It keeps why upstream gave nothing only as long as it goes on trying, be it served in the end or not."""
    with cuglue.use_driver(SimDriver(memory_bytes=16 << 20)):
        pool = PoolResource(BELOW[below]())
        kept = pool.malloc(1000)
        grow_and_shrink(pool)
        assert served(lambda: CALLS[call](pool, 12 << 20))() is None
        assert frees_its_callers(lambda: CALLS[call](pool, 20 << 20))
        assert frees_its_callers(lambda: CALLS[call](pool, 16 << 20))
        assert served(lambda: CALLS[call](pool, 5 << 20))() is None
        del kept
        pool.close()


REFUSALS = 4  # two of upstream, which asks its driver twice: then the pool waits


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("succeeds", [True, False])
def test_a_pool_lets_go_of_what_failed_on_the_way(sim: Any, succeeds: bool) -> None:
    pool = PoolResource(AsyncCudaResource())
    retire = cuglue.as_stream(0).state.retire
    broken = [True]
    failed = []

    def action() -> None:
        if broken:
            failed.append(1)
            raise cuglue.errors.UsageError("no")

    retire.push((), action)
    with ExitStack() as faults:
        for _ in range(REFUSALS):
            faults.enter_context(testing.faults.fail("malloc_async", persistent=not succeeds))
        if succeeds:
            assert served(lambda: pool.malloc(64 << 20))() is None
        else:
            assert frees_its_callers(lambda: pool.malloc(64 << 20))
    assert failed
    broken.clear()
    retire.drain()
    pool.close()


def test_arrays_of_the_callers_die_with_them() -> None:
    """As in a program: the array of a function that asked for more than there is."""
    with cuglue.use_driver(SimDriver(memory_bytes=16 << 20)):
        pool = PoolResource(AsyncCudaResource())

        def step(nbytes: int) -> Any:
            large = pool.malloc(12 << 20)
            try:
                return large and pool.malloc(nbytes)
            except MemoryError:
                return None

        assert step(8 << 20) is None
        pool.reap_pending()
        assert pool.bytes_outstanding == 0
        pool.close()
