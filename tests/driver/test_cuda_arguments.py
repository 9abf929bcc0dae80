"""What the CUDA driver hands to CUDA: arguments, devices, and order of calls, over fakes that only note them."""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the CUDA driver is made of CuPy")

import fake_cuda

from cuglue.driver.cuda import calls, contexts, kernels
from cuglue.driver.protocol import (
    ArrayInfo,
    CaptureMode,
    CaptureStatus,
    CopyKind,
    MemoryType,
    PointerInfo,
    RegisterFlags,
    TexelKind,
)
from cuglue.errors import (
    CaptureError,
    DevicePoisoned,
    DriverError,
    LaunchError,
    OutOfMemory,
    UnsupportedError,
    UsageError,
)

RGBA8 = ArrayInfo(16, 9, 0, 8, 4, TexelKind.UINT)
REFUSED = calls.cu.CUresult.CUDA_ERROR_INVALID_VALUE
Fake = tuple[Any, fake_cuda.Script, fake_cuda.FakeRuntime]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_cuda.install(monkeypatch, devices=2)


def open_fd() -> int:
    """A file descriptor for the driver to take."""
    return os.open(os.devnull, os.O_RDONLY)


# --- device and context -------------------------------------------------------------------------------------


def test_contracts_0_5_device_is_as_before(two: Fake) -> None:
    driver, script, runtime = two
    driver.malloc_async(64, 7, 1)
    driver.malloc(64, 1)
    driver.stream_create(1)
    assert {call[-1] for call in script.calls} == {"on 1"}
    assert (runtime.stack, runtime.getDevice()) == ([], 0)


def test_contracts_0_5_device_is_as_before_after_a_failure(two: Fake) -> None:
    driver, script, runtime = two
    script.answers["mallocAsync"] = calls.CUDARuntimeError(2)
    script.answers["cuSurfObjectCreate"] = REFUSED
    with pytest.raises(OutOfMemory):
        driver.malloc_async(64, 7, 1)
    with pytest.raises(DriverError):
        driver.surface_create(5, 1)
    assert (runtime.stack, runtime.getDevice()) == ([], 0)


def test_current_device_is_not_set_again(two: Fake) -> None:
    driver, _, runtime = two
    runtime.current = 1
    entered: list[int] = []
    driver._on = lambda device: entered.append(device) or pytest.fail("needless context switch")
    driver.malloc_async(64, 7, 1)
    driver.free_async(5, 7, 1)
    assert entered == []


@pytest.mark.parametrize("device", [1, -1, 7])
def test_wrong_ordinal_never_reaches_cuda(fake: Fake, device: int) -> None:
    driver, script, _ = fake
    for method, args in ((driver.malloc_async, (64, 7)), (driver.free_async, (5, 7)), (driver.malloc, (64,))):
        with pytest.raises(UsageError, match="device: got"):
            method(*args, device)
    assert script.calls == []


def test_handles_run_on_their_own_device(two: Fake) -> None:
    driver, script, _ = two
    script.answers["cuSignalExternalSemaphoresAsync"] = None
    semaphore = driver.import_semaphore_fd(open_fd(), True, 1)
    driver.semaphore_signal(semaphore, 1, 0)
    resource = driver.gl_register_buffer(4, RegisterFlags.NONE, 1)
    driver.graphics_map([resource], 0)
    assert [call[-1] for call in script.calls] == ["on 1"] * 4


def test_rows_35_37_38_a_foreign_context_is_neither_used_nor_lost(fake: Fake) -> None:
    """Another library's own context is current: our calls run in the primary one, which is never given up."""
    driver, script, runtime = fake
    runtime.stack.append(fake_cuda.CONTEXT + 50)
    resource = driver.gl_register_buffer(4, RegisterFlags.NONE, 0)
    refusal = calls.cu.CUresult.CUDA_ERROR_INVALID_CONTEXT
    script.answers["cuGraphicsResourceGetMappedPointer"] = lambda: (
        (0x7000, 64) if len(runtime.stack) > 1 else refusal
    )
    driver.graphics_map([resource], 0)
    assert driver.graphics_pointer(resource) == (0x7000, 64)
    assert script.calls[-2:] == [
        (*script.calls[-1][:-1], "on 50"),
        script.calls[-1],
    ]  # asked again, in the right one
    del script.calls[-2]
    driver.graphics_unmap([resource], 0)
    driver.graphics_unregister(resource)
    assert {call[-1] for call in script.calls} == {"on 0"}
    assert runtime.stack == [fake_cuda.CONTEXT + 50]
    assert not {name for name in script.names() if "CtxCreate" in name or "CtxRelease" in name}


# --- memory -------------------------------------------------------------------------------------------------


def test_failed_allocations_say_what_was_asked(fake: Fake) -> None:
    driver, script, _ = fake
    for name, method, args in (
        ("malloc", driver.malloc, (100, 0)),
        ("mallocAsync", driver.malloc_async, (100, 7, 0)),
        ("mallocManaged", driver.malloc_managed, (100, 0)),
        ("hostAlloc", driver.host_alloc, (100,)),
    ):
        script.answers[name] = calls.CUDARuntimeError(2)
        with pytest.raises(OutOfMemory) as caught:
            method(*args)
        assert caught.value.requested == 100
        script.answers[name] = 0
        with pytest.raises(DriverError, match="zero handle"):
            method(*args)
    script.answers["cuArray3DCreate"] = calls.cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfMemory) as caught:
        driver.array_create(RGBA8, 0)
    assert caught.value.requested == 16 * 9 * 4


