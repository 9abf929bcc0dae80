"""The questions to OpenGL that every map asks, through plain C function pointers.

Owns the pointers, found once a process in the library that PyOpenGL calls, and the look at OpenGL's error flags after
each question. PyOpenGL's own wrappers cost three times the call, on every map. Must not know what the answers mean.

The caller has asked for a current context before: without one OpenGL answers zeros, not errors.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from ctypes import byref, c_int, c_int64, c_ubyte, c_uint
from typing import Any

from ..errors import DriverError, UnsupportedError
from .glcalls import error_name, load_gl, warn_of_pending
from .glcurrent import check_context

_RESULTS: dict[str, Any] = {
    "glGetError": c_uint,
    "glIsBuffer": c_ubyte,
    "glIsTexture": c_ubyte,
    "glIsRenderbuffer": c_ubyte,
    "glGetNamedBufferParameteri64v": None,
    "glGetTextureParameteriv": None,
    "glGetTextureLevelParameteriv": None,
    "glGetNamedRenderbufferParameteriv": None,
}
BUFFER_SIZE = 0x8764
_FLAGS = 8  # OpenGL keeps at most one flag for each error; a lost context would report for ever

Function = Callable[..., Any]


class Questions:
    """A few questions about one object, in the context current here; an OpenGL error ends them.

    Errors that the application's own calls left pending are logged and dropped: they are not about the object.

    Args:
        what: the object, for messages.

    Raises:
        NoContextError: no context is current on this thread.
        UnsupportedError: PyOpenGL or its library is missing, or lacks a function (OpenGL 4.5 has them all).
    """

    __slots__ = ("_functions", "_what")

    def __init__(self, what: str) -> None:
        check_context()
        self._what = what
        try:
            self._functions = functions = _find()
        except LookupError as error:
            raise UnsupportedError(
                what, reason="gl_version", got=error, expected="OpenGL 4.5", hint="Ask for a 4.5 core context"
            ) from error
        if code := functions["glGetError"]():
            warn_of_pending(what, [code, *self._more_errors()])

    def exists(self, call: str, name: int) -> bool:
        """What ``glIs...`` says of the name. Raises DriverError: OpenGL reported an error."""
        found = bool(self._functions[call](name))
        self._check(call)
        return found

    def size(self, call: str, name: int, parameter: int) -> int:
        """A 64-bit parameter. Raises DriverError: OpenGL reported an error."""
        value = c_int64()
        self._functions[call](name, parameter, byref(value))
        self._check(call)
        return value.value

    def numbers(self, call: str, *leading: int, parameters: tuple[int, ...]) -> list[int]:
        """Parameters of the object that ``leading`` names. Raises DriverError: OpenGL reported an error."""
        ask, value = self._functions[call], c_int()
        place, found = byref(value), []
        for parameter in parameters:
            ask(*leading, parameter, place)
            found.append(value.value)
            value.value = 0  # what a failing call leaves must not be the answer before it
        self._check(call)
        return found

    def _check(self, call: str) -> None:
        if code := self._functions["glGetError"]():
            self._more_errors()
            raise DriverError(self._what, code=code, name=error_name(code), call=call)

    def _more_errors(self) -> list[int]:
        codes: list[int] = []
        while len(codes) < _FLAGS - 1 and (code := self._functions["glGetError"]()):
            codes.append(code)
        return codes


class Question:
    """One number of one object, asked where its context is current, as every map does; one thread at a time.

    Set ``answer.value`` to 0, then :attr:`ask`. A 0 is no answer (perhaps no context is current), and
    :class:`Questions` finds out why, after :func:`forget_error`. An application's own error flags stay as they are.

    Args:
        kind: of the number, ``c_int`` or ``c_int64``. It is not 0 as long as the object is there.
        call, arguments: the function, and all its arguments but the place of the answer.
    """

    __slots__ = ("answer", "ask")

    def __init__(self, kind: type[c_int] | type[c_int64], call: str, *arguments: int) -> None:
        self.answer = kind()
        self.ask: Callable[[], object] = functools.partial(_find()[call], *arguments, byref(self.answer))

    def number(self) -> int:
        """The number, or 0; then OpenGL keeps no error of this question."""
        answer = self.answer
        answer.value = 0
        self.ask()
        return answer.value or forget_error()


def forget_error() -> int:
    """Drop the error that a :class:`Question` left; 0."""
    _find()["glGetError"]()
    return 0


@functools.cache
def _find() -> dict[str, Function]:
    """The functions by name; the context current here finds them (Windows has no others)."""
    load_gl()
    from OpenGL.platform import PLATFORM

    return {name: _function(PLATFORM, name, result) for name, result in _RESULTS.items()}


def _function(platform: Any, name: str, result: Any) -> Function:
    # Without argument types: ints and references pass as they are, and a call costs a fifth.
    if sys.platform == "win32":
        prototype = ctypes.WINFUNCTYPE(result)
    else:
        prototype = ctypes.CFUNCTYPE(result)
    try:
        return prototype((name, platform.GL))
    except AttributeError:
        address = platform.getExtensionProcedure(name.encode())
    if not address:
        raise LookupError(f"OpenGL has no {name} here")
    return prototype(address)
