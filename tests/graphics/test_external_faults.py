"""The objects of other owners in place, mapped together, and under failing driver calls: nothing is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphics.shared_memory import descriptors, memory_file, settled

import cuglue
from cuglue import InOut, Kernel, Runtime, as_stream, external, testing
from cuglue.driver.protocol import Access, ArrayInfo, CaptureMode, CaptureStatus, SurfaceArg, TexelKind
from cuglue.driver.sim import SimDriver
from cuglue.errors import CaptureError, CuglueError, DriverError, MapConflictError, UsageError
from cuglue.graphics import image_copy
from cuglue.graphics.handle import CudaHandle
from cuglue.graphics.mapping import CudaMap
from cuglue.graphics.together import map_all
from cuglue.testing import sweep
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import peek, poke

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is a Linux call")

INFO = ArrayInfo(16, 9, 0, 8, 4, TexelKind.UINT)
BYTES = 16 * 9 * 4

KERNELS = {
    "flip": r"""
extern "C" __global__ void flip(cudaSurfaceObject_t image, int width, int height)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;
    unsigned int t = surf2Dread<unsigned int>(image, x * 4, y);
    surf2Dwrite(~t, image, x * 4, y);
}
"""
}


def flip_twin(grid: Any, block: Any, image: Any, width: Any, height: Any) -> None:
    image.texels[...] = ~image.texels


FLIP = Kernel("flip", KERNELS["flip"], sim=flip_twin)


class Owned:
    """An object of another owner with a handle; ``leave`` gives both back."""

    def __init__(self, driver: Any, handle: CudaHandle, leave: Callable[[], None]) -> None:
        self.driver = driver
        self.handle = handle
        self._leave = leave

    def leave(self) -> None:
        self.handle.close()
        settled(self.driver)
        self._leave()


def memory(driver: Any) -> Owned:
    fd = memory_file(4096)
    imported = external.import_fd(fd, allocation_size=4096)
    os.close(fd)
    return Owned(driver, CudaHandle.from_external(imported, size=BYTES), lambda: None)


def array(driver: Any, fenced: bool = False) -> Owned:
    made = driver.array_create(INFO, 0)
    fence, semaphore = None, driver.semaphore_fd(1)
    if fenced:
        fence = external.import_semaphore_fd(semaphore)
    os.close(semaphore)
    handle = CudaHandle.from_array(
        made, texels=16, rows=9, bytes_per_texel=4, fence=fence, device=0, driver=driver
    )
    if fenced:
        handle.record_write(1)

    def leave() -> None:
        driver.array_destroy(made)
        if fence is not None:
            fence.close()
            settled(driver)

    return Owned(driver, handle, leave)


def fenced_array(driver: Any) -> Owned:
    return array(driver, True)


def texture(driver: Any) -> Owned:
    return Owned(driver, CudaHandle.from_d3d11(driver.fake_d3d11(16, 9), driver=driver), lambda: None)


KINDS = pytest.mark.parametrize("make", [memory, array, fenced_array, texture])
IMAGES = pytest.mark.parametrize("make", [array, fenced_array, texture])
METHODS = pytest.mark.parametrize("method", ["map", "map_mut"])
KEPT = ("kernels", "events")


# --- failing calls --------------------------------------------------------------------------------------------------
@KINDS
@METHODS
@pytest.mark.parametrize("path", ["driver", "surface"])
def test_mapping(make: Any, method: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map that failed left nothing and can be tried again."""
    monkeypatch.setattr(image_copy, "SMALL_BYTES", 0 if path == "surface" else 1 << 60)

    def operation(subject: Owned) -> CudaMap:
        m: CudaMap = getattr(subject.handle, method)()
        return m

    def teardown(subject: Owned, result: CudaMap) -> None:
        result.release()
        subject.leave()

    sweep(operation, setup=make, teardown=teardown, keeps=KEPT, atomic=False).check()


@KINDS
@METHODS
def test_leaving(make: Any, method: str) -> None:
    """A map that could not be left is live still, and can be left later."""

    class Live:
        def __init__(self, owned: Owned) -> None:
            self.owned = owned
            self.map: CudaMap = getattr(owned.handle, method)()

    def teardown(subject: Live, result: None) -> None:
        assert subject.map.released
        subject.owned.leave()

    sweep(
        lambda subject: subject.map.release(),
        setup=lambda driver: Live(make(driver)),
        teardown=teardown,
        keeps=KEPT,
        atomic=False,
    ).check()


