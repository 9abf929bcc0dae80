"""The format table against OpenGL's own numbers, and the geometry of A11 to A13."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuglue import formats
from cuglue.errors import LayoutError, UnsupportedError
from cuglue.formats import FORMATS, Format, Geometry, Packing, Texel, by_name, tight_geometry
from cuglue.layout import Layout

TEXTURES = [f for f in FORMATS if f.gl is not None]
CARRIED = [f for f in FORMATS if f.gl is None]
REGISTRABLE = [f for f in TEXTURES if f.registers]

#: Bits per channel, kind and channels of arrays that a real driver reported for registered textures.
MEASURED = {
    "RGBA8": (8, "u", 4),
    "RGBA16F": (16, "f", 4),
    "RGBA32F": (32, "f", 4),
    "R8": (8, "u", 1),
    "RG8": (8, "u", 2),
    "R16": (16, "u", 1),
    "R32F": (32, "f", 1),
    "RGBA8UI": (8, "u", 4),
    "SRGB8_ALPHA8": (8, "u", 4),
    "RGB8": (8, "u", 4),
    "R32UI": (32, "u", 1),
    "R32I": (32, "s", 1),
    "R8I": (8, "s", 1),
    "RG16": (16, "u", 2),
    "RG16F": (16, "f", 2),
    "RG32F": (32, "f", 2),
    "RGBA16": (16, "u", 4),
    "RGB32F": (32, "f", 4),
}
REFUSED = ["RGB10_A2", "DEPTH_COMPONENT32F", "RGBA8_SNORM", "R11F_G11F_B10F", "RGB16F", "RGB5_A1"]


@pytest.mark.parametrize("format", TEXTURES, ids=str)
def test_the_number_is_opengls(format: Format) -> None:
    gl = pytest.importorskip("OpenGL.GL")
    assert format.gl == int(getattr(gl, f"GL_{format.name}"))
    assert formats.by_gl(int(getattr(gl, f"GL_{format.name}"))) is format


@pytest.mark.parametrize("key", ["name", "gl", "dxgi", "fourcc"])
def test_names_and_numbers_are_unique(key: str) -> None:
    values = [getattr(f, key) for f in FORMATS if getattr(f, key) is not None]
    assert len(values) == len(set(values))


@pytest.mark.parametrize("format", REGISTRABLE, ids=str)
def test_the_name_says_the_texel(format: Format) -> None:
    """The components and bits spelt in OpenGL's name are those of the row."""
    stem = format.name.removeprefix("S").removesuffix("_ALPHA8")
    letters = stem.rstrip("0123456789FUI")
    bits, kind = int("".join(c for c in stem if c.isdigit())), stem.removeprefix(letters).lstrip("0123456789")
    base = {"": "uint", "UI": "uint", "I": "int", "F": "float"}[kind]
    assert format.dtype == f"{base}{bits}"
    assert format.components == (4 if format.colorspace == "srgb" else len(letters))
    assert format.channels == (4 if format.components == 3 else format.components)
    assert format.integer == (kind in ("UI", "I"))
    assert format.texel_bytes == format.channels * bits // 8
    assert (format.reason, format.way_out) == ("", "")


@pytest.mark.parametrize("name", MEASURED)
def test_the_row_is_what_a_driver_reported(name: str) -> None:
    bits, kind, channels = MEASURED[name]
    texel = formats.from_descriptor(bits, kind, channels)  # type: ignore[arg-type]
    assert by_name(name).texel == texel
    assert by_name(name).registers


@pytest.mark.parametrize("name", REFUSED)
def test_reports_8_and_11_what_a_driver_refused_names_the_way_out(name: str) -> None:
    format = by_name(name)
    assert format.gl is not None
    with pytest.raises(UnsupportedError, match=f"GL_{name} \\(0x{format.gl:04X}\\): .*\\. [A-Z]") as caught:
        formats.check_registrable(format.gl)
    assert caught.value.reason == "format"


