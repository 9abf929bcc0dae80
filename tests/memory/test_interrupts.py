"""Ctrl-C at every point of an allocation and of a free: no memory is lost, nothing is given back or counted twice."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
from interrupts import interrupted

import cuglue
from cuglue import (
    AsyncCudaResource,
    DebugGuardResource,
    GlobalDeviceBudget,
    InMemorySink,
    LoggingResource,
    PinnedHostResource,
    StatisticsResource,
    TrackingResource,
    current_driver,
)
from cuglue.lifecycle import BlockState
from cuglue.testing import SimDriver


def sweep(program: Callable[[Any, Any, list[Any]], None], make: Callable[[], Any]) -> int:
    """Interrupt ``program(resource, stream, kept)`` at each of its points in turn; their number.

    Args:
        make: the resource.
        program: puts into ``kept`` what it gets.
    """
    for step in itertools.count(1):
        driver = SimDriver(memory_bytes=1 << 22)
        with cuglue.use_driver(driver):
            resource, stream, kept = make(), driver.Stream(), []
            resource.deallocate(resource.allocate(64, stream))
            resource.malloc(64)
            resource.reap_pending()
            where = interrupted(lambda r=resource, s=stream, k=kept: program(r, s, k), step)  # type: ignore[misc]
            sys.last_exc = None  # type: ignore[assignment]
            while kept:
                if getattr(block := kept.pop(), "state", None) is BlockState.LIVE:
                    resource.deallocate(block)
            block = None
            gc.collect()
            resource.reap_pending()
            assert counted(resource, driver) == {}, f"interrupted at step {step}, {where}"
            resource.deallocate(resource.allocate(100, stream))
            resource.malloc(10)
            resource.close()
            assert driver.hazards == []
        if where is None:
            return step - 1
    raise AssertionError


def counted(resource: Any, driver: SimDriver) -> dict[str, Any]:
    """What a stack still counts of memory, though all was given back."""
    inventory = driver.inventory()
    found = {
        "outstanding": resource.bytes_outstanding,
        "bytes": inventory["bytes"],
        "host": inventory["host_alloc"],
    }
    layer = resource
    while layer is not None:
        if isinstance(layer, GlobalDeviceBudget):
            found["reserved"] = layer.reserved_bytes
        if isinstance(layer, StatisticsResource):
            now = layer.statistics()
            found["statistics"] = now.current_bytes or now.current_count
        if isinstance(layer, TrackingResource):
            found["tracked"] = layer.live()
        if isinstance(layer, DebugGuardResource):
            found["guarded"] = layer.live_blocks() or layer._inner or layer.reports or len(layer._quarantine)
        if isinstance(layer, LoggingResource):
            found["logged twice"] = logged_twice(layer.sink)
        layer = getattr(layer, "upstream", None)
    return {name: value for name, value in found.items() if value}


def logged_twice(sink: Any) -> list[Any]:
    """Operations that succeeded more than once."""
    done = [(r.action, r.generation) for r in sink.snapshot() if r.ok and r.generation is not None]
    return [one for one in set(done) if done.count(one) > 1]


def a_block(resource: Any, stream: Any, kept: list[Any]) -> None:
    kept.append(resource.allocate(100, stream))
    resource.deallocate(kept[0])


def a_used_block(resource: Any, stream: Any, kept: list[Any]) -> None:
    kept.append(resource.allocate(100))
    cuglue.use(kept[0], stream)
    resource.deallocate(kept[0])


def an_array(resource: Any, stream: Any, kept: list[Any]) -> None:
    kept.append(resource.malloc(100))
    kept.clear()
    kept.append(resource.malloc(200))
    kept.clear()
    resource.reap_pending()


def an_array_of_a_stream(resource: Any, stream: Any, kept: list[Any]) -> None:
    with current_driver().current_stream(stream):
        an_array(resource, stream, kept)
        an_array(resource, stream, kept)


def an_array_that_is_asked_about(resource: Any, stream: Any, kept: list[Any]) -> None:
    with current_driver().current_stream(stream):
        resource.malloc(100)
        kept.append(resource.malloc(100))
        cuglue.use(kept[0].mem, stream)
        kept.clear()
        resource.malloc(100)


@pytest.mark.parametrize(
    "make", [AsyncCudaResource, lambda: TrackingResource(AsyncCudaResource())], ids=["alone", "tracked"]
)
@pytest.mark.parametrize(
    "program", [a_block, a_used_block, an_array, an_array_of_a_stream, an_array_that_is_asked_about]
)
def test_an_interrupt_loses_no_memory(program: Any, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert sweep(program, make) > 20
    assert caplog.messages == []


def every_layer() -> LoggingResource:
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1 << 20)
    return LoggingResource(StatisticsResource(TrackingResource(budget)), InMemorySink())


def a_reservation(resource: Any, stream: Any, kept: list[Any]) -> None:
    with resource.reserve(1000) as reservation:
        kept.append(reservation.allocate(100, stream))
        resource.deallocate(kept[0])


def in_a_scope(resource: Any, stream: Any, kept: list[Any]) -> None:
    with resource.scope():
        a_block(resource, stream, kept)
        an_array(resource, stream, kept)


@pytest.mark.parametrize(
    ("make", "program"),
    [
        (every_layer, a_block),
        (every_layer, an_array_of_a_stream),
        (DebugGuardResource, a_block),
        (DebugGuardResource, an_array),
        (PinnedHostResource, a_block),
        (lambda upstream: GlobalDeviceBudget(upstream, 1 << 20), a_reservation),
        (StatisticsResource, in_a_scope),
        (lambda upstream: StatisticsResource(StatisticsResource(upstream)), an_array_of_a_stream),
    ],
    ids=[
        "every layer, a block",
        "every layer, arrays",
        "guard",
        "guard, arrays",
        "pinned",
        "reservation",
        "scope",
        "two that count",
    ],
)
def test_an_interrupt_is_counted_right_by_every_layer(make: Any, program: Any) -> None:
    over = make in (every_layer, PinnedHostResource)
    assert sweep(program, make if over else lambda: make(AsyncCudaResource())) > 20
