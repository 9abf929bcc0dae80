"""The CUDA driver on a real device: what the fakes cannot answer for."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_kernels import SOURCE

import cuglue
from cuglue.driver.protocol import (
    ArrayInfo,
    CaptureMode,
    CaptureStatus,
    CopyKind,
    MemoryType,
    PointerInfo,
    RegisterFlags,
    TexelKind,
)
from cuglue.errors import DriverError, LaunchError, OutOfMemory, UnsupportedError
from cuglue.testing.latch import Latch

pytestmark = pytest.mark.gpu
RGBA8 = ArrayInfo(24, 10, 0, 8, 4, TexelKind.UINT)
MIB = 1 << 20


@pytest.fixture
def driver() -> Any:
    return cuglue.current_driver()


@pytest.fixture
def stream(driver: Any) -> Iterator[int]:
    made = driver.stream_create(0)
    yield made
    driver.stream_synchronize(made)
    driver.stream_destroy(made)


@pytest.fixture
def memory(driver: Any) -> Iterator[Callable[[int], int]]:
    """Allocate zeroed device memory, freed after the test."""
    made: list[int] = []

    def allocate(nbytes: int) -> int:
        made.append(driver.malloc(nbytes, 0))
        driver.fill_async(made[-1], 0, nbytes, 0)
        driver.stream_synchronize(0)
        return made[-1]

    yield allocate
    for ptr in made:
        driver.free(ptr, 0)


def upload(driver: Any, ptr: int, data: np.ndarray, stream: int) -> None:
    driver.copy_async(ptr, data.ctypes.data, data.nbytes, CopyKind.H2D, stream)
    driver.stream_synchronize(stream)


def download(driver: Any, ptr: int, nbytes: int, stream: int) -> np.ndarray:
    data = np.full(nbytes, 0xEE, np.uint8)
    driver.copy_async(data.ctypes.data, ptr, nbytes, CopyKind.D2H, stream)
    driver.stream_synchronize(stream)
    return data


def image(width: int = 24, height: int = 10, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 4), np.uint8)


# --- devices ------------------------------------------------------------------------------------------------


def test_device_is_the_one_cupy_sees(driver: Any) -> None:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    assert driver.device_count() == cupy.cuda.runtime.getDeviceCount()
    assert driver.device_current() == cupy.cuda.runtime.getDevice()
    assert driver.device_name(0) == properties["name"].decode()
    assert driver.device_uuid(0) == properties["uuid"]
    assert len(driver.device_uuid(0)) == 16
    free, total = driver.memory_info(0)
    assert 0 < free <= total == properties["totalGlobalMem"]


def test_capabilities(driver: Any) -> None:
    known = driver.capabilities(0)
    assert known is driver.capabilities(0)
    assert known.device_type is MemoryType.DEVICE
    assert not known.simulated
    for field in known.__dataclass_fields__:
        if field not in ("device_type", "alignment"):
            assert type(getattr(known, field)) is bool, field


def test_every_allocation_is_aligned(driver: Any, stream: int) -> None:
    step = driver.capabilities(0).alignment
    assert step >= 256
    sizes = [1, 2, 100, 255, 257, 513, 4097, 70_001, 3 * MIB + 1]
    plain = [driver.malloc(size, 0) for size in sizes]
    ordered = [driver.malloc_async(size, stream, 0) for size in sizes]
    for ptr in ordered:
        driver.free_async(ptr, stream, 0)
    for ptr in plain:
        driver.free(ptr, 0)
    assert [ptr % step for ptr in plain + ordered] == [0] * 2 * len(sizes)


def test_where_addresses_live(driver: Any, stream: int) -> None:
    host = np.zeros(100, np.uint8)
    plain, ordered = driver.malloc(100, 0), driver.malloc_async(100, stream, 0)
    pinned, managed = driver.host_alloc(100), driver.malloc_managed(100, 0)
    assert driver.pointer_info(host.ctypes.data) == PointerInfo(MemoryType.HOST, 0)
    assert driver.pointer_info(plain + 50) == PointerInfo(MemoryType.DEVICE, 0)
    assert driver.pointer_info(ordered) == PointerInfo(MemoryType.DEVICE, 0)
    assert driver.pointer_info(pinned) == PointerInfo(MemoryType.PINNED, 0)
    assert driver.pointer_info(managed) == PointerInfo(MemoryType.MANAGED, 0)
    with pytest.raises(UnsupportedError):
        driver.host_view(plain, 100, False)
    driver.free_async(ordered, stream, 0)
    driver.free(plain, 0)
    driver.free(managed, 0)
    driver.host_free(pinned)


def test_contracts_0_5_a_thread_without_context_stays_without(driver: Any, stream: int) -> None:
    """Runtime calls bind the primary context to such a thread, as everywhere in CUDA; driver-API calls do not."""
    from cuda.bindings import driver as cu

    kernel = driver.kernel_load("nothing", SOURCE, (), 0)
    event = driver.event_create(0)
    contexts: dict[str, int] = {}
    made: list[int] = []

    def call(method: str, *args: Any) -> Any:
        value = getattr(driver, method)(*args)
        status, context = cu.cuCtxGetCurrent()
        assert not status
        contexts[method] = int(context)
        return value

    def work() -> None:
        call("device_uuid", 0)
        array = call("array_create", RGBA8, 0)
        call("surface_destroy", call("surface_create", array, 0))
        call("array_destroy", array)
        call("context_record", event, 0)
        made.append(call("event_create", 0))
        call("kernel_launch", kernel, (1, 1, 1), (1, 1, 1), (), (), 0, stream)
        call("event_record", event, stream)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    contexts.pop("event_record")
    assert contexts == dict.fromkeys(contexts, 0)
    driver.stream_synchronize(stream)
    driver.kernel_unload(kernel)
    for each in (event, *made):
        driver.event_destroy(each)


def test_contracts_0_5_a_context_of_somebody_else_is_back(driver: Any) -> None:
    from cuda.bindings import driver as cu

    with driver._primary(0):
        status, before = cu.cuCtxGetCurrent()
        driver.array_destroy(driver.array_create(RGBA8, 0))
        driver.free(driver.malloc(64, 0), 0)
        assert (int(status), int(cu.cuCtxGetCurrent()[1])) == (0, int(before))


def test_no_room(driver: Any, stream: int) -> None:
    for allocate in (
        lambda: driver.malloc(1 << 50, 0),
        lambda: driver.malloc_async(1 << 50, stream, 0),
        lambda: driver.vmm_create(1 << 50, 0, False),
    ):
        with pytest.raises(OutOfMemory) as caught:
            allocate()
        assert caught.value.requested == 1 << 50
    driver.free(driver.malloc(100, 0), 0)


def test_refused_calls_leave_nothing_for_others_to_trip_over(driver: Any, stream: int) -> None:
    import cupy

    event = driver.event_create(0, timing=True)
    with pytest.raises(DriverError) as caught:
        driver.event_elapsed(event, event)
    assert caught.value.call == "cudaEventElapsedTime"
    with Latch(stream, driver=driver, seconds=5):
        driver.event_record(event, stream)
        assert not driver.event_query(event)
    assert int(cupy.sort(cupy.arange(1000)[::-1])[-1]) == 999
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        assert int(torch.arange(5, device="cuda").sum()) == 10
    driver.event_destroy(event)


# --- memory and copies --------------------------------------------------------------------------------------


def test_linear_and_pitched_copies(driver: Any, stream: int, memory: Callable[[int], int]) -> None:
    a, b = memory(4096), memory(4096)
    data = np.arange(4096, dtype=np.uint32).view(np.uint8)[:4096].copy()
    upload(driver, a, data, stream)
    driver.copy_async(b, a, 4096, CopyKind.D2D, stream)
    assert (download(driver, b, 4096, stream) == data).all()
    driver.fill_async(b, 0xAB, 4096, stream)
    driver.copy_2d_async(b, 128, a, 64, 48, 10, CopyKind.D2D, stream)
    rows = download(driver, b, 4096, stream).reshape(-1, 128)
    assert (rows[:10, :48] == data[:640].reshape(10, 64)[:, :48]).all()
    assert (rows[:10, 48:] == 0xAB).all()
    assert (rows[10:] == 0xAB).all()


def test_host_views(driver: Any, stream: int) -> None:
    pinned, managed = driver.host_alloc(256), driver.malloc_managed(256, 0)
    driver.host_view(pinned, 256, True)[:] = bytes(range(256))
    driver.copy_async(managed, pinned, 256, CopyKind.H2D, stream)
    driver.stream_synchronize(stream)
    view = driver.host_view(managed, 256, False)
    assert bytes(view) == bytes(range(256))
    assert view.readonly
    driver.free(managed, 0)
    driver.host_free(pinned)


def test_pool_gives_back_what_it_caches(driver: Any, stream: int) -> None:
    import cupy

    runtime = cupy.cuda.runtime
    pool = runtime.deviceGetMemPool(0)
    threshold = runtime.memPoolGetAttribute(pool, runtime.cudaMemPoolAttrReleaseThreshold)
    runtime.memPoolSetAttribute(pool, runtime.cudaMemPoolAttrReleaseThreshold, 1 << 40)
    try:
        driver.free_async(driver.malloc_async(256 * MIB, stream, 0), stream, 0)
        driver.stream_synchronize(stream)
        reserved = runtime.memPoolGetAttribute(pool, runtime.cudaMemPoolAttrReservedMemCurrent)
        driver.pool_trim(0, 0)
        left = runtime.memPoolGetAttribute(pool, runtime.cudaMemPoolAttrReservedMemCurrent)
        assert reserved >= 256 * MIB > left
    finally:
        runtime.memPoolSetAttribute(pool, runtime.cudaMemPoolAttrReleaseThreshold, threshold)


# --- streams and events -------------------------------------------------------------------------------------


def test_current_stream_is_cupys(driver: Any) -> None:
    import cupy

    mine = cupy.cuda.Stream(non_blocking=True)
    assert driver.stream_current(0) is cupy.cuda.get_current_stream()
    with mine:
        assert driver.stream_current(0) is mine
        assert driver.stream_current(0).ptr == mine.ptr


def test_queries_and_waits(driver: Any, stream: int) -> None:
    other, event, after = driver.stream_create(0), driver.event_create(0), driver.event_create(0)
    assert driver.event_query(event)
    with Latch(stream, driver=driver, seconds=5) as latch:
        driver.event_record(event, stream)
        driver.stream_wait_event(other, event)
        driver.event_record(after, other)
        time.sleep(0.02)
        assert not driver.stream_query(stream)
        assert not driver.event_query(event)
        assert not driver.event_query(after)
        latch.release()
        driver.event_synchronize(after)
        assert driver.event_query(event)
        assert driver.stream_query(other)
    for made in (event, after):
        driver.event_destroy(made)
    driver.stream_destroy(other)


def test_time_between_events(driver: Any, stream: int) -> None:
    start, end = driver.event_create(0, timing=True), driver.event_create(0, timing=True)
    driver.event_record(start, stream)
    with Latch(stream, driver=driver, seconds=5) as latch:
        time.sleep(0.05)
        latch.release()
        driver.event_record(end, stream)
        driver.event_synchronize(end)
    assert 40 < driver.event_elapsed(start, end) < 2000
    driver.event_destroy(start)
    driver.event_destroy(end)


def test_context_record_covers_streams_nobody_told_us_of(driver: Any, stream: int) -> None:
    if not driver.capabilities(0).context_events:
        with pytest.raises(DriverError):
            driver.context_record(driver.event_create(0), 0)
        return
    event = driver.event_create(0)
    with Latch(stream, driver=driver, seconds=5) as latch:
        driver.context_record(event, 0)
        time.sleep(0.02)
        assert not driver.event_query(event)
        latch.release()
        driver.event_synchronize(event)
    driver.event_destroy(event)


def test_context_wait_holds_streams_nobody_told_us_of(driver: Any, stream: int) -> None:
    if not driver.capabilities(0).context_events:
        return
    other, held, after = driver.stream_create(0), driver.event_create(0), driver.event_create(0)
    with Latch(stream, driver=driver, seconds=5) as latch:
        driver.event_record(held, stream)
        driver.context_wait(held, 0)
        driver.event_record(after, other)
        time.sleep(0.02)
        assert not driver.event_query(after)
        latch.release()
        driver.event_synchronize(after)
    for made in (held, after):
        driver.event_destroy(made)
    driver.stream_destroy(other)


def test_callback_runs_after_the_work_on_another_thread(driver: Any, stream: int) -> None:
    ran, threads = threading.Event(), []

    def callback() -> None:
        threads.append(threading.get_ident())
        ran.set()

    with Latch(stream, driver=driver, seconds=5) as latch:
        driver.stream_callback(stream, callback)
        assert not ran.wait(0.05)
        latch.release()
        assert ran.wait(5)
    assert threads != [threading.get_ident()]


@pytest.mark.parametrize("wait", ["stream", "event", "device"])
def test_blocking_calls_release_the_gil(driver: Any, stream: int, wait: str) -> None:
    event = driver.event_create(0)
    with Latch(stream, driver=driver, seconds=5) as latch:
        driver.event_record(event, stream)
        timer = threading.Timer(0.1, latch.release)
        timer.start()
        began = time.perf_counter()
        if wait == "stream":
            driver.stream_synchronize(stream)
        elif wait == "event":
            driver.event_synchronize(event)
        else:
            driver.device_synchronize(0)
        took = time.perf_counter() - began
        timer.join()
    assert 0.05 < took < 3  # the latch alone would let go after 5 s
    driver.event_destroy(event)


# --- kernels ------------------------------------------------------------------------------------------------


def test_every_width_of_argument_arrives(driver: Any, stream: int, memory: Callable[[int], int]) -> None:
    out = memory(64)
    kernel = driver.kernel_load("arguments", SOURCE, (), 0)
    values = (
        out,
        np.int8(-3),
        np.int16(-300),
        np.int32(-70000),
        np.int64(-(1 << 40)),
        np.uint64((1 << 64) - 5),
        np.float32(1.5),
        np.float64(0.1),
        np.bool_(True),
    )
    driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), values, (None,) * 9, 0, stream)
    got = download(driver, out, 64, stream).tobytes()
    for offset, value in zip((0, 2, 4, 8, 16, 24, 32, 28), values[1:], strict=True):
        assert got[offset : offset + value.nbytes] == value.tobytes(), value
    driver.kernel_unload(kernel)


def test_arguments_that_do_not_fit_the_kernel(driver: Any, stream: int, memory: Callable[[int], int]) -> None:
    data = memory(400)
    kernel = driver.kernel_load("add", SOURCE, (), 0)
    for values in (
        (data, np.int32(100)),
        (data, np.int32(100), np.int64(2)),
        (data, np.int32(100), np.int32(2), 5),
        (np.int32(5), np.int32(100), np.int32(2)),
    ):
        with pytest.raises(LaunchError, match="do not fit"):
            driver.kernel_launch(kernel, (4, 1, 1), (32, 1, 1), values, (None,) * 3, 0, stream)
    driver.kernel_launch(kernel, (4, 1, 1), (32, 1, 1), (data, 100, -2), (None,) * 3, 0, stream)
    assert (download(driver, data, 400, stream).view(np.int32) == -2).all()
    driver.kernel_unload(kernel)


def test_refused_launches(driver: Any, stream: int, memory: Callable[[int], int]) -> None:
    data = memory(400)
    kernel = driver.kernel_load("add", SOURCE, (), 0)
    values = (data, np.int32(100), np.int32(2))
    for grid, block, shared in (
        ((1, 1, 1), (2048, 1, 1), 0),
        ((0, 1, 1), (32, 1, 1), 0),
        ((1, 1, 1), (32, 1, 1), 64 * MIB),
    ):
        with pytest.raises(LaunchError) as caught:
            driver.kernel_launch(kernel, grid, block, values, (None,) * 3, shared, stream)
        assert caught.value.code
    driver.kernel_launch(kernel, (4, 1, 1), (32, 1, 1), values, (None,) * 3, 0, stream)
    assert (download(driver, data, 400, stream).view(np.int32) == 2).all()
    driver.kernel_unload(kernel)


def test_more_shared_memory_than_the_default(driver: Any, stream: int, memory: Callable[[int], int]) -> None:
    out = memory(4)
    kernel = driver.kernel_load("shared", SOURCE, (), 0)
    driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (out,), (None,), 64 << 10, stream)
    assert download(driver, out, 4, stream).view(np.int32)[0] == 7
    driver.kernel_unload(kernel)


def test_source_that_does_not_compile(driver: Any) -> None:
    with pytest.raises(DriverError) as caught:
        driver.kernel_load("broken", 'extern "C" __global__ void broken() { nonsense; }', (), 0)
    assert caught.value.name == "NVRTC_ERROR_COMPILATION"
    assert "nonsense" in str(caught.value)
    with pytest.raises(DriverError) as caught:
        driver.kernel_load("absent", SOURCE, (), 0)
    assert caught.value.code == 500
    assert 'extern "C"' in str(caught.value)


@pytest.mark.parametrize("how", ["RawKernel", "RawModule", "Function"])
def test_cupys_own_kernels(driver: Any, stream: int, memory: Callable[[int], int], how: str) -> None:
    import cupy

    data = memory(400)
    kernel: Any
    if how == "RawKernel":
        kernel = cupy.RawKernel(SOURCE, "add")
    else:
        kernel = cupy.RawModule(code=SOURCE).get_function("add")
        if how == "Function":
            kernel = kernel.kernel
    handle = driver.kernel_adopt(kernel, 0)
    assert driver.kernel_adopt(kernel, 0) == handle
    driver.kernel_unload(handle)
    values = (data, np.int32(100), np.int32(5))
    driver.kernel_launch(handle, (4, 1, 1), (32, 1, 1), values, (None,) * 3, 0, stream)
    assert (download(driver, data, 400, stream).view(np.int32) == 5).all()
    driver.kernel_unload(handle)


# --- graphs -------------------------------------------------------------------------------------------------


def test_graph_runs_as_often_as_launched(driver: Any, stream: int, memory: Callable[[int], int]) -> None:
    data = memory(400)
    kernel = driver.kernel_load("add", SOURCE, (), 0)
    driver.capture_begin(stream, CaptureMode.THREAD_LOCAL)
    assert driver.capture_status(stream) is CaptureStatus.ACTIVE
    driver.kernel_launch(
        kernel, (4, 1, 1), (32, 1, 1), (data, np.int32(100), np.int32(3)), (None,) * 3, 0, stream
    )
    graph = driver.capture_end(stream)
    assert driver.capture_status(stream) is CaptureStatus.NONE
    assert driver.graph_memory_nodes(graph) == 0
    executable = driver.graph_instantiate(graph)
    driver.graph_destroy(graph)
    assert (download(driver, data, 400, stream).view(np.int32) == 0).all()
    driver.graph_upload(executable, stream)
    driver.graph_launch(executable, stream)
    driver.graph_launch(executable, stream)
    assert (download(driver, data, 400, stream).view(np.int32) == 6).all()
    driver.graph_exec_destroy(executable)
    driver.kernel_unload(kernel)


def test_memory_nodes_of_a_graph(driver: Any, stream: int) -> None:
    driver.capture_begin(stream, CaptureMode.THREAD_LOCAL)
    ptr = driver.malloc_async(4096, stream, 0)
    driver.fill_async(ptr, 1, 4096, stream)
    driver.free_async(ptr, stream, 0)
    graph = driver.capture_end(stream)
    assert driver.graph_memory_nodes(graph) == 2
    driver.graph_destroy(graph)


def test_capture_that_an_unsafe_call_spoils(driver: Any, stream: int) -> None:
    driver.capture_begin(stream, CaptureMode.GLOBAL)
    with pytest.raises(DriverError) as caught:
        driver.stream_synchronize(stream)
    assert caught.value.code == 900
    assert driver.capture_status(stream) is CaptureStatus.INVALIDATED
    with pytest.raises(DriverError) as caught:
        driver.capture_end(stream)
    assert caught.value.code == 901
    assert driver.capture_status(stream) is CaptureStatus.NONE
    driver.stream_synchronize(stream)


# --- arrays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize(
    ("bits", "kind"),
    [(8, TexelKind.UINT), (16, TexelKind.SINT), (16, TexelKind.FLOAT), (32, TexelKind.FLOAT)],
)
def test_arrays_keep_texels(
    driver: Any, stream: int, memory: Callable[[int], int], bits: int, kind: TexelKind, channels: int
) -> None:
    info = ArrayInfo(24, 10, 0, bits, channels, kind)
    row = 24 * info.texel_bytes
    source, back = memory(10 * row), memory(12 * (row + 16))
    data = np.random.default_rng(7).integers(0, 256, 10 * row, np.uint8)
    upload(driver, source, data, stream)
    array = driver.array_create(info, 0)
    assert driver.array_info(array, 0) == info
    driver.copy_to_array_async(array, source, row, row, 10, stream)
    driver.copy_from_array_async(back, row + 16, array, row, 10, stream)
    rows = download(driver, back, 10 * (row + 16), stream).reshape(10, row + 16)
    assert (rows[:, :row] == data.reshape(10, row)).all()
    assert (rows[:, row:] == 0).all()
    driver.array_destroy(array)


def test_three_dimensional_array(driver: Any) -> None:
    info = ArrayInfo(8, 6, 4, 8, 4, TexelKind.UINT)
    array = driver.array_create(info, 0)
    assert driver.array_info(array, 0) == info
    driver.array_destroy(array)


def test_surface_and_texture(driver: Any, stream: int, memory: Callable[[int], int]) -> None:
    pixels, linear, samples = image(), memory(960), memory(960)
    upload(driver, linear, pixels, stream)
    array = driver.array_create(RGBA8, 0)
    driver.copy_to_array_async(array, linear, 96, 96, 10, stream)
    surface = driver.surface_create(array, 0)
    texture = driver.texture_create(array, 0, normalized=True)
    invert, sample = (driver.kernel_load(name, SOURCE, (), 0) for name in ("invert", "sample"))
    values = (surface, np.int32(24), np.int32(10))
    driver.kernel_launch(invert, (10, 1, 1), (24, 1, 1), values, (None,) * 3, 0, stream)
    driver.copy_from_array_async(linear, 96, array, 96, 10, stream)
    driver.kernel_launch(
        sample, (10, 1, 1), (24, 1, 1), (texture, samples, np.int32(24)), (None,) * 3, 0, stream
    )
    assert (download(driver, linear, 960, stream).reshape(10, 24, 4) == 255 - pixels).all()
    red = download(driver, samples, 960, stream).view(np.float32).reshape(10, 24)
    np.testing.assert_allclose(red, (255 - pixels[..., 0]) / np.float32(255), rtol=1e-5)
    driver.texture_destroy(texture)
    driver.surface_destroy(surface)
    driver.array_destroy(array)


# --- virtual and external memory ----------------------------------------------------------------------------


def test_memory_shared_by_fd_is_the_same_memory(driver: Any, stream: int) -> None:
    if not driver.capabilities(0).virtual_memory:
        with pytest.raises(DriverError):
            driver.vmm_create(2 * MIB, 0, True)
        return
    size = driver.vmm_granularity(0)
    before = open_files()
    handle = driver.vmm_create(size, 0, True)
    fd = driver.vmm_export_fd(handle)
    other = driver.vmm_import_fd(fd, 0)
    os.close(fd)
    first, second = driver.vmm_reserve(size, 0), driver.vmm_reserve(size, 0)
    driver.vmm_map(first, size, handle, 0)
    driver.vmm_map(second, size, other, 0)
    driver.vmm_release(handle)
    driver.vmm_release(other)
    driver.fill_async(first, 0x5A, size, stream)
    driver.stream_synchronize(stream)
    assert (download(driver, second, size, stream) == 0x5A).all()
    assert driver.pointer_info(first) == PointerInfo(MemoryType.DEVICE, 0)
    for ptr in (first, second):
        driver.vmm_unmap(ptr, size)
        driver.vmm_free(ptr, size)
    assert open_files() == before


def test_mapping_nothing_is_refused(driver: Any) -> None:
    size = driver.vmm_granularity(0)
    ptr = driver.vmm_reserve(size, 0)
    with pytest.raises(DriverError):
        driver.vmm_map(ptr, size, 0, 0)
    driver.vmm_free(ptr, size)


def test_refused_import_leaves_the_fd_to_its_owner(driver: Any, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    before = open_files()
    for refused in (
        lambda: driver.import_memory_fd(fd, 4096, False, False, 0),
        lambda: driver.import_memory_fd(fd, 4096, False, True, 0),
        lambda: driver.import_semaphore_fd(fd, False, 0),
        lambda: driver.import_semaphore_fd(fd, True, 0),
    ):
        with pytest.raises(DriverError):
            refused()
        os.fstat(fd)
    assert open_files() == before
    os.close(fd)


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_memory_of_vulkan(driver: Any, stream: int) -> None:
    from vulkan_shared import VulkanDevice

    with VulkanDevice(driver.device_uuid(0)) as vulkan:
        fd, size = vulkan.export_memory(MIB)
        twin = os.dup(fd)
        memory, same = (driver.import_memory_fd(each, size, False, False, 0) for each in (fd, twin))
        ptr, alias = driver.external_buffer(memory, 0, MIB), driver.external_buffer(same, 4096, MIB - 4096)
        data = np.random.default_rng(3).integers(0, 256, MIB, np.uint8)
        upload(driver, ptr, data, stream)
        assert (download(driver, alias, MIB - 4096, stream) == data[4096:]).all()
        assert driver.pointer_info(ptr) == PointerInfo(MemoryType.DEVICE, 0)
        for each in (ptr, alias):
            driver.external_buffer_free(each, 0)
        for each in (memory, same):
            driver.external_memory_destroy(each)


def test_array_over_memory_of_vulkan(driver: Any, stream: int, memory: Callable[[int], int]) -> None:
    from vulkan_shared import VulkanDevice

    linear, pixels = memory(960), image()
    with VulkanDevice(driver.device_uuid(0)) as vulkan:
        fd, size = vulkan.export_memory(MIB)
        imported = driver.import_memory_fd(fd, size, False, False, 0)
        mipmapped, array = driver.external_array(imported, 0, RGBA8)
        assert driver.array_info(array, 0) == RGBA8
        upload(driver, linear, pixels, stream)
        driver.copy_to_array_async(array, linear, 96, 96, 10, stream)
        driver.fill_async(linear, 0, 960, stream)
        driver.copy_from_array_async(linear, 96, array, 96, 10, stream)
        assert (download(driver, linear, 960, stream).reshape(10, 24, 4) == pixels).all()
        driver.external_array_free(mipmapped)
        driver.external_memory_destroy(imported)


def test_timeline_semaphore_of_vulkan(driver: Any, stream: int) -> None:
    if not driver.capabilities(0).timeline_semaphores:
        with pytest.raises(DriverError):
            driver.import_semaphore_fd(0, True, 0)
        return
    from vulkan_shared import VulkanDevice

    event = driver.event_create(0)
    with VulkanDevice(driver.device_uuid(0)) as vulkan:
        fd, semaphore = vulkan.export_semaphore(timeline=True)
        imported = driver.import_semaphore_fd(fd, True, 0)
        driver.semaphore_wait(imported, 5, stream)
        driver.semaphore_signal(imported, 6, stream)
        driver.event_record(event, stream)
        time.sleep(0.02)
        assert not driver.event_query(event)
        assert vulkan.value(semaphore) == 0
        vulkan.signal(semaphore, 5)
        vulkan.wait(semaphore, 6, 5.0)
        driver.event_synchronize(event)
        driver.semaphore_destroy(imported)
    driver.event_destroy(event)


def test_binary_semaphore_of_vulkan(driver: Any, stream: int) -> None:
    from vulkan_shared import VulkanDevice

    other = driver.stream_create(0)
    event = driver.event_create(0)
    with VulkanDevice(driver.device_uuid(0)) as vulkan:
        fd, _ = vulkan.export_semaphore(timeline=False)
        imported = driver.import_semaphore_fd(fd, False, 0)
        with Latch(stream, driver=driver, seconds=5) as latch:
            driver.semaphore_signal(imported, 0, stream)
            driver.semaphore_wait(imported, 0, other)
            driver.event_record(event, other)
            time.sleep(0.02)
            assert not driver.event_query(event)
            latch.release()
            driver.event_synchronize(event)
        driver.semaphore_destroy(imported)
    driver.event_destroy(event)
    driver.stream_destroy(other)


# --- OpenGL -------------------------------------------------------------------------------------------------


@pytest.fixture
def gl(driver: Any) -> Iterator[Any]:
    from OpenGL import GL

    from cuglue.graphics.glcontext import headless

    with headless(0):
        yield GL
        GL.glFinish()


def test_no_devices_without_a_context(driver: Any) -> None:
    assert driver.gl_devices() == ()


def test_device_behind_the_context(driver: Any, gl: Any) -> None:
    assert driver.gl_devices() == (0,)


def test_gl_buffers_in_one_call(driver: Any, gl: Any, stream: int) -> None:
    from glpixels import read_buffer

    names = [int(name) for name in gl.glGenBuffers(3)]
    for name in names:
        gl.glBindBuffer(gl.GL_ARRAY_BUFFER, name)
        gl.glBufferData(gl.GL_ARRAY_BUFFER, 4096, None, gl.GL_DYNAMIC_DRAW)
    resources = [driver.gl_register_buffer(name, RegisterFlags.NONE, 0) for name in names]
    driver.graphics_map(resources, stream)
    for value, resource in enumerate(resources, 1):
        ptr, size = driver.graphics_pointer(resource)
        assert size == 4096
        driver.fill_async(ptr, value, size, stream)
    driver.graphics_unmap(resources, stream)
    for value, name in enumerate(names, 1):
        assert (read_buffer(name) == value).all()
    for resource in resources:
        driver.graphics_unregister(resource)
    gl.glDeleteBuffers(3, names)


@pytest.mark.parametrize("flags", [RegisterFlags.NONE, RegisterFlags.SURFACE_LDST])
def test_gl_texture(
    driver: Any, gl: Any, stream: int, memory: Callable[[int], int], flags: RegisterFlags
) -> None:
    pixels, linear = image(), memory(960)
    name = int(gl.glGenTextures(1))
    gl.glBindTexture(gl.GL_TEXTURE_2D, name)
    gl.glTexStorage2D(gl.GL_TEXTURE_2D, 1, gl.GL_RGBA8, 24, 10)
    gl.glTexSubImage2D(gl.GL_TEXTURE_2D, 0, 0, 0, 24, 10, gl.GL_RGBA, gl.GL_UNSIGNED_BYTE, pixels)
    resource = driver.gl_register_image(name, gl.GL_TEXTURE_2D, flags, 0)
    driver.graphics_map([resource], stream)
    array = driver.graphics_array(resource, 0, 0)
    assert driver.array_info(array, 0) == RGBA8
    driver.copy_from_array_async(linear, 96, array, 96, 10, stream)
    if flags is RegisterFlags.SURFACE_LDST:
        surface = driver.surface_create(array, 0)
        invert = driver.kernel_load("invert", SOURCE, (), 0)
        values = (surface, np.int32(24), np.int32(10))
        driver.kernel_launch(invert, (10, 1, 1), (24, 1, 1), values, (None,) * 3, 0, stream)
        driver.stream_synchronize(stream)
        driver.surface_destroy(surface)
    with pytest.raises(DriverError) as caught:
        driver.graphics_array(resource, 1, 0)
    assert caught.value.code == 1
    driver.graphics_unmap([resource], stream)
    assert (download(driver, linear, 960, stream).reshape(10, 24, 4) == pixels).all()
    back = np.frombuffer(gl.glGetTexImage(gl.GL_TEXTURE_2D, 0, gl.GL_RGBA, gl.GL_UNSIGNED_BYTE), np.uint8)
    wanted = 255 - pixels if flags is RegisterFlags.SURFACE_LDST else pixels
    assert (back.reshape(10, 24, 4) == wanted).all()
    driver.graphics_unregister(resource)
    gl.glDeleteTextures(1, [name])


def test_refused_registrations(driver: Any, gl: Any) -> None:
    empty = int(gl.glGenBuffers(1))
    gl.glBindBuffer(gl.GL_ARRAY_BUFFER, empty)
    with pytest.raises(DriverError) as caught:
        driver.gl_register_buffer(empty, RegisterFlags.NONE, 0)
    assert caught.value.call == "cuGraphicsGLRegisterBuffer"
    with pytest.raises(DriverError):
        driver.gl_register_image(4711, gl.GL_TEXTURE_2D, RegisterFlags.NONE, 0)
    gl.glDeleteBuffers(1, [empty])


# --- faults -------------------------------------------------------------------------------------------------

FAULT = """
from cuglue.driver.registry import current_driver
from cuglue.errors import DevicePoisoned
from cuda_kernels import SOURCE
driver = current_driver()
stream, event = driver.stream_create(0), driver.event_create(0)
kernel = driver.kernel_load("fault", SOURCE, (), 0)
driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (64,), (None,), 0, stream)
driver.event_record(event, stream)
for name, args in (
    ("stream_synchronize", (stream,)), ("event_query", (event,)), ("stream_query", (stream,)), ("malloc", (64, 0)),
    ("malloc_async", (64, stream, 0)), ("vmm_granularity", (0,)), ("array_create", None),
    ("kernel_launch", (kernel, (1, 1, 1), (1, 1, 1), (64,), (None,), 0, stream)),
):
    if args is None:
        from cuglue.driver.protocol import ArrayInfo, TexelKind
        args = (ArrayInfo(4, 4, 0, 8, 4, TexelKind.UINT), 0)
    try:
        getattr(driver, name)(*args)
        print(name, "passed")
    except DevicePoisoned as error:
        print(name, "DevicePoisoned", error.code)
    except Exception as error:
        print(name, type(error).__name__, error)
"""


@pytest.mark.alone
def test_fault_poisons_the_device() -> None:
    paths = [str(Path(cuglue.__file__).parents[1]), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", FAULT],
        env=os.environ
        | {
            "CUGLUE_DRIVER": "cuda",
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    answers = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert answers.pop("vmm_granularity") in (
        "passed",
        "DevicePoisoned 700",
    )  # asks about hardware, not memory
    assert answers == dict.fromkeys(
        (
            "stream_synchronize",
            "event_query",
            "stream_query",
            "malloc",
            "malloc_async",
            "array_create",
            "kernel_launch",
        ),
        "DevicePoisoned 700",
    ), done.stderr


def test_an_event_is_recorded_on_the_default_streams_of_its_own_device(driver: Any) -> None:
    # The first device is current: another's streams take more than a call.
    for device in range(driver.device_count()):
        event = driver.event_create(device)
        for stream in (0, 1, 2):
            driver.event_record(event, stream)
            driver.event_synchronize(event)
        driver.event_destroy(event)
