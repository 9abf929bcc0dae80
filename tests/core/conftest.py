"""A fresh simulated device for each test of the core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cuglue
from cuglue.core.stream import Stream
from cuglue.driver.sim import SimDriver


@pytest.fixture
def sim() -> Iterator[SimDriver]:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        yield driver
    assert driver.hazards == []


class Streams:
    """Streams of the current simulated device."""

    def __init__(self, driver: SimDriver) -> None:
        self._driver = driver

    def __call__(self, count: int) -> list[Stream]:
        return [cuglue.as_stream(self._driver.Stream()) for _ in range(count)]


@pytest.fixture
def streams(sim: SimDriver) -> Streams:
    return Streams(sim)
