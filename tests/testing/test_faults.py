"""Faults and counts: which call fails, with what, and that the driver is itself again afterwards."""

from __future__ import annotations

import pytest

from cuglue import use_driver
from cuglue.driver.sim import SimDriver
from cuglue.errors import CuglueError, DevicePoisoned, DriverError, LaunchError, OutOfMemory, UsageError
from cuglue.testing import faults


@pytest.fixture
def sim() -> SimDriver:
    return SimDriver()


def test_the_chosen_call_fails_before_it_does_anything(sim: SimDriver) -> None:
    with use_driver(sim), faults.fail("stream_create", on=2) as failure:
        first = sim.stream_create(0)
        before = sim.inventory()
        with pytest.raises(DriverError) as caught:
            sim.stream_create(0)
        assert sim.inventory() == before
        assert (caught.value.code, caught.value.call) == (999, "stream_create")
        second = sim.stream_create(0)
    assert first != second
    assert (failure.calls, failure.raised) == (3, 1)
    assert "stream_create" not in vars(sim)


def test_a_persistent_failure_stays_until_the_block_ends(sim: SimDriver) -> None:
    with faults.fail("event_create", on=2, persistent=True, driver=sim):
        sim.event_create(0)
        for _ in range(3):
            with pytest.raises(DriverError):
                sim.event_create(0)
    sim.event_create(0)


@pytest.mark.parametrize(
    ("method", "code", "kind"),
    [
        ("malloc", None, OutOfMemory),
        ("malloc_async", None, OutOfMemory),
        ("host_alloc", 801, DriverError),
        ("kernel_launch", None, LaunchError),
        ("stream_synchronize", 700, DevicePoisoned),
        ("graphics_map", 208, DriverError),
    ],
)
def test_errors_are_those_of_a_driver(
    sim: SimDriver, method: str, code: int | None, kind: type[CuglueError]
) -> None:
    with faults.fail(method, code=code, driver=sim):
        with pytest.raises(kind) as caught:
            getattr(sim, method)()
    assert type(caught.value) is kind
    if isinstance(caught.value, DriverError):
        assert caught.value.name.startswith("cudaError")


def test_blocks_nest_and_restore(sim: SimDriver) -> None:
    with faults.counts(driver=sim) as outer:
        with faults.fail("malloc", driver=sim), faults.counts(driver=sim) as inner:
            with pytest.raises(MemoryError):
                sim.malloc(1, 0)
            sim.memory_info(0)
        sim.malloc(1, 0)
    sim.malloc(1, 0)
    assert inner == {"malloc": 1, "memory_info": 1}
    assert outer == {"malloc": 1, "memory_info": 1}, "a call that was made to fail never reached the driver"


@pytest.mark.parametrize(("method", "on"), [("mallok", 1), ("malloc", 0)])
def test_bad_requests_are_refused(sim: SimDriver, method: str, on: int) -> None:
    with pytest.raises(UsageError):
        with faults.fail(method, on=on, driver=sim):
            pass
