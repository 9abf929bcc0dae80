"""The public names: each is there, documented, and costs little to import."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from source_tree import ROOT

import cuglue

# What `import cuglue` must not bring in. NumPy alone is its dependency.
HEAVY = {"cupy", "cupyx", "cupy_backends", "torch", "jax", "numba", "OpenGL", "cuda", "moderngl", "scipy"}
IMPORT_BUDGET_SECONDS = 0.150


def is_ours(thing: object) -> bool:
    return (getattr(thing, "__module__", None) or "").split(".")[0] == "cuglue"


def members(name: str, thing: object) -> Iterator[tuple[str, object]]:
    """A public name, and for a class of ours the public methods and properties that it defines itself."""
    yield name, thing
    if inspect.isclass(thing) and is_ours(thing):
        for attribute, value in vars(thing).items():
            if attribute.startswith("_"):
                continue
            value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if inspect.isfunction(value) or isinstance(value, property):
                yield f"{name}.{attribute}", value


def public_names() -> list[str]:
    return sorted(cuglue.__all__)


def test_all_is_a_list_without_repeats() -> None:
    assert len(set(cuglue.__all__)) == len(cuglue.__all__)
    assert set(cuglue.__all__) == {name for name in dir(cuglue) if not name.startswith("__")}


@pytest.mark.parametrize("name", public_names())
def test_public_name_is_there_and_documented(name: str) -> None:
    thing = getattr(cuglue, name)
    if not (inspect.ismodule(thing) or is_ours(thing)):
        return  # a constant or an alias of a type that is not ours carries no docstring of its own
    bare = [where for where, member in members(name, thing) if not (inspect.getdoc(member) or "").strip()]
    assert not bare, f"no docstring: {bare}"


def takes_a_stream(member: object) -> bool:
    return inspect.isfunction(member) and "stream" in inspect.signature(member).parameters


@pytest.mark.parametrize("name", public_names())
def test_what_takes_a_stream_says_how_it_is_ordered(name: str) -> None:
    silent = [
        where
        for where, member in members(name, getattr(cuglue, name))
        if takes_a_stream(member)
        and not where.endswith("__init__")
        and not any(word in (inspect.getdoc(member) or "") for word in ("Ordering:", "Inherited"))
    ]
    assert not silent, f"an Ordering line says whether a call blocks the host or only enqueues: {silent}"


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "src", capture_output=True, text=True, check=True
    )
    return done.stdout


def test_import_loads_numpy_at_most() -> None:
    loaded = json.loads(run_python("import cuglue, json, sys; print(json.dumps(sorted(sys.modules)))"))
    assert "cuglue" in loaded
    assert not HEAVY & {name.split(".")[0] for name in loaded}


def test_import_is_quick() -> None:
    code = "import numpy, time; t = time.perf_counter(); import cuglue; print(time.perf_counter() - t)"
    best = min(float(run_python(code)) for _ in range(5))
    assert best < IMPORT_BUDGET_SECONDS, f"import cuglue costs {best * 1000:.0f} ms beyond NumPy"
