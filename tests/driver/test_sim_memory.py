"""Memory of the simulated device: addresses, poison, reuse, limits, late uses."""

from __future__ import annotations

import numpy as np
import pytest

from cuglue.driver.protocol import CopyKind, MemoryType
from cuglue.driver.sim import HazardError, SimDriver
from cuglue.errors import DriverError, OutOfMemory, UnsupportedError, UsageError

N = 1000


def raw(sim: SimDriver, ptr: int) -> np.ndarray:
    """The bytes behind the oracle's back."""
    found = sim._space.find(ptr)
    assert found is not None
    return found.data


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4096, 100_000])
def test_addresses_are_aligned_and_new_bytes_poisoned(nbytes: int) -> None:
    sim = SimDriver()
    pointers = [sim.malloc(nbytes, 0) for _ in range(3)]
    for ptr in pointers:
        assert ptr % sim.capabilities(0).alignment == 0
        assert (raw(sim, ptr) == 0xCD).all()
        assert raw(sim, ptr).nbytes == nbytes
    assert len(set(pointers)) == 3
    assert sim.inventory()["bytes"] == 3 * nbytes


def test_freed_bytes_are_poisoned_and_the_address_comes_back() -> None:
    sim = SimDriver()
    ptr = sim.malloc(N, 0)
    data = raw(sim, ptr)
    sim.free(ptr, 0)
    assert (data == 0xDD).all()
    assert sim.malloc(N, 0) == ptr
    assert (data == 0xCD).all()


@pytest.mark.parametrize("ptr", [1, 0x1234])
def test_free_of_the_unknown_is_refused(ptr: int) -> None:
    sim = SimDriver()
    for call in (
        lambda: sim.free(ptr, 0),
        lambda: sim.free_async(ptr, 0, 0),
        lambda: sim.host_free(ptr),
    ):
        with pytest.raises(DriverError) as caught:
            call()
        assert (caught.value.code, caught.value.name) == (1, "cudaErrorInvalidValue")


def test_double_and_wrong_free_are_refused_and_change_nothing() -> None:
    sim = SimDriver(devices=2)
    ptr = sim.malloc(N, 0)
    for call in (
        lambda: sim.free(ptr + 512, 0),
        lambda: sim.free(ptr, 1),
        lambda: sim.free_async(ptr, 0, 0),
        lambda: sim.host_free(ptr),
    ):
        with pytest.raises(DriverError):
            call()
    assert sim.inventory()["malloc"] == 1
    sim.free(ptr, 0)
    with pytest.raises(DriverError):
        sim.free(ptr, 0)
    assert sim.inventory()["bytes"] == 0
    assert sim.memory_info(0).free == sim.memory_info(0).total


def test_memory_runs_out_and_comes_back() -> None:
    sim = SimDriver(memory_bytes=10 * 512)
    ptr = sim.malloc(8 * 512, 0)
    with pytest.raises(OutOfMemory) as caught:
        sim.malloc(3 * 512, 0)
    assert (caught.value.requested, caught.value.in_use) == (3 * 512, 8 * 512)
    with pytest.raises(MemoryError):
        sim.malloc_async(3 * 512, 0, 0)
    assert sim.memory_info(0).free == 2 * 512
    sim.free(ptr, 0)
    sim.malloc(10 * 512, 0)


def test_a_blocking_free_runs_what_is_queued() -> None:
    sim = SimDriver()
    stream, a, b = sim.stream_create(0), sim.malloc(N, 0), sim.malloc(N, 0)
    sim.fill_async(a, 1, N, stream)
    sim.copy_async(b, a, N, CopyKind.D2D, stream)
    sim.free(a, 0)
    assert (raw(sim, b) == 1).all()
    assert sim.hazards == []


# --- stream-ordered -------------------------------------------------------------------------------------------------
def test_the_same_stream_gets_its_memory_back_at_once() -> None:
    sim = SimDriver()
    stream = sim.stream_create(0)
    ptr = sim.malloc_async(N, stream, 0)
    sim.fill_async(ptr, 1, N, stream)
    sim.free_async(ptr, stream, 0)
    again = sim.malloc_async(N, stream, 0)
    assert again == ptr
    sim.fill_async(again, 2, N, stream)
    sim.stream_synchronize(stream)
    assert (raw(sim, again) == 2).all()
    assert sim.hazards == []


