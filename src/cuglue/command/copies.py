"""One copy between device memory and host bytes: checked, ordered and enqueued.

Owns how a descriptor becomes one driver copy. Must not know whose the host bytes are, or what keeps them alive.
"""

from __future__ import annotations

from typing import Any

from ..arguments import shown
from ..core.stream import Stream
from ..driver.protocol import Access, CopyKind
from ..errors import CuglueError, LayoutError
from ..layout import CopyShape
from .buffers import Buffer
from .descriptors import CopyDescriptor
from .lane import Lane
from .makers import operand_of
from .operands import Operand
from .perform import perform, refused
from .taint import Journal, check_written, ranges
from .uses import Uses

#: The directions of a transfer.
UP, DOWN = CopyKind.H2D, CopyKind.D2H
_WRITE, _READ = Access.WRITE, Access.READ
_NAMES = {UP: "write", DOWN: "read"}


def checked_operand(lane: Lane, descriptor: CopyDescriptor) -> Operand:
    """The memory of a descriptor, if the copy stays inside it."""
    buffer, place = descriptor.buffer, lane.place
    operand = buffer.__cuglue_operand__(place) if type(buffer) is Buffer else operand_of(buffer, place)
    if operand.kind != "memory" or operand.strides is not None:
        raise LayoutError(
            "copy", got=f"{operand.kind} with gaps", expected="contiguous memory", hint="Copy it first"
        )
    if descriptor.span > operand.nbytes:
        raise LayoutError(
            f"copy of {descriptor.shape} elements of {descriptor.elem_size} bytes, strides {descriptor.strides}",
            got=f"{descriptor.span} bytes",
            expected=f"within the {operand.nbytes} bytes of {shown(descriptor.buffer)}",
        )
    return operand


def transfer(
    lane: Lane,
    array: Any,
    operand: Operand,
    shape: CopyShape,
    host: int,
    kind: CopyKind,
    journal: Journal | None = None,
) -> None:
    """Enqueue one copy between an operand's memory and host bytes: to the device (UP) or from there (DOWN).

    Args:
        lane: where.
        array: what the operand was made from.
        operand: begins where the copy begins.
        shape: of the device's side; host bytes lie without gaps.
        host: address of the host bytes.
        kind: the direction.
        journal: told what was written.
    """
    if kind is UP:
        access, target, source = _WRITE, operand.ptr, host
    else:
        access, target, source = _READ, host, operand.ptr
    stream, block = lane.stream, operand.block
    if (
        block is not None
        and shape.height == 1
        and lane.window is None
        and not operand.partners
        and (journal is None or not journal.left)
    ):
        # Most transfers are of memory that their own stream used last: what perform() does where no question is open,
        # in a third of the time.
        with stream.state.ordering:
            quiet = access is _READ or not block.reads or [*block.reads] == [stream]
            if quiet and block.write_stream is stream and block.taint is None:
                try:
                    stream.driver.copy_async(target, source, shape.width, kind, stream.handle)
                    block.finish(stream, access, stream.submit())
                except BaseException as error:
                    failed(lane, array, operand, shape, kind, error)
                    raise
                return
    uses = Uses.of(array, operand, access, shape)
    if access is _READ and uses.tainted:
        check_written(ranges(uses.entries, _READ))
    perform(lane, uses, _NAMES[kind], _enqueue, stream, shape, target, source, kind, journal=journal)


def failed(
    lane: Lane, array: Any, operand: Operand, shape: CopyShape, kind: CopyKind, error: BaseException
) -> None:
    """What is left to do after a copy that was refused, or interrupted: the driver may have it then."""
    uses = Uses.of(array, operand, _WRITE if kind is UP else _READ, shape)
    if not isinstance(error, CuglueError):
        uses.finish(lane.stream)
    refused(lane, uses, error, _NAMES[kind])


def _enqueue(stream: Stream, shape: CopyShape, target: int, source: int, kind: CopyKind) -> None:
    if shape.linear:
        stream.driver.copy_async(target, source, shape.width, kind, stream.handle)
        return
    pitches = (shape.pitch, shape.width) if kind is UP else (shape.width, shape.pitch)
    stream.driver.copy_2d_async(
        target, pitches[0], source, pitches[1], shape.width, shape.height, kind, stream.handle
    )
