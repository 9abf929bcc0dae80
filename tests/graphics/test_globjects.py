"""OpenGL objects asked by name, and their bytes moved, in a real context (Mesa where there is no GPU)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import glpixels
import numpy as np
import numpy.typing as npt
import OpenGL.GL as GL
import pytest

from cuglue.errors import (
    DriverError,
    LayoutError,
    NoContextError,
    NotAllocatedError,
    UnsupportedError,
    UsageError,
)
from cuglue.formats import FORMATS, Format, by_name
from cuglue.graphics import glcalls, glcontext, globjects, glquestions

pytestmark = pytest.mark.gl

STORED = [f for f in FORMATS if f.gl is not None and f.registers]
SIZES = [(1, 1), (5, 3), (7, 4), (16, 8), (67, 5)]


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[glcontext.GlContext]:
    with glcontext.headless() as made:
        yield made


@pytest.fixture(autouse=True)
def no_error_is_left() -> Iterator[None]:
    yield
    assert GL.glGetError() == 0


def texture(format: Format, width: int, height: int, target: int = GL.GL_TEXTURE_2D, depth: int = 0) -> int:
    name = GL.GLuint()
    GL.glCreateTextures(target, 1, name)
    if depth:
        GL.glTextureStorage3D(name.value, 1, format.gl, width, height, depth)
    else:
        GL.glTextureStorage2D(name.value, 1, format.gl, width, height)
    return int(name.value)


def buffer(nbytes: int, *, flags: int | None = None) -> int:
    name = GL.GLuint()
    GL.glCreateBuffers(1, name)
    if flags is None:
        GL.glNamedBufferData(name.value, nbytes, None, GL.GL_STATIC_DRAW)
    else:
        GL.glNamedBufferStorage(name.value, nbytes, None, flags)
    return int(name.value)


def renderbuffer(format: Format, width: int, height: int, samples: int = 0) -> int:
    name = GL.GLuint()
    GL.glCreateRenderbuffers(1, name)
    GL.glNamedRenderbufferStorageMultisample(name.value, samples, format.gl, width, height)
    return int(name.value)


def pattern(format: Format, width: int, height: int, seed: int = 0) -> npt.NDArray[Any]:
    """Every value a texel can hold may occur, but for floats' infinities and NaN, which OpenGL may change."""
    random = np.random.default_rng(seed)
    shape = (height, width, format.channels)
    kind = np.dtype(format.dtype)
    if kind.kind == "f":
        return random.uniform(-100, 100, shape).astype(kind)
    bounds = np.iinfo(kind)
    return random.integers(bounds.min, bounds.max, shape, kind, endpoint=True)


def compare(format: Format, got: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got[..., : format.components], wanted[..., : format.components])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("format", STORED, ids=str)
def test_every_texture_format_round_trips_exactly(format: Format, size: tuple[int, int]) -> None:
    name, image = texture(format, *size), pattern(format, *size)
    glpixels.write_image(name, image)
    compare(format, glpixels.read_image(name), image)
    GL.glDeleteTextures(1, [name])


@pytest.mark.parametrize("format", STORED, ids=str)
def test_every_format_is_described_with_its_own_number(format: Format) -> None:
    name = texture(format, 5, 3)
    assert globjects.describe_texture(name) == (5, 3, 1, format.gl, 0)


@pytest.mark.parametrize("format", STORED, ids=str)
def test_every_format_round_trips_through_a_renderbuffer(format: Format) -> None:
    name = renderbuffer(format, 7, 3)
    image = pattern(format, 7, 3)
    assert globjects.describe_renderbuffer(name) == (7, 3, 1, format.gl, 0)
    glpixels.write_image(name, image, GL.GL_RENDERBUFFER)
    compare(format, glpixels.read_image(name, GL.GL_RENDERBUFFER), image)


