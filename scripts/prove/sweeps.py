"""Prints what the fault sweep finds, operation by operation.

Owns the table. Must not know the operations: ``tests/prove_*.py`` have them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> int:
    """Sweep every operation and print a line each; 1 if anything was lost."""
    os.environ.setdefault("CUGLUE_DRIVER", "sim")
    os.environ.setdefault("PYOPENGL_PLATFORM", "egl")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    print(f"{'operation':46}{'calls':>6}{'runs':>6}{'absorbed':>10}{'violations':>12}")
    totals = [0, 0, 0, 0]
    for report in _reports():
        numbers = [len(report.calls), report.runs, report.absorbed, len(report.violations)]
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        print(_row(report.operation, numbers))
        for violation in report.violations:
            print(f"    {violation}")
    print(_row("all", totals))
    return 1 if totals[3] else 0


def _row(name: str, numbers: list[int]) -> str:
    calls, runs, absorbed, violations = numbers
    return f"{name:46}{calls:>6}{runs:>6}{absorbed:>10}{violations:>12}"


def _reports() -> Iterator[Any]:
    objects = importlib.import_module("prove_objects")
    for module in ("prove_operations", "prove_pools", "prove_objects"):
        for case in importlib.import_module(module).CASES:
            yield case.sweep()
    subjects = importlib.import_module("graphics.subjects")
    with importlib.import_module("cuglue.graphics.glcontext").headless():
        for case in objects.gl_cases(subjects.make_buffer(256), subjects.make_texture(8, 8)):
            yield case.sweep()
