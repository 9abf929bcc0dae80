"""Imports go down only, and optional dependencies are imported late and in few places.

Every ``import`` in the package is read from its syntax tree, those inside functions and under TYPE_CHECKING too: a
dependency that only the type checker sees still ties two modules together.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from source_tree import SRC, module_name, package_modules

BASE = frozenset({"errors", "arguments", "lifecycle", "layout", "formats", "format_table"})
DRIVER = BASE | {"driver.protocol", "driver.registry"}
CORE = DRIVER | {"core"}
EXCHANGE = CORE | {"exchange"}
MEMORY = EXCHANGE | {"memory"}
GRAPHICS = MEMORY | {"graphics"}
COMMAND = GRAPHICS | {"command"}
ALL = COMMAND | {"driver", "testing", "tools"}

# What the modules of each unit may import; the longest unit that fits a module counts. A unit may import itself.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "lifecycle": frozenset({"errors"}),
    "arguments": frozenset({"errors"}),
    "layout": frozenset({"errors", "arguments"}),
    "format_table": frozenset({"errors", "layout"}),
    "formats": frozenset({"errors", "arguments", "layout", "format_table"}),
    "driver.protocol": BASE,
    "driver.registry": BASE | {"driver"},  # it makes the drivers that it names
    "driver.cuda": BASE | {"driver.protocol"},
    "driver.sim": BASE | {"driver.protocol"},
    "driver": BASE | {"driver.protocol"},
    "core": CORE,
    "exchange": EXCHANGE,
    "memory": MEMORY,
    "graphics": GRAPHICS,
    "command": COMMAND,
    "testing": ALL - {"tools"},
    "tools": ALL,
    "": ALL,  # cuglue/__init__.py and __main__.py
}

# Modules that may import parts of the package inside functions, so that a plain `import cuglue` stays cheap.
MAY_IMPORT_LATE = ("", "__main__", "driver.registry", "tools")

# Third parties beside NumPy: in these modules only, and inside functions.
OPTIONAL = frozenset(
    [
        "cupy",
        "cupyx",
        "cupy_backends",
        "cuda",
        "torch",
        "jax",
        "numba",
        "ml_dtypes",
        "OpenGL",
        "moderngl",
        "PIL",
        "tqdm",
    ]
)
MAY_USE_OPTIONAL = (
    "driver.cuda",
    "driver.cuda.*",
    "driver.sim.gl*",
    "memory.cupy_plug",
    "graphics.gl*",
    "exchange.*",
    "tools.*",
)

# The registry imports the CUDA driver when somebody chooses it; an import in each of its calls would cost every call.
MAY_USE_OPTIONAL_AT_ONCE = ("driver.cuda.*",)

# These stand above the package's front and use it as anybody does.
MAY_IMPORT_FRONT = ("", "tools", "testing")


@dataclass(frozen=True)
class Import:
    """One imported module as written: its absolute name, and where it stands."""

    name: str
    line: int
    in_function: bool
    type_only: bool


def imports(source: str, module: str, is_package: bool, known: frozenset[str]) -> Iterator[Import]:
    """Every import of ``source``. ``from package import module`` names the module where ``known`` has it."""

    def visit(node: ast.AST, in_function: bool, type_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, in_function, type_only)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{origin}.{alias.name}"
                yield Import(whole if whole in known else origin, node.lineno, in_function, type_only)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, in_function, True)
            for child in node.orelse:
                yield from visit(child, in_function, type_only)
        else:
            inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inside, type_only)

    yield from visit(ast.parse(source), False, False)


def under(name: str, units: frozenset[str] | tuple[str, ...]) -> bool:
    """Whether ``name`` is one of ``units`` or lies in one."""
    return any(name == unit or (unit and name.startswith(f"{unit}.")) for unit in units)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unit_of(name: str) -> str:
    """The row of MAY_IMPORT that a module of the package belongs to."""
    parts = name.split(".")
    candidates = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((unit for unit in candidates if unit in MAY_IMPORT), "")


def faults(source: str, module: str, is_package: bool, known: frozenset[str]) -> list[str]:
    """What breaks the rules in one module, as sentences."""
    here = module.removeprefix("cuglue").removeprefix(".")
    unit = unit_of(here)
    found = []
    for item in imports(source, module, is_package, known):
        top = item.name.split(".")[0]
        where = f"{module}:{item.line}: "
        if top == "cuglue":
            target = item.name.removeprefix("cuglue").removeprefix(".")
            if not target:
                if unit not in MAY_IMPORT_FRONT:
                    found.append(f"{where}{here} may not import the package's front")
            elif not (unit_of(target) == unit or under(target, MAY_IMPORT[unit] | {unit})):
                found.append(f"{where}{here or 'cuglue'} may not import {target}")
            elif item.in_function and not (unit_of(target) == unit or under(here, MAY_IMPORT_LATE)):
                found.append(
                    f"{where}{target} is imported inside a function: an import that must hide goes up"
                )
        elif top in OPTIONAL:
            if not matches(here, MAY_USE_OPTIONAL):
                found.append(f"{where}{here} may not import {item.name}")
            elif not (item.in_function or item.type_only or matches(here, MAY_USE_OPTIONAL_AT_ONCE)):
                found.append(f"{where}{item.name} must be imported inside a function")
        elif top not in sys.stdlib_module_names and top != "numpy":
            found.append(f"{where}{item.name} is no dependency of cuglue")
    return found


KNOWN = frozenset(module_name(path) for path in package_modules())


@pytest.mark.parametrize("path", package_modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_module_keeps_to_its_layer(path: Path) -> None:
    found = faults(path.read_text(), module_name(path), path.name == "__init__.py", KNOWN)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("cuglue.exchange.view", "from ..graphics import handle", "exchange.view may not import graphics"),
        ("cuglue.core.stream", "from ..memory.pool import Pool", "core.stream may not import memory.pool"),
        (
            "cuglue.core.stream",
            "from ..driver.cuda.streams import Queue",
            "may not import driver.cuda.streams",
        ),
        ("cuglue.driver.sim.clocks", "from ...core import block", "driver.sim.clocks may not import core"),
        ("cuglue.memory.pool.bins", "import cuglue.command", "memory.pool.bins may not import command"),
        ("cuglue.memory.direct", "def f():\n    from ..core.block import Block", "inside a function"),
        ("cuglue.memory.direct", "from cuglue import Runtime", "package's front"),
        ("cuglue.memory.cupy_plug", "import cupy", "must be imported inside a function"),
        ("cuglue.memory.direct", "def f():\n    import cupy.cuda", "memory.direct may not import cupy.cuda"),
        (
            "cuglue.graphics.handle",
            "if TYPE_CHECKING:\n    import torch",
            "graphics.handle may not import torch",
        ),
        ("cuglue.layout", "import attrs", "is no dependency"),
    ],
)
def test_a_fault_is_found(module: str, source: str, fault: str) -> None:
    (found,) = faults(source, module, False, KNOWN)
    assert fault in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cuglue.command.runtime", "from ..memory.resource import DeviceMemoryResource"),
        ("cuglue.graphics.gl_texture", "def f():\n    from OpenGL import GL"),
        ("cuglue.driver.cuda.memory", "def f():\n    from cuda.bindings import driver"),
        ("cuglue.exchange.dlpack", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("cuglue.driver.registry", "def f():\n    from .sim.device import SimDriver"),
        ("cuglue.core.retire", "import threading\nimport numpy as np\nfrom . import stream"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert faults(source, module, False, KNOWN) == []
