"""``cuglue.gl``, and the registration of OpenGL objects.

Owns the ``register_*`` functions: what is asked of OpenGL and checked before the driver is called, and the sharing of
one registration by all handles of an object. Also the public door to contexts (``headless``, ``current``, ``GlOps``).
Must not know maps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Literal

from ..arguments import shown, whole
from ..core.device import DeviceState
from ..driver.protocol import Driver, RegisterFlags
from ..driver.registry import current_driver
from ..errors import DriverError, UnsupportedError, UsageError
from ..formats import Format, check_registrable
from ..memory.resource import DeviceMemoryResource
from .backings import Backing, GlBacking
from .buffers import GlBuffer
from .clientops import CudaGlOps
from .defaults import image_memory
from .diagnose import explained
from .glcontext import GlContext, current, headless, ops_here
from .gldevice import device_of_context
from .globjects import (
    RENDERBUFFER,
    TEXTURE_2D,
    BufferSize,
    describe_buffer,
    describe_image,
    image_level,
    target_name,
)
from .glops import GlOps, InlineOps
from .handle import CudaHandle
from .image_copy import image_copier
from .images import TEXTURE_3D, GlImage
from .life import Life
from .planes import Carried, carried, image_layout
from .registration import GlRegistration

Access = Literal["readwrite", "read", "write_discard"]

_FLAGS = {
    "readwrite": RegisterFlags.NONE,
    "read": RegisterFlags.READ_ONLY,
    "write_discard": RegisterFlags.WRITE_DISCARD,
}
# GL_TEXTURE_2D, 3D, RECTANGLE, CUBE_MAP, 2D_ARRAY: what the CUDA driver takes beside renderbuffers.
_TARGETS = frozenset({TEXTURE_2D, 0x806F, 0x84F5, 0x8513, 0x8C1A})
_LARGEST_NAME = 2**32 - 1


def register_buffer(
    name: int, *, ops: GlOps | None = None, access: Access = "readwrite", device: int | None = None
) -> CudaHandle:
    """Register a GL buffer object.

    Args:
        name: its GL name; it must have storage.
        ops: where GL calls run; None: this thread, in the context current on it, or where those of a handle run that
            the buffer has already.
        access: "read" promises that CUDA never writes it, "write_discard" that CUDA writes all of it in each map.
        device: ordinal of the CUDA device; None: the one that OpenGL renders on.

    Ordering: blocks the host; costs hundreds of microseconds. A buffer that is registered already costs only the
        questions to OpenGL.
    Ownership: the handle is the caller's to close, before the buffer is deleted.

    Raises:
        NotAllocatedError: no buffer of that name, or it has no storage.
        NoContextError, WrongThreadError: no OpenGL context where the calls have to run.
        UnsupportedError: this driver or renderer cannot share memory.
        UsageError: another handle of the buffer is open, whose calls run elsewhere than ``ops``.
        DriverError: the driver refused.
    """
    name = _name("buffer", name)
    if not isinstance(access, str) or access not in _FLAGS:
        raise UsageError("access", got=shown(access), expected=f"one of {', '.join(_FLAGS)}")
    return _register(ops, _open_buffer, name, access, device)


def register_texture(
    name: int,
    target: int = TEXTURE_2D,
    *,
    ops: GlOps | None = None,
    format: str | Format | None = None,
    width: int | None = None,
    height: int | None = None,
    memory: DeviceMemoryResource | None = None,
    device: int | None = None,
) -> CudaHandle:
    """Register a GL texture.

    Args:
        name: its GL name; it must have storage.
        target: GL_TEXTURE_2D, GL_TEXTURE_RECTANGLE, GL_TEXTURE_3D, GL_TEXTURE_2D_ARRAY or GL_TEXTURE_CUBE_MAP.
        ops, device: as for :func:`register_buffer`.
        format: the image that the texels carry, where it is another than theirs ("NV12", "BGRA8"); only interprets.
        width, height: of such an image, in pixels; None: what the texture's texels hold, planes counted in.
        memory: where the linear copy comes from; None: straight from the driver.

    Ordering, Ownership: as for :func:`register_buffer`.

    Raises:
        NotAllocatedError: no texture of that name, or it has no storage.
        UnsupportedError: a format or target that does not register; the message says what to do instead.
        LayoutError: the texture cannot carry such an image.
        UsageError: another target than the texture has. Else as :func:`register_buffer`.
    """
    name, given = _name("texture", name), whole(target)
    if given is None:
        raise UsageError(f"target of texture {name}", got=shown(target), expected="a GL texture target")
    _check_memory(memory)
    described = carried(f"texture {name}", format, width, height)
    return _register(ops, _open_image, name, given, described, memory, device)


def register_renderbuffer(
    name: int,
    *,
    ops: GlOps | None = None,
    memory: DeviceMemoryResource | None = None,
    device: int | None = None,
) -> CudaHandle:
    """Register a GL renderbuffer. Args, Ordering, Ownership, Raises: as for :func:`register_texture`."""
    name = _name("renderbuffer", name)
    _check_memory(memory)
    return _register(ops, _open_image, name, RENDERBUFFER, Carried(), memory, device)


def register(obj: Any, **options: Any) -> CudaHandle:
    """Register an object of a GL library.

    Args:
        obj: a moderngl Buffer, Texture, TextureArray, TextureCube, Texture3D or Renderbuffer, or anything with ``glo``
            (its GL name) whose class is named so.
        options: as for :func:`register_buffer`, :func:`register_texture` or :func:`register_renderbuffer`.

    Ordering, Ownership, Raises: as there. ``obj`` is kept alive by the handle.
    """
    name, kind = whole(getattr(obj, "glo", None)), type(obj).__name__
    if name is None or kind not in _OBJECTS:
        raise UsageError(
            shown(obj),
            got=kind,
            expected=f"an object with glo, one of {', '.join(_OBJECTS)}",
            hint="Use register_buffer, register_texture or register_renderbuffer with the GL name",
        )
    target = _OBJECTS[kind]
    if target is None:
        handle = register_buffer(name, **options)
    elif target == RENDERBUFFER:
        handle = register_renderbuffer(name, **options)
    else:
        if getattr(obj, "samples", 0) and target == TEXTURE_2D:
            target = 0x9100  # GL_TEXTURE_2D_MULTISAMPLE: refused with advice
        handle = register_texture(name, target, **options)
    handle.keep = obj
    return handle


_OBJECTS: dict[str, int | None] = {
    "Buffer": None,
    "Texture": TEXTURE_2D,
    "TextureArray": 0x8C1A,
    "TextureCube": 0x8513,
    "Texture3D": 0x806F,
    "Renderbuffer": RENDERBUFFER,
}


def _name(kind: str, name: object) -> int:
    number = whole(name)
    if number is None or not 1 <= number <= _LARGEST_NAME:
        raise UsageError(f"GL {kind} name", got=shown(name), expected=f"an int of 1 to {_LARGEST_NAME}")
    return number


def _check_memory(memory: object) -> None:
    if not isinstance(memory, DeviceMemoryResource | None):
        raise UsageError("memory of an image", got=shown(memory), expected="a DeviceMemoryResource, or None")


# --- on the context's thread --------------------------------------------------------------------------------------


def _register(ops: GlOps | None, open_: Callable[..., Life], *args: Any) -> CudaHandle:
    if not isinstance(ops, GlOps | None):
        raise UsageError("ops", got=shown(ops), expected="GlOps (a context's .ops), or None")
    driver = current_driver()
    where = ops or ops_here()
    life: Life = where.call(open_, driver, where, *args)
    backing = life.backing
    if ops is not None and isinstance(backing, GlBacking) and not _alike(ops, backing.registration.ops):
        raise UsageError(
            f"ops of {life!r}",
            got=f"{ops!r}",
            expected=f"{backing.registration.ops!r}, as of the handle of it that is open",
            hint="Close that handle first, or register with its ops",
        )
    return CudaHandle(life)


def _alike(one: GlOps, other: GlOps) -> bool:
    """Whether calls run in the same place for both, and reach it from other threads in the same way."""
    inline = isinstance(one, InlineOps) and isinstance(other, InlineOps)
    return one is other or (inline and one.thread == other.thread)


def _open_buffer(driver: Driver, ops: GlOps, name: int, access: Access, device: int | None) -> Life:
    what = f"GL buffer {name}"
    size = describe_buffer(name)
    state = device_of_context(driver, device, what)

    def make() -> Backing:
        registration = GlRegistration(state, ops)
        registration.handle = driver.gl_register_buffer(name, _FLAGS[access], state.device)
        return GlBuffer(
            registration,
            size,
            readonly=access == "read",
            current_size=BufferSize(name),
            what=what,
        )

    return _shared(state, ops, ("buffer", name, access), size, make)


def _open_image(
    driver: Driver,
    ops: GlOps,
    name: int,
    target: int,
    carried: Carried,
    memory: DeviceMemoryResource | None,
    device: int | None,
) -> Life:
    what = f"{target_name(target)} {name}"
    info = describe_image(name, target)
    found = check_registrable(info.internal_format, target=target, samples=info.samples)
    if target not in _TARGETS and target != RENDERBUFFER:
        raise UnsupportedError(
            f"{what} does not register",
            expected=", ".join(target_name(t) for t in sorted(_TARGETS)),
            reason="target",
        )
    format, layout, planes = image_layout(found, carried, info.width, info.height)
    state = device_of_context(driver, device, what)

    def make() -> Backing:
        linear = image_memory(state, memory)
        if state.capabilities.surfaces:  # first, so that nothing after the registration can fail
            depth = info.depth if target == TEXTURE_3D else 0
            image_copier(state).prepare(info.width * found.texel_bytes, depth)
        registration = GlRegistration(state, ops)
        registration.handle, surfaces = _register_image(driver, name, target, state)
        return GlImage(
            registration,
            linear,
            target=target,
            info=info,
            format=format,
            layout=layout,
            planes=planes,
            surfaces=surfaces,
            describe=image_level(name, target, info),
            what=what,
        )

    return _shared(state, ops, ("image", name, target, carried, memory and id(memory)), info, make)


def _register_image(driver: Driver, name: int, target: int, state: DeviceState) -> tuple[int, bool]:
    """``(resource, surfaces)``: for surface access where the driver takes it, else plainly."""
    if state.capabilities.surfaces:
        try:
            return driver.gl_register_image(name, target, RegisterFlags.SURFACE_LDST, state.device), True
        except DriverError:
            pass  # asked again without: if that fails too, it was not the surface access
    return driver.gl_register_image(name, target, RegisterFlags.NONE, state.device), False


def _shared(
    state: DeviceState, ops: GlOps, key: Hashable, geometry: object, make: Callable[[], Backing]
) -> Life:
    """The life of an object that is registered already and has not changed, or a new one."""
    lives: weakref.WeakValueDictionary[Hashable, Life] = vars(state).setdefault(
        "_gl_lives", weakref.WeakValueDictionary()
    )
    whole = (ops.context_id, key, geometry)
    life = lives.get(whole)
    if life is None or life.closed or not life.backing.alive:
        with explained(state.driver, state.device):
            life = lives[whole] = Life(make())
    return life


__all__ = [
    "CudaGlOps",
    "GlContext",
    "GlOps",
    "current",
    "headless",
    "register",
    "register_buffer",
    "register_renderbuffer",
    "register_texture",
]
