"""Headless contexts, adopted ones, and the choice of a device; on Mesa where there is no GPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from cuglue.errors import ClosedError, DriverError, NoContextError, UnsupportedError, WrongThreadError
from cuglue.graphics import egl, glcontext, glcurrent
from cuglue.graphics.egl import EglDevice
from cuglue.graphics.glcontext import current, headless
from cuglue.graphics.glcurrent import (
    ContextId,
    WindowSystem,
    check_context,
    current_context,
    require_context,
)

pytestmark = pytest.mark.gl


def run_python(program: str, **environment: str) -> str:
    """What a fresh interpreter prints; warnings are errors there too."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYOPENGL", "DISPLAY"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**clean, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


# --- making one -----------------------------------------------------------------------------------------------


def test_a_headless_context_is_current_and_says_what_it_is() -> None:
    assert current_context() is None
    with headless() as context:
        assert current_context() == context.id
        assert context.id.api is WindowSystem.EGL
        assert context.version.startswith("4.")
        assert context.vendor
        assert context.renderer
        assert str(context.id) in repr(context)
        assert context.thread is not None
        assert context.thread.ident == threading.get_ident()
        assert context.software is (context.cuda_device is None)
        assert not context.closed
    assert context.closed
    assert current_context() is None
    context.close()
    with pytest.raises(ClosedError):
        context.make_current()
    with pytest.raises(ClosedError):
        context.ops.call(int)


def test_no_device_means_the_software_renderer() -> None:
    with headless(None) as context:
        assert context.software
        assert context.cuda_device is None
        assert context.uuid is None


def test_a_worker_context_is_not_current_here() -> None:
    with headless(thread="worker") as context:
        assert current_context() is None
        assert context.ops.call(current_context) == context.id
        assert context.thread != glcurrent.ThreadRef.current()
        with pytest.raises(WrongThreadError, match=r"belongs to its worker.*Use ops\.call"):
            context.make_current()
        context.ops.call(context.make_current)
        context.release()  # nothing is current here: nothing to release
        assert context.ops.call(current_context) == context.id
    assert context.closed


def test_two_contexts_take_turns_on_one_thread() -> None:
    with headless() as first, headless() as second:
        assert current_context() == second.id
        first.make_current()
        assert current_context() == first.id
        second.close()
        assert current_context() == first.id  # closing another one leaves this one current
    assert current_context() is None


def test_closing_runs_what_was_posted_in_its_own_context() -> None:
    ran: list[object] = []
    with headless() as first:
        first.ops.post(lambda: ran.append(current_context()))
        with headless() as second:
            first.close()
            assert ran == [first.id]
            assert current_context() == second.id


def test_closing_frees_the_context_and_its_objects() -> None:
    """A context that leaked would keep its display's memory; a destroyed one is refused by EGL."""
    context = headless()
    native = egl.Native(context.id.display, context.id.context)
    context.close()
    with pytest.raises(DriverError, match="eglMakeCurrent returned EGL_BAD_CONTEXT") as caught:
        egl.make_current(native)
    assert caught.value.code == 0x3006
    with pytest.raises(DriverError, match="EGL_BAD_CONTEXT"):
        egl.destroy_context(native)


def test_reports_70_many_contexts_leave_nothing() -> None:
    before = threading.active_count()
    for n in range(20):
        headless(thread="worker" if n % 2 else "inline").close()
    assert threading.active_count() == before
    assert current_context() is None


def test_closing_on_another_thread_names_both_and_changes_nothing() -> None:
    context = headless()
    caught: list[BaseException] = []

    def elsewhere() -> None:
        for action in (context.close, context.make_current):
            try:
                action()
            except (WrongThreadError, DriverError) as error:
                caught.append(error)

    thread = threading.Thread(target=elsewhere, name="elsewhere")
    thread.start()
    thread.join()
    assert "'elsewhere'" in str(caught[0])
    assert "'MainThread'" in str(caught[0])
    assert isinstance(caught[1], DriverError)
    assert caught[1].name == "EGL_BAD_ACCESS"
    assert "another thread" in str(caught[1])
    assert context.ops.call(current_context) == context.id
    context.close()


