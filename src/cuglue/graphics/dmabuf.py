"""Whether an imported dma-buf really is the memory that its owner means.

Owns the check by pattern. A driver may take a foreign dma-buf and map other pages: then what is read is wrong, and no
call says so. Must not know how it was imported.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from ..core.stream import as_stream
from ..driver.protocol import CopyKind
from ..errors import UnsupportedError
from ..exchange.copies import in_flight
from .extmemory import ExternalMemory, Range, check_external
from .imports import check_descriptor
from .undo import Undo

SAMPLE_BYTES = 64
SAMPLES = 16
_SYNC = 0x40086200  # DMA_BUF_IOCTL_SYNC
_START, _END, _READ_WRITE = 0, 4, 3


def verify(memory: ExternalMemory, fd: int) -> None:
    """Write a pattern through the host's mapping, read it through the device's, and put the old bytes back.

    A few bytes of pages all over the buffer are changed for that time: its owner must not use it meanwhile.

    Ordering: blocks the host.

    Raises:
        UnsupportedError: the host cannot map the buffer, or the device sees other bytes.
        CaptureError: the current stream captures a graph. UsageError: no memory, or no open descriptor.
    """
    check_external(memory)
    fd = check_descriptor(fd)
    with Undo(memory.state.retire) as undo:
        range_ = Range(memory, 0, memory.size)
        undo.then(range_.withdraw)
        wrong = _differing(memory, range_.ptr, fd)
        range_.withdraw()
    if wrong is not None:
        raise UnsupportedError(
            f"{memory!r}: the device maps other memory than its owner",
            got=f"other bytes at offset {wrong}",
            expected="the pattern that the host wrote there",
            hint="Share the memory through Vulkan (kind='opaque'), or copy it through the host",
            reason="dma_buf",
        )


def _differing(memory: ExternalMemory, ptr: int, fd: int) -> int | None:
    """Offset of a sample that the device sees otherwise than the host; None if there is none."""
    state = memory.state
    stream = as_stream(None, device=memory.device, driver=state.driver)
    stream.refuse_capture("verify imported memory")
    try:
        host = mmap.mmap(fd, memory.size)
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"{memory!r} cannot be verified: the host cannot map it",
            got=str(error),
            hint="Share the memory through Vulkan (kind='opaque'), or copy it through the host",
            reason="dma_buf",
        ) from error
    offsets = _offsets(memory.size)
    with host:
        _sync(fd, _START)
        kept = [host[at : at + SAMPLE_BYTES] for at in offsets]
        wrote = [os.urandom(len(bytes_)) for bytes_ in kept]
        try:
            for at, pattern in zip(offsets, wrote, strict=True):
                host[at : at + len(pattern)] = pattern
            _sync(fd, _END)
            seen = [np.zeros(len(pattern), np.uint8) for pattern in wrote]
            with in_flight(seen, stream):
                for at, out in zip(offsets, seen, strict=True):
                    state.driver.copy_async(
                        out.ctypes.data, ptr + at, out.nbytes, CopyKind.D2H, stream.handle
                    )
        finally:
            _sync(fd, _START)
            for at, bytes_ in zip(offsets, kept, strict=True):
                host[at : at + len(bytes_)] = bytes_
            _sync(fd, _END)
    for at, pattern, out in zip(offsets, wrote, seen, strict=True):
        if out.tobytes() != pattern:
            return at
    return None


def _offsets(nbytes: int) -> list[int]:
    """The first bytes of up to :data:`SAMPLES` pages, the last one among them."""
    pages = max(-(-nbytes // mmap.PAGESIZE), 1)
    count = min(pages, SAMPLES)
    chosen = {round(i * (pages - 1) / max(count - 1, 1)) for i in range(count)}
    return [page * mmap.PAGESIZE for page in sorted(chosen)]


def _sync(fd: int, which: int) -> None:
    """Tell the exporter that the host begins or ends to use the buffer; memory that is no dma-buf needs no telling."""
    import fcntl
    import struct

    try:
        fcntl.ioctl(fd, _SYNC, struct.pack("Q", which | _READ_WRITE))
    except OSError:
        pass
