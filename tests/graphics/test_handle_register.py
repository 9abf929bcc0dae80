"""What registers, what is refused before the driver is called, and what is found out later; by rows of reports."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import glpixels
import moderngl
import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.subjects import (
    make_buffer,
    make_renderbuffer,
    make_texture,
    registered_buffer,
    registered_texture,
)

import cuglue
from cuglue.driver.protocol import Driver, RegisterFlags
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    ClosedError,
    DriverError,
    NoContextError,
    NotAllocatedError,
    StaleHandleError,
    UnsupportedError,
    UsageError,
)
from cuglue.formats import FORMATS, by_name
from cuglue.graphics.glcontext import GlContext, headless
from cuglue.graphics.image_copy import CopyPath
from cuglue.testing import trace
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import peek

pytestmark = pytest.mark.gl

REGISTER = {"gl_register_buffer", "gl_register_image"}
REFUSED = [f for f in FORMATS if f.gl is not None and not f.registers]


@pytest.fixture
def asked(driver: Driver) -> Iterator[list[Any]]:
    """Registrations that the driver was asked for; none in these tests."""
    with trace(only=REGISTER) as calls:
        yield calls
    assert calls == []


# --- refused before the driver is called ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [0, -1, 2**32, 2**64 + 1, 1.5, None, "7", True])
@pytest.mark.parametrize(
    "register", [cuglue.register_buffer, cuglue.register_texture, cuglue.register_renderbuffer]
)
def test_a_name_that_is_none(asked: list[Any], context: GlContext, register: Any, name: Any) -> None:
    with pytest.raises(UsageError):
        register(name)


@pytest.mark.parametrize(
    "value", [1.0, float("nan"), "7", True, b"1", [1], object()], ids=lambda v: type(v).__name__
)
def test_what_is_no_target_device_format_size_ops_or_memory(
    asked: list[Any], context: GlContext, value: Any
) -> None:
    buffer, texture = make_buffer(64), make_texture(8, 4)
    for call in (
        lambda: cuglue.register_buffer(buffer, device=value),
        lambda: cuglue.register_buffer(buffer, ops=value),
        lambda: cuglue.register_buffer(buffer, access=value),
        lambda: cuglue.register_texture(texture, value),
        lambda: cuglue.register_texture(texture, device=value),
        lambda: cuglue.register_texture(texture, ops=value),
        lambda: cuglue.register_texture(texture, memory=value),
        lambda: cuglue.register_texture(texture, format="BGRA8", width=value),
        lambda: cuglue.register_texture(texture, format="BGRA8", height=value),
        lambda: cuglue.register_renderbuffer(make_renderbuffer(8, 4), memory=value),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.got is not None
        assert caught.value.expected is not None
    with pytest.raises((UsageError, UnsupportedError), match="format"):
        cuglue.register_texture(texture, format=value)


def test_numpy_integers_are_names_targets_devices_and_sizes(driver: Driver, context: GlContext) -> None:
    texture = np.uint32(make_texture(8, 4))
    options: dict[str, Any] = {"format": "BGRA8", "width": np.int64(8), "height": np.int16(4)}
    target: Any = np.int64(GL.GL_TEXTURE_2D)
    with cuglue.register_texture(texture, target, device=np.int32(0), **options) as handle:  # type: ignore[arg-type]
        assert handle.shape == (4, 8, 4)
        with handle.map(level=np.int64(0), layer=np.uint8(0), timeout=np.float32(1)) as m:  # type: ignore[arg-type]
            assert m.shape == (4, 8, 4)
        handle.record_write(np.int64(3))  # type: ignore[arg-type]
    with cuglue.register_buffer(np.array(make_buffer(64))) as other:  # type: ignore[arg-type]
        assert other.size == 64


@pytest.mark.parametrize("value", [None, 1.0, float("nan"), "7", True, [1], -1, 2**32, 2**70], ids=repr)
def test_what_is_no_level_layer_or_time(driver: Driver, context: GlContext, value: Any) -> None:
    """OpenGL takes level 2**32 for level 0."""
    with (
        cuglue.register_texture(make_texture(8, 4, levels=2)) as texture,
        cuglue.register_buffer(make_buffer(64)) as buffer,
        trace(only={"graphics_map"}) as calls,
    ):
        for handle in (texture, buffer):
            for map_ in (handle.map, handle.map_mut):
                for options in ({"level": value}, {"layer": value}):
                    with pytest.raises(UsageError):
                        map_(**options)
                if value is not None and not (type(value) in (int, float) and value > 0):
                    with pytest.raises(UsageError, match="timeout"):
                        map_(timeout=value)
        assert list(calls) == []


@pytest.mark.parametrize(
    "register", [cuglue.register_buffer, cuglue.register_texture, cuglue.register_renderbuffer]
)
def test_an_unknown_name(asked: list[Any], context: GlContext, register: Any) -> None:
    with pytest.raises(NotAllocatedError):
        register(12345)


def test_row_5_a_name_without_storage(asked: list[Any], context: GlContext) -> None:
    buffer, texture, renderbuffer = GL.glGenBuffers(1), GL.glGenTextures(1), GL.glGenRenderbuffers(1)
    for bound in (False, True):
        if bound:
            GL.glBindBuffer(GL.GL_ARRAY_BUFFER, buffer)
            GL.glBindTexture(GL.GL_TEXTURE_2D, texture)
            GL.glBindRenderbuffer(GL.GL_RENDERBUFFER, renderbuffer)
        for register, name in (
            (cuglue.register_buffer, buffer),
            (cuglue.register_texture, texture),
            (cuglue.register_renderbuffer, renderbuffer),
        ):
            with pytest.raises(NotAllocatedError):
                register(int(name))


@pytest.mark.parametrize("format", REFUSED, ids=lambda f: f.name)
def test_rows_1_8_10_formats_that_do_not_register(asked: list[Any], context: GlContext, format: Any) -> None:
    """The error names the format and the way out."""
    name = GL.GLuint()
    GL.glCreateTextures(GL.GL_TEXTURE_2D, 1, name)
    GL.glBindTexture(GL.GL_TEXTURE_2D, name.value)
    try:
        GL.glTextureStorage2D(name.value, 1, format.gl, 16, 16)
    except GL.GLError:
        return  # an unsized number, which storage does not take
    with pytest.raises(UnsupportedError) as caught:
        cuglue.register_texture(name.value)
    assert vars(caught.value)["reason"] == "format"
    assert caught.value.hint
    GL.glDeleteTextures([name.value])


@pytest.mark.parametrize(
    ("target", "make", "arguments"),
    [
        (GL.GL_TEXTURE_1D, GL.glTextureStorage1D, (1, GL.GL_RGBA8, 16)),
        (GL.GL_TEXTURE_1D_ARRAY, GL.glTextureStorage2D, (1, GL.GL_RGBA8, 16, 4)),
        (GL.GL_TEXTURE_CUBE_MAP_ARRAY, GL.glTextureStorage3D, (1, GL.GL_RGBA8, 8, 8, 6)),
        (GL.GL_TEXTURE_2D_MULTISAMPLE, GL.glTextureStorage2DMultisample, (4, GL.GL_RGBA8, 8, 8, True)),
    ],
)
def test_targets_that_do_not_register(
    asked: list[Any], context: GlContext, target: int, make: Any, arguments: Any
) -> None:
    name = GL.GLuint()
    GL.glCreateTextures(target, 1, name)
    make(name.value, *arguments)
    with pytest.raises(UnsupportedError) as caught:
        cuglue.register_texture(name.value, target)
    assert vars(caught.value)["reason"] in ("target", "multisample")
    GL.glDeleteTextures([name.value])


@pytest.mark.parametrize("target", [GL.GL_TEXTURE_RECTANGLE, GL.GL_TEXTURE_CUBE_MAP, 0x8515, 0, -1, 12345])
def test_another_target_than_the_texture_s(asked: list[Any], context: GlContext, target: int) -> None:
    name = make_texture(8, 8)
    with pytest.raises(UsageError, match="GL_TEXTURE_2D"):
        cuglue.register_texture(name, target)
    GL.glDeleteTextures([name])


def test_a_multisampled_renderbuffer(asked: list[Any], context: GlContext) -> None:
    name = GL.GLuint()
    GL.glCreateRenderbuffers(1, name)
    GL.glNamedRenderbufferStorageMultisample(name.value, 4, GL.GL_RGBA8, 8, 8)
    with pytest.raises(UnsupportedError) as caught:
        cuglue.register_renderbuffer(name.value)
    assert vars(caught.value)["reason"] == "multisample"


def test_rows_30_31_no_context(asked: list[Any]) -> None:
    """OpenGL itself would answer zeros and no error."""
    for register in (cuglue.register_buffer, cuglue.register_texture, cuglue.register_renderbuffer):
        with pytest.raises(NoContextError):
            register(1)


def test_row_28_a_thread_without_the_context(asked: list[Any], context: GlContext) -> None:
    name, errors = make_texture(8, 8), []

    def work() -> None:
        try:
            cuglue.register_texture(name)
        except NoContextError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert len(errors) == 1
    GL.glDeleteTextures([name])


def test_access_is_one_of_three(asked: list[Any], context: GlContext) -> None:
    with pytest.raises(UsageError, match="write_discard"):
        cuglue.register_buffer(make_buffer(16), access="write")  # type: ignore[arg-type]


@pytest.mark.parametrize("obj", [object(), SimpleNamespace(glo=3), 7, None])
def test_register_takes_objects_of_gl_libraries(asked: list[Any], context: GlContext, obj: Any) -> None:
    with pytest.raises(UsageError):
        cuglue.register(obj)


def test_a_driver_without_opengl(context: GlContext) -> None:
    with cuglue.use_driver(SimDriver(disable=["graphics_gl"])), pytest.raises(UnsupportedError) as caught:
        cuglue.register_texture(make_texture(8, 8))
    assert vars(caught.value)["reason"] == "graphics_gl"


# --- the device that renders ----------------------------------------------------------------------------------


class RealLooking(SimDriver):
    """A simulated device that says it is none, to be taken for CUDA's."""

    name = "cuda"
    rendering: tuple[int, ...] = ()
    asked = 0

    def capabilities(self, device: int) -> Any:
        found = super().capabilities(device)
        fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
        return type(found)(**{**fields, "simulated": False})

    def gl_devices(self) -> tuple[int, ...]:
        self.asked += 1
        return self.rendering


