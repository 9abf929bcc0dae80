"""Arrays of another owner: copies, geometry, the ladder of sizes, the end (A7-A11, A15, A18, A22, A25)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from graphics.shared_memory import descriptors, memory_file, settled

import cuglue
from cuglue import external
from cuglue.driver.protocol import ArrayInfo, Driver, TexelKind
from cuglue.errors import (
    ClosedError,
    DriverError,
    LayoutError,
    MapUnavailableError,
    PublishError,
    UnsupportedError,
    UsageError,
)
from cuglue.graphics import extimage, image_copy
from cuglue.graphics.handle import CudaHandle
from cuglue.graphics.image_copy import CopyPath
from cuglue.testing import sweep
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import HandleSuite, Subject, peek, poke
from cuglue.testing.interpose import interposed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is a Linux call")

INFO = ArrayInfo(20, 7, 0, 8, 4, TexelKind.UINT)


@dataclass
class ArraySubject:
    """A CUDA array with a handle; its bytes by the driver's copies."""

    handle: CudaHandle
    driver: Driver
    array: int
    opaque: bool = True

    def get(self) -> np.ndarray[Any, Any]:
        out = np.zeros(INFO.width * 4 * INFO.height, np.uint8)
        self._copy(out, to_array=False)
        return out

    def put(self, data: np.ndarray[Any, Any]) -> None:
        self._copy(np.ascontiguousarray(data), to_array=True)

    def _copy(self, data: np.ndarray[Any, Any], *, to_array: bool) -> None:
        """By way of device memory: arrays are copied to and from that only."""
        from cuglue.driver.protocol import CopyKind

        driver, row = self.driver, INFO.width * 4
        stream, ptr = driver.stream_create(0), driver.malloc(data.nbytes, 0)
        driver.device_synchronize(0)
        if to_array:
            driver.copy_async(ptr, data.ctypes.data, data.nbytes, CopyKind.H2D, stream)
            driver.copy_to_array_async(self.array, ptr, row, row, INFO.height, stream)
        else:
            driver.copy_from_array_async(ptr, row, self.array, row, INFO.height, stream)
            driver.copy_async(data.ctypes.data, ptr, data.nbytes, CopyKind.D2H, stream)
        driver.stream_synchronize(stream)
        driver.free(ptr, 0)
        driver.stream_destroy(stream)


@contextmanager
def cuda_array(driver: Driver) -> Iterator[ArraySubject]:
    """An array with a handle."""
    array = driver.array_create(INFO, 0)
    with CudaHandle.from_array(array, texels=20, rows=7, bytes_per_texel=4) as handle:
        yield ArraySubject(handle, driver, array)
    driver.array_destroy(array)


