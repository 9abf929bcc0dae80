"""``python -m scripts.prove --fuzz N``: N random inputs for each target, and a table of what became of them.

Owns the loop and the table. Must not know the targets: ``tests/prove_fuzz.py`` has them. Inputs come from their number,
so that a fault is found again by it.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


class Fuzzed(NamedTuple):
    """What became of the inputs of one target: each fault once, with the number of its first input."""

    name: str
    inputs: int
    accepted: int
    faults: dict[str, int]


def fuzz(name: str, target: Callable[[random.Random], bool], numbers: Sequence[int]) -> Fuzzed:
    """Try a target with the inputs of these numbers."""
    accepted = 0
    faults: dict[str, int] = {}
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for number in numbers:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    accepted += target(random.Random(number))
                except Exception as error:  # noqa: BLE001 - any is what this looks for
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    text = f"{type(error).__name__}: {str(error)[:200]} at {Path(where.filename).name}:{where.lineno}"
                    faults.setdefault(text, number)
    finally:
        logging.disable(level)
    return Fuzzed(name, len(numbers), accepted, faults)


def _part(name: str, first: int, last: int) -> Fuzzed:
    os.environ.setdefault("CUGLUE_DRIVER", "sim")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    return fuzz(name, importlib.import_module("prove_fuzz").TARGETS[name], range(first, last))


def main(inputs: int, jobs: int = 2) -> int:
    """Fuzz every target and print a line each; 1 if there was a fault."""
    os.environ.setdefault("CUGLUE_DRIVER", "sim")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    names = list(importlib.import_module("prove_fuzz").TARGETS)
    step = max(1, inputs // 8)
    print(f"{'target':26}{'inputs':>9}{'accepted':>10}{'refused':>9}{'faults':>8}")
    found = 0
    with ProcessPoolExecutor(jobs) as pool:
        parts = {
            name: [pool.submit(_part, name, at, min(at + step, inputs)) for at in range(0, inputs, step)]
            for name in names
        }
        for name in names:
            done = [part.result() for part in parts[name]]
            accepted, faults = (
                sum(d.accepted for d in done),
                {k: v for d in done for k, v in d.faults.items()},
            )
            found += len(faults)
            print(f"{name:26}{inputs:>9}{accepted:>10}{inputs - accepted:>9}{len(faults):>8}", flush=True)
            for fault, number in faults.items():
                print(f"    input {number}: {fault}")
    return int(found > 0)
