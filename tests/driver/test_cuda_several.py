"""Default streams of two CUDA devices, seen in the calls that reach CUDA; the contract suite proves them on devices."""

from __future__ import annotations

import inspect
import os
from typing import Any

import fake_cuda
import pytest

pytest.importorskip("cupy", reason="the CUDA driver is made of CuPy")
pytest.importorskip("cuda.bindings.driver", reason="the CUDA driver is made of cuda-bindings")

from cuglue.driver.cuda import CudaDriver, calls, several
from cuglue.driver.protocol import CaptureMode, CaptureStatus, CopyKind, DeviceStream, Driver, RegisterFlags
from cuglue.testing.interpose import METHODS

NUMBERS = (0, 1, 2)
#: How each call is made on a stream; those that name a device or something that belongs to one, of device 1.
MADE: dict[str, Any] = {
    "malloc_async": lambda driver, stream: driver.malloc_async(64, stream, 1),
    "free_async": lambda driver, stream: driver.free_async(64, stream, 1),
    "copy_async": lambda driver, stream: driver.copy_async(1, 2, 64, CopyKind.D2D, stream),
    "copy_2d_async": lambda driver, stream: driver.copy_2d_async(1, 8, 2, 8, 8, 8, CopyKind.D2D, stream),
    "copy_from_array_async": lambda driver, stream: driver.copy_from_array_async(1, 8, 2, 8, 8, stream),
    "copy_to_array_async": lambda driver, stream: driver.copy_to_array_async(2, 1, 8, 8, 8, stream=stream),
    "fill_async": lambda driver, stream: driver.fill_async(1, 0, 64, stream),
    "stream_destroy": lambda driver, stream: driver.stream_destroy(stream),
    "stream_query": lambda driver, stream: driver.stream_query(stream),
    "stream_synchronize": lambda driver, stream: driver.stream_synchronize(stream),
    "stream_wait_event": lambda driver, stream: driver.stream_wait_event(stream, 7),
    "stream_callback": lambda driver, stream: driver.stream_callback(stream, lambda: None),
    "capture_status": lambda driver, stream: driver.capture_status(stream),
    "event_record": lambda driver, stream: driver.event_record(driver.event_create(1), stream),
    "capture_begin": lambda driver, stream: driver.capture_begin(stream, CaptureMode.RELAXED),
    "capture_end": lambda driver, stream: driver.capture_end(stream),
    "graph_upload": lambda driver, stream: driver.graph_upload(7, stream),
    "graph_launch": lambda driver, stream: driver.graph_launch(7, stream),
    "graphics_map": lambda driver, stream: driver.graphics_map([buffer_of(driver)], stream),
    "graphics_unmap": lambda driver, stream: driver.graphics_unmap([buffer_of(driver)], stream),
    "semaphore_signal": lambda driver, stream: driver.semaphore_signal(semaphore_of(driver), 1, stream),
    "semaphore_wait": lambda driver, stream: driver.semaphore_wait(semaphore_of(driver), 1, stream),
    "kernel_launch": lambda driver, stream: driver.kernel_launch(
        loaded(driver), (1, 1, 1), (1, 1, 1), (), (), 0, stream
    ),
}


def buffer_of(driver: Any) -> int:
    found: int = driver.gl_register_buffer(4, RegisterFlags.NONE, 1)
    return found


def semaphore_of(driver: Any) -> int:
    found: int = driver.import_semaphore_fd(os.open(os.devnull, os.O_RDONLY), True, 1)
    return found


class Function:
    ptr = 99


def loaded(driver: Any) -> int:
    handle: int = driver._add("key", None, Function, 1)
    return handle


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Any:
    driver, script, runtime = fake_cuda.install(monkeypatch, devices=2)
    script.answers.update(
        dict.fromkeys(["streamQuery", "cuSignalExternalSemaphoresAsync", "cuWaitExternalSemaphoresAsync"])
        | {"streamQuery": 0, "streamIsCapturing": False}
        | {"cuFuncGetParamInfo": calls.cu.CUresult.CUDA_ERROR_INVALID_VALUE}
        | dict.fromkeys(["cuGraphicsMapResources", "cuGraphicsUnmapResources"])
    )
    return driver, script, runtime


def test_every_call_with_a_stream_is_here() -> None:
    taking = {m for m in METHODS if "stream" in inspect.signature(getattr(Driver, m)).parameters}
    assert set(MADE) == taking
    assert set(several.BY_STREAM_ALONE) <= taking


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", sorted(MADE))
def test_a_call_on_the_default_stream_of_another_device(two: Any, name: str, number: int) -> None:
    driver, script, runtime = two
    answer = MADE[name](driver, DeviceStream(number, 1))
    alone = name == "capture_status" and number < 2
    assert script.calls or alone, "a legacy stream never captures"
    if name == "stream_destroy":
        return  # no stream that could be destroyed: CUDA says so
    assert {call[-1] for call in script.calls} <= {"on 1"}
    assert (runtime.stack, runtime.getDevice()) == ([], 0)
    if name == "capture_status":
        assert answer is CaptureStatus.NONE


@pytest.mark.parametrize("name", several.BY_STREAM_ALONE)
def test_a_call_on_a_stream_of_another_device(two: Any, name: str) -> None:
    """Of its own: what a copy reaches is what the current device reaches."""
    driver, script, runtime = two
    stream = driver.stream_create(1)
    assert type(stream) is DeviceStream
    script.calls.clear()
    MADE[name](driver, stream)
    assert {call[-1] for call in script.calls} == {"on 1"}
    assert (runtime.stack, runtime.getDevice()) == ([], 0)


@pytest.mark.parametrize("name", several.BY_STREAM_ALONE)
def test_what_says_no_device_and_what_is_current_costs_no_context(two: Any, name: str) -> None:
    driver, script, runtime = two
    driver._on = lambda device: pytest.fail("needless context switch")
    MADE[name](driver, 2)
    MADE[name](driver, 0x9000)
    MADE[name](driver, DeviceStream(2, 0))
    runtime.current = 1
    script.calls.clear()
    MADE[name](driver, DeviceStream(2, 1))
    assert {call[-1] for call in script.calls} == {"on 1"}


@pytest.mark.parametrize("name", several.BY_STREAM_ALONE)
def test_the_device_is_as_before_after_a_failure(two: Any, name: str) -> None:
    driver, script, runtime = two

    def gone() -> Any:
        raise KeyError

    for function in ("memcpyAsync", "memsetAsync", "streamQuery", "streamSynchronize", "streamWaitEvent"):
        script.answers[function] = gone
    for function in ("memcpy2DAsync", "memcpy2DFromArrayAsync", "memcpy2DToArrayAsync", "streamIsCapturing"):
        script.answers[function] = gone
    for function in ("streamBeginCapture", "streamEndCapture", "graphUpload", "graphLaunch"):
        script.answers[function] = gone
    with pytest.raises(KeyError):
        MADE[name](driver, DeviceStream(2, 1))
    assert (runtime.stack, runtime.getDevice()) == ([], 0)


def test_one_device_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, _ = fake_cuda.install(monkeypatch)
    assert type(driver) is CudaDriver
    for name in several.BY_STREAM_ALONE:
        assert not hasattr(getattr(CudaDriver, name), "__wrapped__")
