"""A process may end while consumers hold exported memory: rc 0, and nothing on stderr."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from source_tree import ROOT

MAKE = """
    import sys, threading, builtins
    import numpy as np
    import cuglue
    from cuglue.core.block import Block
    from cuglue.exchange import ArrayView, BlockOwner
    from cuglue.layout import Layout

    driver = cuglue.current_driver()
    stream = cuglue.as_stream(driver.Stream())

    def make(narrow=None):
        ptr = driver.malloc(64, 0)
        block = Block(ptr, 64, stream)
        driver.fill_async(ptr, 1, 64, stream.handle)
        block.finish(stream, cuglue.Access.WRITE)
        return ArrayView(BlockOwner(block), ptr, Layout.of((32,), "u2"), narrow=narrow)
"""

HOLDERS = {
    "a global array": "held = np.from_dlpack(make())",
    "a global array by the array interface": "held = np.asarray(make())",
    "a cycle": "held = [np.from_dlpack(make())]; held.append(held)",
    "an attribute of a module": "builtins.held = np.from_dlpack(make()); sys.held = np.asarray(make())",
    "an unconsumed capsule": "held = make().__dlpack__(max_version=(1, 0)); old = make().__dlpack__()",
    "a patched capsule": "held = make('bfloat16').__dlpack__(max_version=(1, 0))",
    "the view itself": "held = make()",
    "a default argument": "def f(held=np.from_dlpack(make())): return held",
    "a thread that ended": """
    def work():
        global held
        held = [np.from_dlpack(make()) for _ in range(10)]
    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]; [t.join() for t in threads]
    """,
    "a daemon thread": """
    ready = threading.Event()
    def work():
        held = np.from_dlpack(make())
        ready.set()
        threading.Event().wait()
    threading.Thread(target=work, daemon=True).start()
    ready.wait()
    """,
    "a leaked reference": """
    import ctypes
    held = np.from_dlpack(make())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    """,
    "the reader's tensor": """
    from cuglue.testing.dlpack_reader import consume
    held = consume(make().__dlpack__(max_version=(1, 0)))
    """,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_exit_with_a_live_consumer(holder):
    code = textwrap.dedent(MAKE) + textwrap.dedent(HOLDERS[holder])
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code],
        cwd=ROOT / "src",
        env={**os.environ, "CUGLUE_DRIVER": "sim", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