class OfArrays(HandleSuite):
    """The contract of every handle."""

    @pytest.fixture(autouse=True, params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
    def _on(self, request: pytest.FixtureRequest) -> None:
        self.driver = request.getfixturevalue("driver")

    def make(self) -> AbstractContextManager[Subject]:
        return cuda_array(self.driver)


class TestArray(OfArrays):
    """Small enough for the driver's copy."""


class TestArrayBySurface(OfArrays):
    """Copied by our kernels."""

    @pytest.fixture(autouse=True)
    def _no_image_is_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(image_copy, "SMALL_BYTES", 0)

    def test_the_surface_path_was_taken(self) -> None:
        with self.make() as subject:
            assert subject.handle.copy_path is CopyPath.SURFACE


# --- A11: geometry --------------------------------------------------------------------------------------------------
def array_handle(driver: Any, info: ArrayInfo = INFO, **options: Any) -> tuple[int, CudaHandle]:
    array = driver.array_create(info, 0)
    handle = CudaHandle.from_array(
        array, texels=info.width, rows=info.height, bytes_per_texel=info.texel_bytes, **options
    )
    return array, handle


BYTES, FLOATS = TexelKind.UINT, TexelKind.FLOAT
NV12 = {"format": "NV12", "width": 321, "height": 241}
PLANAR = {"format": "RGB32F_PLANAR", "width": 8, "height": 4}


@pytest.mark.parametrize(
    ("info", "options", "shape", "dtype"),
    [
        (ArrayInfo(6, 4, 0, 8, 4, TexelKind.UINT), {}, (4, 6, 4), "u1"),
        (ArrayInfo(6, 4, 0, 16, 2, TexelKind.FLOAT), {}, (4, 6, 2), "f2"),
        (ArrayInfo(6, 4, 0, 32, 1, TexelKind.SINT), {}, (4, 6, 1), "i4"),
        (ArrayInfo(6, 4, 0, 8, 4, TexelKind.UINT), {"format": "BGRA8"}, (4, 6, 4), "u1"),
        (ArrayInfo(6, 4, 0, 8, 4, TexelKind.UINT), {"format": "RGB8_PACKED", "width": 8}, (4, 8, 3), "u1"),
        (
            ArrayInfo(2, 12, 0, 32, 4, TexelKind.FLOAT),
            {"format": "RGB32F_PLANAR", "width": 8, "height": 4},
            (3, 4, 8),
            "f4",
        ),
        (
            ArrayInfo(322, 362, 0, 8, 1, TexelKind.UINT),
            {"format": "NV12", "width": 321, "height": 241},
            (362, 322),
            "u1",
        ),
        (ArrayInfo(6, 4, 0, 8, 2, TexelKind.UINT), {"format": "YUYV"}, (4, 6, 2), "u1"),
    ],
)
def test_A11_tight_rows(driver: Any, info: ArrayInfo, options: Any, shape: Any, dtype: str) -> None:
    array, handle = array_handle(driver, info, **options)
    with handle, handle.map() as m:
        assert (m.shape, m.dtype) == (shape, np.dtype(dtype))
        assert len(m) == info.width * info.texel_bytes * info.height
        assert (m.rows, m.row_bytes) == (info.height, info.width * info.texel_bytes)
    driver.array_destroy(array)


@pytest.mark.parametrize(
    "wrong",
    [
        {"texels": 21},
        {"rows": 6},
        {"bytes_per_texel": 8},
        {"format": "NV12", "width": 20, "height": 4},
        {"format": "RGBA8", "width": 19},
        {"format": "RGB8_PACKED", "width": 25},
        {"format": "BGRA8", "width": 0},
    ],
)
def test_A11_what_the_array_is_not(driver: Any, wrong: dict[str, Any]) -> None:
    array = driver.array_create(INFO, 0)
    right: dict[str, Any] = {"texels": 20, "rows": 7, "bytes_per_texel": 4}
    before = driver.inventory()
    with pytest.raises(LayoutError):
        CudaHandle.from_array(array, **(right | wrong))
    assert driver.inventory() == before
    driver.array_destroy(array)


def test_bad_arrays(driver: Any) -> None:
    array = driver.array_create(INFO, 0)
    right: dict[str, Any] = {"texels": 20, "rows": 7, "bytes_per_texel": 4}
    for wrong in (0, -1, True, None, "array"):
        with pytest.raises(UsageError, match="cudaArray_t"):
            CudaHandle.from_array(wrong, **right)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="size of"):
        CudaHandle.from_array(array, **right, width=20)
    with pytest.raises(UnsupportedError):
        CudaHandle.from_array(array, **right, format="NV13")
    with pytest.raises(UsageError, match="Fence"):
        CudaHandle.from_array(array, **right, fence=3)  # type: ignore[arg-type]
    driver.array_destroy(array)


# --- A7, A15: copies ------------------------------------------------------------------------------------------------
def test_A7_one_allocation_however_many_maps(driver: Any) -> None:
    with cuda_array(driver) as subject:
        before = driver.counts["malloc"] + driver.counts["malloc_async"]
        for _ in range(5):
            with subject.handle.map(), subject.handle.map():
                pass
        assert driver.counts["malloc"] + driver.counts["malloc_async"] == before + 1
        assert driver.counts["device_synchronize"] == 0


def test_A7_no_map_waits_for_an_unrelated_stream(driver: Any) -> None:
    """It is held by a fence that nobody signals."""
    semaphore = driver.semaphore_fd()
    busy, ptr = driver.Stream(), driver.malloc(64, 0)
    with external.import_semaphore_fd(semaphore) as fence, cuda_array(driver) as subject:
        fence.wait(1, busy)
        driver.fill_async(ptr, 1, 64, busy.ptr)
        subject_map = subject.handle.map()
        subject_map.stream.synchronize()
        subject_map.release()
        with subject.handle.map_mut():
            pass
        assert not driver.stream_query(busy.ptr)
        os.pwrite(semaphore, b"\x01", 0)
        busy.synchronize()
    driver.free(ptr, 0)
    os.close(semaphore)


def test_A10_the_memory_of_a_map_that_failed_is_used_by_the_next(driver: Any) -> None:
    with cuda_array(driver) as subject:
        with fail("copy_from_array_async"), pytest.raises(DriverError):
            subject.handle.map()
        allocated = driver.counts["malloc"] + driver.counts["malloc_async"]
        with subject.handle.map():
            pass
        assert driver.counts["malloc"] + driver.counts["malloc_async"] == allocated
    assert settled(driver)["bytes"] == 0


