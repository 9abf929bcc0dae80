"""Programs of somebody with two devices who never says which is current."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from sample_kernels import INCREMENT, SAXPY

import cuglue
from cuglue import In, InOut, Out, Runtime
from cuglue.core.device import DeviceState
from cuglue.driver.protocol import CaptureMode, DeviceStream
from cuglue.driver.sim import HazardError, SimDriver
from cuglue.errors import CaptureError, CuglueError, DriverError, StreamMisuse, UsageError
from cuglue.exchange.owner import consumer_stream
from cuglue.testing import Latch

N = 1000
DEFAULT = (None, 0, 1, 2)


def in_thread(work: Callable[[], Any]) -> Any:
    """Result of ``work`` on a thread that never asked a device for anything."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    (result,) = found
    return result


def saxpy(rt: Runtime, stream: Any = None) -> None:
    """Upload, launch, copy and read back, each byte as expected."""
    data = np.arange(N, dtype="f4")
    x, y = rt.create(data, stream), rt.empty(4 * N, stream)
    rt.launch(SAXPY, (4, 1, 1), (256, 1, 1), In(x), Out(y), 2.0, N, stream=stream)
    with rt.command(In(x), InOut(y), stream=stream) as cmd:
        got = cmd.read_async(y.descriptor((N,), "f4"))
        cmd.write_to_gpu(y.descriptor((N,), "f4"), data + 1)
        after = cmd.read_async(y.descriptor((N,), "f4"))
    np.testing.assert_array_equal(got.result(), 2 * data)
    np.testing.assert_array_equal(after.result(), data + 1)
    np.testing.assert_array_equal(rt.read(x, dtype="f4", stream=stream).result(), data)
    x.close()
    y.close()


@pytest.mark.parametrize("make", [cuglue.DirectCudaResource, cuglue.AsyncCudaResource, "pool"])
@pytest.mark.parametrize("thread", [False, True], ids=["here", "in a thread"])
@pytest.mark.parametrize("stream", [*DEFAULT, "own"])
def test_a_runtime_of_a_device_that_is_not_current(two: Any, stream: Any, thread: bool, make: Any) -> None:
    with ExitStack() as stack:
        resource = stack.enter_context(
            closing((cuglue.AsyncCudaResource if make == "pool" else make)(two.there))
        )
        if make == "pool":
            resource = stack.enter_context(closing(cuglue.PoolResource(resource)))
        rt = stack.enter_context(Runtime(two.there, resource=resource))
        stream = rt.stream(0) if stream == "own" else stream
        if thread:
            in_thread(lambda: saxpy(rt, stream))
        else:
            saxpy(rt, stream)
        rt.synchronize()


def test_without_the_device_in_the_handle_it_is_a_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device takes a plain number for a stream of the current device, as CUDA does."""
    monkeypatch.setattr(DeviceState, "own_handle", lambda self, stream: stream)
    driver = SimDriver(devices=2, disable=["async_memory"])
    with pytest.raises(HazardError), Runtime(1, driver=driver) as rt:
        saxpy(rt)
    assert {hazard.kind for hazard in driver.hazards} == {"unordered access"}


@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own stream"])
def test_without_the_device_in_the_handle_stream_ordered_memory_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Also on a stream of its own, which has its device: a copy looks at memory as the current device reaches it."""
    monkeypatch.setattr(DeviceState, "own_handle", lambda self, stream: int(stream))
    with pytest.raises(DriverError, match="memory of device 1"):
        with Runtime(1, driver=SimDriver(devices=2)) as rt:
            saxpy(rt, rt.stream(0) if own else None)


def test_both_devices_in_turn(two: Any) -> None:
    with Runtime(two.here) as first, Runtime(two.there) as second:
        buffers = [(rt, rt.create(np.full(N, k, "i4"))) for k, rt in enumerate((first, second))]
        for _ in range(20):
            for rt, buffer in buffers:
                rt.launch(INCREMENT, 4, 256, InOut(buffer), N, 1)
        with two.on(two.there):  # whichever is current by now
            for k, (rt, buffer) in enumerate(buffers):
                assert (np.asarray(rt.read(buffer, dtype="i4").result()) == k + 20).all()
                buffer.close()


