"""What must not stand in any file of the project: paths of one machine, registry hosts, work left for later."""

from __future__ import annotations

import re

import pytest
from source_tree import ROOT, project_files

# Spelled in pieces, so that this file passes its own test.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.~*-])/" + r"(work|root|home/\w+|opt/(pypi|wheels))(?=/|\b(?!\w))",
    "a package registry's host": r"\b(pypi|pythonhosted|debian|ubuntu)" + r"\.org\b(?!/licenses)",
    "work left for later": r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
}


def faults(text: str) -> list[str]:
    return [
        f"line {number}: {what}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        if re.search(pattern, line)
    ]


def test_no_file_holds_what_it_must_not() -> None:
    found = []
    for path in project_files():
        data = path.read_bytes()
        if b"\0" not in data:
            found += [f"{path.relative_to(ROOT)} {fault}" for fault in faults(data.decode(errors="replace"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["see /wo" + "rk/main", "cd /ro" + "ot/x", "# TO" + "DO later", "from py" + "pi.org"]
)
def test_a_fault_is_found(text: str) -> None:
    assert len(faults(text)) == 1


@pytest.mark.parametrize("text", ["docs/work/x", "the roots of x", "/roots", "XXXL", "a network/worker"])
def test_harmless_text_passes(text: str) -> None:
    assert faults(text) == []