def test_A15_publishing_without_a_fence_blocks_until_the_array_holds_it(driver: Any) -> None:
    with cuda_array(driver) as subject:
        with subject.handle.map_mut() as m:
            driver.fill_async(m.device_ptr, 0x5A, m.size, m.stream.handle)
            queued = driver.counts["stream_synchronize"]
        assert driver.counts["stream_synchronize"] == queued + 1
        assert subject.handle.handed_back == 0
        assert (subject.get() == 0x5A).all()


def test_A15_reading_blocks_nothing(driver: Any) -> None:
    with cuda_array(driver) as subject:
        before = driver.counts["stream_synchronize"]
        with subject.handle.map():
            pass
        with subject.handle.map_mut() as m:
            m.cancel()
        assert driver.counts["stream_synchronize"] == before


def test_A15_a_failed_publish_can_be_tried_again(driver: Any) -> None:
    for method in ("copy_to_array_async", "stream_synchronize"):
        with cuda_array(driver) as subject:
            m = subject.handle.map_mut()
            driver.fill_async(m.device_ptr, 0x77, m.size, m.stream.handle)
            with fail(method), pytest.raises(PublishError):
                m.release()
            assert not m.released
            m.release()
            assert (subject.get() == 0x77).all()


def test_A18_a_second_map_refreshes_what_the_first_one_reads(driver: Any) -> None:
    """The owner may write while the array is mapped."""
    with cuda_array(driver) as subject:
        old = np.full(INFO.width * 4 * INFO.height, 1, np.uint8)
        subject.put(old)
        with subject.handle.map() as first:
            assert (peek(first) == 1).all()
            subject.put(old + 1)
            with subject.handle.map() as second:
                assert second.device_ptr == first.device_ptr
                assert (peek(first) == 2).all()


def test_A22_closing_leaves_the_array_to_its_owner(driver: Any) -> None:
    array, handle = array_handle(driver)
    with handle.map():
        pass
    handle.close()
    assert settled(driver)["arrays"] == 1
    assert settled(driver)["bytes"] == 0
    driver.array_destroy(array)


# --- imported images ------------------------------------------------------------------------------------------------
def file_of(info: ArrayInfo, factor: int = 1, offset: int = 0) -> int:
    return memory_file(max(offset + info.width * info.height * info.texel_bytes, 4096) * factor)


@pytest.fixture(autouse=True)
def _no_device_is_known_to_pad() -> Iterator[None]:
    extimage._padded.clear()
    yield
    extimage._padded.clear()


def import_rgba(fd: Any, **options: Any) -> external.ExternalImage:
    return external.import_image(fd, width=INFO.width, height=INFO.height, format="RGBA8", **options)


def test_an_imported_image_reads_and_writes_the_owners_bytes(driver: Any) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (7, 20, 4), np.uint8)
    fd = file_of(INFO, offset=64)
    os.pwrite(fd, pixels.tobytes(), 64)
    before = descriptors()
    with CudaHandle.from_external_image(import_rgba(fd, offset=64)) as handle:
        assert repr(handle) == "CudaHandle(kind='Array', size=560)"
        assert str(handle.format) == "RGBA8"
        with handle.map() as m:
            np.testing.assert_array_equal(m.numpy(), pixels)
        with handle.map_mut() as m:
            poke(m, 255 - pixels.reshape(-1))
        assert os.pread(fd, 560, 64) == (255 - pixels).tobytes()
    assert descriptors() == before
    os.close(fd)


def test_A22_linear_then_array_then_allocation(driver: Any) -> None:
    fd = file_of(INFO)
    handle = CudaHandle.from_external_image(import_rgba(fd))
    with handle.map():
        pass
    with cuglue.testing.trace() as calls:
        handle.close()
        settled(driver)
    ends = ("free", "free_async", "external_array_free", "external_memory_destroy")
    assert [c.method for c in calls if c.method in ends][-2:] == list(ends[2:])
    assert sum(c.method in ends for c in calls) == 3
    os.close(fd)


def test_A25_the_first_size_that_maps_wins(driver: Any) -> None:
    fd = file_of(INFO)
    with cuglue.testing.trace(only=["import_memory_fd"]) as calls:
        image = import_rgba(fd)
    assert [call.args[1] for call in calls] == [4096]
    image.close()
    image.close()
    os.close(fd)


