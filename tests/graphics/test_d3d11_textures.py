"""Direct3D 11 textures on the simulated device, and the COM calls against objects built by a C compiler (A7, A15).

Nothing here ran on Windows: see docs/platforms.md.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphics.shared_memory import settled

import cuglue
from cuglue import external
from cuglue.driver.protocol import Driver, RegisterFlags
from cuglue.driver.sim import SimDriver
from cuglue.errors import DriverError, LayoutError, UnsupportedError, UsageError
from cuglue.graphics import d3d11_com, image_copy
from cuglue.graphics.handle import CudaHandle
from cuglue.graphics.image_copy import CopyPath
from cuglue.testing import sweep
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import HandleSuite, Subject, peek, poke
from cuglue.testing.interpose import interposed


@dataclass
class TextureSubject:
    """A fake texture with a handle."""

    handle: CudaHandle
    driver: Any
    texture: int
    opaque: bool = True

    def get(self) -> np.ndarray[Any, Any]:
        return self.driver.d3d11[self.texture].texels().reshape(-1).copy()

    def put(self, data: np.ndarray[Any, Any]) -> None:
        self.driver.d3d11[self.texture].texels()[...] = data.reshape(7, 20, 4)


@contextmanager
def fake_texture(driver: Any) -> Iterator[TextureSubject]:
    texture = driver.fake_d3d11(20, 7)
    with CudaHandle.from_d3d11(texture) as handle:
        yield TextureSubject(handle, driver, texture)


class OnSim(HandleSuite):
    """The contract of every handle."""

    @pytest.fixture(autouse=True)
    def _on(self, driver: Driver) -> None:
        self.driver = driver

    def make(self) -> AbstractContextManager[Subject]:
        return fake_texture(self.driver)


class TestD3d11(OnSim):
    """Small enough for the driver's copy."""


class TestD3d11BySurface(OnSim):
    """Copied by our kernels."""

    @pytest.fixture(autouse=True)
    def _no_image_is_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(image_copy, "SMALL_BYTES", 0)

    def test_the_surface_path_was_taken(self) -> None:
        with self.make() as subject:
            assert subject.handle.copy_path is CopyPath.SURFACE


# --- the simulated device -------------------------------------------------------------------------------------------
def test_A15_publishing_blocks_until_the_texture_holds_it(driver: Any) -> None:
    with fake_texture(driver) as subject:
        assert repr(subject.handle) == "CudaHandle(kind='D3d11', size=560)"
        with subject.handle.map_mut() as m:
            driver.fill_async(m.device_ptr, 0x5A, m.size, m.stream.handle)
            before = driver.counts["stream_synchronize"]
        assert driver.counts["stream_synchronize"] == before + 1
        assert (subject.get() == 0x5A).all()
        with subject.handle.map():
            pass
        assert driver.counts["stream_synchronize"] == before + 1


def test_A15_with_a_fence_publishing_signals(driver: Any) -> None:
    texture, semaphore = driver.fake_d3d11(20, 7), driver.semaphore_fd()
    handle = external.D3D11Fence(driver.fake_win32(semaphore))
    with (
        external.import_semaphore_win32(handle) as fence,
        CudaHandle.from_d3d11(texture, fence=fence) as image,
    ):
        image.record_write(1)
        fence.note(1)
        os.pwrite(semaphore, b"\x01", 0)
        with image.map_mut() as m:
            driver.fill_async(m.device_ptr, 3, m.size, m.stream.handle)
            before = driver.counts["stream_synchronize"]
        assert driver.counts["stream_synchronize"] == before
        assert image.handed_back == 2
        driver.device_synchronize(0)
        assert os.pread(semaphore, 1, 0) == b"\x02"
    os.close(semaphore)


def test_A11_format_and_carried_images(driver: Any) -> None:
    texture = driver.fake_d3d11(336, 362, channels=1)
    with CudaHandle.from_d3d11(texture, format="NV12", width=321, height=241) as handle, handle.map() as m:
        assert m.shape == (362, 336)
        assert m.planes["uv"].shape == (121, 161, 2)
    with pytest.raises(LayoutError):
        CudaHandle.from_d3d11(texture, format="NV12", width=321, height=300)
    assert driver.inventory()["resources"] == driver.inventory()["mapped"] == 0


def test_levels_and_layers(driver: Any) -> None:
    with fake_texture(driver) as subject:
        for options in ({"level": 1}, {"layer": 1}, {"level": -1}, {"layer": -1}):
            with pytest.raises(UsageError):
                subject.handle.map(**options)


@pytest.mark.parametrize("texture", [0, -1, True, None, "texture"])
def test_what_is_no_texture(driver: Any, texture: Any) -> None:
    with pytest.raises(UsageError, match="ID3D11Texture2D"):
        CudaHandle.from_d3d11(texture)
    assert "d3d11_register" not in driver.counts


