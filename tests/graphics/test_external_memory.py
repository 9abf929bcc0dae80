"""External memory on the simulated device: imports, ranges, handles, and whose each thing is (A4, A6, A14, A22)."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from graphics.shared_memory import descriptors, external_memory, memory_file, settled

import cuglue
from cuglue import external
from cuglue.driver.protocol import CopyKind
from cuglue.errors import (
    ClosedError,
    DriverError,
    LayoutError,
    MapUnavailableError,
    UnsupportedError,
    UsageError,
)
from cuglue.graphics.handle import CudaHandle
from cuglue.testing import sweep
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import HandleSuite, Subject, peek, poke
from cuglue.testing.interpose import interposed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is a Linux call")

N = 8192


class TestExternalMemory(HandleSuite):
    """The contract of every handle."""

    @pytest.fixture(autouse=True)
    def _on(self, driver: Any) -> None:
        self.driver = driver

    def make(self) -> AbstractContextManager[Subject]:
        return external_memory(self.driver)


# --- A4: descriptors ------------------------------------------------------------------------------------------------
def test_A4_the_callers_descriptor_is_never_touched(driver: Any) -> None:
    fd = memory_file(N)
    before = descriptors()
    with external.import_fd(fd, allocation_size=N) as memory:
        assert (memory.size, memory.kind, memory.device) == (N, "opaque", 0)
        os.fstat(fd)
    os.fstat(fd)
    assert descriptors() == before
    os.close(fd)


def test_A4_a_refused_import_closes_its_copy_once(driver: Any) -> None:
    fd = memory_file(N)
    before = descriptors()
    for _ in range(3):
        with pytest.raises(DriverError):
            external.import_fd(fd, allocation_size=N + 1)
        with fail("import_memory_fd"), pytest.raises(DriverError):
            external.import_fd(fd, allocation_size=N)
    os.fstat(fd)
    assert descriptors() == before
    os.close(fd)


def test_A4_a_driver_that_closes_what_it_refuses_is_tolerated(driver: Any) -> None:
    """And no descriptor that another thread got meanwhile is closed in its place."""
    fd, other = memory_file(N), memory_file(N)
    taken: list[int] = []

    def closing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(copy: int, *args: Any) -> int:
            os.close(copy)
            taken.append(os.dup(other))
            assert taken[-1] == copy
            raise DriverError("refused", code=999, name="CUDA_ERROR_UNKNOWN", call=name)

        return call

    with interposed(driver, ["import_memory_fd"], closing), pytest.raises(DriverError):
        external.import_fd(fd, allocation_size=N)
    os.fstat(taken[0])
    for each in (fd, other, *taken):
        os.close(each)


def test_A4_a_range_that_cannot_be_mapped_leaves_the_memory(driver: Any) -> None:
    fd = memory_file(N)
    memory = external.import_fd(fd, allocation_size=N)
    before = driver.inventory()
    with fail("external_buffer"), pytest.raises(DriverError):
        CudaHandle.from_external(memory)
    assert driver.inventory() == before
    assert not memory.closed
    memory.close()
    assert settled(driver)["external"] == 0
    os.close(fd)


@pytest.mark.parametrize("fd", [-1, 10**6, 2**40, True, None, "3", 1.0])
def test_what_is_no_descriptor_is_refused_before_the_driver(driver: Any, fd: Any) -> None:
    for call in (
        lambda: external.import_fd(fd, allocation_size=N),
        lambda: external.import_semaphore_fd(fd),
        lambda: external.import_image(fd, width=4, height=4, format="R8"),
    ):
        with pytest.raises(UsageError, match="file descriptor"):
            call()
    assert not any(name.startswith("import") for name in driver.counts)


def test_a_closed_descriptor_is_refused(driver: Any) -> None:
    fd = memory_file(N)
    os.close(fd)
    with pytest.raises(UsageError, match="Bad file descriptor"):
        external.import_fd(fd, allocation_size=N)


def test_a_descriptor_of_something_else_is_refused(driver: Any) -> None:
    read, write = os.pipe()
    before = descriptors()
    with pytest.raises(DriverError):
        external.import_fd(read, allocation_size=N)
    assert descriptors() == before
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("size", [0, -1, 1.5, None, True, "8"])
def test_bad_allocation_sizes(driver: Any, size: Any) -> None:
    fd = memory_file(N)
    with pytest.raises(LayoutError):
        external.import_fd(fd, allocation_size=size)
    with pytest.raises(LayoutError):
        external.export_fd(size)
    assert not any(name.startswith("import") for name in driver.counts)
    os.close(fd)


def test_unknown_kinds(driver: Any) -> None:
    fd = memory_file(N)
    with pytest.raises(UsageError, match="opaque, dma_buf, vmm"):
        external.import_fd(fd, allocation_size=N, kind="win32")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeline, binary"):
        external.import_semaphore_fd(fd, "opaque")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="ordinal"):
        external.import_fd(fd, allocation_size=N, device=7)
    os.close(fd)


def test_row_85_a_refusal_explains_sizes_and_handles(driver: Any) -> None:
    """An import of width * height * 4 bytes: the driver itself says "unknown error"."""
    fd = memory_file(64 * 48 * 3)
    with pytest.raises(DriverError) as caught:
        external.import_fd(fd, allocation_size=64 * 48 * 4)
    text = str(caught.value)
    assert "12288 bytes were given" in text
    assert "not width * height" in text
    assert "dedicated" in text
    driver_handle = driver.fake_win32(fd)
    with pytest.raises(DriverError) as caught:
        external.import_win32(external.D3D11Texture(driver_handle), allocation_size=64 * 48 * 4)
    assert "KMT" in str(caught.value)
    os.close(fd)


def test_a_descriptor_without_bytes_is_refused_in_words(driver: Any) -> None:
    fd = memory_file(0)
    with pytest.raises(DriverError, match="got 10 bytes, expected shared memory with bytes: this has none"):
        external.import_fd(fd, allocation_size=10)
    os.close(fd)


# --- Windows handles ------------------------------------------------------------------------------------------------
def test_row_86_handles_are_types(driver: Any) -> None:
    fd = memory_file(N)
    value = driver.fake_win32(fd)
    fence = external.D3D12Fence(value)
    for wrong in (value, fence, fd, "d3d12_heap", None):
        with pytest.raises(UsageError, match=r"of D3D12Heap, D3D12Resource, D3D11Texture, OpaqueWin32$"):
            external.import_win32(wrong, allocation_size=N)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="D3D12Fence, D3D11Fence, OpaqueSemaphoreWin32"):
        external.import_semaphore_win32(external.D3D12Heap(value))  # type: ignore[arg-type]
    for bad in (0, -4, True, None, "4"):
        with pytest.raises(UsageError):
            external.D3D12Heap(bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="subclass"):
        type(fence).__mro__[1](4)
    os.close(fd)


@pytest.mark.parametrize(
    ("make", "kind", "dedicated"),
    [
        (external.D3D12Heap, "d3d12_heap", False),
        (external.D3D12Resource, "d3d12_resource", True),
        (external.D3D11Texture, "d3d11", True),
        (external.OpaqueWin32, "opaque", False),
        (lambda value: external.OpaqueWin32(value, kmt=True), "opaque_kmt", False),
    ],
)
def test_windows_memory(driver: Any, make: Any, kind: str, dedicated: bool) -> None:
    fd = memory_file(N, b"windows")
    seen: list[tuple[Any, ...]] = []

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append(args)
            return method(*args)

        return call

    value = driver.fake_win32(fd)
    with interposed(driver, ["import_memory_win32"], noting):
        memory = external.import_win32(make(value), allocation_size=N)
    assert seen == [(kind, value, N, dedicated, 0)]
    with CudaHandle.from_external(memory) as handle, handle.map() as m:
        assert bytes(peek(m)[:7]) == b"windows"
    assert settled(driver)["external"] == 0
    os.close(fd)


# --- capabilities ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ability", "call"),
    [
        ("external_fd", lambda fd: external.import_fd(fd, allocation_size=N)),
        ("external_dma_buf", lambda fd: external.import_fd(fd, allocation_size=N, kind="dma_buf")),
        ("virtual_memory", lambda fd: external.import_fd(fd, allocation_size=N, kind="vmm")),
        ("virtual_memory", lambda fd: external.export_fd(N)),
        ("external_win32", lambda fd: external.import_win32(external.D3D12Heap(4), allocation_size=N)),
        ("external_win32", lambda fd: external.import_semaphore_win32(external.D3D12Fence(4))),
        ("timeline_semaphores", lambda fd: external.import_semaphore_fd(fd)),
        ("external_fd", lambda fd: external.import_semaphore_fd(fd, "binary")),
        ("surfaces", lambda fd: external.import_image(fd, width=4, height=4, format="R8")),
    ],
)
def test_what_a_driver_cannot_is_said_before_it_is_asked(ability: str, call: Callable[[int], object]) -> None:
    from cuglue.driver.sim import SimDriver

    fd = memory_file(N)
    with cuglue.use_driver(SimDriver(disable=[ability])) as poor:
        before = poor.inventory()  # type: ignore[attr-defined]
        with pytest.raises(UnsupportedError):
            call(fd)
        assert poor.inventory() == before  # type: ignore[attr-defined]
    os.close(fd)


# --- ranges ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, N + 1), (N, 1), (1, N), (-1, 8), (0, -1), (N + 1, None), (0.0, 8), (0, "8"), (True, 8), (2**70, 1)],
)
def test_ranges_lie_inside(driver: Any, offset: Any, size: Any) -> None:
    fd = memory_file(N)
    with external.import_fd(fd, allocation_size=N) as memory:
        with pytest.raises(LayoutError):
            CudaHandle.from_external(memory, offset=offset, size=size)
        assert "external_buffer" not in driver.counts
    os.close(fd)


def test_a_range_is_made_of_memory(driver: Any) -> None:
    fd = memory_file(N)
    for wrong in (fd, 0x1000, None, b"x"):
        with pytest.raises(UsageError, match="import_fd"):
            CudaHandle.from_external(wrong)  # type: ignore[arg-type]
    os.close(fd)


def test_several_handles_share_an_allocation(driver: Any) -> None:
    """Each sees its own range; the allocation goes with the last of them."""
    fd = memory_file(N, bytes(range(256)) * (N // 256))
    memory = external.import_fd(fd, allocation_size=N)
    first = CudaHandle.from_external(memory, offset=10, size=20)
    second = CudaHandle.from_external(memory, offset=100)
    assert (first.size, second.size) == (20, N - 100)
    with first.map() as a, second.map() as b:
        assert peek(a)[0] == 10
        assert peek(b)[0] == 100
    first.close()
    assert settled(driver)["external"] == 1
    second.close()
    assert settled(driver)["external"] == 0
    assert memory.closed
    with pytest.raises(ClosedError):
        CudaHandle.from_external(memory)
    os.close(fd)


def test_closing_the_memory_first_is_deferred(driver: Any) -> None:
    fd = memory_file(N)
    with external.import_fd(fd, allocation_size=N) as memory:
        handle = CudaHandle.from_external(memory)
    assert memory.closed
    with handle.map_mut() as m:
        poke(m, np.full(N, 3, np.uint8))
    with pytest.raises(ClosedError):
        CudaHandle.from_external(memory)
    handle.close()
    assert settled(driver)["external"] == 0
    assert os.pread(fd, N, 0) == b"\x03" * N
    os.close(fd)


# --- A6, A14: persistent --------------------------------------------------------------------------------------------
def test_A6_the_pointer_is_the_same_in_every_map_and_nothing_is_called(driver: Any) -> None:
    fd = memory_file(N)
    with CudaHandle.from_external(external.import_fd(fd, allocation_size=N)) as handle:
        with handle.map() as m:
            ptr = m.device_ptr
            assert len(m) == handle.size == N
        before = dict(driver.counts)
        for method in (handle.map, handle.map_mut, handle.map):
            with method() as m:
                assert m.device_ptr == ptr
        changed = {name for name in driver.counts if driver.counts[name] != before.get(name, 0)}
        assert changed <= {"stream_current", "capture_status", "context_record", "context_wait"}
    os.close(fd)


def test_A6_size_0(driver: Any) -> None:
    fd = memory_file(N)
    with CudaHandle.from_external(external.import_fd(fd, allocation_size=N), size=0) as handle:
        assert "external_buffer" not in driver.counts
        with handle.map() as m:
            assert (len(m), m.device_ptr, m.shape) == (0, 0, (0,))
            assert m.numpy().shape == (0,)
    assert settled(driver)["external"] == 0
    os.close(fd)


def test_A14_either_map_may_be_written_through(driver: Any) -> None:
    with external_memory(driver) as subject:
        for value, method in ((1, subject.handle.map), (2, subject.handle.map_mut)):
            with method() as m:
                poke(m, np.full(m.size, value, np.uint8))
            assert (subject.get() == value).all()


def test_a_map_on_another_stream_waits_for_the_last_one(driver: Any) -> None:
    """The oracle of the simulated device would report it."""
    one, two = driver.Stream(), driver.Stream()
    with external_memory(driver) as subject:
        for stream, value in ((one, 1), (two, 2), (one, 3)):
            with subject.handle.map_mut(stream) as m:
                driver.fill_async(m.device_ptr, value, m.size, m.stream.handle)
        with subject.handle.map() as m:
            assert (peek(m) == 3).all()


# --- A22: the end ---------------------------------------------------------------------------------------------------
def test_A22_the_range_is_freed_before_the_allocation_each_once(driver: Any) -> None:
    fd = memory_file(N)
    handle = CudaHandle.from_external(external.import_fd(fd, allocation_size=N))
    with cuglue.testing.trace() as calls:
        handle.close()
        handle.close()
        settled(driver)
    order = [call.method for call in calls if call.method.startswith("external")]
    assert order == ["external_buffer_free", "external_memory_destroy"]
    os.close(fd)


def test_A22_closing_waits_for_nobody_and_frees_when_all_is_done(driver: Any) -> None:
    fd, semaphore = memory_file(N), driver.semaphore_fd()
    stream = driver.Stream()
    handle = CudaHandle.from_external(external.import_fd(fd, allocation_size=N))
    with external.import_semaphore_fd(semaphore) as fence:
        fence.wait(1, stream)
        with handle.map_mut(stream) as m:
            driver.fill_async(m.device_ptr, 9, N, m.stream.handle)
        handle.close()
        assert driver.inventory()["external_buffers"] == 1
        assert os.pread(fd, 1, 0) != b"\x09"
        os.pwrite(semaphore, b"\x01", 0)
    assert settled(driver)["external"] == settled(driver)["semaphores"] == 0
    os.close(semaphore)
    assert os.pread(fd, N, 0) == b"\x09" * N
    os.close(fd)


def test_A22_arrays_that_are_alive_keep_the_memory(driver: Any) -> None:
    """They are no copies: freeing it under them would be a fault. Nothing warns: it survives the map."""
    fd = memory_file(N, b"kept")
    handle = CudaHandle.from_external(external.import_fd(fd, allocation_size=N))
    with handle.map() as m:
        array = np.asarray(m)
    handle.close()
    assert settled(driver)["external_buffers"] == 1
    assert bytes(array[:4]) == b"kept"
    view = array[2:]
    del array, m
    assert settled(driver)["external_buffers"] == 1
    del view
    assert settled(driver)["external_buffers"] == settled(driver)["external"] == 0
    os.close(fd)


def test_A22_a_map_that_an_array_interface_was_read_of_keeps_the_memory(driver: Any) -> None:
    """Whoever read it holds the map, and takes no token."""
    fd = memory_file(N)
    handle = CudaHandle.from_external(external.import_fd(fd, allocation_size=N))
    with handle.map() as m:
        m.note_cai_reader()
    handle.close()
    assert settled(driver)["external_buffers"] == 1
    del m
    assert settled(driver)["external_buffers"] == settled(driver)["external"] == 0
    os.close(fd)


def test_maps_that_are_gone_are_not_remembered(driver: Any) -> None:
    with external_memory(driver) as subject:
        for _ in range(100):
            with subject.handle.map() as m:
                np.asarray(m)
            del m
        backing: Any = subject.handle._life.backing
        assert len(backing._lease.readers) <= 1


def test_A22_a_map_that_was_left_does_not_keep_it(driver: Any) -> None:
    fd = memory_file(N)
    handle = CudaHandle.from_external(external.import_fd(fd, allocation_size=N))
    with handle.map() as m:
        array = np.asarray(m)
        del array
    handle.close()
    assert m.released
    assert settled(driver)["external"] == 0
    os.close(fd)


def test_forgotten_memory_and_handles_are_freed_with_a_warning(driver: Any) -> None:
    fd = memory_file(N)
    before = settled(driver)
    memory = external.import_fd(fd, allocation_size=N)
    with pytest.warns(ResourceWarning, match="test_external_memory.py.*never closed"):
        del memory
    assert settled(driver) == before
    handle = CudaHandle.from_external(external.import_fd(fd, allocation_size=N))
    with pytest.warns(ResourceWarning, match="test_external_memory.py.*never closed"):
        del handle
    settled(driver)
    assert settled(driver)["external_buffers"] == 0
    gc.collect()
    os.close(fd)


def test_row_75_a_thousand_imports_leave_nothing(driver: Any) -> None:
    fd = memory_file(N)
    before = descriptors(), settled(driver)
    for _ in range(1000):
        with CudaHandle.from_external(external.import_fd(fd, allocation_size=N)) as handle, handle.map():
            pass
    assert (descriptors(), settled(driver)) == before
    os.close(fd)


def test_every_failing_call_loses_nothing() -> None:
    fd = memory_file(N)

    def operation(driver: Any) -> CudaHandle:
        memory = external.import_fd(fd, allocation_size=N)
        try:
            return CudaHandle.from_external(memory, size=100)
        except BaseException:
            memory.close()
            raise

    sweep(operation, teardown=lambda driver, handle: handle.close(), modes=["once", "method"]).check()
    os.close(fd)


def test_closing_goes_on_where_it_failed(driver: Any) -> None:
    fd = memory_file(N)
    for method in ("external_buffer_free", "external_memory_destroy"):
        handle = CudaHandle.from_external(external.import_fd(fd, allocation_size=N))
        with fail(method), pytest.raises(DriverError):
            handle.close()
        assert handle.closed
        assert settled(driver)["external"] == 0
    os.close(fd)


def test_no_record_means_no_wait_and_a_record_without_a_fence_declines(driver: Any) -> None:
    with external_memory(driver) as subject:
        with subject.handle.map():
            pass
        subject.handle.record_write(1)
        with pytest.raises(MapUnavailableError) as caught:
            subject.handle.map()
        assert vars(caught.value)["reason"] == "unordered_write"
        assert subject.handle.try_map() is None


# --- between processes ----------------------------------------------------------------------------------------------
_CHILD = """
import sys, os
import numpy as np
import cuglue
from cuglue import external
fd, size = int(sys.argv[1]), int(sys.argv[2])
cuglue.use_driver(sys.argv[3])
memory = external.import_fd(fd, allocation_size=size, kind="vmm")
os.close(fd)
with cuglue.CudaHandle.from_external(memory, size=1000) as handle:
    seen = handle.read()
    handle.write(seen[::-1].copy())
    cuglue.as_stream(None).synchronize()