@pytest.mark.parametrize(("kind", "number"), [(CopyKind.H2D, 1), (CopyKind.D2H, 2), (CopyKind.D2D, 3)])
def test_copies(fake: Fake, kind: CopyKind, number: int) -> None:
    driver, script, _ = fake
    driver.copy_async(1, 2, 3, kind, 4)
    driver.copy_2d_async(1, 16, 2, 32, 12, 5, kind, 4)
    assert script.only("memcpyAsync")[:-1] == (1, 2, 3, number, 4)
    assert script.only("memcpy2DAsync")[:-1] == (1, 16, 2, 32, 12, 5, number, 4)


def test_array_copies(fake: Fake) -> None:
    driver, script, _ = fake
    driver.copy_from_array_async(1, 64, 99, 60, 5, 4)
    driver.copy_to_array_async(99, 1, 64, 60, 5, 4)
    assert script.only("memcpy2DFromArrayAsync")[:-1] == (1, 64, 99, 0, 0, 60, 5, 3, 4)
    assert script.only("memcpy2DToArrayAsync")[:-1] == (99, 0, 0, 1, 64, 60, 5, 3, 4)


class Attributes:
    def __init__(self, type: int, device: int) -> None:
        self.type, self.device = type, device


@pytest.mark.parametrize(
    ("type", "device", "info"),
    [
        (0, -2, PointerInfo(MemoryType.HOST, 0)),
        (1, 1, PointerInfo(MemoryType.PINNED, 0)),
        (2, 1, PointerInfo(MemoryType.DEVICE, 1)),
        (3, 1, PointerInfo(MemoryType.MANAGED, 1)),
    ],
)
def test_pointer_info(fake: Fake, type: int, device: int, info: PointerInfo) -> None:
    driver, script, _ = fake
    script.answers["pointerGetAttributes"] = Attributes(type, device)
    assert driver.pointer_info(64) == info


def test_host_view_is_the_memory_itself(fake: Fake) -> None:
    driver, script, _ = fake
    script.answers["pointerGetAttributes"] = Attributes(1, 0)
    memory = ctypes.create_string_buffer(b"abcdef", 6)
    writable = driver.host_view(ctypes.addressof(memory), 6, True)
    reading = driver.host_view(ctypes.addressof(memory), 6, False)
    assert (reading.nbytes, reading.format, reading.readonly, writable.readonly) == (6, "B", True, False)
    writable[0] = ord("x")
    assert bytes(reading) == memory.raw == b"xbcdef"


def test_host_view_of_device_memory_is_refused(fake: Fake) -> None:
    driver, script, _ = fake
    script.answers["pointerGetAttributes"] = Attributes(2, 0)
    with pytest.raises(UnsupportedError, match="Copy it to the host"):
        driver.host_view(64, 6, False)


# --- streams and events -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_an_event_is_recorded_on_the_default_stream_of_its_device(two: Fake, stream: int) -> None:
    """Another device is current: its default stream would be meant, and the event refused."""
    driver, script, _ = two
    there, here = driver.event_create(1), driver.event_create(0)
    for event, device in ((there, 1), (here, 0), (12345, 0)):
        script.calls.clear()
        driver.event_record(event, stream)
        assert script.only("eventRecord") == (event, stream, f"on {device}")
    script.calls.clear()
    driver.event_record(there, 99)
    assert script.only("eventRecord") == (there, 99, "on 0"), "such a stream has its device"
    driver.event_destroy(there)
    script.calls.clear()
    driver.event_record(there, stream)
    assert script.only("eventRecord") == (there, stream, "on 0"), "nobody's any more"


@pytest.mark.parametrize("what", ["stream", "event"])
def test_query_clears_the_last_error(fake: Fake, what: str) -> None:
    """The runtime notes "not ready" as its last error; left there, somebody else's next launch check reports it."""
    driver, script, _ = fake
    query = getattr(driver, f"{what}_query")
    # So that the runtime is asked.
    script.answers["cuEventQuery"] = calls.cu.CUresult.CUDA_ERROR_INVALID_CONTEXT
    script.answers[f"{what}Query"] = 0
    assert query(5) is True
    assert "check_status" not in script.names()
    script.answers[f"{what}Query"] = 600
    assert query(5) is False
    assert ("check_status", 600) in script.calls
    script.answers[f"{what}Query"] = 719
    with pytest.raises(DevicePoisoned):
        query(5)
    script.answers[f"{what}Query"] = 900
    with pytest.raises(DriverError) as caught:
        query(5)
    assert caught.value.call == f"cuda{what.capitalize()}Query"


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (True, CaptureStatus.ACTIVE),
        (False, CaptureStatus.NONE),
        (RuntimeError("invalidated"), CaptureStatus.INVALIDATED),
    ],
)
def test_capture_status(fake: Fake, answer: Any, status: CaptureStatus) -> None:
    driver, script, _ = fake
    script.answers["streamIsCapturing"] = answer
    assert driver.capture_status(9) is status


