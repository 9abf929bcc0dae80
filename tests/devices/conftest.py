"""Two devices of one driver, the first of which is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

import cuglue
from cuglue.driver.sim import SimDriver


class Two:
    """A driver, current, and the two devices; of CUDA with one device they are the same.

    Attributes:
        driver, here, there: the driver; ordinal of the current device; of another.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.here: int = driver.device_current()
        self.there: int = driver.device_count() - 1

    @property
    def both(self) -> tuple[int, int]:
        """The ordinals."""
        return self.here, self.there

    def on(self, device: int) -> AbstractContextManager[Any]:
        """``with`` this, ``device`` is current."""
        if self.driver.name == "sim":
            choice: AbstractContextManager[Any] = self.driver.current_device(device)
            return choice
        import cupy

        found: AbstractContextManager[Any] = cupy.cuda.Device(device)
        return found


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    """Either driver. At the end the first device is still current, and nothing was unordered."""
    driver: Any = SimDriver(devices=2) if request.param == "sim" else cuglue.current_driver()
    with cuglue.use_driver(driver):
        found = Two(driver)
        yield found
        assert driver.device_current() == found.here
        for device in found.both:
            driver.device_synchronize(device)
    if driver.name == "sim":
        assert driver.hazards == []
