"""Copies of the project that may be changed, each with a process that runs its tests.

Owns the copies, the processes and the talk with them. Must not know mutants or verdicts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

SERVER = Path(__file__).with_name("server.py")
_NOT_COPIED = (
    ".*", "__pycache__", "gpu_report", "build", "dist", "shared", "docs",
)  # fmt: skip
_OPTIONS = (
    "-q",
    "-s",
    "--tb=short",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-m",
    "not interop and not gpu",
)


class BrokenTree(Exception):
    """The tests fail, or there are none, before anything was changed: no verdict would mean anything."""


class Ran(NamedTuple):
    """One test that ran: its node id, seconds, whether it failed, and the numbers of the sites it reached."""

    test: str
    seconds: float
    failed: bool
    sites: tuple[int, ...]


class Tree:
    """A copy of ``root`` below ``folder``, and a process in it that has collected ``tests``."""

    def __init__(
        self, root: Path, folder: Path, tests: Sequence[str], ignore: Sequence[str], modules: Sequence[str]
    ) -> None:
        shutil.copytree(root, folder, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        self.path = folder
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        theirs, write = os.pipe()
        read, their_write = os.pipe()
        command = [
            sys.executable, str(SERVER), str(theirs), str(their_write), ",".join(modules), *_OPTIONS,
            *(f"--ignore={path}" for path in ignore), *tests,
        ]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "100"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=self._said, stderr=subprocess.STDOUT,
            pass_fds=(theirs, their_write), start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.close(their_write)
        self._requests = os.fdopen(write, "w", encoding="utf-8")
        self._answers = os.fdopen(read, encoding="utf-8")

    def collected(self) -> list[str]:
        """The node ids of the tests there are.

        Raises:
            BrokenTree: none, or they cannot be collected.
        """
        items: list[str] | None = self._answer().get("items")
        if not items:
            said = "could not be collected" if items is None else "are none"
            if items is None:
                self._process.wait(60)  # it tells at its end
            raise BrokenTree(f"the tests {said} on the unchanged tree\n{self._output()}")
        return items

    def run(
        self,
        tests: Iterable[tuple[str, float]],
        patches: Iterable[tuple[Path, str, str]] = (),
        *,
        stop: bool = True,
        grace: float = 10.0,
    ) -> Iterator[Ran | str]:
        """Run tests, each within its seconds, in a fork with new code for some modules.

        Args:
            tests: node ids and seconds.
            patches: file below the tree, its source, and the source to run instead.
            stop: at the first failure.
            grace: seconds after which a test past its limit is ended from outside: it hangs where no signal reaches.

        Returns:
            What ran, one after another, and last how it ended: "done", "failed", "hung", "crashed", or why the code
            could not be put in place.
        """
        request = {
            "tests": list(tests), "stop": stop, "grace": grace,
            "patches": [(str(path), old, new) for path, old, new in patches],
        }  # fmt: skip
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        while True:
            answer = self._answer()
            if "end" in answer:
                yield answer["end"]
                return
            yield Ran(answer["test"], answer["seconds"], answer["failed"], tuple(answer["sites"]))

    @contextmanager
    def changed(self, path: Path, source: str) -> Iterator[None]:
        """The file with another content, for what is loaded later and for processes that tests start."""
        original, times = path.read_text(), path.stat()
        try:
            path.write_text(source)
            os.utime(
                path, (times.st_atime, times.st_mtime + 10)
            )  # compiled code of it is told apart by the time
            yield
        finally:
            path.write_text(original)
            os.utime(path, (times.st_atime, times.st_mtime))

    def close(self) -> None:
        """End the process, with whatever its tests started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        for file in (self._requests, self._answers, self._said):
            try:
                file.close()
            except BrokenPipeError:
                pass

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise BrokenTree(f"the process of the tests has ended\n{self._output()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _output(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")[-3000:]