@pytest.mark.parametrize("factor", [2, 4])
def test_A25_an_adapter_that_pads_is_remembered(driver: Any, factor: int) -> None:
    """It takes an allocation only at its true size, which is more than the image."""
    fd = file_of(INFO, 4)
    before = descriptors()

    def picky(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, nbytes: int, *args: Any) -> Any:
            if nbytes < 4096 * factor:
                raise DriverError("size", code=999, name="CUDA_ERROR_UNKNOWN", call=name)
            return method(fd, nbytes, *args)

        return call

    with interposed(driver, ["import_memory_fd"], picky):
        with cuglue.testing.trace(only=["import_memory_fd"]) as calls:
            import_rgba(fd).close()
        assert [call.args[1] for call in calls] == [4096 * f for f in (1, 2, 4) if f <= factor]
        with cuglue.testing.trace(only=["import_memory_fd"]) as calls:
            import_rgba(fd).close()
        assert [call.args[1] for call in calls] == [4096 * factor]
    assert descriptors() == before
    os.close(fd)


def test_A25_a_failed_rung_destroys_its_import(driver: Any) -> None:
    fd = file_of(INFO, 4)
    before = descriptors()
    with fail("external_array", on=1), cuglue.testing.trace() as calls:
        import_rgba(fd).close()
    names = [c.method for c in calls if c.method.startswith(("import", "external"))]
    once = ["import_memory_fd", "external_array"]
    assert names == [
        *once,
        "external_memory_destroy",
        *once,
        "external_array_free",
        "external_memory_destroy",
    ]
    with fail("external_array", persistent=True), pytest.raises(DriverError):
        import_rgba(fd)
    assert settled(driver)["external"] == 0
    assert descriptors() == before
    os.close(fd)


def test_A25_a_known_size_is_not_guessed(driver: Any) -> None:
    fd = file_of(INFO, 2)
    with cuglue.testing.trace(only=["import_memory_fd"]) as calls:
        import_rgba(fd, allocation_size=8192).close()
        with pytest.raises(DriverError):
            import_rgba(fd, allocation_size=10**6)
    assert [call.args[1] for call in calls] == [8192, 10**6]
    os.close(fd)


def test_images_by_windows_handle(driver: Any) -> None:
    fd = file_of(INFO)
    handle = external.D3D11Texture(driver.fake_win32(fd))
    with CudaHandle.from_external_image(import_rgba(handle)) as image, image.map() as m:
        assert m.shape == (7, 20, 4)
    os.close(fd)


@pytest.mark.parametrize(
    "options",
    [
        {"width": 0},
        {"height": -1},
        {"offset": -1},
        {"allocation_size": 0},
        {"format": "RGB10_A2"},
        {"format": "X"},
    ],
)
def test_bad_images(driver: Any, options: dict[str, Any]) -> None:
    fd = file_of(INFO)
    with pytest.raises((LayoutError, UnsupportedError)):
        external.import_image(fd, **({"width": 4, "height": 4, "format": "R8"} | options))
    assert "import_memory_fd" not in driver.counts
    os.close(fd)


def test_importing_an_image_loses_nothing_when_a_call_fails() -> None:
    fd = file_of(INFO, 4)
    before = descriptors()

    def operation(driver: Any) -> CudaHandle:
        image = import_rgba(fd, allocation_size=4096)
        try:
            return CudaHandle.from_external_image(image)
        except BaseException:
            image.close()
            raise

    sweep(
        operation,
        teardown=lambda driver, handle: handle.close(),
        modes=["once"],
        keeps=("kernels", "events"),
        atomic=False,
    ).check()
    assert descriptors() == before
    os.close(fd)


def test_a_map_of_a_closed_image_is_refused(driver: Any) -> None:
    fd = file_of(INFO)
    image = import_rgba(fd)
    image.close()
    with pytest.raises(ClosedError):
        CudaHandle.from_external_image(image)
    with pytest.raises(UsageError, match="ExternalImage"):
        CudaHandle.from_external_image(fd)  # type: ignore[arg-type]
    os.close(fd)


def test_an_image_has_one_handle(driver: Any) -> None:
    fd = file_of(INFO)
    image = import_rgba(fd)
    with CudaHandle.from_external_image(image), pytest.raises(UsageError, match="second handle"):
        CudaHandle.from_external_image(image)
    assert settled(driver)["external"] == 0
    os.close(fd)


def test_a_forgotten_image_is_freed_with_a_warning(driver: Any) -> None:
    fd = file_of(INFO)
    image = import_rgba(fd)
    with pytest.warns(ResourceWarning, match="test_external_images.py.*never closed"):
        del image
    assert settled(driver)["external"] == settled(driver)["external_arrays"] == 0
    os.close(fd)


def test_declined_maps_change_nothing(driver: Any) -> None:
    with cuda_array(driver) as subject:
        subject.handle.record_write(3)
        before = driver.inventory()
        for method in (subject.handle.map, subject.handle.map_mut):
            with pytest.raises(MapUnavailableError) as caught:
                method()
            assert vars(caught.value)["reason"] == "unordered_write"
        assert driver.inventory() == before
        assert "copy_from_array_async" not in driver.counts
