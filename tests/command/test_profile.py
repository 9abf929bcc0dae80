"""Profiles tell the device's time, or why they cannot (contracts C29)."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from sample_kernels import INCREMENT

from cuglue import InOut, Runtime
from cuglue.command.perform import Skipped
from cuglue.driver.sim import SimDriver
from cuglue.errors import CaptureError, DriverError, LaunchError, UsageError
from cuglue.testing.faults import fail

N = 64


@pytest.fixture
def x(rt: Runtime) -> Any:
    return rt.create(np.zeros(N, "i4"), stream=rt.stream(0))


def increment(rt: Runtime, x: Any, threads: int = N) -> Any:
    return rt.launch(INCREMENT, 1, threads, InOut(x), N, 1, stream=rt.stream(0))


def test_a_profile_measures_its_block(rt: Runtime, x: Any) -> None:
    increment(rt, x)  # the first launch loads the kernel
    rt.stream(0).synchronize()
    with rt.profile(rt.stream(0)) as short:
        increment(rt, x)
    with rt.profile(rt.stream(0)) as long:
        for _ in range(200):
            increment(rt, x)
    assert 0 <= short.milliseconds < long.milliseconds
    assert short.failure is None


def test_C29_a_refusal_is_raised_at_once_and_makes_the_profile_invalid(rt: Runtime, x: Any) -> None:
    with rt.profile(rt.stream(0)) as outer:
        with rt.profile(rt.stream(0)) as inner, pytest.raises(LaunchError):
            increment(rt, x, 4096)
        assert isinstance(inner.failure, LaunchError)
    for profile in (outer, inner):
        with pytest.raises(UsageError, match="LaunchError") as caught:
            _ = profile.milliseconds
        assert isinstance(caught.value.__cause__, LaunchError)
    with rt.profile(rt.stream(0)) as after:
        assert isinstance(increment(rt, x), Skipped)
    assert after.failure is not None
    with rt.profile(rt.stream(1)) as elsewhere:
        pass
    assert elsewhere.milliseconds >= 0


def test_profiles_lie_on_one_scale(rt: Runtime, x: Any) -> None:
    with rt.profile(rt.stream(0)) as first:
        increment(rt, x)
    with rt.profile(rt.stream(0)) as second:
        increment(rt, x)
    assert second.begins_after(first) >= first.milliseconds
    assert first.begins_after(first) == 0
    with pytest.raises(UsageError, match="entered"):
        second.begins_after(rt.profile(rt.stream(0)))


def test_a_beginning_that_is_still_to_come_is_waited_for(sim: SimDriver) -> None:
    with Runtime() as rt:
        one, two = rt.stream(0), rt.stream(1)
        for _ in range(5):
            rt.launch(INCREMENT, 1, 4, InOut(rt.create(np.zeros(4, "i4"), stream=one)), 4, 1, stream=one)
        with rt.profile(one) as first:
            pass
        with rt.profile(two) as second:
            pass
        rt.command(stream=two).synchronize()
        assert not one.query()
        second.begins_after(first)
        first.begins_after(second)


def test_misuse(rt: Runtime, x: Any) -> None:
    profile = rt.profile(rt.stream(0))
    with pytest.raises(UsageError, match="has ended"):
        _ = profile.milliseconds
    with profile:
        with pytest.raises(UsageError, match="has ended"):
            _ = profile.milliseconds
        with pytest.raises(UsageError, match="second"):
            profile.__enter__()
    assert profile.milliseconds >= 0
    broken = rt.profile(rt.stream(0))
    with pytest.raises(ZeroDivisionError), broken:
        _ = 1 / 0
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        _ = broken.milliseconds


def test_no_profile_inside_a_capture(rt: Runtime, x: Any) -> None:
    with rt.capture(rt.stream(0)) as capture:
        increment(rt, x)
        with pytest.raises(CaptureError):
            rt.profile(rt.stream(0)).__enter__()
    capture.graph.close()


@pytest.mark.parametrize("method", ["event_create", "event_record"])
def test_a_profile_that_cannot_begin_leaves_nothing(sim: SimDriver, method: str) -> None:
    with Runtime() as rt:
        lane = rt._lanes.lane()
        events = sim.inventory()["events"]
        with fail(method), pytest.raises(DriverError):
            rt.profile().__enter__()
        assert lane.profiles == []
        assert sim.inventory()["events"] == events


def test_its_events_go_with_it(sim: SimDriver) -> None:
    with Runtime() as rt:
        events = sim.inventory()["events"]
        with rt.profile() as profile:
            pass
        assert sim.inventory()["events"] == events + 2
        del profile
        gc.collect()
        rt._state.retire.run_forgotten()
        assert sim.inventory()["events"] == events
