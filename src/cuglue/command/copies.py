"""One copy between device memory and host bytes: checked, ordered and enqueued.

Owns how a descriptor becomes one driver copy. Must not know whose the host bytes are, or what keeps them alive.
"""

from __future__ import annotations

from typing import Any

from ..arguments import shown
from ..driver.protocol import Access, CopyKind
from ..errors import LayoutError
from ..layout import CopyShape
from .descriptors import CopyDescriptor
from .lane import Lane
from .makers import operand_of
from .operands import Operand
from .perform import perform
from .taint import Journal, check_written, ranges
from .uses import Uses


def checked_operand(lane: Lane, descriptor: CopyDescriptor) -> Operand:
    """The memory of a descriptor, if the copy stays inside it."""
    operand = operand_of(descriptor.buffer, lane.place)
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


def to_device(
    lane: Lane, array: Any, operand: Operand, shape: CopyShape, host: int, journal: Journal | None
) -> None:
    """Enqueue one copy to the device."""
    uses = Uses()
    uses.add(array, operand, Access.WRITE, shape)
    perform(lane, uses, "write", _upload, lane, shape, operand.ptr, host, journal=journal)


def to_host(lane: Lane, array: Any, operand: Operand, shape: CopyShape, host: int) -> None:
    """Enqueue one copy from the device."""
    uses = Uses()
    uses.add(array, operand, Access.READ, shape)
    if uses.tainted:
        check_written(ranges(uses.entries, Access.READ))
    perform(lane, uses, "read", _fetch, lane, shape, operand.ptr, host)


def _upload(lane: Lane, shape: CopyShape, device: int, host: int) -> None:
    driver, handle = lane.stream.driver, lane.stream.handle
    if shape.linear:
        driver.copy_async(device, host, shape.width, CopyKind.H2D, handle)
    else:
        driver.copy_2d_async(
            device, shape.pitch, host, shape.width, shape.width, shape.height, CopyKind.H2D, handle
        )


def _fetch(lane: Lane, shape: CopyShape, device: int, host: int) -> None:
    driver, handle = lane.stream.driver, lane.stream.handle
    if shape.linear:
        driver.copy_async(host, device, shape.width, CopyKind.D2H, handle)
    else:
        driver.copy_2d_async(
            host, shape.width, device, shape.pitch, shape.width, shape.height, CopyKind.D2H, handle
        )
