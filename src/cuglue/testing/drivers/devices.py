"""Promises about the default streams of a device that is not the current one.

Owns these tests: one for each call that takes a stream, so that none is ordered on the current device's stream of the
same number. That one is held meanwhile: work that went there by mistake does not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...driver.protocol import (
    PER_THREAD_STREAM,
    Access,
    ArrayInfo,
    CaptureMode,
    CaptureStatus,
    CopyKind,
    DeviceStream,
    Span,
    TexelKind,
)
from ..latch import Latch
from .case import DriverCase, N

DEFAULT_STREAMS = (0, 1, PER_THREAD_STREAM)
KERNELS: dict[str, str] = {
    "suite_five": """
extern "C" __global__ void suite_five(unsigned char* out)
{
    out[blockIdx.x * blockDim.x + threadIdx.x] = 5;
}
"""
}


def _five(grid: object, block: object, out: object) -> None:
    out[...] = 5  # type: ignore[index] # a view


class DeviceTests(DriverCase):
    """Does nothing where the device under test is the current one."""

    @contextmanager
    def elsewhere(self, number: int) -> Iterator[tuple[int, int]]:
        """``(handle, memory)`` of the device under test; the current one's stream of that number is held."""
        driver, here = self.driver, self.driver.device_current()
        handle, memory = DeviceStream(number, self.device), self.memory()
        driver.fill_async(memory, 0, N, handle)
        driver.device_synchronize(self.device)
        with Latch(number, driver=driver, device=here):
            yield handle, memory
            assert driver.device_current() == here

    def each(self, queue: Callable[[int, int], None], first: int = 0) -> None:
        """``queue(handle, memory)`` has to make all bytes 5, on every default stream from ``first`` on."""
        if self.device == self.driver.device_current():
            return
        own = self.stream()
        for number in DEFAULT_STREAMS[first:]:
            with self.elsewhere(number) as (handle, memory):
                queue(handle, memory)
                self.driver.device_synchronize(self.device)
                assert (self.get(memory, N, own) == 5).all(), f"stream {number}"

    def fives(self) -> int:
        """Memory whose bytes are all 5."""
        memory, stream = self.memory(), self.stream()
        self.driver.fill_async(memory, 5, N, stream)
        self.driver.stream_synchronize(stream)
        return memory

    def test_a_fill(self) -> None:
        """``fill_async``."""
        self.each(lambda handle, memory: self.driver.fill_async(memory, 5, N, handle))

    def test_copies(self) -> None:
        """``copy_async``, ``copy_2d_async``."""
        driver, fives = self.driver, self.fives()
        self.each(lambda handle, memory: driver.copy_async(memory, fives, N, CopyKind.D2D, handle))
        self.each(
            lambda handle, memory: driver.copy_2d_async(
                memory, 64, fives, 64, 64, N // 64, CopyKind.D2D, handle
            )
        )

    def test_copies_of_arrays(self) -> None:
        """``copy_to_array_async``, ``copy_from_array_async``."""
        if not self.can.surfaces:
            return
        driver, fives = self.driver, self.fives()
        array = driver.array_create(ArrayInfo(16, N // 64, 0, 8, 4, TexelKind.UINT), self.device)
        self._give_back.append(lambda: driver.array_destroy(array))

        def there_and_back(handle: int, memory: int) -> None:
            driver.copy_to_array_async(array, fives, 64, 64, N // 64, handle)
            driver.copy_from_array_async(memory, 64, array, 64, N // 64, handle)

        self.each(there_and_back)

    def test_memory_in_stream_order(self) -> None:
        """``malloc_async``, ``free_async``: they name the device."""
        if not self.can.async_memory:
            return
        driver = self.driver

        def through_a_block(handle: int, memory: int) -> None:
            ptr = driver.malloc_async(N, int(handle), self.device)
            driver.fill_async(ptr, 5, N, handle)
            driver.copy_async(memory, ptr, N, CopyKind.D2D, handle)
            driver.free_async(ptr, int(handle), self.device)

        self.each(through_a_block)

    def test_a_launch(self) -> None:
        """``kernel_launch``: the kernel belongs to the device."""
        kernel = self.kernel("suite_five", KERNELS["suite_five"], _five)
        self.each(
            lambda handle, memory: self.driver.kernel_launch(
                kernel,
                (N // 64, 1, 1),
                (64, 1, 1),
                (memory,),
                (Span(memory, N, Access.WRITE, (N,), "|u1", (1,)),),
                0,
                int(handle),
            )
        )

    def test_an_event(self) -> None:
        """``event_record``: the event belongs to the device."""
        event = self.event()

        def fill_and_wait(handle: int, memory: int) -> None:
            self.driver.fill_async(memory, 5, N, handle)
            self.driver.event_record(event, int(handle))
            self.driver.event_synchronize(event)

        self.each(fill_and_wait)

    def test_waits_and_questions(self) -> None:
        """``stream_synchronize``, ``stream_query``."""

        def fill_and_ask(handle: int, memory: int) -> None:
            self.driver.fill_async(memory, 5, N, handle)
            self.driver.stream_synchronize(handle)
            assert self.driver.stream_query(handle)

        self.each(fill_and_ask)

    def test_a_wait_for_an_event(self) -> None:
        """``stream_wait_event`` holds that stream and no other."""
        if self.device == self.driver.device_current():
            return
        driver, held, before, after = self.driver, self.stream(), self.event(), self.event()
        for number in DEFAULT_STREAMS:
            handle = DeviceStream(number, self.device)
            with Latch(held, driver=driver, device=self.device):
                driver.event_record(before, held)
                driver.stream_wait_event(handle, before)
                driver.event_record(after, handle)
                until = time.monotonic() + 0.05
                while time.monotonic() < until:
                    assert not driver.event_query(after), f"stream {number}"
                assert not driver.stream_query(handle)
            driver.stream_synchronize(handle)

    def test_a_host_callback_there(self) -> None:
        """``stream_callback``."""
        if not self.can.host_callbacks:
            return
        called: list[int] = []

        def fill_and_call(handle: int, memory: int) -> None:
            self.driver.fill_async(memory, 5, N, handle)
            self.driver.stream_callback(handle, lambda: called.append(handle))
            self.driver.stream_synchronize(handle)

        self.each(fill_and_call)
        assert called in ([], list(DEFAULT_STREAMS))

    def test_a_graph(self) -> None:
        """``capture_*`` of the one default stream that can capture; ``graph_upload``, ``graph_launch`` on each."""
        if not self.can.graphs or self.device == self.driver.device_current():
            return
        driver, target = self.driver, self.memory()
        handle = DeviceStream(PER_THREAD_STREAM, self.device)
        driver.capture_begin(handle, CaptureMode.THREAD_LOCAL)
        assert driver.capture_status(handle) is CaptureStatus.ACTIVE
        assert driver.capture_status(PER_THREAD_STREAM) is CaptureStatus.NONE
        driver.fill_async(target, 5, N, handle)
        graph = driver.capture_end(handle)
        assert driver.capture_status(handle) is CaptureStatus.NONE
        executable = driver.graph_instantiate(graph)
        self._give_back += [
            lambda: driver.graph_destroy(graph),
            lambda: driver.graph_exec_destroy(executable),
        ]

        def replay(handle: int, memory: int) -> None:
            driver.graph_upload(executable, handle)
            driver.graph_launch(executable, handle)
            driver.copy_async(memory, target, N, CopyKind.D2D, handle)

        self.each(replay)
