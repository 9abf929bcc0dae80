"""Fences: waits and signals in stream order, recorded writes, and what a map does about them (A8, A9)."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from graphics.shared_memory import descriptors, memory_file, settled
from interrupts import interrupted

import cuglue
from cuglue import external
from cuglue.core.device import device_state
from cuglue.driver.protocol import ArrayInfo, CaptureMode, TexelKind
from cuglue.errors import (
    CaptureError,
    ClosedError,
    DriverError,
    MapUnavailableError,
    PublishError,
    StreamMisuse,
    UsageError,
)
from cuglue.graphics.handle import CudaHandle
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import peek

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is a Linux call")

INFO = ArrayInfo(8, 4, 0, 8, 4, TexelKind.UINT)
N = 128


class Owner:
    """Another API: memory, a timeline, and the host's way to both."""

    def __init__(self, driver: Any, fence: external.Fence, semaphore: int, memory: int) -> None:
        self.driver = driver
        self.fence = fence
        self._semaphore = semaphore
        self._memory = memory

    @property
    def value(self) -> int:
        return int.from_bytes(os.pread(self._semaphore, 8, 0), "little")

    def signal(self, value: int) -> None:
        os.pwrite(self._semaphore, value.to_bytes(8, "little"), 0)

    def write(self, value: int) -> None:
        os.pwrite(self._memory, bytes([value]) * N, 0)

    def read(self) -> bytes:
        return os.pread(self._memory, N, 0)

    def image(self) -> CudaHandle:
        image = external.import_image(self._memory, width=8, height=4, format="RGBA8")
        try:
            return CudaHandle.from_external_image(image, fence=self.fence)
        except BaseException:
            image.close()
            raise

    def buffer(self) -> CudaHandle:
        memory = external.import_fd(self._memory, allocation_size=4096)
        return CudaHandle.from_external(memory, size=N, fence=self.fence)


@contextmanager
def owner_of(driver: Any, *, tells: bool = True, kind: Any = "timeline") -> Iterator[Owner]:
    semaphore, memory = driver.semaphore_fd(), memory_file(4096)
    made: list[Owner] = []

    def completed() -> int:
        return made[0].value

    with external.import_semaphore_fd(semaphore, kind, completed if tells else None) as fence:
        made.append(Owner(driver, fence, semaphore, memory))
        yield made[0]
    os.close(semaphore)
    os.close(memory)


@pytest.fixture
def owner(driver: Any) -> Iterator[Owner]:
    with owner_of(driver) as made:
        yield made


@pytest.fixture(params=["image", "buffer"])
def handle(request: pytest.FixtureRequest, owner: Owner) -> Iterator[CudaHandle]:
    with getattr(owner, request.param)() as made:
        yield made


def waits(driver: Any) -> int:
    return int(driver.counts["semaphore_wait"])


# --- A8: the table --------------------------------------------------------------------------------------------------
def test_A8_nothing_recorded_waits_for_nothing(owner: Owner, handle: CudaHandle) -> None:
    owner.write(1)
    with handle.map() as m:
        assert (peek(m) == 1).all()
    handle.record_write(0)
    with handle.map():
        pass
    assert waits(owner.driver) == 0


def test_A8_a_map_waits_for_what_was_recorded(owner: Owner, handle: CudaHandle) -> None:
    """On the GPU: the host goes on, and reads the new bytes once it waits for the map's stream."""
    owner.write(1)
    handle.record_write(5)
    with handle.map() as m:
        assert waits(owner.driver) == 1
        assert not owner.driver.stream_query(m.stream.handle)
        owner.write(2)
        owner.signal(5)
        assert (peek(m) == 2).all()


def test_A8_only_the_largest_of_two_values_is_waited_for(owner: Owner, handle: CudaHandle) -> None:
    handle.record_write(7)
    handle.record_write(3)
    owner.signal(7)
    with cuglue.testing.trace(only=["semaphore_wait"]) as calls, handle.map():
        pass
    assert [call.args[1] for call in calls] == [7]


def test_A8_a_value_is_waited_for_once(owner: Owner, handle: CudaHandle) -> None:
    """Other streams come after the one that waited."""
    other = owner.driver.Stream()
    handle.record_write(1)
    with handle.map():
        pass
    with handle.map(other) as m:
        assert waits(owner.driver) == 1
        assert not owner.driver.stream_query(m.stream.handle)
        owner.write(3)
        owner.signal(1)
        assert (peek(m) == 3).all()


