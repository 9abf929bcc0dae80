"""A stream and what is freed on it may become garbage together, in one cycle: the stream goes last.

An exception kept in a local variable is enough: its traceback holds the frame, with the stream and the array in it.
"""

from __future__ import annotations

import gc
from typing import Any

import cuglue
from cuglue.core.device import device_state
from cuglue.core.stream import Stream
from cuglue.driver.sim import SimDriver


class Freed:
    """Memory that is freed on its stream by the next drain after it was dropped."""

    def __init__(self, driver: SimDriver, stream: Stream) -> None:
        self.driver, self.stream = driver, stream
        self.ptr = driver.malloc_async(64, stream.handle, 0)

    def __del__(self) -> None:
        driver, stream, ptr = self.driver, self.stream, self.ptr
        stream.state.retire.forget(lambda: driver.free_async(ptr, stream.handle, 0))


def test_what_is_freed_on_a_stream_of_the_same_cycle(sim: SimDriver) -> None:
    def function() -> None:
        stream = sim.Stream()
        memory = Freed(sim, cuglue.as_stream(stream))
        cycle: list[Any] = [stream, memory]
        cycle.append(cycle)

    function()
    gc.collect()
    device_state(sim, 0).retire.drain()
    gc.collect()
    inventory = sim.inventory()
    assert (inventory["malloc_async"], inventory["streams"]) == (0, 0)


def test_an_exception_that_keeps_its_frame(sim: SimDriver) -> None:
    def function() -> None:
        stream = sim.Stream()
        memory = Freed(sim, cuglue.as_stream(stream))
        try:
            raise ValueError(memory)
        except ValueError as error:
            kept = error
        assert kept.__traceback__ is not None

    function()
    gc.collect()
    device_state(sim, 0).retire.drain()
    gc.collect()
    inventory = sim.inventory()
    assert (inventory["malloc_async"], inventory["streams"]) == (0, 0)


def test_a_record_that_comes_back_to_life_gives_no_event_twice(sim: SimDriver) -> None:
    state = device_state(sim, 0)
    other = cuglue.as_stream(sim.Stream())

    def function() -> None:
        stream = cuglue.as_stream(sim.Stream())
        other.wait_for(stream, stream.submit())  # the record has an event now
        memory = Freed(sim, stream)
        cycle: list[Any] = [stream, memory]
        cycle.append(cycle)

    function()
    gc.collect()
    state.retire.drain()
    assert sim.inventory()["events"] == 1
    first, second = state.take_event(), state.take_event()
    assert first != second
    for event in first, second:
        state.give_event(event)


def test_a_record_that_comes_back_to_life_keeps_no_event(sim: SimDriver) -> None:
    state = device_state(sim, 0)
    other = cuglue.as_stream(sim.Stream())

    class Waited(Freed):
        """Memory whose freeing lets another stream wait for its own."""

        def __del__(self) -> None:
            driver, stream, ptr = self.driver, self.stream, self.ptr

            def free() -> None:
                other.wait_for(stream, stream.submit())
                driver.free_async(ptr, stream.handle, 0)

            stream.state.retire.forget(free)

    def function() -> None:
        stream = cuglue.as_stream(sim.Stream())
        cycle: list[Any] = [stream, Waited(sim, stream)]
        cycle.append(cycle)

    function()
    gc.collect()
    state.retire.drain(block=True)
    state.retire.drain(block=True)
    state.close_events()
    inventory = sim.inventory()
    assert (inventory["malloc_async"], inventory["streams"], inventory["events"]) == (0, 1, 0)


def test_an_owner_lives_as_long_as_its_record_and_no_longer(sim: SimDriver) -> None:
    record = cuglue.as_stream(sim.Stream())
    owners = record.state.owners
    assert owners == {record.id: record.owner}
    del record
    assert owners == {}
    assert sim.inventory()["streams"] == 0


def test_an_owner_that_is_told_later_is_kept_too(sim: SimDriver) -> None:
    class Null:
        """As CuPy names the default stream."""

        ptr, device_id = 0, 0

    record = cuglue.as_stream(0)
    assert record.state.owners == {}
    null = Null()
    assert cuglue.as_stream(null) is record
    assert record.state.owners == {record.id: null}
