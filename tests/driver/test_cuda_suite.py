"""The suite that every driver passes, on the CUDA driver."""

from __future__ import annotations

import pytest

from cuglue.driver.protocol import Driver
from cuglue.driver.registry import open_driver
from cuglue.testing.driver_suite import DriverSuite


@pytest.mark.gpu
class TestCudaDriver(DriverSuite):
    def make(self) -> Driver:
        return open_driver("cuda")


@pytest.mark.gpu
class TestCudaDriverLastDevice(TestCudaDriver):
    """Of several devices one that is not current."""

    def setup_method(self) -> None:
        self.device = self.make().device_count() - 1
        super().setup_method()
