"""cuglue's contract suites over the toys."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from toys import Canvas, CountingResource, HostArray

import cuglue
from cuglue import testing


@pytest.fixture(autouse=True)
def sim():
    with cuglue.use_driver(testing.SimDriver(seed=3)) as driver:
        yield driver
        driver.check()


class TestCountingResource(testing.ResourceSuite):
    cupy = False

    def make(self):
        return CountingResource()


class TestCanvas(testing.HandleSuite):
    @contextmanager
    def make(self):
        driver = cuglue.current_driver()
        canvas = Canvas(driver, 1000)
        with cuglue.CudaHandle.from_gl(7, 1000, canvas) as handle:

            def memory(writable):
                driver.device_synchronize(0)
                return np.asarray(driver.host_view(canvas.ptr, 1000, writable))

            yield SimpleNamespace(
                handle=handle,
                driver=driver,
                opaque=False,  # a map is the canvas itself, not a copy
                get=lambda: memory(False).copy(),
                put=lambda data: np.copyto(memory(True), data),
            )
        canvas.close()


class TestHostArray(testing.ViewSuite):
    @contextmanager
    def make(self, array, *, readonly=False):
        view = HostArray(array, readonly)
        yield view
        view.close()


class TestSimDriver(testing.DriverSuite):
    def make(self):
        return testing.SimDriver(seed=11)