def test_A8_the_value_is_read_when_the_map_is_made(owner: Owner, handle: CudaHandle) -> None:
    with handle.map() as m:
        handle.record_write(9)
        m.stream.synchronize()
    assert waits(owner.driver) == 0
    owner.signal(9)
    with handle.map():
        assert waits(owner.driver) == 1


def test_A8_a_wait_that_is_refused_declines(owner: Owner, handle: CudaHandle) -> None:
    handle.record_write(4)
    with fail("semaphore_wait"), pytest.raises(MapUnavailableError) as caught:
        handle.map()
    assert vars(caught.value)["reason"] == "unordered_write"
    assert isinstance(caught.value.__cause__, DriverError)
    assert owner.driver.counts["copy_from_array_async"] == 0
    owner.signal(4)
    with handle.map():
        pass


def test_A8_a_closed_fence_declines(owner: Owner, handle: CudaHandle) -> None:
    owner.fence.close()
    with handle.map():
        pass
    handle.record_write(1)
    assert handle.try_map() is None
    assert handle.try_map_mut() is None


def test_A8_a_second_map_waits_too(owner: Owner) -> None:
    """It copies the image in again."""
    with owner.image() as handle, handle.map() as first:
        owner.write(6)
        handle.record_write(2)
        owner.signal(2)
        with handle.map():
            assert waits(owner.driver) == 1
            assert (peek(first) == 6).all()


def test_A8_a_wait_outlives_the_map_that_queued_it(owner: Owner) -> None:
    """The map failed after the wait was queued; one on another stream comes after the write all the same."""
    one, two = owner.driver.Stream(), owner.driver.Stream()
    with owner.image() as handle:
        with handle.map(two) as m:  # so that the memory of the copy orders nothing below
            m.stream.synchronize()
        handle.record_write(1)
        with fail("copy_from_array_async"), pytest.raises(DriverError):
            handle.map(one)
        with handle.map(two) as m:
            assert waits(owner.driver) == 1
            owner.driver.pump()
            owner.write(4)
            owner.signal(1)
            assert (peek(m) == 4).all()


def test_A8_waiting_forgets_no_earlier_use(owner: Owner) -> None:
    """A publish on one stream, then a recorded write and a map on another: the simulated device sees any gap."""
    driver, one, two = owner.driver, owner.driver.Stream(), owner.driver.Stream()
    with owner.image() as handle:
        with handle.map_mut(one) as m:
            driver.fill_async(m.device_ptr, 0x11, m.size, m.stream.handle)
        handle.record_write(5)
        owner.signal(5)
        with handle.map(two) as m:
            assert (peek(m) == 0x11).all()


@pytest.mark.parametrize("value", [-1, 2**64, True, 1.0, None, "1"])
def test_bad_values(owner: Owner, handle: CudaHandle, value: Any) -> None:
    for call in (handle.record_write, owner.fence.wait, owner.fence.signal):
        with pytest.raises(UsageError):
            call(value)
    with handle.map():
        pass
    assert waits(owner.driver) == 0


def test_recording_on_a_closed_handle(owner: Owner) -> None:
    handle = owner.image()
    handle.close()
    with pytest.raises(ClosedError):
        handle.record_write(1)


