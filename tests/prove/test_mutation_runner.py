"""The mutation runner on a small project: what its tests notice is caught, what they do not survives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prove import __main__ as command
from prove import mutants as printed
from prove import run
from prove.mutate import Mutant
from prove.probes import with_probes
from prove.run import Judge, Verdict, mutants_in, read_equivalents
from prove.sites import find_sites
from prove.slow import first_failure
from prove.trees import BrokenTree, Ran, Tree

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
    verdicts = Judge(project, test_seconds=1).run(
        mutants(project).values(), {DRAIN: "the loop has ended by then"}, report=told.append
    )
    assert {v.mutant.key: v.status for v in verdicts} == {
        PUSH: "caught", FORGET: "survived", KEPT: "survived", DRAIN: "equivalent",
    }  # fmt: skip
    caught = next(v for v in verdicts if v.status == "caught")
    assert caught.by == "tests/core/test_one.py::test_move", "which hangs"
    assert len(told) == 3, "equivalents are not judged"
    assert (project / "src" / "cuglue" / "core" / "one.py").read_text() == CODE, "the project is not touched"
    assert "core" in printed.table(verdicts)


def test_a_caught_mutant_names_its_test(project: Path) -> None:
    (project / "tests" / "core" / "test_one.py").write_text(TESTS + TEST_FORGET)
    (verdict,) = Judge(project).run([mutants(project)[FORGET]], {})
    assert (verdict.status, verdict.by) == ("caught", "tests/core/test_one.py::test_forget")


def test_no_verdict_over_failing_tests(project: Path) -> None:
    (project / "tests" / "core" / "test_one.py").write_text("def test_no():\n    assert False\n")
    with pytest.raises(BrokenTree, match=r"unchanged tree: tests/core/test_one\.py::test_no failed"):
        Judge(project).run(mutants(project).values(), {})


def test_no_verdict_without_tests(project: Path) -> None:
    (project / "tests" / "core" / "test_one.py").write_text("")
    with pytest.raises(BrokenTree, match="are none on the unchanged tree"):
        Judge(project).run(mutants(project).values(), {})


def test_no_verdict_over_tests_that_cannot_be_collected(project: Path) -> None:
    (project / "tests" / "core" / "test_one.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(BrokenTree, match=r"(?s)could not be collected.*nothing_of_this_name"):
        Judge(project).run(mutants(project).values(), {})


ORDER = """
import time
import one

def test_wants_a_fresh_module():
    time.sleep(0.1)
    assert not hasattr(one, "left")
    one.Queue().forget(1)

def test_leaves_something():
    one.left = True
    one.Queue().forget(1)
