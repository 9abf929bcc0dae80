"""What every test runs under: which driver, which OpenGL platform, and what the ``gpu`` marker means.

Unmarked tests run on the simulated device, with or without a GPU in the machine; tests marked ``gpu`` run on the CUDA
driver and are skipped only where there is no CUDA device. ``--gpu-required`` turns such a skip into a failure.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
from collections.abc import Generator, Iterator

import pytest

os.environ.setdefault("CUGLUE_DRIVER", "sim")
# PyOpenGL chooses its platform at its first import and cannot change it afterwards.
os.environ.setdefault("PYOPENGL_PLATFORM", "egl")

NO_DEVICE = "no CUDA device"


def cuda_device_count() -> int:
    """Ask the driver library itself, so that a missing wheel on a GPU machine fails tests instead of skipping them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cuglue")
    group.addoption("--gpu-required", action="store_true", help="a skipped gpu test is a failure")
    group.addoption(
        "--progress-file", metavar="FILE", help="append a JSON line when a test starts and when it ends"
    )
    group.addoption(
        "--hang", metavar="S", type=float, default=0.0,
        help="write every thread's stack to FILE.stacks and end the process when a test takes longer, also one that "
        "never gives up the interpreter",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_HAS_DEVICE] = has_device = cuda_device_count() > 0
    if config.getoption("--gpu-required") and not has_device:
        raise pytest.UsageError("--gpu-required: there is no CUDA device here")
    path = config.getoption("--progress-file")
    if path:
        config.pluginmanager.register(ProgressFile(path, config.getoption("--hang")), "cuglue-progress")


_HAS_DEVICE = pytest.StashKey[bool]()
_SKIPPED = pytest.StashKey[int]()


# Last, so that only what -m, -k and --deselect have left is counted.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.stash[_HAS_DEVICE]:
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    for item in gpu:
        item.add_marker(pytest.mark.skip(reason=NO_DEVICE))
    config.stash[_SKIPPED] = len(gpu)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.config.stash.get(_SKIPPED, 0)
    if skipped:
        terminalreporter.write_line(f"gpu tests: {skipped} skipped, {NO_DEVICE}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    required = item.config.getoption("--gpu-required") and item.get_closest_marker("gpu")
    if required and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = (
            "failed",
            f"a gpu test may not be skipped on a GPU machine: {reason}",
        )
    return report


@pytest.fixture(autouse=True)
def _driver_by_marker(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the CUDA driver current for a test marked ``gpu``; the environment chose the simulated one for the rest."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    import cuglue

    with cuglue.use_driver("cuda"):
        yield


class ProgressFile:
    """Tells a watching process what runs and how it ended, also when this process is lost in the middle of a test."""

    def __init__(self, path: str, hang: float) -> None:
        self._path = path
        self._hang = hang
        self._stacks = open(f"{path}.stacks", "w", encoding="utf-8") if hang else None  # noqa: SIM115

    def _write(self, **line: object) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(event="start", test=nodeid)
        if self._stacks is not None:
            faulthandler.dump_traceback_later(self._hang, exit=True, file=self._stacks)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write(
                event="result", test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3)
            )

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._stacks is not None:
            faulthandler.cancel_dump_traceback_later()
        self._write(event="end", test=nodeid)


def pytest_collection_finish() -> None:
    """Take what collecting made out of the collector's sight: tests that call ``gc.collect()`` then cost little."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for the modules that a class or file of tests was the first to import."""
    if nextitem is None or nextitem.parent is not item.parent:
        gc.collect()
        gc.freeze()