@pytest.mark.parametrize(
    ("target", "depth"),
    [(GL.GL_TEXTURE_3D, 3), (GL.GL_TEXTURE_2D_ARRAY, 3), (GL.GL_TEXTURE_CUBE_MAP, 6)],
    ids=lambda value: str(value),
)
def test_each_layer_is_an_image_of_its_own(target: int, depth: int) -> None:
    format = by_name("RGBA8")
    name = texture(format, 5, 5, target, 0 if target == GL.GL_TEXTURE_CUBE_MAP else depth)
    images = [pattern(format, 5, 5, seed) for seed in range(depth)]
    for layer, image in enumerate(images):
        glpixels.write_image(name, image, target, layer=layer)
    for layer, image in enumerate(images):
        compare(format, glpixels.read_image(name, target, layer=layer), image)
    assert globjects.describe_texture(name, target).depth == depth
    for layer in (-1, depth):
        with pytest.raises(UsageError, match=f"got layer {layer}, expected 0 to {depth - 1}"):
            glpixels.read_image(name, target, layer=layer)


def test_a_rectangle_texture_round_trips() -> None:
    format = by_name("R8")
    name, image = texture(format, 7, 3, GL.GL_TEXTURE_RECTANGLE), pattern(format, 7, 3)
    glpixels.write_image(name, image, GL.GL_TEXTURE_RECTANGLE)
    compare(format, glpixels.read_image(name, GL.GL_TEXTURE_RECTANGLE), image)


def test_levels_are_halved_and_separate() -> None:
    name, format = GL.GLuint(), by_name("RG16F")
    GL.glCreateTextures(GL.GL_TEXTURE_2D, 1, name)
    GL.glTextureStorage2D(name.value, 3, format.gl, 13, 6)
    images = [pattern(format, *size) for size in ((13, 6), (6, 3), (3, 1))]
    for level, image in enumerate(images):
        glpixels.write_image(name.value, image, level=level)
    for level, image in enumerate(images):
        compare(format, glpixels.read_image(name.value, level=level), image)
    with pytest.raises(NotAllocatedError, match="level 3 of texture"):
        globjects.describe_texture(name.value, level=3)
    with pytest.raises(UsageError, match="level -1"):
        globjects.describe_texture(name.value, level=-1)


def test_reports_1_to_3_a_three_channel_texture_has_four_in_the_array() -> None:
    name = texture(by_name("RGB8"), 100, 10)
    GL.glClearTexImage(name, 0, GL.GL_RGB, GL.GL_UNSIGNED_BYTE, np.array([1, 2, 3], np.uint8))
    image = glpixels.read_image(name)
    assert image.shape == (10, 100, 4)
    assert (image[..., :3] == (1, 2, 3)).all()
    with pytest.raises(
        LayoutError, match=r"RGB8.*got uint8 of shape \(10, 100, 3\), expected uint8 of shape"
    ):
        glpixels.write_image(name, np.zeros((10, 100, 3), np.uint8))


def test_reports_18_srgb_bytes_are_not_linearised() -> None:
    name = texture(by_name("SRGB8_ALPHA8"), 2, 1)
    encoded = np.array([[[188, 10, 255, 7], [0, 1, 128, 200]]], np.uint8)
    GL.glTextureSubImage2D(name, 0, 0, 0, 2, 1, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, encoded)
    np.testing.assert_array_equal(glpixels.read_image(name), encoded)


@pytest.mark.parametrize(("format", "width"), [("RGB8", 5), ("R8", 5), ("R8", 7)])
def test_reports_19_to_22_odd_rows_stay_tight_whatever_the_alignment(format: str, width: int) -> None:
    """An alignment of 4 overruns a tight buffer or shears the image."""
    row = by_name(format)
    name, image = texture(row, width, 3), pattern(row, width, 3)
    GL.glPixelStorei(GL.GL_UNPACK_ALIGNMENT, 8)
    GL.glPixelStorei(GL.GL_PACK_ALIGNMENT, 8)
    glpixels.write_image(name, image)
    compare(row, glpixels.read_image(name), image)
    assert GL.glGetIntegerv(GL.GL_UNPACK_ALIGNMENT) == GL.glGetIntegerv(GL.GL_PACK_ALIGNMENT) == 8


