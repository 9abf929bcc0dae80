"""What the benchmarks of commands and copies share: samples taken by turns, and how they are printed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

Work = Callable[[], object]
Samples = dict[str, list[float]]


def by_turns(works: dict[str, Work], settle: Work, batch: int = 200, rounds: int = 25) -> Samples:
    """Microseconds of one call, each sample the mean of a batch; every round takes each in turn, after a ``settle``."""
    found: Samples = {name: [] for name in works}
    for number in range(rounds + 2):
        for name, work in works.items():
            settle()
            start = time.perf_counter()
            for _ in range(batch):
                work()
            took = (time.perf_counter() - start) / batch * 1e6
            settle()
            if number > 1:  # the first two warm up
                found[name].append(took)
    return found


def table(title: str, found: Samples, wanted: dict[str, str], nbytes: int = 0) -> None:
    """Print medians, with the ratio to the first; with ``nbytes``, GB/s as well."""
    print(title)
    first = statistics.median(next(iter(found.values())))
    for name, samples in found.items():
        middle = statistics.median(samples)
        rate = f"{nbytes / middle / 1e3:8.2f} GB/s" if nbytes else f"{middle - first:+8.2f}"
        print(f"  {name:44s} {middle:10.2f} us {rate} {middle / first:7.2f}x  {wanted.get(name, '')}")
