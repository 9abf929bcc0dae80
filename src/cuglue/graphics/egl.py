"""EGL through ctypes: devices, displays and contexts.

Owns the calls into ``libEGL``. Uses ctypes because PyOpenGL binds its
platform when it is imported: imported first with GLX, its EGL calls fail. Must not know GL objects, threads' queues
or CUDA; it sets no environment variable and never terminates a display (displays are shared by the whole process).
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import DriverError, UnsupportedError

NONE = 0x3038
OPENGL_API = 0x30A2
_DRAW, _READ = 0x3059, 0x305A
_EXTENSIONS = 0x3055
_VENDOR = 0x3053
_PLATFORM_DEVICE = 0x313F
_PLATFORM_SURFACELESS = 0x31DD
_DEVICE_OF_DISPLAY = 0x322C
_CUDA_DEVICE = 0x323A
_DEVICE_UUID = 0x335C
_DRM_DEVICE_FILE = 0x3233

_CONFIG = (0x3033, 0x0001, 0x3040, 0x0008, NONE)  # SURFACE_TYPE: PBUFFER, RENDERABLE_TYPE: OPENGL
_CONFIG_ANY_SURFACE = (0x3040, 0x0008, NONE)  # the surfaceless platform may offer no pbuffer
_CONTEXT_MAJOR, _CONTEXT_MINOR, _PROFILE_MASK, _CORE = 0x3098, 0x30FB, 0x30FD, 0x0001

_ERRORS = {
    0x3000: "EGL_SUCCESS",
    0x3001: "EGL_NOT_INITIALIZED",
    0x3002: "EGL_BAD_ACCESS",
    0x3003: "EGL_BAD_ALLOC",
    0x3004: "EGL_BAD_ATTRIBUTE",
    0x3005: "EGL_BAD_CONFIG",
    0x3006: "EGL_BAD_CONTEXT",
    0x3007: "EGL_BAD_CURRENT_SURFACE",
    0x3008: "EGL_BAD_DISPLAY",
    0x3009: "EGL_BAD_MATCH",
    0x300A: "EGL_BAD_NATIVE_PIXMAP",
    0x300B: "EGL_BAD_NATIVE_WINDOW",
    0x300C: "EGL_BAD_PARAMETER",
    0x300D: "EGL_BAD_SURFACE",
    0x300E: "EGL_CONTEXT_LOST",
    0x322B: "EGL_BAD_DEVICE_EXT",
}
_HINTS = {
    0x3002: "The context is current on another thread: release it there first",
    0x3009: "The display has no config for desktop OpenGL: install the vendor's EGL driver",
    0x3001: "The display could not be opened: is the GPU's device file (/dev/dri, /dev/nvidia*) accessible here?",
}


def error_name(code: int) -> str:
    """Name an ``eglGetError`` code; an unknown code is shown in hexadecimal."""
    return _ERRORS.get(code, f"0x{code:04X}")


@dataclass(frozen=True, slots=True)
class EglDevice:
    """One device that EGL can render on.

    ``cuda_device`` is the ordinal the driver reports (None: not a CUDA device, or it would not say), ``uuid`` the
    device's 16 bytes where the driver tells them, ``handle`` the EGLDeviceEXT.
    """

    handle: int
    vendor: str
    cuda_device: int | None
    software: bool
    extensions: tuple[str, ...]
    uuid: bytes | None = None
    file: str | None = None

    def __str__(self) -> str:
        cuda = "no CUDA ordinal" if self.cuda_device is None else f"CUDA device {self.cuda_device}"
        identity = f", uuid {self.uuid.hex()}" if self.uuid else ""
        return f"{self.vendor}{' (software)' if self.software else ''}: {cuda}{identity}"


class Native(NamedTuple):
    """A context that we created and the display it lives on."""

    display: int
    context: int


# --- the library ----------------------------------------------------------------------------------------------

_P, _I, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "eglGetProcAddress": (_P, (_S,)),
    "eglGetError": (_I, ()),
    "eglInitialize": (ctypes.c_uint, (_P, _P, _P)),
    "eglQueryString": (_S, (_P, _I)),
    "eglBindAPI": (ctypes.c_uint, (ctypes.c_uint,)),
    "eglQueryAPI": (ctypes.c_uint, ()),
    "eglChooseConfig": (ctypes.c_uint, (_P, _P, _P, _I, _P)),
    "eglCreateContext": (_P, (_P, _P, _P, _P)),
    "eglDestroyContext": (ctypes.c_uint, (_P, _P)),
    "eglMakeCurrent": (ctypes.c_uint, (_P, _P, _P, _P)),
    "eglGetCurrentContext": (_P, ()),
    "eglGetCurrentDisplay": (_P, ()),
    "eglGetCurrentSurface": (_P, (_I,)),
}
_EXTENSION_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "eglGetPlatformDisplayEXT": (_P, (ctypes.c_uint, _P, _P)),
    "eglQueryDevicesEXT": (ctypes.c_uint, (_I, _P, _P)),
    "eglQueryDeviceStringEXT": (_S, (_P, _I)),
    "eglQueryDeviceAttribEXT": (ctypes.c_uint, (_P, _I, _P)),
    "eglQueryDeviceBinaryEXT": (ctypes.c_uint, (_P, _I, _I, _P, _P)),
    "eglQueryDisplayAttribEXT": (ctypes.c_uint, (_P, _I, _P)),
}
_NAMES = {"linux": "libEGL.so.1", "win32": "libEGL.dll", "darwin": "libEGL.dylib"}


@functools.cache
def library() -> Any:
    """Load libEGL once and declare the functions used here.

    Raises:
        UnsupportedError: libEGL is not installed; the error carries the loader's words.
    """
    name = _NAMES.get(sys.platform, "libEGL.so.1")
    try:
        egl = ctypes.CDLL(name)
    except OSError as error:
        raise UnsupportedError(
            f"{name} cannot be loaded",
            reason="egl",
            got=error,
            hint="Install it (Debian: libegl1 libegl-mesa0)",
        ) from error
    for function, (result, arguments) in _SIGNATURES.items():
        entry = getattr(egl, function)
        entry.restype, entry.argtypes = result, arguments
    return egl


@functools.cache
def _extension(name: str) -> Any:
    """An extension entry point, or None where this libEGL does not have it."""
    address = library().eglGetProcAddress(name.encode())
    result, arguments = _EXTENSION_SIGNATURES[name]
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


def _failure(call: str, what: str) -> DriverError:
    code = library().eglGetError()
    return DriverError(what, code=code, name=error_name(code), call=call, hint=_HINTS.get(code))


def _words(text: bytes | None) -> tuple[str, ...]:
    return tuple(text.decode(errors="replace").split()) if text else ()


# --- devices --------------------------------------------------------------------------------------------------


def list_egl_devices() -> tuple[EglDevice, ...]:
    """List the devices of the EGL device platform, in EGL's own order (which is not CUDA's).

    Raises:
        UnsupportedError: there is no libEGL. A libEGL without the device extensions gives an empty tuple.
    """
    query = _extension("eglQueryDevicesEXT")
    count = ctypes.c_int()
    if query is None or not query(0, None, ctypes.byref(count)) or not count.value:
        return ()
    handles = (ctypes.c_void_p * count.value)()
    if not query(count.value, handles, ctypes.byref(count)):
        raise _failure("eglQueryDevicesEXT", "the EGL devices cannot be listed")
    return tuple(_describe_device(handle) for handle in handles[: count.value] if handle)


def _describe_device(handle: int) -> EglDevice:
    text = _extension("eglQueryDeviceStringEXT")
    extensions = _words(text(handle, _EXTENSIONS)) if text else ()
    cuda = _cuda_ordinal(handle)
    vendor = text(handle, _VENDOR) if text and "EGL_EXT_device_query_name" in extensions else None
    file = text(handle, _DRM_DEVICE_FILE) if text and "EGL_EXT_device_drm" in extensions else None
    software = "EGL_MESA_device_software" in extensions
    name = (
        vendor.decode()
        if vendor
        else "NVIDIA"
        if cuda is not None
        else "Mesa"
        if software
        else "unknown vendor"
    )
    return EglDevice(
        handle, name, cuda, software, extensions, _uuid(handle, extensions), file.decode() if file else None
    )


def _cuda_ordinal(device: int) -> int | None:
    """EGL_CUDA_DEVICE_NV; None when the device has no such attribute (the query then fails with BAD_ATTRIBUTE)."""
    query = _extension("eglQueryDeviceAttribEXT")
    value = ctypes.c_ssize_t(-1)
    if query is None or not query(device, _CUDA_DEVICE, ctypes.byref(value)):
        library().eglGetError()
        return None
    return value.value if value.value >= 0 else None


def _uuid(device: int, extensions: tuple[str, ...]) -> bytes | None:
    query = _extension("eglQueryDeviceBinaryEXT")
    if query is None or "EGL_EXT_device_persistent_id" not in extensions:
        return None
    raw, size = (ctypes.c_ubyte * 16)(), ctypes.c_int()
    if not query(device, _DEVICE_UUID, 16, raw, ctypes.byref(size)) or size.value != 16:
        library().eglGetError()
        return None
    return bytes(raw)


def device_of_display(display: int) -> EglDevice | None:
    """The device behind a display, or None where EGL does not tell."""
    query = _extension("eglQueryDisplayAttribEXT")
    device = ctypes.c_ssize_t()
    if query is None or not query(display, _DEVICE_OF_DISPLAY, ctypes.byref(device)) or not device.value:
        library().eglGetError()
        return None
    return _describe_device(device.value)


# --- contexts -------------------------------------------------------------------------------------------------


def open_display(device: EglDevice | None) -> int:
    """Initialise the display of ``device``, or Mesa's surfaceless one for None; returns the EGLDisplay."""
    get = _extension("eglGetPlatformDisplayEXT")
    if get is None:
        raise UnsupportedError(
            "libEGL", reason="egl", got="no EGL_EXT_platform_base", hint="Use an EGL of 2014 or newer"
        )
    if device is None:
        display, what = get(_PLATFORM_SURFACELESS, None, None), "Mesa's surfaceless EGL display"
    else:
        display, what = get(_PLATFORM_DEVICE, device.handle, None), f"the EGL display of {device}"
    if not display:
        raise _failure("eglGetPlatformDisplayEXT", what)
    if not library().eglInitialize(display, None, None):
        raise _failure("eglInitialize", what)
    return int(display)


