"""Two small kernels over bytes, each with what it does to NumPy views. The two must agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuglue import Kernel


def _scale(grid: Any, block: Any, x: Any, m: Any, y: Any, n: Any, factor: Any, offset: Any) -> None:
    source, target = x.reshape(-1), y.reshape(-1)
    target[:] = source[np.arange(int(n)) % int(m)] * factor + offset


def _add(grid: Any, block: Any, x: Any, n: Any, value: Any) -> None:
    flat = x.reshape(-1)
    flat += value


SCALE = Kernel(
    "scale",
    """
extern "C" __global__ void scale(const unsigned char* x, int m, unsigned char* y, int n,
                                 unsigned char factor, unsigned char offset) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i % m] * factor + offset;
}""",
    sim=_scale,
)
ADD = Kernel(
    "add",
    """
extern "C" __global__ void add(unsigned char* x, int n, unsigned char value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += value;
}""",
    sim=_add,
)
