"""What a memory resource and each decorator add to one allocation and free through CuPy, in one process.

Teaches: nothing; measures.   Needs: a CUDA device and CuPy.   Run: python benchmarks/alloc.py

A pair is ``cupy.cuda.alloc(n)`` and the drop of what it gave. Contestants take turns round after round, so that a
machine that slows down slows all of them. The first table has medians in nanoseconds and ratios to CuPy's
``malloc_async``, the second what each decorator adds to the resource below it, beside what it may add, the third what a
pair takes while several threads allocate, each on a stream of its own, the fourth where the time of a pair goes, piece
by piece; --raw FILE keeps every sample.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cuglue
from cuglue import (
    AsyncCudaResource,
    DebugGuardResource,
    DirectCudaResource,
    FailureCallbackResource,
    GlobalDeviceBudget,
    InMemorySink,
    LoggingResource,
    NullSink,
    StatisticsResource,
    TrackingResource,
    testing,
)

BASE = "CuPy malloc_async"
MOST_RATIO = 1.6  # of AsyncCudaResource to CuPy's malloc_async
#: Decorator -> nanoseconds that it may add to a pair over AsyncCudaResource; None: it is not bounded.
MOST_ADDED: dict[str, float | None] = {
    "budget": 800.0,
    "statistics": 500.0,
    "logging to memory": 2000.0,
    "logging to nowhere": None,
    "tracking": None,
    "failure callback": None,
    "budget, statistics and logging": None,
}
TOGETHER = (BASE, "CuPy MemoryPool", "cuglue async", "statistics")  # timed with several threads
THREADS = (1, 4)
Malloc = Callable[[int], Any]
Made = tuple[Malloc, Callable[[], Any]]


def _over(wrap: Callable[[Any], Any]) -> Callable[[], Made]:
    def make() -> Made:
        resource = wrap(AsyncCudaResource())
        return resource.malloc, resource.close

    return make


def _direct() -> Made:
    resource = DirectCudaResource()
    return resource.malloc, resource.close


def _cupy(name: str) -> Callable[[], Made]:
    def make() -> Made:
        import cupy

        if name == "malloc_async":
            return cupy.cuda.malloc_async, lambda: None
        pool = getattr(cupy.cuda, name)()
        return pool.malloc, pool.free_all_blocks

    return make


def _rmm(kind: str) -> Callable[[], Made]:
    def make() -> Made:
        import rmm
        from rmm.allocators.cupy import rmm_cupy_allocator

        former = rmm.mr.get_current_device_resource()
        if kind == "pool":
            resource = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=1 << 30)
        else:
            resource = rmm.mr.CudaAsyncMemoryResource()
        rmm.mr.set_current_device_resource(resource)
        return rmm_cupy_allocator, lambda: rmm.mr.set_current_device_resource(former)

    return make


CONTESTANTS: dict[str, Callable[[], Made]] = {
    BASE: _cupy("malloc_async"),
    "CuPy MemoryPool": _cupy("MemoryPool"),
    "CuPy MemoryAsyncPool": _cupy("MemoryAsyncPool"),
    "RMM async": _rmm("async"),
    "RMM pool": _rmm("pool"),
    "cuglue direct": _direct,
    "cuglue async": _over(lambda resource: resource),
    "budget": _over(lambda resource: GlobalDeviceBudget(resource, 64 << 30)),
    "statistics": _over(StatisticsResource),
    "logging to memory": _over(lambda resource: LoggingResource(resource, InMemorySink())),
    "logging to nowhere": _over(lambda resource: LoggingResource(resource, NullSink())),
    "tracking": _over(TrackingResource),
    "failure callback": _over(lambda resource: FailureCallbackResource(resource, lambda failure: False)),
    "budget, statistics and logging": _over(
        lambda resource: LoggingResource(
            StatisticsResource(GlobalDeviceBudget(resource, 64 << 30)), InMemorySink()
        )
    ),
    "guard (waits for the device at each free)": _over(DebugGuardResource),
}


def sample(name: str, nbytes: int, count: int, own_stream: bool) -> float:
    """Nanoseconds of one pair: a fresh contestant, warmed up, timed on an idle device."""
    import cupy

    malloc, close = CONTESTANTS[name]()
    former = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(malloc)
    stream = cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null
    gc.collect()
    gc.disable()
    try:
        with stream:
            return _timed(stream, nbytes, count // 100 if name.startswith("guard") else count)
    finally:
        gc.enable()
        cupy.cuda.set_allocator(former)
        cupy.cuda.Device(0).synchronize()
        cuglue.as_stream(stream).state.retire.drain()
        close()


def _timed(stream: Any, nbytes: int, count: int) -> float:
    from cupy.cuda import alloc

    for _ in range(max(10, count // 10)):
        alloc(nbytes)
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        alloc(nbytes)
    return (time.perf_counter() - start) / count * 1e9


def together(name: str, nbytes: int, count: int, threads: int) -> float:
    """Nanoseconds of wall clock for one pair of any thread, while ``threads`` of them make ``count`` pairs in all."""
    import cupy

    malloc, close = CONTESTANTS[name]()
    former = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(malloc)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(threads)]
    begin = threading.Barrier(threads)

    times: list[float] = []  # of each thread, begin and end: this one may wait for the interpreter meanwhile

    def work(stream: Any) -> None:
        with stream:
            _timed(stream, nbytes, 1000)
            begin.wait()
            times.append(time.perf_counter())
            for _ in range(count // threads):
                cupy.cuda.alloc(nbytes)
            times.append(time.perf_counter())

    try:
        workers = [threading.Thread(target=work, args=(stream,)) for stream in streams]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return (max(times) - min(times)) / (count // threads * threads) * 1e9
    finally:
        cupy.cuda.set_allocator(former)
        cupy.cuda.Device(0).synchronize()
        cuglue.as_stream(streams[0]).state.retire.drain()
        close()


def parts(count: int) -> dict[str, float]:
    """Nanoseconds of the pieces that a pair is made of, each alone, on the default stream; the least of many."""
    import cupy
    from cupy.cuda import BaseMemory, MemoryPointer, alloc, runtime

    driver = cuglue.current_driver()
    nbytes = 1 << 20
    own = cupy.cuda.Stream(non_blocking=True)

    class Memory(BaseMemory):
        """As much of an array's memory as CuPy asks for."""

        __slots__ = ()

        def __del__(self) -> None:
            dead.append(self)

    dead: list[Any] = []
    kept = runtime.malloc(nbytes)

    def memory() -> Any:
        made = Memory.__new__(Memory)
        made.ptr, made.size, made.device_id = kept, nbytes, 0
        return MemoryPointer(made, 0)

    def memory_of_an_array() -> None:
        memory()
        dead.clear()

    ready = memory()
    pieces: dict[str, Callable[[], Any]] = {
        "runtime.mallocAsync and freeAsync": lambda: runtime.freeAsync(runtime.mallocAsync(nbytes, 0), 0),
        "the same by way of our driver": lambda: driver.free_async(driver.malloc_async(nbytes, 0, 0), 0, 0),
        "the current stream, of CuPy": lambda: cupy.cuda.get_current_stream(0),
        "the current stream, of our driver": lambda: driver.stream_current(0),
        "whether a stream captures": lambda: driver.capture_status(own.ptr),
        "a memory object, its pointer and finaliser": memory_of_an_array,
        "cupy.cuda.alloc that gives what is there": lambda: alloc(nbytes),
        "nothing (the loop, and a call)": lambda: None,
    }
    former = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(lambda nbytes: ready)
    gc.collect()
    gc.disable()
    try:
        return {name: min(_repeat(piece, count // 20) for _ in range(20)) for name, piece in pieces.items()}
    finally:
        gc.enable()
        cupy.cuda.set_allocator(former)
        cupy.cuda.Device(0).synchronize()
        runtime.free(kept)


def _repeat(piece: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        piece()
    return (time.perf_counter() - start) / count * 1e9


def second_stream() -> dict[str, int]:
    """Driver calls that a block costs more because a second stream used it."""
    resource = AsyncCudaResource()
    home, other = (cuglue.as_stream(stream) for stream in _two_streams())
    counted = []
    for shared in (False, True, False, True):
        with testing.faults.counts() as calls:
            block = resource.allocate(1 << 20, home)
            if shared:
                resource.record_block_use(block, other)
            resource.deallocate(block)
        counted.append(calls)
    resource.close()
    alone, shared_calls = counted[2], counted[3]
    return {name: n - alone[name] for name, n in shared_calls.items() if n != alone[name]}


def _two_streams() -> tuple[Any, Any]:
    import cupy

    return cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)


def table(medians: dict[str, float]) -> str:
    """Medians, and ratios to CuPy's ``malloc_async``."""
    lines = [f"| allocator | ns | to {BASE} |", "|---|---|---|"]
    lines += [f"| {name} | {median:.0f} | {median / medians[BASE]:.2f} |" for name, median in medians.items()]
    return "\n".join(lines)


def verdicts(medians: dict[str, float]) -> str:
    """What each decorator adds, and what it may."""
    base = medians["cuglue async"]
    lines = ["| | measured | may be |", "|---|---|---|"]
    lines.append(f"| cuglue async to {BASE} | {base / medians[BASE]:.2f} | {MOST_RATIO} |")
    for name, most in MOST_ADDED.items():
        if name in medians:
            lines.append(
                f"| {name} adds | {medians[name] - base:.0f} ns | {'-' if most is None else f'{most:.0f} ns'} |"
            )
    return "\n".join(lines)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--count", type=int, default=20_000, help="pairs of a sample")
    parser.add_argument("--nbytes", type=int, default=1 << 20)
    parser.add_argument("--only", action="append", choices=list(CONTESTANTS))
    parser.add_argument("--raw", metavar="FILE", help="write every sample as JSON")
    options = parser.parse_args()
    if not cuglue.is_cuda_available():
        print("this needs a CUDA device", file=sys.stderr)
        return 2
    names = [
        name for name in CONTESTANTS if not options.only or name in (*options.only, BASE, "cuglue async")
    ]
    if importlib.util.find_spec("rmm") is None:
        names = [name for name in names if not name.startswith("RMM")]
        print("left out, not here: RMM", file=sys.stderr)
    samples: dict[str, dict[str, list[float]]] = {}
    for own_stream in (False, True):
        key = "a stream of its own" if own_stream else "the default stream"
        samples[key] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in names:
                samples[key][name].append(sample(name, options.nbytes, options.count, own_stream))
        medians = {name: statistics.median(found) for name, found in samples[key].items()}
        print(f"\n{options.nbytes} bytes on {key}\n\n{table(medians)}\n\n{verdicts(medians)}", flush=True)
    print(
        "\nseveral threads, each on a stream of its own: ns\n\n| allocator | 1 thread | 4 threads |\n|---|---|---|"
    )
    crowd: dict[str, list[list[float]]] = {name: [[] for _ in THREADS] for name in TOGETHER if name in names}
    for _ in range(options.rounds):
        for name, found in crowd.items():
            for samples_of, threads in zip(found, THREADS, strict=True):
                samples_of.append(together(name, options.nbytes, options.count, threads))
    for name, found in crowd.items():
        print(f"| {name} | {' | '.join(f'{statistics.median(some):.0f}' for some in found)} |", flush=True)
    pieces = parts(options.count)
    print("\nwhere the time goes\n\n| piece | ns |\n|---|---|")
    print("\n".join(f"| {name} | {ns:.0f} |" for name, ns in pieces.items()))
    more = second_stream()
    print(f"\na block used on two streams costs more: {more}")
    if options.raw:
        machine = {
            "device": cuglue.current_driver().device_name(0),
            "python": platform.python_version(),
            "host": platform.processor(),
        }
        with open(options.raw, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "machine": machine,
                    "unit": "ns",
                    "samples": samples,
                    "threads": crowd,
                    "pieces": pieces,
                    "second stream": more,
                },
                file,
                indent=1,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
