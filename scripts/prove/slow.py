"""Judges a mutant in a process that loads everything anew: code that runs once, when its module is loaded.

Owns that process. Must not know why a mutant needs it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", re.MULTILINE)


def first_failure(tree: Path, tests: Sequence[str], seconds: float) -> str:
    """Run tests until one fails; its name, or what else went wrong. Empty if all pass."""
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--timeout=30", *tests,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree / "src")}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # with whatever its tests started
            except ProcessLookupError:
                pass
            process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    if code == 0:
        return ""
    if code is None:
        return "the time limit"
    failed = _FAILED.search(said)
    return failed[1] if failed else f"exit status {code}"
