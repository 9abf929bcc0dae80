"""What every driver promises, as a suite to inherit: only what holds alike on real and simulated devices.

Owns the contract of :class:`~cuglue.driver.protocol.Driver` that can be seen through it. The oracle is NumPy. A test
class gives :meth:`DriverSuite.make`::

    class TestMyDriver(DriverSuite):
        def make(self):
            return MyDriver()

Order is proved with :class:`~cuglue.testing.latch.Latch`, never with sleeps.
"""

from __future__ import annotations

from .drivers.devices import DeviceTests
from .drivers.kernels import KernelTests
from .drivers.memory import MemoryTests
from .drivers.order import OrderTests


class DriverSuite(MemoryTests, OrderTests, KernelTests, DeviceTests):
    """Inherit it and give ``make()``; every method named ``test_...`` is a test."""
