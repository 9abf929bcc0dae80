"""The end of a process: objects in modules that outlive this library print nothing, though its names are gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"

PRELUDE = """
import numpy as np
import cuglue
from cuglue import DirectCudaResource, InOut, Kernel, PoolResource, Runtime
kernel = Kernel("k", 'extern "C" __global__ void k(float* x) {}', sim=lambda grid, block, x: None)
rt = Runtime()
stream = rt.stream(0)
x = rt.create(np.ones(8, "f4"), stream)
def work():
    rt.launch(kernel, 1, 1, InOut(x), stream=stream)
work()
"""

KEPT = {
    "runtime, stream, buffer": "np.kept = rt, stream, x",
    "runtime that is closed": "rt.close(); np.kept = rt, stream, x",
    "all of them": "\nwith rt.profile(stream) as profile: work()\nnp.kept = x, rt, stream, profile",
    "graph": "\nwith rt.capture(stream) as capture: work()\nnp.kept = capture.graph, capture",
    "profile": "\nwith rt.profile(stream) as profile: work()\nnp.kept = profile",
    "command and future": "\nwith rt.command(InOut(x), stream=stream) as command: future = rt.read(x, stream=stream)"
    "\nnp.kept = command, future, future.result(), command.sync",
    "runtime with pools": "rt = Runtime(memory=[cuglue.Direct()]); np.kept = rt, rt.empty(10)",
    "pool and its block": "np.kept = [PoolResource(DirectCudaResource())]; np.kept.append(np.kept[0].allocate(10))",
    "resource and its block": "np.kept = [DirectCudaResource()]; np.kept.append(np.kept[0].allocate(10))",
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_what_another_module_keeps_prints_nothing_at_exit(kept: str) -> None:
    environment = dict(os.environ, CUGLUE_DRIVER="sim", PYTHONPATH=str(SRC))
    ran = subprocess.run(
        [sys.executable, "-c", PRELUDE + kept],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
