"""Run what needs a GPU, on a machine that has one: no network, no make, nothing installed.

Each test file runs in a process of its own, each test under a time limit. A hang or a lost process costs that test
alone: the rest of its file runs in a fresh process. One table comes last; exit 0 only when every row passed.

    python scripts/gpu_suite.py                      # doctor, the gpu tests, the demo
    python scripts/gpu_suite.py --part tests/memory --part demo --timeout 60
    python scripts/gpu_suite.py --part sanitize      # the tests marked so, under compute-sanitizer's memcheck
    python scripts/gpu_suite.py --part sanitize --tool all --jobs 8

Parts: doctor, tests, demo, sanitize, or the path of a test file or folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PARTS = ("doctor", "tests", "demo")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
START_UP_SECONDS = 90.0  # importing the array libraries and making the first context, per process
NO_TESTS_COLLECTED = 5
#: After a test's own time limit, which only runs where the interpreter is free: every thread's stack, and the end.
HANG_SECONDS = 5.0
#: ``python -m cuglue`` that ends itself so, after as many seconds as its first argument says.
WATCHED = """
import faulthandler, runpy, sys
faulthandler.dump_traceback_later(float(sys.argv.pop(1)), exit=True)
runpy.run_module("cuglue", run_name="__main__", alter_sys=True)
"""


@dataclass
class Row:
    """One line of the table."""

    name: str
    passed: int = 0
    failed: int = 0
    lost: int = 0  # hung or took their process with them
    not_run: int = 0
    seconds: float = 0.0
    bad: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something ran and nothing went wrong."""
        return self.passed > 0 and not (self.failed or self.lost or self.not_run)