print(int(seen.sum()))
"""


def between_processes(driver: Any, name: str) -> None:
    memory, fd = external.export_fd(1000)
    assert memory.size % driver.vmm_granularity(0) == 0
    data = np.random.default_rng(5).integers(0, 256, 1000, np.uint8)
    with CudaHandle.from_external(memory, size=1000) as handle:
        with handle.map_mut() as m:
            poke(m, data)
        arguments = [str(fd), str(memory.size), name]
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, *arguments],
            pass_fds=[fd],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == int(data.sum())
        with handle.map() as m:
            np.testing.assert_array_equal(peek(m), data[::-1])
    os.close(fd)


def test_memory_between_two_processes(driver: Any) -> None:
    before = descriptors(), settled(driver)
    between_processes(driver, "sim")
    assert (descriptors(), settled(driver)) == before


@pytest.mark.gpu
def test_memory_between_two_processes_on_a_gpu(driver: Any) -> None:
    between_processes(driver, "cuda")  # the first use opens the device's own files
    before = descriptors()
    between_processes(driver, "cuda")
    assert len(descriptors()) == len(before)


def test_exporting_loses_nothing_when_a_call_fails() -> None:
    def operation(driver: Any) -> Any:
        return external.export_fd(1)

    def teardown(driver: Any, result: Any) -> None:
        result[0].close()
        os.close(result[1])

    before = descriptors()
    sweep(operation, teardown=teardown, modes=["once", "method"]).check()
    assert descriptors() == before


def test_importing_what_was_exported_loses_nothing_when_a_call_fails() -> None:
    with cuglue.use_driver("sim"):
        memory, fd = external.export_fd(1)
        size = memory.size
        memory.close()

    def operation(driver: Any) -> Any:
        return external.import_fd(fd, allocation_size=size, kind="vmm")

    before = descriptors()
    sweep(operation, teardown=lambda driver, memory: memory.close(), modes=["once", "method"]).check()
    assert descriptors() == before
    os.close(fd)


def test_virtual_memory_has_whole_granules(driver: Any) -> None:
    memory, fd = external.export_fd(1)
    with memory, pytest.raises(LayoutError, match="export_fd"):
        external.import_fd(fd, allocation_size=memory.size - 1, kind="vmm")
    os.close(fd)


# --- row 87: dma-buf ------------------------------------------------------------------------------------------------
def test_row_87_a_dma_buf_is_verified_and_left_as_it_was(driver: Any) -> None:
    content = np.random.default_rng(1).integers(0, 256, 40 * mmap.PAGESIZE + 7, np.uint8).tobytes()
    fd = memory_file(len(content), content)
    with external.import_fd(fd, allocation_size=len(content), kind="dma_buf") as memory:
        assert memory.kind == "dma_buf"
        assert os.pread(fd, len(content), 0) == content
        with CudaHandle.from_external(memory, size=100) as handle, handle.map() as m:
            assert peek(m).tobytes() == content[:100]
    assert settled(driver)["external"] == 0
    os.close(fd)


@pytest.mark.parametrize("page", [0, 1, 2])
def test_row_87_wrong_pages_are_found(driver: Any, page: int) -> None:
    """The driver takes the buffer, and one of its pages is another one."""
    nbytes = 3 * mmap.PAGESIZE
    content = bytes(nbytes)
    fd, wrong = memory_file(nbytes, content), memory_file(nbytes, content)
    before = descriptors()

    def corrupt(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(dst: int, src: int, size: int, kind: CopyKind, stream: int) -> None:
            method(dst, src, size, kind, stream)
            if (src % nbytes) // mmap.PAGESIZE == page_of[0]:
                driver.fill_async(src, 0xEE, 8, stream)
                method(dst, src, size, kind, stream)

        return call

    class Ptr:
        pass

    page_of = [page]

    def based(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> int:
            ptr = method(*args)
            page_of[0] = ((ptr + page * mmap.PAGESIZE) % nbytes) // mmap.PAGESIZE
            return int(ptr)

        return call

    with (
        interposed(driver, ["external_buffer"], based),
        interposed(driver, ["copy_async"], corrupt),
        pytest.raises(UnsupportedError) as caught,
    ):
        external.import_fd(fd, allocation_size=nbytes, kind="dma_buf")
    assert vars(caught.value)["reason"] == "dma_buf"
    assert f"offset {page * mmap.PAGESIZE}" in str(caught.value)
    assert os.pread(fd, nbytes, 0) == content
    assert settled(driver)["external"] == 0
    assert descriptors() == before
    os.close(fd)
    os.close(wrong)


def test_row_87_what_the_host_cannot_map_is_refused(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, nbytes: int) -> None:
        raise OSError(22, "Invalid argument")

    from cuglue.graphics import dmabuf

    fd = memory_file(N)
    monkeypatch.setattr(dmabuf.mmap, "mmap", refuse)
    with pytest.raises(UnsupportedError, match="cannot be verified"):
        external.import_fd(fd, allocation_size=N, kind="dma_buf")
    assert settled(driver)["external"] == 0
    os.close(fd)


# --- names ----------------------------------------------------------------------------------------------------------
def test_A23_repr(driver: Any) -> None:
    fd = memory_file(N)
    with external.import_fd(fd, allocation_size=N) as memory:
        assert repr(memory) == f"ExternalMemory(kind='opaque', size={N}, device=0)"
        with CudaHandle.from_external(memory, size=10) as handle:
            assert repr(handle) == "CudaHandle(kind='ExternalMem', size=10)"
    os.close(fd)
