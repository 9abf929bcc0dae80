"""Arguments of a launch turned into what the driver takes, and into the uses that order it.

Owns the check of arguments against a kernel's parameters. Must not know kernels as objects, runtimes or copies. Nothing
here calls a driver: what does not fit is refused before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from ..arguments import shown
from ..driver.protocol import Access, Span, SurfaceArg
from ..errors import CuglueError, LaunchError, LayoutError, StreamMisuse, UsageError
from ..layout import contiguous_strides
from .makers import is_tracked, operand_of
from .operands import Declared, Operand, Place
from .scalars import by_value
from .signature import Parameter
from .uses import Uses

_BYTES = np.dtype("u1")
_COMPLEX = {np.dtype("c8"): np.dtype("f4"), np.dtype("c16"): np.dtype("f8")}


#: Arguments as the driver takes them: ``(values, spans, uses)``.
Bound = tuple[tuple[Any, ...], tuple[Span | SurfaceArg | None, ...], Uses]


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
    """Check ``args`` against ``parameters`` and turn them into values, spans and uses.

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
    arg = parameter = None
    try:
        for arg, parameter in zip(args, parameters or repeat(None, len(args)), strict=True):
            declaration: Declared | None = None
            if isinstance(arg, Declared):
                declaration = arg
            elif declared is None or (declaration := declared(arg)) is None:
                convert = parameter.convert if parameter is not None else None
                values.append(convert(arg) if convert is not None else _scalar(arg, parameter))
                if spans:
                    views.append(None)
                continue
            array, access = declaration.array, declaration.access
            if access & 2 and declaration is not arg and parameter is not None and parameter.const:
                access = Access.READ  # the command writes it, but not with this kernel
            operand = operand_of(array, place)
            if (
                operand.fitted is not parameter
                or parameter is None
                or strict
                or (access & 2 and parameter.const)
            ):
                _check(operand, declaration, access, parameter, strict)
            uses.add(array, operand, access)
            values.append(operand.ptr)
            if spans:
                views.append(_span(operand, access, parameter))
    except CuglueError as error:
        raise _explained(error, name, len(values) + 1, arg, parameter) from None
    return tuple(values), tuple(views), uses


def _check(
    operand: Operand, declaration: Declared, access: Access, parameter: Parameter | None, strict: bool
) -> None:
    """Refuse memory that does not fit; remember what fits whatever is declared, so that it is not asked each time."""
    _check_memory(operand, declaration, access, strict)
    if parameter is not None:
        _check_pointer(operand, declaration, access, parameter)
        if operand.writable and operand.strides is None:
            operand.fitted = parameter


def _scalar(arg: Any, parameter: Parameter | None) -> Any:
    """The value of an argument that is no declared memory."""
    if is_tracked(arg):
        raise _undeclared(arg)
    if parameter is None:
        return 0 if arg is None else by_value(arg)
    if parameter.kind == "pointer":
        if arg is None:
            return 0
        raise LaunchError(
            "pointer", got=shown(arg)[:80], expected="In(x), Out(x) or InOut(x) of an array, or None"
        )
    if parameter.kind == "opaque":
        if isinstance(arg, np.generic):
            return arg
        expected = "a NumPy scalar, structured where the type is"
        raise LaunchError("struct or vector", got=shown(arg)[:80], expected=expected)
    expected = f"In(x), Out(x) or InOut(x) of a map's {parameter.kind}"
    raise LaunchError(f"{parameter.kind} object", got=shown(arg)[:80], expected=expected)


def _explained(
    error: CuglueError, name: str, number: int, arg: Any, parameter: Parameter | None
) -> CuglueError:
    """The error of an argument, saying which it is."""
    if parameter is not None and parameter.convert is not None and is_tracked(arg):
        error = _undeclared(arg)
    what = f"{parameter}" if parameter is not None else type(arg).__name__
    error.what = f"kernel {name!r}, argument {number} ({what}): {error.what}"
    return error


def _undeclared(arg: Any) -> CuglueError:
    return UsageError(
        f"{type(arg).__name__} without a declaration",
        got=shown(arg)[:80],
        expected="In(x), Out(x) or InOut(x)",
        hint="Say what the kernel does with it, so that it can be ordered",
    )


def _check_memory(operand: Operand, declaration: Declared, access: Access, strict: bool) -> None:
    """What is asked of memory whatever the kernel declares."""
    if not operand.writable and access & 2:
        raise UsageError(
            f"{type(declaration).__name__} of read-only memory",
            got=shown(declaration.array),
            expected="In, or a writable map",
        )
    if operand.kind != "memory":
        return
    if strict and operand.block is None:
        raise StreamMisuse(
            "untracked buffer rejected",
            got=type(declaration.array).__name__,
            expected="memory of a cuglue resource, runtime or map",
            hint="Leave strict off, or allocate it from a resource",
        )
    if operand.strides is not None and not declaration.strided:
        raise LayoutError(
            "array with gaps",
            got=f"shape {operand.shape}, strides {operand.strides} bytes",
            expected="a C-contiguous array",
            hint="Make it contiguous, or declare strided=True if the kernel knows the strides",
        )


def _check_pointer(operand: Operand, declaration: Declared, access: Access, parameter: Parameter) -> None:
    """Check memory against the parameter that takes it."""
    if operand.kind != "memory" or parameter.kind != "pointer":
        if operand.kind == parameter.kind:
            return
        wanted = "a pointer" if parameter.kind == "pointer" else f"a {parameter.kind}"
        got = f"{operand.kind} of {type(declaration.array).__name__}"
        raise LaunchError("argument", got=got, expected=wanted)
    if parameter.const and access & 2:
        raise LaunchError(
            "const pointer",
            got=type(declaration).__name__,
            expected="In: the kernel declares that it only reads",
        )
    if parameter.dtype is None:
        return
    dtype = operand.dtype
    as_vector = _COMPLEX.get(dtype) if dtype is not None and parameter.components == 2 else None
    if dtype is not None and parameter.dtype not in (dtype, as_vector):
        raise LaunchError(
            "element type",
            got=f"an array of {dtype}",
            expected=f"{parameter.dtype}",
            hint="Convert the array, or view its bytes as the type that the kernel takes",
        )
    if operand.ptr % parameter.align:
        raise LaunchError(
            "alignment",
            got=f"address {operand.ptr:#x}",
            expected=f"a multiple of {parameter.align} bytes for {parameter.type}",
        )


def _span(operand: Operand, access: Access, parameter: Parameter | None) -> Span | SurfaceArg:
    """What a ``sim`` function is given: a view of the memory with the shape of the array, or one axis of a buffer."""
    if operand.kind != "memory":
        return SurfaceArg(operand.ptr, access)
    if operand.dtype is not None:
        strides = operand.strides or contiguous_strides(operand.shape, operand.dtype.itemsize)
        return Span(operand.ptr, operand.nbytes, access, operand.shape, operand.dtype.str, strides)
    dtype, components = _BYTES, 1
    if parameter is not None and parameter.dtype is not None:
        dtype, components = parameter.dtype, parameter.components
    shape: tuple[int, ...] = (operand.nbytes // (dtype.itemsize * components),)
    if components > 1:
        shape = (*shape, components)
    strides = contiguous_strides(shape, dtype.itemsize)
    return Span(operand.ptr, operand.nbytes, access, shape, dtype.str, strides)
