"""The latch holds exactly one stream, until it is told."""

from __future__ import annotations

import pytest

from cuglue.core.stream import as_stream
from cuglue.driver.sim import DeviceHangs, SimDriver
from cuglue.testing import Latch


def test_it_holds_until_released() -> None:
    sim = SimDriver()
    stream, ptr = sim.Stream(), sim.malloc(8, 0)
    latch = Latch(stream, driver=sim)
    sim.fill_async(ptr, 1, 8, stream.ptr)
    sim.pump()
    assert latch.held
    assert not stream.query()
    latch.release()
    assert not latch.held
    stream.synchronize()
    assert bytes(sim.host_view(ptr, 8, False)) == b"\x01" * 8
    latch.close()
    latch.close()
    assert sim.inventory()["host_alloc"] == sim.inventory()["events"] == sim.inventory()["kernels"] == 0
    assert sim.hazards == []


def test_it_counts_as_work_of_the_stream() -> None:
    """Otherwise the library would think that there is nothing to wait for."""
    sim = SimDriver()
    stream = as_stream(sim.Stream(), driver=sim)
    before = stream.seq
    with Latch(stream):
        assert stream.seq == before + 1


def test_waiting_for_a_held_stream_is_told_not_endured() -> None:
    sim = SimDriver(wait_limit=0.05)
    stream = sim.stream_create(0)
    latch = Latch(stream, driver=sim)
    with pytest.raises(DeviceHangs, match=r"cuglue_latch queued at .*test_latch\.py:\d+"):
        sim.stream_synchronize(stream)
    with pytest.raises(TimeoutError):
        sim.device_synchronize(0)
    latch.close()
    sim.stream_synchronize(stream)


def test_leaving_the_block_releases() -> None:
    sim = SimDriver()
    stream = sim.stream_create(0)
    with Latch(stream, driver=sim):
        assert not sim.stream_query(stream)
    sim.stream_synchronize(stream)
