"""How much memory allocators keep for what is in use: peak reserved over peak in use, on each trace.

Teaches: nothing; measures.   Needs: nothing (peers need a CUDA device).   Run: python benchmarks/fragmentation.py

Without a device our pool runs over addresses that nothing is behind, beside models of CuPy's and RMM's algorithms. With
one, the real peers run in the same process. The table is printed in Markdown, one line for a trace and seed; --raw
writes all figures as JSON.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any, Protocol

from traces import TRACES, Event, peak_in_use

import cuglue
from cuglue import DirectCudaResource, ExpandableCudaResource, PoolResource, as_stream


class Allocator(Protocol):
    """One contestant."""

    def take(self, nbytes: int, stream: int) -> Any:
        """Memory on the stream of this number."""

    def free(self, memory: Any) -> None:
        """Give it back."""

    def reserved(self) -> int:
        """Bytes that it keeps now."""

    def close(self) -> None:
        """Give everything back."""


class Paper(DirectCudaResource):
    """Hands out addresses without memory: enough to see what a pool asks for."""

    _ordered = False
    _next = 1 << 44

    def _take(self, nbytes: int, stream: Any) -> int:
        Paper._next += nbytes + (2 << 20)
        return (Paper._next - nbytes) & -(2 << 20)

    def _drop(self, ptr: int, stream: Any) -> None:
        pass


class Ours:
    """Our pool over any resource.

    Args:
        source: makes the resource.
        held: bytes that the driver keeps for that resource, if it keeps any; else the pool's own count is the truth.
        options: of the pool.
    """

    def __init__(
        self, source: Callable[[], Any], *, held: Callable[[], int] | None = None, **options: Any
    ) -> None:
        self.pool = PoolResource(source(), **options)
        driver: Any = self.pool.driver
        # A real device does at once the little that a pool has queued; the simulated one waits to be asked.
        self._run = driver.device_synchronize if driver.capabilities(0).simulated else None
        self._held = held
        self._before = held() if held else 0
        self._streams: dict[int, Any] = {}

    def _stream(self, number: int) -> Any:
        if number not in self._streams:
            driver: Any = self.pool.driver
            if driver.capabilities(0).simulated:
                made = driver.Stream()
            else:
                import cupy

                made = cupy.cuda.Stream(non_blocking=True)
            self._streams[number] = as_stream(made, driver=driver)
        return self._streams[number]

    def take(self, nbytes: int, stream: int) -> Any:
        block = self.pool.allocate(nbytes, self._stream(stream))
        if self._run is not None:
            self._run(0)
        return block

    def free(self, memory: Any) -> None:
        self.pool.deallocate(memory)

    def reserved(self) -> int:
        return self._held() - self._before if self._held else self.pool.bytes_reserved

    def close(self) -> None:
        driver, device = self.pool.driver, self.pool.device
        self.pool.close()
        driver.device_synchronize(device)
        if driver.capabilities(device).async_memory:
            driver.pool_trim(0, device)  # the next contestant may ask what the driver's pool holds


def held_by_driver() -> int:
    """Bytes of the driver's own pool."""
    from cupy.cuda import runtime

    pool = runtime.deviceGetDefaultMemPool(0)
    return int(runtime.memPoolGetAttribute(pool, runtime.cudaMemPoolAttrReservedMemCurrent))


