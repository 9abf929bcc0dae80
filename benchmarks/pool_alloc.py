"""Time of one allocation and free through CuPy, for our pool and its peers, in one process.

Teaches: nothing; measures.   Needs: a CUDA device and CuPy.   Run: python benchmarks/pool_alloc.py

Each contestant is CuPy's allocator in turn, round after round, so that a machine that slows down slows all of them. The
tables have medians in nanoseconds and ratios to CuPy's MemoryPool and to RMM's pool, the last one what is wanted of our
pool; --raw FILE keeps every sample. Peers that are not installed are left out and named.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cuglue
from cuglue import (
    AsyncCudaResource,
    DirectCudaResource,
    ExpandableCudaResource,
    GlobalDeviceBudget,
    PoolResource,
)

KIB, MIB = 1 << 10, 1 << 20
LIVE = 256
WARM = 6000  # allocations on a stream before those that are timed
OURS, CUPY, RMM = "cuglue pool", "CuPy MemoryPool", "RMM pool"
MOST_OF_CUPY = {"one size": 1.3}  # what our pool may take of the time of CuPy's; mixed sizes: 1.0
MOST_OF_RMM = 0.35
Malloc = Callable[[int], Any]
Work = Callable[[], None]
Cell = tuple[str, int, int]  # workload, streams, threads


# --- contestants ----------------------------------------------------------------------------------------------------


class Contestant:
    """An allocator function for CuPy, and how to end it."""

    def __init__(self, malloc: Malloc, close: Callable[[], Any]) -> None:
        self.malloc = malloc
        self.close = close


def _ours(make: Callable[[], Any]) -> Contestant:
    resource = make()
    return Contestant(resource.malloc, resource.close)


def _cupy_pool() -> Contestant:
    import cupy

    pool = cupy.cuda.MemoryPool()
    return Contestant(pool.malloc, pool.free_all_blocks)


def _cupy_async_pool() -> Contestant:
    import cupy

    pool = cupy.cuda.MemoryAsyncPool()
    return Contestant(pool.malloc, pool.free_all_blocks)


def _cupy_malloc_async() -> Contestant:
    import cupy

    return Contestant(cupy.cuda.malloc_async, lambda: None)


def _rmm(kind: str) -> Contestant:
    import rmm
    from rmm.allocators.cupy import rmm_cupy_allocator

    former = rmm.mr.get_current_device_resource()
    if kind == "pool":
        resource = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=1 << 30)
    else:
        resource = rmm.mr.CudaAsyncMemoryResource()
    rmm.mr.set_current_device_resource(resource)
    return Contestant(rmm_cupy_allocator, lambda: rmm.mr.set_current_device_resource(former))


def _torch() -> Contestant:
    import cupy
    import torch

    torch.cuda.init()
    allocate, delete = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
    pool = cupy.cuda.PythonFunctionAllocator(
        lambda size, device: allocate(size, device, cupy.cuda.get_current_stream().ptr),
        lambda ptr, device: delete(ptr),
    )
    return Contestant(pool.malloc, torch.cuda.empty_cache)


def _cuda_core() -> Contestant:
    import cupy
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    resource = device.memory_resource
    streams: dict[int, Any] = {}

    def malloc(nbytes: int) -> Any:
        current = cupy.cuda.get_current_stream()
        stream = streams.get(current.ptr)
        if stream is None:
            stream = streams[current.ptr] = device.create_stream(current)
        buffer = resource.allocate(nbytes, stream=stream)
        memory = cupy.cuda.UnownedMemory(int(buffer.handle), nbytes, buffer, 0)
        return cupy.cuda.MemoryPointer(memory, 0)

    return Contestant(malloc, streams.clear)


CONTESTANTS: dict[str, tuple[str, Callable[[], Contestant]]] = {
    OURS: ("cupy", lambda: _ours(lambda: PoolResource(AsyncCudaResource()))),
    "cuglue pool, direct": ("cupy", lambda: _ours(lambda: PoolResource(DirectCudaResource(mode="sync")))),
    "cuglue pool, expandable": ("cupy", lambda: _ours(lambda: PoolResource(ExpandableCudaResource()))),
    "cuglue budget over pool": (
        "cupy",
        lambda: _ours(lambda: GlobalDeviceBudget(PoolResource(AsyncCudaResource()), 32 << 30)),
    ),
    "cuglue async": ("cupy", lambda: _ours(AsyncCudaResource)),
    CUPY: ("cupy", _cupy_pool),
    "CuPy MemoryAsyncPool": ("cupy", _cupy_async_pool),
    "CuPy malloc_async": ("cupy", _cupy_malloc_async),
    RMM: ("rmm", lambda: _rmm("pool")),
    "RMM async": ("rmm", lambda: _rmm("async")),
    "torch": ("torch", _torch),
    "cuda.core": ("cuda.core", _cuda_core),
}


# --- what is done with them -----------------------------------------------------------------------------------------


def one_size(seed: int, count: int) -> Work:
    """Allocations and frees of 1 MiB."""
    from cupy.cuda import alloc

    def work() -> None:
        for _ in range(count):
            alloc(MIB)

    return work


def _mixed(sizes: list[int], seed: int, count: int) -> Work:
    from cupy.cuda import alloc

    choose = random.Random(seed)
    live: list[Any] = [alloc(size) for size in sizes[:LIVE]]
    steps = [(choose.randrange(LIVE), sizes[i % len(sizes)]) for i in range(count)]

    def work() -> None:
        for place, size in steps:
            live[place] = None
            live[place] = alloc(size)

    return work


def mixed_even(seed: int, count: int) -> Work:
    """Frees and allocations, sizes of 0.5 KiB to 4 MiB evenly spread, 256 live."""
    choose = random.Random(seed)
    return _mixed([choose.randint(512, 4 * MIB) for _ in range(4096)], seed, count)


def mixed_log(seed: int, count: int) -> Work:
    """Frees and allocations, sizes of 0.5 KiB to 4 MiB, each decade as often, 256 live."""
    choose = random.Random(seed)
    low, high = math.log(512), math.log(4 * MIB)
    return _mixed([int(math.exp(choose.uniform(low, high))) for _ in range(4096)], seed, count)


WORKLOADS = {"one size": one_size, "mixed, even": mixed_even, "mixed, logarithmic": mixed_log}


def on_streams(make: Callable[[int, int], Work], count: int, streams: int, threads: int) -> float:
    """So many threads at once, each taking its turns on so many streams; nanoseconds of one allocation of them all.

    What is timed ran before on the same stream: the first requests take memory from the driver.
    """
    import cupy

    share = count // (streams * threads)
    times: list[float] = []
    errors: list[BaseException] = []
    ready = threading.Barrier(threads)

    def run(number: int) -> None:
        try:
            cupy.cuda.Device(0).use()
            turns = []
            for _ in range(streams):
                stream = cupy.cuda.Stream(non_blocking=True)
                with stream:
                    work = make(number, share)
                    for _ in range(max(1, WARM // share)):
                        work()
                turns.append((stream, work))
            ready.wait()
            times.append(time.perf_counter())
            for stream, work in turns:
                with stream:
                    work()
            times.append(time.perf_counter())
            ready.wait()  # nobody frees what it has live while others are timed
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            ready.abort()

    pool = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    if errors:
        raise errors[0]
    return (max(times) - min(times)) / (share * streams * threads) * 1e9


def measure(who: str, workload: str, streams: int, threads: int, count: int) -> float:
    """One sample: a fresh contestant, warmed up, timed."""
    import cupy

    contestant = CONTESTANTS[who][1]()
    former = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(contestant.malloc)
    gc.collect()
    gc.disable()
    try:
        return on_streams(WORKLOADS[workload], count, streams, threads)
    finally:
        gc.enable()
        gc.collect()
        cupy.cuda.set_allocator(former)
        cupy.cuda.Device(0).synchronize()
        contestant.close()


def available() -> tuple[list[str], list[str]]:
    """Contestants that can run here, and those that cannot."""
    names, missing = [], []
    for name, (module, _) in CONTESTANTS.items():
        try:
            there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            there = False
        if name.endswith("expandable") and not cuglue.current_driver().capabilities(0).virtual_memory:
            there = False
        (names if there else missing).append(name)
    return names, missing


def table(samples: dict[str, list[float]]) -> list[str]:
    """Lines of Markdown: medians, ranges, and ratios of medians to the two pools that ours is compared with."""
    medians = {name: statistics.median(found) for name, found in samples.items() if found}
    lines = ["| allocator | ns | least to most | to CuPy's pool | to RMM's pool |", "|---|---|---|---|---|"]
    for name, median in medians.items():
        ratios = [f"{median / medians[base]:.2f}" if base in medians else "-" for base in (CUPY, RMM)]
        spread = f"{min(samples[name]):.0f} to {max(samples[name]):.0f}"
        lines.append(f"| {name} | {median:.0f} | {spread} | {' | '.join(ratios)} |")
    return lines


def verdicts(samples: dict[Cell, dict[str, list[float]]]) -> list[str]:
    """Lines of Markdown: our pool against what is wanted of it, the least too: a busy machine slows some samples."""
    lines = [
        "| workload | streams | threads | to CuPy's pool: medians | least | wanted | to RMM's: medians | wanted |",
        "|---" * 8 + "|",
    ]
    for (workload, streams, threads), found in samples.items():
        cells = [workload, str(streams), str(threads)]
        most = MOST_OF_CUPY.get(workload, 1.0)
        cells += [_ratio(found, CUPY, statistics.median), _ratio(found, CUPY, min), f"{most:.2f}"]
        cells += [_ratio(found, RMM, statistics.median), f"{MOST_OF_RMM:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ratio(found: dict[str, list[float]], base: str, figure: Callable[[list[float]], float]) -> str:
    if not (found.get(OURS) and found.get(base)):
        return "-"
    return f"{figure(found[OURS]) / figure(found[base]):.2f}"


def keep(path: str, samples: dict[str, dict[str, list[float]]], failed: dict[str, str]) -> None:
    """Write what was measured so far."""
    machine = {
        "device": cuglue.current_driver().device_name(0),
        "python": platform.python_version(),
        "host": platform.processor(),
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"machine": machine, "unit": "ns", "samples": samples, "failed": failed}, file, indent=1)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", type=int, default=20_000, help="allocations of a sample")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS))
    parser.add_argument("--only", action="append", choices=list(CONTESTANTS))
    parser.add_argument("--raw", metavar="FILE", help="write every sample as JSON")
    options = parser.parse_args()
    if not cuglue.is_cuda_available():
        print("this needs a CUDA device", file=sys.stderr)
        return 2
    names, missing = available()
    names = [name for name in names if not options.only or name in options.only]
    for name in missing:
        print(f"left out, not here: {name}")
    samples: dict[str, dict[str, list[float]]] = {}
    measured: dict[Cell, dict[str, list[float]]] = {}
    failed: dict[str, str] = {}
    for cell in [(w, s, t) for w in options.workload or WORKLOADS for s in (1, 4) for t in (1, 4)]:
        key = "{}, {} streams, {} threads".format(*cell)
        samples[key] = measured[cell] = {name: [] for name in names if name not in failed}
        for _ in range(options.rounds):
            for name, kept in samples[key].items():
                if name in failed:
                    continue
                try:
                    kept.append(measure(name, *cell, options.count))
                except Exception as error:  # noqa: BLE001 - a peer that cannot run is told, and the others go on
                    failed[name] = f"{type(error).__name__}: {error}"
                    print(f"failed: {name}: {failed[name]}")
        print(f"\n{key}\n", *table(samples[key]), sep="\n", flush=True)
        if options.raw:
            keep(options.raw, samples, failed)
    print("\nour pool and what is wanted of it\n", *verdicts(measured), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
