"""A forked child: what another thread was doing at the fork keeps it from nothing, and it writes nothing twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import cuglue
from cuglue import (
    AsyncCudaResource,
    CsvSink,
    DebugGuardResource,
    JsonLinesSink,
    LoggingResource,
    PoolResource,
)
from cuglue.core import device as core_device
from cuglue.driver import registry
from cuglue.errors import UsageError
from cuglue.memory import layered
from cuglue.testing import SimDriver

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


def in_child(program: Callable[[], None]) -> str:
    """What became of ``program`` in a forked child: "", an error, or that it hangs."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            program()
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    until = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            return "it hangs"
        time.sleep(0.005)
    with os.fdopen(read) as pipe:
        return pipe.read()


@contextmanager
def held_elsewhere(lock: Any) -> Iterator[None]:
    """Another thread has ``lock`` meanwhile."""
    has, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    has.wait(60)
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("sink_type", [JsonLinesSink, CsvSink])
def test_a_log_that_another_thread_writes_at_the_fork(sim: Any, tmp_path: Path, sink_type: Any) -> None:
    with sink_type(tmp_path / "log") as sink:
        resource = LoggingResource(AsyncCudaResource(), sink)

        def program() -> None:
            with pytest.raises(UsageError, match="forked child"):
                resource.reap_pending()
            assert resource.dropped_records == 1
            with pytest.raises(UsageError, match="forked child"):
                sink.emit(None)
            sink.flush()
            sink.close()

        with held_elsewhere(sink._lock):
            assert in_child(program) == ""


@pytest.mark.parametrize("over", [AsyncCudaResource, PoolResource, DebugGuardResource])
def test_an_array_while_another_thread_is_inside_the_simulated_device(sim: Any, over: Any) -> None:
    resource = over() if over is AsyncCudaResource else over(AsyncCudaResource())
    resource.malloc(64)

    def program() -> None:
        with pytest.raises(UsageError, match="forked child"):
            resource.malloc(64)
        with pytest.raises(UsageError, match="forked child"):
            resource.allocate(64)

    with held_elsewhere(sim._changed):
        assert in_child(program) == ""
    resource.close()


@pytest.mark.parametrize("module", [core_device, registry, layered])
def test_a_child_makes_resources_of_its_own_whatever_lock_another_thread_had(sim: Any, module: Any) -> None:
    def program() -> None:
        with cuglue.use_driver(SimDriver()):
            pool = PoolResource(AsyncCudaResource())
            pool.deallocate(pool.allocate(64))
            pool.close()

    with held_elsewhere(module._lock):
        assert in_child(program) == ""


@pytest.mark.parametrize("sink_type", [JsonLinesSink, CsvSink])
def test_a_child_that_ends_writes_no_record_of_its_parent_again(
    sim: Any, tmp_path: Path, sink_type: Any
) -> None:
    path = tmp_path / "log"
    sink = sink_type(path)
    resource = LoggingResource(AsyncCudaResource(), sink)
    resource.deallocate(resource.allocate(5))

    def program() -> None:
        sink._file.flush()  # as the end of the interpreter does

    assert in_child(program) == ""
    assert path.read_text() == ""
    resource.reap_pending()
    sink.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 3 + (sink_type is CsvSink)


def test_the_file_of_a_caller_is_the_callers(sim: Any, tmp_path: Path) -> None:
    """What it has not written is for who opened it to see to; the sink itself refuses in the child."""
    with (tmp_path / "log").open("w") as file, JsonLinesSink(file) as sink:

        def program() -> None:
            with pytest.raises(UsageError, match="forked child"):
                sink.emit(None)
            file.write("child\n")
            file.flush()

        assert in_child(program) == ""
    assert (tmp_path / "log").read_text() == "child\n"
