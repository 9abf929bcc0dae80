"""Copies between device memory and host bytes: checked, ordered, and safe against everybody letting go.

Owns how a descriptor becomes one driver copy, what keeps host bytes alive meanwhile, and the future of a read. Must not
know commands or kernels.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..driver.protocol import Access, CopyKind
from ..errors import CuglueError, DevicePoisoned, LayoutError, UsageError
from ..layout import CopyShape
from .buffers import Buffer, CopyDescriptor
from .futures import Future
from .hostmem import HostBuffer, PinnedMemory, address_of, root_of
from .lane import Lane
from .makers import operand_of
from .operands import Operand
from .perform import perform
from .pipeline import PIPELINE_FROM, Chunk, upload
from .staging import Source, staging
from .taint import Failure, Journal, check_written, claim, ranges
from .uses import Uses


def write_to_gpu(lane: Lane, descriptor: CopyDescriptor, data: Any, journal: Journal | None = None) -> None:
    """Enqueue a copy of host bytes into device memory.

    Args:
        lane: where.
        descriptor: what is written.
        data: bytes, a bytearray, memoryview, mmap, NumPy array, CPU tensor or host buffer, C-contiguous and exactly as
            large as the descriptor says.
        journal: told what was written.

    Ordering: only enqueues, but for copying the bytes aside.
    Ownership: pinned data is read by the device later: it is kept alive until then, and must not be changed. Any other
        data was read when this returns.

    Raises:
        LayoutError: the descriptor is not pitched row-major or does not fit, or the sizes differ.
        StorageHandleNotFound: the buffer has no memory.
        DriverError: the copy was refused. Nothing is retained in any of these cases.
    """
    source = readable_bytes(data)
    if source.nbytes != descriptor.nbytes:
        raise LayoutError(
            "data of a write",
            got=f"{source.nbytes} bytes",
            expected=f"{descriptor.nbytes}, as its descriptor says",
        )
    if not source.nbytes:
        return
    shape = descriptor.copy_shape
    operand = _checked_operand(lane, descriptor)
    kind = _kind(source)
    decision = staging(source.nbytes, kind)
    lane.refuse_other_capture("copy host bytes")
    recording = lane.window is not None  # a graph reads the bytes at every replay: they must be its own
    if not recording and kind is not Source.PINNED and source.nbytes >= PIPELINE_FROM:
        _write_in_chunks(lane, descriptor.buffer, operand, shape, source, journal)
    else:
        if decision.staged or recording:
            staged: npt.NDArray[Any] = lane.take_host(source.nbytes)
            staged[...] = source
            source = staged
        _write(lane, descriptor.buffer, operand, shape, address_of(source), journal)
        lane.hold(source, source.nbytes)
    if decision.flush and not recording:
        lane.drops.flush()
    lane.settle()


def _write(
    lane: Lane, array: Any, operand: Operand, shape: CopyShape, host: int, journal: Journal | None
) -> None:
    """Enqueue one copy to the device."""
    uses = Uses()
    uses.add(array, operand, Access.WRITE, shape)
    perform(lane, uses, "write", _upload, lane, shape, operand.ptr, host, journal=journal)


def _write_in_chunks(
    lane: Lane,
    array: Any,
    operand: Operand,
    shape: CopyShape,
    source: npt.NDArray[np.uint8],
    journal: Journal | None,
) -> None:
    """Enqueue a large copy piece by piece. If one fails, all of it counts as unwritten."""

    def send(host: int, chunk: Chunk) -> None:
        _write(lane, array, operand.at(chunk.target), chunk.shape, host, journal)

    try:
        upload(lane, source, shape, send)
    except BaseException as error:
        claim(ranges([(array, operand, Access.WRITE, shape)], Access.WRITE), Failure(error))
        raise


def write_to_cpu(lane: Lane, descriptor: CopyDescriptor, data: Any) -> None:
    """Enqueue a copy of device memory into host bytes.

    Args:
        lane: where.
        descriptor: what is read.
        data: a writable C-contiguous buffer, exactly as large as the descriptor says.

    Ordering: only enqueues (into ordinary memory the driver may block). The bytes are there after a sync.
    Ownership: the buffer is kept, and cannot be resized, until the device has written it.

    Raises:
        LayoutError: as :func:`write_to_gpu`, or a buffer that cannot be written.
    """
    view, target = writable_bytes(data)
    if target.nbytes != descriptor.nbytes:
        raise LayoutError(
            "buffer of a read",
            got=f"{target.nbytes} bytes",
            expected=f"{descriptor.nbytes}, as its descriptor says",
        )
    if target.nbytes:
        lane.refuse_other_capture("copy host bytes")
        _download(lane, descriptor, _checked_operand(lane, descriptor), target)
        lane.hold((target, view), target.nbytes)
        lane.settle()


def read_async(
    lane: Lane, descriptors: CopyDescriptor | Sequence[CopyDescriptor]
) -> Future[HostBuffer] | Future[list[HostBuffer]]:
    """Enqueue copies to the host; a future of the bytes, in the order of the descriptors.

    Ordering: only enqueues. Work queued later does not change the result, and the result does not wait for it.
    Ownership: buffers may be closed and the future dropped at once: what the device still needs stays alive.

    Raises:
        CaptureError: the stream captures a graph.
        LayoutError, StorageHandleNotFound, DriverError: of the first copy that fails. Copies already queued are waited
            for before their memory goes back.
    """
    lane.stream.refuse_capture("read")
    single = isinstance(descriptors, CopyDescriptor)
    listed = [descriptors] if isinstance(descriptors, CopyDescriptor) else list(descriptors)
    for descriptor in listed:
        if not isinstance(descriptor, CopyDescriptor):
            raise UsageError(
                "read", got=repr(descriptor), expected="CopyDescriptors: buffer.descriptor(shape, dtype)"
            )
    results: list[HostBuffer] = []
    try:
        for descriptor in listed:
            operand = _checked_operand(lane, descriptor) if descriptor.nbytes else None
            buffer = lane.take_host(descriptor.nbytes)
            results.append(_shaped(buffer, descriptor))
            if operand is not None:
                _download(lane, descriptor, operand, buffer)
        event = lane.stream.record()
    except BaseException:
        _wait_for_copies(lane, results)
        raise
    lane.settle()
    return Future(event, _Landing(lane, results, single))


class _Landing:
    """The host buffers of a read, until their bytes are there.

    A future that is dropped before drops this, too: then the buffers wait in the lane's drop queue for the device.
    """

    __slots__ = ("_lane", "_results", "_single")

    def __init__(self, lane: Lane, results: list[HostBuffer], single: bool) -> None:
        self._lane = lane
        self._results = results
        self._single = single

    def __call__(self) -> Any:
        """The result, once the device is done."""
        results, self._results = self._results, []
        for result in results:
            if result.pinned:
                self._lane.host.note_access(address_of(result), result.nbytes)
        return results[0] if self._single else results

    def __del__(self) -> None:
        for result in self._results:
            self._lane.drops.push(result, result.nbytes)  # in a finaliser: appends, and nothing else


def _wait_for_copies(lane: Lane, buffers: list[HostBuffer]) -> None:
    """After a copy failed: those before it may still run, so their memory is kept until they are done."""
    try:
        lane.stream.synchronize()
    except DevicePoisoned:
        raise  # nothing runs there any more, so the memory may go
    except CuglueError:
        for buffer in buffers:
            lane.drops.push(buffer, buffer.nbytes)
        raise


def _shaped(buffer: HostBuffer, descriptor: CopyDescriptor) -> HostBuffer:
    """The bytes as the descriptor's array, if it names a dtype."""
    if descriptor.dtype is None:
        return buffer
    shaped: HostBuffer = buffer.view(descriptor.dtype).reshape(descriptor.shape)  # type: ignore[assignment]
    return shaped


