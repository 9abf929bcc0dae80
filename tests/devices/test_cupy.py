"""CuPy on two GPUs: its arrays, kernels and allocators with a runtime of a device that is not current."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from sample_kernels import SOURCES

import cuglue
from cuglue import In, InOut, Out, Runtime
from cuglue.errors import UsageError

pytestmark = pytest.mark.gpu
N = 1 << 20
SIZES = np.uint64(N), np.int32(1)  # as a RawKernel is told them: by their width


@pytest.fixture
def two(request: pytest.FixtureRequest) -> Any:
    """The GPUs; where there is one it stands for both."""
    from devices.conftest import Two

    found = Two(cuglue.current_driver())
    yield found
    assert found.driver.device_current() == found.here


def test_arrays_and_kernels_of_a_device_that_is_not_current(two: Any) -> None:
    """A RawKernel is compiled for the runtime's device, and ordered after what CuPy queued there."""
    import cupy

    kernel = cupy.RawKernel(SOURCES["increment"], "increment")
    for device in (*two.both, two.here):
        with two.on(device):
            array = cupy.zeros(N, "i4")
        with Runtime(device) as rt:
            for _ in range(20):
                with two.on(device):
                    array += 1  # on CuPy's current stream there
                rt.launch(kernel, N // 256, 256, InOut(array), *SIZES)
                with two.on(device):
                    array += 1
            assert (rt.read(array, dtype="i4").result() == 60).all()


def test_streams_of_cupy_there(two: Any) -> None:
    """CuPy's current stream of the device, not that of the current device."""
    import cupy

    with two.on(two.there):
        stream = cupy.cuda.Stream(non_blocking=True)
        array = cupy.zeros(N, "i4")
    kernel = cupy.RawKernel(SOURCES["increment"], "increment")
    with Runtime(two.there) as rt:
        with two.on(two.there), stream, two.on(two.here):
            assert cuglue.as_stream(device=two.there).handle == stream.ptr
            rt.launch(kernel, N // 256, 256, InOut(array), *SIZES)
            got = rt.read(array, dtype="i4")
        assert (got.result() == 1).all()
        assert cuglue.as_stream(device=two.there).handle == 0


@pytest.mark.parametrize("make", [cuglue.AsyncCudaResource, cuglue.DirectCudaResource, "pool", "budget"])
def test_an_allocator_for_each(two: Any, make: Any) -> None:
    """Arrays of both devices come and go, and are dropped whichever device is current."""
    import cupy

    if make == "pool":
        make = lambda device: cuglue.PoolResource(cuglue.AsyncCudaResource(device))  # noqa: E731
    elif make == "budget":
        make = lambda device: cuglue.GlobalDeviceBudget(cuglue.AsyncCudaResource(device), 1 << 30)  # noqa: E731
    resources = cuglue.PerDevice({device: make(device) for device in set(two.both)})
    with resources.as_cupy_allocator():
        for round_ in range(30):
            arrays = {}
            for device in set(two.both):
                with two.on(device):
                    x = cupy.arange(N, dtype="i4") + round_
                    arrays[device] = (x * 2, x.sum(dtype="i8"))
                    del x
            for device, (double, total) in arrays.items():
                assert double.device.id == device
                with two.on(device):
                    assert int(total) == N * (N - 1) // 2 + N * round_
                    assert int(double[-1]) == 2 * (N - 1 + round_)
            del arrays, double, total
    gc.collect()
    for device in set(two.both):
        resources[device].reap_pending()
        assert resources[device].bytes_outstanding == 0
    resources.close()


def test_another_devices_array_is_refused(two: Any) -> None:
    import cupy

    if two.here == two.there:
        return
    resource = cuglue.AsyncCudaResource(two.there)
    with pytest.raises(UsageError, match=r"device 0 is current.*PerDevice"):
        resource.malloc(64)
    resource.close()
    with two.on(two.there):
        array = cupy.zeros(16, "i4")
    with Runtime(two.here) as rt, pytest.raises(UsageError, match="device"):
        rt.launch(cupy.RawKernel(SOURCES["increment"], "increment"), 1, 16, InOut(array), *SIZES)


def test_both_at_work(two: Any) -> None:
    """Work of one device is not ordered behind what holds the other's default stream."""
    from cuglue.testing import Latch

    if two.here == two.there:
        return
    with Runtime(two.here) as first, Runtime(two.there) as second:
        data = np.arange(N, dtype="i4")
        held, free = first.create(data), second.create(data)
        kernel = cuglue.Kernel("increment", SOURCES["increment"])
        for rt, buffer in ((first, held), (second, free)):
            rt.launch(kernel, N // 256, 256, InOut(buffer), N, 1)
            rt.synchronize()
        with Latch(cuglue.as_stream(0, device=two.here)):
            first.launch(kernel, N // 256, 256, InOut(held), N, 1)
            waiting = first.read(held, dtype="i4")
            second.launch(kernel, N // 256, 256, InOut(free), N, 1)
            np.testing.assert_array_equal(second.read(free, dtype="i4").result(20), data + 2)
            with second.command(In(free), Out(free)) as cmd:
                cmd.sync().result(20)
            assert not waiting.done()
        np.testing.assert_array_equal(waiting.result(), data + 2)
        held.close()
        free.close()
