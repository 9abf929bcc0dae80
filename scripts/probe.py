"""What this machine can do, asked of the libraries themselves.

Run by setup.sh before any wheel is there, so standard library only.

``probe.py cuda`` prints the extra that fits the NVIDIA driver: cuda13, cuda12 or none.
``probe.py gl`` exits 0 where a headless OpenGL context can be made current, else 1 with the reason: that a package is
installed proves nothing (a container may hold half of Mesa), a context that answers does.
"""

import ctypes
import ctypes.util
import sys
from typing import Any

EGL_PLATFORM_SURFACELESS_MESA = 0x31DD
EGL_PLATFORM_DEVICE_EXT = 0x313F
EGL_OPENGL_API = 0x30A2
EGL_CONFIG = [0x3033, 0x0001, 0x3040, 0x0008, 0x3038]  # SURFACE_TYPE=PBUFFER, RENDERABLE_TYPE=OPENGL, NONE
GL_VERSION = 0x1F02


class NoContextError(Exception):
    """Why there is no headless OpenGL here."""


def cuda_extra() -> str:
    """Return the extra for this machine's CUDA driver; "none" where no driver of CUDA 12 or later answers."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "none"
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return "none"
    if version.value >= 13000:
        return "cuda13"
    return "cuda12" if version.value >= 12000 else "none"


def load(name: str) -> ctypes.CDLL:
    """Load one shared library, or say which one is missing."""
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise NoContextError(f"{name} does not load: {error}") from None


def displays(egl: ctypes.CDLL, get_proc: Any) -> list[tuple[str, int]]:
    """List the EGL displays that need no window system: Mesa's surfaceless one, then one per EGL device."""
    pointer = ctypes.c_void_p
    address = get_proc(b"eglGetPlatformDisplayEXT")
    if not address:
        raise NoContextError("libEGL.so.1 has no eglGetPlatformDisplayEXT")
    platform_display = ctypes.CFUNCTYPE(pointer, ctypes.c_uint, pointer, pointer)(address)
    found = [("surfaceless", platform_display(EGL_PLATFORM_SURFACELESS_MESA, None, None))]
    address = get_proc(b"eglQueryDevicesEXT")
    if address:
        out = ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_int)
        query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, *out)(address)
        devices, count = (pointer * 16)(), ctypes.c_int(0)
        if query(16, devices, ctypes.byref(count)):
            for index, device in enumerate(devices[: count.value]):
                found.append((f"device {index}", platform_display(EGL_PLATFORM_DEVICE_EXT, device, None)))
    return [(name, display) for name, display in found if display]


def gl_version_on(egl: ctypes.CDLL, get_proc: Any, display: int) -> str:
    """Make a context current on ``display`` without a surface, and return what OpenGL says its version is."""
    pointer = ctypes.c_void_p
    shown = pointer(display)
    if not egl.eglInitialize(shown, None, None):
        raise NoContextError("eglInitialize failed")
    config, count = pointer(), ctypes.c_int(0)
    attributes = (ctypes.c_int * len(EGL_CONFIG))(*EGL_CONFIG)
    if not egl.eglBindAPI(EGL_OPENGL_API):
        raise NoContextError("eglBindAPI(OpenGL) failed: only OpenGL ES here")
    egl.eglChooseConfig(shown, attributes, ctypes.byref(config), 1, ctypes.byref(count))
    if count.value < 1:
        raise NoContextError("eglChooseConfig found no OpenGL configuration")
    egl.eglCreateContext.restype = pointer
    context = egl.eglCreateContext(shown, config, None, None)
    if not context:
        raise NoContextError("eglCreateContext failed")
    if not egl.eglMakeCurrent(shown, None, None, pointer(context)):
        raise NoContextError("eglMakeCurrent without a surface failed")
    get_string = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_uint)(get_proc(b"glGetString"))
    version = get_string(GL_VERSION)
    if not version:
        raise NoContextError("the context is current but glGetString(GL_VERSION) is NULL")
    return str(version, errors="replace")


def gl_version() -> str:
    """Return the OpenGL version of the first headless display that works.

    Raises:
        NoContextError: no library, no display, or none that gives a desktop OpenGL context.
    """
    egl = load("libEGL.so.1")
    if not (ctypes.util.find_library("OpenGL") or ctypes.util.find_library("GL")):
        raise NoContextError("neither libOpenGL.so.0 nor libGL.so.1 is there, and PyOpenGL needs one of them")
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    egl.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    refusals = []
    for name, display in displays(egl, egl.eglGetProcAddress):
        try:
            return gl_version_on(egl, egl.eglGetProcAddress, display)
        except NoContextError as error:
            refusals.append(f"{name}: {error}")
    raise NoContextError("no EGL display works: " + ("; ".join(refusals) or "none offered"))


def main(arguments: list[str]) -> int:
    """Answer one question; see the module's docstring."""
    if arguments == ["cuda"]:
        print(cuda_extra())
        return 0
    if arguments == ["gl"]:
        try:
            print(f"OpenGL {gl_version()}")
        except NoContextError as error:
            print(error)
            return 1
        return 0
    print("usage: probe.py cuda|gl", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
