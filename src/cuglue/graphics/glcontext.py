"""OpenGL contexts: headless ones of our own, and the one an application made current.

Owns :class:`GlContext`, which device a headless context is made on, and when it is freed. Must not know what is
drawn, registered or mapped. It sets no environment variable: hybrid laptops get advice, not a changed process.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import weakref
from typing import Any, Literal

from ..arguments import shown, whole_of
from ..core import process
from ..errors import DriverError, NoContextError, UnsupportedError, UsageError, WrongThreadError
from ..lifecycle import Owned
from . import egl
from .egl import EglDevice, list_egl_devices
from .glcalls import load_gl
from .glcurrent import ContextId, ThreadRef, WindowSystem, current_context, require_context
from .glops import GlOps, InlineOps, WorkerOps

#: Substrings of GL_RENDERER that mean the CPU draws: no CUDA device can share memory with those.
_SOFTWARE = (
    "llvmpipe",
    "softpipe",
    "swrast",
    "software rasterizer",
    "swiftshader",
    "gdi generic",
    "basic render",
)
_GL_DEVICE_UUID = 0x9597


class EglContext:
    """A context that we created, as the thread that owns it holds it."""

    __slots__ = ("_native", "destroyed", "id")

    def __init__(self, native: egl.Native) -> None:
        self._native = native
        self.id = ContextId(WindowSystem.EGL, native.display, native.context)
        self.destroyed = False

    def make_current(self) -> None:
        egl.make_current(self._native)

    def release(self) -> None:
        """Take the context off the calling thread, if it is current there."""
        if current_context() == self.id:
            egl.release_current(self._native.display)

    def destroy(self) -> None:
        if not self.destroyed:
            self.release()
            egl.destroy_context(self._native)
            self.destroyed = True


class ForeignContext:
    """A context that the application made: we use it where it is current and leave its life alone."""

    __slots__ = ("id",)
    destroyed = False

    def __init__(self, identity: ContextId) -> None:
        self.id = identity

    def make_current(self) -> None:
        require_context(self.id)  # only the toolkit that created it can make it current

    def release(self) -> None:
        if current_context() == self.id:
            raise NoContextError(
                f"{self.id} was made by the application",
                got="a request to move it to another thread",
                hint="Use GlOps.inline() on its thread, or GlOps.pumped() and ops.pump() there",
            )

    def destroy(self) -> None:
        """Nothing: the application frees it."""


class GlContext(Owned):
    """An OpenGL context and the way to run calls in it.

    Attributes:
        id: identity of the context (window system, display and context handles).
        vendor, renderer, version: the strings OpenGL reports.
        cuda_device: CUDA ordinal of the GPU that renders, or None: a software renderer, or EGL does not tell.
        uuid: 16 bytes that identify the GPU across APIs, where the driver tells them.
        software: True when the CPU renders; such a context shares no memory with CUDA.
        ops: runs functions where the context is current.
    """

    ops: GlOps

    def __init__(self, native: EglContext | ForeignContext, device: EglDevice | None) -> None:
        """Describe the context current on this thread; use :func:`headless` or :func:`current` instead."""
        gl = load_gl()
        self.native = native
        self.vendor, self.renderer, self.version = (
            (gl.glGetString(name) or b"").decode(errors="replace")
            for name in (gl.GL_VENDOR, gl.GL_RENDERER, gl.GL_VERSION)
        )
        self.software = any(word in self.renderer.lower() for word in _SOFTWARE)
        self.cuda_device = device.cuda_device if device else None
        # Mesa's software renderers put their version there.
        self.uuid = (device.uuid if device else None) or (None if self.software else _gl_uuid(gl))
        self.ops = InlineOps(native.id)

    @property
    def id(self) -> ContextId:
        return self.native.id

    @property
    def thread(self) -> ThreadRef | None:
        """The thread on which calls through ``ops`` run."""
        return self.ops.thread

    @property
    def closed(self) -> bool:
        """True after ``close()``, also when the worker thread that owned the context has ended."""
        return super().closed or self.native.destroyed

    def make_current(self) -> None:
        """Make the context current on the calling thread; ``ops`` then run inline on it.

        A context that the application made must already be current there.

        Raises:
            WrongThreadError: the context belongs to a worker thread.
            DriverError: EGL_BAD_ACCESS when it is still current on another thread.
        """
        self._check_open()
        if isinstance(self.ops, WorkerOps):
            if current_context() == self.id:
                return
            raise self._elsewhere(f"{self!r} belongs to its worker", "Use ops.call(...)")
        self.native.make_current()
        if isinstance(self.ops, InlineOps):
            self.ops.move_here()

    def release(self) -> None:
        """Leave the calling thread without this context, so that another thread may make it current."""
        self._check_open()
        if not isinstance(self.ops, WorkerOps):
            self.native.release()

    def hand_over(self, ops: GlOps) -> None:
        """Called by a worker that has taken the context over."""
        self.ops = ops

    def _close(self) -> None:
        if isinstance(self.ops, WorkerOps):
            self.ops.close()
            return
        if isinstance(self.native, ForeignContext):
            self.ops.close()
            return
        if self.ops.alive and self.ops.thread != ThreadRef.current():
            raise self._elsewhere(
                f"closing {self!r}", "Close it there, or make the context with thread='worker'"
            )
        other = current_context()
        give_back = None
        if other != self.id and self.ops.alive and (other is None or other.api is WindowSystem.EGL):
            # What finalisers posted needs this context, not the one that took its place on this thread.
            give_back = egl.remember_current()
            self.native.make_current()
        self.ops.close()
        self.native.destroy()
        if give_back is not None:
            give_back()

    def _elsewhere(self, what: str, hint: str) -> WrongThreadError:
        owner, caller = self.ops.thread, ThreadRef.current()
        return WrongThreadError(what, owner=owner, caller=caller, got=caller, expected=owner, hint=hint)

    def _forgotten(self) -> None:
        if isinstance(self.ops, WorkerOps):
            self.ops.stop()
        elif isinstance(self.native, EglContext):
            _abandoned.put(self.native)

    def __repr__(self) -> str:
        return f"<GlContext {self.renderer} ({self.id})>"


# Contexts that headless() made, by identity: one that took the place of a closed one replaces it.
_ours: weakref.WeakValueDictionary[ContextId, GlContext] = weakref.WeakValueDictionary()


def _forked() -> None:
    """In a forked child: what an OpenGL driver does at the end of a process would take its parent's contexts along."""
    if _ours:
        process.skip_exit_handlers()