def test_capture_status_of_the_legacy_stream_asks_nobody(fake: Fake) -> None:
    driver, script, _ = fake
    assert driver.capture_status(0) is driver.capture_status(1) is CaptureStatus.NONE
    assert script.calls == []


def test_callback_during_capture_is_refused(fake: Fake) -> None:
    driver, script, _ = fake
    script.answers["streamIsCapturing"] = True
    with pytest.raises(CaptureError):
        driver.stream_callback(9, lambda: None)
    assert script.names() == ["streamIsCapturing"]


def test_callback_that_raises_goes_to_the_hook_of_threads(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, script, _ = fake
    script.answers["streamIsCapturing"] = False
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    driver.stream_callback(9, lambda: {}["gone"])
    stream, function, argument = script.only("launchHostFunc")[:-1]
    assert (stream, argument) == (9, 0)
    function(argument)
    assert [args.exc_type for args in seen] == [KeyError]


@pytest.mark.parametrize(
    ("code", "ready"), [("CUDA_SUCCESS", True), ("CUDA_ERROR_NOT_READY", False)], ids=["done", "pending"]
)
def test_an_event_is_asked_for_without_a_last_error_and_in_relaxed_mode(
    fake: Fake, code: str, ready: bool
) -> None:
    """In another mode the question would end what some thread captures in global mode."""
    driver, script, _ = fake
    script.calls.clear()
    script.answers["cuThreadExchangeStreamCaptureMode"] = 7
    script.answers["cuEventQuery"] = getattr(calls.cu.CUresult, code)
    assert driver.event_query(99) is ready
    modes = calls.cu.CUstreamCaptureMode
    assert [call[:2] for call in script.calls] == [
        ("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED),
        ("cuEventQuery", 99),
        ("cuThreadExchangeStreamCaptureMode", 7),
    ]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("method", "args", "call"),
    [
        ("malloc", (64, 0), "malloc"),
        ("free", (64, 0), "free"),
        ("malloc_managed", (64, 0), "mallocManaged"),
        ("host_alloc", (64,), "hostAlloc"),
        ("host_free", (64,), "freeHost"),
        ("pool_trim", (0, 0), "memPoolTrimTo"),
    ],
)
def test_memory_is_taken_and_given_back_in_relaxed_mode(
    fake: Fake, method: str, args: tuple[int, ...], call: str, fails: bool
) -> None:
    """In another mode it would end what some thread captures in global mode."""
    driver, script, _ = fake
    script.calls.clear()
    script.answers["cuThreadExchangeStreamCaptureMode"] = 7
    if fails:
        script.answers[call] = calls.CUDARuntimeError(1)
        with pytest.raises(DriverError):
            getattr(driver, method)(*args)
    else:
        getattr(driver, method)(*args)
    relaxed = calls.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    made = [made for made in script.calls if made[0] in ("cuThreadExchangeStreamCaptureMode", call)]
    assert [made[0] for made in made] == [
        "cuThreadExchangeStreamCaptureMode",
        call,
        "cuThreadExchangeStreamCaptureMode",
    ]
    assert (made[0][1], made[2][1]) == (relaxed, 7)


@pytest.mark.parametrize("code", [0, 600, 700])
def test_on_a_thread_that_never_called_CUDA_the_runtime_is_asked(fake: Fake, code: int) -> None:
    driver, script, _ = fake
    script.answers["cuThreadExchangeStreamCaptureMode"] = 7
    script.answers["cuEventQuery"] = calls.cu.CUresult.CUDA_ERROR_INVALID_CONTEXT
    script.answers["eventQuery"] = code
    if code == 700:
        with pytest.raises(DevicePoisoned):
            driver.event_query(99)
    else:
        assert driver.event_query(99) is (code == 0)
    assert script.calls[-1][:2] == ("cuThreadExchangeStreamCaptureMode", 7)


def test_context_events_take_the_context_itself(two: Fake) -> None:
    driver, script, runtime = two
    driver.context_record(55, 1)
    driver.context_wait(55, 1)
    assert [call[:3] for call in script.calls] == [("cuCtxRecordEvent", 101, 55), ("cuCtxWaitEvent", 101, 55)]
    assert runtime.stack == []


# --- kernels ------------------------------------------------------------------------------------------------


class FakeFunction:
    """A compiled function whose parameters have these sizes; CuPy's own way to launch it only notes the call."""

    ptr = 77

    def __init__(self, script: fake_cuda.Script, *sizes: int) -> None:
        self.script = script
        self.sizes = sizes
        self.launches: list[tuple[Any, ...]] = []
        self.arguments: list[list[bytes]] = []
        script.answers.update(cuFuncGetParamInfo=self.parameter, launchKernel=self.launched)

    def __call__(self, *args: Any) -> None:
        self.launches.append(args)

    def parameter(self) -> Any:
        _, handle, index, _ = self.script.calls[-1]
        assert int(handle) == self.ptr
        return (0, self.sizes[index]) if index < len(self.sizes) else REFUSED

    def launched(self) -> None:
        addresses = self.script.calls[-1][10]
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(addresses)
        pairs = zip(pointers, self.sizes, strict=True)
        self.arguments.append([ctypes.string_at(pointer, size) for pointer, size in pairs])


@pytest.fixture
def function(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> FakeFunction:
    made = FakeFunction(fake[1])
    monkeypatch.setattr(kernels, "_function_of", lambda raw, name, context: made)
    return made


def test_launch_arguments(fake: Fake, function: FakeFunction) -> None:
    driver, script, _ = fake
    function.sizes = (8, 1, 2, 4, 4, 8, 1, 8)
    values = (1 << 47, np.int8(-3), np.float16(0.5), np.int32(-7), np.float32(1.5), np.float64(0.1))
    values += (np.bool_(True), np.uint64((1 << 64) - 5))
    kernel = driver.kernel_load("f", "source", ("-DX",), 0)
    for _ in range(2):
        driver.kernel_launch(kernel, (2, 3, 4), (32, 5, 6), values, (None,) * 8, 64, 9)
    handle, *rest = next(call[1:] for call in script.calls if call[0] == "launchKernel")
    assert handle == 77
    assert rest[:8] == [2, 3, 4, 32, 5, 6, 64, 9]
    wanted = [(1 << 47).to_bytes(8, "little"), *(value.tobytes() for value in values[1:])]
    assert function.arguments == [wanted, wanted]
    assert function.launches == []


def test_arguments_of_a_launch_stay_while_another_is_packed(fake: Fake, function: FakeFunction) -> None:
    driver, script, _ = fake
    function.sizes = (4,)
    kernel = driver.kernel_load("f", "source", (), 0)
    seen: list[list[bytes]] = []

    def inner() -> None:
        script.answers["launchKernel"] = function.launched
        mine = script.calls[-1][10]
        driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (np.int32(2),), (None,), 0, 9)
        (pointer,) = (ctypes.c_void_p * 1).from_address(mine)
        seen.append([ctypes.string_at(pointer, 4)])

    script.answers["launchKernel"] = inner
    driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (np.int32(1),), (None,), 0, 9)
    assert (seen, function.arguments) == ([[b"\1\0\0\0"]], [[b"\2\0\0\0"]])


