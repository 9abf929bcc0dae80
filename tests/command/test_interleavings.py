"""Random interleavings over four streams with every driver call failing in turn: no wrong byte, nothing lost.

After a failure a buffer holds what it held, or what it should hold, or reading it says that it was never written; all
others hold exactly what they should. Nothing is unordered, and in the end the driver holds nothing.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from sample_kernels import INCREMENT

import cuglue
from cuglue import In, InOut, Kernel, Out, Runtime
from cuglue.driver.sim import SimDriver
from cuglue.errors import CuglueError, SeveralErrors, UnwrittenError
from cuglue.testing.numbered import UNKNOWN, NumberedCalls

N = 32
STEPS = 24
BAD = None  # the value of a buffer that was never written
ENQUEUES = ("copy_async", "kernel_launch", "graph_launch")
COPY = Kernel(
    "copy_ints",
    'extern "C" __global__ void copy_ints(const int* x, int* y) { y[threadIdx.x] = x[threadIdx.x]; }',
    sim=lambda grid, block, x, y: y.__setitem__(slice(None), x),
)


class Program:
    """One random program; the same seed takes the same steps, whatever fails."""

    def __init__(self, driver: Any, seed: int, failing: int) -> None:
        self.choose = random.Random(seed)
        self.calls = NumberedCalls()
        self.failing = failing
        self.rt = Runtime(driver=driver)
        self.streams = [self.rt.stream(i) for i in range(4)]
        self.values: list[int | None] = [1, 2, 3, 4]
        self.buffers = [
            self.rt.create(np.full(N, value, "i4"), stream=stream)
            for value, stream in zip(self.values, self.streams, strict=True)
        ]
        self.reads: list[tuple[Any, int]] = []
        self.failed = False
        self.failed_call = ""
        with self.rt.capture(self.streams[0]) as capture:
            self.rt.launch(INCREMENT, 1, N, InOut(self.buffers[0]), N, 1, stream=self.streams[0])
        self.graph = capture.graph
        self.rt.synchronize()

    def step(self) -> None:
        """One step. The choices come first: they do not depend on what fails."""
        names = ("write", "launch", "launch", "add", "read", "read", "compare", "replay", "renew", "cleanup")
        name = self.choose.choice(names)
        target, source = self.choose.sample(range(4), 2)
        number, stream = self.choose.randrange(1000), self.choose.choice(self.streams)
        before = self.values[target]
        try:
            after = getattr(self, name)(target, source, number, stream)
        except (UnwrittenError, SeveralErrors):
            assert BAD in (before, self.values[source])
            return
        except CuglueError:
            assert not self.failed, "a second failure"
            self.failed = True
            with self.undisturbed():
                self.settle(0 if name == "replay" else target, before)
            if name in ("write", "launch", "add", "replay") and self.failed_call in ENQUEUES:
                assert self.values[0 if name == "replay" else target] is BAD
            return
        if after is not None:
            where, value = after
            self.values[where] = value

    def settle(self, target: int, before: int | None) -> None:
        """Find out what the buffer of a failed step holds."""
        try:
            found = set(self.rt.read(self.buffers[target], dtype="i4").result().tolist())
        except UnwrittenError:
            self.values[target] = BAD
            return
        (value,) = found
        assert self.values[target] is not BAD or value != before
        self.values[target] = value

    # --- the steps: each gives (index, new value) of what it changed
    def write(self, target: int, source: int, number: int, stream: Any) -> tuple[int, int | None]:
        data = np.full(N, number, "i4")
        with self.rt.command(stream=stream) as cmd:
            cmd.write_to_gpu(self.buffers[target].descriptor(N, "i4"), data)
        data[:] = -1
        return target, number

    def launch(self, target: int, source: int, number: int, stream: Any) -> tuple[int, int | None]:
        x, y = self.buffers[source], self.buffers[target]
        skipped = self.rt.launch(COPY, 1, N, In(x), Out(y), stream=stream)
        return target, self.values[source] if skipped is None else BAD

    def add(self, target: int, source: int, number: int, stream: Any) -> tuple[int, int | None]:
        skipped = self.rt.launch(INCREMENT, 1, N, InOut(self.buffers[target]), N, number, stream=stream)
        return target, self.plus(target, number) if skipped is None else BAD

    def replay(self, target: int, source: int, number: int, stream: Any) -> tuple[int, int | None]:
        skipped = self.graph.replay(stream if number % 2 else None)
        return 0, self.plus(0, 1) if skipped is None else BAD

    def plus(self, target: int, number: int) -> int | None:
        value = self.values[target]
        assert value is not BAD
        return value + number

    def read(self, target: int, source: int, number: int, stream: Any) -> None:
        value = self.values[target]
        future = self.rt.read(self.buffers[target], dtype="i4", stream=stream)
        assert value is not BAD
        self.reads.append((future, value))

    def compare(self, target: int, source: int, number: int, stream: Any) -> None:
        if self.reads:
            future, value = self.reads.pop(number % len(self.reads))
            assert set(future.result().tolist()) == {value}

    def renew(self, target: int, source: int, number: int, stream: Any) -> tuple[int, int | None] | None:
        if target == 0:
            return None  # the graph's
        made = self.rt.create(np.full(N, number, "i4"), stream=stream)
        self.buffers[target].close()
        self.buffers[target] = made
        return target, number

    def cleanup(self, target: int, source: int, number: int, stream: Any) -> None:
        with self.rt.command(stream=stream) as cmd:
            cmd.memory_cleanup()

    # --- running it
    def fails(self, number: int, name: str) -> int | None:
        if number != self.failing:
            return None
        self.failed_call = name
        return UNKNOWN

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        failing, self.failing = self.failing, 0
        yield
        self.failing = failing

    def run(self) -> int:
        """Take the steps, check every byte, close everything; how many driver calls there were."""
        with self.calls.of(self.rt.driver):
            self.calls.arm(self.fails)
            for _ in range(STEPS):
                self.step()
            self.close()
            return len(self.calls.disarm())

    def close(self) -> None:
        with self.undisturbed():
            for future, value in self.reads:
                assert set(future.result().tolist()) == {value}
            for buffer, value in zip(self.buffers, self.values, strict=True):
                if value is BAD:
                    with pytest.raises(UnwrittenError):
                        self.rt.read(buffer)
                else:
                    assert set(self.rt.read(buffer, dtype="i4").result().tolist()) == {value}
        self.reads.clear()
        for thing in (*self.buffers, self.graph, self.rt):
            try:
                thing.close()
            except CuglueError:
                thing.close()  # what could not be given back is given back now
        self.buffers.clear()


def run_one(driver: Any, seed: int, failing: int) -> int:
    program = Program(driver, seed, failing)
    try:
        return program.run()
    finally:
        program.rt.close()


def everything_given_back(driver: SimDriver) -> None:
    gc.collect()
    state = driver._cuglue_devices[0]  # type: ignore[attr-defined]
    for _ in range(2):
        state.retire.drain(block=True)
    driver.check()
    assert driver.hazards == []
    held = driver.inventory()
    left = {
        name: held[name]
        for name in ("bytes", "host_alloc", "streams", "executables", "graphs")
        if held.get(name)
    }
    assert left == {}


@pytest.mark.parametrize("seed", range(3))
def test_every_driver_call_failing_in_turn(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # what is given back later is logged
    failing = calls = 0
    while failing <= calls:
        driver = SimDriver(seed=seed)
        with cuglue.use_driver(driver):
            made = run_one(driver, seed, failing)
            everything_given_back(driver)
        calls = calls or made
        failing += 1
    assert calls > 100


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_driver_calls_failing_in_turn_on_cuda(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    driver = cuglue.current_driver()
    calls = run_one(driver, seed, 0)
    for failing in range(1 + seed, calls, 11):
        run_one(driver, seed, failing)
