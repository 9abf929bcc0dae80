"""Arguments of a launch turned into what the driver takes, and into the uses that order it.

Owns the check of arguments against a kernel's parameters, and :class:`Uses`: every block that one operation touches,
waited for before it is enqueued and stamped after. Must not know kernels as objects, runtimes or copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.block import BlockLife
from ..core.stream import Stream
from ..driver.protocol import Access, Span, SurfaceArg
from ..errors import CuglueError, LaunchError, LayoutError, StreamMisuse, UsageError
from ..layout import CopyShape, contiguous_strides
from .operands import Declared, Operand, Place, is_tracked, operand_of
from .scalars import by_value, converter
from .signature import Parameter

_BYTES = np.dtype("u1")
_COMPLEX = {np.dtype("c8"): np.dtype("f4"), np.dtype("c16"): np.dtype("f8")}


class Use(NamedTuple):
    """One use of an operand.

    Attributes:
        shape: the bytes touched, from the operand's first one on; None: all of them.
    """

    operand: Operand
    access: Access
    shape: CopyShape | None


class Uses:
    """What one operation (or one command) does with memory. A block used twice is used once, in both ways."""

    __slots__ = ("accesses", "blocks", "entries", "partners")

    def __init__(self) -> None:
        self.entries: list[Use] = []
        self.blocks: list[BlockLife] = []
        self.accesses: list[Access] = []
        self.partners: list[Stream] = []

    def add(self, operand: Operand, access: Access, shape: CopyShape | None = None) -> None:
        """Add a use."""
        self.entries.append(Use(operand, access, shape))
        block = operand.block
        if block is not None:
            for index, other in enumerate(self.blocks):
                if other is block:
                    self.accesses[index] |= access
                    break
            else:
                self.blocks.append(block)
                self.accesses.append(access)
        for partner in operand.partners:
            if partner not in self.partners:
                self.partners.append(partner)

    @property
    def tainted(self) -> bool:
        """Whether any block has bytes that were never written: the quick question before the exact one."""
        for block in self.blocks:  # noqa: SIM110 - on every launch, and a generator costs more than the loop
            if block.taint is not None:
                return True
        return False

    def prepare(self, stream: Stream) -> int:
        """Queue on ``stream`` every wait that the operation needs; the number queued.

        Raises:
            CaptureError: a wait would cross a capture; nothing was queued on a stream that captures.
        """
        waits = 0
        for block, access in zip(self.blocks, self.accesses, strict=True):
            waits += block.prepare(stream, access)
        for partner in self.partners:
            waits += stream.join(partner)
        return waits

    def finish(self, stream: Stream) -> int:
        """Note that the operation was enqueued; the seq it got. Partners come after it from now on."""
        seq = stream.submit()
        for block, access in zip(self.blocks, self.accesses, strict=True):
            block.finish(stream, access, seq)
        if self.partners:
            self._hold_partners(stream)
        return seq

    def _hold_partners(self, stream: Stream) -> None:
        """Make every partner wait; where one cannot, the host waits instead, so that nothing is left unordered."""
        failed: CuglueError | None = None
        for partner in self.partners:
            try:
                partner.join(stream)
            except CuglueError as error:
                failed = failed or error
        if failed is not None:
            stream.synchronize()
            raise failed


class Bound(NamedTuple):
    """Arguments as the driver takes them."""

    values: tuple[Any, ...]
    spans: tuple[Span | SurfaceArg | None, ...]
    uses: Uses


def bind(
    name: str,
    parameters: tuple[Parameter, ...] | None,
    args: Sequence[Any],
    place: Place,
    *,
    declared: Callable[[Any], Declared | None] | None = None,
    strict: bool = False,
    spans: bool = False,
) -> Bound:
    """Check ``args`` against ``parameters`` and turn them into values, spans and uses. Touches no device.

    Args:
        name: of the kernel, for messages.
        parameters: of the kernel; None if they are not known: then nothing is checked but the declarations.
        declared: finds the declaration of an argument given bare.
        strict: refuse memory that nobody tracks.
        spans: make spans; only the simulated device reads them.

    Raises:
        LaunchError: the arguments do not fit the parameters.
        LayoutError: an array with gaps that was not declared ``strided``.
        UsageError: tracked memory without In, Out or InOut; memory of another device; with ``strict``, untracked.
    """
    if parameters is not None and len(args) != len(parameters):
        listed = ", ".join(str(p) for p in parameters)
        raise LaunchError(
            f"kernel {name!r}", got=f"{len(args)} arguments", expected=f"{len(parameters)}: ({listed})"
        )
    values: list[Any] = []
    views: list[Span | SurfaceArg | None] = []
    uses = Uses()
    for index, arg in enumerate(args):
        parameter = parameters[index] if parameters is not None else None
        declaration = arg if isinstance(arg, Declared) else declared(arg) if declared is not None else None
        view: Span | SurfaceArg | None = None
        try:
            if declaration is None:
                values.append(_scalar(arg, parameter))
            else:
                operand = operand_of(declaration.array, place)
                dtype = _pointer(operand, declaration, parameter, strict)
                uses.add(operand, declaration.access)
                values.append(operand.ptr)
                if spans:
                    view = _span(operand, declaration.access, dtype, parameter)
        except CuglueError as error:
            what = f"{parameter}" if parameter is not None else type(arg).__name__
            error.what = f"kernel {name!r}, argument {index + 1} ({what}): {error.what}"
            raise
        views.append(view)
    return Bound(tuple(values), tuple(views) if spans else (), uses)


def _scalar(arg: Any, parameter: Parameter | None) -> Any:
    """The value of an argument that is no declared memory."""
    if is_tracked(arg):
        raise UsageError(
            f"{type(arg).__name__} without a declaration",
            got=repr(arg)[:80],
            expected="In(x), Out(x) or InOut(x)",
            hint="Say what the kernel does with it, so that it can be ordered",
        )
    if parameter is None:
        return 0 if arg is None else by_value(arg)
    if parameter.kind == "scalar":
        assert parameter.dtype is not None
        return converter(parameter.dtype)(arg)
    if parameter.kind == "pointer":
        if arg is None:
            return 0
        raise LaunchError(
            "pointer", got=repr(arg)[:80], expected="In(x), Out(x) or InOut(x) of an array, or None"
        )
    if parameter.kind == "opaque" and isinstance(arg, np.generic):
        return arg
    raise LaunchError(
        "struct or vector" if parameter.kind == "opaque" else f"{parameter.kind} object",
        got=repr(arg)[:80],
        expected="a NumPy scalar, structured where the type is"
        if parameter.kind == "opaque"
        else f"In(x), Out(x) or InOut(x) of a map's {parameter.kind}",
    )


def _pointer(
    operand: Operand, declaration: Declared, parameter: Parameter | None, strict: bool
) -> np.dtype[Any] | None:
    """Check declared memory against its parameter; the element type that the kernel sees."""
    access = declaration.access
    if access & 2 and not operand.writable:
        raise UsageError(
            f"{type(declaration).__name__} of read-only memory",
            got=repr(operand.owner),
            expected="In, or a writable map",
        )
    if strict and operand.block is None and operand.kind == "memory":
        raise StreamMisuse(
            "untracked buffer rejected",
            got=type(operand.owner).__name__,
            expected="memory of a cuglue resource, runtime or map",
            hint="Leave strict off, or allocate it from a resource",
        )
    if operand.strides is not None and not declaration.strided and operand.kind == "memory":
        raise LayoutError(
            "array with gaps",
            got=f"shape {operand.shape}, strides {operand.strides} bytes",
            expected="a C-contiguous array",
            hint="Make it contiguous, or declare strided=True if the kernel knows the strides",
        )
    if parameter is None:
        return operand.dtype
    if operand.kind != "memory" or parameter.kind != "pointer":
        if operand.kind == parameter.kind:
            return operand.dtype
        wanted = "a pointer" if parameter.kind == "pointer" else f"a {parameter.kind}"
        raise LaunchError(
            "argument", got=f"{operand.kind} of {type(operand.owner).__name__}", expected=wanted
        )
    if access & 2 and parameter.const:
        raise LaunchError(
            "const pointer",
            got=type(declaration).__name__,
            expected="In: the kernel declares that it only reads",
        )
    if parameter.dtype is None:
        return operand.dtype
    if operand.dtype is not None and operand.dtype != parameter.dtype:
        same = parameter.components == 2 and _COMPLEX.get(operand.dtype) == parameter.dtype
        if not same:
            raise LaunchError(
                "element type",
                got=f"an array of {operand.dtype}",
                expected=f"{parameter.dtype}",
                hint="Convert the array, or view its bytes as the type that the kernel takes",
            )
    align = parameter.dtype.itemsize * (parameter.components if parameter.components in (2, 4) else 1)
    if operand.ptr % align:
        raise LaunchError(
            "alignment",
            got=f"address {operand.ptr:#x}",
            expected=f"a multiple of {align} bytes for {parameter.type}",
        )
    return operand.dtype if operand.dtype is not None else parameter.dtype


def _span(
    operand: Operand, access: Access, dtype: np.dtype[Any] | None, parameter: Parameter | None
) -> Span | SurfaceArg:
    """What a ``sim`` function is given: a view of the memory with the shape of the array, or one axis of a buffer."""
    if operand.kind != "memory":
        return SurfaceArg(operand.ptr, access)
    if operand.dtype is not None:
        strides = operand.strides or contiguous_strides(operand.shape, operand.dtype.itemsize)
        return Span(operand.ptr, operand.nbytes, access, operand.shape, operand.dtype.str, strides)
    dtype = dtype if dtype is not None else _BYTES
    components = parameter.components if parameter is not None else 1
    shape: tuple[int, ...] = (operand.nbytes // (dtype.itemsize * components),)
    if components > 1:
        shape = (*shape, components)
    return Span(
        operand.ptr, operand.nbytes, access, shape, dtype.str, contiguous_strides(shape, dtype.itemsize)
    )
