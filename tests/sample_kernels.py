"""Small kernels for tests, each with what it does to NumPy views. The two must agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuglue import Kernel

_INDEX = "int i = blockIdx.x * blockDim.x + threadIdx.x;"

SOURCES = {
    "saxpy": f"""
    extern "C" __global__ void saxpy(const float* x, float* y, float a, int n) {{
        {_INDEX}
        if (i < n) y[i] = a * x[i];
    }}""",
    "increment": f"""
    extern "C" __global__ void increment(int* x, unsigned long long n, int by) {{
        {_INDEX}
        if (i < n) x[i] += by;
    }}""",
    "blend": f"""
    extern "C" __global__ void blend(const unsigned char* a, const unsigned char* b, unsigned char* out,
                                     unsigned int n, float t, bool invert) {{
        {_INDEX}
        if (i >= n) return;
        float v = (1.0f - t) * a[i] + t * b[i];
        unsigned char c = (unsigned char)v;
        out[i] = invert ? 255 - c : c;
    }}""",
    "transpose": """
    extern "C" __global__ void transpose(const double* in, double* out, int rows, int columns) {
        int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y * blockDim.y + threadIdx.y;
        if (r < rows && c < columns) out[(size_t)c * rows + r] = in[(size_t)r * columns + c];
    }""",
    "sum4": f"""
    extern "C" __global__ void sum4(const float4* in, float* out, long long n) {{
        {_INDEX}
        if (i < n) out[i] = in[i].x + in[i].y + in[i].z + in[i].w;
    }}""",
    "mix": """
    extern "C" __global__ void mix(double* out, signed char a, unsigned char b, short c, unsigned short d, int e,
                                   unsigned f, long long g, unsigned long long h, float p, double q, bool t, size_t z) {
        if (threadIdx.x || blockIdx.x) return;
        double v[12] = {(double)a, (double)b, (double)c, (double)d, (double)e, (double)f, (double)g, (double)h,
                        (double)p, q, t ? 1.0 : 0.0, (double)z};
        for (int k = 0; k < 12; ++k) out[k] = v[k];
    }""",
}


def _saxpy(grid: Any, block: Any, x: Any, y: Any, a: Any, n: Any) -> None:
    y[:n] = a * x[:n]


def _increment(grid: Any, block: Any, x: Any, n: Any, by: Any) -> None:
    x[:n] += by


def _blend(grid: Any, block: Any, a: Any, b: Any, out: Any, n: Any, t: Any, invert: Any) -> None:
    one = np.float32(1)
    value = ((one - t) * a[:n].astype("f4") + t * b[:n].astype("f4")).astype("u1")
    out[:n] = 255 - value if invert else value


def _transpose(grid: Any, block: Any, source: Any, out: Any, rows: Any, columns: Any) -> None:
    flat = source.reshape(-1)[: int(rows) * int(columns)].reshape(rows, columns)
    out.reshape(-1)[: flat.size] = flat.T.reshape(-1)


def _sum4(grid: Any, block: Any, source: Any, out: Any, n: Any) -> None:
    four = source.reshape(-1, 4)[:n]
    out[:n] = four[:, 0] + four[:, 1] + four[:, 2] + four[:, 3]


def _mix(grid: Any, block: Any, out: Any, *values: Any) -> None:
    out[:12] = [float(value) for value in values]


SIM = {
    "saxpy": _saxpy,
    "increment": _increment,
    "blend": _blend,
    "transpose": _transpose,
    "sum4": _sum4,
    "mix": _mix,
}

SAXPY, INCREMENT, BLEND, TRANSPOSE, SUM4, MIX = (
    Kernel(name, source, sim=SIM[name]) for name, source in SOURCES.items()
)