def test_where_there_is_no_direct3d() -> None:
    with (
        cuglue.use_driver(SimDriver(disable=["graphics_d3d11"])) as driver,
        pytest.raises(UnsupportedError, match="Windows"),
    ):
        CudaHandle.from_d3d11(driver.fake_d3d11(4, 4))  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_direct3d_on_linux_is_refused(driver: Any) -> None:
    with pytest.raises(UnsupportedError, match="Windows"):
        CudaHandle.from_d3d11(4096)


def test_registering_loses_nothing_when_a_call_fails() -> None:
    sweep(
        lambda subject: CudaHandle.from_d3d11(subject[1], driver=subject[0]),
        setup=lambda driver: (driver, driver.fake_d3d11(20, 7)),
        teardown=lambda subject, handle: handle.close(),
        keeps=("kernels", "events"),
        atomic=False,
    ).check()


@pytest.mark.parametrize("method", ["map", "map_mut"])
def test_mapping_and_leaving_lose_nothing_when_a_call_fails(method: str) -> None:
    def operation(handle: CudaHandle) -> None:
        m = getattr(handle, method)()
        try:
            m.release()
        except BaseException:
            m.leave_later()
            raise

    sweep(
        operation,
        setup=lambda driver: CudaHandle.from_d3d11(driver.fake_d3d11(20, 7), driver=driver),
        teardown=lambda handle, result: handle.close(),
        keeps=("kernels", "events"),
        atomic=False,
        modes=["once", "method"],
    ).check()


# --- COM ------------------------------------------------------------------------------------------------------------
class Desc(ctypes.Structure):
    """``D3D11_TEXTURE2D_DESC`` as C has it, spelt out once more."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("width", "height", "levels", "layers")),
        ("format", ctypes.c_int),
        *((name, ctypes.c_uint) for name in ("samples", "quality")),
        ("usage", ctypes.c_int),
        *((name, ctypes.c_uint) for name in ("bind", "cpu", "misc")),
    )


RGBA8, R32F, NV12, TYPELESS, UINT, D24 = 28, 41, 103, 27, 30, 45


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A library with COM objects, and with the one function of nvcuda.dll."""
    path = tmp_path_factory.mktemp("d3d11") / "fake.so"
    source = Path(__file__).with_name("fake_d3d11.c")
    subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", path, source], check=True)
    loaded = ctypes.CDLL(str(path))
    loaded.fake_texture.restype = loaded.fake_registered.restype = ctypes.c_void_p
    loaded.fake_desc.restype = ctypes.POINTER(Desc)
    loaded.fake_asked.restype = ctypes.POINTER(ctypes.c_ubyte * 16)
    return loaded


def test_the_structure_is_the_one_of_C(library: Any) -> None:
    ours = d3d11_com.Texture2DDesc
    assert library.fake_desc_bytes() == ctypes.sizeof(ours) == ctypes.sizeof(Desc) == 44
    offsets = [getattr(ours, name).offset for name, _ in ours._fields_]
    assert offsets == [getattr(Desc, name).offset for name, _ in Desc._fields_] == list(range(0, 44, 4))


def test_a_texture_describes_itself(library: Any) -> None:
    texture = library.fake_texture(640, 480, RGBA8)
    desc = library.fake_desc().contents
    desc.levels, desc.layers, desc.samples, desc.bind, desc.misc = 3, 2, 4, 0x28, 0x800
    assert d3d11_com.describe(texture) == (640, 480, 3, 2, RGBA8, 4, 0x28, 0x800)
    assert library.fake_wrong_calls() == 0
    assert library.fake_references(0) == 1


@pytest.mark.parametrize(("dimension", "word"), [(1, "buffer"), (2, "1D"), (4, "3D"), (9, "dimension 9")])
def test_other_resources_are_refused(library: Any, dimension: int, word: str) -> None:
    texture = library.fake_texture(4, 4, RGBA8)
    library.fake_dimension(dimension)
    with pytest.raises(UnsupportedError, match=word):
        d3d11_com.describe(texture)


def test_the_device_is_protected_and_every_reference_given_back(library: Any) -> None:
    texture = library.fake_texture(4, 4, RGBA8)
    d3d11_com.protect_device(texture)
    assert library.fake_protection() == 1
    assert bytes(library.fake_asked().contents) == d3d11_com.IID_MULTITHREAD.bytes_le
    assert [library.fake_references(n) for n in range(4)] == [1, 1, 1, 1]
    assert library.fake_wrong_calls() == 0


def test_a_device_without_protection(library: Any) -> None:
    texture = library.fake_texture(4, 4, RGBA8)
    library.fake_no_multithread()
    with pytest.raises(DriverError, match="80004002"):
        d3d11_com.protect_device(texture)
    assert [library.fake_references(n) for n in range(4)] == [1, 1, 1, 1]


