"""Writes: host bytes to device memory, aside first unless they are pinned.

Owns the ways that bytes take by their size and where they lie (contracts C23-C25). Must not know commands or kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..driver.protocol import Access
from ..errors import LayoutError
from ..layout import CopyShape
from .buffers import Buffer
from .copies import UP, checked_operand, transfer
from .descriptors import CopyDescriptor, descriptor_of
from .hostbytes import kind_of, readable_bytes
from .hostmem import HostBuffer, address_of
from .lane import Lane
from .makers import operand_of
from .operands import Operand
from .pipeline import UPLOAD_FROM, Chunk, chunks, upload
from .progress import STRIDE, Progress, Report
from .slab import Slab
from .staging import Source, staging
from .taint import Failure, Journal, claim, ranges

#: Ordinary memory below this size may go to the driver as it is: several threads are quicker only above.
DIRECT_BELOW = 8 << 20
_FILE, _PINNED, _OTHER = Source


def write_to_gpu(
    lane: Lane,
    descriptor: CopyDescriptor,
    data: Any,
    journal: Journal | None = None,
    progress: Report | None = None,
) -> None:
    """Enqueue a copy of host bytes into device memory.

    Args:
        lane: where.
        descriptor: what is written.
        data: bytes, a bytearray, memoryview, mmap, NumPy array, CPU tensor or host buffer, exactly as large as the
            descriptor says. An array is sent in C order, whatever its strides; one with gaps or another order is
            copied for that first.
        journal: told what was written.
        progress: ``progress(done_bytes, total_bytes)``, called as a large copy goes on and at its end: on this thread
            as bytes of ``data`` are read; for pinned data on a thread of the library, as they arrive. What it raises
            is counted (``runtime.progress_failures``) and logged.

    Ordering: only enqueues, but for copying the bytes aside.
    Ownership: pinned data is read by the device later: it is kept alive until then, and must not be changed. Any other
        data was read when this returns.

    Raises:
        LayoutError: the descriptor is not pitched row-major or does not fit, or the sizes differ.
        StorageHandleNotFound: the buffer has no memory.
        DriverError: the copy was refused. Nothing is retained in any of these cases, but pinned data until the work
            before is done.
    """
    if type(descriptor) is not CopyDescriptor:
        descriptor = descriptor_of("write", descriptor)
    source = readable_bytes(data)
    if source.nbytes != descriptor.nbytes:
        raise LayoutError(
            "data of a write",
            got=f"{source.nbytes} bytes",
            expected=f"{descriptor.nbytes}, as its descriptor says",
        )
    told = None if progress is None else Progress(progress, source.nbytes, lane.failures)
    if source.nbytes:
        shape = descriptor.copy_shape
        operand = checked_operand(lane, descriptor)
        _send(lane, descriptor.buffer, operand, shape, source, journal, told)


def fill(lane: Lane, buffer: Buffer, source: npt.NDArray[np.uint8], progress: Report | None = None) -> None:
    """:func:`write_to_gpu` of all of a buffer, from as many bytes."""
    told = None if progress is None else Progress(progress, source.nbytes, lane.failures)
    if source.nbytes:
        shape = CopyShape(source.nbytes, 1, source.nbytes)
        _send(lane, buffer, operand_of(buffer, lane.place), shape, source, None, told)


def _send(
    lane: Lane,
    array: Any,
    operand: Operand,
    shape: CopyShape,
    source: npt.NDArray[np.uint8],
    journal: Journal | None,
    told: Progress | None,
) -> None:
    """Enqueue what is known to fit: through memory of ours, unless the source is pinned."""
    nbytes = source.nbytes
    lane.refuse_other_capture("copy host bytes")
    kind = kind_of(source) if source.base is not None else _OTHER
    if kind is _OTHER and nbytes <= Slab.LARGEST and lane.window is None:
        _send_few(lane, array, operand, shape, source, journal)
    elif lane.window is not None:  # a graph reads the bytes at every replay: they must be its own
        _send_whole(lane, array, operand, shape, _aside(lane, source), journal)
    elif kind is _PINNED:
        _send_whole(lane, array, operand, shape, source, journal, told)
        told = None  # it tells itself, when the bytes arrive
    elif kind is _OTHER and nbytes < DIRECT_BELOW and _direct(lane):
        transfer(lane, array, operand, shape, address_of(source), UP, journal)
    elif nbytes >= UPLOAD_FROM:
        _send_in_chunks(lane, array, operand, shape, source, journal, told)
    elif kind is _OTHER and shape.linear:
        _send_in_pieces(lane, array, operand, shape, source, journal)
    else:
        _send_whole(lane, array, operand, shape, _aside(lane, source), journal)
    if told is not None:
        told.reach(nbytes)
    if (nbytes > Slab.LARGEST or kind is _FILE) and lane.window is None and staging(nbytes, kind).flush:
        lane.drops.flush()
    if lane.drops.due:
        lane.settle()


def _direct(lane: Lane) -> bool:
    """Whether the driver may copy ordinary memory aside itself: it has done so when it returns, and waits for nobody.

    It does it about as fast as a processor copies anything; but it waits for what the stream has got before.
    """
    stream = lane.stream
    return stream.state.capabilities.pageable_read_at_once and stream.nameable() and stream.query()


def _send_few(
    lane: Lane,
    array: Any,
    operand: Operand,
    shape: CopyShape,
    source: npt.NDArray[np.uint8],
    journal: Journal | None,
) -> None:
    """Enqueue the copy of bytes by way of the slab."""
    nbytes = source.nbytes
    # Under the lock, or another thread lets the slab go before the device is told of this place.
    with lane.stream.state.ordering:
        slab = lane.slab
        start = slab.place(nbytes)
        slab.view[start : start + nbytes] = source
        transfer(lane, array, operand, shape, slab.address + start, UP, journal)
        slab.until = lane.stream.seq


def _send_in_pieces(
    lane: Lane,
    array: Any,
    operand: Operand,
    shape: CopyShape,
    source: npt.NDArray[np.uint8],
    journal: Journal | None,
) -> None:
    """The same for more than the slab takes at once: the device sends one piece while the next is copied."""
    try:
        for chunk in chunks(shape, Slab.LARGEST // 2):
            part = source[chunk.source : chunk.source + chunk.shape.nbytes]
            _send_few(lane, array, operand.at(chunk.target), chunk.shape, part, journal)
    except BaseException as error:
        _unwritten(array, operand, shape, error)
        raise


def _unwritten(array: Any, operand: Operand, shape: CopyShape, error: BaseException) -> None:
    """One piece failed: all of it counts as never written."""
    claim(ranges([(array, operand, Access.WRITE, shape)], Access.WRITE), Failure(error))


def _aside(lane: Lane, source: npt.NDArray[np.uint8]) -> HostBuffer:
    """A copy of the bytes in memory of ours."""
    staged = lane.take_host(source.nbytes)
    staged[...] = source
    return staged


def _send_whole(
    lane: Lane,
    array: Any,
    operand: Operand,
    shape: CopyShape,
    source: npt.NDArray[np.uint8],
    journal: Journal | None,
    told: Progress | None = None,
) -> None:
    """Enqueue the copy of bytes that stay as they are until the device has read them."""
    host = address_of(source)
    try:
        if told is None:
            transfer(lane, array, operand, shape, host, UP, journal)
        else:
            for chunk in chunks(shape, STRIDE):
                at = host + chunk.source
                transfer(lane, array, operand.at(chunk.target), chunk.shape, at, UP, journal)
                told.reach_after(lane.stream.record(), chunk.source + chunk.shape.nbytes)
        lane.hold(source, source.nbytes)
    except BaseException:  # the device may read it still
        lane.hold(source, source.nbytes)
        raise


def _send_in_chunks(
    lane: Lane,
    array: Any,
    operand: Operand,
    shape: CopyShape,
    source: npt.NDArray[np.uint8],
    journal: Journal | None,
    told: Progress | None,
) -> None:
    """Enqueue a large copy piece by piece, through memory that several threads fill."""

    def send(host: int, chunk: Chunk) -> None:
        transfer(lane, array, operand.at(chunk.target), chunk.shape, host, UP, journal)

    try:
        upload(lane, source, shape, send, told.reach if told is not None else None)
    except BaseException as error:
        _unwritten(array, operand, shape, error)
        raise
