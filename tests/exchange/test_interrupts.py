"""Ctrl-C at every point of a copy of exported memory: what the driver has is waited for, and what it writes stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted

import cuglue
from cuglue import Access
from cuglue.core.block import Block
from cuglue.driver.protocol import CopyKind, MemoryType
from cuglue.driver.sim import SimDriver
from cuglue.errors import DriverError
from cuglue.exchange import ArrayView, BlockOwner, copies
from cuglue.exchange.copies import DeviceCopy, copy_on_device, in_flight
from cuglue.layout import Layout
from cuglue.testing import Latch
from cuglue.testing.faults import fail

N = 64
POINTS = "exchange/copies.py", "exchange/owner.py", "core/stream.py", "core/block.py"


class Case:
    """Memory that its home stream has written, exported to another one, and a third to write it next."""

    def __init__(self, driver: SimDriver) -> None:
        self.driver = driver
        self.home, self.consumer, self.next = (cuglue.as_stream(driver.Stream()) for _ in range(3))
        self.block = Block(driver.malloc(N, 0), N, self.home)
        driver.fill_async(self.block.ptr, 1, N, self.home.handle)
        self.block.finish(self.home, Access.WRITE)
        self.owner = BlockOwner(self.block, memory_type=MemoryType.DEVICE)

    def to_host(self) -> None:
        ArrayView(self.owner, self.block.ptr, Layout.of((N,), "u1")).numpy()

    def on_device(self) -> DeviceCopy:
        return copy_on_device(self.owner, self.block.ptr, N, self.consumer)

    def overwrite(self) -> None:
        """The next use of the memory, after all that is known of, and its end."""
        for stream, seq in self.owner.uses():
            self.next.wait_for(stream, seq)
        self.driver.fill_async(self.block.ptr, 2, N, self.next.handle)
        self.next.synchronize()
        self.driver.free(self.block.ptr, 0)


@pytest.fixture
def driver() -> Iterator[SimDriver]:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        yield driver
        driver.device_synchronize(0)
    assert driver.hazards == []


@pytest.mark.parametrize("copy", [Case.to_host, Case.on_device])
def test_what_comes_next_comes_after_the_copy(driver: SimDriver, copy: Callable[[Case], Any]) -> None:
    """The memory was overwritten, or given back, while the copy that was interrupted still read it."""
    held = None
    step = 0
    where: str | None = ""
    while where is not None:
        step += 1
        case = Case(driver)
        where = interrupted(lambda case=case: copy(case), step, *POINTS)
        case.overwrite()
        gc.collect()
        case.home.state.retire.drain(block=True)
        assert len(case.home.state.retire) == 0, where
        inventory = driver.inventory()
        inventory.pop("events"), inventory.pop("streams", None)
        held = inventory if held is None else held
        assert inventory == held, where
    assert step > 15


def test_host_memory_stays_until_the_device_has_written_it(
    driver: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went with the interrupted call, and the device wrote where something else was by then."""
    made: list[Any] = []

    def empty(*args: Any) -> Any:
        array = np.ndarray(*args)
        made.append(weakref.ref(array))
        return array

    monkeypatch.setattr(copies.np, "empty", empty)
    copy_async = driver.copy_async
    arrived: list[int] = []

    def watched(*args: Any) -> None:
        copy_async(*args)
        driver.stream_callback(args[-1], lambda: arrived.append(sum(ref() is not None for ref in made)))

    step = 0
    where: str | None = ""
    while where is not None:
        step += 1
        case = Case(driver)
        case.home.synchronize()
        made.clear()
        arrived.clear()
        with monkeypatch.context() as patch:
            patch.setattr(driver, "copy_async", watched)
            where = interrupted(case.to_host, step, *POINTS)
        gc.collect()
        case.home.synchronize()
        assert arrived in ([], [1]), where
        case.home.state.retire.drain(block=True)
        gc.collect()
        assert [ref() for ref in made if ref() is not None] == [], where
    assert step > 15


def test_host_memory_stays_where_waiting_failed(driver: SimDriver) -> None:
    """Though nobody counted what the stream has got."""
    stream, other = (cuglue.as_stream(driver.Stream()) for _ in range(2))
    array = np.zeros(N, "u1")
    alive = weakref.ref(array)
    ptr, event = driver.malloc(N, 0), driver.event_create(0)
    with Latch(other):
        driver.event_record(event, other.handle)
        driver.stream_wait_event(stream.handle, event)
        with fail("stream_synchronize"), pytest.raises(DriverError):
            with in_flight(array, stream):
                driver.copy_async(array.ctypes.data, ptr, N, CopyKind.D2H, stream.handle)
        del array
        gc.collect()
        stream.state.retire.drain()
        assert alive() is not None
    stream.synchronize()
    stream.state.retire.drain()
    gc.collect()
    assert alive() is None
    driver.event_destroy(event)
    driver.free(ptr, 0)


def test_host_memory_that_was_waited_for_is_let_go(driver: SimDriver) -> None:
    stream = cuglue.as_stream(driver.Stream())
    with in_flight(np.zeros(N, "u1"), stream):
        pass
    assert len(stream.state.retire) == 0
