"""A stream held until a test lets it go: proofs of order without sleeps.

Owns the kernel that waits for a word of pinned memory, which the host writes. It works alike on every driver. Must not
know what is proved with it.
"""

from __future__ import annotations

import ctypes
import time
from types import TracebackType
from typing import Any

import numpy as np

from ..core.stream import Stream, as_stream
from ..driver.protocol import Driver
from ..driver.registry import current_driver
from ..driver.sim import StillRunning
from ..errors import UsageError

_NAME = "cuglue_latch"
KERNELS: dict[str, str] = {
    _NAME: """
extern "C" __global__ void cuglue_latch(volatile unsigned int* released, long long most_nanoseconds)
{
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*released == 0 && now - start < most_nanoseconds);
}
"""
}


def _sim_latch(grid: object, block: object, released: int, most_nanoseconds: object) -> None:
    if not _word(released).value:
        raise StillRunning


def _word(ptr: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(ptr)


class Latch:
    """Holds ``stream`` from now on: work queued on it later does not run until :meth:`release`.

    A host wait for the stream before the release would wait for ever, so on CUDA the latch gives way after ``seconds``;
    a test that meets this limit proves nothing (:meth:`release` raises).

    Args:
        stream: an int handle, or anything that ``as_stream`` takes. A handle bypasses the library's own count of
            submitted work; use it where only the driver is tested.
        driver: the driver; None: the current one.
        device: ordinal, where an int handle cannot say.
        seconds: limit on CUDA.

    Ordering: the constructor, :meth:`release` only enqueue; :meth:`close` waits for the held kernel, not for more.
    Ownership: of a word of pinned memory and an event; ``with`` or :meth:`close` gives them back.
    """

    def __init__(
        self, stream: object, *, driver: Driver | None = None, device: int = 0, seconds: float = 20.0
    ) -> None:
        record: Stream | None = None
        if isinstance(stream, int):
            handle = stream
        else:
            record = as_stream(stream, driver=driver)
            handle, device, driver = record.handle, record.device, record.driver
        self._driver = driver = driver or current_driver()
        self._kernel = driver.kernel_load(_NAME, KERNELS[_NAME], (), device, _sim_latch)
        self._event = driver.event_create(device)
        self._word = driver.host_alloc(4)
        self._released = self._closed = False
        self._until = time.monotonic() + seconds
        _word(self._word).value = 0
        values: tuple[Any, ...] = (self._word, np.int64(seconds * 1e9))
        driver.kernel_launch(self._kernel, (1, 1, 1), (1, 1, 1), values, (None, None), 0, handle)
        driver.event_record(self._event, handle)
        if record is not None:
            record.submit()

    @property
    def held(self) -> bool:
        """True until :meth:`release`."""
        return not self._released

    def release(self) -> None:
        """Let the stream go on. It calls no driver: some captures would not survive that.

        Raises:
            UsageError: the limit of seconds is over, so the stream may have gone on by itself.
        """
        if self._released:
            return
        gave_way = time.monotonic() > self._until
        self._released = True
        _word(self._word).value = 1
        if gave_way:
            raise UsageError(
                "latch", got="a stream that may have gone on by itself", expected="one held until now"
            )

    def close(self) -> None:
        """Release, and give everything back. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            try:
                self.release()
            finally:
                self._driver.event_synchronize(self._event)
        finally:
            self._driver.event_destroy(self._event)
            self._driver.host_free(self._word)
            self._driver.kernel_unload(self._kernel)

    def __enter__(self) -> Latch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
