"""``python -m scripts.prove --exits``: runs the exit and fork matrix, each program in a process, and prints its table.

Owns the processes and the verdicts: code 0 and nothing on stderr. Must not know the programs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .endings import Program, programs

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 100.0
#: Python's own word on forks of processes with threads (from 3.12), which CUDA's process always has.
_FORKING = "ignore:This process:DeprecationWarning"


class Ending(NamedTuple):
    """How a program ended: its exit code (None: it hung) and what it left on stderr."""

    program: Program
    code: int | None
    stderr: str

    @property
    def clean(self) -> bool:
        """Whether it ended as promised."""
        return self.code == 0 and not self.stderr


def run(program: Program, driver: str = "sim", seconds: float = SECONDS) -> Ending:
    """Run one program to its end."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUGLUE_DRIVER": driver}
    environment.setdefault("PYOPENGL_PLATFORM", "egl")
    environment.pop("PYTHONWARNINGS", None)
    try:
        done = subprocess.run(
            [sys.executable, "-W", _FORKING, "-c", program.text],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stderr or b""
        return Ending(program, None, said.decode() if isinstance(said, bytes) else said)
    return Ending(program, done.returncode, done.stderr)


def main(driver: str = "sim", jobs: int = 2, only: Sequence[str] = (), limit: float = 1200.0) -> int:
    """Run the matrix and print its table; 1 if a program did not end as promised, or none was started in time.

    Args:
        driver: sim or cuda.
        jobs: programs at a time.
        only: parts of the names of rows; none: all.
        limit: seconds after which no further program is started.
    """
    chosen = [p for p in programs() if not only or any(word in f"{p.group}: {p.row}" for word in only)]
    deadline = time.monotonic() + limit
    endings: list[Ending] = []
    with ThreadPoolExecutor(jobs) as pool:
        for ending in pool.map(lambda p: run(p, driver) if time.monotonic() < deadline else None, chosen):
            if ending is not None:
                endings.append(ending)
                print(fault(ending), end="", flush=True)
    print(table(endings))
    if len(endings) < len(chosen):
        print(f"not run: {len(chosen) - len(endings)}")
    return int(len(endings) < len(chosen) or not endings or not all(ending.clean for ending in endings))


def fault(ending: Ending) -> str:
    """What was wrong, in lines; empty if nothing was."""
    if ending.clean:
        return ""
    group, row, column, _ = ending.program
    how = "hung" if ending.code is None else f"code {ending.code}"
    said = [f"    {line}" for line in ending.stderr.strip().splitlines()[-12:]]
    return "\n".join([f"{group}: {row} ({column}): {how}", *said, ""])


def table(endings: Sequence[Ending]) -> str:
    """Programs and faults by group and column; rows with faults by name."""
    lines = [f"{'':16}{'':18}{'programs':>9}{'faults':>8}"]
    ran: Counter[tuple[str, str]] = Counter((e.program.group, e.program.column) for e in endings)
    bad = Counter((e.program.group, e.program.column) for e in endings if not e.clean)
    lines += [f"{group:16}{column:18}{ran[group, column]:>9}{bad[group, column]:>8}" for group, column in ran]
    lines.append(f"{'all':34}{len(endings):>9}{sum(bad.values()):>8}")
    return "\n".join(lines)
