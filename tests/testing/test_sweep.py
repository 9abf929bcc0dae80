"""The fault sweep finds every kind of defect that is planted here, and nothing in an operation that is right."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from cuglue.core.device import device_state
from cuglue.driver.protocol import CopyKind
from cuglue.driver.sim import SimDriver
from cuglue.errors import CuglueError, OutOfMemory, UsageError
from cuglue.testing.fault_sweep import SweepReport, sweep

AGAIN = (
    "trying again (after DriverError: {0} was made to fail: {0} returned cudaErrorUnknown (999)) raised {1}"
)


class Pair:
    """Two allocations made by one operation, with an account of bytes: what a resource is, in small."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.retire = device_state(driver, 0).retire
        self.bytes = 0
        self.made: list[int] = []

    def free(self, ptr: int) -> None:
        self.driver.free(ptr, 0)

    def make(self) -> tuple[int, int]:
        first = self.driver.malloc(64, 0)
        try:
            second = self.driver.malloc(64, 0)
        except CuglueError:
            try:
                self.free(first)
            except CuglueError:
                self.retire.forget(lambda: self.free(first))
            raise
        self.bytes += 128
        return first, second

    def drop(self, pair: tuple[int, int]) -> None:
        for ptr in pair:
            self.free(ptr)
        self.bytes -= 128


def run(make: Callable[[Any], Any], cls: type[Pair] = Pair, **options: Any) -> SweepReport:
    return sweep(
        make,
        name="make",
        setup=cls,
        teardown=lambda subject, pair: subject.drop(pair),
        accounting=lambda subject: subject.bytes,
        **options,
    )


def found(report: SweepReport, mode: str | None = None) -> str:
    return "\n".join(v.what for v in report.violations if mode in (None, v.mode))


def test_an_operation_that_is_right_passes() -> None:
    report = run(lambda pair: pair.make())
    report.check()
    assert report.calls == ("malloc", "malloc")
    # once: each malloc in two ways; twice: the free after each way of the second; method and all: as once.
    assert (report.runs, report.absorbed, report.violations) == (4 + 2 + 4 + 4, 0, ())
    assert str(report) == "make: 2 calls, 14 runs, 0 absorbed, 0 violations"


def test_the_report_is_frozen_and_the_same_every_time() -> None:
    report = run(Leaking.make, Leaking)
    assert report == run(Leaking.make, Leaking)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.runs = 0  # type: ignore[misc]
    with pytest.raises(AssertionError, match="violations\n  once: call 2 malloc failed: the driver holds"):
        report.check()


class Leaking(Pair):
    def make(self) -> tuple[int, int]:
        pair = self.driver.malloc(64, 0), self.driver.malloc(64, 0)
        self.bytes += 128
        return pair


def test_a_leak_is_found() -> None:
    report = run(Leaking.make, Leaking)
    assert {v.calls for v in report.violations} == {("2 malloc",)}
    assert "the driver holds {'bytes': 64, 'malloc': 1} more than before" in found(report, "once")
    assert "after cleaning up the driver still holds {'malloc': 1, 'bytes': 64}" in found(report, "all")


class Forgetting(Pair):
    """Rolls back, but loses the memory if that fails too."""

    def make(self) -> tuple[int, int]:
        first = self.driver.malloc(64, 0)
        try:
            second = self.driver.malloc(64, 0)
        except CuglueError:
            self.free(first)
            raise
        self.bytes += 128
        return first, second


def test_a_leak_of_the_rollback_is_found_where_that_fails() -> None:
    report = run(Forgetting.make, Forgetting)
    assert {v.mode for v in report.violations} == {"twice", "all"}
    assert {v.calls for v in report.violations if v.mode == "twice"} == {("2 malloc", "3 free")}


class Miscounting(Pair):
    def make(self) -> tuple[int, int]:
        self.bytes += 128
        try:
            return Pair.make(self)
        finally:
            self.bytes -= 128 if self.bytes == 256 else 0


def test_an_account_that_drifts_is_found() -> None:
    report = run(Miscounting.make, Miscounting)
    assert "the accounting says 128, before it said 0" in found(report)


class Untyped(Pair):
    def make(self) -> tuple[int, int]:
        pair: dict[str, int] = {}
        try:
            pair["first"] = self.driver.malloc(64, 0)
        except CuglueError:
            pass
        try:
            pair["second"] = self.driver.malloc(64, 0)
        except CuglueError:
            self.free(pair["first"])
            raise
        try:
            return pair["first"], pair["second"]
        except KeyError:
            self.free(pair["second"])
            raise


def test_an_error_of_another_kind_is_found() -> None:
    report = run(Untyped.make, Untyped)
    assert "it raised KeyError: 'first' at " in found(report, "once")
    assert "test_sweep.py" in found(report)


class Once(Pair):
    tried = False

    def make(self) -> tuple[int, int]:
        if self.tried:
            raise UsageError("pair", got="make", expected="one make")
        self.tried = True
        return Pair.make(self)


def test_an_operation_that_cannot_be_tried_again_is_found() -> None:
    assert AGAIN.format("malloc", "UsageError") in found(run(Once.make, Once))


def test_what_the_user_does_before_trying_again() -> None:
    report = run(Once.make, Once, recover=lambda pair: setattr(pair, "tried", False))
    report.check()
    broken = run(Once.make, Once, recover=lambda pair: pair.drop((1, 2)))
    assert "recovering raised DriverError" in found(broken)