os.register_at_fork(after_in_child=_forked)
_threads = threading.local()  # .ops: the ops of the application's contexts on each thread, by identity


def ops_here() -> GlOps:
    """The ops of the context current on this thread, for callers that name none.

    One per context and thread: what a finaliser posts has to meet a later call. A context of :func:`headless` brings
    its own, so that closing it ends them.

    Raises:
        NoContextError: none is current here.
    """
    identity = require_context()
    context = _ours.get(identity)
    if context is not None and context.ops.alive and context.thread == ThreadRef.current():
        return context.ops
    known: dict[ContextId, InlineOps] = vars(_threads).setdefault("ops", {})
    ops = known.get(identity)
    if ops is None or not ops.alive:  # a forked child has its parent's
        ops = known[identity] = InlineOps(identity)
    return ops


# Contexts forgotten without close(); freed by the next headless(). While one is current somewhere EGL keeps it.
_abandoned: queue.SimpleQueue[EglContext] = queue.SimpleQueue()


def current() -> GlContext:
    """Adopt the OpenGL context current on this thread (EGL, GLX or WGL).

    Ownership: the context stays the application's; closing the returned object only ends its ``ops``.

    Raises:
        NoContextError: none is current here; the message names the libraries that were asked.
    """
    identity = require_context()
    device = egl.device_of_display(identity.display) if identity.api is WindowSystem.EGL else None
    return GlContext(ForeignContext(identity), device)