@pytest.mark.parametrize(
    ("sizes", "values", "text"),
    [
        ((8,), (np.int32(1),), "int32 of 4 bytes as argument 0, expected a parameter of 8 bytes"),
        ((4, 4), (np.int32(1), np.float64(1)), "float64 of 8 bytes as argument 1"),
        ((4,), (np.int64(1),), "int64 of 8 bytes"),
        ((16,), (1,), "int of 8 bytes as argument 0, expected a parameter of 16"),
        ((8, 8), (1,), "got 1 arguments, expected 2"),
        ((), (1,), "got 1 arguments, expected 0"),
        ((8,), (1 << 70,), "expected values that fit"),
    ],
)
def test_arguments_that_do_not_fit(
    fake: Fake, function: FakeFunction, sizes: tuple[int, ...], values: tuple[Any, ...], text: str
) -> None:
    driver, script, _ = fake
    function.sizes = sizes
    kernel = driver.kernel_load("f", "source", (), 0)
    for _ in range(2):
        with pytest.raises(LaunchError, match=text):
            driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), values, (None,) * len(values), 0, 9)
    assert "launchKernel" not in script.names()


def test_plain_numbers_take_the_width_of_the_parameter(fake: Fake, function: FakeFunction) -> None:
    driver, _, _ = fake
    function.sizes = (4, 1, 4, 8)
    kernel = driver.kernel_load("f", "source", (), 0)
    driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (-2, 7, 1.5, 1.5), (None,) * 4, 0, 9)
    wanted = [np.int32(-2), np.int8(7), np.float32(1.5), np.float64(1.5)]
    assert function.arguments == [[value.tobytes() for value in wanted]]


def test_bindings_that_tell_no_parameters(
    fake: Fake, function: FakeFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, script, _ = fake
    monkeypatch.setattr(kernels.cu, "cuFuncGetParamInfo", None, raising=False)
    kernel = driver.kernel_load("f", "source", (), 0)
    driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (1 << 40,), (None,), 0, 9)
    assert "launchKernel" in script.names()


def test_what_we_cannot_pack_goes_through_cupy(fake: Fake, function: FakeFunction) -> None:
    driver, script, _ = fake
    kernel = driver.kernel_load("f", "source", (), 0)
    values = (1 << 47, np.complex64(1j))
    driver.kernel_launch(kernel, (2, 1, 1), (32, 1, 1), values, (None, None), 64, 9)
    ((grid, block, args, shared, stream, cooperative),) = function.launches
    assert (grid, block, args, shared) == ((2, 1, 1), (32, 1, 1), values, 64)
    assert (stream.ptr, cooperative) == (9, False)
    assert "launchKernel" not in script.names()


def test_thread_without_context_launches_all_the_same(fake: Fake, function: FakeFunction) -> None:
    driver, script, _ = fake
    kernel = driver.kernel_load("f", "source", (), 0)

    def refuse_once() -> Any:
        script.answers["launchKernel"] = None
        return fake_cuda.Refusal(201)

    script.answers["launchKernel"] = refuse_once
    driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (), (), 0, 9)
    assert script.names().count("launchKernel") == 2


