"""A kernel that faults: every wait says so, everybody's, and all can still be closed (contract C29).

In processes of their own: on CUDA nothing can be done with a device after a fault until the process ends.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = '''
import asyncio, gc, threading
import numpy as np
import cuglue
from cuglue import InOut, Kernel, Out, Runtime
from cuglue.errors import DevicePoisoned

def broken(grid, block, x, where):
    raise RuntimeError("illegal address")

STRAY = Kernel(
    "stray",
    'extern "C" __global__ void stray(int* x, long long where) { *(volatile int*)where = 1; x[0] = 1; }',
    sim=broken,
)
COUNT = Kernel(
    "count",
    'extern "C" __global__ void count(int* x) { x[threadIdx.x] += 1; }',
    sim=lambda grid, block, x: x.__iadd__(1),
)

rt = Runtime()
one, two = rt.stream(0), rt.stream(1)
x = rt.create(np.zeros(4, "i4"), stream=one)
y = rt.create(np.arange(4, dtype="i4"), stream=two)
rt.launch(COUNT, 1, 4, InOut(x), stream=one)
with rt.capture(one) as capture:
    rt.launch(COUNT, 1, 4, InOut(x), stream=one)
graph = capture.graph
graph.replay()
good = rt.read(x, dtype="i4", stream=one)
assert list(good.result()) == [2] * 4
kept = rt.read(x, dtype="i4", stream=one).result()

def poisoned(what, action):
    """The action says that the device is lost."""
    try:
        action()
    except DevicePoisoned as error:
        assert error.code in (700, 719), error.code
        print(what, "ok")
    else:
        raise SystemExit(what + ": no error")

def either(what, action):
    """The action may only enqueue; if it says anything, then that the device is lost."""
    try:
        result = action()
        if hasattr(result, "result"):
            result.result()
    except DevicePoisoned:
        pass
    print(what, "ok")

before = rt.read(y, dtype="i4", stream=two)
assert rt.launch(STRAY, 1, 1, Out(x), 1 << 46, stream=one) is None  # accepted: that says nothing about execution
pending = rt.read(x, dtype="i4", stream=one)
sync = rt.command(stream=one).sync()
called = threading.Event()
pending.add_done_callback(lambda future: called.set())

poisoned("the read behind it", pending.result)
poisoned("again", pending.result)
assert pending.done() and repr(pending) == "Future(failed)"
poisoned("the sync behind it", sync.result)
poisoned("with a limit", lambda: sync.result(timeout=5))
if not called.wait(10):
    raise SystemExit("the callback never came")
print("the callback ok")

async def wait():
    await rt.command(stream=one).sync()

poisoned("await", lambda: asyncio.run(wait()))
poisoned("a launch and a read later", lambda: (rt.launch(COUNT, 1, 4, InOut(x), stream=one), rt.read(x).result()))
poisoned("the other stream", lambda: rt.read(y, stream=two).result())
poisoned("the device", rt.synchronize)
poisoned("a synchronize", rt.command(stream=two).synchronize)

found = []
def thread():
    try:
        rt.command(stream=rt.stream(2)).sync().result()
    except BaseException as error:
        found.append(error)
worker = threading.Thread(target=thread)
worker.start()
worker.join()
assert isinstance(found[0], DevicePoisoned), found
print("another thread ok")

either("the read before it", before.result)
either("a replay", lambda: graph.replay())
either("new memory", lambda: rt.create(np.zeros(1000, "u1")))
either("cleanup", lambda: rt.command().memory_cleanup())
either("a large write", lambda: rt.create(np.zeros(3 << 20, "u1")))
assert list(kept) == [2] * 4  # what had arrived stays

either("the graph closes", graph.close)
y.close()
rt.close()  # says nothing: nothing is left to be waited for
rt.close()
del x, y, graph, capture, pending, sync, good, kept, before
gc.collect()
print("closed ok")
'''


def run(driver: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUGLUE_DRIVER": driver}
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


@pytest.mark.alone  # while a device mends a fault, other processes may lose what their CUDA waits for from OpenGL
@pytest.mark.parametrize("driver", ["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_C29_a_fault_is_told_by_every_wait_and_all_can_be_closed(driver: str) -> None:
    done = run(driver)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "closed ok"
    # Memory cannot be given back to a lost device; the log says so, CuPy says it of its modules, and that is all.
    known = ("giving back memory failed", "Exception ignored in: 'cupy.", "cupy", '  File "cupy', "Traceback")
    said = [line for line in done.stderr.splitlines() if not line.startswith(known)]
    assert said == []
