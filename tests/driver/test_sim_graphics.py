"""Graphics objects of the simulated device: the hand-offs, the codes of the real driver, and real OpenGL objects."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from cuglue.driver.protocol import (
    Access,
    ArrayInfo,
    CaptureMode,
    CopyKind,
    RegisterFlags,
    Span,
    SurfaceArg,
    TexelKind,
)
from cuglue.driver.sim import HazardError, SimDriver
from cuglue.errors import DriverError, LaunchError

N = 1024
NONE = RegisterFlags.NONE
RGBA8 = ArrayInfo(5, 3, 0, 8, 4, TexelKind.UINT)


def code_of(call: object, *args: object) -> int:
    with pytest.raises(DriverError) as caught:
        call(*args)  # type: ignore[operator]
    assert caught.value.name.startswith("cuda")
    return caught.value.code


@pytest.fixture
def sim() -> SimDriver:
    return SimDriver()


def fill(grid: object, block: object, surface: object, value: np.uint8) -> None:
    surface.texels[...] = value  # type: ignore[attr-defined]


# --- arrays, surfaces, textures -------------------------------------------------------------------------------------
def test_an_array_is_reached_by_copies_surfaces_and_textures_only(sim: SimDriver) -> None:
    stream, array = sim.stream_create(0), sim.array_create(RGBA8, 0)
    memory, back = sim.malloc(60, 0), np.zeros((3, 20), np.uint8)
    pattern = np.arange(60, dtype=np.uint8)
    sim.copy_async(memory, pattern.ctypes.data, 60, CopyKind.H2D, stream)
    sim.copy_to_array_async(array, memory, 20, 20, 3, stream)
    sim.fill_async(memory, 0, 60, stream)
    sim.copy_from_array_async(memory, 20, array, 20, 3, stream)
    sim.copy_async(back.ctypes.data, memory, 60, CopyKind.D2H, stream)
    sim.stream_synchronize(stream)
    assert (back.ravel() == pattern).all()
    assert sim.array_info(array, 0) == RGBA8

    def mirror(grid: object, block: object, source: object, target: object) -> None:
        target.texels[...] = source.texels[:, ::-1]  # type: ignore[attr-defined]

    other = sim.array_create(RGBA8, 0)
    texture, surface = sim.texture_create(array, 0, normalized=True), sim.surface_create(other, 0)
    kernel = sim.kernel_load("mirror", "", (), 0, mirror)
    uses = (SurfaceArg(texture, Access.READ), SurfaceArg(surface, Access.WRITE))
    sim.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (texture, surface), uses, 0, stream)
    sim.copy_from_array_async(memory, 20, other, 20, 3, stream)
    sim.copy_async(back.ctypes.data, memory, 60, CopyKind.D2H, stream)
    sim.stream_synchronize(stream)
    assert (back.reshape(3, 5, 4) == pattern.reshape(3, 5, 4)[:, ::-1]).all()
    with pytest.raises(LaunchError):
        sim.kernel_launch(
            kernel,
            (1, 1, 1),
            (1, 1, 1),
            (texture, texture),
            (uses[0], uses[1]._replace(handle=texture)),
            0,
            stream,
        )
    sim.surface_destroy(surface)
    sim.texture_destroy(texture)
    sim.array_destroy(array)
    sim.array_destroy(other)
    assert code_of(sim.array_info, array, 0) == 400
    assert sim.memory_info(0).total - sim.memory_info(0).free == 512


def test_an_array_is_asked_for_on_its_own_device() -> None:
    sim = SimDriver(devices=2)
    array = sim.array_create(RGBA8, 1)
    assert sim.array_info(array, 1) == RGBA8
    assert code_of(sim.array_info, array, 0) == 400
    sim.array_destroy(array)


def test_array_uses_are_ordered_like_any_other(sim: SimDriver) -> None:
    first, second = sim.stream_create(0), sim.stream_create(0)
    array, memory = sim.array_create(RGBA8, 0), sim.malloc(60, 0)
    surface, kernel = sim.surface_create(array, 0), sim.kernel_load("fill", "", (), 0, fill)
    uses = (SurfaceArg(surface, Access.WRITE), None)
    sim.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (surface, np.uint8(1)), uses, 0, first)
    sim.copy_from_array_async(memory, 20, array, 20, 3, second)
    with pytest.raises(HazardError):
        sim.device_synchronize(0)


def test_a_surface_destroyed_under_a_queued_launch_is_a_hazard(sim: SimDriver) -> None:
    stream, array = sim.stream_create(0), sim.array_create(RGBA8, 0)
    surface, kernel = sim.surface_create(array, 0), sim.kernel_load("fill", "", (), 0, fill)
    uses = (SurfaceArg(surface, Access.WRITE), None)
    sim.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (surface, np.uint8(1)), uses, 0, stream)
    sim.surface_destroy(surface)
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.hazards[0].kind == "object destroyed while in use"


@pytest.mark.parametrize(
    ("extent", "code"), [((21, 3, 21), 1), ((20, 4, 20), 1), ((20, 3, 19), 12)], ids=["wide", "high", "pitch"]
)
def test_array_copies_stay_inside(sim: SimDriver, extent: tuple[int, int, int], code: int) -> None:
    array, memory = sim.array_create(RGBA8, 0), sim.malloc(N, 0)
    width, height, pitch = extent
    assert code_of(sim.copy_from_array_async, memory, pitch, array, width, height, 0) == code
    assert code_of(sim.copy_to_array_async, array, memory, pitch, width, height, 0) == code


def test_a_three_dimensional_array_has_slices(sim: SimDriver) -> None:
    info = ArrayInfo(4, 3, 2, 32, 2, TexelKind.FLOAT)
    array = sim.array_create(info, 0)
    surface = sim.surface_create(array, 0)
    seen: list[tuple[int, ...]] = []
    kernel = sim.kernel_load("shape", "", (), 0, lambda g, b, image: seen.append(image.texels.shape))
    sim.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (surface,), (SurfaceArg(surface, Access.READ),), 0, 0)
    sim.stream_synchronize(0)
    assert seen == [(2, 3, 4, 2)]


# --- hand-offs, with objects that need no OpenGL --------------------------------------------------------------------
def mapped_buffer(sim: SimDriver, flags: RegisterFlags = NONE) -> tuple[int, int, int]:
    gl = sim.fake_gl()
    name = gl.buffer_object(N)
    return name, sim.gl_register_buffer(name, flags, 0), sim.stream_create(0)


def test_a_buffer_is_read_at_map_and_written_at_unmap_at_a_new_address_each_time(sim: SimDriver) -> None:
    name, resource, stream = mapped_buffer(sim)
    content = sim.fake_gl()[name].bytes
    seen = set()
    for value in range(1, 20):
        content[0] = value
        sim.graphics_map([resource], stream)
        ptr, nbytes = sim.graphics_pointer(resource)
        assert nbytes == N
        assert ptr not in seen
        seen = {ptr}
        sim.stream_synchronize(stream)
        assert sim.host_view(ptr, 1, False)[0] == value
        sim.fill_async(ptr + 1, value, N - 1, stream)
        assert content[1] == (value - 1), "unmap, not the fill, publishes"
        sim.graphics_unmap([resource], stream)
        assert (content == value).all()
    sim.graphics_unregister(resource)
    assert sim.inventory()["resources"] == 0
    assert sim.hazards == []


def test_unmap_waits_for_what_its_stream_waits_for(sim: SimDriver) -> None:
    for seed in range(30):
        sim = SimDriver(seed)
        name, resource, stream = mapped_buffer(sim)
        other, event = sim.stream_create(0), sim.event_create(0)
        sim.graphics_map([resource], stream)
        ptr, _ = sim.graphics_pointer(resource)
        sim.event_record(event, stream)
        sim.stream_wait_event(other, event)
        sim.fill_async(ptr, 9, N, other)
        sim.event_record(event, other)
        sim.stream_wait_event(stream, event)
        sim.graphics_unmap([resource], stream)
        assert (sim.fake_gl()[name].bytes == 9).all()
        assert sim.hazards == []


@pytest.mark.parametrize("missing", ["map", "unmap"])
def test_use_on_another_stream_needs_a_wait_on_both_sides(sim: SimDriver, missing: str) -> None:
    _, resource, stream = mapped_buffer(sim)
    other, event = sim.stream_create(0), sim.event_create(0)
    sim.graphics_map([resource], stream)
    ptr, _ = sim.graphics_pointer(resource)
    if missing != "map":
        sim.event_record(event, stream)
        sim.stream_wait_event(other, event)
    sim.fill_async(ptr, 9, N, other)
    if missing != "unmap":
        sim.event_record(event, other)
        sim.stream_wait_event(stream, event)
    sim.graphics_unmap([resource], stream)
    with pytest.raises(HazardError) as caught:
        sim.device_synchronize(0)
    names = ("graphics_map", "fill_async") if missing == "map" else ("fill_async", "graphics_unmap")
    assert [(h.first.name, h.second.name) for h in caught.value.hazards] == [names]


def test_use_after_unmap_is_a_hazard_and_finds_poison(sim: SimDriver) -> None:
    _, resource, stream = mapped_buffer(sim)
    sim.graphics_map([resource], stream)
    ptr, _ = sim.graphics_pointer(resource)
    sim.graphics_unmap([resource], stream)
    target = sim.malloc(N, 0)
    sim.copy_async(target, ptr, N, CopyKind.D2D, stream)
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.hazards[0].kind == "use after unmap"
    assert caught.value.hazards[0].first.name == "graphics_unmap"


def test_row_61_graphics_use_of_a_mapped_object_is_a_hazard(sim: SimDriver) -> None:
    name, resource, stream = mapped_buffer(sim)
    sim.graphics_map([resource], stream)
    sim.fake_gl()[name].bytes[7] = 1
    sim.graphics_unmap([resource], stream)
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.hazards[0].kind == "graphics use of a mapped object"


def test_register_flags_are_obeyed(sim: SimDriver) -> None:
    gl = sim.fake_gl()
    name, stream = gl.buffer_object(N), sim.stream_create(0)
    gl[name].bytes[:] = 5
    discard = sim.gl_register_buffer(name, RegisterFlags.WRITE_DISCARD, 0)
    sim.graphics_map([discard], stream)
    ptr, _ = sim.graphics_pointer(discard)
    sim.fill_async(ptr, 6, N // 2, stream)
    sim.graphics_unmap([discard], stream)
    assert gl[name].bytes[[0, -1]].tolist() == [6, 0xCD], "what was discarded is not there"
    only = sim.gl_register_buffer(name, RegisterFlags.READ_ONLY, 0)
    sim.graphics_map([only], stream)
    ptr, _ = sim.graphics_pointer(only)
    sim.fill_async(ptr, 7, N, stream)
    sim.graphics_unmap([only], stream)
    assert gl[name].bytes[0] == 6
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert [h.kind for h in caught.value.hazards] == ["write to memory mapped read-only"]


def test_the_codes_of_the_real_driver(sim: SimDriver) -> None:
    gl = sim.fake_gl()
    buffer, image, stream = gl.buffer_object(N), gl.image_object(4, 4), sim.stream_create(0)
    assert code_of(sim.gl_register_buffer, 99, NONE, 0) == 400
    assert code_of(sim.gl_register_image, buffer, 0, NONE, 0) == 400
    a, b = sim.gl_register_buffer(buffer, NONE, 0), sim.gl_register_image(image, 0, NONE, 0)
    assert 0 not in (a, b)
    for call in (
        sim.graphics_pointer,
        lambda r: sim.graphics_array(r, 0, 0),
        lambda r: sim.graphics_unmap([r], stream),
    ):
        assert code_of(call, a) == 211
    sim.graphics_map([a, b], stream)
    assert code_of(sim.graphics_map, [a], stream) == 208
    assert code_of(sim.graphics_pointer, b) == 213
    assert code_of(sim.graphics_array, a, 0, 0) == 211
    assert code_of(sim.graphics_array, b, 1, 0) == code_of(sim.graphics_array, b, 0, 1) == 1
    array = sim.graphics_array(b, 0, 0)
    assert sim.graphics_array(b, 0, 0) == array
    assert sim.inventory()["mapped"] == 2
    sim.graphics_unmap([b, a], stream)
    assert code_of(sim.array_info, array, 0) == 400
    sim.capture_begin(stream, CaptureMode.RELAXED)
    assert code_of(sim.graphics_map, [a], stream) == 900
    assert code_of(sim.capture_end, stream) == 901
    gl.thread = 1
    assert sim.gl_devices() == ()
    assert code_of(sim.gl_register_buffer, buffer, NONE, 0) == 1
    assert code_of(sim.graphics_map, [a], stream) == code_of(sim.graphics_unregister, a) == 219
    gl.thread = threading.get_ident()
    assert sim.gl_devices() == (0,)


def test_map_of_several_is_all_or_none(sim: SimDriver) -> None:
    gl = sim.fake_gl()
    resources = [sim.gl_register_buffer(gl.buffer_object(N), NONE, 0) for _ in range(3)]
    stream = sim.stream_create(0)
    sim.graphics_map(resources[2:], stream)
    before = sim.inventory()
    assert code_of(sim.graphics_map, resources, stream) == 208
    assert code_of(sim.graphics_map, [resources[0], resources[0]], stream) == 208
    assert sim.inventory() == before


def test_a_deleted_object_is_not_noticed(sim: SimDriver) -> None:
    name, resource, stream = mapped_buffer(sim)
    sim.fake_gl()[name].delete()
    sim.graphics_map([resource], stream)
    assert sim.graphics_pointer(resource)[1] == N
    sim.graphics_unmap([resource], stream)


def test_a_d3d11_texture_maps_to_an_array(sim: SimDriver) -> None:
    texture, stream = sim.fake_d3d11(6, 2), sim.stream_create(0)
    resource = sim.d3d11_register(texture, NONE, 0)
    sim.graphics_map([resource], stream)
    memory = sim.malloc(48, 0)
    sim.fill_async(memory, 3, 48, stream)
    sim.copy_to_array_async(sim.graphics_array(resource, 0, 0), memory, 24, 24, 2, stream)
    sim.graphics_unmap([resource], stream)
    assert (sim.d3d11[texture].texels() == 3).all()
    assert code_of(sim.d3d11_register, 77, NONE, 0) == 400


# --- real OpenGL ----------------------------------------------------------------------------------------------------
class RealGL:
    """Makes objects in a headless context, and looks at them with the library's own transfers."""

    def __init__(self) -> None:
        import OpenGL.GL as GL

        self.gl = GL

    def texture(
        self, format: int, width: int, height: int, target: int = 0x0DE1, depth: int = 0, levels: int = 1
    ) -> int:
        name = self.gl.GLuint()
        self.gl.glCreateTextures(target, 1, name)
        if depth:
            self.gl.glTextureStorage3D(name.value, levels, format, width, height, depth)
        else:
            self.gl.glTextureStorage2D(name.value, levels, format, width, height)
        return int(name.value)

    def buffer(self, data: np.ndarray) -> int:
        name = self.gl.GLuint()
        self.gl.glCreateBuffers(1, name)
        self.gl.glNamedBufferStorage(name.value, data.nbytes, data, 0)
        return int(name.value)