@pytest.mark.parametrize(("code", "error"), [(701, LaunchError), (1, LaunchError), (719, DevicePoisoned)])
def test_refused_launch(fake: Fake, function: FakeFunction, code: int, error: type[Exception]) -> None:
    driver, script, _ = fake
    kernel = driver.kernel_load("f", "source", (), 0)
    script.answers["launchKernel"] = fake_cuda.Refusal(code)
    with pytest.raises(error) as caught:
        driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (), (), 0, 9)
    assert caught.value.code == code  # type: ignore[attr-defined]


def test_extents_beyond_every_integer_of_cuda_are_a_refused_launch(
    fake: Fake, function: FakeFunction
) -> None:
    driver, script, _ = fake
    kernel = driver.kernel_load("f", "source", (), 0)
    script.answers["launchKernel"] = OverflowError("value too large to convert to unsigned int")
    with pytest.raises(LaunchError, match=str(1 << 40)):
        driver.kernel_launch(kernel, (1 << 40, 1, 1), (1, 1, 1), (), (), 0, 9)


def test_kernel_is_compiled_once_and_forgotten_with_its_last_user(fake: Fake, function: FakeFunction) -> None:
    driver, _, _ = fake
    first = driver.kernel_load("f", "source", (), 0)
    assert driver.kernel_load("f", "source", [], 0) == first
    others = [
        driver.kernel_load(*other, 0)
        for other in (("g", "source", ()), ("f", "more", ()), ("f", "source", ("-DX",)))
    ]
    assert len({first, *others}) == 4
    driver.kernel_unload(first)
    driver.kernel_launch(first, (1, 1, 1), (1, 1, 1), (), (), 0, 0)
    driver.kernel_unload(first)
    with pytest.raises(DriverError, match="kernel 0x1 is not alive"):
        driver.kernel_launch(first, (1, 1, 1), (1, 1, 1), (), (), 0, 0)
    with pytest.raises(DriverError, match="is not alive"):
        driver.kernel_unload(first)
    assert driver.kernel_load("f", "source", (), 0) != first


@pytest.mark.parametrize(("grid", "block"), [((0, 1, 1), (1, 1, 1)), ((1, 1, 1), (1, 1, 0))])
def test_empty_grid_is_refused_as_cuda_does(
    fake: Fake, function: FakeFunction, grid: tuple[int, int, int], block: tuple[int, int, int]
) -> None:
    driver, _, _ = fake
    kernel = driver.kernel_load("f", "source", (), 0)
    with pytest.raises(LaunchError) as caught:
        driver.kernel_launch(
            kernel, grid, block, (np.complex64(1j),), (None,), 0, 0
        )  # which CuPy would launch
    assert caught.value.code == 1
    assert function.launches == []


def test_much_shared_memory_is_asked_for_once(fake: Fake, function: FakeFunction) -> None:
    driver, script, _ = fake
    kernel = driver.kernel_load("f", "source", (), 0)
    script.answers["cuFuncSetAttribute"] = None
    for shared in (48 << 10, 64 << 10, 64 << 10, 50 << 10):
        driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (), (), shared, 0)
    attribute = calls.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert script.only("cuFuncSetAttribute")[:-1] == (77, attribute, 64 << 10)
    script.answers["cuFuncSetAttribute"] = REFUSED
    with pytest.raises(LaunchError):
        driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (), (), 1 << 20, 0)
    assert len(function.arguments) == 4


def test_adopting_what_is_no_kernel(fake: Fake) -> None:
    driver, _, _ = fake
    with pytest.raises(UsageError, match=r"got function, expected cupy\.RawKernel"):
        driver.kernel_adopt(lambda: None, 0)


# --- graphs -------------------------------------------------------------------------------------------------


def test_capture_modes(fake: Fake) -> None:
    driver, script, _ = fake
    for mode in CaptureMode:
        driver.capture_begin(9, mode)
    assert [call[1:3] for call in script.calls] == [(9, 0), (9, 1), (9, 2)]


