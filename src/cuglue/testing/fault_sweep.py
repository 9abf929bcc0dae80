"""The fault sweep: an operation of several driver calls, with each of them failing in turn, and nothing may be lost.

Owns the runs, the comparison after each, and the report. Must not know any operation. The driver's own inventory is the
judge, so that a leak cannot hide behind the accounting that lost it.
"""

from __future__ import annotations

import gc
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..core.cover import poll
from ..driver.registry import use_driver
from ..driver.sim import SimDriver
from ..errors import CuglueError, UsageError
from .numbered import UNKNOWN, NumberedCalls, codes_of

Mode = Literal["once", "twice", "method", "all"]
#: ``once``: one call fails. ``twice``: so does one of the calls after it, those that clean up. ``method``: the call
#: fails from then on. ``all``: every call fails from then on, until the operation has given up.
MODES: tuple[Mode, ...] = ("once", "twice", "method", "all")


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that a failing call broke.

    Attributes:
        mode: one of :data:`MODES`.
        calls: the calls that failed, as ``"3 malloc_async"``: its place among all calls of the operation, from 1.
        what: what was found.
    """

    mode: Mode
    calls: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        return f"{self.mode}: call {' and '.join(self.calls)} failed: {self.what}"


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found.

    Attributes:
        operation: its name.
        calls: the driver calls of a run in which nothing fails, in order.
        runs: how many times it was run with something failing.
        absorbed: in how many of these it succeeded all the same.
        violations: empty if nothing was lost.
    """

    operation: str
    calls: tuple[str, ...]
    runs: int
    absorbed: int
    violations: tuple[Violation, ...]

    def check(self) -> None:
        """Raise AssertionError naming every violation."""
        if self.violations:
            raise AssertionError("\n  ".join([str(self), *map(str, self.violations)]))

    def __str__(self) -> str:
        return (
            f"{self.operation}: {len(self.calls)} calls, {self.runs} runs, {self.absorbed} absorbed, "
            f"{len(self.violations)} violations"
        )


def sweep(
    operation: Callable[[Any], Any],
    *,
    setup: Callable[[Any], Any] = lambda driver: driver,
    check: Callable[[Any, Any], None] = lambda subject, result: None,
    teardown: Callable[[Any, Any], None] = lambda subject, result: None,
    accounting: Callable[[Any], object] = lambda subject: None,
    recover: Callable[[Any], None] = lambda subject: None,
    name: str = "",
    atomic: bool = True,
    keeps: tuple[str, ...] = (),
    modes: tuple[Mode, ...] = MODES,
    driver: Callable[[], Any] = SimDriver,
) -> SweepReport:
    """Run ``operation`` once undisturbed, then again with each of its driver calls failing in turn.

    Every run has a fresh driver. After a failure: the error is a CuglueError; the driver holds what it held before, and
    ``accounting`` says what it said before; trying again succeeds; after ``teardown`` the driver holds nothing; no
    hazard and no warning came up on the way.

    Args:
        operation: takes what ``setup`` gave; its result goes to ``check`` and ``teardown``.
        setup: takes the driver, which is current meanwhile; nothing fails in it.
        check: raises AssertionError if the operation did not do what it should.
        teardown: gives everything back; nothing fails in it.
        accounting: what the library says that it holds, as something to compare.
        recover: what the user has to do between a failure and trying again.
        name: for the report; None takes the operation's own.
        atomic: a failed operation changes nothing. False for a ``close`` that may have given back a part.
        keeps: inventory entries that may stay after ``teardown``: caches of the driver's life.
        modes: which failures.
        driver: makes the simulated device of one run.

    Ordering: blocks the host. Ownership: keeps nothing.

    Raises:
        UsageError: the operation fails, or loses something, when nothing fails.
    """
    name = name or getattr(operation, "__name__", "operation")
    trial = _Trial(operation, setup, check, teardown, accounting, recover, atomic, keeps, driver)
    log = logging.getLogger("cuglue")
    level = log.level
    log.setLevel(logging.CRITICAL)  # a handler that keeps records would keep what their tracebacks hold
    gc.collect()
    gc.freeze()  # each run collects what it left; without this it would look through the whole process each time
    try:
        held, lost = trial.held_before()
        calls, lost_too = trial.baseline()
        if lost or lost_too:
            got = "; ".join([*lost, *lost_too])
            raise UsageError(f"sweep of {name}", got=got, expected="success when no call fails")
        violations: list[Violation] = []
        runs = absorbed = 0
        for mode in modes:
            for plan in _plans(mode, calls, trial):
                outcome = trial.run(plan, mode, held if mode == "once" and atomic else None)
                runs += 1
                absorbed += outcome.absorbed
                violations += [Violation(mode, outcome.failed, what) for what in outcome.found]
    finally:
        gc.unfreeze()
        log.setLevel(level)
    return SweepReport(name, calls, runs, absorbed, tuple(violations))


