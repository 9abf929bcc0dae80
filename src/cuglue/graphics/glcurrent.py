"""Where a GL call would go: the thread, and the OpenGL context current on it.

Owns the question, asked of EGL, GLX and WGL through ctypes. It must come before any GL call: without a current
context OpenGL answers zeros, not errors. Loads no library, creates nothing and makes nothing current.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, Self

from ..errors import NoContextError


class WindowSystem(IntEnum):
    """The library through which a context was made current."""

    EGL = 1
    GLX = 2
    WGL = 3


class ContextId(NamedTuple):
    """Identity of a live context. Handles are reused after a context is destroyed, so never outlive it with this."""

    api: WindowSystem
    display: int
    context: int

    def __str__(self) -> str:
        return f"{self.api.name} context {self.context:#x} (display {self.display:#x})"


class ThreadRef(NamedTuple):
    """A thread, for comparing and for messages. Identifiers are reused once a thread has ended."""

    ident: int
    name: str

    @classmethod
    def current(cls) -> Self:
        return cls(threading.get_ident(), threading.current_thread().name)

    def __str__(self) -> str:
        return f"thread {self.name!r} ({self.ident})"


def current_context() -> ContextId | None:
    """The context current on the calling thread, asked of EGL, then GLX or WGL; None when there is none.

    Only libraries already loaded in the process are asked: no other can have made a context current.
    Ask before any GL call: without a current context GL answers zeros, not errors.
    """
    # A library may be loaded later (by a window toolkit): those known are asked first, then new ones are looked for.
    return _ask() or (_ask() if _find_libraries() else None)


def asked() -> str:
    """Which libraries :func:`current_context` can ask here, for messages."""
    return ", ".join(api.name for api in _getters) or "no EGL, GLX or WGL library is loaded"


def require_context(wanted: ContextId | None = None) -> ContextId:
    """The context current on this thread, which must be ``wanted`` where one is named.

    Raises:
        NoContextError: none is current here (the message says which libraries were asked), or another one.
    """
    if wanted is not None and is_current(wanted):
        return wanted
    found = current_context()
    if found is not None and wanted in (None, found):
        return found
    if found is None:
        raise NoContextError(
            f"no OpenGL context is current on {ThreadRef.current()} (asked: {asked()})",
            expected=wanted or "a current context",
            hint="Make the context current on this thread first, or use cuglue.gl.headless()",
        )
    raise NoContextError(
        f"another OpenGL context is current on {ThreadRef.current()}",
        got=found,
        expected=wanted,
        hint="Make the context current in which the object was made",
    )


def check_context() -> None:
    """:func:`require_context` for whoever needs no answer: asks less, as often as OpenGL is asked."""
    for _, context in _getters.values():
        if context():
            return
    require_context()


_getters: dict[WindowSystem, tuple[Any, Any]] = {}


def _ask() -> ContextId | None:
    for api, (display, context) in _getters.items():
        handle = context()
        if handle:
            return ContextId(api, display() or 0, handle)
    return None


def is_current(wanted: ContextId) -> bool:
    """Whether :func:`current_context` would find ``wanted``. Asked at every call, so it makes no record of it."""
    for api, (display, context) in _getters.items():
        handle = context()
        if handle:
            return api is wanted.api and handle == wanted.context and (display() or 0) == wanted.display
    return False


def question(wanted: ContextId) -> tuple[Callable[[], int | None], int]:
    """A question and its answer where ``wanted`` is current: :func:`is_current`, as cheap as it can be asked.

    Of a live context the handle is enough: it is its address in this process (Mesa, NVIDIA).
    """
    if not _getters:
        _find_libraries()
    if next(iter(_getters), None) is wanted.api:
        return _getters[wanted.api][1], wanted.context
    return partial(is_current, wanted), True  # another library is asked before


def _find_libraries() -> bool:
    """Note the libraries loaded since the last look; True when there are any."""
    before = len(_getters)
    for api, libraries, display, context in _CANDIDATES:
        if api in _getters:
            continue
        for name in libraries:
            found = _loaded(name)
            if found is not None:
                _getters[api] = (_getter(found, display), _getter(found, context))
                break
    return len(_getters) > before


_CANDIDATES: tuple[tuple[WindowSystem, tuple[str, ...], str, str], ...] = (
    (
        (WindowSystem.EGL, ("libEGL.dll",), "eglGetCurrentDisplay", "eglGetCurrentContext"),
        (WindowSystem.WGL, ("opengl32.dll",), "wglGetCurrentDC", "wglGetCurrentContext"),
    )
    if sys.platform == "win32"
    else (
        (WindowSystem.EGL, ("libEGL.so.1",), "eglGetCurrentDisplay", "eglGetCurrentContext"),
        (WindowSystem.GLX, ("libGLX.so.0", "libGL.so.1"), "glXGetCurrentDisplay", "glXGetCurrentContext"),
    )
)


def _getter(found: Any, name: str) -> Any:
    # It reads a variable of the thread: no moment to let other Python threads run, at every GL call.
    return ctypes.PYFUNCTYPE(ctypes.c_void_p)((name, found))


def _loaded(name: str) -> Any:
    """The library when the process has it already; None otherwise. Loads nothing."""
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32")
        kernel.GetModuleHandleW.restype, kernel.GetModuleHandleW.argtypes = (
            ctypes.c_void_p,
            (ctypes.c_wchar_p,),
        )
        return ctypes.WinDLL(name) if kernel.GetModuleHandleW(name) else None
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