def test_a_failure_while_making_one_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[egl.Native] = []
    real = egl.create_context
    monkeypatch.setattr(egl, "create_context", lambda display: made.append(real(display)) or made[-1])

    def fail() -> Any:
        raise UnsupportedError("PyOpenGL", reason="pyopengl")

    monkeypatch.setattr(glcontext, "load_gl", fail)
    for thread in ("inline", "worker"):
        with pytest.raises(UnsupportedError):
            headless(thread=thread)  # type: ignore[arg-type]
        assert current_context() is None
        with pytest.raises(DriverError, match="EGL_BAD_CONTEXT"):
            egl.destroy_context(made.pop())


def test_a_forgotten_context_warns_and_is_freed_by_the_next() -> None:
    held = [headless()]
    identity = held[0].id
    native = held[0].native

    def forget() -> None:
        held.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match=r"made at .*test_glcontext\.py:\d+, was never closed"):
        forget()
    assert current_context() == identity  # drawing goes on until another takes its place
    with headless() as context:
        assert native.destroyed
        assert current_context() == context.id


# --- adopting one ---------------------------------------------------------------------------------------------


def test_current_adopts_and_never_frees() -> None:
    with headless() as context:
        adopted = current()
        assert adopted.id == context.id
        assert (adopted.renderer, adopted.version) == (context.renderer, context.version)
        assert adopted.cuda_device == context.cuda_device
        assert adopted.ops.call(current_context) == context.id
        adopted.make_current()  # it is: nothing happens
        with pytest.raises(NoContextError, match=r"made by the application.*GlOps\.inline\(\)"):
            adopted.release()
        adopted.close()
        assert adopted.closed
        assert current_context() == context.id
        with headless():
            second = current()
        with pytest.raises(NoContextError):
            second.make_current()
        second.close()


def test_reports_30_without_a_context_current_says_what_was_asked() -> None:
    with headless():
        pass
    with pytest.raises(
        NoContextError, match=r"no OpenGL context is current on thread 'MainThread'.*asked: .*EGL"
    ):
        current()


def test_an_adopted_context_may_be_forgotten() -> None:
    with headless() as context:
        current()
        gc.collect()  # warnings are errors
        assert current_context() == context.id


def test_every_window_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def getters(display: int, context: int) -> tuple[Any, Any]:
        return (lambda: display), (lambda: context)

    monkeypatch.setattr(
        glcurrent, "_getters", {WindowSystem.EGL: getters(0, 0), WindowSystem.GLX: getters(0x11, 0x22)}
    )
    assert current_context() == ContextId(WindowSystem.GLX, 0x11, 0x22)
    assert str(current_context()) == "GLX context 0x22 (display 0x11)"
    context = glcontext.ForeignContext(ContextId(WindowSystem.GLX, 0x11, 0x22))
    context.make_current()
    monkeypatch.setattr(glcurrent, "_getters", {WindowSystem.GLX: getters(0x11, 0x33)})
    with pytest.raises(NoContextError, match=r"got GLX context 0x33.*expected GLX context 0x22"):
        context.make_current()


def test_a_context_is_told_apart_by_library_display_and_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody wants the record of it."""

    def getters(display: int | None, context: int) -> tuple[Any, Any]:
        return (lambda: display), (lambda: context)

    wanted = ContextId(WindowSystem.GLX, 0x11, 0x22)
    nothing = getters(0, 0)
    same = {WindowSystem.EGL: nothing, WindowSystem.GLX: getters(0x11, 0x22)}
    monkeypatch.setattr(glcurrent, "_getters", same)
    assert require_context(wanted) == require_context() == wanted
    check_context()
    for others in (
        {WindowSystem.EGL: nothing, WindowSystem.GLX: getters(0x12, 0x22)},
        {WindowSystem.EGL: nothing, WindowSystem.GLX: getters(0x11, 0x23)},
        {WindowSystem.EGL: getters(0x11, 0x22), WindowSystem.GLX: getters(0x11, 0x22)},
        {WindowSystem.EGL: nothing, WindowSystem.GLX: getters(None, 0x22)},
    ):
        monkeypatch.setattr(glcurrent, "_getters", others)
        with pytest.raises(NoContextError, match="another OpenGL context is current"):
            require_context(wanted)
        check_context()  # one is current, whichever
    monkeypatch.setattr(glcurrent, "_getters", {WindowSystem.EGL: nothing, WindowSystem.GLX: nothing})
    for ask in (check_context, lambda: require_context(wanted)):
        with pytest.raises(NoContextError, match="no OpenGL context is current"):
            ask()


def test_asking_loads_no_library() -> None:
    program = """
