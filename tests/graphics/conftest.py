"""The devices that graphics tests run on: the simulated one always, CUDA where the test is marked for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from graphics import subjects

import cuglue
from cuglue.driver.protocol import Driver
from cuglue.graphics.glcontext import GlContext, headless


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """The driver of this test: CUDA if it is marked ``gpu``, else a simulated device that must end without hazards."""
    if request.node.get_closest_marker("gpu") is not None:
        yield cuglue.current_driver()
        return
    with cuglue.use_driver("sim") as simulated:
        yield simulated
        simulated.check()
        assert simulated.hazards == []


@pytest.fixture(params=[False, True], ids=["first", "again"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that a test registers are mapped for the first time, or were mapped before, and go by a plan."""
    monkeypatch.setattr(subjects, "mapped_before", request.param)


@pytest.fixture
def context(driver: Driver) -> Iterator[GlContext]:
    """A headless context, current on the test's thread."""
    with headless() as made:
        yield made
