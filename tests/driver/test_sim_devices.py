"""A second simulated device: its default streams are its own."""

from __future__ import annotations

import glpixels
import numpy as np
import pytest
from graphics.subjects import make_buffer

import cuglue
from cuglue.driver.sim import SimDriver
from cuglue.errors import DriverError
from cuglue.graphics.glcontext import headless

DEFAULT = (0, 1, 2)


@pytest.mark.parametrize("stream", DEFAULT)
def test_an_event_is_recorded_on_the_default_stream_of_its_device(stream: int) -> None:
    sim = SimDriver(devices=2)
    gate, other = sim.stream_create(1), sim.stream_create(0)
    ptr = sim.malloc_async(64, stream, 1)
    event, gone = sim.event_create(1), sim.event_create(0)
    sim.event_record(event, stream)
    sim.stream_wait_event(gate, event)
    sim.free_async(ptr, gate, 1)  # in order after the allocation: else a hazard
    sim.stream_synchronize(gate)
    assert sim.hazards == []
    sim.event_record(gone, stream)
    with pytest.raises(DriverError, match="device 1"):
        sim.event_record(gone, gate)
    sim.stream_synchronize(other)


@pytest.mark.gl
def test_a_map_on_a_second_device_is_left() -> None:
    """The array library's current stream is the default one, for which leaving waits."""
    sim = SimDriver(devices=2)
    with headless(), cuglue.use_driver(sim):
        name = make_buffer(64)
        handle = cuglue.register_buffer(name, device=1)
        stream = sim.Stream(1)
        for number in (3, 4):
            with handle.map_mut(stream) as m:
                np.asarray(m)[:] = number
            assert not handle.mapped
            assert sim.inventory()["mapped"] == 0
            assert (glpixels.read_buffer(name) == number).all()
            with handle.map(), handle.map(stream):
                pass
        handle.close()
        assert sim.hazards == []
