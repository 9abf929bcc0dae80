"""Per-thread default streams: one number, and another stream on each thread."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import hangs
import pytest
from memory_tools import fill

import cuglue
from cuglue import AsyncCudaResource, testing
from cuglue.driver.protocol import PER_THREAD_STREAM

TESTS = Path(__file__).resolve().parents[1]
PATHS = os.pathsep.join(str(path) for path in (TESTS / "memory", TESTS, TESTS.parent / "src"))
LIMIT = 18.0  # seconds for one program, two or three of which go into the start of CUDA
GONE = pytest.mark.parametrize("gone", [False, True], ids=["its thread lives", "its thread is gone"])

#: What :func:`free_anothers_block` does with the driver. A driver was seen to hang while it ends a thread that used
#: such a stream: from then on nobody makes a stream there, and nobody uses a thread's own stream for the first time.
ALONE = """
import threading
from cupy.cuda import runtime
there, leave = threading.Event(), threading.Event()
def work():
    global ptr, refuge
    refuge = runtime.streamCreateWithFlags(1)
    ptr = runtime.mallocAsync(4096, 2)
    runtime.memsetAsync(ptr, 3, 4096, 2)
    there.set()
    leave.wait()
thread = threading.Thread(target=work, daemon=True)
thread.start()
there.wait()
if {gone}:
    leave.set()
    thread.join()
runtime.streamIsCapturing(2)
runtime.deviceSynchronize()
runtime.freeAsync(ptr, refuge)
runtime.streamSynchronize(refuge)
runtime.streamCreateWithFlags(1)
"""


@GONE
def test_report_M02_per_thread_default_streams_have_an_owner(sim: Any, gone: bool) -> None:
    """Each thread's stream 2 is another stream: a free from a second thread must not happen on its own."""
    free_anothers_block(AsyncCudaResource(), gone)


@pytest.mark.gpu
@GONE
def test_report_M02_per_thread_default_streams_have_an_owner_on_a_device(gone: bool) -> None:
    ours = f"import test_thread_streams as t\nt.free_anothers_block(t.AsyncCudaResource(), {gone})"
    environment = {
        "CUGLUE_DRIVER": "cuda",
        "PYTHONPATH": os.pathsep.join([PATHS, os.environ.get("PYTHONPATH", "")]),
    }
    hangs.judge(ours, ALONE.format(gone=gone), LIMIT, environment)


def free_anothers_block(resource: AsyncCudaResource, gone: bool) -> None:
    """Free a block of another thread's stream while that thread lives, or after it."""
    made: list[Any] = []
    there, leave = threading.Event(), threading.Event()

    def allocate() -> None:
        block = resource.allocate(4096, PER_THREAD_STREAM)
        fill(block, 3, PER_THREAD_STREAM)
        made.append(block)
        there.set()
        leave.wait()

    thread = threading.Thread(target=allocate, daemon=True)
    thread.start()
    there.wait()
    if gone:
        leave.set()
        thread.join()
    block = made.pop()
    mine = cuglue.as_stream(PER_THREAD_STREAM)
    assert block.alloc_stream is not mine
    with testing.trace() as calls:
        resource.deallocate(block)
    assert PER_THREAD_STREAM not in [c.args[1] for c in calls if c.method == "free_async"]
    assert "context_record" in [c.method for c in calls]
    resource.reap_pending()
    assert (resource.live_bytes, resource.pending_free_bytes, resource.bytes_outstanding) == (0, 0, 0)
    leave.set()


# --- whose hang it is -------------------------------------------------------------------------------------------

QUICK = "pass"
STUCK = "import time\ntime.sleep(60)"
WRONG = "raise AssertionError('wrong')"


def once(path: Path) -> str:
    """A program that hangs at its first run."""
    mark = f"open({str(path)!r}, 'w').close()"
    return f"import os, time\nif not os.path.exists({str(path)!r}):\n    {mark}\n    time.sleep(60)"


def judged(ours: str, alone: str) -> None:
    hangs.judge(ours, alone, 1.0, {}, runs=2)


def test_what_comes_to_its_end_passes(tmp_path: Path) -> None:
    judged(QUICK, STUCK)
    judged(once(tmp_path / "ran"), STUCK)


def test_a_failure_is_one_whatever_the_driver_does(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="wrong"):
        judged(WRONG, STUCK)
    with pytest.raises(pytest.fail.Exception, match="wrong"):
        judged(once(tmp_path / "ran") + "\nelse:\n    " + WRONG, STUCK)


def test_a_hang_of_ours_fails_and_says_where() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"2 programs without the library did not[^$]*<string>"):
        judged(STUCK, QUICK)


def test_a_hang_of_the_driver_is_expected() -> None:
    with pytest.raises(pytest.xfail.Exception, match="2 of 2"):
        judged(STUCK, STUCK)


def test_what_cannot_end_itself_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "_GRACE", 0.5)
    (ended,) = hangs.run([f"faulthandler.cancel_dump_traceback_later()\n{STUCK}"], 0.5, {})
    assert (ended.done, ended.hung) == (False, True)
