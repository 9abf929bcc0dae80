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
