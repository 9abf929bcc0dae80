"""Memory and semaphores that Vulkan allocated, on a GPU: maps, fences, images, and OpenGL beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from graphics.shared_memory import descriptors

from cuglue import external
from cuglue.core.device import device_state
from cuglue.driver.protocol import CopyKind, Driver
from cuglue.errors import CuglueError, DriverError, LayoutError, UnsupportedError
from cuglue.graphics.glcontext import GlContext
from cuglue.graphics.handle import CudaHandle
from cuglue.testing.handle_suite import HandleSuite, Subject, peek, poke

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(scope="module")
def vulkan() -> Iterator[Any]:
    """One instance for the file: the driver's library cannot be loaded and unloaded without end in one process."""
    from vulkan_shared import VulkanDevice

    from cuglue.driver.registry import open_driver

    with VulkanDevice(open_driver("cuda").device_uuid(0)) as made:
        yield made


@dataclass
class VulkanSubject:
    """A range of Vulkan's memory with a handle; its bytes through a second import, past the code under test."""

    handle: CudaHandle
    driver: Driver
    ptr: int
    opaque: bool = False

    def get(self) -> np.ndarray[Any, Any]:
        out = np.empty(self.handle.size, np.uint8)
        self._copy(out.ctypes.data, self.ptr, out.nbytes, CopyKind.D2H)
        return out

    def put(self, data: np.ndarray[Any, Any]) -> None:
        source = np.ascontiguousarray(data)
        self._copy(self.ptr, source.ctypes.data, source.nbytes, CopyKind.H2D)

    def _copy(self, dst: int, src: int, nbytes: int, kind: CopyKind) -> None:
        self.driver.device_synchronize(0)
        stream = self.driver.stream_create(0)
        self.driver.copy_async(dst, src, nbytes, kind, stream)
        self.driver.stream_synchronize(stream)
        self.driver.stream_destroy(stream)


@contextmanager
def vulkan_memory(driver: Driver, vulkan: Any, offset: int = 4096) -> Iterator[VulkanSubject]:
    fd, size = vulkan.export_memory(MIB)
    memory = external.import_fd(fd, allocation_size=size)
    twin = driver.import_memory_fd(fd, size, False, False, 0)  # takes the descriptor
    ptr = driver.external_buffer(twin, offset, 1000)
    with CudaHandle.from_external(memory, offset=offset, size=1000) as handle:
        yield VulkanSubject(handle, driver, ptr)
    driver.external_buffer_free(ptr, 0)
    driver.external_memory_destroy(twin)


class TestVulkanMemory(HandleSuite):
    """The contract of every handle."""

    @pytest.fixture(autouse=True)
    def _on(self, driver: Driver, vulkan: Any) -> None:
        self.driver, self.vulkan = driver, vulkan

    def make(self) -> AbstractContextManager[Subject]:
        return vulkan_memory(self.driver, self.vulkan)


@contextmanager
def timeline(vulkan: Any) -> Iterator[tuple[external.Fence, Any]]:
    fd, semaphore = vulkan.export_semaphore(timeline=True)
    with external.import_semaphore_fd(fd, completed=lambda: vulkan.value(semaphore)) as fence:
        os.close(fd)
        yield fence, semaphore


# --- A4: descriptors ------------------------------------------------------------------------------------------------
def test_A4_the_callers_descriptor_is_never_touched(driver: Driver, vulkan: Any) -> None:
    fd, size = vulkan.export_memory(MIB)
    before = descriptors()
    with external.import_fd(fd, allocation_size=size):
        os.fstat(fd)
    os.fstat(fd)
    assert len(descriptors()) == len(before)
    os.close(fd)


@pytest.mark.parametrize("kind", ["opaque", "dma_buf", "vmm"])
def test_A4_what_is_no_memory_is_refused(driver: Driver, kind: Any, tmp_path: Any) -> None:
    fd = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 4 * MIB)
    before = descriptors()
    for _ in range(3):
        with pytest.raises((DriverError, UnsupportedError)):
            external.import_fd(fd, allocation_size=4 * MIB, kind=kind)
        with pytest.raises(DriverError):
            external.import_semaphore_fd(fd)
    os.fstat(fd)
    assert descriptors() == before
    os.close(fd)


@pytest.mark.alone
def test_row_75_imports_do_not_grow(driver: Driver, vulkan: Any) -> None:
    fd, size = vulkan.export_memory(MIB)

    def cycles(count: int) -> None:
        for _ in range(count):
            with (
                CudaHandle.from_external(external.import_fd(fd, allocation_size=size)) as handle,
                handle.map(),
            ):
                pass
        device_state(driver, 0).retire.drain(block=True)

    cycles(20)
    before = driver.memory_info(0).free, len(descriptors())
    cycles(300)
    assert before[0] - driver.memory_info(0).free < 4 * MIB
    assert len(descriptors()) == before[1]
    os.close(fd)


def test_ranges(driver: Driver, vulkan: Any) -> None:
    fd, size = vulkan.export_memory(MIB)
    with external.import_fd(fd, allocation_size=size) as memory:
        for offset, length in ((size + 1, None), (1, size), (0, size + 1)):
            with pytest.raises(LayoutError):
                CudaHandle.from_external(memory, offset=offset, size=length)
    os.close(fd)


