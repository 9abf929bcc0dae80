"""How a status of CUDA becomes an error of ours."""

from __future__ import annotations

from enum import IntEnum

import pytest

from cuglue.errors import DevicePoisoned, DriverError, LaunchError, OutOfMemory

pytest.importorskip("cupy", reason="the CUDA driver is made of CuPy")

from cuglue.driver.cuda import calls


class Status(IntEnum):
    """As ``CUresult`` is one."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


def refuse(code: int) -> None:
    raise calls.CUDARuntimeError(code)


def test_allocation_that_finds_no_room() -> None:
    with pytest.raises(OutOfMemory) as caught:
        calls.call_runtime(refuse, 2, requested=4096)
    assert caught.value.requested == 4096
    assert "no room for 4096 bytes (cudaRefuse returned cudaErrorMemoryAllocation)" in str(caught.value)
    assert isinstance(caught.value, MemoryError)


def test_out_of_memory_of_a_call_that_allocates_nothing_for_the_caller() -> None:
    with pytest.raises(DriverError) as caught:
        calls.call_runtime(refuse, 2)
    assert caught.value.code == 2
    assert not isinstance(caught.value, LaunchError)


def test_runtime_failure_keeps_code_name_and_call() -> None:
    with pytest.raises(DriverError) as caught:
        calls.call_runtime(refuse, 400)
    error = caught.value
    assert (error.code, error.name, error.call) == (400, "cudaErrorInvalidResourceHandle", "cudaRefuse")
    assert isinstance(error.__cause__, calls.CUDARuntimeError)


@pytest.mark.parametrize("code", sorted(calls.STICKY))
def test_sticky_codes_poison_the_device(code: int) -> None:
    assert type(calls.failure(code, "NAME", "cudaMemcpyAsync")) is DevicePoisoned
    assert type(calls.failure(code, "NAME", "cuLaunchKernel")) is DevicePoisoned


@pytest.mark.parametrize("code", [1, 201, 208, 213, 219, 304, 400, 600, 701, 709, 712, 713, 801, 900, 901])
def test_other_codes_do_not(code: int) -> None:
    assert type(calls.failure(code, "NAME", "cudaMemcpyAsync")) is DriverError
    assert type(calls.failure(code, "NAME", "cuLaunchKernel")) is LaunchError


def test_unknown_error_is_a_fault_only_where_queued_work_is_reported() -> None:
    assert type(calls.failure(999, "NAME", "cudaStreamSynchronize")) is DevicePoisoned
    assert type(calls.failure(999, "NAME", "cuGraphicsGLRegisterBuffer")) is DriverError


def test_names_in_the_table_are_what_cuda_calls_faults() -> None:
    names = {
        code: str(calls.CUDARuntimeError(code)).partition(":")[0] for code in calls.STICKY - {220, 226, 721}
    }
    assert names == {
        214: "cudaErrorECCUncorrectable",
        700: "cudaErrorIllegalAddress",
        702: "cudaErrorLaunchTimeout",
        710: "cudaErrorAssert",
        714: "cudaErrorHardwareStackError",
        715: "cudaErrorIllegalInstruction",
        716: "cudaErrorMisalignedAddress",
        717: "cudaErrorInvalidAddressSpace",
        718: "cudaErrorInvalidPc",
        719: "cudaErrorLaunchFailure",
    }
    assert {int(member) for member in calls.cu.CUresult} >= calls.STICKY


@pytest.mark.parametrize(
    ("result", "value"), [((), None), ((7,), 7), ((7, 8), (7, 8)), ((0,), 0), (([],), [])]
)
def test_driver_api_results(result: tuple[object, ...], value: object) -> None:
    assert calls.call(lambda: (Status.CUDA_SUCCESS, *result)) == value


def test_driver_api_failure() -> None:
    def cuMemThing() -> tuple[Status, int]:
        return Status.CUDA_ERROR_INVALID_VALUE, 0

    with pytest.raises(DriverError) as caught:
        calls.call(cuMemThing)
    error = caught.value
    assert (error.code, error.name, error.call) == (1, "CUDA_ERROR_INVALID_VALUE", "cuMemThing")
    assert str(error) == "cuMemThing returned CUDA_ERROR_INVALID_VALUE (1)"


def test_driver_api_out_of_memory() -> None:
    with pytest.raises(OutOfMemory) as caught:
        calls.call(lambda: (Status.CUDA_ERROR_OUT_OF_MEMORY, 0), requested=1 << 40)
    assert caught.value.requested == 1 << 40


def test_row_67_zero_handle_is_a_failure() -> None:
    assert calls.nonzero(5, "cuThing") == 5
    with pytest.raises(DriverError, match="zero handle: cuThing returned"):
        calls.nonzero(0, "cuThing")


@pytest.mark.parametrize(("call", "kind"), [("cuLaunchKernel", LaunchError), ("cudaMalloc", DriverError)])
def test_a_forked_child_is_told_that_it_is_one(
    monkeypatch: pytest.MonkeyPatch, call: str, kind: type[DriverError]
) -> None:
    assert "fork" not in str(calls.failure(3, "CUDA_ERROR_NOT_INITIALIZED", call))
    monkeypatch.setattr(calls, "_PROCESS", 1)
    error = calls.failure(3, "CUDA_ERROR_NOT_INITIALIZED", call)
    assert type(error) is kind
    assert "in a forked child" in str(error)
    assert "spawn" in str(error)
    assert error.code == 3
