"""What only a removed statement showed: each test here fails if one particular line of memory goes."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import cuglue
from cuglue import Access, testing
from cuglue.core.device import device_state
from cuglue.core.stream import Stream, as_stream
from cuglue.driver.protocol import CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.memory.streams import OwnStream
from cuglue.memory.table import BlockTable


def test_arrays_that_only_the_collector_finds_make_room() -> None:
    """A resource without pending frees has nothing to reap: what the collector left is run before trying again."""
    driver = SimDriver(memory_bytes=1 << 20)
    with cuglue.use_driver(driver), cuglue.DirectCudaResource() as resource:
        first = resource.malloc(600 << 10)
        cycle: list[Any] = [first]
        cycle.append(cycle)
        enabled = gc.isenabled()
        gc.disable()
        try:
            del first, cycle
            second = resource.malloc(600 << 10)
        finally:
            if enabled:
                gc.enable()
        assert second.ptr
        del second


def test_arrays_that_only_the_collector_finds_make_room_while_a_stream_captures() -> None:
    """Nothing is waited for then, so that no reap runs what the collector left."""
    driver = SimDriver(memory_bytes=1 << 20)
    with cuglue.use_driver(driver), cuglue.DirectCudaResource() as resource:
        cycle: list[Any] = [resource.malloc(600 << 10)]
        cycle.append(cycle)
        capturing = as_stream(driver.Stream())
        driver.capture_begin(capturing.handle, CaptureMode.RELAXED)
        enabled = gc.isenabled()
        gc.disable()
        try:
            del cycle
            second = resource.malloc(600 << 10)
        finally:
            if enabled:
                gc.enable()
            driver.graph_destroy(driver.capture_end(capturing.handle))
        assert second.ptr
        del second


def test_a_block_that_an_interrupt_keeps_from_its_caller_is_in_no_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add = BlockTable.add

    def interrupted(table: BlockTable, block: Any) -> None:
        add(table, block)
        raise KeyboardInterrupt

    with cuglue.use_driver(SimDriver()), cuglue.DirectCudaResource() as resource:
        monkeypatch.setattr(BlockTable, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resource.allocate(64)
        assert resource.bytes_outstanding == 0
        assert resource.live_blocks() == []


def test_a_block_given_back_keeps_no_reader_alive() -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver), cuglue.AsyncCudaResource() as resource:
        home, reader = driver.Stream(), driver.Stream()
        block = resource.allocate(64, home)
        record = as_stream(reader)
        block.prepare(record, Access.READ)
        block.finish(record, Access.READ)
        resource.deallocate(block)
        assert block.state is cuglue.BlockState.RETIRED
        driver.device_synchronize(0)
        del record, reader
        assert driver.inventory()["streams"] == 1
        resource.reap_pending()


def test_closing_after_the_last_array_died_warns_about_nothing() -> None:
    """What its finaliser left was not run yet: the next allocation would have done that."""
    driver = SimDriver()
    with cuglue.use_driver(driver):
        for make in (cuglue.DirectCudaResource, cuglue.AsyncCudaResource):
            with make() as resource:
                resource.malloc(64)
            assert driver.inventory()["malloc_async"] == 0


def test_reaping_what_is_known_to_be_free_waits_for_nothing() -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver), cuglue.AsyncCudaResource() as resource:
        own = driver.Stream()
        stream = as_stream(own)
        resource.deallocate(resource.allocate(64, own))
        stream.synchronize()
        with testing.Latch(own):  # a wait for the whole stream would never end
            resource.reap_pending()
            assert resource.bytes_outstanding == 0


def test_a_free_that_has_not_run_is_not_counted_as_done() -> None:
    """The free is an operation of its own: what came before it may be done, and known to be."""
    driver = SimDriver()
    with cuglue.use_driver(driver), cuglue.AsyncCudaResource() as resource:
        own = driver.Stream()
        block = resource.allocate(64, own)
        as_stream(own).synchronize()
        latch = testing.Latch(own.ptr)  # by its number: the library counts no operation
        resource.deallocate(block)
        resource.reap_pending(block=False)
        assert resource.bytes_outstanding == 64
        latch.close()
        resource.reap_pending()
        assert resource.bytes_outstanding == 0


def test_a_free_that_was_interrupted_is_counted_when_it_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is missing then. The reap gives it one: of an operation that came last, and has not run."""

    def interrupt(stream: Stream) -> int:
        raise KeyboardInterrupt

    driver = SimDriver()
    with cuglue.use_driver(driver), cuglue.AsyncCudaResource() as resource:
        own = driver.Stream()
        block = resource.allocate(64, own)
        as_stream(own).synchronize()
        latch = testing.Latch(own.ptr)  # by its number: the library counts no operation
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "submit", interrupt)
            with pytest.raises(KeyboardInterrupt):
                resource.deallocate(block)
        resource.reap_pending(block=False)
        assert resource.bytes_outstanding == 64
        latch.close()
        driver.device_synchronize(0)
        resource.reap_pending(block=False)
        assert resource.bytes_outstanding == 0
        latch = testing.Latch(own.ptr)
        resource.deallocate(resource.allocate(64, own))
        resource.reap_pending(block=False)
        assert resource.bytes_outstanding == 64, "what came later was taken for done with it"
        latch.close()
        resource.reap_pending()


def test_a_stream_of_our_own_is_destroyed_with_its_last_user() -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        state = device_state(driver, 0)
        stream = as_stream(OwnStream(state))
        assert driver.inventory()["streams"] == 1
        del stream
        state.retire.drain()
        assert driver.inventory()["streams"] == 0
