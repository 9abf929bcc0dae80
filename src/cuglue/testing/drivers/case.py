"""What the tests of a driver are made of: the driver under test, and helpers that give back what a test takes.

Owns set-up and clean-up. Must not know any test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...driver.protocol import CopyKind, Driver
from ...errors import DriverError

N = 4096
Bytes = npt.NDArray[np.uint8]


class DriverCase:
    """The driver under test. A test that needs a capability does nothing without it."""

    device = 0

    def make(self) -> Driver:
        """The driver under test."""
        raise NotImplementedError

    def setup_method(self) -> None:
        """Make the driver; what a test allocates through the helpers is given back after it."""
        self.driver = self.make()
        self.can = self.driver.capabilities(self.device)
        self._give_back: list[Callable[[], None]] = []

    def teardown_method(self) -> None:
        """Wait for everything, then give back in reverse order."""
        self.driver.device_synchronize(self.device)
        for give_back in reversed(self._give_back):
            give_back()

    # --- helpers ------------------------------------------------------------------------------------------------
    def stream(self) -> int:
        """A stream."""
        stream = self.driver.stream_create(self.device)
        self._give_back.append(lambda: self.driver.stream_destroy(stream))
        return stream

    def event(self, timing: bool = False) -> int:
        """An event."""
        event = self.driver.event_create(self.device, timing)
        self._give_back.append(lambda: self.driver.event_destroy(event))
        return event

    def memory(self, nbytes: int = N) -> int:
        """Device memory."""
        ptr = self.driver.malloc(nbytes, self.device)
        self._give_back.append(lambda: self.driver.free(ptr, self.device))
        return ptr

    def pinned(self, nbytes: int = N) -> int:
        """Pinned memory."""
        ptr = self.driver.host_alloc(nbytes)
        self._give_back.append(lambda: self.driver.host_free(ptr))
        return ptr

    def kernel(self, name: str, source: str, sim: Callable[..., None]) -> int:
        """A kernel and what it does on the simulated device."""
        kernel = self.driver.kernel_load(name, source, (), self.device, sim)
        self._give_back.append(lambda: self.driver.kernel_unload(kernel))
        return kernel

    def put(self, ptr: int, data: npt.NDArray[Any], stream: int) -> None:
        """Copy ``data`` to the device and wait."""
        data = np.ascontiguousarray(data)
        self.driver.copy_async(ptr, data.ctypes.data, data.nbytes, CopyKind.H2D, stream)
        self.driver.stream_synchronize(stream)

    def get(self, ptr: int, nbytes: int, stream: int) -> Bytes:
        """Copy from the device and wait."""
        out = np.empty(nbytes, np.uint8)
        self.driver.copy_async(out.ctypes.data, ptr, nbytes, CopyKind.D2H, stream)
        self.driver.stream_synchronize(stream)
        return out

    def refused(self, call: Callable[[], object], *codes: int, kind: type[DriverError] = DriverError) -> None:
        """``call`` raises ``kind``, with one of ``codes`` if given, and names itself."""
        error = None
        try:
            call()
        except kind as caught:
            error = caught
        assert error is not None, f"no {kind.__name__}"
        assert not codes or error.code in codes, error
        assert error.name, error
