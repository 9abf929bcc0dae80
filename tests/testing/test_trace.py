"""Traces: calls in order, keywords in their places, failures too."""

from __future__ import annotations

import pytest

import cuglue
from cuglue import testing
from cuglue.driver.sim import SimDriver
from cuglue.errors import DriverError


def test_calls_are_recorded_in_order() -> None:
    sim = SimDriver()
    with cuglue.use_driver(sim), testing.trace() as calls:
        event = cuglue.current_driver().event_create(0, timing=True)
        sim.event_record(event, 0)
        with pytest.raises(DriverError):
            sim.stream_query(77)
    sim.event_destroy(event)
    assert calls == [("event_create", (0, True)), ("event_record", (event, 0)), ("stream_query", (77,))]
    assert calls[0].method == "event_create"


def test_a_trace_can_be_narrowed() -> None:
    sim = SimDriver()
    with (
        testing.trace(only={"malloc"}, driver=sim) as some,
        testing.trace(without={"malloc"}, driver=sim) as rest,
    ):
        sim.free(sim.malloc(8, 0), 0)
        sim.capabilities(0)
    assert some == [("malloc", (8, 0))]
    assert [call.method for call in rest] == ["free", "capabilities"]