def test_memory_nodes_are_counted_in_child_graphs_too(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, script, _ = fake
    kinds = calls.cu.CUgraphNodeType
    graphs: dict[Any, list[Any]] = {
        1: [kinds.CU_GRAPH_NODE_TYPE_KERNEL, kinds.CU_GRAPH_NODE_TYPE_MEM_ALLOC, 2],
        2: [kinds.CU_GRAPH_NODE_TYPE_MEM_ALLOC, kinds.CU_GRAPH_NODE_TYPE_MEM_FREE, 3],
        3: [],
    }

    def nodes() -> tuple[list[Any], int]:
        graph, room = script.calls[-1][1:3]
        return graphs[graph][:room], len(graphs[graph])

    def kind() -> Any:
        node = script.calls[-1][1]
        return (kinds.CU_GRAPH_NODE_TYPE_GRAPH if isinstance(node, int) and node in graphs else node,)

    script.answers.update(
        cuGraphGetNodes=nodes,
        cuGraphNodeGetType=kind,
        cuGraphChildGraphNodeGetGraph=lambda: script.calls[-1][1],
    )
    assert driver.graph_memory_nodes(1) == 3
    assert driver.graph_memory_nodes(3) == 0


# --- arrays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TexelKind)
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("channels", [1, 2, 4])
def test_array_texels_come_back(fake: Fake, kind: TexelKind, bits: int, channels: int) -> None:
    driver, script, _ = fake
    info = ArrayInfo(16, 9, 3, bits, channels, kind)
    if (bits, kind) == (8, TexelKind.FLOAT):
        with pytest.raises(UnsupportedError):
            driver.array_create(info, 0)
        return
    array = driver.array_create(info, 0)
    (descriptor, _) = script.only("cuArray3DCreate")
    assert descriptor.Flags == 2  # CUDA_ARRAY3D_SURFACE_LDST
    script.answers["cuArray3DGetDescriptor"] = lambda: (descriptor,)
    assert driver.array_info(array, 0) == info


def test_an_array_is_asked_for_on_the_device_named(two: Fake) -> None:
    """A mapped image's array is no handle of ours: nothing else says where it lies."""
    driver, script, _ = two
    found = calls.cu.CUDA_ARRAY3D_DESCRIPTOR()
    found.Format = calls.cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8
    found.Width, found.NumChannels = 3, 1
    script.answers["cuArray3DGetDescriptor"] = lambda: (found,)
    assert driver.array_info(5, 1).width == 3
    assert script.only("cuArray3DGetDescriptor")[-1] == "on 1"


def test_array_of_a_format_without_texels(fake: Fake) -> None:
    driver, script, _ = fake
    found = calls.cu.CUDA_ARRAY3D_DESCRIPTOR()
    found.Format = calls.cu.CUarray_format.CU_AD_FORMAT_NV12
    script.answers["cuArray3DGetDescriptor"] = lambda: (found,)
    with pytest.raises(UnsupportedError, match="CU_AD_FORMAT_NV12"):
        driver.array_info(5, 0)


def test_three_channels_are_refused(fake: Fake) -> None:
    driver, script, _ = fake
    with pytest.raises(UnsupportedError, match="got 3 channels of 8 bits"):
        driver.array_create(RGBA8._replace(channels=3), 0)
    assert script.calls == []


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_texture_description(fake: Fake, normalized: bool, linear: bool) -> None:
    driver, script, _ = fake
    driver.texture_create(0x99, 0, normalized=normalized, linear=linear)
    resource, how, view, _ = script.only("cuTexObjectCreate")
    assert int(resource.res.array.hArray) == 0x99
    assert (int(how.filterMode), how.flags, view) == (int(linear), int(not normalized), None)
    assert [int(mode) for mode in how.addressMode] == [1, 1, 1]


@pytest.mark.parametrize(
    ("make", "destroy"),
    [
        (lambda d: d.array_create(RGBA8, 0), "array_destroy"),
        (lambda d: d.surface_create(5, 0), "surface_destroy"),
        (lambda d: d.texture_create(5, 0), "texture_destroy"),
        (lambda d: d.import_memory_fd(open_fd(), 64, False, False, 0), "external_memory_destroy"),
        (
            lambda d: d.external_array(d.import_memory_fd(open_fd(), 64, False, False, 0), 0, RGBA8)[0],
            "external_array_free",
        ),
        (lambda d: d.import_semaphore_fd(open_fd(), False, 0), "semaphore_destroy"),
        (lambda d: d.vmm_create(1 << 21, 0, True), "vmm_release"),
    ],
)
def test_destroying_twice_never_reaches_cuda(fake: Fake, make: Any, destroy: str) -> None:
    driver, script, _ = fake
    handle = make(driver)
    getattr(driver, destroy)(handle)
    seen = list(script.calls)
    with pytest.raises(DriverError, match="is not alive") as caught:
        getattr(driver, destroy)(handle)
    assert caught.value.code == 400
    assert script.calls == seen


# --- graphics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "number"),
    list(zip(RegisterFlags, [0, 1, 2, 4], strict=True)),
)
def test_register_flags(fake: Fake, flags: RegisterFlags, number: int) -> None:
    driver, script, _ = fake
    driver.gl_register_buffer(3, flags, 0)
    driver.gl_register_image(4, 0x0DE1, flags, 0)
    assert script.only("cuGraphicsGLRegisterBuffer")[:-1] == (3, number)
    assert script.only("cuGraphicsGLRegisterImage")[:-1] == (4, 0x0DE1, number)


def test_map_hands_over_the_handles_in_one_call(fake: Fake) -> None:
    driver, script, _ = fake
    seen: list[list[int]] = []

    def read() -> None:
        _, count, address, stream, _ = script.calls[-1]
        assert stream == 9
        seen.append(list((ctypes.c_uint64 * count).from_address(address)))

    script.answers["cuGraphicsMapResources"] = script.answers["cuGraphicsUnmapResources"] = read
    driver.graphics_map([11, 22, 33], 9)
    driver.graphics_unmap([33], 9)
    driver.graphics_map([], 9)
    assert seen == [[11, 22, 33], [33]]


def test_handles_that_are_packed_are_handed_over_as_they_are(fake: Fake) -> None:
    driver, script, _ = fake
    packed = array("Q", [11, 22])
    driver.graphics_map(packed, 9)
    driver.graphics_map(array("L", [11]), 9)
    (_, count, address, _, _), other = script.calls
    assert (count, address) == (2, packed.buffer_info()[0])
    assert other[1:] != (1, array("L", [11]).buffer_info()[0])


