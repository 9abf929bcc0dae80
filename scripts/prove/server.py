"""A process that has collected the tests of a tree once, and runs chosen ones in forked copies of itself.

Owns the forks: what is patched in them and what they report. Must not know why a test is chosen. It runs inside the
tree that it serves, as a program of its own, and imports nothing of the project's tools:

    python server.py READ_FD WRITE_FD MODULE,MODULE... PYTEST-ARGUMENTS...

A request is a JSON object in a line: ``patches`` (file, old and new source), ``tests`` (node id and seconds each),
``stop`` (at the first failure), ``grace`` (seconds past a test's own until the fork is ended from outside). There is an
answer for each test that ran: ``test``, ``seconds``, ``failed``, ``sites`` (what ``__reached__`` was called with). Then
comes one with ``end``: "done", "failed", "hung", "crashed", or why it could not be patched.

New code is put into the functions that exist, so a fork costs no imports. What is loaded later comes from the disk.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import pytest


class CannotPatch(Exception):
    """The new code does not fit into the functions that exist."""


class Server:
    """The plugin that takes the place of pytest's loop over the tests."""

    def __init__(self, read: int, write: int, modules: Sequence[str]) -> None:
        self._requests = os.fdopen(read, encoding="utf-8")
        self._answers = write
        self._modules = modules
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}

    def pytest_configure(self) -> None:
        """Failing examples of hypothesis are not shrunk: one is enough."""
        try:
            from hypothesis import Phase, settings
        except ImportError:
            return
        settings.register_profile("judge", phases=(Phase.explicit, Phase.generate), database=None)
        settings.load_profile("judge")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve until the other end closes."""
        if session.testsfailed:
            self._say({"items": None})
            return True
        for name in self._modules:
            importlib.import_module(name)
        self._index()
        items = {item.nodeid: item for item in session.items}
        self._say({"items": list(items)})
        for line in self._requests:
            self._serve(json.loads(line), items)
        return True

    def _say(self, answer: dict[str, Any]) -> None:
        os.write(self._answers, json.dumps(answer).encode() + b"\n")

    def _index(self) -> None:
        """Every function there is, by where it was written."""
        gc.unfreeze()
        for thing in gc.get_objects():
            if type(thing) is FunctionType:
                code = thing.__code__
                key = code.co_filename, code.co_qualname, code.co_firstlineno
                self._functions.setdefault(key, []).append(thing)
        gc.collect()
        gc.freeze()

    def _serve(self, request: dict[str, Any], items: dict[str, pytest.Item]) -> None:
        """Fork, and pass on what the child says; end it when it takes too long."""
        ours, childs = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(ours)
            os.setsid()
            self._answers = childs
            try:
                self._child(request, items)
            except BaseException as error:  # noqa: BLE001 - the other end tells
                self._say({"end": f"{type(error).__name__}: {error}"})
            os._exit(0)
        os.close(childs)
        ended = self._relay(ours, [request["grace"] + seconds for _, seconds in request["tests"]])
        os.close(ours)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.waitpid(pid, 0)
        if ended:
            self._say({"end": ended})

    def _relay(self, pipe: int, limits: list[float]) -> str:
        """Pass on lines until the child's last; what is to be said if that never came."""
        rest = b""
        told = 0
        deadline = time.monotonic() + limits[0]
        while True:
            ready, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                return "hung"
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                return "crashed"
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                os.write(self._answers, line + b"\n")
                if b'"end":' in line:
                    return ""
            if lines:
                told += len(lines)
                deadline = time.monotonic() + limits[min(told, len(limits) - 1)]

    def _child(self, request: dict[str, Any], items: dict[str, pytest.Item]) -> None:
        sys.dont_write_bytecode = True  # what a changed source compiles to must not outlive it
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        quiet = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(quiet, fd)
        reached: set[int] = set()

        def reach(site: int) -> bool:
            reached.add(site)
            return True

        builtins.__reached__ = reach  # type: ignore[attr-defined]
        for path, old, new in request["patches"]:
            self._patch(path, old, new)
        gc.freeze()
        gc.unfreeze = lambda: (
            None
        )  # the fault sweep calls it: every collection would go through all tests there are
        chosen = [(items[name], seconds) for name, seconds in request["tests"]]
        outcome = _Outcome()
        chosen[0][0].config.pluginmanager.register(outcome)
        for number, (item, seconds) in enumerate(chosen):
            item.add_marker(pytest.mark.timeout(seconds), append=False)
            following = chosen[number + 1][0] if number + 1 < len(chosen) else None
            reached.clear()
            outcome.failed = False
            began = time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._say(
                {
                    "test": item.nodeid, "seconds": time.monotonic() - began, "failed": outcome.failed,
                    "sites": sorted(reached),
                }
            )  # fmt: skip
            if outcome.failed and request["stop"]:
                self._say({"end": "failed"})
                return
        self._say({"end": "done"})

    def _patch(self, path: str, old: str, new: str) -> None:
        """Give the functions of ``path`` the code that they have in ``new``, where it differs."""
        before, after = (
            dict(_outer_functions(compile(t, path, "exec", dont_inherit=True))) for t in (old, new)
        )
        if before.keys() != after.keys():
            raise CannotPatch("other functions than before")
        changed = [key for key in before if before[key] != after[key]]
        for key in changed:
            for function in self._functions.get((path, *key), ()):
                try:
                    function.__code__ = after[key]
                except ValueError as error:
                    raise CannotPatch(str(error)) from None
        if not changed:
            raise CannotPatch("code that runs once, when the module is loaded")


class _Outcome:
    """Sees whether a test failed, in whichever phase."""

    failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed


def _outer_functions(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """The functions and methods in ``code`` by qualified name and line, those in other functions left out."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x2:  # has fast locals: a function, no class body
                yield (constant.co_qualname, constant.co_firstlineno), constant
            else:
                yield from _outer_functions(constant)


def main(arguments: Sequence[str]) -> int:
    """Collect and serve."""
    read, write, modules, *options = arguments
    names = modules.split(",") if modules else []
    return int(pytest.main(options, plugins=[Server(int(read), int(write), names)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
