"""The way of small transfers that nothing stands in the way of, which is that of nearly all of them.

Owns the few steps that are left of a write and of a read then: between an array of ordinary memory and a buffer, both
without gaps, on the stream that wrote the buffer last. Must not know any other case: where a question has another
answer it does nothing, and the general way (:mod:`writes`, :mod:`reads`) asks everything anew. What it queues it leaves
as that does: the same stamps of the block and marks of the slab, the same claims where the driver refuses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..driver.protocol import Access, CaptureStatus
from .buffers import Buffer
from .copies import DOWN, UP, failed
from .descriptors import CopyDescriptor
from .hostbytes import readable_bytes, writable_bytes
from .lane import Lane
from .operands import Operand
from .slab import Slab
from .taint import Journal

_NO_CAPTURE = CaptureStatus.NONE
_READ = Access.READ
_BYTES = np.dtype(np.uint8)


def send(lane: Lane, descriptor: Any, data: Any, journal: Journal) -> bool:
    """:func:`~cuglue.command.writes.write_to_gpu` by way of the slab; False: nothing was done."""
    operand = _usual(lane, descriptor, data)
    if operand is None or journal.left:
        return False
    if data.dtype is not _BYTES or data.ndim != 1:
        data = readable_bytes(data)
    stream, block, nbytes = lane.stream, operand.block, descriptor.nbytes
    with stream.state.ordering:
        if block is None or block.write_stream is not stream or block.taint is not None:
            return False
        if (reads := block.reads) and [*reads] != [stream]:
            return False
        slab = lane.slab
        start = slab.place(nbytes)
        slab.view[start : start + nbytes] = data
        try:
            stream.driver.copy_async(operand.ptr, slab.address + start, nbytes, UP, stream.handle)
            seq = stream.submit()
            block.reads = None
            block.write_seq = slab.until = seq
        except BaseException as error:
            failed(lane, descriptor.buffer, operand, descriptor.copy_shape, UP, error)
            raise
    if lane.drops.due:
        lane.settle()
    return True


def fetch(lane: Lane, descriptor: Any, data: Any) -> bool:
    """:func:`~cuglue.command.reads.write_to_cpu` by way of the slab; False: nothing was done."""
    operand = _usual(lane, descriptor, data)
    if operand is None or not data.flags.carray:
        return False
    if data.dtype is not _BYTES or data.ndim != 1:
        _, data = writable_bytes(data)
    stream, block, nbytes = lane.stream, operand.block, descriptor.nbytes
    with stream.state.ordering:
        if block is None or block.write_stream is not stream or block.taint is not None:
            return False
        slab = lane.slab
        start = slab.place(nbytes)
        memory = slab.bytes  # kept by this, whoever lets the slab go meanwhile
        try:
            stream.driver.copy_async(slab.address + start, operand.ptr, nbytes, DOWN, stream.handle)
            seq = stream.submit()
            block.finish(stream, _READ, seq)
            slab.until = seq
            slab.readers += 1
        except BaseException as error:
            failed(lane, descriptor.buffer, operand, descriptor.copy_shape, DOWN, error)
            raise
    stream.synchronize()
    slab.copy_out(memory, start, data)
    if lane.drops.due:
        lane.settle()
    return True


def _usual(lane: Lane, descriptor: Any, data: Any) -> Operand | None:
    """The memory of a buffer, if this transfer can be the usual one, whoever used it last."""
    if type(data) is not np.ndarray or type(descriptor) is not CopyDescriptor:
        return None
    if (base := data.base) is not None and not (
        type(base) is np.ndarray and base.base is None and data.flags.c_contiguous
    ):
        return None  # pinned, mapped from a file, or with gaps
    stream, shape, nbytes = lane.stream, descriptor._moved, data.nbytes
    if (
        not 0 < nbytes <= Slab.LARGEST
        or nbytes != descriptor.nbytes
        or shape is None
        or shape.height != 1
        or type(descriptor.buffer) is not Buffer
        or not lane.named
        or lane.window is not None
        or stream.driver.capture_status(stream.handle) is not _NO_CAPTURE
    ):
        return None
    operand = descriptor.buffer.__cuglue_operand__(lane.place)
    return None if operand.partners or operand.nbytes < nbytes else operand
