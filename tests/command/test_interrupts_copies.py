"""Ctrl-C at every point of an operation: host memory stays until the device is done with it, later work comes after."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted
from sample_kernels import INCREMENT

import cuglue
from cuglue import In, InOut, Out, Runtime
from cuglue.command import pipeline, reads, writes
from cuglue.command.hostmem import HostPool
from cuglue.testing import SimDriver

N = 64


class Case:
    """A runtime with a buffer that another stream used last, or the same one did."""

    def __init__(self, driver: SimDriver, *, apart: bool) -> None:
        self.rt = Runtime(driver=driver)
        self.own, self.other = self.rt.stream(0), self.rt.stream(1)
        self.x = self.rt.create(np.zeros(4 * N, "u1"), stream=self.own)
        self.y = self.rt.create(np.zeros(4 * N, "u1"), stream=self.own)
        self.pinned = self.rt.command(stream=self.own).reserve_cpu(4 * N)
        with self.rt.capture(self.own) as capture:
            self.launch()
        self.graph = capture.graph
        self.replay()
        self.user = self.other if apart else self.own
        for buffer in (self.x, self.y):
            self.rt.read(buffer, stream=self.user).result()

    def launch(self) -> None:
        self.rt.launch(INCREMENT, 1, N, InOut(self.x), N, 1, stream=self.own)

    def replay(self) -> None:
        self.graph.replay()

    def replay_elsewhere(self) -> None:
        self.graph.replay(self.rt.stream(2))

    def write(self) -> None:
        with self.rt.command(Out(self.x), stream=self.own) as cmd:
            cmd.write_to_gpu(self.x.descriptor(4 * N), np.full(4 * N, 9, "u1"))

    def write_alone(self) -> None:
        self.rt.command(stream=self.own).write_to_gpu(self.x.descriptor(4 * N), np.full(4 * N, 9, "u1"))

    def write_pinned(self) -> None:
        data = self.rt.command(stream=self.own).reserve_cpu(4 * N)
        self.rt.command(stream=self.own).write_to_gpu(self.x.descriptor(4 * N), data)

    def read(self) -> None:
        self.rt.read(self.x, stream=self.own).result()

    def read_and_drop(self) -> None:
        self.rt.read(self.x, stream=self.own)

    def write_to_cpu(self) -> None:
        with self.rt.command(In(self.x), stream=self.own) as cmd:
            cmd.write_to_cpu(self.x.descriptor(4 * N), bytearray(4 * N))

    def write_to_array(self) -> None:
        self.rt.command(stream=self.own).write_to_cpu(self.x.descriptor(4 * N), np.zeros(4 * N, "u1"))

    def write_to_pinned(self) -> None:
        into = self.rt.command(stream=self.own).reserve_cpu(4 * N)
        self.rt.command(stream=self.own).write_to_cpu(self.x.descriptor(4 * N), into)

    def create(self) -> None:
        self.rt.create(np.full(4 * N, 9, "u1"), stream=self.own).close()

    def clean_up(self) -> None:
        self.write_alone()
        self.rt.command(stream=self.own).memory_cleanup()

    def follow(self) -> None:
        """Everything written and read on another stream, and pinned memory taken again."""
        data = np.arange(4 * N, dtype="u1")
        for buffer in (self.x, self.y):
            buffer.trust()
            with self.rt.command(Out(buffer), stream=self.other) as cmd:
                cmd.write_to_gpu(buffer.descriptor(4 * N), data)
            assert bytes(self.rt.read(buffer, stream=self.other).result()) == data.tobytes()
        held = [self.rt.command(stream=self.own).reserve_cpu(4 * N) for _ in range(4)]
        for memory in held:
            memory[...] = 1
        self.graph.replay(self.other)
        found = self.rt.read(self.x, dtype="i4", stream=self.own).result()
        assert found.tolist() == (data.view("i4") + 1).tolist()

    def end(self) -> None:
        self.graph.close()
        self.x.close()
        self.y.close()
        del self.pinned
        self.rt.command(stream=self.own).memory_cleanup()
        self.rt.close()


OPERATIONS: list[Callable[[Case], None]] = [
    Case.launch,
    Case.replay,
    Case.replay_elsewhere,
    Case.write,
    Case.write_alone,
    Case.write_pinned,
    Case.read,
    Case.read_and_drop,
    Case.write_to_cpu,
    Case.write_to_array,
    Case.write_to_pinned,
    Case.create,
    Case.clean_up,
]


@pytest.mark.parametrize("apart", [False, True], ids=["its own stream", "another stream"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_an_interrupt_leaves_nothing_unordered_and_loses_no_memory(
    operation: Callable[[Case], None], apart: bool
) -> None:
    sweep(operation, apart)


@pytest.mark.parametrize("operation", [Case.write_alone, Case.write_to_cpu, Case.write_pinned])
def test_nor_does_one_in_a_transfer_by_pieces(
    operation: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name, value in (
        (writes, "DIRECT_BELOW", 8),
        (writes, "UPLOAD_FROM", 9),
        (reads, "DOWNLOAD_FROM", 9),
        (reads.Slab, "LARGEST", 8),
        (pipeline, "SMALLEST_CHUNK", 64),
    ):
        monkeypatch.setattr(owner, name, value)
    sweep(operation, apart=False)


@pytest.mark.parametrize(
    ("operation", "largest"), [(Case.write_alone, 4 * N), (Case.write_to_array, 4 * N), (Case.write_alone, N)]
)
def test_nor_does_one_where_the_slab_turns(
    operation: Callable[[Case], None], largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its halves has room for one transfer, which goes through it at once or in pieces."""
    monkeypatch.setattr(reads.Slab, "HALF", 4 * N)
    monkeypatch.setattr(reads.Slab, "LARGEST", largest)
    monkeypatch.setattr(writes, "DIRECT_BELOW", 0)
    sweep(operation, apart=False)