@KINDS
def test_closing(make: Any) -> None:
    def setup(driver: Any) -> Owned:
        owned: Owned = make(driver)
        with owned.handle.map():
            pass
        return owned

    sweep(
        lambda subject: subject.handle.close(),
        setup=setup,
        teardown=lambda subject, result: subject.leave(),
        keeps=KEPT,
        atomic=False,
    ).check()


def test_importing_a_semaphore() -> None:
    before = descriptors()

    def operation(subject: Any) -> external.Fence:
        return external.import_semaphore_fd(subject[1])

    def teardown(subject: Any, fence: external.Fence) -> None:
        fence.close()
        settled(subject[0])
        os.close(subject[1])

    sweep(operation, setup=lambda driver: (driver, driver.semaphore_fd()), teardown=teardown).check()
    assert descriptors() == before


@pytest.mark.parametrize("call", ["wait", "signal"])
def test_fences_under_failing_calls(call: str) -> None:
    def setup(driver: Any) -> external.Fence:
        fd = driver.semaphore_fd(1)
        fence = external.import_semaphore_fd(fd)
        os.close(fd)
        return fence

    def teardown(fence: external.Fence, result: None) -> None:
        fence.close()
        fence.state.retire.drain(block=True)

    sweep(lambda fence: getattr(fence, call)(1), setup=setup, teardown=teardown).check()


def test_verifying_a_dma_buf_under_failing_calls() -> None:
    """Whatever fails, the owner's bytes are as they were."""
    content = bytes(range(256)) * 32
    fd = memory_file(len(content), content)

    def check(driver: Any, result: Any) -> None:
        assert os.pread(fd, len(content), 0) == content

    sweep(
        lambda driver: external.import_fd(fd, allocation_size=len(content), kind="dma_buf"),
        check=check,
        teardown=lambda driver, memory: memory.close(),
        keeps=KEPT,
        modes=["once", "method"],
    ).check()
    with cuglue.use_driver("sim"), fail("copy_async"), pytest.raises(DriverError):
        external.import_fd(fd, allocation_size=len(content), kind="dma_buf")
    assert os.pread(fd, len(content), 0) == content
    os.close(fd)


def test_a_dma_buf_is_not_verified_in_a_graph() -> None:
    content = bytes(range(256)) * 32
    fd = memory_file(len(content), content)
    sim = SimDriver()
    stream = sim.Stream()
    with cuglue.use_driver(sim), sim.current_stream(stream):
        sim.capture_begin(stream.ptr, CaptureMode.RELAXED)
        with testing.trace(only={"copy_async"}) as calls, pytest.raises(CaptureError):
            external.import_fd(fd, allocation_size=len(content), kind="dma_buf")
        assert calls == []
        assert sim.capture_status(stream.ptr) is CaptureStatus.ACTIVE
        sim.graph_destroy(sim.capture_end(stream.ptr))
        with external.import_fd(fd, allocation_size=len(content), kind="dma_buf") as memory:
            assert memory.kind == "dma_buf"
    assert os.pread(fd, len(content), 0) == content
    os.close(fd)


# --- in place -------------------------------------------------------------------------------------------------------
@IMAGES
def test_kernels_write_the_image_itself(driver: Any, make: Any) -> None:
    """Nothing is copied; leaving tells the owner as any publishing does."""
    owned = make(driver)
    data = np.random.default_rng(0).integers(0, 256, BYTES, np.uint8)
    with owned.handle.map_mut(overwrite=True) as m:
        poke(m, data)
    handed = owned.handle.handed_back
    with Runtime() as runtime:
        before = driver.counts["copy_from_array_async"], driver.counts["copy_to_array_async"]
        synchronized = driver.counts["stream_synchronize"]
        with owned.handle.map_mut(in_place=True) as m:
            runtime.launch(FLIP, (1, 1), (16, 16), InOut(m.surface()), 16, 9)
        assert before == (driver.counts["copy_from_array_async"], driver.counts["copy_to_array_async"])
        if make is fenced_array:
            assert owned.handle.handed_back == handed + 1
            assert driver.counts["stream_synchronize"] == synchronized
        else:
            assert driver.counts["stream_synchronize"] == synchronized + 1
        with owned.handle.map() as m:
            np.testing.assert_array_equal(peek(m), ~data)
    owned.leave()