def software(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    """Take the context current here for a software renderer's or for a GPU's."""
    from cuglue.graphics import gldevice

    known = SimpleNamespace(software=value, renderer="a renderer", vendor="Some GPU maker")
    monkeypatch.setattr(gldevice, "current", lambda: known)


def test_row_51_a_software_renderer_is_named_before_the_driver_is_called(
    context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    software(monkeypatch, True)
    driver = RealLooking()
    with cuglue.use_driver(driver), trace(only=REGISTER) as calls, pytest.raises(UnsupportedError) as caught:
        cuglue.register_texture(make_texture(8, 8))
    assert vars(caught.value)["reason"] == "software_renderer"
    assert "a renderer" in str(caught.value)
    assert (calls, driver.asked) == ([], 0)


def test_the_renderer_here_is_seen_for_what_it_is(context: GlContext) -> None:
    if not context.software:
        pytest.skip("a GPU renders here")
    with cuglue.use_driver(RealLooking()), pytest.raises(UnsupportedError, match="software renderer"):
        cuglue.register_buffer(make_buffer(16))


@pytest.mark.parametrize(("rendering", "wanted"), [((), None), ((), 0), ((1,), 0)])
def test_rows_41_42_45_46_47_50_another_gpu_renders(
    context: GlContext, monkeypatch: pytest.MonkeyPatch, rendering: tuple[int, ...], wanted: int | None
) -> None:
    software(monkeypatch, False)
    driver = RealLooking(devices=2)
    driver.rendering = rendering
    with cuglue.use_driver(driver), trace(only=REGISTER) as calls, pytest.raises(UnsupportedError) as caught:
        cuglue.register_texture(make_texture(8, 8), device=wanted)
    text = str(caught.value)
    assert vars(caught.value)["reason"] == "device_mismatch"
    assert "a renderer" in text
    assert "__NV_PRIME_RENDER_OFFLOAD=1" in text
    assert ("CUDA device 1" in text) == (rendering == (1,))
    assert calls == []


def test_the_device_that_renders_is_the_one_that_maps(
    context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the driver says, whatever the ordinal."""
    software(monkeypatch, False)
    driver = RealLooking(devices=2)
    driver.rendering = (1,)
    with cuglue.use_driver(driver), cuglue.register_buffer(make_buffer(16)) as handle, handle.map() as m:
        assert (handle.device, m.device, m.stream.device) == (1, 1, 1)


# --- what the driver refuses -----------------------------------------------------------------------------------


def test_row_60_surface_access_that_is_refused_is_done_without(driver: Driver, context: GlContext) -> None:
    """And the driver's copy takes over, observably."""
    name = make_texture(640, 480)
    pixels = np.random.default_rng(0).integers(0, 256, (480, 640, 4), np.uint8)
    glpixels.write_image(name, pixels)
    with fail("gl_register_image"), cuglue.register_texture(name) as handle:
        assert handle.copy_path is CopyPath.DRIVER
        np.testing.assert_array_equal(handle.read(), pixels)
    with cuglue.register_texture(name) as handle:
        assert handle.copy_path is CopyPath.SURFACE
        np.testing.assert_array_equal(handle.read(), pixels)
    GL.glDeleteTextures([name])


def test_a_registration_that_is_refused(driver: Any, context: GlContext) -> None:
    name = make_texture(8, 8)
    with fail("gl_register_image", persistent=True), pytest.raises(DriverError) as caught:
        cuglue.register_texture(name)
    assert caught.value.findings
    assert driver.inventory()["resources"] == 0
    with cuglue.register_texture(name):
        pass


def test_images_are_registered_for_surface_access_and_buffers_as_asked(
    driver: Driver, context: GlContext
) -> None:
    with trace(only=REGISTER) as calls:
        with cuglue.register_texture(make_texture(8, 8)):
            pass
        for access, flags in (
            ("readwrite", RegisterFlags.NONE),
            ("read", RegisterFlags.READ_ONLY),
            ("write_discard", RegisterFlags.WRITE_DISCARD),
        ):
            with cuglue.register_buffer(make_buffer(8), access=access):  # type: ignore[arg-type]
                assert calls[-1].args[1] is flags
    assert calls[0].args[2] is RegisterFlags.SURFACE_LDST


def test_kernels_are_compiled_when_an_image_is_registered(driver: Driver, context: GlContext) -> None:
    """No frame pays for a compiler."""
    name = make_texture(640, 480)
    with trace(only={"kernel_load"}) as calls, cuglue.register_texture(name) as handle:
        assert len(calls) == 2
        with handle.map_mut():
            pass
        assert len(calls) == 2


# --- one registration per object --------------------------------------------------------------------------------


def test_row_81_an_object_is_registered_once(driver: Any, context: GlContext) -> None:
    """However many handles it gets; the last one ends it."""
    name = make_texture(8, 8)
    with trace(only=REGISTER | {"graphics_unregister"}) as calls:
        handles = [cuglue.register_texture(name) for _ in range(3)]
        assert len(calls) == 1
        with handles[0].map(), handles[1].map():
            assert driver.inventory()["mapped"] == 1
        handles.pop().close()
        handles.pop().close()
        assert len(calls) == 1
        with handles[0].map():
            pass
        handles.pop().close()
        assert [c.method for c in calls] == ["gl_register_image", "graphics_unregister"]
        with cuglue.register_texture(name):
            assert len(calls) == 3


def test_handles_of_one_object_conflict(driver: Any, context: GlContext) -> None:
    name = make_texture(8, 8)
    with cuglue.register_texture(name) as one, cuglue.register_texture(name) as two:
        with one.map_mut(), pytest.raises(cuglue.errors.MapConflictError):
            two.map()
        one.close()
        with pytest.raises(ClosedError):
            one.map()
        with two.map():
            pass


def test_row_17_a_registration_is_shared_only_with_the_same_geometry(driver: Any, context: GlContext) -> None:
    """Two images in texels of the same texture, and a texture that got new storage."""
    name = int(GL.glGenTextures(1))
    GL.glBindTexture(GL.GL_TEXTURE_2D, name)

    def allocate(width: int) -> None:
        GL.glTexImage2D(GL.GL_TEXTURE_2D, 0, GL.GL_R8, width, 12, 0, GL.GL_RED, GL.GL_UNSIGNED_BYTE, None)

    allocate(64)
    with (
        cuglue.register_texture(name) as plain,
        cuglue.register_texture(name, format="NV12", width=64, height=8) as video,
    ):
        assert (plain.shape, video.shape) == ((12, 64, 1), (12, 64))
        allocate(66)
        with pytest.raises(StaleHandleError):
            plain.map()
        with cuglue.register_texture(name) as again:
            assert again.shape == (12, 66, 1)
            with again.map() as m:
                assert m.shape == (12, 66, 1)


# --- found out when it is mapped ----------------------------------------------------------------------------------


def test_row_72_a_buffer_that_was_resized(driver: Any, context: GlContext) -> None:
    with registered_buffer(driver, 64) as subject:
        GL.glNamedBufferData(subject.name, 65, None, GL.GL_STATIC_DRAW)
        with pytest.raises(StaleHandleError, match="65"):
            subject.handle.map()
        assert driver.inventory()["mapped"] == 0
        GL.glNamedBufferData(subject.name, 64, None, GL.GL_STATIC_DRAW)
        with subject.handle.map():
            pass


@pytest.mark.parametrize("what", ["buffer", "texture", "renderbuffer"])
def test_an_object_that_was_deleted(driver: Any, context: GlContext, what: str) -> None:
    if what == "buffer":
        name = make_buffer(16)
        handle = cuglue.register_buffer(name)
        GL.glDeleteBuffers(1, [name])
    elif what == "texture":
        name = make_texture(8, 8)
        handle = cuglue.register_texture(name)
        GL.glDeleteTextures([name])
    else:
        name = make_renderbuffer(8, 8)
        handle = cuglue.register_renderbuffer(name)
        GL.glDeleteRenderbuffers(1, [name])
    with pytest.raises(StaleHandleError, match="deleted"):
        handle.map()
    assert driver.inventory()["mapped"] == 0
    handle.close()


def test_a_texture_whose_format_changed(driver: Any, context: GlContext) -> None:
    name = int(GL.glGenTextures(1))
    GL.glBindTexture(GL.GL_TEXTURE_2D, name)
    GL.glTexImage2D(GL.GL_TEXTURE_2D, 0, GL.GL_RGBA8, 8, 8, 0, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, None)
    with cuglue.register_texture(name) as handle:
        GL.glTexImage2D(GL.GL_TEXTURE_2D, 0, GL.GL_RGBA16F, 8, 8, 0, GL.GL_RGBA, GL.GL_FLOAT, None)
        with pytest.raises(StaleHandleError):
            handle.map()


def test_what_the_driver_says_of_the_array_is_checked(
    driver: Driver, context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a view of four channels over an array of one."""
    with registered_texture(driver) as subject:
        original = driver.array_info
        monkeypatch.setattr(driver, "array_info", lambda *where: original(*where)._replace(channels=1))
        with pytest.raises(UnsupportedError) as caught:
            subject.handle.map()
        assert vars(caught.value)["reason"] == "format"
        monkeypatch.undo()
        with subject.handle.map():
            pass


# --- what a handle says -------------------------------------------------------------------------------------------


def test_rows_1_2_3_three_channels_are_four(driver: Driver, context: GlContext) -> None:
    name = make_texture(100, 10, "RGB8")
    with cuglue.register_texture(name) as handle:
        assert handle.shape == (10, 100, 4)
        assert handle.format is by_name("RGB8")
        with pytest.raises(cuglue.errors.LayoutError):
            handle.write(np.zeros((10, 100, 3), np.uint8))


def test_row_4_r32ui(driver: Driver, context: GlContext) -> None:
    with cuglue.register_texture(make_texture(8, 8, "R32UI")) as handle:
        assert (handle.shape, handle.dtype) == ((8, 8, 1), np.uint32)


def test_row_18_srgb_bytes_are_the_encoded_ones(driver: Driver, context: GlContext) -> None:
    name = make_texture(16, 1, "SRGB8_ALPHA8")
    pixels = np.arange(64, dtype="u1").reshape(1, 16, 4)
    glpixels.write_image(name, pixels)
    with cuglue.register_texture(name) as handle:
        assert handle.format is not None
        assert handle.format.colorspace == "srgb"
        np.testing.assert_array_equal(handle.read(), pixels)


@pytest.mark.parametrize(("width", "height"), [(5, 3), (5, 4), (7, 7)])
def test_rows_19_21_22_rows_are_tight_whatever_opengl_s_alignment(
    driver: Driver, context: GlContext, width: int, height: int
) -> None:
    name = make_texture(width, height, "R8")
    pixels = np.arange(width * height, dtype="u1").reshape(height, width, 1)
    glpixels.write_image(name, pixels)
    GL.glPixelStorei(GL.GL_PACK_ALIGNMENT, 8)
    GL.glPixelStorei(GL.GL_UNPACK_ALIGNMENT, 8)
    with cuglue.register_texture(name) as handle:
        with handle.map() as m:
            assert m.row_bytes == width
            np.testing.assert_array_equal(m.numpy(), pixels)
        handle.write(pixels[::-1].copy())
        np.testing.assert_array_equal(handle.read(), pixels[::-1])
    assert GL.glGetIntegerv(GL.GL_PACK_ALIGNMENT) == GL.glGetIntegerv(GL.GL_UNPACK_ALIGNMENT) == 8


def test_row_24_row_0_is_the_bottom_row(driver: Driver, context: GlContext) -> None:
    """What OpenGL draws at the bottom comes first; ``flip`` turns a copy round."""
    name = make_texture(2, 2)
    frame = GL.GLuint()
    GL.glCreateFramebuffers(1, frame)
    GL.glNamedFramebufferTexture(frame.value, GL.GL_COLOR_ATTACHMENT0, name, 0)
    GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, frame.value)
    GL.glEnable(GL.GL_SCISSOR_TEST)
    for row, red in ((0, 1.0), (1, 0.0)):
        GL.glScissor(0, row, 2, 1)
        GL.glClearColor(red, 0, 0, 1)
        GL.glClear(GL.GL_COLOR_BUFFER_BIT)
    GL.glDisable(GL.GL_SCISSOR_TEST)
    with cuglue.register_texture(name) as handle:
        assert handle.read()[:, 0, 0].tolist() == [255, 0]
        assert handle.read(flip=True)[:, 0, 0].tolist() == [0, 255]
    GL.glDeleteFramebuffers(1, [frame.value])


# --- moderngl -----------------------------------------------------------------------------------------------------


def test_objects_of_moderngl(driver: Any) -> None:
    made = moderngl.create_standalone_context(backend="egl", libgl="libOpenGL.so.0", libegl="libEGL.so.1")
    try:
        pixels = np.random.default_rng(0).integers(0, 256, (5, 9, 4), np.uint8)
        objects = [
            (made.texture((9, 5), 4, pixels.tobytes()), (5, 9, 4)),
            (made.renderbuffer((9, 5)), (5, 9, 4)),
            (made.buffer(pixels.tobytes()), (180,)),
            (made.texture_array((9, 5, 3), 4), (5, 9, 4)),
            (made.texture_cube((8, 8), 4), (8, 8, 4)),
            (made.texture3d((9, 5, 3), 4), (5, 9, 4)),
        ]
        for obj, shape in objects:
            with cuglue.register(obj) as handle:
                assert handle.shape == shape
                with handle.map_mut():
                    pass
        with cuglue.register(objects[0][0]) as handle:
            np.testing.assert_array_equal(handle.read(), pixels)
        with pytest.raises(UnsupportedError):
            cuglue.register(made.texture((9, 5), 4, samples=4))
        with pytest.raises(UnsupportedError):
            cuglue.register(made.depth_texture((9, 5)))
        with pytest.raises(UsageError):
            cuglue.register(made.simple_framebuffer((4, 4)))
    finally:
        made.release()


def test_a_moderngl_object_lives_as_long_as_its_handle(driver: Any, context: GlContext) -> None:
    """moderngl may free what is collected; the memory must not go under the registration."""

    class Buffer:
        def __init__(self) -> None:
            self.glo = make_buffer(64)

        def __del__(self) -> None:
            GL.glDeleteBuffers(1, [self.glo])

    handle = cuglue.register(Buffer())
    gc.collect()
    with handle.map() as m:
        assert peek(m).size == 64
    handle.close()


def test_two_contexts(driver: Any) -> None:
    """Names mean something else in each; registrations are not mixed up."""
    with headless(thread="worker") as one, headless(thread="worker") as two:
        handles = []
        for number, context in enumerate((one, two)):
            name = context.ops.call(make_texture, 8, 8)
            context.ops.call(glpixels.write_image, name, np.full((8, 8, 4), number, np.uint8))
            handles.append(cuglue.register_texture(name, ops=context.ops))
        for number, handle in enumerate(handles):
            assert (handle.read() == number).all()
            handle.close()
