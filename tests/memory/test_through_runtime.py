"""What a resource promises, seen through a runtime over it (contracts B17, B24, B29, B32)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from memory_tools import new_stream

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    DirectCudaResource,
    GlobalDeviceBudget,
    InMemorySink,
    LoggingResource,
    Runtime,
    testing,
)
from cuglue.errors import CuglueError, OutOfBudget, StreamMisuse, UsageError


def test_B17_what_cannot_track_says_so_of_its_buffers_too(driver: Any) -> None:
    resource = DirectCudaResource()
    with Runtime(resource=resource) as runtime, runtime.empty(64):
        (block,) = resource.live_blocks()
        for call in (resource.prepare_block_use, resource.finish_block_use):
            with pytest.raises(StreamMisuse, match="unsupported"):
                call(block.id, 0, Access.READ)
        assert resource.bytes_outstanding == 64
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


def test_B24_reuse_through_a_runtime_is_stream_ordered(driver: Any) -> None:
    """Write, drop, make again on the same stream: only the last one's bytes are ever seen."""
    resource = AsyncCudaResource()
    stream = new_stream()
    with Runtime(resource=resource) as runtime:
        for round_ in range(32):
            data = np.full(4096, round_, np.uint8)
            with runtime.create(data, stream=stream) as buffer:
                assert (runtime.read(buffer, stream=stream).result() == data).all()
    resource.reap_pending()
    assert resource.bytes_outstanding == 0


def test_B29_the_budget_reaps_before_a_runtime_is_refused(driver: Any) -> None:
    """Allocate to the limit, give back, allocate to the limit: nobody checks the budget before it could make room."""
    sink = InMemorySink()
    resource = GlobalDeviceBudget(LoggingResource(AsyncCudaResource(), sink), 4096)
    with Runtime(resource=resource) as runtime:
        for _ in range(3):
            runtime.create(np.zeros(4096, np.uint8)).close()
        with runtime.create(np.zeros(4096, np.uint8)) as full, pytest.raises(OutOfBudget) as caught:
            runtime.create(np.zeros(1, np.uint8))
        assert (caught.value.current, caught.value.requested, caught.value.limit) == (4096, 1, 4096)
        assert full.closed
    resource.reap_pending()
    assert resource.reserved_bytes == 0
    assert "reap_pending" in [record.action.value for record in sink.snapshot()]


def test_B32_cold_threads_get_one_runtime(driver: Any) -> None:
    got: list[Any] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait(30)
        got.append(cuglue.runtime())

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(got) == 8
    assert len({id(runtime) for runtime in got}) == 1
    assert cuglue.runtime(0) is got[0]
    with Runtime(resource=AsyncCudaResource()) as other:
        assert other is not got[0], "one made with a resource is nobody else's"
        assert cuglue.runtime() is got[0]
    got[0].close()


def test_B32_a_device_that_is_not_there_has_no_runtime(driver: Any) -> None:
    for ordinal in (16, 2**40, -1):
        with pytest.raises(UsageError, match="device"):
            cuglue.runtime(ordinal)


def test_B32_a_failed_start_leaves_nothing_behind() -> None:
    with cuglue.use_driver("sim"):
        with testing.faults.fail("capabilities", on=1), pytest.raises(CuglueError):
            cuglue.runtime()
        runtime = cuglue.runtime()
        runtime.empty(64).close()
        runtime.close()