class Windows:
    """A driver that is simulated, but does not say so: the COM path is taken, and its texture stands for a fake one."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.driver = SimDriver()
        self.resource = 0

    @contextmanager
    def __call__(self, width: int = 20, height: int = 7, format: int = RGBA8, **image: Any) -> Iterator[int]:
        texture = self.library.fake_texture(width, height, format)
        name = self.driver.fake_d3d11(width, height, **image)

        def real(method_name: str, method: Callable[..., Any]) -> Callable[..., Any]:
            return lambda device: replace(method(device), simulated=False)

        def register(method_name: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def call(resource: int, flags: RegisterFlags, device: int) -> Any:
                self.resource = resource
                return method(name, flags, device)

            return call

        with (
            cuglue.use_driver(self.driver),
            interposed(self.driver, ["capabilities"], real),
            interposed(self.driver, ["d3d11_register"], register),
        ):
            yield texture


@pytest.fixture
def windows(library: Any) -> Windows:
    return Windows(library)


def test_the_whole_way_through_COM(windows: Windows) -> None:
    library, driver = windows.library, windows.driver
    with windows() as texture:
        with CudaHandle.from_d3d11(texture) as handle:
            assert windows.resource == texture
            assert library.fake_references(0) == 2  # the handle's, and the caller's
            assert library.fake_protection() == 1
            assert str(handle.format) == "RGBA8"
            with handle.map_mut() as m:
                assert m.shape == (7, 20, 4)
                poke(m, np.arange(560, dtype=np.uint8))
            with handle.map() as m:
                assert (peek(m) == np.arange(560, dtype=np.uint8)).all()
        assert [library.fake_references(n) for n in range(4)] == [1, 1, 1, 1]
        assert settled(driver)["resources"] == 0
    assert library.fake_wrong_calls() == 0


def test_row_10_a_typeless_texture_is_named(windows: Windows) -> None:
    with windows(format=TYPELESS) as texture, pytest.raises(UnsupportedError) as caught:
        CudaHandle.from_d3d11(texture)
    assert "DXGI_FORMAT_R8G8B8A8_TYPELESS (27)" in str(caught.value)
    assert "Copy to a typed texture" in str(caught.value)
    assert windows.resource == 0
    assert windows.library.fake_references(0) == 1
    assert windows.library.fake_protection() == 0


@pytest.mark.parametrize(
    ("format", "registers"),
    [*((n, True) for n in (28, 29, 30, 87, 41, 10, 2)), *((n, False) for n in (31, 24, 26, 45, 67))],
)
def test_row_11_every_format_has_its_answer(windows: Windows, format: int, registers: bool) -> None:
    from cuglue.graphics.d3d11 import check_description

    with windows(format=format) as texture:
        described = d3d11_com.describe(texture)
        if registers:
            assert check_description(described).dxgi == format
        else:
            with pytest.raises(UnsupportedError):
                check_description(described)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("samples", 4, "Resolve it"),
        ("bind", 0x40, "bound as depth"),
        ("misc", 0x2, "external.import_image"),
        ("misc", 0x100, "external.import_image"),
        ("misc", 0x800, "external.import_image"),
        ("format", NV12, "R8G8"),
        ("format", 9999, "9999"),
    ],
)
def test_what_does_not_register_is_said_before_the_driver_is_asked(
    windows: Windows, field: str, value: int, words: str
) -> None:
    with windows() as texture:
        setattr(windows.library.fake_desc().contents, field, value)
        with pytest.raises(UnsupportedError, match=words):
            CudaHandle.from_d3d11(texture)
    assert windows.resource == 0
    assert windows.library.fake_references(0) == 1


def test_what_CUDA_sees_is_compared(windows: Windows) -> None:
    with windows(format=R32F) as texture, pytest.raises(LayoutError, match="float32 x 1"):
        CudaHandle.from_d3d11(texture)
    assert windows.library.fake_references(0) == 1
    assert settled(windows.driver)["resources"] == 0


def test_a_refused_registration_gives_the_reference_back(windows: Windows) -> None:
    with windows() as texture, fail("d3d11_register", persistent=True), pytest.raises(DriverError):
        CudaHandle.from_d3d11(texture)
    assert windows.library.fake_references(0) == 1


# --- nvcuda.dll -----------------------------------------------------------------------------------------------------
def test_the_drivers_function_gets_its_arguments(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuglue.driver.cuda import graphics

    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        return library

    monkeypatch.setattr(graphics.ctypes, "WinDLL", load, raising=False)
    for answer, handle in ((0, 0x7700), (1, 0)):
        library.fake_answer(answer)
        with monkeypatch.context() as here:
            here.setattr(sys, "platform", "win32")
            status, resource = graphics._register_d3d11(0x1234_5678_9ABC, 4)
        assert (int(status), resource) == (answer, handle)
        assert library.fake_registered() == 0x1234_5678_9ABC
        assert library.fake_flags() == 4
    library.fake_answer(0)
    assert asked == ["nvcuda", "nvcuda"]
