"""Every kernel source compiles, without a GPU, for the oldest and the newest architecture that we promise.

A module that holds CUDA C++ says so: ``KERNELS: dict[str, str]`` at module level maps the name of each kernel to its
whole source, as it is given to the compiler. Sources made from a template are listed expanded. Modules of the package
and the examples are searched; importing an example must do nothing else. A string that defines a kernel in a module
without KERNELS is a source that this test would miss, and fails.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from source_tree import ROOT, SRC, docstring_nodes, module_name, package_modules

ARCHITECTURES = ("sm_75", "sm_90")


def defines_kernels(tree: ast.Module) -> bool:
    for node in tree.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        if any(isinstance(target, ast.Name) and target.id == "KERNELS" for target in targets):
            return True
    return False


def holds_a_source(tree: ast.Module) -> bool:
    documentation = docstring_nodes(tree)
    return any(
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.search(r"__global__\s+(void|__launch_bounds__)", node.value)
        and node not in documentation
        for node in ast.walk(tree)
    )


def candidates() -> list[Path]:
    return [*package_modules(), *sorted((ROOT / "examples").rglob("*.py"))]


def kernels_of(path: Path) -> dict[str, str]:
    if path.is_relative_to(SRC):
        module = importlib.import_module(module_name(path))
    else:
        spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    kernels: dict[str, str] = module.KERNELS
    return kernels


def all_kernels() -> Iterator[tuple[str, str]]:
    for path in candidates():
        if defines_kernels(ast.parse(path.read_text())):
            for name, source in kernels_of(path).items():
                yield f"{path.relative_to(ROOT)}::{name}", source


@cache
def supported() -> tuple[str, ...]:
    from cuda.bindings import nvrtc

    result, architectures = nvrtc.nvrtcGetSupportedArchs()[:2]
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS
    return tuple(f"sm_{number}" for number in architectures)


def compile_log(source: str, name: str, architecture: str) -> str:
    """Compile ``source`` to machine code; the compiler's words where it refuses, else the empty string."""
    from cuda.bindings import nvrtc

    success = nvrtc.nvrtcResult.NVRTC_SUCCESS
    result, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, None, None)
    assert result == success
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result == success:
            assert nvrtc.nvrtcGetCUBINSize(program)[1] > 0
            return ""
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        return log.decode(errors="replace") or str(result)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(architecture: str) -> None:
    assert architecture in supported()
    refused = {
        name: log for name, source in all_kernels() if (log := compile_log(source, name, architecture))
    }
    assert not refused, "\n".join(f"{name}: {log}" for name, log in refused.items())


def test_no_source_hides_from_this_test() -> None:
    hidden = []
    for path in candidates():
        tree = ast.parse(path.read_text())
        if holds_a_source(tree) and not defines_kernels(tree):
            hidden.append(str(path.relative_to(ROOT)))
    assert not hidden, f"CUDA sources outside a KERNELS table: {hidden}"


def test_a_faulty_source_is_refused() -> None:
    good = 'extern "C" __global__ void k(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] = 1; }'
    assert compile_log(good, "good", "sm_75") == ""
    assert "y" in compile_log(good.replace("x[", "y["), "bad", "sm_75")


def test_a_hidden_source_is_found() -> None:
    assert holds_a_source(ast.parse("SOURCE = '__global__ void k() {}'"))
    assert not holds_a_source(ast.parse("'''Looks for __global__ void.'''\nhint = 'Declare it __global__'"))
    assert defines_kernels(ast.parse("KERNELS: dict[str, str] = {}"))
