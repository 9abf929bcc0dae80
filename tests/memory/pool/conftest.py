"""Arrays without CuPy's device: what CuPy does with an allocator, done by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cuglue
from cuglue.core.device import device_state
from cuglue.core.stream import Stream
from cuglue.driver.sim import SimDriver
from cuglue.memory.streams import OwnStream

MIB = 1 << 20


@pytest.fixture
def new_stream(driver: Any) -> Callable[[], Stream]:
    """Makes streams of the driver under test."""
    state = device_state(driver, 0)
    return lambda: cuglue.as_stream(OwnStream(state))


@pytest.fixture
def device() -> Iterator[Callable[..., SimDriver]]:
    """Makes a simulated device with the memory one says, current until the end of the test; no hazard, no leak."""
    entered: list[Any] = []

    def make(mib: int = 4096, **options: Any) -> SimDriver:
        sim = SimDriver(memory_bytes=mib * MIB, **options)
        chosen = cuglue.use_driver(sim)
        chosen.__enter__()
        entered.append((chosen, sim))
        return sim

    yield make
    for chosen, sim in reversed(entered):
        state = device_state(sim, 0)
        state.retire.run_forgotten()
        sim.device_synchronize(0)
        state.retire.drain(block=True)
        chosen.__exit__(None, None, None)
        assert sim.hazards == []
        held = {
            k: n
            for k, n in sim.inventory().items()
            if k in ("malloc", "malloc_async", "vmm", "vmm_reserved") and n
        }
        assert not held, f"memory is left: {held}"