STATE = {
    "ROW_LENGTH": 11,
    "SKIP_ROWS": 2,
    "SKIP_PIXELS": 3,
    "ALIGNMENT": 8,
    "SWAP_BYTES": 1,
    "LSB_FIRST": 1,
    "IMAGE_HEIGHT": 9,
    "SKIP_IMAGES": 1,
}


def test_transfers_ignore_the_applications_pixel_state_and_give_it_back() -> None:
    parameters = {getattr(GL, f"GL_{way}_{key}"): v for way in ("PACK", "UNPACK") for key, v in STATE.items()}
    before = {parameter: GL.glGetIntegerv(parameter) for parameter in parameters}
    pack, unpack = buffer(4096), buffer(4096)
    format = by_name("RGBA16")
    name, image = texture(format, 5, 3), pattern(format, 5, 3)
    rb, rb_image = renderbuffer(format, 5, 3), pattern(format, 5, 3, seed=1)
    try:
        for parameter, value in parameters.items():
            GL.glPixelStorei(parameter, value)
        GL.glBindBuffer(GL.GL_PIXEL_PACK_BUFFER, pack)
        GL.glBindBuffer(GL.GL_PIXEL_UNPACK_BUFFER, unpack)
        glpixels.write_image(name, image)
        compare(format, glpixels.read_image(name), image)
        glpixels.write_image(rb, rb_image, GL.GL_RENDERBUFFER)
        compare(format, glpixels.read_image(rb, GL.GL_RENDERBUFFER), rb_image)
        assert {parameter: GL.glGetIntegerv(parameter) for parameter in parameters} == parameters
        assert GL.glGetIntegerv(GL.GL_PIXEL_PACK_BUFFER_BINDING) == pack
        assert GL.glGetIntegerv(GL.GL_PIXEL_UNPACK_BUFFER_BINDING) == unpack
    finally:
        GL.glBindBuffer(GL.GL_PIXEL_PACK_BUFFER, 0)
        GL.glBindBuffer(GL.GL_PIXEL_UNPACK_BUFFER, 0)
        for parameter, value in before.items():
            GL.glPixelStorei(parameter, value)


def test_state_comes_back_when_a_transfer_fails() -> None:
    name = texture(by_name("R8"), 4, 4)
    GL.glPixelStorei(GL.GL_PACK_ALIGNMENT, 2)
    with pytest.raises(DriverError) as caught:
        with (
            glcalls.checked("texture") as gl,
            glpixels._plain_transfers(gl, glpixels._PACK, glpixels._PACK_BINDING),
        ):
            gl.glGetTextureSubImage(name, 0, 0, 0, 0, 99, 99, 1, GL.GL_RED, GL.GL_UNSIGNED_BYTE, 0, None)
    assert caught.value.name == "GL_INVALID_VALUE"
    assert caught.value.call == "glGetTextureSubImage"
    assert GL.glGetIntegerv(GL.GL_PACK_ALIGNMENT) == 2
    GL.glPixelStorei(GL.GL_PACK_ALIGNMENT, 4)


def test_an_image_is_written_from_any_array_of_its_shape() -> None:
    format = by_name("RGBA8")
    name, image = texture(format, 4, 6), pattern(format, 4, 6)
    glpixels.write_image(name, image[::-1])
    compare(format, glpixels.read_image(name), image[::-1].copy())
    with pytest.raises(LayoutError, match="got float32 of shape"):
        glpixels.write_image(name, image.astype(np.float32))


