"""Random programs over everything that cuglue has, against a model that knows every byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .check import run
from .generate import Program
from .model import Step


def replay(seed: int, resource: str, steps: Sequence[tuple[Any, ...]]) -> None:
    """Run a program that :func:`.shrink.script` printed; an AssertionError if it still fails."""
    failure = run(Program(seed, resource, tuple(Step(name, tuple(args)) for name, *args in steps))).failure
    assert failure is None, f"{failure.kind}\n{failure.text}"
