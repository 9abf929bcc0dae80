"""Transfers between host and device beside CuPy's and the bare driver's, in one process and by turns.

Teaches: nothing; measures.   Needs: a CUDA device and CuPy.   Run: python benchmarks/copies.py

Medians of blocking transfers in microseconds, GB/s, and the ratio to the first line of each table; raw samples with
--raw.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from timing import Samples, by_turns, table

import cuglue

SMALL = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
LARGE = (64 << 20, 256 << 20)
WANTED = {
    "write, NumPy memory": "wanted: no slower; 64 MiB and more: 2.5 times as fast",
    "rt.read": "wanted: no slower; 64 MiB and more: 5 times as fast",
    "write_to_cpu, NumPy memory": "wanted: no slower",
    "write, reserve_cpu memory": "wanted: 90% of the rate from 64 MiB on",
    "write_to_cpu, reserve_cpu memory": "wanted: 90% of the rate from 64 MiB on",
}


class Bench:
    """The same bytes in every kind of memory."""

    def __init__(self, rt: cuglue.Runtime, cp: Any, nbytes: int) -> None:
        self.rt = rt
        self.nbytes = nbytes
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.rounds, self.batch = (7, 1) if nbytes >= 64 << 20 else (15, 40 if nbytes < 1 << 20 else 8)
        self.data, self.out = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        with self.stream:
            self.array, self.buffer = cp.zeros(nbytes, "u1"), rt.empty(nbytes)
            self.pinned = rt.command().reserve_cpu(nbytes)
        self.pinned[:] = 1
        self.memory = cp.cuda.alloc_pinned_memory(nbytes)

    def measure(self) -> dict[str, Samples]:
        """Three tables: up, down, and through pinned memory."""
        array, stream, rt = self.array, self.stream, self.rt
        whole, settle = self.buffer.descriptor(self.nbytes), self.stream.synchronize
        with rt.command() as cmd:

            def send() -> None:
                cmd.write_to_gpu(whole, self.data)
                cmd.synchronize()

            def fetch() -> None:
                cmd.write_to_cpu(whole, self.out)  # blocks itself, as get() does

            def send_pinned() -> None:
                cmd.write_to_gpu(whole, self.pinned)
                cmd.synchronize()

            def fetch_pinned() -> None:
                cmd.write_to_cpu(whole, self.pinned)
                cmd.synchronize()

            def set_() -> None:
                array.set(self.data)
                settle()

            def bare_up() -> None:
                array.data.copy_from_host_async(self.memory.ptr, self.nbytes, stream)
                settle()

            def bare_down() -> None:
                array.data.copy_to_host_async(self.memory.ptr, self.nbytes, stream)
                settle()

            tables: dict[str, dict[str, Any]] = {
                "to the device, ordinary memory": {
                    "ndarray.set": set_,
                    "write, NumPy memory": send,
                },
                "to the host, new memory": {
                    "ndarray.get": lambda: array.get(),
                    "rt.read": lambda: rt.read(self.buffer).result(),
                    "read_async": lambda: cmd.read_async(whole).result(),
                },
                "to the host, the caller's memory": {
                    "ndarray.get(out=)": lambda: array.get(out=self.out),
                    "write_to_cpu, NumPy memory": fetch,
                },
                "to the device, pinned": {
                    "bare pinned copy": bare_up,
                    "write, reserve_cpu memory": send_pinned,
                },
                "to the host, pinned": {
                    "bare pinned copy": bare_down,
                    "write_to_cpu, reserve_cpu memory": fetch_pinned,
                },
            }
            return {
                title: by_turns(works, settle, self.batch, self.rounds) for title, works in tables.items()
            }


def main() -> None:
    """Measure, print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", action="store_true", help="print every sample as JSON")
    parser.add_argument("--small", action="store_true", help="4 KiB to 4 MiB only")
    arguments = parser.parse_args()
    import cupy as cp

    raw = {}
    with cuglue.Runtime(driver="cuda") as rt:
        for nbytes in SMALL if arguments.small else SMALL + LARGE:
            bench = Bench(rt, cp, nbytes)
            with bench.stream:
                found = bench.measure()
            for title, samples in found.items():
                size = f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
                table(f"{size} {title}", samples, WANTED, nbytes)
            raw[nbytes] = found
            del bench
    if arguments.raw:
        print(json.dumps(raw))


if __name__ == "__main__":
    main()
