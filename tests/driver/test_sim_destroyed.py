"""Work of a destroyed stream still runs, and a wait for the device covers it."""

from __future__ import annotations

import pytest

from cuglue.driver.sim import HazardError, SimDriver


@pytest.mark.parametrize("ran", ["before", "after", "not"])
@pytest.mark.parametrize("seed", range(4))
def test_a_wait_for_the_device_orders_what_a_destroyed_stream_did(seed: int, ran: str) -> None:
    driver = SimDriver(seed)
    one, two = driver.stream_create(0), driver.stream_create(0)
    ptr = driver.malloc(64, 0)
    driver.fill_async(ptr, 1, 64, one)
    if ran == "before":
        driver.pump()
    driver.stream_destroy(one)
    if ran == "after":
        driver.pump()
    driver.device_synchronize(0)
    driver.fill_async(ptr, 2, 64, two)
    driver.stream_synchronize(two)
    assert driver.hazards == []
    assert bytes(driver.host_view(ptr, 64, False)) == bytes([2]) * 64


def test_destroying_a_stream_orders_nothing() -> None:
    driver = SimDriver()
    one, two = driver.stream_create(0), driver.stream_create(0)
    ptr = driver.malloc(64, 0)
    driver.fill_async(ptr, 1, 64, one)
    driver.stream_destroy(one)
    driver.fill_async(ptr, 2, 64, two)
    with pytest.raises(HazardError):
        driver.device_synchronize(0)
