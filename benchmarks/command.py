"""Host cost of launches, replays and transfers, beside the bare calls of CuPy, in one process.

Teaches: nothing; measures.   Needs: a CUDA device and CuPy.   Run: python benchmarks/command.py

Medians of repeated batches in microseconds, or GB/s; raw samples with --raw.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import cuglue
from cuglue import In, InOut, Kernel, Out

KERNELS: dict[str, str] = {
    "saxpy": """extern "C" __global__ void saxpy(const float* x, float* y, float a, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = a * x[i]; }""",
    "touch": 'extern "C" __global__ void touch(int* x) { x[threadIdx.x] += 1; }',
}
N = 4096


def host_cost(
    work: Callable[[], Any], settle: Callable[[], Any], batch: int = 200, repeats: int = 25
) -> list[float]:
    """Microseconds of one call, each sample the mean of a batch; the device is idle before each batch."""
    samples = []
    for _ in range(repeats + 2):
        settle()
        start = time.perf_counter()
        for _ in range(batch):
            work()
        samples.append((time.perf_counter() - start) / batch * 1e6)
    return samples[2:]


def rate(work: Callable[[], Any], nbytes: int, repeats: int = 9) -> list[float]:
    """GB/s of one blocking transfer."""
    samples = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        samples.append(nbytes / (time.perf_counter() - start) / 1e9)
    return samples[2:]


def launches(rt: cuglue.Runtime, cp: Any) -> dict[str, list[float]]:
    """One kernel on two arrays."""
    stream = cp.cuda.Stream(non_blocking=True)
    raw = cp.RawKernel(KERNELS["saxpy"], "saxpy")
    ours = Kernel("saxpy", KERNELS["saxpy"])
    found = {}
    with stream:
        a, b = cp.zeros(N, "f4"), cp.zeros(N, "f4")
        x, y = rt.create(np.zeros(N, "f4")), rt.empty(4 * N)
        f, n = np.float32(2), np.int32(N)
        grid, block = (N // 256, 1, 1), (256, 1, 1)
        settle = stream.synchronize
        found["bare RawKernel"] = host_cost(lambda: raw(grid, block, (a, b, f, n)), settle)
        found["rt.launch, buffers"] = host_cost(
            lambda: rt.launch(ours, grid, block, In(x), Out(y), 2.0, N), settle
        )
        found["rt.launch, RawKernel"] = host_cost(
            lambda: rt.launch(raw, grid, block, In(x), Out(y), f, n), settle
        )
        found["rt.launch, CuPy arrays"] = host_cost(
            lambda: rt.launch(ours, grid, block, In(a), Out(b), 2.0, N), settle
        )
        with rt.command(In(x), Out(y)) as cmd:
            found["cmd.kernel"] = host_cost(lambda: cmd.kernel(ours, grid, block, x, y, 2.0, N), settle)
        found["rt.command, empty"] = host_cost(lambda: rt.command(In(x), Out(y)).close(), settle)
    return found


def replays(rt: cuglue.Runtime, cp: Any) -> dict[str, list[float]]:
    """A graph of 20 kernels."""
    stream = cp.cuda.Stream(non_blocking=True)
    ours = Kernel("touch", KERNELS["touch"])
    raw = cp.RawKernel(KERNELS["touch"], "touch")
    with stream:
        a = cp.zeros(32, "i4")
        raw((1,), (32,), (a,))
        stream.begin_capture()
        for _ in range(20):
            raw((1,), (32,), (a,))
        bare = stream.end_capture()
        x = rt.create(np.zeros(32, "i4"))
        stream.synchronize()
        with rt.capture(stream) as capture:
            for _ in range(20):
                rt.launch(ours, 1, 32, InOut(x))
        graph = capture.graph
        found = {
            "CuPy Graph.launch": host_cost(lambda: bare.launch(stream), stream.synchronize, batch=50),
            "Graph.replay": host_cost(graph.replay, stream.synchronize, batch=50),
        }
        graph.close()
    return found


def transfers(rt: cuglue.Runtime, cp: Any, nbytes: int) -> dict[str, list[float]]:
    """Ordinary NumPy memory to the device and back, and memory from reserve_cpu."""
    data = np.ones(nbytes, np.uint8)
    with cp.cuda.Stream(non_blocking=True) as stream:
        a = cp.zeros(nbytes, "u1")
        x = rt.empty(nbytes)
        whole = x.descriptor(nbytes)
        with rt.command() as cmd:
            pinned = cmd.reserve_cpu(nbytes)
            pinned[:] = 1
            memory = cp.cuda.alloc_pinned_memory(nbytes)

            def bare() -> None:
                a.data.copy_from_host_async(memory.ptr, nbytes, stream)
                stream.synchronize()

            def send(source: Any) -> None:
                cmd.write_to_gpu(whole, source)
                cmd.synchronize()

            def set_() -> None:
                a.set(data)
                stream.synchronize()

            return {
                "bare pinned copy": rate(bare, nbytes),
                "write, pinned": rate(lambda: send(pinned), nbytes),
                "ndarray.set": rate(set_, nbytes),
                "write, NumPy": rate(lambda: send(data), nbytes),
                "ndarray.get": rate(lambda: a.get(), nbytes),
                "read": rate(lambda: cmd.read_async(whole).result(), nbytes),
            }


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", action="store_true", help="print every sample as JSON")
    arguments = parser.parse_args()
    import cupy as cp

    with cuglue.Runtime(driver="cuda") as rt:
        tables = {
            "launch (us)": launches(rt, cp),
            "20 kernels (us)": replays(rt, cp),
            **{
                f"{size >> 20} MiB (GB/s)": transfers(rt, cp, size) for size in (1 << 20, 64 << 20, 256 << 20)
            },
        }
    for title, rows in tables.items():
        print(title)
        for name, samples in rows.items():
            print(f"  {name:26s} {statistics.median(samples):10.2f}")
    if arguments.raw:
        print(json.dumps(tables))


if __name__ == "__main__":
    main()
