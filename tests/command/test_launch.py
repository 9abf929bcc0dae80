"""Launches: arguments checked before the driver hears of them, refusals at once, faults at the next wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver_calls import Calls
from sample_kernels import INCREMENT, MIX, SAXPY, SUM4, TRANSPOSE

import cuglue
from cuglue import In, InOut, Kernel, Out, Runtime
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    ArgumentError,
    ClosedError,
    DriverError,
    LaunchError,
    LayoutError,
    StorageHandleNotFound,
    StreamMisuse,
    UnsupportedError,
    UnwrittenError,
    UsageError,
)

N = 1000


@pytest.fixture
def x(rt: Runtime) -> cuglue.Buffer:
    return rt.create(np.arange(N, dtype="f4"))


@pytest.fixture
def y(rt: Runtime) -> cuglue.Buffer:
    return rt.create(np.full(N, -1, dtype="f4"))


def floats(rt: Runtime, buffer: Any) -> np.ndarray[Any, Any]:
    return np.asarray(rt.read(buffer, dtype="f4").result())


def test_a_launch_does_what_the_kernel_says(rt: Runtime, x: Any, y: Any) -> None:
    rt.launch(SAXPY, (4, 1, 1), (256, 1, 1), In(x), Out(y), 2.0, N)
    np.testing.assert_array_equal(floats(rt, y), 2 * np.arange(N, dtype="f4"))


@pytest.mark.parametrize("grid", [4, (4,), (4, 1), [4, 1, 1], np.int64(4)])
def test_grids_as_ints_and_sequences(rt: Runtime, x: Any, y: Any, grid: Any) -> None:
    rt.launch(SAXPY, grid, 256, In(x), Out(y), 1, N)
    np.testing.assert_array_equal(floats(rt, y), np.arange(N, dtype="f4"))


def test_every_scalar_type_arrives(rt: Runtime) -> None:
    out = rt.empty(96)
    values = (-128, 255, -(2**15), 2**16 - 1, -(2**31), 2**32 - 1, -(2**50), 2**50, 0.5, 1e300, True, 2**40)
    rt.launch(MIX, 1, 1, Out(out), *values)
    np.testing.assert_array_equal(
        np.asarray(rt.read(out, dtype="f8").result()), np.array([float(v) for v in values])
    )


def test_views_take_the_type_of_the_parameter_vectors_too(rt: Runtime) -> None:
    data = np.arange(64, dtype="f4")
    out = rt.empty(64)
    rt.launch(SUM4, 1, 64, In(rt.create(data)), Out(out), 16)
    np.testing.assert_array_equal(floats(rt, out), data.reshape(16, 4).sum(1))


def test_typed_views_of_buffers(rt: Runtime) -> None:
    source = rt.create(np.arange(12, dtype="f8"))
    out = rt.empty(96)
    rt.launch(TRANSPOSE, (1, 1), (8, 8), In(source.array((3, 4), "f8")), Out(out.array((4, 3), "f8")), 3, 4)
    expected = np.arange(12, dtype="f8").reshape(3, 4).T
    np.testing.assert_array_equal(np.asarray(rt.read(out, (4, 3), "f8").result()), expected)


def test_C29_a_zero_grid_launches_nothing_but_checks(rt: Runtime, x: Any, y: Any, calls: Calls) -> None:
    rt.launch(SAXPY, (0, 1, 1), 256, In(x), Out(y), 2.0, N)
    assert calls.count("kernel_launch") == 0
    with pytest.raises(LaunchError):
        rt.launch(SAXPY, 0, 256, In(x), Out(y), 2.0)


def test_C29_a_refused_launch_raises_now_and_stamps_nothing(rt: Runtime, x: Any, y: Any) -> None:
    before = (x.block.use_count(), y.block.write_seq)
    with pytest.raises(LaunchError, match="2048"):
        rt.launch(SAXPY, 1, 2048, In(x), Out(y), 2.0, N)
    assert (x.block.use_count(), y.block.write_seq) == before
    with pytest.raises(UnwrittenError):
        rt.read(y)
    rt.launch(SAXPY, 4, 256, In(x), Out(y), 2.0, N)
    np.testing.assert_array_equal(floats(rt, y), 2 * np.arange(N, dtype="f4"))


def bad_calls() -> list[tuple[str, type[Exception], str, Any]]:
    def call(make: Any) -> Any:
        return make

    return [
        ("count", LaunchError, "3 arguments", call(lambda rt, x, y: (In(x), Out(y), 2.0))),
        ("undeclared", UsageError, "without a declaration", call(lambda rt, x, y: (x, Out(y), 2.0, N))),
        (
            "undeclared view",
            UsageError,
            "argument 1",
            call(lambda rt, x, y: (x.array((N,), "f4"), Out(y), 2.0, N)),
        ),
        (
            "undeclared numpy",
            UsageError,
            "without",
            call(lambda rt, x, y: (np.zeros(4, "f4"), Out(y), 2.0, N)),
        ),
        (
            "host array",
            UsageError,
            "runtime.create",
            call(lambda rt, x, y: (In(np.zeros(N, "f4")), Out(y), 2.0, N)),
        ),
        ("no array", UsageError, "operand of type int", call(lambda rt, x, y: (In(3), Out(y), 2.0, N))),
        ("int as pointer", LaunchError, "pointer", call(lambda rt, x, y: (1234, Out(y), 2.0, N))),
        ("array as scalar", LaunchError, "a scalar", call(lambda rt, x, y: (In(x), Out(y), In(x), N))),
        ("dtype", LaunchError, "int32", call(lambda rt, x, y: (In(x.array((N,), "i4")), Out(y), 2.0, N))),
        ("const", LaunchError, "const pointer", call(lambda rt, x, y: (InOut(x), Out(y), 2.0, N))),
        ("float for int", LaunchError, "argument 4", call(lambda rt, x, y: (In(x), Out(y), 2.0, 10.0))),
        ("int too wide", LaunchError, "2147483647", call(lambda rt, x, y: (In(x), Out(y), 2.0, 2**31))),
        ("float too wide", LaunchError, "argument 3", call(lambda rt, x, y: (In(x), Out(y), 1e40, N))),
        ("string", LaunchError, "argument 3", call(lambda rt, x, y: (In(x), Out(y), "2", N))),
        ("none for scalar", LaunchError, "argument 3", call(lambda rt, x, y: (In(x), Out(y), None, N))),
        ("misaligned", LaunchError, "multiple of 4", call(lambda rt, x, y: (In(x.part(2)), Out(y), 2.0, N))),
    ]


@pytest.mark.parametrize(
    ("error", "says", "arguments"), [b[1:] for b in bad_calls()], ids=[b[0] for b in bad_calls()]
)
def test_arguments_that_do_not_fit(
    rt: Runtime, x: Any, y: Any, calls: Calls, error: type[Exception], says: str, arguments: Any
) -> None:
    given = arguments(rt, x, y)
    calls.clear()
    with pytest.raises(error, match=says):
        rt.launch(SAXPY, 4, 256, *given)
    assert (
        calls.count("kernel_launch") == calls.count("stream_wait_event") == calls.count("event_record") == 0
    )


@pytest.mark.parametrize(
    ("grid", "block"),
    [(-1, 1), (1, (1, 2, 3, 4)), ((), 1), (1.0, 1), ("4", 1), (1, None), ((1, 1.5), 1)],
)
def test_grids_and_blocks_that_are_none(rt: Runtime, x: Any, y: Any, grid: Any, block: Any) -> None:
    with pytest.raises(LaunchError, match=r"grid|block"):
        rt.launch(SAXPY, grid, block, In(x), Out(y), 2.0, N)


def test_shared_memory_is_a_size(rt: Runtime, x: Any, y: Any) -> None:
    for shared in (-1, 1.5, "8"):
        with pytest.raises(LaunchError, match="shared"):
            rt.launch(SAXPY, 1, 32, In(x), Out(y), 2.0, N, shared=shared)  # type: ignore[arg-type]


def test_a_null_pointer_is_none(rt: Runtime) -> None:
    def sim(grid: Any, block: Any, maybe: Any, out: Any) -> None:
        out[0] = 1 if maybe == 0 else 2

    kernel = Kernel(
        "is_null",
        'extern "C" __global__ void is_null(const float* maybe, int* out) { out[0] = maybe ? 2 : 1; }',
        sim=sim,
    )
    out = rt.empty(4)
    rt.launch(kernel, 1, 1, None, Out(out))
    assert rt.read(out, dtype="i4").result()[0] == 1


def test_gaps_must_be_declared(rt: Runtime) -> None:
    buffer = rt.create(np.arange(12, dtype="i4"))
    view = buffer.array((3, 4), "i4")
    padded = cuglue.ArrayView(view.export_owner, view.device_ptr, cuglue.layout.Layout((3, 2), (16, 4), "i4"))
    with pytest.raises(LayoutError, match="strided=True"):
        rt.launch(INCREMENT, 1, 32, InOut(padded), 1, 1)
    rt.launch(INCREMENT, 1, 32, InOut(padded, strided=True), 1, 1)


def test_memory_of_elsewhere(rt: Runtime, driver: Any, x: Any, y: Any) -> None:
    with Runtime(driver=driver) as other:
        foreign = other.create(np.zeros(N, "f4"))
        with pytest.raises(ArgumentError, match="another runtime") as caught:
            rt.launch(SAXPY, 4, 256, In(foreign), Out(y), 2.0, N)
        assert isinstance(caught.value, ValueError)
        foreign.close()
    x.close()
    with pytest.raises(ClosedError):
        rt.launch(SAXPY, 4, 256, In(x), Out(y), 2.0, N)
    with pytest.raises(StorageHandleNotFound):
        rt.launch(SAXPY, 4, 256, In(rt.buffer(4 * N)), Out(y), 2.0, N)


def test_a_closed_runtime_refuses_everything(driver: Any) -> None:
    rt = Runtime(driver=driver)
    x = rt.create(np.zeros(4, "f4"))
    rt.close()
    rt.close()
    for call in (
        lambda: rt.create(b"1234"),
        lambda: rt.empty(4),
        lambda: rt.read(x),
        lambda: rt.launch(SAXPY, 1, 1, In(x), Out(x), 1.0, 1),
        lambda: rt.command(),
        lambda: rt.stream(0),
        lambda: rt.synchronize(),
        lambda: rt.buffer(4),
        lambda: rt.capture(),
        lambda: rt.profile(),
    ):
        with pytest.raises(ClosedError):
            call()
    x.close()


def test_a_runtime_that_nobody_closed_says_so(driver: Any) -> None:
    rt = Runtime(driver=driver)
    with pytest.warns(ResourceWarning, match="test_launch.py"):
        del rt


def test_two_devices_of_one_driver() -> None:
    driver = SimDriver(devices=2)
    with Runtime(0, driver=driver) as first, Runtime(1, driver=driver) as second:
        here = first.create(np.zeros(4, "f4"))
        there = second.create(np.zeros(4, "f4"), stream=second.stream(0))
        with pytest.raises(StreamMisuse, match="device 1"):
            first.launch(SAXPY, 1, 1, In(here), Out(here), 1.0, 1, stream=second.stream(0))
        with pytest.raises(UsageError, match="device"):
            first.launch(SAXPY, 1, 1, In(there.array((4,), "f4")), Out(here), 1.0, 1)
        here.close()
        there.close()
    with pytest.raises(UsageError, match="below 2"):
        Runtime(2, driver=driver)


def test_what_a_runtime_is_made_of(sim: SimDriver) -> None:
    for wrong in ({"max_streams": 0}, {"max_streams": 1.5}, {"driver": "opencl"}):
        with pytest.raises(UsageError):
            Runtime(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="stream of a runtime"), Runtime() as rt:
        rt.stream(-1)


def test_a_runtime_on_a_driver_of_its_own_leaves_the_current_one_alone(
    sim: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    own = SimDriver()
    capabilities = own.capabilities

    def asked(device: int) -> Any:
        seen.append(cuglue.current_driver())
        return capabilities(device)

    monkeypatch.setattr(own, "capabilities", asked)
    with Runtime(driver=own) as rt:
        assert rt.resource.driver is own
        rt.create(bytes(4)).close()
    assert set(seen) == {sim}


def test_a_kernel_without_sim_does_not_run_on_the_simulated_device(sim: SimDriver) -> None:
    kernel = Kernel("k", 'extern "C" __global__ void k(int a) {}')
    with Runtime() as rt:
        with pytest.raises(UnsupportedError, match="sim="):
            rt.launch(kernel, 1, 1, 3)
        with pytest.raises(UsageError, match="kernel"):
            rt.launch("k", 1, 1, 3)


def test_an_execution_fault_comes_with_the_next_wait(sim: SimDriver) -> None:
    def broken(grid: Any, block: Any, x: Any) -> None:
        raise RuntimeError("illegal")

    kernel = Kernel(
        "broken", 'extern "C" __global__ void broken(int* x) { *(volatile int*)0 = 1; }', sim=broken
    )
    rt = Runtime()
    x = rt.empty(4)
    rt.launch(kernel, 1, 1, Out(x))
    with pytest.raises(DriverError, match="illegal"):
        rt.read(x).result()
    rt.close()


def test_each_kernel_is_compiled_once(rt: Runtime, x: Any, y: Any, calls: Calls) -> None:
    for _ in range(3):
        rt.launch(SAXPY, 4, 256, In(x), Out(y), 2.0, N)
    assert calls.count("kernel_load") == 1


def test_closing_unloads_what_no_graph_launches(sim: SimDriver) -> None:
    with cuglue.AsyncCudaResource() as memory:
        rt = Runtime(resource=memory)
        x = rt.create(np.zeros(4, "f4"))
        rt.launch(SAXPY, 1, 4, In(x), Out(x), 1.0, 4)
        assert sim.inventory()["kernels"] == 1
        rt.close()
        assert sim.inventory()["kernels"] == 0
        x.close()
        memory.reap_pending()


def test_one_runtime_per_device_and_driver(driver: Any) -> None:
    first = cuglue.runtime()
    assert cuglue.runtime(0) is first
    first.close()
    second = cuglue.runtime()
    assert second is not first
    assert not second.closed
    second.close()