def test_bindings_of_the_application_stay() -> None:
    bound = texture(by_name("R8"), 2, 2)
    GL.glBindTexture(GL.GL_TEXTURE_2D, bound)
    other, rb = texture(by_name("RGBA8"), 3, 3), renderbuffer(by_name("RGBA8"), 3, 3)
    glpixels.write_image(other, glpixels.read_image(other))
    glpixels.write_image(rb, glpixels.read_image(rb, GL.GL_RENDERBUFFER), GL.GL_RENDERBUFFER)
    assert GL.glGetIntegerv(GL.GL_TEXTURE_BINDING_2D) == bound
    assert GL.glGetIntegerv(GL.GL_FRAMEBUFFER_BINDING) == 0


def test_a_renderbuffer_is_written_whatever_the_scissor() -> None:
    format = by_name("RGBA8")
    name, image = renderbuffer(format, 8, 8), pattern(format, 8, 8)
    GL.glEnable(GL.GL_SCISSOR_TEST)
    GL.glScissor(0, 0, 1, 1)
    GL.glColorMask(False, False, False, False)
    try:
        glpixels.write_image(name, image, GL.GL_RENDERBUFFER)
        compare(format, glpixels.read_image(name, GL.GL_RENDERBUFFER), image)
    finally:
        GL.glDisable(GL.GL_SCISSOR_TEST)
        GL.glColorMask(True, True, True, True)


# --- buffers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [None, 0, GL.GL_DYNAMIC_STORAGE_BIT], ids=["mutable", "immutable", "dynamic"]
)
def test_buffers_round_trip_also_where_glBufferSubData_may_not_write(flags: int | None) -> None:
    name = buffer(1001, flags=flags)
    data = np.random.default_rng(0).integers(0, 256, 1001, np.uint8)
    glpixels.write_buffer(name, data)
    np.testing.assert_array_equal(glpixels.read_buffer(name), data)
    glpixels.write_buffer(name, b"\x01\x02\x03", offset=998)
    glpixels.write_buffer(name, np.array([7.5], np.float64), offset=8)
    np.testing.assert_array_equal(glpixels.read_buffer(name, 3, 998), [1, 2, 3])
    assert glpixels.read_buffer(name, 8, 8).view(np.float64) == 7.5
    np.testing.assert_array_equal(glpixels.read_buffer(name, offset=16)[:-3], data[16:-3])
    assert globjects.describe_buffer(name) == 1001


def test_the_question_of_every_map_leaves_the_applications_errors_alone() -> None:
    name, raw = buffer(24), glquestions._find()
    raw["glGetNamedBufferParameteri64v"](987654, 0xDEAD, None)
    assert globjects.BufferSize(name)() == 24
    assert raw["glGetError"]() != 0


def test_the_question_of_every_map_finds_what_is_gone_and_leaves_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = buffer(24)
    GL.glDeleteBuffers(1, [name])
    with pytest.raises(NotAllocatedError, match=f"buffer {name} is no object"):
        globjects.BufferSize(name)()
    empty = GL.GLuint()
    GL.glCreateBuffers(1, empty)
    with pytest.raises(NotAllocatedError, match="has no storage"):
        globjects.BufferSize(empty.value)()
    assert caplog.text == ""  # nobody is told of errors that our own question left


