"""The exit and fork matrix: a selection of it here, all of it by ``python -m scripts.prove --exits``."""

from __future__ import annotations

import os

import pytest
from prove import exits
from prove.endings import PRELUDE, THINGS, USES, Program, programs
from prove.exits import Ending, run, table

MATRIX = {(p.group, p.row, p.column): p for p in programs()}
#: Each thing is alive at an exit, at a fork, and in a pair at least once.
SELECTION = [
    ("exit", "tensor, then handle", "as it is"),
    ("exit", "map, then worker", "GL first"),
    ("exit", "array, then future", "CUDA first"),
    ("exit", "capture, then map", "CUDA first"),
    ("fork", "before the import", "both work"),
    ("fork", "map", "child uses it"),
    ("fork", "worker", "child uses it"),
    ("fork", "future", "child only ends"),
    ("daemon threads", "launches and reads", "goes on"),
]


@pytest.mark.gl
@pytest.mark.parametrize("name", SELECTION, ids=" ".join)
def test_a_process_ends_with_code_0_and_says_nothing(name: tuple[str, str, str]) -> None:
    ending = run(MATRIX[name])
    assert (ending.code, ending.stderr) == (0, ""), ending.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", SELECTION, ids=" ".join)
def test_on_a_device(name: tuple[str, str, str]) -> None:
    ending = run(MATRIX[name], "cuda")
    assert (ending.code, ending.stderr) == (0, ""), ending.stderr


def test_every_pair_in_both_orders_is_there() -> None:
    rows = {row for group, row, _ in MATRIX if group == "exit"}
    assert len(rows) == len(THINGS) + len(THINGS) * (len(THINGS) - 1)
    assert set(USES) == set(THINGS)
    assert {row for group, row, _ in MATRIX if group == "fork"} >= set(THINGS)


@pytest.mark.parametrize(
    ("text", "code"),
    [("import sys; sys.exit(3)", 3), ("import os; os.write(2, b'said')", 0), ("raise SystemExit", 0)],
)
def test_the_verdict(text: str, code: int) -> None:
    ending = run(Program("exit", "sample", "as it is", text))
    assert ending.code == code
    assert ending.clean == (text == "raise SystemExit")


def test_a_program_that_hangs_is_a_fault() -> None:
    ending = run(Program("exit", "sample", "as it is", "import time; time.sleep(60)"), seconds=0.5)
    assert (ending.code, ending.clean) == (None, False)


def test_a_child_that_is_let_in_is_a_fault() -> None:
    """The text that the matrix uses would notice."""
    text = MATRIX["fork", "array", "child uses it"].text
    assert run(Program("fork", "sample", "", text.replace(USES["array"], "pass"))).code == 1


@pytest.mark.gl
def test_a_forked_child_does_not_close_its_parents_worker() -> None:
    ending = run(
        Program(
            "fork",
            "sample",
            "",
            MATRIX["fork", "worker", "child only ends"].text.partition("def use")[0]
            + """
parent, close = os.getpid(), first[0].ops.close
first[0].ops.close = lambda: close() if os.getpid() == parent else os.write(2, b"closed in the child")
forked(lambda: None)
""",
        )
    )
    assert (ending.code, ending.stderr) == (0, ""), ending.stderr


@pytest.mark.gl
def test_a_forked_child_ends_without_what_its_parents_libraries_do_at_exit() -> None:
    """OpenGL drivers free there what they share with the parent. The status stays, and what C code wrote is flushed."""
    text = """
gl()
c = ctypes.CDLL(None)
c.strdup.restype = ctypes.c_void_p
c.__cxa_atexit(c.perror, ctypes.c_void_p(c.strdup(b"a handler of the parent ran")), None)
ours, childs = os.pipe()
pid = os.fork()
if not pid:
    os.dup2(childs, 1)
    c.printf(b"written")
    sys.exit(7)
os.close(childs)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 7
assert os.read(ours, 99) == b"written"
os._exit(0)
"""
    ending = run(Program("fork", "sample", "", PRELUDE + text))
    assert (ending.code, ending.stderr) == (0, ""), ending.stderr


def test_the_table_and_the_status_tell_faults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = Program("exit", "sample", "as it is", f"import os; os.write(2, b'left by {os.getpid()}')")
    monkeypatch.setattr(exits, "programs", lambda: iter([sample]))
    assert exits.main() == 1
    printed = capsys.readouterr().out
    assert f"left by {os.getpid()}" in printed
    assert table([Ending(sample, 0, ""), Ending(sample, 1, "")]).splitlines()[-1].split() == ["all", "2", "1"]
    assert exits.main(only=["no such row"]) == 1, "nothing was run"
