"""Streams of the simulated device as objects, the current one, and many threads at once."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from cuglue.core.stream import as_stream
from cuglue.driver.protocol import CopyKind, RegisterFlags
from cuglue.driver.sim import HazardError, SimDriver
from cuglue.errors import CuglueError, DriverError, UsageError


def test_a_stream_object_is_a_stream_until_dropped() -> None:
    sim = SimDriver()
    stream = sim.Stream()
    assert sim.inventory()["streams"] == 1
    assert stream.__cuda_stream__() == (0, stream.ptr)
    ptr = sim.malloc(8, 0)
    sim.fill_async(ptr, 1, 8, stream.ptr)
    sim.fill_async(ptr, 2, 8, stream.ptr)
    assert not stream.query()
    stream.synchronize()
    assert stream.query()
    handle = stream.ptr
    stream.close()
    stream.close()
    assert stream.ptr == 0
    dropped = sim.Stream()
    assert dropped.ptr == handle
    del dropped
    gc.collect()
    assert sim.inventory()["streams"] == 0


def test_the_current_stream_is_each_threads_own_and_nests() -> None:
    sim = SimDriver(devices=2)
    first, second = sim.Stream(), sim.Stream(device=1)
    assert sim.stream_current(0) == 0
    elsewhere: list[object] = []
    with first:
        assert sim.stream_current(0) is first
        assert sim.stream_current(1) == 0, "it belongs to another device"
        with second, first:
            assert sim.stream_current(0) is first
        assert sim.stream_current(0) is first
        with sim.current_stream(second):
            assert sim.stream_current(1) is second
        thread = threading.Thread(target=lambda: elsewhere.append(sim.stream_current(0)))
        thread.start()
        thread.join()
    assert elsewhere == [0]
    assert sim.stream_current(0) == 0
    sim.current_stream(first)
    assert sim.stream_current(0) is first
    sim.current_stream(None)
    sim.current_stream(as_stream(first, driver=sim))
    assert sim.stream_current(0) == first.ptr
    with pytest.raises(UsageError):
        sim.current_stream("main")
    sim.current_stream(None)


def test_a_stream_that_becomes_current_brings_its_device() -> None:
    sim = SimDriver(devices=2)
    first, second = sim.Stream(), sim.Stream(device=1)
    assert sim.device_current() == 0
    with second:
        assert sim.device_current() == 1
        with first:
            assert sim.device_current() == 0
        with sim.current_stream(0):
            assert sim.device_current() == 1, "that of the current device"
            assert sim.stream_current(1) == 0
        assert sim.device_current() == 1
        assert sim.stream_current(1) is second
    with sim.current_stream(as_stream(second, device=1, driver=sim)):
        assert sim.device_current() == 1, "known by its number"
    with sim.current_stream(as_stream(0, device=1, driver=sim)):
        assert (sim.device_current(), type(sim.stream_current(1))) == (1, int)
    assert sim.device_current() == 0


def test_each_device_has_its_own_current_stream() -> None:
    """As for CuPy: one device is current, and each remembers its stream."""
    sim = SimDriver(devices=2)
    first, second = sim.Stream(), sim.Stream(device=1)
    elsewhere: list[int] = []
    with first, sim.current_device(1):
        assert (sim.device_current(), sim.stream_current(0), sim.stream_current(1)) == (1, first, 0)
        with second, sim.current_device(0):
            assert (sim.device_current(), sim.stream_current(0), sim.stream_current(1)) == (0, first, second)
        assert (sim.device_current(), sim.stream_current(1)) == (1, 0)
        thread = threading.Thread(target=lambda: elsewhere.append(sim.device_current()))
        thread.start()
        thread.join()
    assert elsewhere == [0]
    assert (sim.device_current(), sim.stream_current(0)) == (0, 0)
    chosen = sim.current_device(1)
    assert sim.device_current() == 1
    chosen.restore()
    for wrong in (2, -1):
        with pytest.raises(DriverError, match="0 to 1"):
            sim.current_device(wrong)


def test_a_dropped_stream_of_a_poisoned_device_is_silent() -> None:
    sim = SimDriver()
    stream = sim.Stream()

    def broken(grid: object, block: object) -> None:
        raise ValueError("broken")

    kernel = sim.kernel_load("broken", "", (), 0, broken)
    sim.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (), (), 0, stream.ptr)
    with pytest.raises(DriverError, match="broken") as caught:
        stream.synchronize()
    assert isinstance(caught.value.__cause__, ValueError)
    del stream
    gc.collect()


def test_each_thread_has_its_own_per_thread_stream() -> None:
    """Threads come and go, and their idents with them; the streams do not change hands."""
    sim, ptr = SimDriver(), 0
    ptr = sim.malloc(8, 0)
    for value in range(2):
        thread = threading.Thread(target=sim.fill_async, args=(ptr, value, 8, 2))
        thread.start()
        thread.join()
    with pytest.raises(HazardError):
        sim.device_synchronize(0)


def test_two_devices_are_apart_and_events_tie_them() -> None:
    sim = SimDriver(devices=2)
    streams = [sim.stream_create(d) for d in (0, 1)]
    memory = [sim.malloc(8, d) for d in (0, 1)]
    event = sim.event_create(0)
    sim.fill_async(memory[0], 3, 8, streams[0])
    sim.event_record(event, streams[0])
    sim.stream_wait_event(streams[1], event)
    sim.copy_async(memory[1], memory[0], 8, CopyKind.D2D, streams[1])
    sim.stream_synchronize(streams[1])
    assert sim.host_view(memory[1], 1, False)[0] == 3
    for call in (
        lambda: sim.event_record(event, streams[1]),
        lambda: sim.malloc_async(8, streams[0], 1),
        lambda: sim.malloc(8, 2),
        lambda: sim.device_synchronize(-1),
    ):
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.code in (400, 101)


def test_a_host_write_before_an_unmap_is_found() -> None:
    sim = SimDriver()
    gl, stream = sim.fake_gl(), sim.stream_create(0)
    resource = sim.gl_register_buffer(gl.buffer_object(64), RegisterFlags.NONE, 0)
    sim.graphics_map([resource], stream)
    ptr, _ = sim.graphics_pointer(resource)
    sim.stream_synchronize(stream)
    data = np.frombuffer(sim.host_view(ptr, 64, True), np.uint8)
    data[:8] = 1
    sim.fill_async(ptr + 8, 2, 8, stream)
    data[12] = 3
    sim.graphics_unmap([resource], stream)
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert [h.kind for h in caught.value.hazards] == ["host write that nothing orders"]


def test_many_threads_share_a_driver() -> None:
    sim, errors = SimDriver(7), []
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            barrier.wait()
            stream, target = sim.stream_create(0), np.zeros(256, np.uint8)
            for step in range(40):
                ptr = sim.malloc_async(256, stream, 0)
                sim.fill_async(ptr, (number + step) % 256, 256, stream)
                sim.copy_async(target.ctypes.data, ptr, 256, CopyKind.D2H, stream)
                sim.free_async(ptr, stream, 0)
                sim.stream_synchronize(stream) if step % 2 else sim.device_synchronize(0)
                assert (target == (number + step) % 256).all()
            sim.stream_destroy(stream)
        except (AssertionError, CuglueError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sim.hazards == []
    assert sim.inventory()["streams"] == sim.inventory()["bytes"] == 0