from cuglue.graphics.glcurrent import asked, current_context
assert current_context() is None
print(asked())
with open("/proc/self/maps") as maps:
    text = maps.read()
print(any(name in text for name in ("libEGL", "libGL", "libOpenGL")))
"""
    assert run_python(program) == "no EGL, GLX or WGL library is loaded\nFalse"


def test_glx_is_asked_once_its_library_is_there() -> None:
    program = """
import ctypes
from cuglue.graphics.glcontext import headless
from cuglue.graphics.glcurrent import asked, current_context
with headless() as context:
    ctypes.CDLL("libGLX.so.0")
    assert current_context() == context.id
assert current_context() is None
print(asked())
"""
    assert run_python(program, PYOPENGL_PLATFORM="egl") == "EGL, GLX"


# --- PyOpenGL's platform --------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["glx", "egl", None])
def test_it_works_whatever_platform_pyopengl_was_imported_with(platform: str | None) -> None:
    program = """
import OpenGL.GL as GL, os
import glpixels
from cuglue.graphics.glcontext import current, headless
before = dict(os.environ)
with headless() as context:
    name = GL.GLuint()
    GL.glCreateBuffers(1, name)
    GL.glNamedBufferData(name.value, 4, None, GL.GL_STATIC_DRAW)
    glpixels.write_buffer(name.value, b"abcd")
    assert glpixels.read_buffer(name.value).tobytes() == b"abcd"
    adopted = current()
    assert adopted.id == context.id
    adopted.close()
with headless(thread="worker") as context:
    assert context.ops.call(lambda: int(GL.glCreateShader(GL.GL_VERTEX_SHADER))) > 0
assert dict(os.environ) == before
print("works")
"""
    environment = {"PYOPENGL_PLATFORM": platform} if platform else {}
    assert run_python(program, **environment) == "works"


def test_errors_are_typed_with_pyopengls_checks_off() -> None:
    program = """
import OpenGL
OpenGL.ERROR_CHECKING = False
import OpenGL.GL as GL
from cuglue.errors import DriverError, NotAllocatedError
from cuglue.graphics import glcalls, globjects
from cuglue.graphics.glcontext import headless
with headless():
    for ask in (globjects.describe_texture, globjects.describe_buffer, globjects.describe_renderbuffer):
        try:
            ask(77)
        except NotAllocatedError:
            print("not allocated")
    try:
        with glcalls.checked("the capability") as gl:
            gl.glEnable(0xDEAD)
    except DriverError as error:
        print(error.name, error.code)
    assert GL.glGetError() == 0
