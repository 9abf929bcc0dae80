"""The choice of the driver: at once, restorable, and never a silent fallback.

What the first call of a process decides is tested in processes of its own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuglue.driver import registry
from cuglue.errors import UnsupportedError, UsageError

SOURCE = Path(registry.__file__).parents[2]
NO_LIBRARY = "from cuglue.driver import registry as r; r._SONAMES = ('libno-such-driver.so.1',)\n"
REPORT = """
try:
    driver = r.current_driver()
except Exception as error:
    print(type(error).__name__, getattr(error, "reason", None), error)
else:
    print(driver.name)
"""


def run(code: str, **environment: str) -> str:
    """Standard output of ``code`` in a fresh interpreter."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CUGLUE_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=inherited | {"PYTHONPATH": str(SOURCE)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class FakeDriver:
    name = "fake"

    def capabilities(self, device: int) -> None:
        """Enough to pass for a driver."""


def test_without_driver_and_without_choice_nothing_is_chosen() -> None:
    answer = run(NO_LIBRARY + REPORT)
    assert answer.startswith("UnsupportedError no_runtime CUDA: got no driver library")
    assert "CUGLUE_DRIVER=sim" in answer
    assert "Install the NVIDIA driver" in answer


def test_cuda_chosen_without_driver_is_not_replaced() -> None:
    assert run(NO_LIBRARY + REPORT, CUGLUE_DRIVER="cuda").startswith("UnsupportedError no_runtime")


def test_environment_chooses_the_simulated_device() -> None:
    assert run(NO_LIBRARY + REPORT, CUGLUE_DRIVER="sim") == "sim\n"


def test_environment_names_no_driver() -> None:
    answer = run(NO_LIBRARY + REPORT, CUGLUE_DRIVER="simulated")
    assert answer.startswith("UsageError None choice of a driver: got 'simulated', expected 'cuda', 'sim'")


def test_seed_that_is_no_number() -> None:
    answer = run(NO_LIBRARY + REPORT, CUGLUE_DRIVER="sim", CUGLUE_SIM_SEED="seven")
    assert answer.startswith("UsageError None CUGLUE_SIM_SEED: got 'seven'")


def test_choice_in_the_program_beats_the_environment() -> None:
    assert run(NO_LIBRARY + "r.use_driver('sim')\n" + REPORT, CUGLUE_DRIVER="cuda") == "sim\n"


def test_first_call_decides_once() -> None:
    code = NO_LIBRARY + "a = r.current_driver(); print(r.current_driver() is a)"
    assert run(code, CUGLUE_DRIVER="sim") == "True\n"


def test_looking_for_a_driver_loads_no_cupy() -> None:
    code = """
import sys
from cuglue.driver import registry as r
r.is_cuda_available(), r.runtime_path()
print([name for name in ("cupy", "cuda.bindings", "cuglue.driver.cuda", "cuglue.driver.sim") if name in sys.modules])
"""
    assert run(code) == "[]\n"


def test_missing_packages_are_named() -> None:
    code = """
import sys
sys.modules["cupy"] = None
from cuglue.driver import registry as r
r.is_cuda_available = lambda: True
"""
    answer = run(code + REPORT, CUGLUE_DRIVER="cuda")
    assert answer.startswith("UnsupportedError no_runtime CUDA packages")
    assert "Install cuglue[cuda13]" in answer


def test_use_driver_sets_at_once_and_restores_after_with() -> None:
    first, second, third = FakeDriver(), FakeDriver(), FakeDriver()
    with registry.use_driver(first) as inside:  # type: ignore[arg-type]
        assert inside is first
        assert registry.current_driver() is first
        with registry.use_driver(second):  # type: ignore[arg-type]
            registry.use_driver(third)  # type: ignore[arg-type]
            assert registry.current_driver() is third
        assert registry.current_driver() is first


