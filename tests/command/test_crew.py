"""Threads that copy host bytes: every copy is made or left, none is lost, and nobody waits for another's transfer."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted

from cuglue import Runtime
from cuglue.command import crew as crew_module
from cuglue.command import pipeline, writes
from cuglue.command.crew import Crew
from cuglue.command.slab import Slab
from cuglue.driver.sim import SimDriver


def test_each_copy_is_made_once_and_named() -> None:
    source = [np.full(5000, number, "u1") for number in range(100)]
    target = [np.zeros(5000, "u1") for _ in source]
    with Crew() as crew:
        for number, (to, of) in enumerate(zip(target, source, strict=True)):
            crew.begin(number, to, of)
        found = [crew.end() for _ in source]
    assert sorted(found) == list(range(100))
    assert all((to == of).all() for to, of in zip(target, source, strict=True))


def test_what_a_copy_raises_is_raised_where_it_is_waited_for() -> None:
    with Crew() as crew:
        crew.begin("wrong", np.zeros(3), np.zeros(4))
        with pytest.raises(ValueError, match="broadcast"):
            crew.end()
        crew.begin("right", np.zeros(3), np.ones(3))
        assert crew.end() == "right"


def test_when_it_is_left_no_copy_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()
    gate = threading.Event()

    class Copies:
        @staticmethod
        def copyto(target: Any, source: Any) -> None:
            made["begun"] += 1
            gate.wait(10)
            made["ended"] += 1

    monkeypatch.setattr(crew_module, "np", Copies)
    timer = threading.Timer(0.1, gate.set)
    with Crew() as crew:
        for number in range(200):
            crew.begin(number, None, None)
        timer.start()
    assert made["begun"] == made["ended"] < 200, "what was not begun is left"


def test_nothing_of_a_transfer_is_kept() -> None:
    target = np.zeros(10_000, "u1")
    alive = weakref.ref(target)
    with Crew() as crew:
        crew.begin(1, target, np.ones(10_000, "u1"))
        crew.end()
    del target, crew
    gc.collect()
    for _ in range(100):
        if alive() is None:
            return
        threading.Event().wait(0.02)  # the thread is on its way to the next copy
    raise AssertionError("a thread keeps the arrays")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SMALLEST_CHUNK", "LARGEST_CHUNK"):
        monkeypatch.setattr(pipeline, name, 4096)
    monkeypatch.setattr(writes, "UPLOAD_FROM", 10_000)
    monkeypatch.setattr(writes, "DIRECT_BELOW", 0)
    monkeypatch.setattr(Slab, "LARGEST", 9_000)


@pytest.mark.usefixtures("small")
def test_a_progress_function_may_transfer_as_much_itself(sim: SimDriver) -> None:
    """On the thread that waits for its chunks: threads that waited for that transfer alone would never come."""
    with Runtime(driver=sim) as rt:
        inner: list[Any] = []

        def report(done: int, total: int) -> None:
            inner.append(rt.create(np.full(80_000, len(inner) % 256, "u1")))

        x = rt.create(np.full(100_000, 9, "u1"), progress=report)
        assert set(rt.read(x).result()) == {9}
        assert len(inner) > 2
        for number, buffer in enumerate(inner):
            assert set(rt.read(buffer).result()) == {number % 256}


@pytest.mark.usefixtures("small")
def test_an_interrupted_upload_ends_and_can_be_repeated(sim: SimDriver) -> None:
    with Runtime(driver=sim) as rt:
        x = rt.empty(70_000)

        def write() -> None:
            rt.command().write_to_gpu(x.descriptor(70_000), np.full(70_000, 5, "u1"))

        for step in range(1, 1000):
            if interrupted(write, step, "command/crew.py") is None:
                break
            x.trust()
            write()
        assert step > 20
        assert set(rt.read(x).result()) == {5}