@pytest.mark.parametrize("current", [None, 0, 50])
def test_maps_run_in_the_context_of_their_device(fake: Fake, current: int | None) -> None:
    """None is current, the right one, or somebody else's; with the right one nothing else is asked."""
    driver, script, runtime = fake
    resource = driver.gl_register_buffer(4, RegisterFlags.NONE, 0)
    runtime.stack += [] if current is None else [fake_cuda.CONTEXT + current]
    before = list(runtime.stack)
    if current == 0:
        driver._owner = lambda *_: pytest.fail("needless question")
    driver.graphics_map([resource], 0)
    driver.graphics_unmap([resource], 0)
    assert [call[-1] for call in script.calls[1:]] == ["on 0"] * 2
    assert runtime.stack == before


def test_a_forked_child_is_told_by_the_call_itself(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's question for the context fails there."""
    driver, script, runtime = fake

    def refuse() -> int:
        raise fake_cuda.Refusal(3)

    monkeypatch.setattr(contexts.cupy_driver, "ctxGetCurrent", refuse)
    script.answers["cuGraphicsMapResources"] = calls.cu.CUresult.CUDA_ERROR_NOT_INITIALIZED
    monkeypatch.setattr(calls.os, "getpid", lambda: 1)
    with pytest.raises(DriverError, match="forked child"):
        driver.graphics_map([5], 0)
    assert runtime.stack == []


def test_mapped_pointer_and_array(fake: Fake) -> None:
    driver, script, _ = fake
    script.answers["cuGraphicsResourceGetMappedPointer"] = (calls.cu.CUdeviceptr(0x7000), 64)
    script.answers["cuGraphicsSubResourceGetMappedArray"] = lambda: calls.cu.CUarray(0x8000)
    assert driver.graphics_pointer(5) == (0x7000, 64)
    assert driver.graphics_array(5, 2, 1) == 0x8000
    assert script.only("cuGraphicsSubResourceGetMappedArray")[:-1] == (5, 2, 1)


def test_devices_behind_the_context(fake: Fake) -> None:
    driver, script, _ = fake
    script.answers["cuGLGetDevices"] = (1, [calls.cu.CUdevice(0), calls.cu.CUdevice(0)])
    assert driver.gl_devices() == (0,)


@pytest.mark.parametrize("name", ["NO_DEVICE", "INVALID_GRAPHICS_CONTEXT", "OPERATING_SYSTEM", "UNKNOWN"])
def test_context_of_another_vendor_has_no_devices(fake: Fake, name: str) -> None:
    driver, script, _ = fake
    script.answers["cuGLGetDevices"] = getattr(calls.cu.CUresult, f"CUDA_ERROR_{name}")
    assert driver.gl_devices() == ()


def test_other_failures_of_the_question_are_errors(fake: Fake) -> None:
    driver, script, _ = fake
    script.answers["cuGLGetDevices"] = REFUSED
    with pytest.raises(DriverError, match="cuGLGetDevices returned CUDA_ERROR_INVALID_VALUE"):
        driver.gl_devices()


def test_d3d11_is_windows_only(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, _ = fake
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(UnsupportedError) as caught:
        driver.d3d11_register(5, RegisterFlags.NONE, 0)
    assert caught.value.reason == "platform"  # type: ignore[attr-defined]


# --- external and virtual memory ----------------------------------------------------------------------------


def taken(given: int, fd: int) -> bool:
    """True if the driver was given a copy that is open and the caller's fd is closed."""
    os.close(given)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    return given != fd


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("what", ["memory", "semaphore"])
def test_refused_fd_stays_its_owners(fake: Fake, closes: bool, what: str) -> None:
    """Whether or not the driver closed what it refused, as 580.159 does."""
    driver, script, _ = fake
    fd, given = open_fd(), []

    def refuse() -> Any:
        given.append(script.calls[-1][1].handle.fd)
        if closes:
            os.close(given[0])
        return REFUSED

    script.answers.update(cuImportExternalMemory=refuse, cuImportExternalSemaphore=refuse)
    memory = what == "memory"
    import_fd = driver.import_memory_fd if memory else driver.import_semaphore_fd
    with pytest.raises(DriverError):
        import_fd(fd, *((4096, False, False, 0) if memory else (True, 0)))
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(given[0])


def test_closed_fd_never_reaches_cuda(fake: Fake) -> None:
    driver, script, _ = fake
    fd = open_fd()
    os.close(fd)
    with pytest.raises(UsageError, match=r"file descriptor: got \d+ \(Bad file descriptor\)"):
        driver.import_memory_fd(fd, 4096, False, False, 0)
    assert script.calls == []


@pytest.mark.parametrize(("dma_buf", "kind"), [(False, 1), (True, 9)])
def test_memory_by_fd(fake: Fake, dma_buf: bool, kind: int) -> None:
    driver, script, _ = fake
    fd = open_fd()
    memory = driver.import_memory_fd(fd, 4096, True, dma_buf, 0)
    (wanted, _) = script.only("cuImportExternalMemory")
    assert (int(wanted.type), wanted.size, wanted.flags) == (kind, 4096, 1)
    assert taken(wanted.handle.fd, fd)
    driver.external_buffer(memory, 256, 1024)
    (_, part, _) = script.only("cuExternalMemoryGetMappedBuffer")
    assert (part.offset, part.size) == (256, 1024)


@pytest.mark.parametrize(
    ("kind", "number"),
    [("opaque", 2), ("opaque_kmt", 3), ("d3d12_heap", 4), ("d3d12_resource", 5), ("d3d11", 6)],
)
def test_memory_by_windows_handle(fake: Fake, kind: str, number: int) -> None:
    driver, script, _ = fake
    driver.import_memory_win32(kind, 0x1234, 4096, False, 0)
    (wanted, _) = script.only("cuImportExternalMemory")
    assert (int(wanted.type), int(wanted.handle.win32.handle), wanted.flags) == (number, 0x1234, 0)


@pytest.mark.parametrize(("kind", "number"), [("opaque", 2), ("d3d12_fence", 4), ("d3d11_fence", 5)])
def test_semaphore_by_windows_handle(fake: Fake, kind: str, number: int) -> None:
    driver, script, _ = fake
    driver.import_semaphore_win32(kind, 0x1234, 0)
    (wanted, _) = script.only("cuImportExternalSemaphore")
    assert (int(wanted.type), int(wanted.handle.win32.handle)) == (number, 0x1234)


def test_unknown_windows_handle(fake: Fake) -> None:
    driver, script, _ = fake
    with pytest.raises(UnsupportedError, match="got kind 'd3d9', expected one of opaque, "):
        driver.import_memory_win32("d3d9", 1, 64, False, 0)
    assert script.calls == []


@pytest.mark.parametrize(("timeline", "kind"), [(False, 1), (True, 9)])
def test_semaphore_by_fd(fake: Fake, timeline: bool, kind: int) -> None:
    driver, script, _ = fake
    fd = open_fd()
    semaphore = driver.import_semaphore_fd(fd, timeline, 0)
    (wanted, _) = script.only("cuImportExternalSemaphore")
    assert int(wanted.type) == kind
    assert taken(wanted.handle.fd, fd)
    script.answers["cuSignalExternalSemaphoresAsync"] = script.answers["cuWaitExternalSemaphoresAsync"] = None
    driver.semaphore_signal(semaphore, 1 << 40, 9)
    driver.semaphore_wait(semaphore, 1 << 41, 9)
    for call, value in zip(script.calls[1:], (1 << 40, 1 << 41), strict=True):
        _, (handle,), (parameters,), count, stream, _ = call
        assert (int(handle), parameters.params.fence.value, count, stream) == (semaphore, value, 1, 9)


def test_external_array_that_fails_half_way_leaves_nothing(fake: Fake) -> None:
    driver, script, _ = fake
    memory = driver.import_memory_fd(open_fd(), 4096, False, False, 0)
    script.answers["cuExternalMemoryGetMappedMipmappedArray"] = 0x55
    script.answers["cuMipmappedArrayGetLevel"] = REFUSED
    with pytest.raises(DriverError):
        driver.external_array(memory, 0, RGBA8)
    assert script.only("cuMipmappedArrayDestroy")[0] == 0x55


def test_mapping_that_fails_half_way_leaves_nothing(fake: Fake) -> None:
    driver, script, _ = fake
    script.answers.update(cuMemMap=None, cuMemSetAccess=REFUSED)
    with pytest.raises(DriverError):
        driver.vmm_map(0x70000000, 1 << 21, 5, 0)
    assert script.only("cuMemUnmap")[:-1] == (0x70000000, 1 << 21)
    with pytest.raises(DriverError, match="is not alive"):
        driver.vmm_unmap(0x70000000, 1 << 21)


@pytest.mark.parametrize("shareable", [False, True])
def test_physical_memory_is_on_the_device(two: Fake, shareable: bool) -> None:
    driver, script, _ = two
    driver.vmm_create(1 << 21, 1, shareable)
    nbytes, wanted, flags, where = script.only("cuMemCreate")
    assert (nbytes, flags, where) == (1 << 21, 0, "on 1")
    assert (int(wanted.type), int(wanted.location.type), wanted.location.id) == (1, 1, 1)
    assert int(wanted.requestedHandleTypes) == int(shareable)


def test_a_handle_given_out_again_during_its_free_belongs_to_its_new_owner(fake: Fake) -> None:
    """The call that frees lets other threads in; the driver may give them the same number at once."""
    driver, script, _ = fake
    size = 2 << 20
    script.answers["cuMemAddressReserve"] = 0x7000000
    ptr = driver.vmm_reserve(size, 0)

    def freed() -> None:
        assert driver.vmm_reserve(size, 0) == ptr

    script.answers["cuMemAddressFree"] = freed
    driver.vmm_free(ptr, size)
    script.answers["cuMemAddressFree"] = None
    driver.vmm_free(ptr, size)
    assert script.names().count("cuMemAddressFree") == 2
    with pytest.raises(DriverError, match="not alive"):
        driver.vmm_free(ptr, size)


def test_a_refused_free_leaves_the_handle_with_its_owner(fake: Fake) -> None:
    driver, script, _ = fake
    script.answers["cuMemAddressReserve"] = 0x7000000
    ptr = driver.vmm_reserve(2 << 20, 0)
    script.answers["cuMemAddressFree"] = REFUSED
    with pytest.raises(DriverError):
        driver.vmm_free(ptr, 2 << 20)
    script.answers["cuMemAddressFree"] = None
    driver.vmm_free(ptr, 2 << 20)