class Suite:
    """Runs parts one after another within one time limit and collects their rows."""

    def __init__(
        self, output: Path, test_seconds: float, total_seconds: float, root: Path = ROOT, jobs: int = 1
    ) -> None:
        self.rows: list[Row] = []
        self._jobs = jobs
        self._root = root
        self._output = output
        self._test_seconds = test_seconds
        self._deadline = time.monotonic() + total_seconds
        paths = [str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        self._env.setdefault("PYOPENGL_PLATFORM", "egl")
        output.mkdir(parents=True, exist_ok=True)

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _run(self, command: Sequence[str], seconds: float, log: Path, **env: str) -> int | None:
        """Run a command with its output in ``log``; its exit status, or None when it had to be ended."""
        with open(log, "a", encoding="utf-8") as file:
            try:
                return subprocess.run(
                    command,
                    cwd=self._root,
                    env={**self._env, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=max(1.0, min(seconds, self._left())),
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return None

    def command(self, name: str, command: Sequence[str], seconds: float, **env: str) -> None:
        """A part that is one command: it passes when it exits 0."""
        log, began = self._output / f"{name}.log", time.monotonic()
        log.unlink(missing_ok=True)
        status = self._run(command, seconds, log, **env)
        row = Row(name, seconds=time.monotonic() - began)
        if status == 0:
            row.passed = 1
        elif status is None:
            row.lost, row.bad = 1, [f"no end within {seconds:.0f} s"]
        else:
            row.failed, row.bad = 1, [f"exit status {status}"]
        self._add(row, log)

    def module(self, name: str, arguments: Sequence[str], seconds: float, **env: str) -> None:
        """A part that is ``python -m cuglue``: where it hangs, its log has every thread's stack."""
        limit = max(1.0, min(seconds, self._left()) - HANG_SECONDS)
        self.command(name, [sys.executable, "-c", WATCHED, f"{limit:g}", *arguments], seconds, **env)

    def tests(self, where: str, marker: str, under: Mapping[str, Sequence[str]] | None = None) -> None:
        """Every test under ``where`` that has ``marker``, file by file; those marked ``alone`` last, one at a time.

        Args:
            where: a test file or folder.
            marker: which tests.
            under: name and command line of each tool to run them under, all at the same time; None: under none.
        """
        beside, alone = (self._by_file(where, f"({marker}) and {which}") for which in ("not alone", "alone"))
        if beside is None or alone is None:
            return
        if not beside and not alone:
            self._add(Row(where, failed=1, bad=[f"no test marked {marker} there"]))
        self._files(beside, self._jobs, marker, under or {"": ()})
        self._files(alone, 1, marker, under or {"": ()})

    def _by_file(self, where: str, marker: str) -> dict[str, list[str]] | None:
        tests = self._collect(where, marker)
        if tests is None:
            return None
        by_file: dict[str, list[str]] = {}
        for test in tests:
            by_file.setdefault(test.split("::")[0], []).append(test)
        return by_file

    def _files(
        self, by_file: dict[str, list[str]], jobs: int, marker: str, under: Mapping[str, Sequence[str]]
    ) -> None:
        with ThreadPoolExecutor(jobs) as files:
            running = [
                files.submit(self._file, *item, marker, tool, prefix)
                for tool, prefix in under.items()
                for item in by_file.items()
            ]
            for file in running:
                self._add(*file.result())

    def _collect(self, where: str, marker: str) -> list[str] | None:
        log = self._output / "collect.log"
        log.unlink(missing_ok=True)
        command = [*pytest_command(), "-q", "--collect-only", "-m", marker, where]
        status = self._run(command, START_UP_SECONDS, log)
        if status not in (0, NO_TESTS_COLLECTED):
            self._add(Row(where, failed=1, bad=["the tests could not be collected"]), log)
            return None
        return [line for line in log.read_text().splitlines() if "::" in line and not line.startswith(" ")]

    def _file(
        self, file: str, names: list[str], marker: str, tool: str, prefix: Sequence[str]
    ) -> tuple[Row, Path]:
        stem = file.removeprefix("tests/").removesuffix(".py").replace("/", "-") + (
            f"-{tool}" if tool else ""
        )
        log, progress = self._output / f"{stem}.log", self._output / f"{stem}.jsonl"
        log.unlink(missing_ok=True)
        row, began, waiting = Row(f"{tool}: {file}" if tool else file), time.monotonic(), names
        while waiting and self._left() > 0:
            progress.unlink(missing_ok=True)
            options = [
                f"--timeout={self._test_seconds:g}",
                "--timeout-method=thread",
                f"--progress-file={progress}",
                f"--hang={self._test_seconds + HANG_SECONDS:g}",
            ]
            command = [*prefix, *pytest_command(), "-m", marker, "--gpu-required", *options, *waiting]
            seconds = START_UP_SECONDS + self._test_seconds * len(waiting)
            status = self._run(command, seconds, log)
            ended, running = read_progress(progress, row)
            stacks = progress.with_name(f"{progress.name}.stacks")
            if stacks.is_file():
                log.write_text(log.read_text(errors="replace") + stacks.read_text(), encoding="utf-8")
                stacks.unlink()
            if running is not None:
                row.lost += 1
                row.bad.append(f"lost: {running}")
                ended.add(running)
            elif status not in (0, 1):
                row.failed += 1
                row.bad.append(
                    "the process had to be ended" if status is None else f"pytest ended with status {status}"
                )
            if not ended:
                break
            waiting = [name for name in waiting if name not in ended]
        row.not_run += len(waiting)
        row.seconds = time.monotonic() - began
        return row, log

    def _add(self, row: Row, log: Path | None = None) -> None:
        self.rows.append(row)
        print(f"{'ok  ' if row.ok else 'FAIL'} {row.name} ({row.seconds:.1f} s)", flush=True)
        if not row.ok and log is not None and log.is_file():
            print(
                "\n".join(f"     | {line}" for line in log.read_text(errors="replace").splitlines()[-60:]),
                flush=True,
            )


def pytest_command() -> list[str]:
    """Pytest, leaving no cache behind and never asking the terminal."""
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no"]


def read_progress(path: Path, row: Row) -> tuple[set[str], str | None]:
    """Count the results in a progress file into ``row``; the tests that ended, and the one that was running if any."""
    ended: set[str] = set()
    running = None
    failed: set[str] = set()
    for line in path.read_text().splitlines() if path.is_file() else []:
        entry = json.loads(line)
        test = entry["test"]
        if entry["event"] == "start":
            running = test
        elif entry["event"] == "result" and entry["outcome"] == "failed":
            failed.add(test)
        elif entry["event"] == "end":
            running = None
            ended.add(test)
            if test in failed:
                row.failed += 1
                row.bad.append(test)
            else:
                row.passed += 1
    return ended, running


def machine() -> list[str]:
    """What this ran on, for docs/gpu_runs.md."""
    lines = [
        f"date      {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
        f"python    {platform.python_version()}",
    ]
    for label, command in (
        ("commit", ["git", "describe", "--always", "--dirty"]),
        ("gpu", ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]),
    ):
        if shutil.which(command[0]):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            lines.append(f"{label:<9} {done.stdout.strip() or 'unknown'}")
    return lines


def table(rows: Sequence[Row]) -> str:
    """The summary, one line a part or test file, faults under their line."""
    width = max([len(row.name) for row in rows] + [5])
    lines = [
        f"{'':4} {'part':<{width}} {'passed':>6} {'failed':>6} {'lost':>5} {'not run':>7} {'seconds':>8}"
    ]
    total = Row("total")
    for row in rows:
        lines.append(table_line("ok" if row.ok else "FAIL", row, width))
        lines += [f"       {fault}" for fault in row.bad]
        for count in ("passed", "failed", "lost", "not_run", "seconds"):
            setattr(total, count, getattr(total, count) + getattr(row, count))
    lines.append(table_line("ok" if all(row.ok for row in rows) else "FAIL", total, width))
    return "\n".join(lines)


def table_line(verdict: str, row: Row, width: int) -> str:
    """One line of the table."""
    counts = f"{row.passed:>6} {row.failed:>6} {row.lost:>5} {row.not_run:>7} {row.seconds:>8.1f}"
    return f"{verdict:<4} {row.name:<{width}} {counts}"


def parts(
    suite: Suite, marker: str, demo_arguments: Sequence[str], tools: Sequence[str] = SANITIZERS[:1]
) -> dict[str, Callable[[], None]]:
    """The parts that have a name."""

    def sanitize() -> None:
        path = shutil.which("compute-sanitizer")
        if path is None:
            suite.rows.append(Row("sanitize", failed=1, bad=["compute-sanitizer is not on the PATH"]))
            return
        suite.tests("tests", "sanitize", {tool: sanitizer(path, tool) for tool in tools})

    return {
        "doctor": lambda: suite.module("doctor", ["doctor"], 120, CUGLUE_DRIVER="cuda"),
        "tests": lambda: suite.tests("tests", marker),
        "demo": lambda: suite.module("demo", ["demo", *demo_arguments], 300, CUGLUE_DRIVER="cuda"),
        "sanitize": sanitize,
    }


def sanitizer(path: str, tool: str) -> list[str]:
    """The command line that runs a program under one tool of compute-sanitizer."""
    # The CUDA libraries probe for calls that some drivers lack: errors of the API are no findings.
    quiet = ["--report-api-errors=no"] if tool == "memcheck" else []
    return [
        path,
        f"--tool={tool}",
        *quiet,
        "--error-exitcode=86",
    ]  # 86: seen in the table where it found something


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for; 0 when all passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", action="append", metavar="PART", help="repeatable; default: doctor, tests, demo"
    )
    parser.add_argument("--marker", default="gpu", metavar="M", help="run the tests with this marker (gpu)")
    parser.add_argument("--timeout", type=float, default=60, metavar="S", help="seconds for one test (60)")
    parser.add_argument(
        "--limit", type=float, default=1800, metavar="S", help="seconds for the whole run (1800)"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "gpu_report", metavar="DIR", help="where the logs go"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="test files at a time (1)")
    parser.add_argument(
        "--tool", choices=[*SANITIZERS, "all"], default="memcheck", help="of the part sanitize (memcheck)"
    )
    parser.add_argument("--demo-args", default="", metavar="'...'", help="arguments for the demo")
    options = parser.parse_args(arguments)

    suite = Suite(options.output.resolve(), options.timeout, options.limit, jobs=options.jobs)
    tools = SANITIZERS if options.tool == "all" else (options.tool,)
    named = parts(suite, options.marker, options.demo_args.split(), tools)
    for part in options.part or DEFAULT_PARTS:
        named.get(part, lambda where=part: suite.tests(where, options.marker))()
    print()
    print("\n".join(machine()))
    print(table(suite.rows))
    return 0 if suite.rows and all(row.ok for row in suite.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
