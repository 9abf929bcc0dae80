"""Joins: a stream after all that another one has got, by two calls of the driver that leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from driver_calls import Calls, recorded

import cuglue
from cuglue import Stream
from cuglue.driver.protocol import CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.errors import CaptureError, DriverError
from cuglue.testing.faults import fail


@pytest.fixture
def sim() -> Iterator[SimDriver]:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        yield driver


@pytest.fixture
def pair(sim: SimDriver) -> tuple[Stream, Stream]:
    return cuglue.as_stream(sim.Stream()), cuglue.as_stream(sim.Stream())


@pytest.fixture
def calls(sim: SimDriver) -> Iterator[Calls]:
    with recorded(sim) as made:
        yield made


def test_joins_share_one_event(pair: tuple[Stream, Stream], calls: Calls) -> None:
    a, b = pair
    for _ in range(50):
        assert a.join(b)
        assert b.join(a)
    assert not a.join(a)
    assert calls.count("event_create") == 1
    assert (calls.count("event_record"), calls.count("stream_wait_event")) == (100, 100)
    assert calls.count("event_query") == 0


def test_what_was_joined_is_not_waited_for_again(pair: tuple[Stream, Stream], calls: Calls) -> None:
    a, b = pair
    b.submit()
    a.join(b)
    calls.clear()
    assert not a.wait_for(b, b.seq)
    assert calls.made == []
    assert a.wait_for(b, b.submit())


def test_a_join_forgets_nothing_that_another_thread_waited_for(
    pair: tuple[Stream, Stream], sim: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    wait = sim.stream_wait_event

    def meanwhile(*what: Any) -> None:
        a.synced[b.id] = 1000
        wait(*what)

    monkeypatch.setattr(sim, "stream_wait_event", meanwhile)
    a.join(b)
    assert a.synced[b.id] == 1000


@pytest.mark.parametrize("capturing", [0, 1])
def test_no_join_reaches_a_capture(
    pair: tuple[Stream, Stream], sim: SimDriver, calls: Calls, capturing: int
) -> None:
    a, b = pair
    sim.capture_begin(pair[capturing].handle, CaptureMode.RELAXED)
    with pytest.raises(CaptureError):
        a.join(b)
    assert (calls.count("event_record"), calls.count("stream_wait_event")) == (0, 0)
    sim.graph_destroy(sim.capture_end(pair[capturing].handle))
    assert a.join(b)


@pytest.mark.parametrize("call", ["event_create", "event_record", "stream_wait_event"])
def test_a_join_that_fails_is_made_again(pair: tuple[Stream, Stream], sim: SimDriver, call: str) -> None:
    a, b = pair
    with fail(call, driver=sim), pytest.raises(DriverError):
        a.join(b)
    assert a.synced.get(b.id, 0) == 0
    with recorded(sim) as calls:
        assert a.join(b)
    assert calls.count("stream_wait_event") == 1


def test_what_stands_for_a_stream_of_a_bare_number_reaches_no_capture(
    pair: tuple[Stream, Stream], sim: SimDriver, calls: Calls
) -> None:
    """The whole device does, and with it any stream that captures."""
    a, capturing = pair
    owner = sim.Stream()
    number = cuglue.as_stream(owner.ptr)
    sim.capture_begin(capturing.handle, CaptureMode.RELAXED)
    for attempt in (lambda: a.join(number), number.synchronize):
        with pytest.raises(CaptureError):
            attempt()
    for name in ("device_synchronize", "context_record", "stream_synchronize", "stream_wait_event"):
        assert calls.count(name) == 0
    sim.graph_destroy(sim.capture_end(capturing.handle))
    assert a.join(number)
    number.synchronize()
