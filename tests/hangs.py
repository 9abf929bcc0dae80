"""Whose hang it is: a program of ours that comes to no end, or the driver below it, which hangs with CuPy alone too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

import pytest

_GRACE = 5.0  # seconds beyond its own limit, for a process that cannot even end itself
_DONE = 7  # how a program says that it came to its end: whatever else went wrong has another code


class Ended(NamedTuple):
    """How a program ended."""

    done: bool
    hung: bool
    text: str


def run(programs: list[str], limit: float, environment: Mapping[str, str]) -> list[Ended]:
    """Run ``programs`` beside each other, each for ``limit`` seconds at most; one that hangs tells where.

    It leaves by ``os._exit`` in any case: the end of the interpreter waits for the driver.
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _framed(program, limit)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for program in programs
    ]
    deadline = time.monotonic() + limit + _GRACE
    return [_await(process, deadline) for process in started]


def _framed(program: str, limit: float) -> str:
    watch = f"import faulthandler, os\nfaulthandler.dump_traceback_later({limit}, exit=True)"
    return f"{watch}\n{program}\nos._exit({_DONE})"


def _await(process: subprocess.Popen[str], deadline: float) -> Ended:
    try:
        text, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        return Ended(False, True, text + "\nkilled")
    return Ended(process.returncode == _DONE, "Timeout (" in text, text)


def judge(ours: str, alone: str, limit: float, environment: Mapping[str, str], runs: int = 8) -> None:
    """Pass if ``ours`` comes to its end. If it hangs, find out whose hang that is.

    Takes a little more than twice ``limit`` at most. ``alone`` does the same with the driver as ``ours``, without the
    library; it is run ``runs`` times, because such hangs come and go.

    A hang is ours, and a failure, unless ``alone`` hangs as well; then ``ours`` has three more attempts to show that it
    is right where the driver goes on. If all of them hang, nothing was shown, and the test is an expected failure.
    """
    (first,) = run([ours], limit, environment)
    if first.done:
        return
    if not first.hung:
        pytest.fail(f"it failed:\n{first.text}")
    ended = run([ours] * 3 + [alone] * runs, limit, environment)
    again, driver = ended[:3], ended[3:]
    broken = [program.text for program in ended if not (program.done or program.hung)]
    if broken:
        pytest.fail(f"it failed at another attempt:\n{broken[0]}")
    hangs = sum(program.hung for program in driver)
    if not hangs:
        pytest.fail(f"it hangs, and {runs} programs without the library did not:\n{first.text}")
    if not any(program.done for program in again):
        pytest.xfail(f"the driver hangs: {hangs} of {runs} programs without the library did, too")