@pytest.mark.parametrize("target", [GL.GL_TEXTURE_2D, GL.GL_TEXTURE_RECTANGLE, GL.GL_TEXTURE_3D])
def test_every_map_of_an_image_sees_what_became_of_it(target: int, caplog: pytest.LogCaptureFixture) -> None:
    deep = 3 if target == GL.GL_TEXTURE_3D else 0
    name, raw = GL.GLuint(), glquestions._find()
    GL.glGenTextures(1, name)
    GL.glBindTexture(target, name.value)

    def store(width: int, number: int) -> None:
        rest = (GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, None)
        if deep:
            GL.glTexImage3D(target, 0, number, width, 4, deep, 0, *rest)
        else:
            GL.glTexImage2D(target, 0, number, width, 4, 0, *rest)

    store(8, GL.GL_RGBA8)
    info = globjects.describe_image(name.value, target)
    now = globjects.image_level(name.value, target, info)
    assert now(0) == info
    with pytest.raises(UsageError if target == GL.GL_TEXTURE_RECTANGLE else NotAllocatedError):
        now(1)
    store(16, GL.GL_RGBA8)
    assert now(0) == info._replace(width=16)
    store(8, GL.GL_R8)
    assert now(0) == info._replace(internal_format=GL.GL_R8)
    store(8, GL.GL_RGBA8)
    if not deep:
        raw["glGetNamedBufferParameteri64v"](987654, 0xDEAD, None)
        assert now(0) == info
        assert raw["glGetError"]() != 0  # the application's own, still there
    GL.glDeleteTextures([name.value])
    with pytest.raises(NotAllocatedError, match="no object"):
        now(0)
    assert caplog.text == ""


@pytest.mark.parametrize(("nbytes", "offset"), [(17, 0), (1, 16), (4, -1), (-1, 0), (None, 17)])
def test_a_range_outside_the_buffer_is_refused(nbytes: int | None, offset: int) -> None:
    name = buffer(16)
    with pytest.raises(LayoutError, match=f"buffer {name}: got bytes .*within its 16 bytes"):
        glpixels.read_buffer(name, nbytes, offset)
    if nbytes is not None and nbytes > 0:
        with pytest.raises(LayoutError):
            glpixels.write_buffer(name, bytes(nbytes), offset)


# --- objects that are not what they should be -----------------------------------------------------------------


def generated(kind: str) -> int:
    name = GL.GLuint()
    getattr(GL, f"glGen{kind}")(1, name)
    return int(name.value)


DESCRIBE: dict[str, Any] = {
    "Buffers": globjects.describe_buffer,
    "Textures": globjects.describe_texture,
    "Renderbuffers": globjects.describe_renderbuffer,
}


@pytest.mark.parametrize("kind", DESCRIBE)
def test_a_name_that_is_no_object_is_named_with_the_way_out(kind: str) -> None:
    for name in (0, 987654, generated(kind)):
        with pytest.raises(
            NotAllocatedError, match=f"{kind.lower()[:-1]} {name} is no object.*never bound.*storage"
        ):
            DESCRIBE[kind](name)


@pytest.mark.parametrize("kind", DESCRIBE)
def test_reports_5_an_object_without_storage_is_not_allocated(kind: str) -> None:
    name = GL.GLuint()
    create = getattr(GL, f"glCreate{kind}")
    create(GL.GL_TEXTURE_2D, 1, name) if kind == "Textures" else create(1, name)
    with pytest.raises(NotAllocatedError, match=r"has no storage\. Call gl"):
        DESCRIBE[kind](name.value)


def test_a_deleted_object_is_found() -> None:
    name = texture(by_name("R8"), 2, 2)
    GL.glDeleteTextures(1, [name])
    with pytest.raises(NotAllocatedError, match="deleted"):
        globjects.describe_texture(name)


def test_a_wrong_target_is_named_with_the_right_one() -> None:
    name = texture(by_name("R8"), 2, 2, GL.GL_TEXTURE_3D, 2)
    with pytest.raises(
        UsageError, match=r"got GL_TEXTURE_2D, expected GL_TEXTURE_3D\. Pass target=GL_TEXTURE_3D"
    ):
        globjects.describe_texture(name)