class Streams:
    """Writes on one stream and reads on another."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.one, self.two, self.event = (
            driver.stream_create(0),
            driver.stream_create(0),
            driver.event_create(0),
        )
        self.a, self.b = driver.malloc(64, 0), driver.malloc(64, 0)

    def copy(self) -> None:
        self.driver.fill_async(self.a, 1, 64, self.one)
        self.driver.event_record(self.event, self.one)
        try:
            self.driver.stream_wait_event(self.two, self.event)
        except CuglueError:
            if not self.swallow:
                raise
        self.driver.copy_async(self.b, self.a, 64, CopyKind.D2D, self.two)

    def close(self, _: None) -> None:
        for stream in self.one, self.two:
            self.driver.stream_synchronize(stream)
        for ptr in self.a, self.b:
            self.driver.free(ptr, 0)
        for stream in self.one, self.two:
            self.driver.stream_destroy(stream)
        self.driver.event_destroy(self.event)

    swallow = False


class Swallowing(Streams):
    swallow = True


def test_a_failed_wait_that_is_passed_over_is_found_as_a_hazard() -> None:
    sweep(Streams.copy, setup=Streams, teardown=Streams.close).check()
    report = sweep(Streams.copy, setup=Swallowing, teardown=Streams.close)
    assert "hazard: unordered access" in found(report, "once")
    assert {v.calls for v in report.violations if v.mode == "once"} == {("3 stream_wait_event",)}


def test_a_wrong_result_after_trying_again_is_found() -> None:
    def check(pair: Pair, made: tuple[int, int]) -> None:
        pair.made.extend(made)
        assert pair.driver.inventory()["malloc"] == len(pair.made)

    assert "the check raised AssertionError" in found(run(Leaking.make, Leaking, check=check), "all")


class Closing:
    """Frees two allocations; what comes after a failure depends on the subclass."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.held = [driver.malloc(64, 0), driver.malloc(64, 0)]

    def close(self) -> None:
        while self.held:
            self.driver.free(self.held[-1], 0)
            self.held.pop()


class ClosingTwice(Closing):
    def close(self) -> None:
        for ptr in self.held:
            self.driver.free(ptr, 0)
        self.held = []


class ClosingLossy(Closing):
    def close(self) -> None:
        while self.held:
            self.driver.free(self.held.pop(), 0)


def test_a_close_may_give_back_a_part_and_has_to_finish_later() -> None:
    sweep(lambda subject: subject.close(), setup=Closing, atomic=False).check()
    twice = sweep(lambda subject: subject.close(), setup=ClosingTwice, atomic=False)
    assert AGAIN.format("free", "DriverError") in found(twice)
    lossy = sweep(lambda subject: subject.close(), setup=ClosingLossy, atomic=False)
    assert "after cleaning up the driver still holds {'malloc': 1, 'bytes': 64}" in found(lossy)
    assert "the driver holds" not in found(lossy), "half a close is allowed"
    assert "the driver holds" in found(sweep(lambda subject: subject.close(), setup=Closing))


class Patient(Pair):
    """Answers missing memory by trying once more."""

    def make(self) -> tuple[int, int]:
        try:
            return Pair.make(self)
        except OutOfMemory:
            return Pair.make(self)


def test_a_failure_that_the_operation_answers_is_counted() -> None:
    report = run(Patient.make, Patient)
    report.check()
    # Both OutOfMemory failures of "once"; in "twice" the one where the free after the second fails too.
    assert report.absorbed == 3


class Complaining(Pair):
    def make(self) -> tuple[int, int]:
        try:
            return Pair.make(self)
        except CuglueError:
            warnings.warn("something was never closed", ResourceWarning, stacklevel=1)
            raise


def test_a_warning_is_found() -> None:
    assert "ResourceWarning: something was never closed" in found(run(Complaining.make, Complaining))


def test_what_nothing_made_fail_must_not_fail() -> None:
    with pytest.raises(UsageError, match="after cleaning up the driver still holds"):
        sweep(lambda pair: pair.make(), setup=Pair)
    with pytest.raises(UsageError, match="when no call fails it raised ZeroDivisionError"):
        sweep(lambda driver: 1 / 0)


def test_caches_may_stay_if_named() -> None:
    kept = sweep(lambda pair: pair.make(), setup=Pair, keeps=("malloc", "bytes"))
    assert not kept.violations


def test_events_kept_for_reuse_are_no_leak() -> None:
    def record(driver: Any) -> None:
        state = device_state(driver, 0)
        state.give_event(state.take_event())

    sweep(record).check()


def test_the_drivers_of_the_runs_are_made_by_the_caller() -> None:
    seen: list[SimDriver] = []

    def make() -> SimDriver:
        seen.append(SimDriver(seed=7))
        return seen[-1]

    report = sweep(lambda driver: driver.memory_info(0), driver=make)
    assert report.calls == ("memory_info",)
    assert len(seen) == 2 + report.runs + 1, "two without failures, one to see what follows a failure"


class Logging(Pair):
    """Logs the failure with its traceback, whose frames hold what must not stay."""

    def make(self) -> tuple[int, int]:
        held = Held(self.driver)
        try:
            return Pair.make(self)
        except CuglueError:
            logging.getLogger("cuglue.somewhere").warning("making %r failed", held, exc_info=True)
            raise


class Held:
    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.ptr = SimDriver.host_alloc(driver, 64)  # past the wrapping: these two do not fail

    def __del__(self) -> None:
        SimDriver.host_free(self.driver, self.ptr)


def test_what_handlers_keep_of_a_failure_is_no_leak(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    run(Logging.make, Logging, modes=("once",), keeps=()).check()


def test_the_public_name() -> None:
    import cuglue.testing

    assert cuglue.testing.sweep is sweep
    assert cuglue.testing.SweepReport is SweepReport