"""
    assert run_python(program).split("\n") == ["not allocated"] * 3 + ["GL_INVALID_ENUM 1280"]


def test_without_pyopengl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "OpenGL.GL", None)
    with pytest.raises(UnsupportedError, match=r"cuglue\[gl\].*PYOPENGL_PLATFORM=egl") as caught:
        headless()
    assert caught.value.reason == "pyopengl"
    assert current_context() is None


def test_without_libegl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egl, "_NAMES", {sys.platform: "libNoSuchEGL.so.1"})
    egl.library.cache_clear()
    try:
        with pytest.raises(
            UnsupportedError, match=r"libNoSuchEGL\.so\.1 cannot be loaded.*libegl1"
        ) as caught:
            egl.library()
        assert caught.value.reason == "egl"
    finally:
        egl.library.cache_clear()


# --- devices --------------------------------------------------------------------------------------------------


def test_devices_are_listed() -> None:
    devices = egl.list_egl_devices()
    assert devices
    for device in devices:
        assert device.vendor
        assert device.extensions
        assert device.software == ("EGL_MESA_device_software" in device.extensions)
        assert not (device.software and device.cuda_device is not None)
    assert len({device.handle for device in devices}) == len(devices)


A, B = b"a" * 16, b"b" * 16


def gpu(ordinal: int | None, uuid: bytes | None = None, vendor: str = "NVIDIA") -> EglDevice:
    return EglDevice(id(object()), vendor, ordinal, ordinal is None, ("EGL_NV_device_cuda",), uuid)


def test_reports_41_the_device_is_found_by_its_cuda_ordinal_or_uuid_never_by_index() -> None:
    mesa, one, zero = gpu(None, vendor="Mesa"), gpu(1, B), gpu(0, A)
    devices = (mesa, one, zero)
    assert glcontext._choose(devices, 0, None) is zero
    assert glcontext._choose(devices, 1, None) is one
    assert glcontext._choose(devices, 0, B) is one  # CUDA_VISIBLE_DEVICES=1: ordinal 0 is the other GPU
    assert glcontext._choose((gpu(0), gpu(1)), 1, B).cuda_device == 1  # type: ignore[union-attr]
    assert glcontext._choose((mesa,), 3, None) is None
    assert glcontext._choose((), 0, None) is None


@pytest.mark.parametrize(("ordinal", "uuid"), [(7, None), (0, b"c" * 16)])
def test_reports_44_a_device_that_is_not_there_lists_those_that_are(ordinal: int, uuid: bytes | None) -> None:
    devices = (gpu(None, vendor="Mesa"), gpu(0, A), gpu(1, B))
    with pytest.raises(UnsupportedError) as caught:
        glcontext._choose(devices, ordinal, uuid)
    text = str(caught.value)
    assert caught.value.reason == "device_mismatch"
    assert f"CUDA device {ordinal}" in text
    for words in (
        "Mesa (software): no CUDA ordinal",
        f"NVIDIA: CUDA device 1, uuid {B.hex()}",
        "CUDA_VISIBLE_DEVICES",
    ):
        assert words in text


def test_row_43_a_gpu_that_turns_out_to_be_another_is_refused_and_its_context_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """EGL may not tell a UUID; OpenGL then does, once the context is current."""
    real = egl.open_display
    monkeypatch.setattr(glcontext, "list_egl_devices", lambda: (gpu(0),))
    monkeypatch.setattr(egl, "open_display", lambda device: real(None))
    monkeypatch.setattr(glcontext, "_SOFTWARE", ())
    monkeypatch.setattr(glcontext, "_gl_uuid", lambda gl: A)
    with headless(uuid=A) as context:
        assert context.cuda_device == 0
        assert context.uuid == A
    with pytest.raises(UnsupportedError, match="no EGL device renders"):
        headless(uuid=B)
    assert current_context() is None


@pytest.mark.parametrize(
    ("renderer", "software"),
    [
        ("llvmpipe (LLVM 15.0.6, 256 bits)", True),
        ("softpipe", True),
        ("Google SwiftShader", True),
        ("GDI Generic", True),
        ("NVIDIA H200/PCIe/SSE2", False),
        ("Mesa Intel(R) UHD Graphics (CML GT2)", False),
    ],
)
def test_reports_51_software_renderers_are_known_by_name(
    renderer: str, software: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import OpenGL.GL as GL

    with headless(None):
        monkeypatch.setattr(GL, "glGetString", lambda name: renderer.encode())
        context = current()
        monkeypatch.undo()
        assert context.software is software
        context.close()


def test_egl_errors_are_named() -> None:
    assert egl.error_name(0x3002) == "EGL_BAD_ACCESS"
    assert egl.error_name(0x3008) == "EGL_BAD_DISPLAY"
    assert egl.error_name(0x1234) == "0x1234"
    with headless() as context:
        with pytest.raises(DriverError, match=r"eglCreateContext returned EGL_BAD_(MATCH|ATTRIBUTE)"):
            egl.create_context(context.id.display, (9, 9))


@pytest.mark.gpu
def test_on_a_gpu_machine_the_context_is_on_the_gpu() -> None:
    with headless(0) as context:
        assert not context.software
        assert context.cuda_device == 0
        assert context.uuid is not None
        assert "NVIDIA" in context.vendor
        adopted = current()
        assert adopted.cuda_device == 0
        adopted.close()


def test_a_closed_context_cannot_be_released() -> None:
    context = glcontext.headless()
    context.close()
    with pytest.raises(ClosedError):
        context.release()
