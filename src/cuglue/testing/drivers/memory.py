"""Promises about memory: addresses, allocation, views, copies, fills, and memory shared by file descriptor.

Owns these tests. Must not know streams beyond waiting for one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from ...driver.protocol import CopyKind, MemoryType
from ...errors import OutOfMemory
from .case import DriverCase, N


class MemoryTests(DriverCase):
    """Memory and copies."""

    def test_devices(self) -> None:
        """Counts, names, identities, memory."""
        driver = self.driver
        assert driver.device_count() > self.device
        assert driver.device_current() in range(driver.device_count())
        assert driver.device_name(self.device)
        assert len(driver.device_uuid(self.device)) == 16
        free, total = driver.memory_info(self.device)
        assert 0 < free <= total
        assert driver.capabilities(self.device) == self.can
        assert self.can.device_type in (MemoryType.DEVICE, MemoryType.HOST)

    def test_allocations_are_aligned_and_apart(self) -> None:
        """No two live allocations share a byte."""
        sizes = [1, 511, 512, 513, 100_000]
        spans = sorted((self.memory(size), size) for size in sizes)
        assert all(ptr % self.can.alignment == 0 for ptr, _ in spans)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))

    def test_addresses_are_told_apart(self) -> None:
        """Device, pinned, managed and ordinary host memory; also inside an allocation."""
        ordinary = np.zeros(8)
        assert self.driver.pointer_info(self.memory() + 8) == (MemoryType.DEVICE, self.device)
        assert self.driver.pointer_info(self.pinned()).type is MemoryType.PINNED
        assert self.driver.pointer_info(ordinary.ctypes.data) == (MemoryType.HOST, 0)
        if self.can.managed_memory:
            ptr = self.driver.malloc_managed(N, self.device)
            assert self.driver.pointer_info(ptr).type is MemoryType.MANAGED
            self.driver.free(ptr, self.device)

    def test_no_memory_is_an_error_that_changes_nothing(self) -> None:
        """OutOfMemory names the size, and a smaller allocation still works."""
        allocations: list[Callable[[], int]] = [lambda: self.driver.malloc(1 << 50, self.device)]
        if self.can.async_memory:
            allocations.append(lambda: self.driver.malloc_async(1 << 50, self.stream(), self.device))
        for allocate in allocations:
            error = None
            try:
                allocate()
            except OutOfMemory as caught:
                error = caught
            assert error is not None, "no OutOfMemory"
            assert error.requested == 1 << 50
        self.memory()

    def test_a_double_free_is_refused(self) -> None:
        """And so is freeing what was never allocated."""
        ptr = self.driver.malloc(N, self.device)
        self.driver.free(ptr, self.device)
        self.refused(lambda: self.driver.free(ptr, self.device), 1)

    def test_stream_ordered_memory(self) -> None:
        """Allocation, use and free in one stream need no wait; the address serves again."""
        if not self.can.async_memory:
            return
        driver, stream, out = self.driver, self.stream(), self.memory()
        for value in range(1, 6):
            ptr = driver.malloc_async(N, stream, self.device)
            assert ptr % self.can.alignment == 0
            driver.fill_async(ptr, value, N, stream)
            driver.copy_async(out, ptr, N, CopyKind.D2D, stream)
            driver.free_async(ptr, stream, self.device)
        assert (self.get(out, N, stream) == 5).all()
        driver.pool_trim(0, self.device)

    def test_pinned_memory_is_seen_by_the_host(self) -> None:
        """A view is a window on the bytes, read-only if asked."""
        ptr, stream, a = self.pinned(), self.stream(), self.memory()
        view = np.frombuffer(self.driver.host_view(ptr, N, True), np.uint8)
        view[:] = np.arange(N, dtype=np.uint8)
        self.driver.copy_async(a, ptr, N, CopyKind.H2D, stream)
        self.driver.stream_synchronize(stream)
        assert (self.get(a, N, stream) == view).all()
        assert self.driver.host_view(ptr, N, False).readonly
        assert bytes(self.driver.host_view(ptr + 3, 2, False)) == b"\x03\x04"

    def test_managed_memory_is_shared(self) -> None:
        """The device writes, the host reads after a wait."""
        if not self.can.managed_memory:
            return
        ptr, stream = self.driver.malloc_managed(N, self.device), self.stream()
        self.driver.fill_async(ptr, 9, N, stream)
        self.driver.stream_synchronize(stream)
        assert bytes(self.driver.host_view(ptr, N, False)) == b"\x09" * N
        self.driver.free(ptr, self.device)

    # --- copies and fills ---------------------------------------------------------------------------------------
    def test_linear_copies(self) -> None:
        """Host to device, device to device, device to host, at odd offsets."""
        stream, a, b = self.stream(), self.memory(), self.memory()
        data = np.random.default_rng(0).integers(0, 256, N, np.uint8)
        self.put(a, data, stream)
        self.driver.copy_async(b + 7, a + 5, 1001, CopyKind.D2D, stream)
        assert (self.get(b + 7, 1001, stream) == data[5:1006]).all()

    def test_pitched_copies_touch_rows_only(self) -> None:
        """The bytes between rows stay."""
        stream, a = self.stream(), self.memory()
        rows = np.arange(5 * 7, dtype=np.uint8).reshape(5, 7)
        self.driver.fill_async(a, 0xEE, N, stream)
        self.driver.copy_2d_async(a, 64, rows.ctypes.data, 7, 7, 5, CopyKind.H2D, stream)
        got = self.get(a, 5 * 64, stream).reshape(5, 64)
        assert (got[:, :7] == rows).all()
        assert (got[:, 7:] == 0xEE).all()
        out = np.zeros((5, 9), np.uint8)
        self.driver.copy_2d_async(out.ctypes.data, 9, a, 64, 7, 5, CopyKind.D2H, stream)
        self.driver.stream_synchronize(stream)
        assert (out[:, :7] == rows).all()
        assert (out[:, 7:] == 0).all()
        self.refused(lambda: self.driver.copy_2d_async(a, 4, a + 512, 64, 7, 5, CopyKind.D2D, stream), 1, 12)

    def test_fills_and_nothing_of_size_zero(self) -> None:
        """A fill sets its bytes alone; size 0 is no work."""
        stream, a = self.stream(), self.memory()
        self.driver.fill_async(a, 1, N, stream)
        self.driver.fill_async(a + 3, 255, 5, stream)
        self.driver.fill_async(a, 7, 0, stream)
        self.driver.copy_async(a, a + 16, 0, CopyKind.D2D, stream)
        got = self.get(a, 16, stream)
        assert got.tolist() == [1] * 3 + [255] * 5 + [1] * 8

    # --- memory shared by file descriptor -----------------------------------------------------------------------
    def test_exported_memory_is_imported(self) -> None:
        """Virtual memory, its fd, and an import of it see the same bytes."""
        if not (self.can.virtual_memory and self.can.external_fd):
            return
        driver, stream, device = self.driver, self.stream(), self.device
        nbytes = driver.vmm_granularity(device)
        handle = driver.vmm_create(nbytes, device, True)
        ptr = driver.vmm_reserve(nbytes, device)
        driver.vmm_map(ptr, nbytes, handle, device)
        driver.fill_async(ptr, 6, nbytes, stream)
        driver.stream_synchronize(stream)
        memory = driver.import_memory_fd(driver.vmm_export_fd(handle), nbytes, False, False, device)
        other = driver.external_buffer(memory, 0, nbytes)
        assert other != ptr
        assert (self.get(other, N, stream) == 6).all()
        driver.fill_async(other, 7, N, stream)
        driver.stream_synchronize(stream)
        assert (self.get(ptr, N, stream) == 7).all()
        driver.external_buffer_free(other, device)
        driver.external_memory_destroy(memory)
        driver.vmm_unmap(ptr, nbytes)
        driver.vmm_free(ptr, nbytes)
        driver.vmm_release(handle)
