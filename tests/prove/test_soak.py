"""The soak, for a second: it is flat and right, and says so of nothing that is not."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from source_tree import ROOT

from cuglue.driver.sim import SimDriver, memory

pytestmark = pytest.mark.gl
SHORT = ["--minutes", "0.02", "--every", "0.5", "--threads", "2", "--streams", "3"]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(memory, "_KEEP", memory._KEEP)  # a soak keeps less
    module = importlib.import_module("scripts.soak")
    with importlib.import_module("cuglue").use_driver(SimDriver()):
        yield module


def test_all_is_flat_and_right(soak: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(SHORT) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "flat, and every byte right"
    assert len(lines) >= 5
    done = dict(part.rsplit(" ", 1) for part in lines[-2].split(", "))
    assert sum(map(int, done.values())) > 20


def test_a_wrong_byte_ends_it(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = soak.Worker.blocks

    def wrong(worker: Any) -> None:
        right(worker)
        importlib.import_module("scripts.soak_work").compare("something", np.zeros(3, "u1"), np.ones(3, "u1"))

    monkeypatch.setattr(soak.Worker, "blocks", wrong)
    assert soak.main(SHORT) == 1
    assert "failed: Wrong: something: 3 of 3 bytes wrong, the first at 0" in capsys.readouterr().out


def test_a_descriptor_that_stays_open_is_seen(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[int] = []
    right = soak.Worker.step

    def leaking(worker: Any) -> None:
        opened.append(os.open("/dev/null", os.O_RDONLY))
        right(worker)

    monkeypatch.setattr(soak.Worker, "step", leaking)
    try:
        assert soak.main(SHORT) == 1
    finally:
        for fd in opened:
            os.close(fd)
    assert "failed: fds grew from" in capsys.readouterr().out


def test_a_step_that_hangs_is_told_with_everybodys_stack(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hung = threading.Event()
    monkeypatch.setattr(soak.Worker, "blocks", lambda worker: hung.wait())
    sample = soak.Soak(2, 2, 0, patience=0.5)
    looks = sample.run(5.0, 0.5, lambda look: None)
    assert sample.hanging
    assert sample.failures == ["a thread did not pause within 0.5 s"]
    assert len(looks) == 1
    assert "in step" in capfd.readouterr().err
    hung.set()
    for thread in threading.enumerate():
        if thread.name.startswith("soak-"):
            thread.join()
    sample.close()


@pytest.mark.parametrize("name", ["rss", "device", "fds", "objects", "waiting", "streams", "held"])
def test_whatever_grows_is_named(soak: ModuleType, name: str) -> None:
    cold = soak.Look(0, 0, 50.0, 0.0, 1, 1000, 0, 1, 0)
    warm = soak.Look(30, 10, 100.0, 8.0, 9, 200_000, 0, 7, 20)
    room = soak.ROOM[name]
    within = warm._replace(**{name: getattr(warm, name) + room})
    beyond = warm._replace(**{name: getattr(warm, name) + room + 1})
    assert soak.growth([cold, warm, within]) == []
    assert soak.growth([cold, warm, beyond])[0].startswith(f"{name} grew from")
    assert len(soak.growth([cold, warm, beyond], shared=True)) == (name != "device")
