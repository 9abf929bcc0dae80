"""Every test of memory runs on a fresh simulated device, and marked ``gpu`` on a real one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import cuglue
from cuglue.core.device import device_state


@pytest.fixture(scope="session", autouse=True)
def _collect_only_what_is_new() -> Iterator[None]:
    """Thousands of collected tests would else be looked through at every ``gc.collect()``."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The driver; at the end nothing is left in flight, and the simulated device has seen no hazard and no leak."""
    if request.param == "cuda":
        yield cuglue.current_driver()
        _settle(cuglue.current_driver())
        return
    with cuglue.use_driver("sim") as sim:
        yield sim
        _settle(sim)
        assert sim.hazards == []
        held = {
            k: n for k, n in sim.inventory().items() if k in ("malloc", "malloc_async", "host_alloc") and n
        }
        assert not held, f"memory is left: {held}"


@pytest.fixture
def sim() -> Iterator[Any]:
    """A fresh simulated device, for what needs its looks inside."""
    with cuglue.use_driver("sim") as sim:
        yield sim
        _settle(sim)
        assert sim.hazards == []


def _settle(driver: Any) -> None:
    sys.last_exc = None  # type: ignore[assignment]
    gc.collect()
    for device in range(driver.device_count()):
        driver.device_synchronize(device)
        device_state(driver, device).retire.drain(block=True)
