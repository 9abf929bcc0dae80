"""The suites as somebody else uses them: a package outside of the repository, right, and with a fault planted in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT, SRC

import cuglue

PACKAGE = Path(__file__).parent / "third_party"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Their tests, in their folder, with nothing of ours but the library."""
    shutil.copy(PACKAGE / "toys.py", folder / "toys.py") if not (folder / "toys.py").exists() else None
    shutil.copy(PACKAGE / "suites.py", folder / "test_toys.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUGLUE", "PYTEST"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *options],
        cwd=folder,
        env={**environment, "PYTHONPATH": f"{SRC}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_every_suite_passes_outside_of_the_repository(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 60


#: Something right in toys.py, what stands there instead, and a test that has to notice.
FAULTS = {
    "a resource that frees early": (
        "        self.upstream.deallocate(block)\n",
        "        self.upstream.deallocate(block)\n        self.upstream.allocate(block.nbytes)\n",
        "TestCountingResource::test_blocks_that_are_not_live_here",
    ),
    "a canvas whose map is somewhere else": (
        "return self.ptr, self.nbytes",
        "return self.driver.malloc(self.nbytes, 0), self.nbytes",
        "TestCanvas::test_A5_a_map_shows_what_the_object_holds",
    ),
    "an array with another layout": (
        "Layout.of(array.shape, array.dtype)",
        "Layout.of(array.shape[::-1], array.dtype)",
        "TestHostArray::test_numpy_gives_a_copy_with_the_values",
    ),
    "an array that outlives its end": (
        'self.export_owner.block.advance("deallocate")',
        "pass",
        "TestHostArray::test_after_the_end_exports_raise",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(tmp_path: Path, fault: str) -> None:
    right, wrong, noticed_by = FAULTS[fault]
    text = (PACKAGE / "toys.py").read_text()
    assert text.count(right) == 1
    (tmp_path / "toys.py").write_text(text.replace(right, wrong))
    done = run(tmp_path, "-k", noticed_by.split("::")[1])
    assert done.returncode == 1, done.stdout
    assert f"FAILED test_toys.py::{noticed_by}" in done.stdout


def test_each_is_some_fifteen_lines() -> None:
    suites = (PACKAGE / "suites.py").read_text().split("\nclass ")[1:]
    assert len(suites) == 4
    assert all(len(suite.splitlines()) <= 26 for suite in suites)


def test_the_guide_runs() -> None:
    """Each block of docs/testing.md after those before it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.DOTALL)
    assert len(blocks) > 6
    names: dict[str, object] = {"__name__": "guide"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/testing.md, block {number}", "exec"), names)
    assert names["hazard"].kind == "unordered access"  # type: ignore[attr-defined]
    assert issubclass(names["TestMyBudget"], cuglue.testing.ResourceSuite)  # type: ignore[arg-type]
