"""Runs many programs in several processes and says what was run and what was found.

Owns the division of the work, the counts and the text. Must not know what a program is made of.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cuglue.driver.sim import memory

from .check import Failure, listening, run
from .generate import MINIMUM, STEPS, Program, generate_with_outcomes
from .mesa import MesaGraphics
from .model import FEATURES
from .shrink import script, shrink
from .world import SimGraphics

CHUNK = 40
#: One program in so many runs with OpenGL itself, where there is some.
REAL_EVERY = 50
_TELL_SECONDS = 30.0
_MOST_FAILURES = 5  # that are shrunk


@dataclass
class Tally:
    """What was run."""

    programs: int = 0
    real: int = 0
    steps: int = 0
    fewest: int = 1 << 30
    features: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    least: dict[str, int] = field(default_factory=dict)
    failures: list[tuple[Program, str]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Add what another process ran."""
        self.programs += other.programs
        self.real += other.real
        self.steps += other.steps
        self.fewest = min(self.fewest, other.fewest)
        self.features += other.features
        self.operations += other.operations
        for feature, count in other.least.items():
            self.least[feature] = min(self.least.get(feature, count), count)
        self.failures += other.failures

    def text(self) -> str:
        """The table."""
        per = self.steps / max(self.programs, 1)
        lines = [
            f"{self.programs} programs, {self.steps} steps ({per:.1f} a program, at least {self.fewest}; asked for: "
            f"{STEPS} before the closing), {self.real} of them with OpenGL itself; {self.seconds:.0f} s",
            "",
            f"{'feature':10}{'steps':>10}{'a program':>11}{'at least':>10}{'asked for':>11}",
        ]
        lines += [
            f"{f:10}{self.features[f]:>10}{self.features[f] / max(self.programs, 1):>11.1f}"
            f"{self.least.get(f, 0):>10}{MINIMUM[f]:>11}"
            for f in FEATURES
        ]
        names = [f"{name} {count}" for name, count in sorted(self.operations.items())]
        return "\n".join([*lines, "", f"{len(names)} operations: {', '.join(names)}"])


def some(seeds: Iterable[int], real: bool) -> Tally:
    """Run the programs of some seeds in this process."""
    tally = Tally()
    with listening() as noise:
        for seed in seeds:
            program, wanted = generate_with_outcomes(seed)
            on_gl = real and seed % REAL_EVERY == 0
            verdict = run(program, noise, MesaGraphics if on_gl else SimGraphics, wanted)
            done = sum(verdict.features.values())
            tally.programs += 1
            tally.real += on_gl
            tally.steps += done
            tally.features += verdict.features
            tally.operations += verdict.operations
            if verdict.failure is not None:
                tally.failures.append((program, verdict.failure.kind))
                continue
            tally.fewest = min(tally.fewest, done)
            for feature in FEATURES:
                count = verdict.features[feature]
                tally.least[feature] = min(tally.least.get(feature, count), count)
    return tally


def _warm_up(real: bool) -> None:
    """What every program needs is loaded before; the collector then looks only at what programs make."""
    some(range(12), real)
    gc.collect()
    gc.freeze()


def _start(real: bool) -> None:
    """Begin a process of its own: of a pool's large pages the ends are poisoned, which is a third of the time."""
    memory._EDGE = memory._POISON_WHOLE = 4096
    _warm_up(real)


def _work(task: tuple[range, bool]) -> Tally:
    return some(*task)


def many(count: int, jobs: int, first: int = 0, *, real: bool = True) -> Tally:
    """Run the programs of ``count`` seeds from ``first`` on.

    Args:
        count: programs.
        jobs: processes.
        first: the first seed.
        real: some of them with OpenGL.
    """
    os.environ.setdefault("PYOPENGL_PLATFORM", "egl")
    began = told = time.monotonic()
    tally = Tally()

    def take(part: Tally) -> None:
        nonlocal told
        tally.add(part)
        for program, kind in part.failures:  # at once: a long run may be ended before its table
            print(f"seed {program.seed}: {kind}", file=sys.stderr)
        if time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            passed = told - began
            print(
                f"{passed:6.0f} s: {tally.programs} programs, {len(tally.failures)} failures",
                file=sys.stderr,
            )

    def tasks() -> Iterator[tuple[range, bool]]:
        for start in range(first, first + count, CHUNK):
            yield range(start, min(start + CHUNK, first + count)), real

    if jobs == 1:
        _warm_up(real)
        for task in tasks():
            take(_work(task))
    else:
        context = multiprocessing.get_context("spawn")
        with context.Pool(jobs, _start, (real,)) as pool:
            for part in pool.imap_unordered(_work, tasks()):
                take(part)
                if len(tally.failures) > 20 * _MOST_FAILURES:
                    break
    tally.seconds = time.monotonic() - began
    return tally


def main(count: int, jobs: int, *, first: int = 0) -> int:
    """Run programs and print what came of them; 1 if any failed."""
    tally = many(count, jobs, first)
    print(tally.text(), flush=True)
    kinds = Counter(kind for _, kind in tally.failures)
    for kind, number in kinds.most_common(_MOST_FAILURES):
        program = next(p for p, k in tally.failures if k == kind)
        print(f"\n{number} programs: {kind}. {_explained(program)}")
    print(f"\n{len(tally.failures)} failures")
    return 1 if tally.failures else 0


def _explained(program: Program) -> str:
    """The smallest form of a program that fails."""
    graphics = MesaGraphics if program.seed % REAL_EVERY == 0 else SimGraphics

    def judge(smaller: Program) -> Failure | None:
        return run(smaller, graphics=graphics).failure

    failure = judge(program)
    if failure is None:
        return f"Seed {program.seed} does not fail alone"
    return f"The smallest of seed {program.seed}:\n{script(*shrink(program, failure, judge))}"