Plan = tuple[tuple[int, int], ...]  # (number of the call, error code)


def _plans(mode: Mode, calls: tuple[str, ...], trial: _Trial) -> Iterator[Plan]:
    """Which calls fail in each run of a mode."""
    for number, call in enumerate(calls, 1):
        for code in codes_of(call):
            first = (number, code)
            if mode != "twice":
                yield (first,)
                continue
            after = trial.run((first,), "once").calls_after
            for second in range(number + 1, number + 1 + after):
                yield (first, (second, UNKNOWN))


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One run with failures."""

    failed: tuple[str, ...]
    calls_after: int  # calls of the operation after the first failing one
    absorbed: bool
    found: list[str]


@dataclass(frozen=True, slots=True)
class _Trial:
    """One run of the operation on a fresh driver, and what is compared."""

    operation: Callable[[Any], Any]
    setup: Callable[[Any], Any]
    check: Callable[[Any, Any], None]
    teardown: Callable[[Any, Any], None]
    accounting: Callable[[Any], object]
    recover: Callable[[Any], None]
    atomic: bool
    keeps: tuple[str, ...]
    driver: Callable[[], Any]

    def held_before(self) -> tuple[dict[str, int], list[str]]:
        """What the driver holds when the operation begins, and what a run loses in which nothing fails."""
        return self._supervised(self._measure)

    def baseline(self) -> tuple[tuple[str, ...], list[str]]:
        """The calls of a run in which nothing fails, and what it loses all the same."""
        return self._supervised(self._count)

    def run(self, plan: Plan, mode: Mode, held: dict[str, int] | None = None) -> _Outcome:
        """One run in which the calls of ``plan`` fail; ``held`` is what the driver has to hold after that."""
        outcome, lost = self._supervised(lambda *run: self._run(plan, mode, held, *run))
        failed, calls_after, absorbed = outcome
        return _Outcome(failed, calls_after, absorbed, lost)

    def _supervised(self, body: Callable[[Any, NumberedCalls, list[str]], Any]) -> tuple[Any, list[str]]:
        """Run ``body`` with a fresh driver that is current; adds what the driver still holds, hazards and warnings."""
        driver, calls = self.driver(), NumberedCalls()
        lost: list[str] = []
        with (
            warnings.catch_warnings(record=True) as warned,
            use_driver(driver),
            calls.of(driver),
        ):
            warnings.simplefilter("always")
            result = body(driver, calls, lost)
            held = {k: n for k, n in _settled(driver, lost).items() if n and k not in self.keeps}
        if held:
            lost.append(f"after cleaning up the driver still holds {held}")
        lost += [f"hazard: {hazard}" for hazard in getattr(driver, "hazards", ())]
        lost += [f"{w.category.__name__}: {w.message}" for w in warned]
        return result, lost

    def _measure(self, driver: Any, calls: NumberedCalls, lost: list[str]) -> dict[str, int]:
        subject = self.setup(driver)
        held = _settled(driver, lost)
        self._attempt(subject, lost, "when no call fails it raised")
        return held

    def _count(self, driver: Any, calls: NumberedCalls, lost: list[str]) -> tuple[str, ...]:
        subject = self.setup(driver)
        calls.arm(lambda number, call: None)
        error, result = _outcome(self.operation, subject)
        names = calls.disarm()
        if error is not None:
            lost.append(f"when no call fails it raised {error.text}")
        else:
            self._finish(subject, result, lost)
        return names

    def _run(
        self,
        plan: Plan,
        mode: Mode,
        held: dict[str, int] | None,
        driver: Any,
        calls: NumberedCalls,
        lost: list[str],
    ) -> tuple[tuple[str, ...], int, bool]:
        subject = self.setup(driver)
        said = self.accounting(subject)
        calls.arm(_failures(plan, mode))
        error, result = _outcome(self.operation, subject)
        names = calls.disarm()
        first = plan[0][0]
        failed = tuple(f"{number} {names[number - 1]}" for number, _ in plan if number <= len(names))
        if error is not None:
            if error.bug:
                lost.append(f"it raised {error.text}, no CuglueError")
            if self.atomic:
                if (now := self.accounting(subject)) != said:
                    lost.append(f"the accounting says {now}, before it said {said}")
                if held is not None and (has := _settled(driver, lost)) != held:
                    lost.append(f"the driver holds {_difference(has, held)} more than before")
            second, _ = _outcome(self.recover, subject)
            if second is not None:
                lost.append(f"recovering raised {second.text} (the failure was {error.text})")
            self._attempt(subject, lost, f"trying again (after {error.text}) raised")
        else:
            self._finish(subject, result, lost)
        return failed, len(names) - first, error is None

    def _attempt(self, subject: Any, lost: list[str], said: str) -> None:
        error, result = _outcome(self.operation, subject)
        if error is not None:
            lost.append(f"{said} {error.text}")
        else:
            self._finish(subject, result, lost)

    def _finish(self, subject: Any, result: Any, lost: list[str]) -> None:
        for step, function in (("the check", self.check), ("cleaning up", self.teardown)):
            error, _ = _outcome(function, subject, result)
            if error is not None:
                lost.append(f"{step} raised {error.text}")


@dataclass(frozen=True, slots=True)
class _Error:
    """An exception as text: the exception itself would keep what its frames hold."""

    text: str
    bug: bool


def _outcome(function: Callable[..., Any], *arguments: Any) -> tuple[_Error | None, Any]:
    """``(None, result)`` or ``(error, None)``."""
    try:
        return None, function(*arguments)
    except Exception as error:  # noqa: BLE001 - any other error than ours is what the sweep looks for
        text = f"{type(error).__name__}: {error}"
        bug = not isinstance(error, CuglueError)
        if bug:
            text += f" at {traceback.format_tb(error.__traceback__)[-1].strip()}"
        return _Error(text, bug), None


def _failures(plan: Plan, mode: Mode) -> Callable[[int, str], int | None]:
    """Tells of each call (by number and name) the code of the error that it raises."""
    chosen = dict(plan)
    first, code = plan[0]
    method: list[str] = []

    def fails(number: int, call: str) -> int | None:
        if number == first:
            method.append(call)
        if mode == "all" and number > first:
            return UNKNOWN
        if mode == "method" and number > first and call in method:
            return code
        return chosen.get(number)

    return fails


def _settled(driver: Any, lost: list[str]) -> dict[str, int]:
    """The driver's inventory once all work is done and nothing is held for later use alone."""
    states = list(vars(driver).get("_cuglue_devices", {}).values())
    for _ in range(2):  # what the collector finds goes through the queue once more
        for state in states:
            error, _ignored = _outcome(_settle, state)
            if error is not None:
                lost.append(f"draining raised {error.text}")
        gc.collect()
    return dict(driver.inventory())


def _settle(state: Any) -> None:
    state.driver.device_synchronize(state.device)
    for reference in list(state.streams.values()):
        stream = reference()
        if stream is not None:
            with stream.marking:
                poll(stream)
    state.retire.drain(block=True)
    state.close_events()


def _difference(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    keys = sorted({*now, *before})
    return {k: now.get(k, 0) - before.get(k, 0) for k in keys if now.get(k, 0) != before.get(k, 0)}
