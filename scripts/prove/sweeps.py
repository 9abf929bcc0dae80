"""Prints what the fault sweep finds, operation by operation, and in sum.

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
HEAD = f"{'calls':>6}{'runs':>6}{'absorbed':>10}{'violations':>12}"


def main() -> int:
    """Sweep every operation and print a line each, then one for each section; 1 if anything was lost."""
    os.environ.setdefault("CUGLUE_DRIVER", "sim")
    os.environ.setdefault("PYOPENGL_PLATFORM", "egl")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    print(f"{'operation':60}{HEAD}")
    sections: dict[str, list[int]] = {}
    for section, report in _reports():
        numbers = [len(report.calls), report.runs, report.absorbed, len(report.violations)]
        before = sections.get(section, [0] * 5)
        sections[section] = [a + b for a, b in zip(before, [1, *numbers], strict=True)]
        print(_row(report.operation, 60, numbers), flush=True)
        for violation in report.violations:
            print(f"    {violation}")
    total = [sum(column) for column in zip(*sections.values(), strict=True)]
    print(f"\n{'section':48}{'operations':>12}{HEAD}")
    for name, numbers in [*sections.items(), ("all", total)]:
        print(_row(f"{name:48}{numbers[0]:>12}", 60, numbers[1:]))
    return 1 if total[-1] else 0


def _row(name: str, width: int, numbers: list[int]) -> str:
    calls, runs, absorbed, violations = numbers
    return f"{name:{width}}{calls:>6}{runs:>6}{absorbed:>10}{violations:>12}"


def _reports() -> Iterator[tuple[str, Any]]:
    for module in ("prove_operations", "prove_pools", "prove_objects"):
        for section, cases in importlib.import_module(module).SECTIONS.items():
            for case in cases:
                yield section, case.sweep()
    subjects = importlib.import_module("graphics.subjects")
    with importlib.import_module("cuglue.graphics.glcontext").headless():
        names = subjects.make_buffer(256), subjects.make_texture(8, 8)
        for case in importlib.import_module("prove_objects").gl_cases(*names):
            yield "OpenGL: registrations, maps, tensors, parts", case.sweep()
