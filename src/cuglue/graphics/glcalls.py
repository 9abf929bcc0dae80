"""PyOpenGL, called so that errors are typed and OpenGL's own error flags are left clean.

Owns the import of PyOpenGL and the translation of its errors. Must not know which object a call is about, nor how a
context became current.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import DriverError, UnsupportedError
from .glcurrent import require_context

log = logging.getLogger(__name__)

_ERRORS = {
    0x0500: "GL_INVALID_ENUM",
    0x0501: "GL_INVALID_VALUE",
    0x0502: "GL_INVALID_OPERATION",
    0x0503: "GL_STACK_OVERFLOW",
    0x0504: "GL_STACK_UNDERFLOW",
    0x0505: "GL_OUT_OF_MEMORY",
    0x0506: "GL_INVALID_FRAMEBUFFER_OPERATION",
    0x0507: "GL_CONTEXT_LOST",
}
#: OpenGL keeps at most one flag for each error; a lost context would report for ever.
_FLAGS = len(_ERRORS)


def load_gl() -> Any:
    """Import PyOpenGL's ``OpenGL.GL``.

    Raises:
        UnsupportedError: PyOpenGL is missing, or finds no OpenGL library.
    """
    try:
        import OpenGL.GL as gl
    except (
        ImportError,
        AttributeError,
        OSError,
    ) as error:  # what its platforms raise when a library is missing
        raise UnsupportedError(
            "OpenGL calls need PyOpenGL and an OpenGL library",
            reason="pyopengl",
            got=error,
            hint="pip install 'cuglue[gl]'; without an X server set PYOPENGL_PLATFORM=egl before its first import",
        ) from error
    return gl


@contextmanager
def checked(what: str) -> Iterator[Any]:
    """PyOpenGL for a few calls about ``what``, in the context current here; an OpenGL error ends them.

    Errors that the application's own calls left pending are logged and dropped: they are not about ``what``.

    Raises:
        NoContextError: no context is current on this thread.
        DriverError: OpenGL reported an error, whether or not PyOpenGL's error checking is on.
        UnsupportedError: the context lacks a function (OpenGL 4.5 has them all).
    """
    require_context()
    gl = load_gl()
    from OpenGL.error import NullFunctionError

    pending = _take_errors(gl)
    if pending:
        warn_of_pending(what, pending)
    try:
        yield gl
    except gl.GLError as error:
        _take_errors(gl)
        call = getattr(error.baseOperation, "__name__", "an OpenGL call")
        raise DriverError(what, code=int(error.err), name=error_name(int(error.err)), call=call) from error
    except NullFunctionError as error:
        raise UnsupportedError(
            what, reason="gl_version", got=error, expected="OpenGL 4.5", hint="Ask for a 4.5 core context"
        ) from error
    codes = _take_errors(gl)  # PyOpenGL's error checking may be switched off
    if codes:
        raise DriverError(what, code=codes[0], name=error_name(codes[0]), call="an OpenGL call")


def warn_of_pending(what: str, codes: list[int]) -> None:
    """Log errors that the application left pending before a call about ``what``."""
    log.warning(
        "OpenGL errors were pending before a call about %s: %s", what, ", ".join(map(error_name, codes))
    )


def error_name(code: int) -> str:
    """Name a ``glGetError`` code."""
    return _ERRORS.get(code, f"0x{code:04X}")


def _take_errors(gl: Any) -> list[int]:
    codes: list[int] = []
    while len(codes) < _FLAGS and (code := int(gl.glGetError())):
        codes.append(code)
    return codes
