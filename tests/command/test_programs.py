"""Random programs over four streams against a model that knows every value: no wrong byte, and nothing unordered."""

from __future__ import annotations

import gc
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from sample_kernels import INCREMENT, SAXPY

import cuglue
from cuglue import Direct, In, InOut, Out, Runtime, Sliced
from cuglue.driver.sim import SimDriver

N = 64


class Program:
    """One program: buffers of one value each, what that value should be, and reads that are still to be compared."""

    def __init__(self, rt: Runtime, seed: int) -> None:
        self.rt = rt
        self.choose = random.Random(seed)
        self.streams = [rt.stream(i) for i in range(4)]
        self.live: list[tuple[Any, float]] = []
        self.expected: list[tuple[Any, float]] = []
        self.graphs: list[tuple[Any, int, float]] = []  # graph, index of its buffer, what a replay adds
        self.done: Counter[str] = Counter()

    def stream(self) -> Any:
        return self.choose.choice(self.streams)

    def pick(self) -> int:
        return self.choose.randrange(len(self.live))

    def create(self) -> None:
        number = float(self.choose.randrange(100))
        self.live.append((self.rt.create(np.full(N, number, "f4"), stream=self.stream()), number))

    def write(self) -> None:
        index, number = self.pick(), float(self.choose.randrange(100))
        buffer, _ = self.live[index]
        data = np.full(N, number, "f4")
        self.rt.command(stream=self.stream()).write_to_gpu(buffer.descriptor(N, "f4"), data)
        data[:] = -1
        self.live[index] = buffer, number

    def launch(self) -> None:
        source, target = self.pick(), self.pick()
        if source == target:
            return
        factor = float(self.choose.choice((0.5, 1, 2)))
        x, y = self.live[source][0], self.live[target][0]
        self.rt.launch(SAXPY, 1, N, In(x), Out(y), factor, N, stream=self.stream())
        self.live[target] = y, self.live[source][1] * factor

    def batch(self) -> None:
        index = self.pick()
        buffer, number = self.live[index]
        with self.rt.command(InOut(buffer), stream=self.stream()) as cmd, self.rt.empty(4 * N) as half:
            cmd.kernel(SAXPY, 1, N, buffer, Out(half), 2.0, N)
            cmd.kernel(SAXPY, 1, N, In(half), buffer, 0.25, N)
            self.expected.append((cmd.read_async(half.descriptor(N, "f4")), number * 2))
        self.live[index] = buffer, number * 0.5

    def read(self) -> None:
        buffer, number = self.live[self.pick()]
        self.expected.append((self.rt.read(buffer, dtype="f4", stream=self.stream()), number))

    def compare(self) -> None:
        if self.expected:
            future, number = self.expected.pop(self.choose.randrange(len(self.expected)))
            assert set(future.result()) == {number}

    def forget(self) -> None:
        if self.expected:
            self.expected.pop(self.choose.randrange(len(self.expected)))

    def drop(self) -> None:
        index = self.pick()
        if len(self.live) > 3 and all(index != own for _, own, _ in self.graphs):
            buffer, _ = self.live.pop(index)
            self.graphs = [(graph, own - (own > index), by) for graph, own, by in self.graphs]
            if self.choose.random() < 0.5:
                buffer.close()

    def capture(self) -> None:
        index, stream = self.pick(), self.stream()
        buffer, _ = self.live[index]
        times = self.choose.randrange(1, 4)
        view = buffer.array((N,), "f4").view("i4")  # the bits of small floats are integers to be counted
        self.rt.command(InOut(buffer), stream=stream)  # the capture waits for nobody
        with self.rt.capture(stream) as capture:
            for _ in range(times):
                self.rt.launch(INCREMENT, 1, N, InOut(view), N, 1, stream=stream)
        self.graphs.append((capture.graph, index, times))

    def replay(self) -> None:
        if self.graphs:
            graph, index, times = self.choose.choice(self.graphs)
            buffer, number = self.live[index]
            graph.replay(self.stream())
            bits = np.full(1, number, "f4").view("i4") + np.int32(times)
            self.live[index] = buffer, float(bits.view("f4")[0])

    def close(self) -> None:
        if self.graphs:
            self.graphs.pop(self.choose.randrange(len(self.graphs)))[0].close()

    def run(self, steps: int) -> None:
        weights = {
            "create": 2, "write": 3, "launch": 6, "batch": 2, "read": 4, "compare": 3, "forget": 2, "drop": 2,
            "capture": 1, "replay": 3, "close": 1,
        }  # fmt: skip
        for _ in range(3):
            self.create()
        for name in self.choose.choices(list(weights), list(weights.values()), k=steps):
            getattr(self, name)()
            self.done[name] += 1
        while self.expected:
            self.compare()
        for buffer, number in self.live:
            assert set(self.rt.read(buffer, dtype="f4", stream=self.stream()).result()) == {number}
        for graph, _, _ in self.graphs:
            graph.close()
        for buffer, _ in self.live:
            buffer.close()
        assert len(self.done) == len(weights), self.done  # every kind of step was taken


MEMORIES: list[Any] = [None, [Direct()], [Sliced(1 << 16)]]


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed: int) -> None:
    driver = SimDriver(seed=seed)
    with cuglue.use_driver(driver):
        with Runtime(memory=MEMORIES[seed % 3]) as rt:
            Program(rt, seed).run(150)
        del rt  # pools know their streams
        gc.collect()
        driver.check()
        assert driver.hazards == []
        state = driver._cuglue_devices[0]  # type: ignore[attr-defined]
        state.retire.drain(block=True)
        state.retire.drain(block=True)
        held = driver.inventory()
        assert (held["bytes"], held["streams"], held["executables"]) == (0, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(0, 60, 5))
def test_random_programs_on_cuda(seed: int) -> None:
    with Runtime(driver="cuda", memory=MEMORIES[seed % 3]) as rt:
        Program(rt, seed).run(150)