# --- one copy ---------------------------------------------------------------------------------------------------


def _checked_operand(lane: Lane, descriptor: CopyDescriptor) -> Operand:
    """The memory of a descriptor, if the copy stays inside it."""
    operand = operand_of(descriptor.buffer, lane.place)
    if operand.kind != "memory" or operand.strides is not None:
        raise LayoutError(
            "copy", got=f"{operand.kind} with gaps", expected="contiguous memory", hint="Copy it first"
        )
    extent = sum((n - 1) * s for n, s in zip(descriptor.shape, descriptor.strides, strict=True)) + 1
    if extent * descriptor.elem_size > operand.nbytes:
        raise LayoutError(
            f"copy of {descriptor.shape} elements of {descriptor.elem_size} bytes, strides {descriptor.strides}",
            got=f"{extent * descriptor.elem_size} bytes",
            expected=f"within the {operand.nbytes} bytes of {descriptor.buffer!r}",
        )
    return operand


def _download(lane: Lane, descriptor: CopyDescriptor, operand: Operand, target: npt.NDArray[Any]) -> None:
    shape = descriptor.copy_shape
    uses = Uses()
    uses.add(descriptor.buffer, operand, Access.READ, shape)
    if uses.tainted:
        check_written(ranges(uses.entries, Access.READ))
    perform(lane, uses, "read", _fetch, lane, shape, operand.ptr, address_of(target))


