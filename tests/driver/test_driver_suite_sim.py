"""The simulated device keeps the contract of every driver, whatever the seed, and finds no hazard in it."""

from __future__ import annotations

import pytest

from cuglue.driver.sim import HazardError, SimDriver
from cuglue.testing import DriverSuite


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


@pytest.mark.parametrize(("broken", "error"), [(NoWait, HazardError), (NoFill, AssertionError)])
def test_the_suite_can_fail(broken: type[SimDriver], error: type[Exception]) -> None:
    class Suite(DriverSuite):
        def make(self) -> SimDriver:
            return broken(1)

    suite = Suite()
    suite.setup_method()
    with pytest.raises(error):
        suite.test_a_wait_orders_two_streams()
