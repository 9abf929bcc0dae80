"""The mutation runner on a small project: what its tests notice is caught, what they do not survives."""

from __future__ import annotations

from pathlib import Path

import pytest
from prove import __main__ as command
from prove import run
from prove.mutate import Mutant
from prove.run import BrokenTree, Judge, Verdict, mutants_in, read_equivalents

CODE = """
class Queue:
    def __init__(self):
        self.done, self.kept = [], []

    def push(self, item):
        self.done.append(item)

    def forget(self, item):
        self.kept.append(item)


def move(queue, item):
    queue.push(item)
    queue.forget(item)
    while item not in queue.done:
        queue.drain()
"""
TESTS = """
from one import Queue, move


class Drained(Queue):
    def drain(self):
        pass


def test_push():
    queue = Drained()
    queue.push(1)
    assert queue.done == [1]


def test_move():
    queue = Drained()
    move(queue, 2)
    assert queue.done == [2]
"""
TEST_FORGET = """

def test_forget():
    queue = Drained()
    move(queue, 3)
    assert queue.kept == [3]
"""
PUSH = "core/one.py::move::queue.push(item) -> pass"  # hangs: nothing else ends the loop
FORGET = "core/one.py::move::queue.forget(item) -> pass"  # nobody looks
KEPT = "core/one.py::Queue.forget::self.kept.append(item) -> pass"  # nor here
DRAIN = "core/one.py::move::queue.drain() -> pass"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['src/cuglue/core']\n")
    (tmp_path / "src" / "cuglue" / "core").mkdir(parents=True)
    (tmp_path / "src" / "cuglue" / "core" / "one.py").write_text(CODE)
    (tmp_path / "tests" / "core").mkdir(parents=True)
    (tmp_path / "tests" / "core" / "test_one.py").write_text(TESTS)
    return tmp_path


def mutants(project: Path) -> dict[str, Mutant]:
    return {mutant.key: mutant for mutant in mutants_in(project / "src" / "cuglue")}


def test_the_sites_of_the_project(project: Path) -> None:
    assert set(mutants(project)) == {PUSH, FORGET, KEPT, DRAIN}


def test_verdicts(project: Path) -> None:
    told: list[Verdict] = []
    verdicts = Judge(project, seconds=8).run(
        mutants(project).values(), {DRAIN: "the loop has ended by then"}, report=told.append
    )
    assert {v.mutant.key: v.status for v in verdicts} == {
        PUSH: "caught", FORGET: "survived", KEPT: "survived", DRAIN: "equivalent",
    }  # fmt: skip
    caught = next(v for v in verdicts if v.status == "caught")
    assert caught.by == "the time limit"
    assert len(told) == 3, "equivalents are not judged"
    assert (project / "src" / "cuglue" / "core" / "one.py").read_text() == CODE, "the project is not touched"
    assert "core" in command.table(verdicts)


def test_a_caught_mutant_names_its_test(project: Path) -> None:
    (project / "tests" / "core" / "test_one.py").write_text(TESTS + TEST_FORGET)
    (verdict,) = Judge(project).run([mutants(project)[FORGET]], {})
    assert (verdict.status, verdict.by) == ("caught", "tests/core/test_one.py::test_forget")


def test_no_verdict_over_failing_tests(project: Path) -> None:
    (project / "tests" / "core" / "test_one.py").write_text("def test_no():\n    assert False\n")
    with pytest.raises(BrokenTree, match="failed on the unchanged tree"):
        Judge(project).run(mutants(project).values(), {})


def test_no_verdict_without_tests(project: Path) -> None:
    (project / "tests" / "core" / "test_one.py").write_text("")
    with pytest.raises(BrokenTree, match="had no tests"):
        Judge(project).run(mutants(project).values(), {})


def test_the_command_tells_survivors(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "ROOT", project)
    monkeypatch.setattr(
        command, "read_equivalents", lambda: {KEPT: "nobody reads the list of what is kept here"}
    )
    assert command.main(["core/one.py::move::queue.forget", KEPT]) == 1
    printed = capsys.readouterr().out
    assert f"survived: src/cuglue/core/one.py:15 {FORGET}" in printed
    assert f"survived: src/cuglue/core/one.py:10 {KEPT}" not in printed


def test_the_command_passes_when_nothing_survives(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ROOT", project)
    monkeypatch.setattr(
        command, "read_equivalents", lambda: {FORGET: "nobody reads what is forgotten", KEPT: "same"}
    )
    assert command.main([FORGET, KEPT]) == 0
    assert command.main(["core/nothing.py"]) == 2


def test_an_equivalent_that_is_caught_is_told(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "tests" / "core" / "test_one.py").write_text(TESTS + TEST_FORGET)
    monkeypatch.setattr(command, "ROOT", project)
    monkeypatch.setattr(command, "read_equivalents", lambda: {FORGET: "wrongly argued"})
    assert command.main([FORGET, "--all"]) == 1
    assert (
        "listed as equivalent, but caught by tests/core/test_one.py::test_forget" in capsys.readouterr().out
    )


def test_equivalents_are_read_with_their_arguments(tmp_path: Path) -> None:
    path = tmp_path / "equivalents.toml"
    path.write_text(f"[[equivalent]]\nmutant = '{PUSH}'\nbecause = '''\nfirst line\n  second line'''\n")
    assert read_equivalents(path) == {PUSH: "first line second line"}
    assert read_equivalents(tmp_path / "none.toml") == {}


def test_judges_leave_themselves_out() -> None:
    assert all((run.Path(__file__).parents[2] / name).is_file() for name in run.NOT_JUDGES)
