"""Each sample kernel does on CUDA what its ``sim`` function does to NumPy views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sample_kernels import BLEND, INCREMENT, MIX, SAXPY, SUM4, TRANSPOSE

from cuglue import In, InOut, Out, Runtime
from cuglue.driver.sim import SimDriver

random = np.random.default_rng(7)


def floats(n: int) -> Any:
    return random.standard_normal(n).astype("f4")


def octets(n: int) -> Any:
    return random.integers(0, 256, n, "u1")


CASES: dict[str, tuple[Any, Any, Any, list[Any]]] = {
    "saxpy": (SAXPY, 8, 128, [In(floats(1000)), Out(np.zeros(1000, "f4")), 1.7, 1000]),
    "saxpy, less than all": (SAXPY, 8, 128, [In(floats(1000)), Out(np.ones(1000, "f4")), -0.3, 777]),
    "increment": (INCREMENT, 4, 64, [InOut(random.integers(-(2**31), 2**31, 256, "i4")), 256, 2**30]),
    "blend": (BLEND, 4, 256, [In(octets(999)), In(octets(999)), Out(np.zeros(999, "u1")), 999, 0.25, False]),
    "blend, inverted": (
        BLEND,
        4,
        256,
        [In(octets(99)), In(octets(99)), Out(np.zeros(99, "u1")), 99, 0.5, True],
    ),
    "transpose": (
        TRANSPOSE,
        (5, 3),
        (8, 8),
        [In(random.standard_normal(20 * 33)), Out(np.zeros(660)), 20, 33],
    ),
    "sum of vectors": (SUM4, 1, 64, [In(np.arange(256, dtype="f4")), Out(np.zeros(64, "f4")), 64]),
    "all scalar types": (
        MIX,
        1,
        32,
        [
            Out(np.zeros(12)),
            -7,
            200,
            -30000,
            60000,
            -(2**31),
            2**32 - 1,
            -(2**62),
            2**63,
            0.1,
            0.1,
            True,
            2**40,
        ],
    ),
}


def outcome(driver: Any, kernel: Any, grid: Any, block: Any, args: list[Any]) -> list[bytes]:
    with Runtime(driver=driver) as rt:
        given, written = [], []
        for arg in args:
            if isinstance(arg, (In, Out, InOut)):
                buffer = rt.create(arg.array)
                written.append(buffer)
                arg = type(arg)(buffer)
            given.append(arg)
        rt.launch(kernel, grid, block, *given)
        return [bytes(rt.read(buffer).result()) for buffer in written]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_cuda_and_sim_agree(case: str) -> None:
    assert outcome("cuda", *CASES[case]) == outcome(SimDriver(), *CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_sim_functions_write_what_they_declare(case: str) -> None:
    kernel, grid, block, args = CASES[case]
    results = outcome(SimDriver(), kernel, grid, block, args)
    declared = [arg for arg in args if isinstance(arg, (In, Out, InOut))]
    for declaration, result in zip(declared, results, strict=True):
        assert (result != declaration.array.tobytes()) is (declaration.access.writes)