class CupyModel:
    """CuPy's MemoryPool as published: best fit per stream, exact pages, remainders split off, neighbours merged."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[int, int]]] = {}  # by stream: (size, address), sorted
        self._starts: dict[int, dict[int, int]] = {}  # by stream: free address -> size
        self._ends: dict[int, dict[int, int]] = {}  # by stream: end of a free piece -> its address
        self._next = 0
        self._reserved = 0

    def take(self, nbytes: int, stream: int) -> Any:
        size = -(-nbytes // 512) * 512
        free = self._free.setdefault(stream, [])
        at = bisect_left(free, (size, 0))
        if at == len(free):
            self._next += size + 512  # pages never touch
            self._reserved += size
            return self._next - size, size, stream
        found, address = free[at]
        self._remove(stream, address, found)
        if found > size:
            self._add(stream, address + size, found - size)
        return address, size, stream

    def free(self, memory: Any) -> None:
        address, size, stream = memory
        starts, ends = self._starts.setdefault(stream, {}), self._ends.setdefault(stream, {})
        if address + size in starts:
            more = starts[address + size]
            self._remove(stream, address + size, more)
            size += more
        if address in ends:
            before = ends[address]
            more = starts[before]
            self._remove(stream, before, more)
            address, size = before, size + more
        self._add(stream, address, size)

    def _add(self, stream: int, address: int, size: int) -> None:
        insort(self._free[stream], (size, address))
        self._starts.setdefault(stream, {})[address] = size
        self._ends.setdefault(stream, {})[address + size] = address

    def _remove(self, stream: int, address: int, size: int) -> None:
        free = self._free[stream]
        del free[bisect_left(free, (size, address))]
        del self._starts[stream][address]
        del self._ends[stream][address + size]

    def reserved(self) -> int:
        return self._reserved

    def close(self) -> None:
        pass


class RmmModel:
    """RMM's pool as published, from nothing: best fit per stream, then other streams' memory, then twice as much."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[int, int]]] = {}  # by stream: (address, size), sorted
        self._heads: set[int] = set()  # addresses where a page begins: nothing is merged across
        self._next = 1 << 20
        self._reserved = 0

    def take(self, nbytes: int, stream: int) -> Any:
        size = -(-nbytes // 256) * 256
        mine = self._free.setdefault(stream, [])
        address = self._fit(mine, mine, size)
        others = [free for other, free in self._free.items() if other != stream]
        for free in others:
            address = address or self._fit(free, mine, size)
        for free in others:
            if not address:
                for piece in free:
                    self._add(mine, *piece)
                free.clear()
                address = self._fit(mine, mine, size)
        if not address:
            grown = max(size, self._reserved)
            self._heads.add(self._next)
            insort(mine, (self._next, grown))
            self._next += grown + (1 << 20)
            self._reserved += grown
            address = self._fit(mine, mine, size)
        return address, size, stream

    def _fit(self, free: list[tuple[int, int]], rest_to: list[tuple[int, int]], size: int) -> int:
        """The address of the smallest piece that fits; what is left of it goes to ``rest_to``. 0: there is none."""
        found, address = min(((s, a) for a, s in free if s >= size), default=(0, 0))
        if found:
            free.remove((address, found))
            if found > size:
                self._add(rest_to, address + size, found - size)
        return address

    def _add(self, free: list[tuple[int, int]], address: int, size: int) -> None:
        at = bisect_left(free, (address, 0))
        if at < len(free) and free[at][0] == address + size and address + size not in self._heads:
            size += free.pop(at)[1]
        if at and sum(free[at - 1]) == address and address not in self._heads:
            before = free.pop(at - 1)
            address, size = before[0], before[1] + size
        insort(free, (address, size))

    def free(self, memory: Any) -> None:
        address, size, stream = memory
        self._add(self._free[stream], address, size)

    def reserved(self) -> int:
        return self._reserved

    def close(self) -> None:
        pass


class Cupy:
    """CuPy's own pools, by their ``malloc``."""

    def __init__(self, kind: str) -> None:
        import cupy

        self._cupy = cupy
        self._pool = cupy.cuda.MemoryPool() if kind == "pool" else cupy.cuda.MemoryAsyncPool()
        self._streams: dict[int, Any] = {}
        self._async = kind != "pool"
        self._before = 0
        self._before = self.reserved()

    def take(self, nbytes: int, stream: int) -> Any:
        if stream not in self._streams:
            self._streams[stream] = self._cupy.cuda.Stream(non_blocking=True)
        with self._streams[stream]:
            return [self._pool.malloc(nbytes), stream]

    def free(self, memory: Any) -> None:
        with self._streams[memory[1]]:
            memory[0] = None

    def reserved(self) -> int:
        return (held_by_driver() if self._async else int(self._pool.total_bytes())) - self._before

    def close(self) -> None:
        self._pool.free_all_blocks()


class Rmm:
    """RMM's pool, from nothing, over plain device memory."""

    def __init__(self) -> None:
        import rmm
        from rmm.pylibrmm.stream import Stream

        self._rmm, self._stream_type = rmm, Stream
        self._below = rmm.mr.StatisticsResourceAdaptor(rmm.mr.CudaMemoryResource())
        self._pool = rmm.mr.PoolMemoryResource(self._below, initial_pool_size=0)
        self._streams: dict[int, Any] = {}

    def take(self, nbytes: int, stream: int) -> Any:
        if stream not in self._streams:
            self._streams[stream] = self._stream_type()
        return self._rmm.DeviceBuffer(size=nbytes, stream=self._streams[stream], mr=self._pool)

    def free(self, memory: Any) -> None:
        del memory

    def reserved(self) -> int:
        return int(self._below.allocation_counts.current_bytes)

    def close(self) -> None:
        self._streams.clear()


class Torch:
    """PyTorch's caching allocator."""

    def __init__(self) -> None:
        import torch

        torch.cuda.init()
        torch.cuda.empty_cache()
        self._torch = torch
        self._base = torch.cuda.memory_reserved()
        self._streams: dict[int, Any] = {}

    def take(self, nbytes: int, stream: int) -> Any:
        if stream not in self._streams:
            self._streams[stream] = self._torch.cuda.Stream()
        return self._torch.cuda.caching_allocator_alloc(nbytes, 0, self._streams[stream])

    def free(self, memory: Any) -> None:
        self._torch.cuda.caching_allocator_delete(memory)

    def reserved(self) -> int:
        return int(self._torch.cuda.memory_reserved() - self._base)

    def close(self) -> None:
        self._torch.cuda.empty_cache()


def replay(trace: list[Event], allocator: Allocator) -> dict[str, float]:
    """Run a trace; what was kept at most, and how long an event took."""
    live: dict[int, Any] = {}
    most = 0
    start = time.perf_counter()
    for key, nbytes, stream in trace:
        if nbytes:
            live[key] = allocator.take(nbytes, stream)
            most = max(most, allocator.reserved())
        else:
            memory = live.pop(key)
            allocator.free(memory)
            del memory
    seconds = time.perf_counter() - start
    allocator.close()
    peak = peak_in_use(trace)
    return {
        "ratio": most / peak,
        "reserved": most,
        "in_use": peak,
        "us_per_event": seconds / len(trace) * 1e6,
    }


def contestants(simulated: bool) -> tuple[dict[str, Callable[[], Allocator]], list[str]]:
    """Who runs here, by name, and who cannot."""
    if simulated:
        return {
            "cuglue pool": lambda: Ours(Paper),
            "CuPy's algorithm": CupyModel,
            "RMM's algorithm": RmmModel,
        }, []
    virtual = cuglue.current_driver().capabilities(0).virtual_memory
    everybody: dict[str, tuple[bool, Callable[[], Allocator]]] = {
        "cuglue pool": (True, lambda: Ours(lambda: DirectCudaResource(mode="sync"))),
        "cuglue pool, async": (True, lambda: Ours(cuglue.AsyncCudaResource, held=held_by_driver)),
        "cuglue pool, expandable": (virtual, lambda: Ours(ExpandableCudaResource)),
        "CuPy MemoryPool": (True, lambda: Cupy("pool")),
        "CuPy MemoryAsyncPool": (True, lambda: Cupy("async")),
        "CuPy's algorithm": (True, CupyModel),
        "RMM's algorithm": (True, RmmModel),
        "RMM pool": (importlib.util.find_spec("rmm") is not None, Rmm),
        "torch": (importlib.util.find_spec("torch") is not None, Torch),
    }
    found = {name: make for name, (there, make) in everybody.items() if there}
    return found, [name for name in everybody if name not in found]


def measure(
    trace: list[Event], makers: dict[str, Callable[[], Allocator]]
) -> dict[str, dict[str, float] | str]:
    """The figures of each contestant, or why there are none."""
    row: dict[str, dict[str, float] | str] = {}
    for who, make in makers.items():
        gc.collect()
        try:
            row[who] = replay(trace, make())
        except Exception as error:  # noqa: BLE001 - a peer that cannot run is a cell of the table
            row[who] = f"failed: {type(error).__name__}: {error}"
    return row


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--driver", choices=["cuda", "sim"], default="cuda" if cuglue.is_cuda_available() else "sim"
    )
    parser.add_argument("--trace", action="append", choices=list(TRACES), help="only these")
    parser.add_argument("--only", action="append", metavar="NAME", help="only these contestants")
    parser.add_argument(
        "--seed", action="append", type=int, help="traces of this seed instead of the default ones"
    )
    parser.add_argument("--raw", metavar="FILE", help="write all figures as JSON")
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float] | str]] = {}
    with cuglue.use_driver(options.driver):
        makers, missing = contestants(options.driver == "sim")
        makers = {name: make for name, make in makers.items() if not options.only or name in options.only}
        for name in missing:
            print(f"left out, not here: {name}")
        print("| trace | in use, MiB | " + " | ".join(makers) + " |")
        print("|---" * (len(makers) + 2) + "|")
        for name in options.trace or TRACES:
            for seed in options.seed or [None]:
                trace = TRACES[name]() if seed is None else TRACES[name](seed)
                title = name if seed is None else f"{name}, seed {seed}"
                results[title] = row = measure(trace, makers)
                cells = [cell if isinstance(cell, str) else f"{cell['ratio']:.3f}" for cell in row.values()]
                print(f"| {title} | {peak_in_use(trace) / (1 << 20):.0f} | {' | '.join(cells)} |", flush=True)
    if options.raw:
        with open(options.raw, "w", encoding="utf-8") as file:
            json.dump({"driver": options.driver, "results": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