@pytest.mark.parametrize("format", [f for f in TEXTURES if not f.registers], ids=str)
def test_every_refused_row_has_a_reason_and_a_way_out(format: Format) -> None:
    assert format.reason
    assert format.way_out[0].isupper()
    with pytest.raises(UnsupportedError, match=format.reason):
        tight_geometry(format, 4, 4) if not format.channels else formats.check_registrable(format.gl or 0)


def test_srgb_is_marked() -> None:
    assert [f.name for f in FORMATS if f.colorspace == "srgb"] == ["SRGB8_ALPHA8"]


@pytest.mark.parametrize(
    ("target", "samples", "words", "reason"),
    [
        (0x9100, 0, "Resolve", "multisample"),
        (0x9102, 4, "Resolve", "multisample"),
        (None, 4, "4 samples", "multisample"),
        (0x0DE0, 0, "GL_TEXTURE_1D image", "target"),
        (0x8C2A, 0, "GL_TEXTURE_BUFFER", "target"),
    ],
)
def test_targets_and_samples_that_do_not_register(
    target: int | None, samples: int, words: str, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        formats.check_registrable(0x8058, target=target, samples=samples)
    assert caught.value.reason == reason


@pytest.mark.parametrize("target", [None, 0x0DE1, 0x806F, 0x84F5, 0x8513, 0x8C1A])
def test_targets_that_register(target: int | None) -> None:
    assert formats.check_registrable(0x8058, target=target, samples=1).name == "RGBA8"


# --- lookups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_row_is_found_by_each_of_its_names(format: Format) -> None:
    assert by_name(format.name) is by_name(f"GL_{format.name}") is format
    if format.dxgi is not None:
        assert formats.by_dxgi(format.dxgi) is format
    if format.fourcc is not None:
        assert len(format.fourcc) == 4
        number = int.from_bytes(format.fourcc.encode(), "little")
        assert formats.by_fourcc(format.fourcc) is formats.by_fourcc(number) is format
        assert formats.by_fourcc(format.fourcc.rstrip()) is format


def test_known_numbers() -> None:
    assert formats.by_dxgi(28).name == "RGBA8"
    assert formats.by_dxgi(87).name == "BGRA8"
    assert formats.by_dxgi(2).name == "RGBA32F"
    assert formats.by_dxgi(103).name == "NV12"
    assert formats.by_fourcc("NV12").name == "NV12"
    assert formats.by_fourcc(0x34324241).name == "RGBA8"  # DRM_FORMAT_ABGR8888
    assert formats.by_gl(0x1908).name == "RGBA8"  # unsized GL_RGBA
    assert formats.by_gl(0x1903).name == "R8"


@pytest.mark.parametrize(
    ("lookup", "value", "words"),
    [
        (by_name, "RGBA9", "got 'RGBA9', expected one of R8, RG8"),
        (formats.by_gl, 0x83F1, "0x83F1 \\(compressed"),
        (formats.by_dxgi, 1, "DXGI_FORMAT_R32G32B32A32_TYPELESS \\(1\\).*typed texture"),  # reports 10
        (formats.by_dxgi, 9999, "9999"),
        (formats.by_fourcc, "H264", "'H264'"),
        (formats.by_fourcc, 0, "FourCC"),
    ],
)
def test_what_is_unknown_is_refused_by_name(lookup: Any, value: object, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        lookup(value)
    assert caught.value.reason == "format"


@pytest.mark.parametrize(
    ("bits", "kind", "channels"),
    [(8, "u", 3), (8, "f", 4), (64, "u", 1), (8, "x", 1), (32, "f", 0), (24, "u", 1)],
)
def test_a_descriptor_without_a_numpy_type_is_refused(bits: int, kind: Any, channels: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{channels} channels of {bits} bits, kind '{kind}'"):
        formats.from_descriptor(bits, kind, channels)


def test_a_descriptor_is_a_texel() -> None:
    assert formats.from_descriptor(16, "f", 2) == Texel("float16", 2)
    assert formats.from_descriptor(32, "s", 4).nbytes == 16


# --- A11 to A13 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "width", "height", "expected"),
    [
        ("RGBA8", 640, 480, Geometry(640, 4, 480)),
        ("BGRA8", 5, 3, Geometry(5, 4, 3)),
        ("RGB8_PACKED", 4, 3, Geometry(3, 4, 3)),
        ("RGB16F_PACKED", 8, 2, Geometry(6, 8, 2)),
        ("RGB32F_PACKED", 8, 2, Geometry(6, 16, 2)),
        ("GREY", 321, 241, Geometry(321, 1, 241)),
        ("YUYV", 321, 241, Geometry(321, 2, 241)),
        ("NV12", 321, 241, Geometry(322, 1, 362)),
        ("NV16", 321, 241, Geometry(322, 1, 482)),
        ("NV24", 321, 241, Geometry(322, 1, 723)),
        ("NV12", 128, 64, Geometry(128, 1, 96)),
        ("NV16", 128, 64, Geometry(128, 1, 128)),
        ("NV24", 128, 64, Geometry(128, 1, 192)),
        ("RGB16F_PLANAR", 8, 5, Geometry(2, 8, 15)),
        ("RGBA16F_PLANAR", 8, 5, Geometry(2, 8, 20)),
        ("RGB32F_PLANAR", 8, 5, Geometry(2, 16, 15)),
        ("RGBA32F_PLANAR", 8, 5, Geometry(2, 16, 20)),
        ("RGBA16F", 3, 2, Geometry(3, 8, 2)),
        ("RGBA32F", 3, 2, Geometry(3, 16, 2)),
    ],
)
def test_A11_known_geometry(name: str, width: int, height: int, expected: Geometry) -> None:
    got = tight_geometry(by_name(name), width, height)
    assert got == expected
    assert got.row_bytes == expected.texels_per_row * expected.texel_bytes
    assert got.nbytes == expected.texels_per_row * expected.texel_bytes * expected.rows


@pytest.mark.parametrize(
    ("name", "width", "height", "words"),
    [
        ("RGBA8", 0, 4, "got 0 x 4 pixels"),
        ("NV12", 4, 0, "got 4 x 0 pixels"),
        ("RGBA8", -1, 4, "at least 1 x 1"),
        ("RGB8_PACKED", 5, 4, "rows of 15 elements"),
        ("RGB16F_PACKED", 2, 4, "rows of 6 elements"),
        ("RGB32F_PLANAR", 6, 4, "rows of 6 elements"),
    ],
)
def test_A11_refused_sizes(name: str, width: int, height: int, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        tight_geometry(by_name(name), width, height)


def test_A12_tight_rows_do_not_depend_on_a_pitch() -> None:
    assert tight_geometry(by_name("RGBA8"), 640, 480, pitch=4096) == Geometry(640, 4, 480)


def test_A13_semi_planar_rows_are_as_wide_as_the_pitch_and_never_narrower_than_the_image() -> None:
    nv12 = by_name("NV12")
    assert tight_geometry(nv12, 1000, 64, pitch=1024) == Geometry(1024, 1, 96)
    assert tight_geometry(nv12, 322, 241, pitch=64) == Geometry(322, 1, 362)
    with pytest.raises(LayoutError, match="a pitch of 333 bytes, expected an even pitch"):
        tight_geometry(nv12, 320, 240, pitch=333)


def test_A13_the_pitch_must_be_a_fixed_point() -> None:
    nv12 = by_name("NV12")
    asked: list[int] = []

    def aligned(texels: int) -> int:
        asked.append(texels)
        return -(-texels // 256) * 256

    assert formats.settle_pitch(nv12, 321, aligned) == 512
    assert asked == [322, 512]
    assert formats.settle_pitch(nv12, 321, lambda texels: texels) == 322
    with pytest.raises(LayoutError, match="a pitch of 640 bytes for rows of 512"):
        formats.settle_pitch(nv12, 321, lambda texels: 512 if texels == 322 else 640)


@pytest.mark.parametrize(("name", "uv"), [("NV12", (4, 4, 2)), ("NV16", (8, 4, 2)), ("NV24", (8, 8, 2))])
def test_reports_15_chroma_is_an_interleaved_pair(name: str, uv: tuple[int, ...]) -> None:
    views = formats.plane_views(by_name(name), 8, 8)
    assert {key: view.layout.shape for key, view in views.items()} == {"y": (8, 8), "uv": uv}


def test_reports_12_and_13_nv12_planes() -> None:
    views = formats.plane_views(by_name("NV12"), 64, 48)
    assert views["y"].layout == Layout.of((48, 64), "u1")
    assert views["uv"].layout == Layout.of((24, 32, 2), "u1")
    assert views["uv"].offset == 64 * 48
    assert tight_geometry(by_name("NV12"), 1280, 720).nbytes == 1_382_400


def test_reports_14_the_pitch_is_in_the_strides() -> None:
    views = formats.plane_views(by_name("NV12"), 1000, 8, pitch=1024)
    assert views["y"].layout == Layout.of((8, 1000), "u1", (1024, 1))
    assert views["uv"].layout == Layout.of((4, 500, 2), "u1", (1024, 2, 1))
    assert views["uv"].offset == 8 * 1024


@given(
    st.sampled_from([f for f in FORMATS if f.channels]),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([None, 16, 64]),
)
def test_planes_tile_the_image_without_overlap(
    format: Format, width: int, height: int, pitch: int | None
) -> None:
    """Each byte of the mapping belongs to at most one plane, and without padding to exactly one."""
    try:
        geometry = tight_geometry(format, width, height, pitch)
    except LayoutError:
        assert format.packing in (Packing.PACKED, Packing.PLANAR)
        assert (width * (3 if format.packing is Packing.PACKED else 1)) % 4
        return
    views = formats.plane_views(format, width, height, pitch)
    seen = np.zeros(geometry.nbytes, np.uint8)
    for view in views.values():
        layout = view.layout
        layout.fits(view.offset, geometry.nbytes)
        plane = np.ndarray(layout.shape, layout.dtype, seen, view.offset, layout.strides)
        raw = np.ndarray((*layout.shape, layout.itemsize), np.uint8, seen, view.offset, (*layout.strides, 1))
        raw += 1
        assert plane.shape == layout.shape
    assert seen.max() == 1
    if not (width % 2 or height % 2) and geometry.texels_per_row in (width, width * 3 // 4, width // 4):
        assert seen.min() == 1
    offsets = [view.offset for view in views.values()]
    assert all(a < b for a, b in pairwise(offsets))


@pytest.mark.parametrize("format", CARRIED, ids=str)
def test_a_carrier_of_the_right_size_and_type_is_accepted(format: Format) -> None:
    geometry = tight_geometry(format, 16, 8)
    got = formats.check_carrier(format, 16, 8, format.texel, geometry.texels_per_row, geometry.rows)
    assert got == geometry
    rows = geometry.rows + 1
    with pytest.raises(LayoutError, match=f"got {geometry.texels_per_row} x {rows} texels"):
        formats.check_carrier(format, 16, 8, format.texel, geometry.texels_per_row, rows)
    with pytest.raises(LayoutError, match="texels of uint32 x 1"):
        formats.check_carrier(format, 16, 8, Texel("uint32", 1), geometry.texels_per_row, geometry.rows)


def test_a_semi_planar_carrier_may_be_wider_but_not_narrower() -> None:
    nv12, texel = by_name("NV12"), Texel("uint8", 1)
    assert formats.check_carrier(nv12, 1000, 720, texel, 1024, 1080).texels_per_row == 1024
    with pytest.raises(LayoutError, match="got 998 x 1080 texels, expected 1000 x 1080"):
        formats.check_carrier(nv12, 1000, 720, texel, 998, 1080)
