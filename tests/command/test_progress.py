"""Progress: told as large transfers go on, on a thread that may use the device, and never felt by the transfer."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest

from cuglue import Runtime
from cuglue.command import pipeline, progress, reads, writes
from cuglue.command.slab import Slab
from cuglue.driver.sim import SimDriver
from cuglue.errors import DriverError, UsageError
from cuglue.testing import Latch
from cuglue.testing.faults import fail

N = 100_000


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SMALLEST_CHUNK", "LARGEST_CHUNK"):
        monkeypatch.setattr(pipeline, name, 16_384)
    monkeypatch.setattr(writes, "UPLOAD_FROM", 50_000)
    monkeypatch.setattr(writes, "DIRECT_BELOW", 0)
    monkeypatch.setattr(reads, "DOWNLOAD_FROM", 50_000)
    monkeypatch.setattr(Slab, "LARGEST", 49_999)
    for module in (reads, writes):
        monkeypatch.setattr(module, "STRIDE", 16_384)


class Told:
    """What a progress function was told, and by whom."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.threads: set[str] = set()

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))
        self.threads.add(threading.current_thread().name)

    def check(self, total: int, steps: int) -> None:
        """Growing, to the end."""
        deadline = time.monotonic() + 10
        while (not self.calls or self.calls[-1][0] < total) and time.monotonic() < deadline:
            time.sleep(0.001)
        done = [call[0] for call in self.calls]
        assert done == sorted(set(done))
        assert done[-1] == total
        assert len(done) <= steps
        assert {call[1] for call in self.calls} == {total}


def transfers(rt: Runtime, x: Any, told: Any) -> dict[str, Any]:
    data = np.full(N, 3, "u1")

    def from_pinned() -> None:
        with rt.command() as cmd:
            pinned = cmd.reserve_cpu(N)
            pinned[:] = 3
            cmd.write_to_gpu(x.descriptor(N), pinned, progress=told)

    def to_ordinary() -> None:
        with rt.command() as cmd:
            cmd.write_to_cpu(x.descriptor(N), np.empty(N, "u1"), progress=told)

    def to_pinned() -> None:
        with rt.command() as cmd:
            cmd.write_to_cpu(x.descriptor(N), cmd.reserve_cpu(N), progress=told)

    return {
        "create": lambda: rt.create(data, progress=told),
        "create_with_data": lambda: rt.command().create_with_data(data, progress=told),
        "write": lambda: rt.command().write_to_gpu(x.descriptor(N), data, progress=told),
        "write, pinned": from_pinned,
        "write_to_cpu": to_ordinary,
        "write_to_cpu, pinned": to_pinned,
        "read": lambda: rt.read(x, progress=told).result(),
        "read_async": lambda: rt.command().read_async([x.descriptor(N)], progress=told).result(),
    }


NAMES = list(transfers(None, None, None))  # type: ignore[arg-type] # only the names
ON_OUR_THREAD = ("pinned", "read")


@pytest.mark.parametrize("name", NAMES)
def test_progress_is_told_to_the_end(rt: Runtime, name: str) -> None:
    x, told = rt.create(np.full(N, 3, "u1")), Told()
    transfers(rt, x, told)[name]()
    told.check(N, 7)
    assert len(told.calls) > 1
    ours = any(word in name for word in ON_OUR_THREAD)
    assert told.threads == {"cuglue-futures" if ours else threading.current_thread().name}
    assert set(rt.read(x).result()) == {3}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_progress_function_raises_is_counted_and_not_felt(
    rt: Runtime, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = rt.create(np.full(N, 3, "u1"))
    told = Told()

    def broken(done: int, total: int) -> None:
        told(done, total)
        raise KeyError(done)

    with caplog.at_level(logging.CRITICAL):
        transfers(rt, x, broken)[name]()
        told.check(N, 7)
        deadline = time.monotonic() + 10
        while rt.progress_failures < len(told.calls) and time.monotonic() < deadline:
            time.sleep(0.001)
    assert rt.progress_failures == len(told.calls) > 1
    assert set(rt.read(x).result()) == {3}


def test_a_small_transfer_tells_its_end(rt: Runtime) -> None:
    told = Told()
    x = rt.create(bytes(10), progress=told)
    told.check(10, 1)
    again = Told()
    rt.read(x, progress=again).result()
    again.check(10, 1)
    empty = Told()
    rt.create(b"", progress=empty)
    assert empty.calls == []


def test_several_reads_are_one_transfer(rt: Runtime) -> None:
    a, b, told = rt.create(bytes(N)), rt.create(bytes(10)), Told()
    with rt.command() as cmd:
        cmd.read_async([a.descriptor(N), b.descriptor(10)], progress=told).result()
    told.check(N + 10, 8)


def test_a_progress_function_may_use_the_device_and_wait(rt: Runtime) -> None:
    x, y = rt.create(np.full(N, 3, "u1")), rt.create(b"yes")
    found: list[bytes] = []
    stream = rt.stream(1)

    def look(done: int, total: int) -> None:
        found.append(bytes(rt.read(y, stream=stream).result()))

    rt.read(x, progress=look).result()
    with rt.command() as cmd:
        cmd.write_to_cpu(x.descriptor(N), np.empty(N, "u1"), progress=look)
    deadline = time.monotonic() + 10
    while len(found) < 9 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert set(found) == {b"yes"}


def test_nothing_is_told_before_it_is_there(sim: SimDriver) -> None:
    with Runtime() as rt:
        stream, told = rt.stream(0), Told()
        x = rt.create(np.zeros(N, "u1"), stream=stream)
        rt.synchronize()
        with Latch(stream) as latch:
            future = rt.read(x, stream=stream, progress=told)
            time.sleep(0.05)
            assert told.calls == []
            latch.release()
        future.result()
        told.check(N, 7)


def test_a_transfer_that_fails_tells_no_end(sim: SimDriver) -> None:
    with Runtime() as rt:
        told = Told()
        x = rt.create(np.zeros(N, "u1"))
        with fail("copy_async", on=4), pytest.raises(DriverError):
            rt.command().write_to_gpu(x.descriptor(N), np.zeros(N, "u1"), progress=told)
        assert all(done < N for done, _ in told.calls)


@pytest.mark.parametrize("what", [1, "report", [print]])
def test_what_is_no_function_is_refused_before_anything_is_queued(sim: SimDriver, what: Any) -> None:
    with Runtime() as rt:
        x = rt.create(bytes(8))
        for transfer in (
            lambda: rt.create(bytes(8), progress=what),
            lambda: rt.read(x, progress=what),
            lambda: rt.command().write_to_cpu(x.descriptor(8), bytearray(8), progress=what),
        ):
            with pytest.raises(UsageError, match="progress"):
                transfer()
        assert rt.resource.bytes_outstanding == 8


def test_strides_are_64_mib() -> None:
    assert progress.STRIDE == 64 << 20
