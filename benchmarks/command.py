"""Host cost of launches and replays beside the bare calls of CuPy, in one process and by turns.

Teaches: nothing; measures.   Needs: a CUDA device and CuPy.   Run: python benchmarks/command.py

Medians in microseconds, the difference and the ratio to the first line of each table; raw samples with --raw.
The last table says where the time of a launch and of a replay goes.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from timing import Samples, by_turns, table

import cuglue
from cuglue import In, InOut, Kernel, Out
from cuglue.command.perform import perform
from cuglue.command.resolve import bind
from cuglue.testing.faults import counts

KERNELS: dict[str, str] = {
    "saxpy": """extern "C" __global__ void saxpy(const float* x, float* y, float a, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = a * x[i]; }""",
    "touch": 'extern "C" __global__ void touch(int* x) { x[threadIdx.x] += 1; }',
}
N = 4096
GRID, BLOCK = (N // 256, 1, 1), (256, 1, 1)
WANTED = {"rt.launch, two buffers": "wanted: +10 us", "Graph.replay": "wanted: 1.3x"}


class Bench:
    """A runtime, a stream of its own, and the same work for CuPy and for us."""

    def __init__(self, rt: cuglue.Runtime, cp: Any) -> None:
        self.rt = rt
        self.stream = cp.cuda.Stream(non_blocking=True)
        with self.stream:
            self.a, self.b, self.c = cp.zeros(N, "f4"), cp.zeros(N, "f4"), cp.zeros(32, "i4")
            self.x, self.y = rt.create(np.zeros(N, "f4")), rt.empty(4 * N)
            self.z = rt.create(np.zeros(32, "i4"))
        self.raw, self.raw_touch = (cp.RawKernel(source, name) for name, source in KERNELS.items())
        self.kernel, self.touch = (Kernel(name, source) for name, source in KERNELS.items())
        self.scalars = np.float32(2), np.int32(N)

    def launch(self) -> None:
        """Ours."""
        self.rt.launch(self.kernel, GRID, BLOCK, In(self.x), Out(self.y), 2.0, N)

    def launches(self) -> Samples:
        """One kernel on two arrays."""
        rt, f, n = self.rt, *self.scalars
        with rt.command(In(self.x), Out(self.y)) as cmd:
            return by_turns(
                {
                    "bare RawKernel": lambda: self.raw(GRID, BLOCK, (self.a, self.b, f, n)),
                    "rt.launch, two buffers": self.launch,
                    "rt.launch of a RawKernel": lambda: rt.launch(
                        self.raw, GRID, BLOCK, In(self.x), Out(self.y), f, n
                    ),
                    "rt.launch, two CuPy arrays": lambda: rt.launch(
                        self.kernel, GRID, BLOCK, In(self.a), Out(self.b), 2.0, N
                    ),
                    "cmd.kernel": lambda: cmd.kernel(self.kernel, GRID, BLOCK, self.x, self.y, 2.0, N),
                    "rt.command, empty": lambda: rt.command(In(self.x), Out(self.y)).close(),
                },
                self.stream.synchronize,
            )

    def replays(self) -> Samples:
        """A graph of 20 kernels."""
        self.raw_touch((1,), (32,), (self.c,))
        self.rt.launch(self.touch, 1, 32, InOut(self.z))
        self.stream.synchronize()
        self.stream.begin_capture()
        for _ in range(20):
            self.raw_touch((1,), (32,), (self.c,))
        bare = self.stream.end_capture()
        with self.rt.capture() as capture:
            for _ in range(20):
                self.rt.launch(self.touch, 1, 32, InOut(self.z))
        with capture.graph as graph:
            driver, executable, handle = self.rt.driver, graph._executable, self.stream.ptr
            return by_turns(
                {
                    "CuPy's Graph.launch": lambda: bare.launch(self.stream),
                    "Graph.replay": graph.replay,
                    "the driver's part of it": lambda: driver.graph_launch(executable, handle),
                },
                self.stream.synchronize,
                batch=50,
            )

    def parts(self) -> Samples:
        """Where the time of a launch goes."""
        rt, place = self.rt, self.rt._place
        lane, loaded = rt._lanes.lane(), rt._context.find(self.kernel).handle
        args = In(self.x), Out(self.y), 2.0, N
        parameters = self.kernel.parameters
        values, spans, uses = bind("saxpy", parameters, args, place)
        handle, driver = self.stream.ptr, rt.driver
        return by_turns(
            {
                "all of it": self.launch,
                "the driver's call, its arguments packed": lambda: driver.kernel_launch(
                    loaded, GRID, BLOCK, values, spans, 0, handle
                ),
                "arguments checked and bound": lambda: bind("saxpy", parameters, args, place),
                "order, stamps and books": lambda: perform(lane, uses, "saxpy", int),
                "the current stream found": lambda: rt._lanes.lane(),
                "In and Out made": lambda: (In(self.x), Out(self.y)),
            },
            self.stream.synchronize,
        )

    def events(self) -> int:
        """Events and waits that a hundred repeats on one stream take."""
        with counts(driver=self.rt.driver) as counted:
            for _ in range(100):
                self.launch()
        return sum(counted[name] for name in ("event_create", "event_record", "stream_wait_event"))


def main() -> None:
    """Measure, print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", action="store_true", help="print every sample as JSON")
    arguments = parser.parse_args()
    import cupy as cp

    with cuglue.Runtime(driver="cuda") as rt:
        bench = Bench(rt, cp)
        with bench.stream:
            tables = {
                "One kernel on two arrays": bench.launches(),
                "A graph of 20 kernels": bench.replays(),
                "Where the time of rt.launch goes": bench.parts(),
            }
            events = bench.events()
        del bench
    for title, found in tables.items():
        table(title, found, WANTED)
    print(f"events and waits of 100 repeats on one stream: {events}  wanted: 0")
    if arguments.raw:
        print(json.dumps(tables))


if __name__ == "__main__":
    main()
