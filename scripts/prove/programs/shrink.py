"""Makes a failing program small: delta debugging over its steps.

Owns the search and how a program is printed. Steps name what they use, so any of them can be taken out; those that
mean nothing then are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from .check import Failure, run
from .generate import Program
from .model import Step

T = TypeVar("T")


def smallest(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """A part of ``items`` for which ``fails`` still holds, and no longer if any one is taken out (ddmin)."""
    left, pieces = list(items), 2
    while len(left) > 1:
        size = max(len(left) // pieces, 1)
        for start in range(0, len(left), size):
            rest = left[:start] + left[start + size :]
            if rest and fails(rest):
                left, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(left))
    return left


def shrink(
    program: Program, failure: Failure, judge: Callable[[Program], Failure | None] | None = None
) -> tuple[Program, Failure]:
    """The smallest program found that fails in the same way, and its failure.

    Args:
        program: a program that fails.
        failure: how.
        judge: runs a program; None: :func:`.check.run`.
    """
    judge = judge or (lambda p: run(p).failure)
    found = failure

    def fails(steps: Sequence[Step]) -> bool:
        nonlocal found
        now = judge(program._replace(steps=tuple(steps)))
        if now is None or now.kind != failure.kind:
            return False
        found = now
        return True

    steps = smallest(program.steps[: failure.step + 1], fails)
    small = program._replace(steps=tuple(steps))
    now = judge(small)
    return small, now if now is not None else found


def script(program: Program, failure: Failure | None = None) -> str:
    """The program as Python, to be read and to be run again."""
    lines = []
    if failure is not None:
        lines += [f"# {line}" for line in f"{failure.kind}\n{failure.text}".rstrip().splitlines()]
    lines.append("from scripts.prove.programs import replay")
    lines.append(f"replay(seed={program.seed}, resource={program.resource!r}, steps=[")
    for index, step in enumerate(program.steps):
        mark = "  # here" if failure is not None and index == failure.step else ""
        lines.append(f"    ({step.name!r}, {', '.join(map(repr, step.args))}),{mark}")
    return "\n".join([*lines, "])"])