def test_multisampled_and_depth_images_are_described_but_not_moved() -> None:
    name = GL.GLuint()
    GL.glCreateTextures(GL.GL_TEXTURE_2D_MULTISAMPLE, 1, name)
    GL.glTextureStorage2DMultisample(name.value, 4, GL.GL_RGBA8, 8, 8, True)
    assert globjects.describe_texture(name.value, GL.GL_TEXTURE_2D_MULTISAMPLE) == (8, 8, 1, GL.GL_RGBA8, 4)
    rb = renderbuffer(by_name("RGBA8"), 8, 8, samples=4)
    assert globjects.describe_renderbuffer(rb).samples == 4
    depth = GL.GLuint()
    GL.glCreateTextures(GL.GL_TEXTURE_2D, 1, depth)
    GL.glTextureStorage2D(depth.value, 1, GL.GL_DEPTH_COMPONENT32F, 8, 8)
    for image, target, words in (
        (name.value, GL.GL_TEXTURE_2D_MULTISAMPLE, "GL_TEXTURE_2D_MULTISAMPLE"),
        (rb, GL.GL_RENDERBUFFER, "4 samples"),
        (depth.value, GL.GL_TEXTURE_2D, "DEPTH_COMPONENT32F.*shader"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            glpixels.read_image(image, target)


def test_images_without_rows_are_not_moved() -> None:
    name = GL.GLuint()
    GL.glCreateTextures(GL.GL_TEXTURE_1D, 1, name)
    GL.glTextureStorage1D(name.value, 1, GL.GL_RGBA8, 8)
    with pytest.raises(UnsupportedError, match="GL_TEXTURE_1D") as caught:
        glpixels.read_image(name.value, GL.GL_TEXTURE_1D)
    assert caught.value.reason == "target"


def test_temporary_objects_are_deleted() -> None:
    def names() -> list[tuple[bool, bool]]:
        return [(bool(GL.glIsTexture(name)), bool(GL.glIsBuffer(name))) for name in range(1, 2000)]

    rb, immutable = renderbuffer(by_name("R8"), 4, 4), buffer(16, flags=0)
    before = names()
    glpixels.write_image(rb, glpixels.read_image(rb, GL.GL_RENDERBUFFER), GL.GL_RENDERBUFFER)
    glpixels.write_buffer(immutable, bytes(16))
    assert names() == before


def test_a_renderbuffer_has_one_level() -> None:
    rb = renderbuffer(by_name("R8"), 2, 2)
    with pytest.raises(UsageError, match="level 1"):
        globjects.describe_image(rb, GL.GL_RENDERBUFFER, 1)


def test_without_a_context_every_question_says_so(context: glcontext.GlContext) -> None:
    """OpenGL itself would answer zeros and no error."""
    found: list[BaseException] = []

    def elsewhere() -> None:
        for question in (*DESCRIBE.values(), glpixels.read_buffer, glpixels.read_image):
            try:
                question(1)
            except NoContextError as error:
                found.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(found) == 5


def test_a_context_that_lacks_a_function_is_named(caplog: pytest.LogCaptureFixture) -> None:
    from OpenGL.error import NullFunctionError

    with pytest.raises(UnsupportedError, match=r"thing 3.*expected OpenGL 4\.5.*4\.5 core") as caught:
        with glcalls.checked("thing 3"):
            raise NullFunctionError("glCreateBuffers")
    assert caught.value.reason == "gl_version"
    assert caplog.text == ""


def test_no_flag_is_left_when_a_call_fails() -> None:
    def two_faults() -> None:
        with glcalls.checked("two faults") as gl:
            raw_enable(0xDEAD)
            raise gl.GLError(1281, baseOperation=gl.glEnable)

    with pytest.raises(DriverError) as caught:
        two_faults()
    assert caught.value.name == "GL_INVALID_VALUE"
    assert GL.glGetError() == 0


def test_an_error_pending_from_the_application_is_logged_and_not_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = texture(by_name("R8"), 2, 2)
    raw_enable(0xDEAD)
    assert globjects.describe_texture(name).width == 2
    assert "GL_INVALID_ENUM" in caplog.text


def raw_enable(capability: int) -> None:
    """glEnable without PyOpenGL's error check, as another GL binding calls it."""
    import ctypes

    from cuglue.graphics import egl

    address = egl.library().eglGetProcAddress(b"glEnable")
    ctypes.CFUNCTYPE(None, ctypes.c_uint)(address)(capability)