def test_another_stream_gets_it_only_after_a_wait_or_once_it_ran() -> None:
    sim = SimDriver()
    first, second = sim.stream_create(0), sim.stream_create(0)
    ptr = sim.malloc_async(N, first, 0)
    sim.free_async(ptr, first, 0)
    other = sim.malloc_async(N, second, 0)
    assert other != ptr
    event = sim.event_create(0)
    sim.event_record(event, first)
    sim.stream_wait_event(second, event)
    assert sim.malloc_async(N, second, 0) == ptr
    sim.free_async(other, second, 0)
    sim.stream_synchronize(second)
    assert sim.malloc_async(N, first, 0) == other


def test_use_after_a_stream_ordered_free_is_a_hazard_and_does_not_run() -> None:
    sim = SimDriver()
    stream = sim.stream_create(0)
    ptr = sim.malloc_async(N, stream, 0)
    sim.free_async(ptr, stream, 0)
    sim.fill_async(ptr, 1, N, stream)
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    (hazard,) = caught.value.hazards
    assert (hazard.kind, hazard.first.name, hazard.second.name) == (
        "use after free",
        "free_async",
        "fill_async",
    )
    assert (raw(sim, ptr) == 0xDD).all()


def test_a_free_that_does_not_wait_for_a_use_is_a_hazard() -> None:
    sim = SimDriver()
    first, second = sim.stream_create(0), sim.stream_create(0)
    ptr = sim.malloc_async(N, first, 0)
    sim.stream_synchronize(first)
    sim.fill_async(ptr, 1, N, second)
    sim.free_async(ptr, first, 0)
    with pytest.raises(HazardError) as caught:
        sim.device_synchronize(0)
    assert [(h.first.name, h.second.name) for h in caught.value.hazards] == [("fill_async", "free_async")]


def test_use_before_the_allocation_is_a_hazard() -> None:
    sim = SimDriver()
    first, second = sim.stream_create(0), sim.stream_create(0)
    ptr = sim.malloc_async(N, first, 0)
    sim.fill_async(ptr, 1, N, second)
    with pytest.raises(HazardError) as caught:
        sim.device_synchronize(0)
    assert caught.value.hazards[0].first.name == "malloc_async"


def test_the_pool_counts_until_it_is_trimmed() -> None:
    sim = SimDriver()
    stream = sim.stream_create(0)
    pointers = [sim.malloc_async(1024, stream, 0) for _ in range(4)]
    for ptr in pointers:
        sim.free_async(ptr, stream, 0)
    assert sim.inventory()["bytes"] == 0
    total, free = sim.memory_info(0).total, sim.memory_info(0).free
    assert total - free == 4096
    sim.pool_trim(0, 0)
    assert total - sim.memory_info(0).free == 4096, "the frees have not run"
    sim.stream_synchronize(stream)
    sim.pool_trim(2048, 0)
    assert total - sim.memory_info(0).free == 2048
    sim.pool_trim(0, 0)
    assert sim.memory_info(0).free == total


# --- host memory ----------------------------------------------------------------------------------------------------
def test_pinned_memory_is_read_when_the_copy_runs_pageable_when_it_is_queued() -> None:
    sim = SimDriver()
    stream, a, b, pinned = sim.stream_create(0), sim.malloc(8, 0), sim.malloc(8, 0), sim.host_alloc(8)
    pageable = np.full(8, 1, np.uint8)
    raw(sim, pinned)[:] = 1
    sim.copy_async(a, pinned, 8, CopyKind.H2D, stream)
    sim.copy_async(b, pageable.ctypes.data, 8, CopyKind.H2D, stream)
    raw(sim, pinned)[:] = 2
    pageable[:] = 2
    sim.stream_synchronize(stream)
    assert raw(sim, a)[0] == 2
    assert raw(sim, b)[0] == 1


def test_a_copy_to_pageable_memory_arrives_when_it_runs() -> None:
    sim = SimDriver()
    stream, a = sim.stream_create(0), sim.malloc(8, 0)
    target = np.zeros(8, np.uint8)
    sim.fill_async(a, 3, 8, stream)
    sim.copy_async(target.ctypes.data, a, 8, CopyKind.D2H, stream)
    assert (target == 0).all()
    sim.stream_synchronize(stream)
    assert (target == 3).all()


def test_freeing_pinned_memory_under_a_queued_copy_is_a_hazard() -> None:
    sim = SimDriver()
    stream, a, pinned = sim.stream_create(0), sim.malloc(8, 0), sim.host_alloc(8)
    sim.copy_async(a, pinned, 8, CopyKind.H2D, stream)
    sim.host_free(pinned)
    with pytest.raises(HazardError) as caught:
        sim.stream_synchronize(stream)
    assert caught.value.hazards[0].second.name == "host_free"


