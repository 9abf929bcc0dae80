"""The GPU run's script: a hang and a lost process cost one test each, and the table tells the truth."""

from __future__ import annotations

import sys
from pathlib import Path

import gpu_suite
import pytest
from gpu_suite import Row, Suite, table
from source_tree import conftest_on_a_machine_with

TESTS = """
import ctypes, os, time
import pytest

pytestmark = pytest.mark.gpu

def test_first(): pass
def test_hangs(): time.sleep(60)
def test_hangs_in_a_call_that_keeps_the_interpreter(): ctypes.PyDLL(None).sleep(60)
def test_between(): pass
def test_takes_the_process_along(): os._exit(3)
def test_fails(): assert False
def test_last(): pass

@pytest.mark.skipif(True, reason="a gap")
def test_hides_a_gap(): pass
"""

ALONE = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.alone
def test_alone(): {0}('alone ')
def test_beside(): {0}('beside ')
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n    alone: x\n")
    (tmp_path / "tests" / "conftest.py").write_text(conftest_on_a_machine_with(devices=1))
    (tmp_path / "tests" / "test_all.py").write_text(TESTS)
    (tmp_path / "tests" / "test_good.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_good(): pass\n"
    )
    return tmp_path


def test_each_fault_costs_its_own_test(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "HANG_SECONDS", 1.0)
    suite = Suite(project / "out", test_seconds=2, total_seconds=100, root=project)
    suite.tests("tests", "gpu")
    broken, good = suite.rows
    assert (broken.passed, broken.failed, broken.lost, broken.not_run) == (3, 2, 3, 0)
    assert [fault.split("::")[-1] for fault in broken.bad] == [
        "test_hangs",
        "test_hangs_in_a_call_that_keeps_the_interpreter",
        "test_takes_the_process_along",
        "test_fails",
        "test_hides_a_gap",
    ]
    assert not broken.ok
    assert good.ok
    log = (project / "out" / "test_all.log").read_text()
    assert "in test_hangs_in_a_call_that_keeps_the_interpreter" in log, "its stack"


def test_what_wants_the_device_for_itself_comes_last_and_alone(project: Path) -> None:
    seen = f"open({str(project / 'order')!r}, 'a').write"
    body = ALONE.format(seen)
    (project / "tests" / "test_all.py").write_text(body)
    (project / "tests" / "test_good.py").write_text(body)
    suite = Suite(project / "out", test_seconds=20, total_seconds=100, root=project, jobs=2)
    suite.tests("tests", "gpu")
    assert (project / "order").read_text().split() == ["beside"] * 2 + ["alone"] * 2
    assert [(row.passed, row.ok) for row in suite.rows] == [(1, True)] * 4


def test_what_the_time_did_not_allow_is_shown_as_not_run(project: Path) -> None:
    suite = Suite(project / "out", test_seconds=2, total_seconds=100, root=project)
    suite._deadline = 0
    suite._collect = lambda where, marker: (  # type: ignore[method-assign]
        ["tests/test_good.py::test_good"] if "not alone" in marker else []
    )
    suite.tests("tests", "gpu")
    assert [(row.passed, row.not_run, row.ok) for row in suite.rows] == [(0, 1, False)]


def test_nothing_to_run_is_a_failure(project: Path) -> None:
    suite = Suite(project / "out", test_seconds=2, total_seconds=100, root=project)
    suite.tests("tests/test_good.py", "no_such_marker")
    assert [row.ok for row in suite.rows] == [False]


@pytest.mark.parametrize(("code", "ok"), [("pass", True), ("raise SystemExit(3)", False)])
def test_a_command_passes_when_it_exits_0(project: Path, code: str, ok: bool) -> None:
    suite = Suite(project / "out", test_seconds=2, total_seconds=100, root=project)
    suite.command("demo", [sys.executable, "-c", code], seconds=20)
    assert [row.ok for row in suite.rows] == [ok]


def test_a_part_that_hangs_leaves_its_stacks(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "src" / "cuglue").mkdir(parents=True)
    (project / "src" / "cuglue" / "__init__.py").touch()
    (project / "src" / "cuglue" / "__main__.py").write_text(
        "import ctypes, sys\ndef waits(): ctypes.PyDLL(None).sleep(60)\nsys.argv[1:] == ['demo'] and waits()\n"
    )
    monkeypatch.setattr(gpu_suite, "HANG_SECONDS", 4.0)
    suite = Suite(project / "out", test_seconds=2, total_seconds=100, root=project)
    suite.module("demo", ["demo"], seconds=5)
    suite.module("doctor", ["doctor"], seconds=20)
    assert [row.ok for row in suite.rows] == [False, True]
    assert "in waits" in (project / "out" / "demo.log").read_text()


def test_the_table_ends_in_the_verdict() -> None:
    rows = [
        Row("tests/a.py", passed=2),
        Row("tests/b.py", passed=1, lost=1, bad=["lost: tests/b.py::test_x"]),
    ]
    lines = table(rows).splitlines()
    assert lines[-1].split()[:5] == ["FAIL", "total", "3", "0", "1"]
    assert "lost: tests/b.py::test_x" in lines[-2]