def test_former_driver_is_back_after_an_error() -> None:
    before = registry.current_driver()
    with pytest.raises(ZeroDivisionError), registry.use_driver(FakeDriver()):  # type: ignore[arg-type]
        raise ZeroDivisionError
    assert registry.current_driver() is before


@pytest.mark.parametrize("choice", ["opencl", "", None, 3, object()])
def test_refused_choice_changes_nothing(choice: object) -> None:
    before = registry.current_driver()
    with pytest.raises(UsageError) as caught:
        registry.use_driver(choice)  # type: ignore[arg-type]
    assert repr(choice) in str(caught.value)
    assert registry.current_driver() is before


def test_each_simulated_device_is_a_fresh_one() -> None:
    assert registry.open_driver("sim") is not registry.open_driver("sim")


# --- looking for the library ----------------------------------------------------------------------------------


class FakeLibrary:
    """A driver library: ``status`` of cuInit, number of devices, and the symbols it lacks."""

    def __init__(self, status: int = 0, devices: int = 1, lacks: tuple[str, ...] = ()) -> None:
        self.calls: list[str] = []

        def init(flags: int) -> int:
            assert flags == 0
            self.calls.append("init")
            return status

        def count(reference: object) -> int:
            self.calls.append("count")
            reference._obj.value = devices  # type: ignore[attr-defined]
            return 0

        for name, function in (("cuInit", init), ("cuDeviceGetCount", count)):
            if name not in lacks:
                setattr(self, name, function)


def probe(
    monkeypatch: pytest.MonkeyPatch, libraries: dict[str, FakeLibrary | None]
) -> tuple[bool, str | None]:
    def load(name: str) -> FakeLibrary:
        library = libraries[name]
        if library is None:
            raise OSError(name)
        return library

    monkeypatch.setattr(registry, "_SONAMES", tuple(libraries))
    monkeypatch.setattr(registry.ctypes, "CDLL", load)
    monkeypatch.setattr(registry, "_path_of", lambda library, symbol: None)
    return registry._probe.__wrapped__()


def test_library_that_lacks_a_symbol_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    old = FakeLibrary(lacks=("cuDeviceGetCount",))
    assert probe(monkeypatch, {"old": old, "good": FakeLibrary()}) == (True, "good")
    assert old.calls == []
    assert probe(monkeypatch, {"old": old}) == (False, None)


def test_next_soname_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(monkeypatch, {"first": None, "second": FakeLibrary()}) == (True, "second")
    broken = FakeLibrary(status=999)
    assert probe(monkeypatch, {"broken": broken, "second": FakeLibrary()}) == (True, "second")
    assert broken.calls == ["init"]


def test_driver_without_device_is_found_but_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(monkeypatch, {"idle": FakeLibrary(devices=0)}) == (False, "idle")


@pytest.mark.skipif(sys.platform != "linux", reason="dladdr(3) and the name of the C library are Linux's")
def test_path_of_a_loaded_library() -> None:
    library = ctypes.CDLL("libc.so.6")
    path = registry._path_of(library, library.getpid)
    assert path is not None
    assert Path(path).is_file()
    assert "libc" in Path(path).name


@pytest.mark.gpu
def test_available_here_and_where_from() -> None:
    assert registry.is_cuda_available()
    path = registry.runtime_path()
    assert path is not None
    assert Path(path).is_file()
    assert registry.current_driver().name == "cuda"
    assert registry.open_driver("cuda") is registry.open_driver("cuda")


def test_unavailable_is_an_unsupported_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_cuda_available", lambda: False)
    monkeypatch.setattr(registry, "runtime_path", lambda: "/lib/libcuda.so.1")
    registry._cuda_driver.cache_clear()
    before = registry.current_driver()
    with pytest.raises(UnsupportedError) as caught:
        registry.use_driver("cuda")
    assert caught.value.reason == "no_runtime"  # type: ignore[attr-defined]
    assert "no device behind /lib/libcuda.so.1" in str(caught.value)
    assert registry.current_driver() is before
