"""Pages that grow in place."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

import cuglue
from cuglue import (
    Access,
    DeviceMemoryResource,
    ExpandableCudaResource,
    PoolResource,
    as_stream,
    testing,
)
from cuglue.core.device import device_state
from cuglue.driver.sim import SimDriver
from cuglue.errors import ArgumentError, OutOfMemory, UnsupportedError, UsageError, UseAfterFree
from cuglue.testing import faults, sweep

KIB, MIB = 1 << 10, 1 << 20


class TestExpandableUnderAPool(testing.ResourceSuite):
    @pytest.fixture(autouse=True)
    def _on(self, driver: Any) -> None:
        self.driver = driver

    def make(self) -> DeviceMemoryResource:
        return PoolResource(ExpandableCudaResource())


class TestExpandable(testing.ResourceSuite):
    @pytest.fixture(autouse=True)
    def _on(self, driver: Any) -> None:
        self.driver = driver

    def make(self) -> DeviceMemoryResource:
        return ExpandableCudaResource()


def fill(sim: Any, pool: PoolResource, block: Any, value: int, stream: int = 0) -> None:
    """Fill a block mapping by mapping: the simulated device takes no range across two of them."""
    source: Any = pool.upstream
    at = next(ptr for ptr, s in source._segments.items() if ptr <= block.ptr < ptr + s.reserved)
    for nbytes, _ in source._segments[at].mapped:
        low, high = max(at, block.ptr), min(at + nbytes, block.ptr + block.nbytes)
        if low < high:
            sim.fill_async(low, value, high - low, stream)
        at += nbytes


def test_one_page_grows_by_what_is_missing(device: Any) -> None:
    sim = device()
    pool = PoolResource(ExpandableCudaResource())
    a = pool.allocate(3 * MIB, 0)  # 4 MiB are mapped
    b = pool.allocate(4 * MIB, 0)
    assert b.ptr == a.ptr + 3 * MIB
    assert pool.bytes_reserved == 8 * MIB
    assert sim.inventory()["vmm_reserved"] == 1
    assert (pool.counters.grown, pool.counters.extended) == (1, 1)
    for block, value in ((a, 1), (b, 2)):
        fill(sim, pool, block, value)
    pool.deallocate(a)
    pool.deallocate(b)
    whole = pool.allocate(8 * MIB, 0)
    assert whole.ptr == a.ptr
    assert pool.bytes_reserved == 8 * MIB
    pool.deallocate(whole)
    pool.close()
    assert sim.inventory()["vmm"] == sim.inventory()["vmm_reserved"] == 0


def test_trimming_takes_away_the_end(device: Any) -> None:
    sim = device()
    pool = PoolResource(ExpandableCudaResource())
    blocks = [pool.allocate(8 * MIB, 0) for _ in range(6)]
    fill(sim, pool, blocks[0], 5)
    for block in blocks[2:]:
        fill(sim, pool, block, 6)
        pool.deallocate(block)
    assert pool.trim() == 32 * MIB
    assert pool.bytes_reserved == 16 * MIB
    host = np.zeros(100, np.uint8)
    sim.copy_async(host.ctypes.data, blocks[0].ptr, 100, cuglue.driver.protocol.CopyKind.D2H, 0)
    sim.stream_synchronize(0)
    assert (host == 5).all()
    again = pool.allocate(8 * MIB, 0)
    assert again.ptr == blocks[2].ptr
    for block in (blocks[0], blocks[1], again):
        pool.deallocate(block)
    pool.close()


def test_at_the_limit_memory_of_other_streams_is_unmapped(device: Any) -> None:
    sim = device()
    pool = PoolResource(ExpandableCudaResource(), max_bytes=64 * MIB)
    streams = [as_stream(sim.Stream()) for _ in range(5)]
    for stream in streams[1:]:
        block = pool.allocate(16 * MIB, stream)
        fill(sim, pool, block, 1, stream.handle)
        pool.deallocate(block)
    big = pool.allocate(64 * MIB, streams[0])
    fill(sim, pool, big, 1, streams[0].handle)
    assert pool.bytes_reserved == 64 * MIB
    pool.deallocate(big)
    pool.close()


def test_a_block_grows_to_what_was_reserved_and_then_there_is_another(device: Any) -> None:
    sim = device()
    pool = PoolResource(ExpandableCudaResource(most=16 * MIB))
    blocks = [pool.allocate(8 * MIB, 0) for _ in range(4)]
    assert sim.inventory()["vmm_reserved"] == 2
    for block in blocks:
        pool.deallocate(block)
    pool.close()


@pytest.mark.parametrize(
    ("disabled", "shareable", "reason"),
    [(("virtual_memory",), False, "virtual_memory"), (("external_fd",), True, "external_fd")],
)
def test_a_device_that_cannot_is_refused_by_name(
    device: Any, disabled: tuple[str, ...], shareable: bool, reason: str
) -> None:
    device(disable=disabled)
    pool = PoolResource(ExpandableCudaResource(shareable=shareable))
    with pytest.raises(UnsupportedError) as caught:
        pool.allocate(100)
    assert caught.value.reason == reason
    assert pool.bytes_reserved == 0
    pool.close()


def test_shareable_memory_is_exported(device: Any) -> None:
    sim = device()
    source = ExpandableCudaResource(shareable=True)
    block = source.allocate(3 * MIB, 0)
    found = source.export_fds(block)
    assert [nbytes for _, nbytes in found] == [4 * MIB]
    imported = sim.vmm_import_fd(found[0][0], 0)
    sim.vmm_release(imported)
    os.close(found[0][0])
    private = ExpandableCudaResource()
    other = private.allocate(100, 0)
    with pytest.raises(UnsupportedError, match="shareable=True"):
        private.export_fds(other)
    source.deallocate(block)
    private.deallocate(other)
    source.close()
    private.close()


@pytest.mark.parametrize("most", ["x", b"", 1.5, float("nan"), 0, -1, True, [], object()])
def test_a_limit_that_is_no_size(device: Any, most: Any) -> None:
    device()
    with pytest.raises(ArgumentError, match="most"):
        ExpandableCudaResource(most=most)


def test_a_limit_beyond_the_device_is_the_devices(device: Any) -> None:
    sim = device(mib=64)
    source = ExpandableCudaResource(most=1 << 70)
    source.deallocate(source.allocate(MIB, 0))
    source.close()
    with pytest.raises(ArgumentError, match="shareable"):
        ExpandableCudaResource(shareable=1)  # type: ignore[arg-type]
    assert not sim.inventory()["vmm_reserved"]


def test_only_its_own_live_blocks_are_exported_or_extended(device: Any) -> None:
    device()
    source, other = ExpandableCudaResource(shareable=True), ExpandableCudaResource()
    gone, foreign = source.allocate(MIB, 0), other.allocate(MIB, 0)
    source.deallocate(gone)
    for call in (
        source.export_fds,
        lambda block: source.extend(block, MIB, MIB),
        lambda block: source.shrink(block, MIB, MIB),
        lambda block: source.ending(block, MIB),
    ):
        for block in (gone, foreign):
            with pytest.raises(UseAfterFree):
                call(block)
        with pytest.raises(UsageError, match="block"):
            call(None)
    other.deallocate(foreign)
    source.close()
    other.close()


def test_no_memory_to_extend_by_goes_down_the_ladder(device: Any) -> None:
    device(mib=32)
    pool = PoolResource(ExpandableCudaResource())
    held = pool.allocate(20 * MIB, 0)
    with pytest.raises(OutOfMemory):
        pool.allocate(20 * MIB, 0)
    assert pool.bytes_reserved == 20 * MIB
    pool.deallocate(held)
    pool.close()


def test_a_mapping_that_cannot_be_taken_back_is_used_later(device: Any) -> None:
    device()
    pool = PoolResource(ExpandableCudaResource())
    first = pool.allocate(2 * MIB, 0)
    with (
        faults.fail("vmm_map", on=2, code=999),
        faults.fail("vmm_unmap"),
        pytest.raises(cuglue.errors.DriverError),
    ):
        pool.allocate(64 * MIB, 0)
    assert pool.bytes_reserved == 2 * MIB
    second = pool.allocate(64 * MIB, 0)
    assert second.ptr == first.ptr + 2 * MIB
    assert pool.bytes_reserved == 66 * MIB
    pool.deallocate(first)
    pool.deallocate(second)
    pool.close()


def test_an_address_may_be_given_out_again_while_its_block_is_freed(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = device()
    source = ExpandableCudaResource()
    first = source.allocate(2 * MIB, 0)
    free, taken = sim.vmm_free, []

    def quick_neighbour(ptr: int, nbytes: int) -> None:
        free(ptr, nbytes)
        if not taken:
            taken.append(source.allocate(2 * MIB, 0))

    monkeypatch.setattr(sim, "vmm_free", quick_neighbour)
    source.deallocate(first)
    assert taken[0].ptr == first.ptr
    assert source.bytes_outstanding == source.live_bytes == 2 * MIB
    source.deallocate(taken[0])
    assert source.bytes_outstanding == 0
    source.close()


def test_nothing_is_mapped_while_the_stream_captures(device: Any) -> None:
    sim = device()
    source = ExpandableCudaResource()
    stream = as_stream(sim.Stream())
    sim.capture_begin(stream.handle, cuglue.driver.protocol.CaptureMode.RELAXED)
    with pytest.raises(cuglue.errors.CaptureError):
        source.allocate(100, stream)
    sim.graph_destroy(sim.capture_end(stream.handle))
    source.close()


def test_nothing_is_lost_by_a_first_allocation_that_fails() -> None:
    def teardown(source: Any, result: Any) -> None:
        if result is not None:
            source.deallocate(result)
        device_state(source.driver, 0).retire.drain(block=True)
        source.close()
        device_state(source.driver, 0).retire.drain(block=True)

    sweep(
        lambda source: source.allocate(50 * MIB, 0),
        setup=lambda driver: ExpandableCudaResource(),
        teardown=teardown,
        accounting=lambda source: source.bytes_outstanding,
        name="a first allocation",
        atomic=False,
        keeps=("events",),
    ).check()


def _pool(driver: SimDriver) -> Any:
    pool = PoolResource(ExpandableCudaResource())
    return pool, [pool.allocate(3 * MIB, 0), pool.allocate(50 * MIB, 0)]


def _extend(subject: Any) -> Any:
    return subject[0].allocate(40 * MIB, 0)


def _trim(subject: Any) -> None:
    pool, blocks = subject
    if blocks[1].state.value == "live":
        pool.deallocate(blocks[1])
    pool.trim()


@pytest.mark.parametrize("operation", [_extend, _trim])
def test_nothing_is_lost(operation: Any) -> None:
    def teardown(subject: Any, result: Any) -> None:
        pool, blocks = subject
        for block in (*blocks, result):
            if block is not None and block.state.value == "live":
                pool.deallocate(block)
        device_state(pool.driver, 0).retire.drain(block=True)
        pool.close()
        device_state(pool.driver, 0).retire.drain(block=True)

    sweep(
        operation,
        setup=_pool,
        teardown=teardown,
        accounting=lambda subject: subject[0].bytes_outstanding,
        atomic=False,
        keeps=("events",),
    ).check()


def test_no_hazard_in_random_programs(device: Any) -> None:
    for seed in range(4):
        sim = SimDriver(seed=seed, memory_bytes=128 * MIB)
        with cuglue.use_driver(sim):
            pool = PoolResource(ExpandableCudaResource(), max_bytes=64 * MIB)
            choose = random.Random(seed)
            streams = [as_stream(sim.Stream()) for _ in range(3)]
            live: list[Any] = []
            for _ in range(150):
                if live and (len(live) > 8 or choose.random() < 0.3):
                    pool.deallocate(live.pop(choose.randrange(len(live))))
                if choose.random() < 0.05:
                    pool.trim()
                stream = choose.choice(streams)
                block = pool.allocate(choose.choice([1000, 300 * KIB, 3 * MIB, 5 * MIB]), stream)
                user = choose.choice(streams)
                block.prepare(user, Access.WRITE)
                fill(sim, pool, block, 1, user.handle)
                block.finish(user, Access.WRITE)
                live.append(block)
            for block in live:
                pool.deallocate(block)
            sim.device_synchronize(0)
            device_state(sim, 0).retire.drain(block=True)
            pool.close()
            assert sim.hazards == []
            assert sim.inventory()["vmm"] == 0