# --- A8: fences -----------------------------------------------------------------------------------------------------
def test_A8_a_map_waits_on_the_gpu_for_a_recorded_write(driver: Driver, vulkan: Any) -> None:
    fd, size = vulkan.export_memory(MIB)
    with timeline(vulkan) as (fence, semaphore):
        memory = external.import_fd(fd, allocation_size=size)
        with CudaHandle.from_external(memory, size=4096, fence=fence) as handle:
            handle.record_write(5)
            with handle.map() as m:
                time.sleep(0.02)
                assert not m.stream.query()
                vulkan.signal(semaphore, 5)
                m.stream.synchronize()
    os.close(fd)


def test_A8_timeout_asks_vulkan(driver: Driver, vulkan: Any) -> None:
    fd, size = vulkan.export_memory(MIB)
    with timeline(vulkan) as (fence, semaphore):
        memory = external.import_fd(fd, allocation_size=size)
        with CudaHandle.from_external(memory, size=4096, fence=fence) as handle:
            handle.record_write(1)
            with pytest.raises(TimeoutError):
                handle.map(timeout=0.05)
            vulkan.signal(semaphore, 1)
            with handle.map(timeout=5) as m:
                m.stream.synchronize()
    os.close(fd)


def test_A15_publishing_an_image_signals_vulkan(driver: Driver, vulkan: Any) -> None:
    """Frames take turns: nobody waits for the other on the host, but to look at the end."""
    fd, size = vulkan.export_memory(MIB)
    with timeline(vulkan) as (fence, semaphore):
        image = external.import_image(fd, width=64, height=32, format="RGBA8", allocation_size=size)
        with CudaHandle.from_external_image(image, fence=fence) as handle:
            value = 0
            for frame in range(1, 6):
                handle.record_write(value + 1)
                vulkan.signal(semaphore, value + 1)
                with handle.map_mut() as m:
                    driver.fill_async(m.device_ptr, frame, m.size, m.stream.handle)
                value = handle.handed_back
                assert value == 2 * frame
                vulkan.wait(semaphore, value, 10.0)
            with handle.map() as m:
                assert (peek(m) == 5).all()
    os.close(fd)


def test_binary_semaphores(driver: Driver, vulkan: Any) -> None:
    fd, _ = vulkan.export_semaphore(timeline=False)
    one, two = driver.stream_create(0), driver.stream_create(0)
    with external.import_semaphore_fd(fd, "binary") as fence:
        os.close(fd)
        for _ in range(3):
            fence.signal(0, one)
            fence.wait(0, two)
            driver.stream_synchronize(two)
    for stream in (one, two):
        driver.stream_synchronize(stream)
        driver.stream_destroy(stream)


# --- images ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("format", "width", "height"), [("RGBA8", 61, 33), ("RGBA32F", 67, 5), ("R16", 31, 17)]
)
def test_images_round_trip(driver: Driver, vulkan: Any, format: str, width: int, height: int) -> None:
    fd, size = vulkan.export_memory(MIB)
    image = external.import_image(fd, width=width, height=height, format=format, allocation_size=size)
    with CudaHandle.from_external_image(image) as handle:
        data = np.random.default_rng(width).integers(0, 256, handle.size, np.uint8)
        with handle.map_mut(overwrite=True) as m:
            poke(m, data)
        with handle.map() as m:
            np.testing.assert_array_equal(peek(m), data)
    os.close(fd)


def test_A25_an_unknown_size_is_found(driver: Driver, vulkan: Any) -> None:
    """Or every size is refused, and nothing is left."""
    fd, _ = vulkan.export_memory(MIB)
    before = len(descriptors())
    try:
        image = external.import_image(fd, width=512, height=256, format="RGBA8")
    except CuglueError:
        pass
    else:
        assert image.memory.size in (MIB // 2, MIB, 2 * MIB)
        image.close()
    assert len(descriptors()) == before
    os.close(fd)


# --- OpenGL ---------------------------------------------------------------------------------------------------------
def test_opengl_and_cuda_see_the_same_bytes(driver: Driver, vulkan: Any, context: GlContext) -> None:
    """Exact both ways, in every byte: which CUDA's own virtual memory would not be."""
    import glpixels
    import OpenGL.GL as GL

    fd, size = vulkan.export_memory(MIB)
    memory = external.import_fd(fd, allocation_size=size)
    with (
        external.gl_buffer(memory, fd, offset=256, size=MIB // 2) as buffer,
        CudaHandle.from_external(memory, offset=256, size=MIB // 2) as handle,
    ):
        data = np.random.default_rng(0).integers(0, 256, MIB // 2, np.uint8)
        with handle.map_mut() as m:
            poke(m, data)
        np.testing.assert_array_equal(glpixels.read_buffer(buffer.glo), data)
        glpixels.write_buffer(buffer.glo, ~data)
        GL.glFinish()
        with handle.map() as m:
            np.testing.assert_array_equal(peek(m), ~data)
    os.close(fd)


def test_cupy_sees_the_memory_itself(driver: Driver, vulkan: Any) -> None:
    import cupy as cp

    with vulkan_memory(driver, vulkan) as subject:
        with subject.handle.map_mut() as m:
            array = cp.asarray(m)
            assert array.data.ptr == m.device_ptr
            array[...] = cp.arange(1000, dtype=cp.uint8)
            del array
        np.testing.assert_array_equal(subject.get(), np.arange(1000).astype(np.uint8))
