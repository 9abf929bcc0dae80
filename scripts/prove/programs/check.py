"""Runs a program with the library and compares each step with the model.

Owns what counts as a failure: a hazard, a wrong byte, an error or warning that the model does not want (or one that
does not come), a line in the log, anything left in the driver.
"""

from __future__ import annotations

import gc
import logging
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from cuglue.driver.sim.hazards import HazardError

from .generate import Program, outcomes
from .memory import Known
from .model import OPERATIONS, Outcome
from .world import SimGraphics, World


class Failure(NamedTuple):
    """What went wrong first.

    Attributes:
        kind: the same for the same fault in a smaller program.
        text: for people.
        step: index of the step, len(steps) for the end.
    """

    kind: str
    text: str
    step: int


class Verdict(NamedTuple):
    """What came of a program: the failure, if any, and the steps that were done, by feature and by operation."""

    failure: Failure | None
    features: Counter[str]
    operations: Counter[str]


class Noise(logging.Handler):
    """What the library said meanwhile: warnings, log lines, errors that nobody could be given."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(f"log: {record.getMessage()}")

    def warn(self, message: Any, category: type[Warning], *more: Any) -> None:
        self.heard.append(f"{category.__name__}: {message}")

    def unraisable(self, args: Any) -> None:
        self.heard.append(f"unraisable: {args.exc_type.__name__}: {args.exc_value}")

    def take(self) -> list[str]:
        """What was heard since the last time."""
        heard, self.heard = self.heard, []
        return heard


@contextmanager
def listening() -> Iterator[Noise]:
    """Hear everything that the library says in this block."""
    noise = Noise()
    logger = logging.getLogger("cuglue")
    former = warnings.showwarning, sys.unraisablehook
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning, sys.unraisablehook = noise.warn, noise.unraisable  # type: ignore[assignment]
        logger.addHandler(noise)
        try:
            yield noise
        finally:
            logger.removeHandler(noise)
            warnings.showwarning, sys.unraisablehook = former


def run(
    program: Program,
    noise: Noise | None = None,
    graphics: Callable[[Any], Any] = SimGraphics,
    wanted: Iterable[Outcome | None] | None = None,
) -> Verdict:
    """Run a program in a world of its own; ``wanted``: what its steps must give, if the model was asked already."""
    if noise is None:
        with listening() as noise:
            return run(program, noise, graphics, wanted)
    features: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    noise.take()
    world = World(program.seed, program.resource, graphics)
    try:
        failure = _steps(program, wanted or outcomes(program), world, noise, features, operations)
        if failure is None:
            failure = end(world, noise, len(program.steps))
    finally:
        world.abandon()
        del world
    for _ in range(0 if failure is None else 3):  # so that no later program hears what is left of this one
        gc.collect()
    return Verdict(failure, features, operations)


def _steps(
    program: Program,
    wanted: Iterable[Outcome | None],
    world: World,
    noise: Noise,
    features: Counter[str],
    operations: Counter[str],
) -> Failure | None:
    for index, (step, outcome) in enumerate(zip(program.steps, wanted, strict=True)):
        if outcome is None:
            continue
        operation = OPERATIONS[step.name]
        failure = one(operation.perform, world, step.args, outcome, noise)
        if failure is None and world.driver.hazards:
            hazard = world.driver.hazards[0]
            failure = f"hazard: {hazard.kind}", str(hazard)
        if failure is not None:
            return Failure(failure[0], failure[1], index)
        features[operation.feature] += 1
        operations[step.name] += 1
    return None


def one(
    perform: Callable[..., Any], world: World, args: tuple[Any, ...], wanted: Outcome, noise: Noise
) -> tuple[str, str] | None:
    """One step; ``(kind, text)`` of what is wrong with it."""
    try:
        value = perform(world, *args)
    except HazardError as error:
        return f"hazard: {error.hazards[0].kind}", str(error)
    except Exception as error:  # noqa: BLE001 - that is what is looked at
        names = [kind.__name__ for kind in type(error).__mro__]
        if not set(wanted.error.split("|")) & set(names):
            kind = f"{names[0]} in place of {wanted.error}" if wanted.error else f"unexpected {names[0]}"
            return kind, "".join(traceback.format_exception(error)[-6:])
        return _said(noise.take(), wanted)
    if wanted.error:
        return f"no {wanted.error}", f"{wanted.error} was not raised"
    if isinstance(wanted.value, Known):
        if not wanted.value.agrees(value):
            return "wrong bytes", wanted.value.difference(value)
    elif wanted.value is not None and value != wanted.value:
        return f"{value} in place of {wanted.value}", ""
    return _said(noise.take(), wanted)


def _said(heard: list[str], wanted: Outcome) -> tuple[str, str] | None:
    kinds = [line.partition(":")[0] for line in heard]
    if wanted.warning and wanted.warning not in kinds:
        return f"no {wanted.warning}", f"{wanted.warning} was not issued"
    for kind, line in zip(kinds, heard, strict=True):
        if kind not in (wanted.warning, wanted.maybe):
            return f"unexpected {kind}", line
    return None


def end(world: World, noise: Noise, index: int) -> Failure | None:
    try:
        held = world.leave()
    except HazardError as error:
        return Failure(f"hazard: {error.hazards[0].kind}", str(error), index)
    except Exception as error:  # noqa: BLE001 - that is what is looked at
        text = "".join(traceback.format_exception(error)[-6:])
        return Failure(f"unexpected {type(error).__name__} at the end", text, index)
    if held:
        return Failure("left in the driver: " + ", ".join(held), str(held), index)
    said = _said(noise.take(), Outcome(maybe="ResourceWarning"))
    return None if said is None else Failure(f"{said[0]} at the end", said[1], index)
