"""Judges mutants: each in a copy of the tree, by the tests of its layer, until the first one fails.

Owns the copies, the time limits and the verdicts. Must not know how a mutant is made.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .mutate import Mutant, mutants_of
from .sites import find_sites

#: Which tests judge a layer, the nearest first. Later ones run only for mutants that the earlier let live.
TESTS: dict[str, tuple[str, ...]] = {
    "core": (
        "tests/core",
        "tests/prove",
        "tests/memory",
        "tests/exchange",
        "tests/command",
        "tests/graphics",
    ),
    "exchange": ("tests/exchange", "tests/prove", "tests/memory", "tests/command", "tests/graphics"),
    "memory": ("tests/memory", "tests/prove", "tests/exchange", "tests/command", "tests/graphics"),
    "graphics": ("tests/graphics", "tests/prove", "tests/command"),
    "command": ("tests/command", "tests/prove", "tests/graphics"),
}
#: These run the tools of this folder themselves.
NOT_JUDGES = ("tests/prove/test_mutation_runner.py",)
EQUIVALENTS = Path(__file__).with_name("equivalents.toml")
_NOT_COPIED = (
    ".git",
    ".venv*",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
    "gpu_report",
    "build",
    "dist",
    "shared",
)
_NO_TESTS = 5
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said of one mutant.

    Attributes:
        status: "caught", "equivalent" (nobody can tell, see ``by``) or "survived".
        by: the test that failed, or the argument.
    """

    mutant: Mutant
    status: str
    by: str
    seconds: float


class BrokenTree(Exception):
    """The tests fail, or there are none, before anything was changed: no verdict would mean anything."""


def mutants_in(package: Path, only: Sequence[str] = ()) -> list[Mutant]:
    """Every mutant of the layers that have tests, or of those whose key begins with one of ``only``."""
    found = []
    for layer in TESTS:
        for path in sorted((package / layer).rglob("*.py")):
            for site in find_sites(path.read_text(), path.relative_to(package).as_posix()):
                found += [m for m in mutants_of(site) if not only or m.key.startswith(tuple(only))]
    return found


def read_equivalents(path: Path = EQUIVALENTS) -> dict[str, str]:
    """Mutants that no test can tell from the original, each with the argument why."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        table = tomllib.load(file)
    return {entry["mutant"]: " ".join(entry["because"].split()) for entry in table.get("equivalent", [])}


class Judge:
    """Copies of one tree and the tests in it.

    Args:
        root: the tree; nothing is written there.
        package: the package in it, relative to ``root``.
        seconds: limit of one run; a mutant that hangs is caught.
        jobs: copies that work at the same time.
        tests: folders or files that judge, instead of :data:`TESTS`.
    """

    def __init__(
        self,
        root: Path,
        package: str = "src/cuglue",
        *,
        seconds: float = 600.0,
        jobs: int = 1,
        tests: Sequence[str] = (),
    ) -> None:
        self._root = root
        self._package = package
        self._seconds = seconds
        self._jobs = jobs
        self._judges = tuple(tests)

    def run(
        self,
        mutants: Iterable[Mutant],
        equivalents: dict[str, str],
        *,
        report: Callable[[Verdict], None] = lambda _: None,
    ) -> list[Verdict]:
        """Judge every mutant that is not listed as equivalent.

        Raises:
            BrokenTree: the tests do not pass on the unchanged tree.
        """
        verdicts = []
        work: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        suites: set[tuple[str, ...]] = set()
        for mutant in mutants:
            if mutant.key in equivalents:
                verdicts.append(Verdict(mutant, "equivalent", equivalents[mutant.key], 0.0))
            else:
                work.put(mutant)
                suites.add(self._tests(mutant))
        lock = threading.Lock()
        errors: list[BaseException] = []

        def judge_all(tree: Path) -> None:
            try:
                while not errors:
                    verdict = self._judge(tree, work.get_nowait())
                    with lock:
                        verdicts.append(verdict)
                        report(verdict)
            except queue.Empty:
                pass
            except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
                errors.append(error)

        with tempfile.TemporaryDirectory(prefix="cuglue-prove-") as folder:
            trees = [self._copy(Path(folder) / str(i)) for i in range(self._jobs)]
            for suite in sorted(suites):
                self._check(trees[0], suite)
            threads = [threading.Thread(target=judge_all, args=(tree,)) for tree in trees]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return verdicts

    def _tests(self, mutant: Mutant) -> tuple[str, ...]:
        folders = self._judges or TESTS[mutant.site.module.split("/")[0]]
        return tuple(folder for folder in folders if _has_tests(self._root / folder))

    def _copy(self, tree: Path) -> Path:
        shutil.copytree(self._root, tree, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        return tree

    def _check(self, tree: Path, tests: tuple[str, ...]) -> None:
        code, output = self._pytest(tree, tests)
        if code != 0:
            said = "took too long" if code is None else "had no tests" if code == _NO_TESTS else "failed"
            raise BrokenTree(f"{' '.join(tests) or 'nothing'} {said} on the unchanged tree\n{output[-2000:]}")

    def _judge(self, tree: Path, mutant: Mutant) -> Verdict:
        path = tree / self._package / mutant.site.module
        original = path.read_text()
        began = time.monotonic()
        path.write_text(mutant.apply(original))
        try:
            code, output = self._pytest(tree, self._tests(mutant))
        finally:
            path.write_text(original)
        seconds = time.monotonic() - began
        if code == 0:
            return Verdict(mutant, "survived", "", seconds)
        if code is None:
            return Verdict(mutant, "caught", "the time limit", seconds)
        failed = _FAILED.search(output)
        return Verdict(mutant, "caught", failed[1] if failed else f"exit status {code}", seconds)

    def _pytest(self, tree: Path, tests: Sequence[str]) -> tuple[int | None, str]:
        """Exit status (None: too slow) and output of the tests of ``tree``."""
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--timeout=30",
            *(f"--ignore={path}" for path in NOT_JUDGES), *tests,
        ]  # fmt: skip
        # No bytecode: a mutant of the same length within the same second would be taken for its predecessor.
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree / "src")}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(self._seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)  # with whatever its tests started
            output.seek(0)
            return code, output.read().decode(errors="replace")


def _has_tests(path: Path) -> bool:
    return path.is_file() or any(path.rglob("test_*.py"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the session that ``process`` leads."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