def launch_flip(m: CudaMap, stream: Any) -> None:
    """A launch that the library knows nothing of, as CuPy makes them."""
    driver: Any = m.driver
    kernel = driver.kernel_load("flip", KERNELS["flip"], (), 0, flip_twin)
    values = (m.surface().handle, np.int32(16), np.int32(9))
    spans = (SurfaceArg(values[0], Access.READ_WRITE), None, None)
    driver.kernel_launch(kernel, (1, 1, 1), (16, 16, 1), values, spans, 0, stream)


@pytest.mark.parametrize("recorded", [False, True])
def test_maps_in_place_are_ordered_by_their_streams(driver: Any, recorded: bool) -> None:
    """The simulated device would report two kernels that nothing orders; the first is held, so no wait can hide it."""
    made, fds = driver.array_create(INFO, 0), [driver.semaphore_fd(), driver.semaphore_fd()]
    streams = [driver.Stream() for _ in range(3)]
    with external.import_semaphore_fd(fds[0]) as fence, external.import_semaphore_fd(fds[1]) as gate:
        gate.wait(1, streams[0])
        with CudaHandle.from_array(made, texels=16, rows=9, bytes_per_texel=4, fence=fence) as handle:
            for value, stream in enumerate(streams, 1):
                if recorded:
                    os.pwrite(fds[0], bytes([value]), 0)
                    handle.record_write(value)
                with handle.map_mut(stream, in_place=True) as m:
                    assert m.stream.handle == stream.ptr
                    launch_flip(m, stream.ptr)
                    m.cancel()
            os.pwrite(fds[1], b"\x01", 0)
            driver.device_synchronize(0)
    settled(driver)
    driver.array_destroy(made)
    for fd in fds:
        os.close(fd)


def test_the_owner_learns_of_kernels_on_other_streams_too(driver: Any) -> None:
    """The signal comes after a stream that was named, which is held here."""
    made, fds = driver.array_create(INFO, 0), [driver.semaphore_fd(), driver.semaphore_fd()]
    with external.import_semaphore_fd(fds[0]) as fence, external.import_semaphore_fd(fds[1]) as gate:
        with CudaHandle.from_array(made, texels=16, rows=9, bytes_per_texel=4, fence=fence) as handle:
            other = driver.Stream()
            with handle.map_mut(in_place=True) as m:
                gate.wait(1, other)
                as_stream(other).join(m.stream)
                launch_flip(m, other.ptr)
                m.record(other)
            driver.pump()
            assert os.pread(fds[0], 1, 0) == b"\x00"
            os.pwrite(fds[1], b"\x01", 0)
            driver.device_synchronize(0)
            assert os.pread(fds[0], 1, 0) == b"\x01"
            assert handle.handed_back == 1
    settled(driver)
    driver.array_destroy(made)
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("make", [array, texture])
def test_no_map_pays_for_the_compiler(driver: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_copy, "SMALL_BYTES", 0)
    owned = make(driver)
    loaded = driver.counts["kernel_load"]
    with owned.handle.map_mut():
        pass
    assert driver.counts["kernel_load"] == loaded > 0
    owned.leave()


@IMAGES
def test_in_place_conflicts_with_copies(driver: Any, make: Any) -> None:
    owned = make(driver)
    with owned.handle.map_mut(in_place=True), pytest.raises(MapConflictError):
        owned.handle.map()
    owned.leave()


def test_memory_is_in_place_anyway(driver: Any) -> None:
    owned = memory(driver)
    with pytest.raises(UsageError, match="in place anyway"):
        owned.handle.map(in_place=True)
    owned.leave()


# --- together -------------------------------------------------------------------------------------------------------
def test_handles_of_every_kind_are_mapped_together(driver: Any) -> None:
    owned = [make(driver) for make in (memory, array, fenced_array, texture)]
    with map_all([each.handle for each in owned], mutable=True) as maps:
        for value, m in enumerate(maps, 1):
            driver.fill_async(m.device_ptr, value, m.size, m.stream.handle)
    with map_all([each.handle for each in owned]) as maps:
        for value, m in enumerate(maps, 1):
            assert (peek(m) == value).all()
    for each in owned:
        each.leave()


def test_one_that_declines_leaves_none_mapped(driver: Any) -> None:
    owned = [make(driver) for make in (memory, array)]
    owned[1].handle.record_write(5)
    with pytest.raises(CuglueError):
        map_all([each.handle for each in owned])
    assert not owned[0].handle.mapped
    for each in owned:
        each.leave()
