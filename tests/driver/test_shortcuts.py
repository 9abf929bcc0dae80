"""The CUDA driver's functions that may be called in the place of its methods. No device is needed."""

from __future__ import annotations

import pytest
from fake_cuda import install

from cuglue import testing
from cuglue.errors import DriverError, OutOfMemory


def test_they_are_the_functions_behind_the_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, script, _ = install(monkeypatch)
    quick = driver.shortcuts
    for call, name, args in (
        (quick.malloc, "mallocAsync", (64, 7)),
        (quick.free, "freeAsync", (4096, 7)),
        (quick.captures, "streamIsCapturing", (7,)),
    ):
        call(*args)
        assert script.only(name)[: len(args)] == args
    assert quick.current.__name__ == "get_current_stream"


def test_they_are_off_while_a_method_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever counts, traces or lets calls fail: each driver call must be seen."""
    driver, _, _ = install(monkeypatch)
    quick = driver.shortcuts
    assert quick.on
    with testing.faults.fail("free_async", driver=driver):
        assert not quick.on
        with testing.faults.counts(driver=driver):
            assert not quick.on
        assert not quick.on
    assert quick.on
    with testing.trace(only={"event_record"}, driver=driver):
        assert quick.on, "no method of theirs"
    with monkeypatch.context() as patch:
        patch.setattr(driver, "capture_status", lambda stream: None)
        patch.setattr(driver, "stream_current", lambda device: None)
        assert not quick.on
    assert quick.on


def test_among_several_devices_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, _ = install(monkeypatch, devices=2)
    assert driver.shortcuts is None
    driver.free_async = driver.free_async  # nothing to turn off
    del driver.free_async


def test_what_they_raise_is_told_as_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, _ = install(monkeypatch)
    quick = driver.shortcuts
    none = quick.failure(quick.error(2), "cudaMallocAsync", 64)
    assert isinstance(none, OutOfMemory)
    assert none.requested == 64
    other = quick.failure(quick.error(400), "cudaFreeAsync")
    assert isinstance(other, DriverError)
    assert (other.code, other.call) == (400, "cudaFreeAsync")
    assert isinstance(none, quick.refusals)
    assert isinstance(other, quick.refusals)
    assert isinstance(quick.error(2), quick.refusals)
    mine = KeyboardInterrupt()
    assert quick.failure(mine, "cudaFreeAsync") is mine
