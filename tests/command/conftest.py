"""Runtimes for the tests of commands: on the simulated device, and, marked ``gpu``, on CUDA."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from driver_calls import Calls, recorded

import cuglue
from cuglue.driver.sim import SimDriver


@pytest.fixture
def sim() -> Iterator[SimDriver]:
    """A fresh simulated device, current; at the end nothing may have been unordered."""
    driver = SimDriver()
    with cuglue.use_driver(driver):
        yield driver
    driver.check()


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Either driver, current."""
    if request.param == "cuda":
        yield cuglue.current_driver()
        return
    yield request.getfixturevalue("sim")


@pytest.fixture
def rt(driver: Any) -> Iterator[cuglue.Runtime]:
    """A runtime on either driver."""
    with cuglue.Runtime(driver=driver) as runtime:
        yield runtime


@pytest.fixture
def calls(driver: Any) -> Iterator[Calls]:
    """What the driver is asked from now on; not for what earlier tests left to be freed."""
    gc.collect()
    for state in vars(driver).get("_cuglue_devices", {}).values():
        state.retire.drain(block=True)
    with recorded(driver) as made:
        yield made