def create_context(display: int, version: tuple[int, int] = (4, 5)) -> Native:
    """Create an OpenGL core context without a surface. It is not made current. The bound API is put back."""
    egl, config = library(), ctypes.c_void_p()
    before = egl.eglQueryAPI()
    if not egl.eglBindAPI(OPENGL_API):
        raise _failure("eglBindAPI", "this EGL has no desktop OpenGL")
    try:
        for wanted in (_CONFIG, _CONFIG_ANY_SURFACE):
            count = ctypes.c_int()
            attributes = (ctypes.c_int * len(wanted))(*wanted)
            if (
                egl.eglChooseConfig(display, attributes, ctypes.byref(config), 1, ctypes.byref(count))
                and count.value
            ):
                break
        else:
            raise _failure("eglChooseConfig", "no EGL config renders desktop OpenGL")
        values = (_CONTEXT_MAJOR, version[0], _CONTEXT_MINOR, version[1], _PROFILE_MASK, _CORE, NONE)
        context = egl.eglCreateContext(display, config, None, (ctypes.c_int * len(values))(*values))
        if not context:
            raise _failure("eglCreateContext", f"an OpenGL {version[0]}.{version[1]} core context")
        return Native(display, int(context))
    finally:
        if before != OPENGL_API and before != NONE:
            egl.eglBindAPI(before)