@pytest.fixture
def real() -> Iterator[RealGL]:
    from cuglue.graphics import glcontext

    with glcontext.headless():
        yield RealGL()


@pytest.mark.gl
def test_a_real_buffer_maps_and_publishes(sim: SimDriver, real: RealGL) -> None:
    import glpixels

    data = np.arange(N, dtype=np.uint32).view(np.uint8)
    name, stream = real.buffer(data), sim.stream_create(0)
    assert sim.gl_devices() == (0,)
    resource = sim.gl_register_buffer(name, NONE, 0)
    sim.graphics_map([resource], stream)
    ptr, nbytes = sim.graphics_pointer(resource)
    assert nbytes == data.nbytes

    def increment(grid: object, block: object, x: np.ndarray) -> None:
        x += 1

    span = Span(ptr, nbytes, Access.READ_WRITE, (N,), "u4", (4,))
    sim.kernel_launch(
        sim.kernel_load("increment", "", (), 0, increment), (1, 1, 1), (N, 1, 1), (ptr,), (span,), 0, stream
    )
    assert (glpixels.read_buffer(name) == data).all()
    sim.graphics_unmap([resource], stream)
    assert (glpixels.read_buffer(name).view(np.uint32) == np.arange(1, N + 1)).all()


FORMATS = [
    (0x8058, (8, 4, TexelKind.UINT)),  # RGBA8
    (0x8051, (8, 4, TexelKind.UINT)),  # RGB8
    (0x8C43, (8, 4, TexelKind.UINT)),  # SRGB8_ALPHA8
    (0x8229, (8, 1, TexelKind.UINT)),  # R8
    (0x822C, (16, 2, TexelKind.UINT)),  # RG16
    (0x881A, (16, 4, TexelKind.FLOAT)),  # RGBA16F
    (0x8814, (32, 4, TexelKind.FLOAT)),  # RGBA32F
    (0x8235, (32, 1, TexelKind.SINT)),  # R32I
]


