"""What is given where a number, a resource or an option belongs: taken or refused before the driver is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sample_kernels import INCREMENT

import cuglue
from cuglue import Access, InOut, Kernel, Runtime
from cuglue.driver.sim import SimDriver
from cuglue.errors import CuglueError, UsageError

QUERIES = {"stream_current", "capture_status", "capabilities", "device_count"}
NO_INTS = [None, True, 1.0, float("nan"), "1", [1], np.float32(1), np.True_]


def refused(sim: SimDriver, call: Callable[[], Any]) -> CuglueError:
    """The error of a call that reaches no device and leaves nothing."""
    before, counted = sim.inventory(), dict(sim.counts)
    with pytest.raises(CuglueError) as caught:
        call()
    assert sim.inventory() == before
    assert {name for name, n in sim.counts.items() if n != counted.get(name, 0)} <= QUERIES
    assert caught.value.what
    assert caught.value.got is not None
    assert caught.value.expected is not None
    return caught.value


def test_numpy_integers_count(sim: SimDriver) -> None:
    with Runtime(np.int64(0), max_streams=np.int32(2)) as rt:  # type: ignore[arg-type]
        x = rt.empty(np.int64(64))  # type: ignore[arg-type]
        assert type(x.nbytes) is int
        assert rt.buffer(np.uint8(4)).nbytes == 4  # type: ignore[arg-type]
        assert rt.stream(np.int64(3)) is rt.stream(1)  # type: ignore[arg-type]
        assert x.part(np.int64(4), np.int64(8)).nbytes == 52  # type: ignore[arg-type]
        assert rt.read(rt.create(b"abcd").part(np.uint8(1))).result().tolist() == [98, 99, 100]  # type: ignore[arg-type]
        y = rt.create(np.zeros(4, "i4"))
        rt.launch(INCREMENT, np.int64(1), (np.int32(4), 1), InOut(y), 4, 1, shared=np.int64(8))  # type: ignore[arg-type]
        assert rt.read(y, 4, "i4").result().tolist() == [1] * 4
        with rt.command() as command:
            assert command.reserve_cpu(np.int64(5)).nbytes == 5  # type: ignore[arg-type]


@pytest.mark.parametrize("value", NO_INTS, ids=repr)
def test_what_is_no_int_is_refused(sim: SimDriver, value: Any) -> None:
    rt = Runtime()
    x = rt.create(np.zeros(4, "i4"))
    for call in (
        lambda: Runtime(value),
        lambda: Runtime(max_streams=value),
        lambda: rt.empty(value),
        lambda: rt.buffer(value),
        lambda: rt.stream(value),
        lambda: x.part(value),
        lambda: x.part(0, value),
        lambda: rt.launch(INCREMENT, 1, 1, InOut(x), 4, 1, shared=value),
        lambda: rt.launch(INCREMENT, (1, value), 1, InOut(x), 4, 1),
        lambda: rt.launch(INCREMENT, 1, (1, value), InOut(x), 4, 1),
        lambda: rt.command().reserve_cpu(value),
    ):
        refused(sim, call)
    if value != [1]:
        refused(sim, lambda: rt.launch(INCREMENT, value, 1, InOut(x), 4, 1))
    rt.close()


@pytest.mark.parametrize("value", [1.5, "x", 7, True, object(), [1]], ids=lambda v: type(v).__name__)
def test_other_objects_than_asked_for_are_refused(sim: SimDriver, value: Any) -> None:
    refused(sim, lambda: Runtime(resource=value))
    refused(sim, lambda: Runtime(memory=value))
    refused(sim, lambda: Kernel("k", 'extern "C" __global__ void k() {}', options=value))
    with Runtime() as rt:
        x = rt.create(b"abc")
        refused(sim, lambda: cuglue.use(x, None, value))
        cuglue.use(x, None, Access.READ)


@pytest.mark.parametrize("value", [float("nan"), -1, "1", True, [1]], ids=repr)
def test_a_result_is_waited_for_no_such_time(sim: SimDriver, value: Any) -> None:
    """NaN waited for ever."""
    with Runtime() as rt:
        future = rt.read(rt.create(b"abc"))
        with pytest.raises(UsageError, match="timeout"):
            future.result(value)
        assert future.result(np.float32(30)).tolist() == [97, 98, 99]
