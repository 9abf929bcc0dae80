"""Shared memory, semaphores and virtual memory of the simulated device: real descriptors, really shared."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from cuglue.driver.protocol import Access, ArrayInfo, CopyKind, Span, TexelKind
from cuglue.driver.sim import DeviceHangs, HazardError, SimDriver
from cuglue.errors import DriverError, OutOfMemory

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="memfd and mmap at an address are Linux calls"
)

N = 8192


@pytest.fixture
def sim() -> SimDriver:
    return SimDriver()


def code_of(call: Callable[..., object], *args: object) -> int:
    with pytest.raises(DriverError) as caught:
        call(*args)
    return caught.value.code


def memfd(nbytes: int = N) -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, nbytes)
    return fd


def descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing's own
            pass
    return sorted(found)


# --- memory ---------------------------------------------------------------------------------------------------------
def test_an_import_shares_its_bytes_with_another_process(sim: SimDriver) -> None:
    before = descriptors()
    fd, stream = memfd(), sim.stream_create(0)
    with mmap.mmap(fd, N) as mine:
        memory = sim.import_memory_fd(os.dup(fd), N, True, False, 0)
        ptr = sim.external_buffer(memory, 4096, 4096)
        other = sim.external_buffer(memory, 0, N)
        assert other != ptr
        sim.fill_async(ptr, 7, 100, stream)
        assert mine[4096] == 0
        sim.stream_synchronize(stream)
        assert mine[4096 : 4096 + 101] == b"\x07" * 100 + b"\x00"
    program = f"import os, mmap; m = mmap.mmap({fd}, {N}); assert m[4096] == 7; m[0] = 42"
    subprocess.run([sys.executable, "-c", program], check=True, pass_fds=[fd])
    assert sim.host_view(other, 1, False)[0] == 42
    assert code_of(sim.external_memory_destroy, memory) == 1
    sim.external_buffer_free(ptr, 0)
    sim.external_buffer_free(other, 0)
    sim.external_memory_destroy(memory)
    os.close(fd)
    assert descriptors() == before
    assert all(n == 0 for name, n in sim.inventory().items() if name != "streams")


def test_the_descriptor_changes_hands_only_if_the_import_succeeds(sim: SimDriver) -> None:
    fd = memfd()
    for nbytes in (N + 1, 0, -1):
        assert code_of(sim.import_memory_fd, fd, nbytes, False, False, 0) == 1
    os.fstat(fd)
    memory = sim.import_memory_fd(fd, N, False, True, 0)
    os.fstat(fd)
    sim.external_memory_destroy(memory)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert code_of(sim.import_memory_fd, fd, N, False, False, 0) == 1
    assert code_of(sim.external_memory_destroy, memory) == 400


def test_ranges_stay_inside_and_a_freed_address_is_a_hazard(sim: SimDriver) -> None:
    memory, stream = sim.import_memory_fd(memfd(), N, False, False, 0), sim.stream_create(0)
    for offset, nbytes in ((0, N + 1), (-1, 8), (N, 1), (0, 0)):
        assert code_of(sim.external_buffer, memory, offset, nbytes) == 1
    ptr = sim.external_buffer(memory, 0, N)
    sim.external_buffer_free(ptr, 0)
    assert code_of(sim.external_buffer_free, ptr, 0) == 1
    sim.fill_async(ptr, 1, 8, stream)
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.hazards[0].first.name == "external_buffer_free"


def test_an_imported_image_is_an_array_with_tight_rows(sim: SimDriver) -> None:
    fd, stream = memfd(), sim.stream_create(0)
    info = ArrayInfo(5, 3, 0, 8, 4, TexelKind.UINT)
    with mmap.mmap(fd, N) as mine:
        mine[64 : 64 + 60] = bytes(range(60))
        memory = sim.import_memory_fd(fd, N, True, False, 0)
        mipmapped, array = sim.external_array(memory, 64, info)
        assert sim.array_info(array, 0) == info
        linear = sim.malloc(60, 0)
        sim.copy_from_array_async(linear, 20, array, 20, 3, stream)
        sim.stream_synchronize(stream)
        assert bytes(sim.host_view(linear, 60, False)) == bytes(range(60))
        assert code_of(sim.array_destroy, array) == 400
        sim.external_array_free(mipmapped)
        assert code_of(sim.array_info, array, 0) == code_of(sim.external_array_free, mipmapped) == 400
        sim.external_memory_destroy(memory)


def test_windows_handles_stand_for_descriptors_and_stay_the_callers(sim: SimDriver) -> None:
    fd = memfd()
    handle = sim.fake_win32(fd)
    memory = sim.import_memory_win32("d3d12_resource", handle, N, True, 0)
    sim.external_memory_destroy(memory)
    os.fstat(fd)
    assert code_of(sim.import_memory_win32, "d3d12", handle, N, True, 0) == 1
    assert code_of(sim.import_memory_win32, "opaque", handle + 4, N, True, 0) == 1
    fence = sim.import_semaphore_win32("d3d12_fence", sim.fake_win32(sim.semaphore_fd(3)), 0)
    assert sim.semaphore_value(fence) == 3
    os.close(fd)


# --- semaphores -----------------------------------------------------------------------------------------------------
def test_a_wait_holds_its_stream_until_somebody_signals(sim: SimDriver) -> None:
    fd = sim.semaphore_fd()
    mine = os.dup(fd)
    semaphore = sim.import_semaphore_fd(fd, True, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    stream, other, ptr = sim.stream_create(0), sim.stream_create(0), sim.malloc(8, 0)
    sim.semaphore_wait(semaphore, 5, stream)
    sim.fill_async(ptr, 1, 8, stream)
    sim.pump()
    assert not sim.stream_query(stream)
    sim.stream_synchronize(other)
    os.pwrite(mine, (4).to_bytes(8, "little"), 0)
    assert not sim.stream_query(stream)
    threading.Timer(0.02, os.pwrite, (mine, (6).to_bytes(8, "little"), 0)).start()
    sim.stream_synchronize(stream)
    sim.semaphore_signal(semaphore, 9, stream)
    sim.semaphore_signal(semaphore, 8, stream)
    assert sim.semaphore_value(semaphore) == 6
    sim.stream_synchronize(stream)
    assert int.from_bytes(os.pread(mine, 8, 0), "little") == 9, "a timeline never goes back"
    sim.semaphore_destroy(semaphore)
    os.close(mine)


def test_a_value_that_nobody_signals_is_told_not_endured() -> None:
    sim = SimDriver(wait_limit=0.05)
    stream, semaphore = sim.stream_create(0), sim.import_semaphore_fd(sim.semaphore_fd(), True, 0)
    sim.semaphore_wait(semaphore, 1, stream)
    with pytest.raises(DeviceHangs, match=r"semaphore_wait queued at .*test_sim_external\.py"):
        sim.stream_synchronize(stream)
    other = sim.stream_create(0)
    sim.semaphore_signal(semaphore, 1, other)
    sim.stream_synchronize(stream)


@pytest.mark.parametrize("timeline", [True, False])
def test_a_signal_orders_what_waits_for_it(timeline: bool) -> None:
    for seed in range(30):
        sim = SimDriver(seed)
        streams, ptr = [sim.stream_create(0), sim.stream_create(0)], sim.malloc(8, 0)
        semaphore = sim.import_semaphore_fd(sim.semaphore_fd(), timeline, 0)
        for value in range(1, 5):
            first, second = streams
            sim.fill_async(ptr, value, 8, first)
            sim.semaphore_signal(semaphore, value, first)
            sim.semaphore_wait(semaphore, value, second)
            streams.reverse()
        sim.fill_async(ptr, 5, 8, streams[0])
        sim.stream_synchronize(streams[0])
        assert sim.host_view(ptr, 1, False)[0] == 5
        assert sim.hazards == []


def test_a_wait_for_an_older_value_does_not_order_newer_work(sim: SimDriver) -> None:
    first, second, ptr = sim.stream_create(0), sim.stream_create(0), sim.malloc(8, 0)
    semaphore = sim.import_semaphore_fd(sim.semaphore_fd(), True, 0)
    sim.semaphore_signal(semaphore, 1, first)
    sim.fill_async(ptr, 1, 8, first)
    sim.semaphore_signal(semaphore, 2, first)
    sim.semaphore_wait(semaphore, 1, second)
    sim.fill_async(ptr, 2, 8, second)
    with pytest.raises(HazardError):
        sim.device_synchronize(0)


def test_a_semaphore_destroyed_under_a_queued_signal_is_a_hazard(sim: SimDriver) -> None:
    stream, semaphore = sim.stream_create(0), sim.import_semaphore_fd(sim.semaphore_fd(), True, 0)
    sim.semaphore_signal(semaphore, 1, stream)
    sim.semaphore_destroy(semaphore)
    with pytest.raises(HazardError):
        sim.stream_synchronize(stream)
    assert code_of(sim.semaphore_signal, semaphore, 1, stream) == 400


# --- virtual memory -------------------------------------------------------------------------------------------------
class Pieces:
    """Three pieces mapped side by side, full of zeros; the third address range has nothing behind it at first."""

    def __init__(self, sim: SimDriver) -> None:
        self.sim, self.size, self.stream = sim, sim.vmm_granularity(0), sim.stream_create(0)
        self.base = sim.vmm_reserve(3 * self.size, 0)
        self.map(0)
        self.map(1)
        self.edge = self.base + self.size
        sim.fill_async(self.base, 0, 2 * self.size, self.stream)
        sim.stream_synchronize(self.stream)

    def map(self, number: int) -> None:
        handle = self.sim.vmm_create(self.size, 0, False)
        self.sim.vmm_map(self.base + number * self.size, self.size, handle, 0)
        self.sim.vmm_release(handle)

    def around_the_edge(self, nbytes: int) -> bytes:
        """What a copy of so many bytes on either side gives."""
        pinned = self.sim.host_alloc(2 * nbytes)
        self.sim.copy_async(pinned, self.edge - nbytes, 2 * nbytes, CopyKind.D2H, self.stream)
        self.sim.stream_synchronize(self.stream)
        found = bytes(self.sim.host_view(pinned, 2 * nbytes, False))
        self.sim.host_free(pinned)
        return found


def test_copies_fills_and_kernels_reach_over_two_mapped_pieces(sim: SimDriver) -> None:
    pieces = Pieces(sim)
    sim.fill_async(pieces.edge - 2, 7, 4, pieces.stream)
    assert pieces.around_the_edge(3) == b"\0\7\7\7\7\0"
    sim.copy_2d_async(
        pieces.edge - 6, 4, pieces.edge - 2, 2, 2, 3, CopyKind.D2D, pieces.stream
    )  # rows of 2 bytes, 4 apart: the middle one lies before the edge, the last behind it
    assert pieces.around_the_edge(6) == b"\7\7\0\0\7\7\7\7\0\0\0\0"

    def count(grid: object, block: object, x: np.ndarray) -> None:
        x[...] = np.arange(len(x))

    kernel = sim.kernel_load("count", "", (), 0, count)
    for step, first in ((2, pieces.edge - 4), (-2, pieces.edge + 2)):
        span = Span(first, 8, Access.WRITE, (4,), "<u2", (step,))
        sim.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (np.int64(first),), (span,), 0, pieces.stream)
        numbers = np.frombuffer(pieces.around_the_edge(4), "<u2")
        assert list(numbers) == ([0, 1, 2, 3] if step > 0 else [3, 2, 1, 0])


def test_work_over_two_mapped_pieces_is_watched_in_each(sim: SimDriver) -> None:
    pieces, other = Pieces(sim), sim.stream_create(0)
    sim.fill_async(pieces.edge - 8, 1, 16, pieces.stream)
    sim.fill_async(pieces.edge - 16, 2, 8, other)
    sim.fill_async(pieces.edge + 8, 2, 8, other)
    sim.device_synchronize(0)
    for where in (pieces.edge - 8, pieces.edge + 7):
        sim.fill_async(pieces.edge - 8, 1, 16, pieces.stream)
        sim.fill_async(where, 2, 1, other)
        with pytest.raises(HazardError):
            sim.device_synchronize(0)


def test_a_range_that_leaves_what_is_mapped_is_refused(sim: SimDriver) -> None:
    pieces = Pieces(sim)
    end = pieces.base + 2 * pieces.size
    assert code_of(sim.fill_async, end - 8, 0, 16, pieces.stream) == 1
    pieces.map(2)
    sim.fill_async(pieces.base, 3, 3 * pieces.size, pieces.stream)
    assert pieces.around_the_edge(2) == b"\3\3\3\3"
    sim.vmm_unmap(pieces.edge, pieces.size)
    sim.fill_async(pieces.base, 3, 3 * pieces.size, pieces.stream)
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(pieces.stream)
    assert caught.value.hazards[0].first.name == "vmm_unmap"


def test_memory_moves_between_reserved_addresses(sim: SimDriver) -> None:
    size, stream, before = sim.vmm_granularity(0), sim.stream_create(0), descriptors()
    handle, base = sim.vmm_create(size, 0, True), sim.vmm_reserve(2 * size, 0)
    sim.vmm_map(base, size, handle, 0)
    assert sim.pointer_info(base + 8).device == 0
    sim.fill_async(base, 5, size, stream)
    sim.stream_synchronize(stream)
    sim.vmm_unmap(base, size)
    sim.vmm_map(base + size, size, handle, 0)
    assert sim.host_view(base + size, 4, False) == b"\x05" * 4
    sim.fill_async(base, 1, 8, stream)
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.hazards[0].first.name == "vmm_unmap"
    sim.vmm_release(handle)
    assert sim.host_view(base + size, 1, False)[0] == 5, "mappings keep the memory"
    assert code_of(sim.vmm_free, base, 2 * size) == 1
    sim.vmm_unmap(base + size, size)
    sim.vmm_free(base, 2 * size)
    assert descriptors() == before
    assert sim.memory_info(0).free == sim.memory_info(0).total


def test_exported_memory_means_the_same_bytes_in_another_driver(sim: SimDriver) -> None:
    size, other = sim.vmm_granularity(0), SimDriver()
    handle, ptr = sim.vmm_create(size, 0, True), sim.vmm_reserve(size, 0)
    sim.vmm_map(ptr, size, handle, 0)
    fd = sim.vmm_export_fd(handle)
    there = other.vmm_import_fd(fd, 0)
    os.close(fd)
    address = other.vmm_reserve(size, 0)
    other.vmm_map(address, size, there, 0)
    sim.host_view(ptr, 1, True)[0] = 99
    assert other.host_view(address, 1, False)[0] == 99


@pytest.mark.parametrize(
    "bad", ["size", "too much", "not shareable", "taken", "outside", "half unmap", "handle"]
)
def test_bad_requests_are_refused(bad: str) -> None:
    sim = SimDriver(memory_bytes=4 << 20)
    size = sim.vmm_granularity(0)
    handle, base = sim.vmm_create(size, 0, False), sim.vmm_reserve(size, 0)
    sim.vmm_map(base, size, handle, 0)
    if bad == "too much":
        with pytest.raises(OutOfMemory):
            sim.vmm_create(2 * size, 0, False)
        return
    calls: dict[str, Callable[[], object]] = {
        "size": lambda: sim.vmm_create(size + 1, 0, False),
        "not shareable": lambda: sim.vmm_export_fd(handle),
        "taken": lambda: sim.vmm_map(base, size, handle, 0),
        "outside": lambda: sim.vmm_map(base + (64 << 30), size, handle, 0),
        "half unmap": lambda: sim.vmm_unmap(base, size // 2),
        "handle": lambda: sim.vmm_release(1),
    }
    assert code_of(calls[bad]) == (400 if bad == "handle" else 1)
    sim.copy_async(base, base + 16, 8, CopyKind.D2D, 0)
    sim.stream_synchronize(0)