@pytest.mark.parametrize("apart", [False, True], ids=["its own stream", "another stream"])
@pytest.mark.parametrize(
    ("operation", "call"),
    [
        (Case.launch, "kernel_launch"),
        (Case.write_alone, "copy_async"),
        (Case.write_to_array, "copy_async"),
        (Case.replay, "graph_launch"),
    ],
)
def test_work_that_the_driver_got_before_the_interrupt_is_waited_for(
    operation: Callable[[Case], None], call: str, apart: bool, sim: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(sim, apart=apart)
    real = getattr(sim, call)

    def interrupted_on_return(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sim, call, interrupted_on_return)
        with pytest.raises(KeyboardInterrupt):
            operation(case)
    case.follow()
    case.end()


def test_a_replay_after_somebody_asked_is_waited_for(sim: SimDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(sim, apart=False)
    case.rt.command(stream=case.own).write_to_gpu(case.y.descriptor(4 * N), np.ones(4 * N, "u1"))
    case.rt.read(case.y, stream=case.other).result()  # that stream knows all work of the other one now
    real = sim.graph_launch

    def interrupted_on_return(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sim, "graph_launch", interrupted_on_return)
        with pytest.raises(KeyboardInterrupt):
            case.replay()
    case.follow()
    case.end()


def test_a_result_whose_taking_was_interrupted_is_there_when_asked_again(
    sim: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*anything: object) -> None:
        raise KeyboardInterrupt

    with Runtime(driver=sim) as rt:
        future = rt.read(rt.create(b"abcd"))
        with monkeypatch.context() as patch:
            patch.setattr(HostPool, "note_use", interrupt)
            with pytest.raises(KeyboardInterrupt):
                future.result()
        assert bytes(future.result()) == b"abcd"


def sweep(operation: Callable[[Case], None], apart: bool) -> None:
    """Interrupt the operation at each of its points in turn, and work on."""
    wrong: list[Any] = []
    for step in itertools.count(1):
        driver = SimDriver(seed=step)
        with cuglue.use_driver(driver):
            case = Case(driver, apart=apart)
            where = interrupted(lambda: operation(case), step)  # noqa: B023
            sys.last_exc = None  # type: ignore[assignment]
            gc.collect()
            try:
                case.follow()
            except Exception as error:  # noqa: BLE001 - told with where it was
                wrong.append((where, f"{type(error).__name__}: {str(error).splitlines()[:3]}"))
            else:
                case.end()
                del case
                gc.collect()
                left = {name: driver.inventory()[name] for name in ("host_alloc", "malloc", "malloc_async")}
                if any(left.values()) or driver.hazards:
                    wrong.append((where, left, driver.hazards))
        if where is None:
            assert step > 5
            break
    assert wrong == []