def _fetch(lane: Lane, shape: CopyShape, device: int, host: int) -> None:
    driver, handle = lane.stream.driver, lane.stream.handle
    if shape.linear:
        driver.copy_async(host, device, shape.width, CopyKind.D2H, handle)
    else:
        driver.copy_2d_async(
            host, shape.width, device, shape.pitch, shape.width, shape.height, CopyKind.D2H, handle
        )


def _upload(lane: Lane, shape: CopyShape, device: int, host: int) -> None:
    driver, handle = lane.stream.driver, lane.stream.handle
    if shape.linear:
        driver.copy_async(device, host, shape.width, CopyKind.H2D, handle)
    else:
        driver.copy_2d_async(
            device, shape.pitch, host, shape.width, shape.width, shape.height, CopyKind.H2D, handle
        )


# --- host bytes -------------------------------------------------------------------------------------------------


def readable_bytes(data: Any) -> npt.NDArray[np.uint8]:
    """The bytes of ``data`` as a flat array, without a copy if it is C-contiguous.

    Raises:
        UsageError: device memory, or nothing that has bytes.
    """
    if isinstance(data, Buffer) or hasattr(type(data), "__cuda_array_interface__"):
        raise UsageError("data", got=f"{type(data).__name__}, device memory", expected="host memory")
    if isinstance(data, np.ndarray):
        array = data
    else:
        try:
            array = np.frombuffer(data, np.uint8)
        except (TypeError, BufferError, ValueError):
            array = _as_array(data)
    if array.dtype.hasobject:
        raise UsageError("data", got="Python objects", expected="numbers")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _as_array(data: Any) -> npt.NDArray[Any]:
    """Lists, scalars, CPU tensors, empty buffers."""
    try:
        return np.asarray(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            "data", got=type(data).__name__, expected="bytes, an array, or anything numpy.asarray takes"
        ) from error


def writable_bytes(data: Any) -> tuple[memoryview, npt.NDArray[np.uint8]]:
    """``(the export that keeps data from moving, its bytes as a flat array)``.

    Raises:
        LayoutError: read-only, or not C-contiguous.
    """
    try:
        view = memoryview(data)
    except TypeError:
        try:
            view = np.asarray(data).data
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                "buffer of a read", got=type(data).__name__, expected="a writable buffer"
            ) from error
    if view.readonly or not view.c_contiguous:
        raise LayoutError(
            "buffer of a read",
            got="read-only bytes" if view.readonly else "a buffer with gaps",
            expected="a writable C-contiguous buffer",
        )
    if not view.nbytes:
        return view, np.empty(0, np.uint8)
    return view, np.frombuffer(view.cast("B"), np.uint8)


def _kind(source: npt.NDArray[np.uint8]) -> Source:
    """Where the bytes lie."""
    root = root_of(source)
    if isinstance(root, PinnedMemory):
        return Source.PINNED
    return Source.FILE if isinstance(root, mmap.mmap) else Source.OTHER