def headless(
    device: int | None = 0, *, thread: Literal["inline", "worker"] = "inline", uuid: bytes | None = None
) -> GlContext:
    """Make an OpenGL 4.5 core context without a window, on the GPU that CUDA calls ``device``.

    PyOpenGL finds newer functions in it only where ``PYOPENGL_PLATFORM=egl`` is set before OpenGL is first imported.

    Args:
        device: CUDA ordinal, matched against what each EGL device reports, never against EGL's own order. None:
            the software renderer. Where no EGL device knows CUDA, Mesa's surfaceless platform is used: see
            ``software`` of the result.
        thread: "inline": current on the calling thread from now on (in place of another context there);
            "worker": lives on a thread of its own, reached through ``ops``.
        uuid: the CUDA device's 16-byte UUID. Decides instead of the ordinal where the driver tells EGL the UUID:
            CUDA_VISIBLE_DEVICES renumbers CUDA's devices.

    Ordering: blocks the host.
    Ownership: the caller's; close it on its thread (a worker's from anywhere).

    Raises:
        UsageError: an argument is none. UnsupportedError: no libEGL, no PyOpenGL, or no EGL device matches; the message
            lists those there are.
        DriverError: EGL refused, with EGL's error name.
    """
    if device is not None:
        device = whole_of("device", device, expected="an ordinal, an int of 0 or more, or None")
    if uuid is not None and not (isinstance(uuid, bytes) and len(uuid) == 16):
        raise UsageError("uuid of a device", got=shown(uuid), expected="16 bytes, or None")
    if thread not in ("inline", "worker"):
        raise UsageError("thread of a context", got=shown(thread), expected="'inline' or 'worker'")
    if thread == "worker":
        ops = GlOps.worker(lambda: _make(device, uuid))
        context = ops.context
        assert isinstance(context, GlContext)
    else:
        context = _make(device, uuid)
    context._own()
    return context


def _make(ordinal: int | None, uuid: bytes | None) -> GlContext:
    _free_abandoned()
    chosen = None if ordinal is None else _choose(list_egl_devices(), ordinal, uuid)
    native = EglContext(egl.create_context(egl.open_display(chosen)))
    try:
        native.make_current()
        context = _ours[native.id] = GlContext(native, chosen)
        if uuid is not None and chosen is not None and context.uuid not in (None, uuid):
            raise _no_match((chosen,), ordinal, uuid)
        return context
    except BaseException:
        native.destroy()
        raise


def _choose(devices: tuple[EglDevice, ...], ordinal: int, uuid: bytes | None) -> EglDevice | None:
    """The EGL device to render on: by UUID where both sides tell one, else by CUDA ordinal; None: no GPU knows CUDA."""
    capable = [device for device in devices if device.cuda_device is not None]
    if not capable:
        return None
    for device in capable:
        if device.uuid == uuid if uuid is not None and device.uuid else device.cuda_device == ordinal:
            return device
    raise _no_match(devices, ordinal, uuid)


def _no_match(devices: tuple[EglDevice, ...], ordinal: int | None, uuid: bytes | None) -> UnsupportedError:
    wanted = f"CUDA device {ordinal}" + (f" with uuid {uuid.hex()}" if uuid else "")
    return UnsupportedError(
        "no EGL device renders on the CUDA device asked for",
        reason="device_mismatch",
        got="; ".join(str(device) for device in devices),
        expected=wanted,
        hint="CUDA_VISIBLE_DEVICES renumbers CUDA's devices, not EGL's: pass the device's uuid, or use a GPU listed",
    )


def _free_abandoned() -> None:
    while True:
        try:
            _abandoned.get_nowait().destroy()
        except queue.Empty:
            return
        except DriverError:
            continue  # its display is gone, and the context with it


def _gl_uuid(gl: Any) -> bytes | None:
    """The GPU's UUID as OpenGL tells it (GL_EXT_memory_object); None where it does not."""
    try:
        from OpenGL.GL.EXT.memory_object import glGetUnsignedBytei_vEXT, glInitMemoryObjectEXT
    except ImportError:
        return None
    if not glInitMemoryObjectEXT():
        return None
    raw = (ctypes.c_ubyte * 16)()
    try:
        glGetUnsignedBytei_vEXT(_GL_DEVICE_UUID, 0, raw)
    except gl.GLError:
        return None
    return bytes(raw) if any(raw) else None


__all__ = ["GlContext", "current", "headless", "list_egl_devices", "ops_here"]
