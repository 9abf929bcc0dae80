"""The pool passes the suite of every resource, alone, in every place of a stack, and with each layout."""

from __future__ import annotations

from typing import Any

import pytest

from cuglue import (
    AsyncCudaResource,
    DebugGuardResource,
    DeviceMemoryResource,
    DirectCudaResource,
    GlobalDeviceBudget,
    InMemorySink,
    LoggingResource,
    PoolResource,
    Sliced,
    TrackingResource,
    testing,
)
from cuglue.memory.pool.layouts import Direct, Exclusive, Persistent

LIMIT = 256 << 20


class OnBoth(testing.ResourceSuite):
    """The suite on the simulated device, and marked ``gpu`` on a real one."""

    @pytest.fixture(autouse=True)
    def _on(self, driver: Any) -> None:
        self.driver = driver


class TestPool(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return PoolResource(AsyncCudaResource())


class TestPoolOverDirect(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return PoolResource(DirectCudaResource(mode="sync"))


class TestPoolUnderBudget(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return GlobalDeviceBudget(PoolResource(AsyncCudaResource()), LIMIT)


class TestPoolOverBudget(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return PoolResource(GlobalDeviceBudget(AsyncCudaResource(), LIMIT))


class TestPoolUnderGuard(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return DebugGuardResource(PoolResource(AsyncCudaResource()))


class TestPoolUnderAll(OnBoth):
    def make(self) -> DeviceMemoryResource:
        pool = PoolResource(TrackingResource(AsyncCudaResource()), max_bytes=LIMIT)
        return LoggingResource(GlobalDeviceBudget(pool, LIMIT), InMemorySink())


class TestSliced(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return PoolResource(AsyncCudaResource(), layout=[Sliced(1 << 20), Direct()])


class TestExclusive(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return PoolResource(AsyncCudaResource(), layout=[Exclusive(64 << 20, 100), Direct()])


class TestDirectLayout(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return PoolResource(AsyncCudaResource(), layout=[Direct(reclaim_at=32 << 20)])


class TestPersistentLayout(OnBoth):
    def make(self) -> DeviceMemoryResource:
        return PoolResource(AsyncCudaResource(), layout=[Persistent()])
