"""Traces of allocations, as programs make them: each a list of events, the same in every run.

Teaches: nothing; used by fragmentation.py.   Needs: nothing.   Run: python benchmarks/traces.py (sizes of the traces)

An event is (key, bytes, stream): bytes are allocated under the key on that stream, or with 0 bytes what is under the
key is freed. Another seed gives another program of the same kind; our pool's constants were chosen on the default ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20


class Event(NamedTuple):
    """One step; ``nbytes`` 0 frees."""

    key: int
    nbytes: int
    stream: int = 0


class _Recorder:
    """Writes a trace: hands out keys, remembers which live."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._next = 0
        self._stream: dict[int, int] = {}

    def take(self, nbytes: int, stream: int = 0) -> int:
        self._next += 1
        self._stream[self._next] = stream
        self.events.append(Event(self._next, nbytes, stream))
        return self._next

    def free(self, key: int) -> None:
        self.events.append(Event(key, 0, self._stream.pop(key)))

    def done(self) -> list[Event]:
        for key in list(self._stream):
            self.free(key)
        return self.events


def growing(seed: int = 0) -> list[Event]:
    """Each array a little larger than the one before, which is gone by then."""
    record = _Recorder()
    step = 1_000_000 + 77_777 * (seed % 10)
    for i in range(1, 400):
        record.free(record.take(i * step))
    return record.done()


def growing_held(seed: int = 0) -> list[Event]:
    """A list that grows by copying: the old one goes when the new one is filled."""
    record = _Recorder()
    held = record.take(100_000)
    size = 100_000
    for _ in range(250):
        size = int(size * (1.04 - 0.003 * (seed % 10)))
        new = record.take(size)
        record.free(held)
        held = new
    return record.done()


def mixed(seed: int = 1) -> list[Event]:
    """Sizes of 0.5 KiB to 4 MiB, as many small as large ones, 256 live, in random order."""
    choose = random.Random(seed)
    record = _Recorder()
    live: list[int] = []
    for _ in range(12_000):
        if len(live) >= 256:
            record.free(live.pop(choose.randrange(len(live))))
        live.append(record.take(choose.randint(512, 4 * MIB)))
    return record.done()


def lifetimes(seed: int = 2) -> list[Event]:
    """Sizes over six decades; most pieces are short-lived, a tenth stay for long."""
    choose = random.Random(seed)
    record = _Recorder()
    until: dict[int, int] = {}
    for now in range(10_000):
        for key in [key for key, end in until.items() if end <= now]:
            del until[key]
            record.free(key)
        size = int(math.exp(choose.uniform(math.log(512), math.log(64 * MIB))))
        stay = choose.randrange(400, 2000) if choose.random() < 0.1 else choose.randrange(1, 20)
        until[record.take(size)] = now + stay
    return record.done()


def streams(seed: int = 3) -> list[Event]:
    """Sixteen streams take turns; each keeps a working set of its own, of a few sizes."""
    choose = random.Random(seed)
    record = _Recorder()
    live: list[list[int]] = [[] for _ in range(16)]
    sizes = [[choose.randint(64 * KIB, 16 * MIB) for _ in range(6)] for _ in range(16)]
    for turn in range(6000):
        stream = (turn // 25) % 16
        mine = live[stream]
        if len(mine) > 8 or (mine and choose.random() < 0.45):
            record.free(mine.pop(choose.randrange(len(mine))))
        else:
            mine.append(record.take(choose.choice(sizes[stream]), stream))
    return record.done()


def training(seed: int = 4) -> list[Event]:
    """Weights; steps forward (activations, temporaries) and backward (gradients), the batch now and then smaller."""
    choose = random.Random(seed)
    record = _Recorder()
    layers = [
        choose.choice([1, 2, 4, 8, 16, 32]) * MIB + choose.choice([0, 4096, 65_536, 3584]) for _ in range(48)
    ]
    for size in layers:
        record.take(size)
    for step in range(20):
        batch = 1.0 if step % 5 else choose.uniform(0.6, 1)
        activations = []
        for size in layers:
            activations.append(record.take(int(2 * size * batch)))
            record.free(record.take(int(size * batch) // 2 + 100))
        gradients = []
        for size in reversed(layers):
            gradients.append(record.take(size))
            temporary = record.take(int(size * batch))
            record.free(activations.pop())
            record.free(temporary)
        for key in gradients:
            record.free(key)
    return record.done()


def rendering(seed: int = 5) -> list[Event]:
    """Frames of buffers for colour, depth and post-processing, two in flight; the window is resized now and then."""
    choose = random.Random(seed)
    record = _Recorder()
    width, height = 1920, 1080
    flying: list[list[int]] = []
    for frame in range(600):
        if frame % 60 == 59:
            width, height = choose.choice(
                [(1920, 1080), (1280, 720), (2560, 1440), (1600, 900), (3840, 2160)]
            )
        pixels = width * height
        sizes = (4 * pixels, 16 * pixels, pixels, 2 * pixels, choose.randint(1000, 300_000))
        flying.append([record.take(size) for size in sizes])
        if len(flying) > 2:
            for key in flying.pop(0):
                record.free(key)
    return record.done()


def carved(seed: int = 6) -> list[Event]:
    """Adversarial: a large block is freed, small ones that stay come in between, then a larger one is wanted."""
    choose = random.Random(seed)
    record = _Recorder()
    for i in range(40):
        record.free(record.take(int(64 * MIB * (1 + 0.05 * i))))
        for j in range(200):
            key = record.take(choose.randint(512, 200_000))
            if j % 10:
                record.free(key)
        middle = [record.take(choose.randint(MIB, 3 * MIB)) for _ in range(30)]
        for j, key in enumerate(middle):
            if j % 6:
                record.free(key)
    return record.done()


def checkerboard(seed: int = 0) -> list[Event]:
    """Adversarial: every second of many equal pieces is freed, then pieces twice as large are wanted."""
    record = _Recorder()
    size = 1_000_000 + 77_777 * (seed % 10)
    for _ in range(3):
        keys = [record.take(size) for _ in range(400 * 1_000_000 // size)]
        for key in keys[::2]:
            record.free(key)
        size *= 2
    return record.done()


TRACES: dict[str, Callable[..., list[Event]]] = {
    maker.__name__: maker
    for maker in (
        growing,
        growing_held,
        mixed,
        lifetimes,
        streams,
        training,
        rendering,
        carved,
        checkerboard,
    )
}


def peak_in_use(trace: list[Event]) -> int:
    """The most bytes that are live at once."""
    sizes: dict[int, int] = {}
    now = most = 0
    for key, nbytes, _ in trace:
        if nbytes:
            sizes[key] = nbytes
            now += nbytes
            most = max(most, now)
        else:
            now -= sizes.pop(key)
    return most


if __name__ == "__main__":
    for name, maker in TRACES.items():
        trace = maker()
        print(f"{name:14} {len(trace):6} events, peak {peak_in_use(trace) / MIB:8.1f} MiB   {maker.__doc__}")
