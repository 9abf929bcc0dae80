"""Reads: device memory to host bytes, of ours or of the caller.

Owns what keeps host bytes alive while the device writes them, and the future of a read (contracts C21, C22). Must not
know commands or kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.event import Event
from ..driver.protocol import CaptureStatus
from ..errors import CuglueError, DevicePoisoned, LayoutError
from ..layout import CopyShape, linear
from .buffers import Buffer
from .copies import DOWN, checked_operand, transfer
from .descriptors import CopyDescriptor, descriptor_of
from .futures import Future
from .hostbytes import kind_of, writable_bytes
from .hostmem import HostBuffer, address_of
from .lane import Lane
from .operands import Operand
from .pipeline import DOWNLOAD_FROM, Chunk, chunks, download
from .progress import STRIDE, Progress, Report
from .slab import Slab
from .staging import Source

_BYTES = np.dtype(np.uint8)
_NO_CAPTURE = CaptureStatus.NONE


def write_to_cpu(lane: Lane, descriptor: CopyDescriptor, data: Any, progress: Report | None = None) -> None:
    """Enqueue a copy of device memory into host bytes.

    Args:
        lane: where.
        descriptor: what is read.
        data: a writable C-contiguous buffer, exactly as large as the descriptor says.
        progress: ``progress(done_bytes, total_bytes)``, called as a large copy goes on and at its end: on this thread
            while it blocks, else on a thread of the library. What it raises is counted and logged.

    Ordering: only enqueues into pinned memory of the library; the bytes are there after a sync. Blocks the host for any
        other memory, as the driver does; the bytes are there when it returns. In a capture only enqueues; the bytes are
        there after a replay and a sync.
    Ownership: pinned memory is kept until the device has written it; in a capture the buffer is kept, and cannot be
        resized, as long as the graph lives. Otherwise nothing of it is kept.

    Raises:
        LayoutError: as :func:`write_to_gpu`, or a buffer that cannot be written.
    """
    if type(descriptor) is not CopyDescriptor:
        descriptor = descriptor_of("read", descriptor)
    view, target = writable_bytes(data)
    if target.nbytes != descriptor.nbytes:
        raise LayoutError(
            "buffer of a read",
            got=f"{target.nbytes} bytes",
            expected=f"{descriptor.nbytes}, as its descriptor says",
        )
    told = None if progress is None else Progress(progress, target.nbytes, lane.failures)
    if not target.nbytes:
        return
    lane.refuse_other_capture("copy host bytes")
    shape, operand = descriptor.copy_shape, checked_operand(lane, descriptor)
    array = descriptor.buffer
    nbytes = target.nbytes
    blocks = lane.window is None and (target.base is None or kind_of(target) is not Source.PINNED)
    if blocks and nbytes <= Slab.LARGEST:
        _receive_aside(lane, array, operand, shape, target)
        if told is not None:
            told.reach(nbytes)
    elif blocks and nbytes >= DOWNLOAD_FROM:

        def fetch(host: int, chunk: Chunk) -> None:
            transfer(lane, array, operand.at(chunk.target), chunk.shape, host, DOWN)

        download(lane, target, shape, fetch, told.reach if told is not None else None)
    else:
        try:
            _receive(lane, array, operand, shape, address_of(target), told, 0)
            if blocks:
                lane.wait()
            else:
                lane.hold((target, view), nbytes)
        except BaseException:  # the device may write it still
            lane.hold((target, view), nbytes)
            raise
    if lane.drops.due:
        lane.settle()


def read_async(
    lane: Lane, descriptors: CopyDescriptor | Sequence[CopyDescriptor], progress: Report | None = None
) -> Future[HostBuffer] | Future[list[HostBuffer]]:
    """Enqueue copies to the host; a future of the bytes, in the order of the descriptors.

    Args:
        lane: where.
        descriptors: what is read.
        progress: ``progress(done_bytes, total_bytes)``, called on a thread of the library as large copies go on and at
            the end, which may be after somebody has the result. What it raises is counted and logged.

    Ordering: only enqueues. Work queued later does not change the result, and the result does not wait for it.
    Ownership: buffers may be closed and the future dropped at once: what the device still needs stays alive.

    Raises:
        CaptureError: the stream captures a graph.
        LayoutError, StorageHandleNotFound, DriverError: of the first copy that fails. Copies already queued are waited
            for before their memory goes back.
    """
    single = not isinstance(descriptors, (list, tuple))
    asked: Sequence[Any] = [descriptors] if single else descriptors  # type: ignore[assignment] # just asked
    told: Progress | None = None
    if progress is not None:
        total = sum(descriptor_of("read", descriptor).nbytes for descriptor in asked)
        told = Progress(progress, total, lane.failures)
    return _read(lane, single, map(_piece, repeat(lane), asked), told)


def read_buffer(lane: Lane, buffer: Buffer, dtype: np.dtype[Any]) -> Future[HostBuffer]:
    """:func:`read_async` of all of a buffer, as one axis of elements; bytes behind the last one are left out."""
    count = buffer.nbytes // dtype.itemsize
    nbytes = count * dtype.itemsize
    operand = buffer.__cuglue_operand__(lane.place) if nbytes else None
    return _read(lane, True, [(buffer, operand, linear(nbytes), nbytes, (count,), dtype)], None)


#: What is read: the array, its memory, what moves, how many bytes that are, and the shape and type of the result.
_Piece = tuple[Any, Operand | None, CopyShape | None, int, tuple[int, ...], np.dtype[Any]]


def _piece(lane: Lane, descriptor: Any) -> _Piece:
    """What a descriptor says, checked."""
    if type(descriptor) is not CopyDescriptor:
        descriptor = descriptor_of("read", descriptor)
    nbytes, dtype = descriptor.nbytes, descriptor.dtype
    operand = moved = None
    if nbytes:
        operand, moved = checked_operand(lane, descriptor), descriptor.copy_shape
    if dtype is None:
        return descriptor.buffer, operand, moved, nbytes, (nbytes,), _BYTES
    return descriptor.buffer, operand, moved, nbytes, descriptor.shape, dtype


def _read(lane: Lane, single: bool, pieces: Iterable[_Piece], told: Progress | None) -> Reading:
    """Enqueue the copies of a read."""
    stream = lane.stream
    if not lane.named or stream.driver.capture_status(stream.handle) is not _NO_CAPTURE:
        stream.refuse_capture("read")
    reading = Reading(lane, single)  # keeps what the device may write, however this ends
    done = 0
    try:
        for array, operand, moved, nbytes, shape, dtype in pieces:
            memory, host = lane.host.memory(nbytes, True, lane.reclaim)
            reading.results.append(HostBuffer(shape, dtype, memory))
            if operand is None or moved is None:
                continue  # no bytes
            if told is None:
                transfer(lane, array, operand, moved, host, DOWN)
            else:
                _receive(lane, array, operand, moved, host, told, done)
                done += nbytes
        Future.__init__(reading, Event(stream), None)  # that the stream captures nothing was asked above
    except CuglueError:
        reading.wait()
        raise
    if lane.drops.due:
        lane.settle()
    return reading


def _receive_aside(
    lane: Lane, array: Any, operand: Operand, shape: CopyShape, target: npt.NDArray[np.uint8]
) -> None:
    """Copy few bytes by way of pinned memory, and wait for them: the driver waits too, and takes twice as long."""
    nbytes = target.nbytes
    with lane.stream.state.ordering:
        slab = lane.slab
        start, memory = slab.place(nbytes), slab.bytes
        transfer(lane, array, operand, shape, slab.address + start, DOWN)
        slab.until = lane.stream.seq
        slab.readers += 1
    lane.wait()
    slab.copy_out(memory, start, target)


def _receive(
    lane: Lane, array: Any, operand: Operand, shape: CopyShape, host: int, told: Progress | None, before: int
) -> None:
    """Enqueue the copy to host memory that stays where it is; ``before`` bytes of the transfer come before it."""
    if told is None:
        transfer(lane, array, operand, shape, host, DOWN)
        return
    for chunk in chunks(shape, STRIDE):
        transfer(lane, array, operand.at(chunk.target), chunk.shape, host + chunk.source, DOWN)
        told.reach_after(lane.stream.record(), before + chunk.source + chunk.shape.nbytes)


class Reading(Future[Any]):
    """The future of a read, which keeps the host buffers until their bytes are there.

    One that is dropped before gives them to the lane's drop queue, where they wait for the device.
    """

    __slots__ = ("_lane", "_single", "results")
    results: list[HostBuffer]

    def __init__(self, lane: Lane, single: bool) -> None:
        """A future only once all copies are queued: :meth:`Future.__init__` follows then."""
        self._lane = lane
        self._single = single
        self.results = []

    def _make(self) -> Any:
        """Inherited."""
        results = self.results
        if self._lane.host.simulated:
            for result in results:
                self._lane.host.note_use(result)
        self.results = []  # and no call from here: whoever was interrupted asks again
        return results[0] if self._single else results

    def wait(self) -> None:
        """After a copy failed: those before it may still run, so their memory is kept until they are done."""
        try:
            self._lane.stream.synchronize()
        except DevicePoisoned:
            self.results = []  # nothing runs there any more, so the memory may go
            raise
        self.results = []

    def __del__(self) -> None:
        for result in getattr(self, "results", ()):  # none if its making was interrupted
            self._lane.drops.push(result, result.nbytes)  # in a finaliser: appends, and nothing else