def test_two_dimensional_copies_move_rows_only() -> None:
    sim = SimDriver()
    stream, a = sim.stream_create(0), sim.malloc(5 * 16, 0)
    source = np.arange(5 * 7, dtype=np.uint8).reshape(5, 7)
    sim.copy_2d_async(a, 16, source.ctypes.data, 7, 7, 5, CopyKind.H2D, stream)
    target = np.zeros((5, 9), np.uint8)
    sim.copy_2d_async(target.ctypes.data, 9, a, 16, 7, 5, CopyKind.D2H, stream)
    sim.stream_synchronize(stream)
    assert (target[:, :7] == source).all()
    assert (target[:, 7:] == 0).all()
    assert (raw(sim, a).reshape(5, 16)[:, 7:] == 0xCD).all()


@pytest.mark.parametrize("bad", ["host as device", "device as host", "too long", "pitch", "value", "outside"])
def test_bad_copies_are_refused(bad: str) -> None:
    sim = SimDriver()
    a, pinned, host = sim.malloc(64, 0), sim.host_alloc(64), np.zeros(64, np.uint8)
    calls = {
        "host as device": lambda: sim.copy_async(a, pinned, 8, CopyKind.D2D, 0),
        "device as host": lambda: sim.copy_async(a, a, 8, CopyKind.H2D, 0),
        "too long": lambda: sim.copy_async(a + 60, host.ctypes.data, 8, CopyKind.H2D, 0),
        "pitch": lambda: sim.copy_2d_async(a, 4, host.ctypes.data, 8, 8, 2, CopyKind.H2D, 0),
        "value": lambda: sim.fill_async(a, 256, 8, 0),
        "outside": lambda: sim.fill_async(host.ctypes.data, 0, 8, 0),
    }
    with pytest.raises(DriverError) as caught:
        calls[bad]()
    assert caught.value.code == (12 if bad == "pitch" else 1)


def test_nothing_is_copied_or_filled_for_size_zero() -> None:
    sim = SimDriver()
    sim.copy_async(0, 0, 0, CopyKind.D2D, 0)
    sim.copy_2d_async(0, 0, 0, 0, 0, 5, CopyKind.D2D, 0)
    sim.fill_async(0, 0, 0, 0)
    assert sim.malloc(0, 0) == sim.host_alloc(0) == sim.malloc_async(0, 0, 0) == 0
    sim.free(0, 0)
    sim.host_free(0)
    with pytest.raises(DriverError):
        sim.malloc(-1, 0)


def test_addresses_are_told_apart() -> None:
    sim = SimDriver(devices=2)
    host = np.zeros(4)
    pointers = {
        sim.malloc(8, 1) + 4: (MemoryType.DEVICE, 1),
        sim.malloc_managed(8, 0): (MemoryType.MANAGED, 0),
        sim.host_alloc(8): (MemoryType.PINNED, 0),
        host.ctypes.data: (MemoryType.HOST, 0),
    }
    for ptr, expected in pointers.items():
        assert sim.pointer_info(ptr) == expected
    with pytest.raises(UnsupportedError):
        sim.host_view(host.ctypes.data, 8, False)


def test_capabilities_can_be_switched_off() -> None:
    sim = SimDriver(disable={"async_memory", "managed_memory"})
    assert not sim.capabilities(0).async_memory
    assert sim.capabilities(0).graphs
    for call in (
        lambda: sim.malloc_async(8, 0, 0),
        lambda: sim.malloc_managed(8, 0),
        lambda: sim.pool_trim(0, 0),
    ):
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.code == 801
    with pytest.raises(UsageError):
        SimDriver(disable={"everything"})


def test_storage_given_to_the_system_is_forgotten() -> None:
    sim = SimDriver()
    size = 100 << 20
    pointers = [sim.malloc(size, 0) for _ in range(4)]
    for ptr in pointers:
        sim.free(ptr, 0)
    known = [ptr for ptr in pointers if sim._space.find(ptr) is not None]
    assert 0 < len(known) < 4


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 62, 1 << 64])
def test_more_than_the_host_has_is_out_of_memory(nbytes: int) -> None:
    sim = SimDriver(memory_bytes=1 << 70)
    for allocate in (
        sim.host_alloc,
        lambda n: sim.malloc(n, 0),
        lambda n: sim.malloc_managed(n, 0),
        lambda n: sim.malloc_async(n, 0, 0),
    ):
        with pytest.raises(OutOfMemory):
            allocate(nbytes)
    assert sim.memory_info(0).free == 1 << 70
    assert sim.inventory()["bytes"] == 0
