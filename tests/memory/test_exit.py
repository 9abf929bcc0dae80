"""The end of a process: code 0, nothing on stderr, in whatever order things go (P8)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
RUNS = int(
    os.environ.get("CUGLUE_EXIT_RUNS", "2")
)  # of each on the simulated device; 20 of each take two minutes

PRELUDE = """
import atexit, gc, sys, threading, types
import cupy
import cuglue
from cuglue import AsyncCudaResource, DirectCudaResource
resource = AsyncCudaResource()
"""

ENDS = {
    "a generator that is suspended inside a scope": """
def generator():
    with resource.as_cupy_allocator():
        pointer = cupy.cuda.alloc(10)
        yield
suspended = generator()
next(suspended)
""",
    "an array in a global, the allocator set": """
cupy.cuda.set_allocator(resource.malloc)
array = cupy.ndarray(100, 'f4')
""",
    "the resource goes first": """
array = cupy.ndarray(100, 'f4', memptr=resource.malloc(400))
del resource
gc.collect()
""",
    "an array in another module and in a cycle": """
module = types.ModuleType('elsewhere')
sys.modules['elsewhere'] = module
module.pointer = resource.malloc(400)
class Node: pass
node = Node()
node.me, node.pointer = node, resource.malloc(400)
with resource.as_cupy_allocator():
    node.array = cupy.ndarray(10, 'f4')
del node
""",
    "a handler at exit allocates and frees": """
kept = [resource.malloc(400)]
@atexit.register
def last():
    kept.clear()
    kept.append(resource.malloc(100))
    resource.reap_pending()
""",
    "a finaliser of the user at teardown": """
class User:
    def __init__(self):
        self.pointer = resource.malloc(400)
        self.block = resource.allocate(64)
    def __del__(self):
        self.pointer = None
user = User()
User.user = user
""",
    "threads that go on, streams and scopes left open": """
scope = resource.as_cupy_allocator()
scope.__enter__()
stream = cuglue.current_driver().Stream() if cuglue.current_driver().name == 'sim' else cupy.cuda.Stream()
record = cuglue.as_stream(stream)
blocks = [resource.allocate(64, stream) for _ in range(3)]
record.wait_for(cuglue.as_stream(0), cuglue.as_stream(0).submit())
def work(kept):
    while True:
        kept[:] = [resource.malloc(64)]
thread = threading.Thread(target=work, args=([],), daemon=True)
thread.start()
""",
}


def run(code: str, driver: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "CUGLUE_DRIVER": driver}
    environment.pop("PYTHONWARNINGS", None)
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("end", ENDS)
def test_P8_the_end_of_a_process(end: str) -> None:
    for _ in range(RUNS):
        done = run(ENDS[end], "sim")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ENDS)
def test_P8_the_end_of_a_process_on_a_device(end: str) -> None:
    for _ in range(20):
        done = run(ENDS[end], "cuda")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_report_M31_M32_nothing_is_called_after_the_end() -> None:
    """Frees that come while the interpreter goes are left to the end of the process."""
    done = run(
        """
import os
driver = cuglue.current_driver()
kept = resource.malloc(64)
real = driver.free_async
def free_async(*args, real=real, write=os.write, finalizing=sys.is_finalizing):
    if finalizing():
        write(1, b'freed')
    return real(*args)
driver.free_async = free_async
class Holder: pass
holder = Holder()
holder.pointer = kept
del kept
cupy.holder = holder
""",
        "sim",
    )
    assert done.returncode == 0
    assert "freed" not in done.stdout
    assert done.stderr == ""


def test_without_cupy_the_error_is_a_plain_one() -> None:
    code = """
import sys
import cuglue
from cuglue import AsyncCudaResource
try:
    AsyncCudaResource().allocate(2**63)
except MemoryError as error:
    assert type(error) is cuglue.errors.OutOfMemory
assert 'cupy' not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "CUGLUE_DRIVER": "sim"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_pickled_with_cupy_is_read_without() -> None:
    code = """
import pickle, sys
try:
    resource.malloc(2**63)
except MemoryError as error:
    sys.stdout.buffer.write(pickle.dumps(error))
"""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "CUGLUE_DRIVER": "sim"}
    made = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], env=environment, capture_output=True, timeout=100, check=True
    )
    reader = """
import pickle, sys
error = pickle.loads(sys.stdin.buffer.read())
assert 'cupy' not in sys.modules
assert error.requested == 2**63, error.requested
print(type(error).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", reader],
        env=environment,
        input=made.stdout,
        capture_output=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.strip() == b"OutOfMemory"
