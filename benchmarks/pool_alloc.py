"""Time of one allocation and free through CuPy, for our pool and its peers, in one process.

Teaches: nothing; measures.   Needs: a CUDA device and CuPy.   Run: python benchmarks/pool_alloc.py

Each contestant is CuPy's allocator in turn, round after round, so that a machine that slows down slows all of them. The
table has medians in nanoseconds and ratios to CuPy's MemoryPool and to RMM's pool; --raw FILE keeps every sample. Peers
that are not installed are left out and named.
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
Malloc = Callable[[int], Any]


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
    "cuglue pool": ("cupy", lambda: _ours(lambda: PoolResource(AsyncCudaResource()))),
    "cuglue pool, direct": ("cupy", lambda: _ours(lambda: PoolResource(DirectCudaResource(mode="sync")))),
    "cuglue pool, expandable": ("cupy", lambda: _ours(lambda: PoolResource(ExpandableCudaResource()))),
    "cuglue budget over pool": (
        "cupy",
        lambda: _ours(lambda: GlobalDeviceBudget(PoolResource(AsyncCudaResource()), 32 << 30)),
    ),
    "cuglue async": ("cupy", lambda: _ours(AsyncCudaResource)),
    "CuPy MemoryPool": ("cupy", _cupy_pool),
    "CuPy MemoryAsyncPool": ("cupy", _cupy_async_pool),
    "CuPy malloc_async": ("cupy", _cupy_malloc_async),
    "RMM pool": ("rmm", lambda: _rmm("pool")),
    "RMM async": ("rmm", lambda: _rmm("async")),
    "torch": ("torch", _torch),
    "cuda.core": ("cuda.core", _cuda_core),
}


# --- what is done with them -----------------------------------------------------------------------------------------


def one_size(seed: int, count: int) -> float:
    """Nanoseconds of one allocation and free of 1 MiB."""
    from cupy.cuda import alloc

    start = time.perf_counter()
    for _ in range(count):
        alloc(MIB)
    return (time.perf_counter() - start) / count * 1e9


def _mixed(sizes: list[int], seed: int, count: int) -> float:
    from cupy.cuda import alloc

    choose = random.Random(seed)
    places = [choose.randrange(LIVE) for _ in range(len(sizes))]
    live: list[Any] = [alloc(size) for size in sizes[:LIVE]]
    steps = list(zip(places, sizes, strict=True))
    start = time.perf_counter()
    done = 0
    while done < count:
        for place, size in steps:
            live[place] = None
            live[place] = alloc(size)
        done += len(steps)
    return (time.perf_counter() - start) / done * 1e9


def mixed_even(seed: int, count: int) -> float:
    """Nanoseconds of one allocation and free, sizes of 0.5 KiB to 4 MiB evenly spread, 256 live."""
    choose = random.Random(seed)
    return _mixed([choose.randint(512, 4 * MIB) for _ in range(4096)], seed, count)


def mixed_log(seed: int, count: int) -> float:
    """Nanoseconds of one allocation and free, sizes of 0.5 KiB to 4 MiB, each decade as often, 256 live."""
    choose = random.Random(seed)
    low, high = math.log(512), math.log(4 * MIB)
    return _mixed([int(math.exp(choose.uniform(low, high))) for _ in range(4096)], seed, count)


WORKLOADS = {"one size": one_size, "mixed, even": mixed_even, "mixed, logarithmic": mixed_log}


def on_streams(work: Callable[[int, int], float], count: int, streams: int, threads: int) -> float:
    """``work`` on so many threads at once, each taking its turns on so many streams; nanoseconds of one allocation."""
    import cupy

    results: list[float] = []
    errors: list[BaseException] = []
    ready = threading.Barrier(threads)

    def run(number: int) -> None:
        try:
            cupy.cuda.Device(0).use()
            mine = [cupy.cuda.Stream(non_blocking=True) for _ in range(streams)]
            with mine[0]:
                work(number, count // 20)  # warm
            ready.wait()
            for turn in range(streams):
                with mine[turn]:
                    results.append(work(number, count // (streams * threads)))
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
    # with the interpreter's lock shared, the threads together do one allocation in a part of a thread's time
    return statistics.mean(results) / threads


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


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", type=int, default=20_000, help="allocations of a sample")
    parser.add_argument("--only", action="append", choices=list(CONTESTANTS))
    parser.add_argument("--raw", metavar="FILE", help="write every sample as JSON")
    options = parser.parse_args()
    if not cuglue.is_cuda_available():
        print("this needs a CUDA device", file=sys.stderr)
        return 2
    names, missing = available()
    names = [name for name in names if not options.only or name in options.only]
    cells = [(w, s, t) for w in WORKLOADS for s in (1, 4) for t in (1, 4)]
    samples: dict[str, dict[str, list[float]]] = {}
    failed: dict[str, str] = {}
    for workload, streams, threads in cells:
        key = f"{workload}, {streams} streams, {threads} threads"
        samples[key] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in names:
                if name in failed:
                    continue
                try:
                    samples[key][name].append(measure(name, workload, streams, threads, options.count))
                except Exception as error:  # noqa: BLE001 - a peer that cannot run is told, and the others go on
                    failed[name] = f"{type(error).__name__}: {error}"
        medians = {name: statistics.median(found) for name, found in samples[key].items() if found}
        print(f"\n{key}\n\n| allocator | ns | to CuPy's pool | to RMM's pool |\n|---|---|---|---|")
        for name, median in medians.items():
            ratios = [
                f"{median / medians[base]:.2f}" if base in medians else "-"
                for base in ("CuPy MemoryPool", "RMM pool")
            ]
            print(f"| {name} | {median:.0f} | {' | '.join(ratios)} |", flush=True)
    for name in missing:
        print(f"left out, not here: {name}", file=sys.stderr)
    for name, why in failed.items():
        print(f"failed: {name}: {why}", file=sys.stderr)
    if options.raw:
        driver = cuglue.current_driver()
        machine = {
            "device": driver.device_name(0),
            "python": platform.python_version(),
            "host": platform.processor(),
        }
        with open(options.raw, "w", encoding="utf-8") as file:
            json.dump(
                {"machine": machine, "unit": "ns", "samples": samples, "failed": failed}, file, indent=1
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
