"""The project's own files, as the tests in ``tests/meta`` read them."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"


def package_modules() -> list[Path]:
    """Every module of the package."""
    return sorted((SRC / "cuglue").rglob("*.py"))


def module_name(path: Path, root: Path = SRC) -> str:
    """The dotted name that ``path`` is imported by."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def skipped(part: str) -> bool:
    """Whether a folder or file of this name is made by tools and no part of the project."""
    return (part.startswith(".") and part not in (".ci", ".gitignore")) or part in (
        "__pycache__",
        "gpu_report",
    )


def project_files() -> list[Path]:
    """Every file that belongs to the project: what git tracks or would, or in an unpacked archive, all but caches."""
    if shutil.which("git"):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
        if listed.returncode == 0:
            names = listed.stdout.decode().split("\0")
            return sorted(path for name in names if name and (path := ROOT / name).is_file())
    found = (path for path in ROOT.rglob("*") if not any(map(skipped, path.relative_to(ROOT).parts)))
    return sorted(path for path in found if path.is_file())


def conftest_on_a_machine_with(devices: int) -> str:
    """Our conftest for sample tests, told how many CUDA devices there are and leaving the CUDA driver alone."""
    return (
        (ROOT / "tests" / "conftest.py").read_text()
        + f"""

def cuda_device_count():
    return {devices}

@pytest.fixture(autouse=True)
def _driver_by_marker():
    yield
"""
    )


def docstring_nodes(tree: ast.AST) -> set[ast.AST]:
    """The string constants of ``tree`` that are docstrings."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found.add(first.value)
    return found