"""


def test_a_test_that_fails_in_this_order_anyway_catches_nothing(project: Path) -> None:
    """The quicker one goes first."""
    (project / "tests" / "core" / "test_one.py").write_text(ORDER)
    (verdict,) = Judge(project).run([mutants(project)[KEPT]], {})
    assert (verdict.status, verdict.by) == ("survived", "2 tests")


def test_a_site_that_nothing_reaches_survives(project: Path) -> None:
    (project / "tests" / "core" / "test_one.py").write_text("import one\ndef test_0(): pass\n")
    (verdict,) = Judge(project).run([mutants(project)[PUSH]], {})
    assert (verdict.status, verdict.by) == ("survived", "no test reaches it")


@pytest.fixture
def tree(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    made = Tree(project, tmp_path_factory.mktemp("trees") / "0", ["tests/core"], [], [])
    assert made.collected() == [f"tests/core/test_one.py::{name}" for name in ("test_push", "test_move")]
    yield made
    made.close()


def test_who_reaches_what(tree: Tree) -> None:
    path = tree.path / "src" / "cuglue" / "core" / "one.py"
    sites = list(enumerate(find_sites(CODE, "core/one.py")))
    marked = with_probes(CODE, sites)
    assert len(marked.splitlines()) == len(CODE.splitlines())
    *ran, end = tree.run([(name, 5.0) for name in tree_tests()], [(path, CODE, marked)])
    assert end == "done"
    texts = {n: site.text for n, site in sites}
    assert [{texts[n] for n in test.sites} for test in ran if isinstance(test, Ran)] == [
        {"self.done.append(item)"} if "self.done.append(item)" in texts.values() else set(),
        {"queue.push(item)", "queue.forget(item)", "self.kept.append(item)"},
    ]


def tree_tests() -> list[str]:
    return ["tests/core/test_one.py::test_push", "tests/core/test_one.py::test_move"]


def test_code_that_does_not_fit_is_told(tree: Tree) -> None:
    """Then the mutant is judged in a process that loads it anew."""
    path = tree.path / "src" / "cuglue" / "core" / "one.py"
    tests = [(name, 5.0) for name in tree_tests()]
    for changed, why in (
        (CODE + "\nlater = 1\n", "runs once"),
        (CODE.replace("def move(queue, item)", "def other(queue, item)"), "other functions"),
    ):
        (end,) = tree.run(tests, [(path, CODE, changed)])
        assert why in str(end)
    assert list(tree.run(tests))[-1] == "done", "the server goes on"


def test_a_test_that_takes_its_process_along_or_never_ends(project: Path, tmp_path: Path) -> None:
    (project / "tests" / "core" / "test_one.py").write_text(
        "import os, signal\n"
        "def test_dies(): os._exit(0)\n"
        "def test_is_deaf():\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "    while True: pass\n"
        "def test_good(): pass\n"
    )
    tree = Tree(project, tmp_path / "tree", ["tests/core"], [], [])
    try:
        dies, deaf, good = [(name, 0.2) for name in tree.collected()]
        assert list(tree.run([dies, good])) == ["crashed"]
        assert list(tree.run([deaf, good], grace=0.5)) == ["hung"]
        assert [type(end) for end in tree.run([good])] == [Ran, str]
    finally:
        tree.close()


def test_judged_in_a_process_of_its_own(project: Path) -> None:
    tests = tree_tests()
    assert first_failure(project, tests, 30) == ""
    path = project / "src" / "cuglue" / "core" / "one.py"
    path.write_text(CODE.replace("self.done.append(item)", "pass"))
    assert first_failure(project, tests, 30) == tests[0]
    assert first_failure(project, tests[1:], 1.5) == "the time limit"


def test_nested_sites_are_marked_apart() -> None:
    source = (
        "def f(a):\n    x = a.push(a.seq >= a.drain(), 1)\n    a.pins += a.join(\n        x)\n    return x\n"
    )
    sites = list(enumerate(find_sites(source, "core/x.py")))
    assert len(sites) == 5
    reached: list[int] = []

    class A:
        pins = seq = 1

        def __getattr__(self, name: str) -> object:
            return lambda *_: 1

    names: dict[str, object] = {"__reached__": lambda n: reached.append(n) or True}
    exec(with_probes(source, sites), names)
    assert names["f"](A()) == 1  # type: ignore[operator]
    assert sorted(reached) == [0, 1, 2, 3, 4]


def test_the_command_tells_survivors(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(printed, "ROOT", project)
    monkeypatch.setattr(
        printed, "read_equivalents", lambda: {KEPT: "nobody reads the list of what is kept here"}
    )
    assert command.main(["core/one.py::move::queue.forget", KEPT]) == 1
    told = capsys.readouterr().out
    assert f"survived: src/cuglue/core/one.py:15 {FORGET}" in told
    assert f"survived: src/cuglue/core/one.py:10 {KEPT}" not in told


def test_the_command_passes_when_nothing_survives(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printed, "ROOT", project)
    monkeypatch.setattr(
        printed, "read_equivalents", lambda: {FORGET: "nobody reads what is forgotten", KEPT: "same"}
    )
    assert command.main([FORGET, KEPT]) == 0
    assert command.main(["core/nothing.py"]) == 2


def test_an_equivalent_that_is_caught_is_told(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "tests" / "core" / "test_one.py").write_text(TESTS + TEST_FORGET)
    monkeypatch.setattr(printed, "ROOT", project)
    monkeypatch.setattr(printed, "read_equivalents", lambda: {FORGET: "wrongly argued"})
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


def test_everything_is_run_and_the_worst_counts(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []

    def proof(name: str, status: int) -> int:
        ran.append(name)
        return status

    proofs = {name: (lambda name=name, status=status: proof(name, status)) for name, status in
              (("one", 0), ("two", 2), ("three", 1))}  # fmt: skip
    assert command.everything(proofs) == 2
    assert ran == ["one", "two", "three"]
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [" ".join(line.split()[:2]) for line in lines] == ["one held", "two NO", "three FOUND"]


def test_what_the_layer_lets_live_meets_the_tests_of_the_others(project: Path) -> None:
    (project / "tests" / "memory").mkdir()
    (project / "tests" / "memory" / "test_far.py").write_text(
        "from one import Queue\n\ndef test_far():\n    queue = Queue()\n    queue.forget(1)\n    assert queue.kept\n"
    )
    told: list[Verdict] = []
    verdicts = Judge(project).run([mutants(project)[KEPT], mutants(project)[FORGET]], {}, report=told.append)
    assert {v.mutant.key: v.status for v in verdicts} == {KEPT: "caught", FORGET: "survived"}
    assert len(told) == len(verdicts) == 2
    assert next(v.by for v in verdicts if v.status == "caught") == "tests/memory/test_far.py::test_far"
