"""Hours of everything at once: threads over streams, maps of OpenGL objects, allocations, copies and graphs.

Every byte is compared, and every half minute the threads pause while it is seen that nothing grows: memory of the
process and of the device, file descriptors, and what the driver holds. Exit 0 only if every byte was right and all of
it stayed flat.

    make soak MINUTES=5                                  # the simulated device with Mesa, where there is no GPU
    CUGLUE_DRIVER=cuda python -m scripts.soak --minutes 60
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("PYOPENGL_PLATFORM", "egl")

import cuglue

from .soak_work import MIB, Setting, Worker


class Look(NamedTuple):
    """What the process and the device hold while all threads pause and all work is done."""

    seconds: float
    done: int
    rss: float  # MiB
    device: float  # MiB
    fds: int
    objects: int  # of Python
    waiting: int
    streams: int
    held: int  # of the driver: handles of every kind, spare events aside


def look(setting: Setting, began: float, done: int) -> Look:
    """Let go what can go, and count."""
    for _ in range(3):
        gc.collect()
        setting.state.retire.drain(block=True)
    setting.driver.device_synchronize(0)
    for stream in (None, *setting.streams):
        setting.rt.command(stream=stream).memory_cleanup()
    setting.resource.upstream.trim()
    setting.resource.reap_pending()
    setting.driver.device_synchronize(0)
    setting.driver.pool_trim(0, 0)
    room = setting.driver.memory_info(0)
    inventory = getattr(setting.driver, "inventory", None)
    if inventory is None:
        held = len(setting.driver._owners)
    else:
        setting.driver.check()
        held = sum(n for kind, n in inventory().items() if kind not in ("events", "bytes"))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Look(
        time.monotonic() - began, done, pages * os.sysconf("SC_PAGE_SIZE") / MIB,
        (room.total - room.free) / MIB, len(os.listdir("/proc/self/fd")), sys.getallocatedblocks(),
        len(setting.state.retire), len(setting.state.streams), held,
    )  # fmt: skip


#: How much more the last look may show than the second one: allocators keep a little, and grow once.
ROOM = {"rss": 48.0, "device": 16.0, "fds": 0, "objects": 15_000, "waiting": 0, "streams": 0, "held": 2}


#: So many looks at least, however short the time.
LOOKS = 4
#: Seconds after which a thread that did not come to a pause hangs.
PATIENCE = 120.0


def growth(looks: Sequence[Look], shared: bool = False) -> list[str]:
    """What grew, in words. The first look is from before caches and pools are warm; others may use a shared device."""
    first, last = looks[min(1, len(looks) - 1)], looks[-1]
    found = []
    for name, room in ROOM.items():
        before, after = getattr(first, name), getattr(last, name)
        if after > before + room and not (shared and name == "device"):
            found.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return found


class Soak:
    """The threads, and their pauses."""

    def __init__(self, threads: int, streams: int, seed: int, patience: float = PATIENCE) -> None:
        self.setting = Setting(streams)
        self.workers = [Worker(self.setting, seed + i) for i in range(threads)]
        self.failures: list[str] = []
        self.hanging = False
        self._resting = threading.Barrier(threads + 1, timeout=patience)
        self._patience = patience
        self._pause = threading.Event()
        self._stop = threading.Event()

    def _run(self, worker: Worker) -> None:
        try:
            while not self._stop.is_set():
                if self._pause.is_set():
                    self._resting.wait()
                    self._resting.wait()
                worker.step()
        except threading.BrokenBarrierError:
            self._stop.set()  # another one failed, or hangs
        except Exception as error:  # noqa: BLE001 - reported, and everything ends
            self.failures.append(f"{type(error).__name__}: {error}")
            self._stop.set()
            self._resting.abort()

    def run(self, seconds: float, every: float, tell: Callable[[Look], None]) -> list[Look]:
        """Run for so long, looking every so often."""
        began = time.monotonic()
        looks = [look(self.setting, began, 0)]
        tell(looks[0])
        threads = [
            threading.Thread(target=self._run, args=(w,), name=f"soak-{i}", daemon=True)
            for i, w in enumerate(self.workers)
        ]
        for thread in threads:
            thread.start()
        pause = every
        while not self._stop.wait(pause):
            try:
                self._pause.set()
                self._resting.wait()
                self._pause.clear()
                looks.append(look(self.setting, began, sum(sum(w.done.values()) for w in self.workers)))
                tell(looks[-1])
                self._resting.wait()
            except threading.BrokenBarrierError:
                if not self.failures:
                    self._hang("a thread did not pause")
                break
            left = began + seconds - time.monotonic()
            if left <= 0 and len(looks) >= LOOKS:
                break
            pause = max(min(every, left), 0.1)
        self._stop.set()
        for thread in threads:
            thread.join(self._patience)
        self.hanging = any(thread.is_alive() for thread in threads)
        if self.hanging and not self.failures:
            self._hang("a thread did not end")
        return looks

    def _hang(self, what: str) -> None:
        self.failures.append(f"{what} within {self._patience:g} s")
        faulthandler.dump_traceback(2, all_threads=True)

    def close(self) -> None:
        """End it all."""
        for worker in self.workers:
            worker.close()
        self.workers.clear()
        self.setting.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (5)")
    parser.add_argument("--threads", type=int, default=4, help="threads (4)")
    parser.add_argument("--streams", type=int, default=6, help="streams that they share (6)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two looks (30)")
    parser.add_argument("--shared", action="store_true", help="others use the device: let its memory grow")
    parser.add_argument("--seed", type=int, default=0, help="of what each thread does (0)")
    options = parser.parse_args(arguments)
    if not os.environ.get("CUGLUE_DRIVER"):
        os.environ["CUGLUE_DRIVER"] = "cuda" if cuglue.is_cuda_available() else "sim"
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)  # of CuPy's and PyOpenGL's own calls
    soak = Soak(options.threads, options.streams, options.seed)
    setting = soak.setting
    print(
        f"{setting.driver.device_name(0)}, {setting.context.renderer}; {options.threads} threads on "
        f"{options.streams} streams, {options.minutes:g} minutes, seed {options.seed}"
    )
    print(f"{'s':>7}{'done':>9}" + "".join(f"{name:>10}" for name in ROOM), flush=True)

    def tell(now: Look) -> None:
        numbers = "".join(f"{getattr(now, name):>10.0f}" for name in ROOM)
        print(f"{now.seconds:>7.0f}{now.done:>9}{numbers}", flush=True)

    looks = soak.run(60 * options.minutes, min(options.every, 20 * options.minutes), tell)
    done: Counter[str] = sum((w.done for w in soak.workers), Counter())
    print(", ".join(f"{name} {number}" for name, number in sorted(done.items())))
    failures = [*soak.failures, *growth(looks, options.shared)]
    try:
        if not soak.hanging:
            soak.close()
    except cuglue.errors.CuglueError as error:
        failures.append(f"closing: {error}")
    for failure in failures:
        print(f"failed: {failure}")
    print("flat, and every byte right" if not failures else f"{len(failures)} failures", flush=True)
    if soak.hanging:
        os._exit(1)  # an ordinary end would wait for what hangs
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