@pytest.mark.gl
@pytest.mark.parametrize("renderbuffer", [False, True], ids=["texture", "renderbuffer"])
@pytest.mark.parametrize(("format", "texel"), FORMATS)
def test_real_images_map_as_the_driver_maps_them(
    sim: SimDriver, real: RealGL, format: int, texel: tuple[int, int, TexelKind], renderbuffer: bool
) -> None:
    import glpixels

    gl, (bits, channels, kind) = real.gl, texel
    target = gl.GL_RENDERBUFFER if renderbuffer else gl.GL_TEXTURE_2D
    if renderbuffer:
        name_ = gl.GLuint()
        gl.glCreateRenderbuffers(1, name_)
        gl.glNamedRenderbufferStorage(name_.value, format, 7, 3)
        name = int(name_.value)
    else:
        name = real.texture(format, 7, 3)
    random = np.random.default_rng(1)
    dtype = np.dtype({"u": "u", "i": "i", "f": "f"}[kind.value] + str(bits // 8))
    image = random.integers(0, 100, (3, 7, channels)).astype(dtype)
    glpixels.write_image(name, image, target)
    stream = sim.stream_create(0)
    resource = sim.gl_register_image(name, target, NONE, 0)
    sim.graphics_map([resource], stream)
    array = sim.graphics_array(resource, 0, 0)
    info = sim.array_info(array, 0)
    assert info == (7, 3, 0, bits, channels, kind)
    row = 7 * info.texel_bytes
    memory, back = sim.malloc(3 * row, 0), np.zeros((3, 7, channels), dtype)
    sim.copy_from_array_async(memory, row, array, row, 3, stream)
    sim.copy_async(back.ctypes.data, memory, 3 * row, CopyKind.D2H, stream)
    sim.stream_synchronize(stream)
    used = 3 if format == 0x8051 else channels
    assert (back[..., :used] == image[..., :used]).all()
    other = image[::-1, ::-1].copy()
    sim.copy_async(memory, other.ctypes.data, 3 * row, CopyKind.H2D, stream)
    sim.copy_to_array_async(array, memory, row, row, 3, stream)
    sim.graphics_unmap([resource], stream)
    assert (glpixels.read_image(name, target)[..., :used] == other[..., :used]).all()
    assert sim.hazards == []


@pytest.mark.gl
def test_levels_layers_faces_and_volumes(sim: SimDriver, real: RealGL) -> None:
    gl, stream = real.gl, sim.stream_create(0)
    expected = {
        (gl.GL_TEXTURE_2D_ARRAY, 8, 4, 3): [((2, 0), (8, 4, 0)), ((2, 1), (4, 2, 0))],
        (gl.GL_TEXTURE_CUBE_MAP, 8, 8, 0): [((5, 0), (8, 8, 0)), ((0, 1), (4, 4, 0))],
        (gl.GL_TEXTURE_3D, 8, 4, 6): [((0, 0), (8, 4, 6)), ((0, 1), (4, 2, 3))],
        (gl.GL_TEXTURE_2D, 8, 4, 0): [((0, 1), (4, 2, 0))],
    }
    for (target, width, height, depth), parts in expected.items():
        name = real.texture(gl.GL_RGBA8, width, height, target, depth, levels=2)
        resource = sim.gl_register_image(name, target, NONE, 0)
        sim.graphics_map([resource], stream)
        for (layer, level), extent in parts:
            assert sim.array_info(sim.graphics_array(resource, layer, level), 0)[:3] == extent
        for layer, level in ((7, 0), (0, 2), (-1, 0)):
            assert code_of(sim.graphics_array, resource, layer, level) == 1
        sim.graphics_unmap([resource], stream)


@pytest.mark.gl
def test_what_the_driver_refuses(sim: SimDriver, real: RealGL) -> None:
    gl = real.gl
    for format in (gl.GL_RGB10_A2, gl.GL_DEPTH_COMPONENT32F, gl.GL_RGBA8_SNORM, gl.GL_RGB5_A1, gl.GL_RGB16F):
        name = real.texture(format, 4, 4)
        assert code_of(sim.gl_register_image, name, gl.GL_TEXTURE_2D, NONE, 0) == 1
    name = real.texture(gl.GL_RGBA8, 4, 4)
    assert code_of(sim.gl_register_image, name, gl.GL_TEXTURE_1D, NONE, 0) == 1
    assert code_of(sim.gl_register_image, name, gl.GL_TEXTURE_3D, NONE, 0) == 400
    empty = gl.GLuint()
    gl.glCreateTextures(gl.GL_TEXTURE_2D, 1, empty)
    assert code_of(sim.gl_register_image, empty.value, gl.GL_TEXTURE_2D, NONE, 0) == 400
    assert code_of(sim.gl_register_image, 9999, gl.GL_RENDERBUFFER, NONE, 0) == 400
    assert code_of(sim.gl_register_buffer, 9999, NONE, 0) == 400
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(code_of(sim.gl_register_image, name, gl.GL_TEXTURE_2D, NONE, 0))
    )
    thread.start()
    thread.join()
    assert codes == [1]


@pytest.mark.gl
def test_a_resized_texture_maps_as_it_was(sim: SimDriver, real: RealGL) -> None:
    gl, stream = real.gl, sim.stream_create(0)
    name = int(gl.glGenTextures(1))
    gl.glBindTexture(gl.GL_TEXTURE_2D, name)
    gl.glTexImage2D(gl.GL_TEXTURE_2D, 0, gl.GL_RGBA8, 4, 4, 0, gl.GL_RGBA, gl.GL_UNSIGNED_BYTE, None)
    resource = sim.gl_register_image(name, gl.GL_TEXTURE_2D, NONE, 0)
    gl.glTexImage2D(gl.GL_TEXTURE_2D, 0, gl.GL_RGBA8, 8, 8, 0, gl.GL_RGBA, gl.GL_UNSIGNED_BYTE, None)
    sim.graphics_map([resource], stream)
    assert sim.array_info(sim.graphics_array(resource, 0, 0), 0)[:2] == (4, 4)
    sim.graphics_unmap([resource], stream)
    gl.glDeleteTextures([name])
    sim.graphics_map([resource], stream)
    sim.graphics_unmap([resource], stream)