def make_current(native: Native) -> None:
    """Make the context current on the calling thread, without surfaces, and bind the OpenGL API there."""
    egl = library()
    egl.eglBindAPI(OPENGL_API)
    if not egl.eglMakeCurrent(native.display, None, None, native.context):
        raise _failure("eglMakeCurrent", f"EGL context {native.context:#x}")


def release_current(display: int) -> None:
    """Leave the calling thread without a current context."""
    if not library().eglMakeCurrent(display, None, None, None):
        raise _failure("eglMakeCurrent", f"releasing the context current on EGL display {display:#x}")


def remember_current() -> Callable[[], None]:
    """Note the calling thread's EGL context and surfaces; the function returned makes them current again."""
    egl = library()
    context, display = egl.eglGetCurrentContext(), egl.eglGetCurrentDisplay()
    surfaces = egl.eglGetCurrentSurface(_DRAW), egl.eglGetCurrentSurface(_READ)

    def give_back() -> None:
        if context and not egl.eglMakeCurrent(display, *surfaces, context):
            raise _failure("eglMakeCurrent", f"giving back EGL context {context:#x}")

    return give_back


def destroy_context(native: Native) -> None:
    """Destroy a context; while it is current on some thread, EGL keeps it until it no longer is."""
    if not library().eglDestroyContext(native.display, native.context):
        raise _failure("eglDestroyContext", f"EGL context {native.context:#x}")
