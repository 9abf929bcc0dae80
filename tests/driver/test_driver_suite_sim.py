"""The simulated device keeps the contract of every driver, whatever the seed, and finds no hazard in it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from cuglue.driver.protocol import Driver
from cuglue.driver.sim import DeviceHangs, HazardError, SimDriver
from cuglue.errors import DriverError
from cuglue.testing import DriverSuite, trace
from cuglue.testing.drivers.devices import DeviceTests
from cuglue.testing.interpose import METHODS

#: Every call that takes a stream, and which of its arguments that is.
CALLS = {
    name: places.index("stream") - 1
    for name in METHODS
    if "stream" in (places := list(inspect.signature(getattr(Driver, name)).parameters))
}


class TestSimDriver(DriverSuite):
    seed = 0

    def make(self) -> SimDriver:
        return SimDriver(self.seed)

    def teardown_method(self) -> None:
        super().teardown_method()
        assert self.driver.hazards == []
        assert {k: v for k, v in self.driver.inventory().items() if v} == {}


class TestSimDriverOtherSeed(TestSimDriver):
    seed = 4711


class TestSimDriverSecondDevice(TestSimDriver):
    device = 1

    def make(self) -> SimDriver:
        return SimDriver(3, devices=2)


class TestSimDriverWithoutOptions(TestSimDriver):
    def make(self) -> SimDriver:
        names = ("async_memory", "managed_memory", "graphs", "surfaces", "context_events", "virtual_memory")
        return SimDriver(disable=names)


class NoWait(SimDriver):
    def stream_wait_event(self, stream: int, event: int) -> None:
        """Order nothing."""


class NoFill(SimDriver):
    def fill_async(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """Fill nothing."""


class OnTheCurrentDevice(SimDriver):
    """Forgets what a handle says of its device."""

    def _queue(self, handle: int, call: str, device: int | None = None) -> Any:
        return super()._queue(int(handle), call, device)


@pytest.mark.parametrize(("broken", "error"), [(NoWait, HazardError), (NoFill, AssertionError)])
def test_the_suite_can_fail(broken: type[SimDriver], error: type[Exception]) -> None:
    class Suite(DriverSuite):
        def make(self) -> SimDriver:
            return broken(1)

    suite = Suite()
    suite.setup_method()
    with pytest.raises(error):
        suite.test_a_wait_orders_two_streams()


BY_STREAM_ALONE = {
    "test_a_fill",
    "test_copies",
    "test_copies_of_arrays",
    "test_waits_and_questions",
    "test_a_wait_for_an_event",
    "test_a_host_callback_there",
    "test_a_graph",
}


@pytest.mark.parametrize("name", sorted(BY_STREAM_ALONE))
def test_the_suite_finds_work_on_the_default_stream_of_another_device(name: str) -> None:
    class Suite(DriverSuite):
        device = 1

        def make(self) -> SimDriver:
            return OnTheCurrentDevice(1, devices=2, wait_limit=0.2)

    suite = Suite()
    suite.setup_method()
    with pytest.raises((HazardError, AssertionError, DriverError, DeviceHangs)):
        getattr(suite, name)()


def test_every_call_with_a_stream_is_tried_on_default_streams_of_another_device() -> None:
    class Suite(DriverSuite):
        device = 1

        def make(self) -> SimDriver:
            return driver

    driver = SimDriver(devices=2)
    suite = Suite()
    tried = set()
    for name in vars(DeviceTests):
        if name.startswith("test_"):
            suite.setup_method()
            with trace(driver=driver) as calls:
                getattr(suite, name)()
            suite.teardown_method()
            tried |= {c.method for c in calls if c.method in CALLS and c.args[CALLS[c.method]] in (0, 1, 2)}
    assert set(CALLS) - tried == {
        "stream_destroy",  # which refuses them
        # The object belongs to a device: tests/driver/test_sim_devices.py.
        "graphics_map",
        "graphics_unmap",
        "semaphore_signal",
        "semaphore_wait",
    }
