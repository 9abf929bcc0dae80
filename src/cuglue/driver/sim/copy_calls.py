"""Driver calls that copy and fill linear memory.

Owns how an address range becomes rows of bytes and a use. Must not know arrays, kernels or graphs.

Host memory that is not pinned (pageable) is not followed: a copy from it takes the bytes at the call, a copy to it
writes them when it runs, so a program that does not wait reads old bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..protocol import Access, CopyKind, MemoryType
from . import codes
from .core import Core
from .memory import Bytes, host_bytes
from .ranges import Range, linear, pitched
from .state import Touch, driver_call

Rows = Callable[[], Bytes]
#: Memory that other devices do not reach without being told so.
_OF_ONE_DEVICE = ("malloc_async", "vmm")


class CopyCalls(Core):
    """Copies between linear memories, and fills."""

    @driver_call
    def copy_async(self, dst: int, src: int, nbytes: int, kind: CopyKind, stream: int) -> None:
        """Linear copy."""
        self._copy("copy_async", dst, src, linear(0, nbytes), linear(0, nbytes), kind, stream)

    @driver_call
    def copy_2d_async(
        self,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        height: int,
        kind: CopyKind,
        stream: int,
    ) -> None:
        """Copy rows."""
        if min(dst_pitch, src_pitch) < width:
            raise codes.refused(
                codes.INVALID_PITCH,
                "copy_2d_async",
                "pitch",
                got=f"{dst_pitch} and {src_pitch}",
                expected=f"at least the width of {width} bytes",
            )
        to, source = pitched(0, width, height, dst_pitch), pitched(0, width, height, src_pitch)
        self._copy("copy_2d_async", dst, src, to, source, kind, stream)

    @driver_call
    def fill_async(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """Set bytes."""
        queue = self._queue(stream, "fill_async")
        if nbytes < 0 or not 0 <= value <= 255:
            raise codes.refused(codes.INVALID_VALUE, "fill_async", "fill", got=f"{nbytes} bytes of {value}")
        if nbytes == 0:
            return
        reach = self._reach(ptr, linear(0, nbytes), Access.WRITE, "fill_async")
        data = rows(reach.data, reach.range)
        self._submit(queue, "fill_async", lambda: data.fill(value), reach.touches)

    def _copy(
        self, call: str, dst: int, src: int, to: Range, source: Range, kind: CopyKind, stream: int
    ) -> None:
        queue = self._queue(stream, call)
        if min(to.width, to.rows) < 0:
            raise codes.refused(
                codes.INVALID_VALUE, call, "extent", got=f"{to.rows} rows of {to.width} bytes"
            )
        if to.width == 0 or to.rows == 0:
            return
        read, reads = self._side(src, source, Access.READ, kind is CopyKind.H2D, call)
        write, writes = self._side(dst, to, Access.WRITE, kind is CopyKind.D2H, call)
        self._reached([*reads, *writes], self._device_of(stream), call)
        if not reads and queue.capture is None:
            early = read().copy()
            read = lambda: early  # noqa: E731 - the same shape of function as the other case
        shape = (-1, min(to.width, source.width))

        def run() -> None:
            write().reshape(shape)[...] = read().reshape(shape)

        self._submit(queue, call, run, [*reads, *writes])

    def _reached(self, touches: list[Touch], device: int, call: str) -> None:
        """Refuse what the device of the call does not reach: stream-ordered and virtual memory of another."""
        for allocation, _, _ in touches:
            if allocation.kind in _OF_ONE_DEVICE and allocation.device != device:
                raise codes.refused(
                    codes.INVALID_VALUE,
                    call,
                    f"memory of device {allocation.device}",
                    got=f"a call on device {device}",
                    expected="that device current, or a stream that says it",
                )

    def _side(
        self, ptr: int, range: Range, access: Access, host: bool, call: str
    ) -> tuple[Rows, list[Touch]]:
        """One end of a copy: how to reach its rows when it runs, and its use if it is memory of ours."""
        allocation = self._space.find(ptr)
        if host and (allocation is None or not (allocation.live or allocation.type is MemoryType.PINNED)):
            return lambda: rows(host_bytes(ptr, range.end), range), []
        if allocation is not None and (allocation.type is MemoryType.PINNED) and not host:
            raise codes.refused(
                codes.INVALID_VALUE, call, f"host address {ptr:#x}", expected="a device address"
            )
        if allocation is not None and (allocation.type is MemoryType.DEVICE) and host:
            raise codes.refused(
                codes.INVALID_VALUE, call, f"device address {ptr:#x}", expected="a host address"
            )
        reach = self._reach(ptr, range, access, call)
        view = rows(reach.data, reach.range)
        return lambda: view, reach.touches


def rows(data: Bytes, range: Range) -> Bytes:
    """The bytes of ``range`` as ``(rows, width)``, without a copy."""
    if range.rows == 1:
        return data[range.start : range.end].reshape(1, range.width)
    return np.lib.stride_tricks.as_strided(data[range.start :], (range.rows, range.width), (range.pitch, 1))
