"""What only a removed statement showed: each test here fails if one particular line of exchange goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

import cuglue
from cuglue import Access, testing
from cuglue.core.block import Block
from cuglue.core.stream import Stream
from cuglue.driver.protocol import CaptureMode, MemoryType
from cuglue.driver.sim import SimDriver
from cuglue.errors import CaptureError, ClosedError, DriverError
from cuglue.exchange import ArrayView, BlockOwner
from cuglue.exchange import view as view_module
from cuglue.exchange.copies import copy_on_device
from cuglue.exchange.tokens import ExportToken
from cuglue.layout import Layout
from cuglue.testing.faults import fail

N = 256


class Exported(NamedTuple):
    """A block written on its home stream, an owner that exports it, and two more streams."""

    driver: SimDriver
    block: Block
    owner: BlockOwner
    home: Stream
    consumer: Stream
    other: Stream

    @property
    def view(self) -> ArrayView:
        return ArrayView(self.owner, self.block.ptr, Layout.of((N,), "u1"))

    def fill(self, stream: Stream, value: int) -> None:
        """Work that nobody counts, as an array library queues it."""
        self.driver.fill_async(self.block.ptr, value, N, stream.handle)


def export(driver: SimDriver, memory_type: MemoryType) -> Exported:
    home, consumer, other = (cuglue.as_stream(driver.Stream()) for _ in range(3))
    block = Block(driver.malloc(N, 0), N, home)
    driver.fill_async(block.ptr, 1, N, home.handle)
    block.finish(home, Access.WRITE)
    return Exported(driver, block, BlockOwner(block, memory_type=memory_type), home, consumer, other)


@pytest.fixture
def driver() -> Iterator[SimDriver]:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        yield driver
        driver.device_synchronize(0)
    assert driver.hazards == []


@pytest.fixture
def device(driver: SimDriver) -> Exported:
    return export(driver, MemoryType.DEVICE)


@pytest.fixture
def host(driver: SimDriver) -> Exported:
    return export(driver, MemoryType.HOST)


def test_a_copy_to_the_host_is_refused_before_a_capture_sees_it(device: Exported) -> None:
    device.driver.capture_begin(device.home.handle, CaptureMode.THREAD_LOCAL)
    with testing.trace(only={"copy_async", "event_record", "stream_wait_event"}) as queued:
        with pytest.raises(CaptureError):
            device.view.numpy()
    assert queued == []
    device.driver.graph_destroy(device.driver.capture_end(device.home.handle))


def test_a_copy_to_the_host_that_could_not_be_waited_for_is_a_use(device: Exported) -> None:
    """Whoever overwrites the memory next, on a stream that came after the earlier uses, comes after the copy too."""
    device.block.prepare(device.other, Access.WRITE)
    with fail("stream_synchronize"), pytest.raises(DriverError):
        device.view.numpy()
    device.block.prepare(device.other, Access.WRITE)
    device.fill(device.other, 2)


def test_a_copy_on_the_device_is_a_use(device: Exported) -> None:
    device.block.prepare(device.other, Access.WRITE)
    copy = copy_on_device(device.owner, device.block.ptr, N, device.consumer)
    assert device.block.prepare(device.other, Access.WRITE) == 1
    device.fill(device.other, 2)
    device.other.synchronize()
    assert bytes(device.driver.host_view(copy.ptr, N, False)) == bytes([1]) * N


def test_memory_that_is_gone_is_not_copied(device: Exported) -> None:
    device.block.advance("deallocate")
    with testing.trace() as calls, pytest.raises(ClosedError):
        copy_on_device(device.owner, device.block.ptr, N, device.consumer)
    assert calls == []


def test_making_a_copy_frees_the_copies_that_were_dropped(device: Exported) -> None:
    for _ in range(5):
        copy = copy_on_device(device.owner, device.block.ptr, N, device.consumer)
        del copy
        device.driver.device_synchronize(0)
    assert device.driver.inventory()["malloc_async"] <= 2


def test_the_host_waits_for_uses_and_not_for_what_came_after(host: Exported) -> None:
    host.home.synchronize()
    with testing.Latch(host.home):  # a wait for the whole stream would never end
        assert (np.asarray(host.view) == 1).all()


def test_what_a_consumer_queued_after_the_last_event_counts(device: Exported) -> None:
    device.owner.order_consumer(device.consumer)
    device.owner.note_consumer(device.consumer)
    device.home.wait_for(device.consumer, device.consumer.seq)  # an event that covers all that was counted
    device.fill(device.consumer, 2)
    for stream, seq in device.owner.uses():
        device.home.wait_for(stream, seq)
    device.fill(device.home, 3)


def test_a_capsule_of_device_memory_holds_a_token(device: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capsule itself is made with the help of a CUDA driver, so here stands what it would keep."""
    kept: list[object] = []
    monkeypatch.setattr(view_module, "device_capsule", lambda *args, keep, **rest: kept.append(keep))
    device.view.__dlpack__(stream=device.consumer.handle, max_version=(1, 0))
    assert [export.how for export in device.owner.ledger.live()] == ["DLPack"]
    (token,) = kept
    assert isinstance(token, ExportToken)
    assert token.owner is device.owner
    del token
    kept.clear()
    assert device.owner.ledger.live() == ()


def test_memory_that_is_gone_is_not_exported_even_if_it_is_empty(host: Exported) -> None:
    empty = ArrayView(host.owner, host.block.ptr, Layout.of((0,), "u1"))
    assert empty.__array_interface__["shape"] == (0,)
    host.block.advance("deallocate")
    with pytest.raises(ClosedError):
        _ = empty.__array_interface__