def test_records_from_several_threads_keep_the_largest(owner: Owner, handle: CudaHandle) -> None:
    values = np.random.default_rng(0).permutation(400) + 1

    def record(part: Any) -> None:
        for value in part:
            handle.record_write(int(value))

    threads = [threading.Thread(target=record, args=(part,)) for part in np.array_split(values, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owner.signal(400)
    with cuglue.testing.trace(only=["semaphore_wait"]) as calls, handle.map():
        pass
    assert [call.args[1] for call in calls] == [400]


# --- timeout --------------------------------------------------------------------------------------------------------
def test_A8_row_59_timeout_polls_the_owner_before_anything_is_queued(
    owner: Owner, handle: CudaHandle
) -> None:
    handle.record_write(1)
    before = owner.driver.inventory()
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        handle.map(timeout=0.05)
    assert 0.04 < time.monotonic() - start < 5
    assert isinstance(caught.value, external.WriteTimeoutError)
    assert "no signal of 1" in str(caught.value)
    assert waits(owner.driver) == 0
    assert owner.driver.inventory() == before
    assert handle.try_map_mut(timeout=0) is None
    owner.signal(1)
    with handle.map(timeout=0) as m:
        m.stream.synchronize()


def test_A8_timeout_lets_other_threads_run(owner: Owner, handle: CudaHandle) -> None:
    handle.record_write(2)
    timer = threading.Timer(0.05, owner.signal, [2])
    timer.start()
    with handle.map(timeout=20) as m:
        m.stream.synchronize()
    timer.join()


def test_A8_timeout_needs_an_owner_who_tells(driver: Any) -> None:
    with owner_of(driver, tells=False) as owner, owner.image() as handle:
        with handle.map(timeout=0):
            pass
        handle.record_write(1)
        with pytest.raises(UsageError, match="completed="):
            handle.map(timeout=1)
        with pytest.raises(UsageError, match="completed="):
            owner.fence.reached(1)
        assert waits(driver) == 0


def test_without_a_record_a_timeout_asks_nobody(owner: Owner, handle: CudaHandle) -> None:
    def ask() -> int:
        raise AssertionError("asked")

    owner.fence._completed = ask
    with handle.map(timeout=0.0):
        pass


# --- publishing -----------------------------------------------------------------------------------------------------
def test_A15_publishing_signals_the_next_value_and_blocks_nothing(owner: Owner) -> None:
    driver = owner.driver
    with owner.image() as handle:
        owner.signal(4)
        handle.record_write(4)
        with handle.map_mut() as m:
            driver.fill_async(m.device_ptr, 0x33, m.size, m.stream.handle)
            before = driver.counts["stream_synchronize"]
        assert driver.counts["stream_synchronize"] == before
        assert handle.handed_back == 5
        assert owner.value == 4
        driver.device_synchronize(0)
        assert owner.value == 5
        assert owner.read() == b"\x33" * N


def test_frames_take_turns(owner: Owner) -> None:
    """The owner writes and signals, CUDA adds one and signals; nobody waits on the host in between."""
    driver = owner.driver
    with owner.image() as handle:
        value = 0
        for frame in range(5):
            owner.write(10 * frame)
            value += 1
            owner.signal(value)
            handle.record_write(value)
            with handle.map_mut() as m:
                driver.fill_async(m.device_ptr, 10 * frame + 1, 16, m.stream.handle)
            value = handle.handed_back
            assert value == 2 * (frame + 1)
            driver.device_synchronize(0)
            assert owner.value == value
            assert owner.read() == bytes([10 * frame + 1]) * 16 + bytes([10 * frame]) * (N - 16)


def test_reading_and_cancelling_signal_nothing(owner: Owner) -> None:
    with owner.image() as handle:
        with handle.map():
            pass
        with handle.map_mut() as m:
            m.cancel()
        assert handle.handed_back == 0
    assert owner.driver.counts["semaphore_signal"] == 0


def test_a_signal_that_is_refused_can_be_tried_again(owner: Owner) -> None:
    with owner.image() as handle:
        m = handle.map_mut()
        owner.driver.fill_async(m.device_ptr, 1, N, m.stream.handle)
        with fail("semaphore_signal"), pytest.raises(PublishError):
            m.release()
        assert handle.handed_back == 0
        m.release()
        assert handle.handed_back == 1
        owner.driver.device_synchronize(0)
        assert owner.read() == b"\x01" * N


def test_A9_one_fence_serves_several_handles_and_outlives_them(owner: Owner) -> None:
    with owner.image() as first, owner.buffer() as second:
        first.record_write(1)
        second.record_write(2)
        owner.signal(2)
        with first.map_mut():
            pass
        assert first.handed_back == 3
        with second.map():
            pass
    assert not owner.fence.closed
    assert settled(owner.driver)["semaphores"] == 1


def test_A9_without_a_fence_what_is_not_recorded_maps(driver: Any) -> None:
    """A semaphore that cannot be imported stops only what needs it."""
    pipe = os.pipe()
    with pytest.raises(DriverError):
        external.import_semaphore_fd(pipe[0])
    fd = memory_file(4096)
    with CudaHandle.from_external(external.import_fd(fd, allocation_size=4096)) as handle:
        with handle.map():
            pass
        handle.record_write(1)
        assert handle.try_map() is None
    for each in (*pipe, fd):
        os.close(each)


# --- fences by hand -------------------------------------------------------------------------------------------------
def test_wait_and_signal_order_streams(owner: Owner) -> None:
    driver, one, two = owner.driver, owner.driver.Stream(), owner.driver.Stream()
    ptr = driver.malloc(64, 0)
    driver.fill_async(ptr, 1, 64, one.ptr)
    owner.fence.signal(1, one)
    owner.fence.wait(1, two)
    driver.fill_async(ptr, 2, 64, two.ptr)  # a hazard unless the fence orders it
    two.synchronize()
    assert bytes(driver.host_view(ptr, 64, False)) == b"\x02" * 64
    assert owner.value == 1
    assert owner.fence.reached(1)
    assert not owner.fence.reached(2)
    one.synchronize()
    driver.free(ptr, 0)


def test_binary_fences_pass_once(driver: Any) -> None:
    with owner_of(driver, kind="binary", tells=False) as owner:
        one, two = driver.Stream(), driver.Stream()
        for _ in range(3):
            owner.fence.signal(0, one)
            owner.fence.wait(0, two)
            two.synchronize()
        assert owner.value == 0
        assert repr(owner.fence) == "Fence(binary, device=0)"


def test_a_binary_fence_is_waited_for_once_per_record(driver: Any) -> None:
    with owner_of(driver, kind="binary", tells=False) as owner, owner.image() as handle:
        for frame in range(1, 4):
            owner.write(frame)
            owner.signal(1)
            handle.record_write(frame)
            for _ in range(2):
                with handle.map() as m:
                    assert (peek(m) == frame).all()
        assert waits(driver) == 3


def test_a_timeline_never_goes_back(owner: Owner) -> None:
    owner.fence.signal(5)
    for value in (5, 4, 0):
        with pytest.raises(UsageError, match="more than 5"):
            owner.fence.signal(value)
    owner.fence.note(8)
    with pytest.raises(UsageError, match="more than 8"):
        owner.fence.signal(8)
    owner.fence.signal(9)
    owner.driver.device_synchronize(0)
    assert owner.value == 9


def test_captures_are_refused_before_the_driver_is_called(owner: Owner) -> None:
    driver, stream = owner.driver, owner.driver.Stream()
    driver.capture_begin(stream.ptr, CaptureMode.THREAD_LOCAL)
    for call in (owner.fence.wait, owner.fence.signal):
        with pytest.raises(CaptureError):
            call(1, stream)
    driver.graph_destroy(driver.capture_end(stream.ptr))
    assert owner.fence.newest == 0


def test_streams_of_another_device() -> None:
    from cuglue.driver.sim import SimDriver

    with cuglue.use_driver(SimDriver(devices=2)) as driver, owner_of(driver) as owner:
        there = driver.Stream(device=1)  # type: ignore[attr-defined]
        with pytest.raises(StreamMisuse):
            owner.fence.wait(1, there)
        array = driver.array_create(INFO, 1)
        with pytest.raises(UsageError, match="same device"):
            CudaHandle.from_array(array, texels=8, rows=4, bytes_per_texel=4, fence=owner.fence, device=1)
        driver.array_destroy(array)


def test_a_closed_fence_refuses(owner: Owner) -> None:
    owner.fence.close()
    owner.fence.close()
    for call in (owner.fence.wait, owner.fence.signal):
        with pytest.raises(ClosedError):
            call(1)
    with pytest.raises(ClosedError):
        owner.image()
    assert repr(owner.fence) == "Fence(timeline, device=0, closed)"


def test_closing_waits_for_what_is_queued_without_blocking(owner: Owner) -> None:
    """Destroying a semaphore under a wait is undefined; the simulated device would report it."""
    stream = owner.driver.Stream()
    owner.fence.wait(1, stream)
    owner.fence.close()
    assert owner.driver.inventory()["semaphores"] == 1
    owner.signal(1)
    assert settled(owner.driver)["semaphores"] == 0


def test_closing_waits_for_a_signal_too(owner: Owner) -> None:
    stream, gate = owner.driver.Stream(), owner.driver.semaphore_fd()
    with external.import_semaphore_fd(gate) as held:
        held.wait(1, stream)
        owner.fence.signal(1, stream)
        owner.fence.close()
        assert owner.driver.inventory()["semaphores"] == 2
        os.pwrite(gate, b"\x01", 0)
    assert settled(owner.driver)["semaphores"] == 0
    assert owner.value == 1
    os.close(gate)


def test_closing_an_idle_fence_frees_it_at_once(owner: Owner) -> None:
    owner.fence.signal(1)
    owner.driver.device_synchronize(0)
    owner.fence.close()
    assert owner.driver.inventory()["semaphores"] == 0


def test_a_forgotten_fence_is_freed_with_a_warning(driver: Any) -> None:
    fd = driver.semaphore_fd()
    before = descriptors()
    fence = external.import_semaphore_fd(fd)
    with pytest.warns(ResourceWarning, match="test_fences_semaphores.py.*never closed"):
        del fence
    gc.collect()
    assert settled(driver)["semaphores"] == 0
    assert descriptors() == before
    os.close(fd)


def test_A4_semaphores_leave_the_callers_descriptor(driver: Any) -> None:
    fd = driver.semaphore_fd()
    before = descriptors()
    for kind in ("timeline", "binary"):
        external.import_semaphore_fd(fd, kind).close()  # type: ignore[arg-type]
        with fail("import_semaphore_fd"), pytest.raises(DriverError):
            external.import_semaphore_fd(fd, kind)  # type: ignore[arg-type]
    assert descriptors() == before
    os.fstat(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("make", "kind", "timeline"),
    [
        (external.D3D12Fence, "d3d12_fence", True),
        (external.D3D11Fence, "d3d11_fence", True),
        (external.OpaqueSemaphoreWin32, "opaque", False),
    ],
)
def test_fences_by_windows_handle(driver: Any, make: Any, kind: str, timeline: bool) -> None:
    fd = driver.semaphore_fd(3)
    value = driver.fake_win32(fd)
    with cuglue.testing.trace(only=["import_semaphore_win32"]) as calls:
        fence = external.import_semaphore_win32(make(value), lambda: 3)
    assert [call.args for call in calls] == [(kind, value, 0)]
    assert fence.timeline is timeline
    assert fence.reached(3)
    fence.wait(3)
    driver.device_synchronize(0)
    fence.close()
    os.close(fd)


# --- interrupts -----------------------------------------------------------------------------------------------------
POINTS = "graphics/fences.py", "core/stream.py", "core/block.py"


@pytest.mark.parametrize("call", ["wait", "signal"])
def test_an_interrupted_use_keeps_the_semaphore(driver: Any, call: str) -> None:
    """It was destroyed under what the driver had got already, and its value signalled a second time."""
    step = 0
    where: str | None = ""
    while where is not None:
        step += 1
        stream = driver.Stream()
        with owner_of(driver) as owner:
            owner.signal(3)
            before = driver.counts[f"semaphore_{call}"]
            where = interrupted(lambda owner=owner, s=stream: getattr(owner.fence, call)(3, s), step, *POINTS)
            queued = driver.counts[f"semaphore_{call}"] > before
            assert not queued or owner.fence.newest == 3, where
        device_state(driver, 0).retire.drain(block=True)
        assert driver.hazards == [], where
    assert step > 5


@pytest.mark.filterwarnings("ignore:.*never released:ResourceWarning")
@pytest.mark.parametrize("kind", ["timeline", "binary"])
def test_a_wait_that_was_interrupted_is_in_order_and_ends(driver: Any, kind: str) -> None:
    """Of a binary fence there is one signal: a second wait for it would hold its stream for ever."""
    step = 0
    where: str | None = ""
    while where is not None:
        step += 1
        one, two = (cuglue.as_stream(driver.Stream()) for _ in range(2))
        with owner_of(driver, kind=kind, tells=False) as owner, owner.image() as handle:
            handle.record_write(1)
            two.join(one)
            queued = driver.counts["semaphore_wait"]

            def act(handle: CudaHandle = handle, stream: Any = one) -> None:
                with handle.map(stream):
                    pass

            where = interrupted(act, step, *POINTS)
            queued = driver.counts["semaphore_wait"] - queued
            gc.collect()
            with handle.map(two) as m:
                assert not (queued and any(two.query() for _ in range(50))), where
                owner.write(2)
                owner.signal(1)
                if queued:
                    assert (peek(m) == 2).all(), where
                two.synchronize()
        device_state(driver, 0).retire.drain(block=True)
        assert driver.hazards == [], where
    assert step > 10