def test_both_devices_from_two_threads(two: Any) -> None:
    # On CUDA a thread that used its per-thread default stream may hang, without this library too (docs/gpu_runs.md).
    streams = DEFAULT if two.driver.name == "sim" else (None, 0, 1)
    with Runtime(two.here) as first, Runtime(two.there) as second:
        errors: list[BaseException] = []

        def work(rt: Runtime) -> None:
            try:
                for stream in streams:
                    saxpy(rt, stream)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rt,)) for rt in (first, second, first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []


@pytest.mark.parametrize("nbytes", [20 << 20, (8 << 20) + 13])
def test_large_transfers(two: Any, nbytes: int) -> None:
    """In pieces, which threads of the library hand over: those have a current device of their own."""
    data = np.random.default_rng(5).integers(0, 256, nbytes, np.uint8)
    with Runtime(two.there) as rt:
        buffer = rt.create(data)
        out = np.zeros(nbytes, np.uint8)
        with rt.command(In(buffer)) as cmd:
            cmd.write_to_cpu(buffer.descriptor((nbytes,), "u1"), out)
            cmd.sync().result()
        np.testing.assert_array_equal(out, data)
        np.testing.assert_array_equal(rt.read(buffer).result(), data)
        buffer.close()


def test_a_graph(two: Any) -> None:
    with Runtime(two.there) as rt:
        buffer = rt.create(np.zeros(N, "i4"), rt.stream(0))
        rt.synchronize()
        with rt.capture(rt.stream(0)) as capture:
            rt.launch(INCREMENT, 4, 256, InOut(buffer), N, 1, stream=rt.stream(0))
        graph = capture.graph
        for stream in (rt.stream(0), *DEFAULT):
            graph.replay(stream=stream)
        assert (np.asarray(rt.read(buffer, dtype="i4").result()) == 5).all()
        graph.close()
        buffer.close()


def test_futures_and_profiles(two: Any) -> None:
    with Runtime(two.there) as rt:
        buffer = rt.create(np.arange(N, dtype="i4"))
        with rt.profile() as profile:
            rt.launch(INCREMENT, 4, 256, InOut(buffer), N, 1)

        async def main() -> Any:
            return await rt.read(buffer, dtype="i4")

        np.testing.assert_array_equal(asyncio.run(main()), np.arange(N) + 1)
        assert profile.milliseconds >= 0
        buffer.close()


def test_memory_of_both(two: Any) -> None:
    """Pools and budgets of each device; each keeps to its own."""
    budgets = {
        device: cuglue.GlobalDeviceBudget(cuglue.PoolResource(cuglue.AsyncCudaResource(device)), 64 << 20)
        for device in set(two.both)
    }
    for device, budget in budgets.items():
        blocks = [budget.allocate(1 << 20, stream) for stream in DEFAULT]
        assert {block.device_ordinal for block in blocks} == {device}
        assert budget.bytes_outstanding == len(blocks) << 20
        assert all(other.bytes_outstanding == 0 for d, other in budgets.items() if d != device)
        for block, stream in zip(blocks, DEFAULT, strict=True):
            with Runtime(device) as rt:
                there = cuglue.as_stream(stream, device=device)
                rt.driver.fill_async(block.ptr, 3, block.nbytes, there.handle)
                budget.record_block_use(block, there)
            budget.deallocate(block)
        budget.reap_pending()
        assert budget.bytes_outstanding == 0
        budget.close()


def test_per_device(two: Any) -> None:
    resources = cuglue.PerDevice({device: cuglue.AsyncCudaResource(device) for device in set(two.both)})
    for device in two.both:
        with two.on(device):
            pointer = resources.malloc(100)
        assert pointer.device_id == device
        assert resources[device].bytes_outstanding == 100
        del pointer
        resources[device].reap_pending()
        assert resources[device].bytes_outstanding == 0
    resources.close()


def test_exports_name_the_device(two: Any) -> None:
    with Runtime(two.there) as rt:
        buffer = rt.create(np.arange(N, dtype="i4"))
        view = buffer.array((N,), "i4")
        kind, ordinal = view.__dlpack_device__()
        assert ordinal == (0 if two.driver.name == "sim" else two.there), "host memory has no ordinal"
        assert int(kind) == int(two.driver.capabilities(two.there).device_type)
        np.testing.assert_array_equal(view.numpy(), np.arange(N))
        if two.driver.name == "cuda":
            import cupy
            import torch

            array = cupy.from_dlpack(view)
            tensor = torch.from_dlpack(view)
            assert (array.device.id, tensor.device.index) == (two.there, two.there)
            with two.on(two.there):
                assert int(array.sum()) == int(tensor.sum()) == N * (N - 1) // 2
            rt.launch(INCREMENT, 4, 256, InOut(array), N, 1)
            np.testing.assert_array_equal(rt.read(array, dtype="i4").result(), np.arange(N) + 1)
            del array, tensor
        buffer.close()


def test_the_array_interface_has_no_word_for_a_device(two: Any) -> None:
    """Where another device is current, the number of a default stream would be taken for one of that."""
    with Runtime(two.there) as rt:
        buffer = rt.create(np.arange(N, dtype="i4"))
        stream = cuglue.as_stream(0, device=two.there)
        owner = buffer.array((N,), "i4").export_owner
        with two.on(two.there):
            assert owner.cai_stream() == 1
        if two.here != two.there:
            with Latch(stream) as latch:
                timer = threading.Timer(0.05, latch.release)
                timer.start()
                assert owner.cai_stream() is None
                assert not latch.held, "the host has waited"
                assert stream.query()
                timer.join()
        buffer.close()
        mine = rt.create(np.arange(N, dtype="i4"), rt.stream(0))
        assert mine.array((N,), "i4").export_owner.cai_stream() == rt.stream(0).handle
        mine.close()


def test_a_consumers_stream_is_of_the_memorys_device(two: Any) -> None:
    """Whether it captures is asked of that one."""
    if two.here == two.there:
        return
    driver = two.driver
    with Runtime(two.there) as rt:
        buffer = rt.create(np.arange(N, dtype="i4"))
        owner = buffer.array((N,), "i4").export_owner
        for device, refused in ((two.here, False), (two.there, True)):
            capturing = DeviceStream(2, device)
            driver.capture_begin(capturing, CaptureMode.THREAD_LOCAL)
            if refused:
                with pytest.raises(CaptureError):
                    consumer_stream(owner, 2)
            else:
                assert consumer_stream(owner, 2).handle.device == two.there
            driver.graph_destroy(driver.capture_end(capturing))
        buffer.close()


def test_a_handle_of_ours_says_its_device_to_as_stream(two: Any) -> None:
    """Whichever device is current; a plain number is of the current one."""
    with Runtime(two.there) as rt:
        for own in (rt.stream(0), cuglue.as_stream(0, device=two.there)):
            assert cuglue.as_stream(own.handle) is own
    assert cuglue.as_stream(0).device == two.here
    if two.here != two.there:
        with pytest.raises(StreamMisuse, match=r"device 1.*device 0"):
            cuglue.as_stream(DeviceStream(0, two.there), device=two.here)


def test_errors_name_the_device(two: Any) -> None:
    if two.here == two.there:
        return
    with Runtime(two.here) as first, Runtime(two.there) as second:
        mine = second.create(np.zeros(4, "i4"))
        for use in (mine, mine.array((4,), "i4")):
            with pytest.raises(CuglueError, match=r"device[ =]1"):
                first.launch(INCREMENT, 1, 32, InOut(use), 4, 1)
            with pytest.raises(CuglueError, match=r"device[ =]1"):
                first.read(use)
        with pytest.raises(UsageError, match="device 1"):
            Runtime(two.here, resource=second.resource)
        with pytest.raises(CuglueError, match="device 1"):
            first.empty(4, second.stream(0))
        mine.close()
