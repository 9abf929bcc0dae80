"""Ordinals and stream handles as callers give them: NumPy's ints are ints, bools and floats are not."""

from typing import Any

import numpy as np
import pytest

import cuglue
from cuglue.core.device import device_state
from cuglue.core.stream import as_stream
from cuglue.driver.sim import SimDriver
from cuglue.errors import DriverError, StreamMisuse, UsageError


@pytest.mark.parametrize("number", [np.int64(0), np.uint8(0), np.intp(0)])
def test_a_numpy_int_is_a_stream_handle(number: Any) -> None:
    driver = SimDriver()
    assert as_stream(number, driver=driver) is as_stream(0, driver=driver)


@pytest.mark.parametrize(
    "number", [True, 0.0, np.float64(0), np.True_, "0", -1, np.int64(-1), 3, 99, 4095, 2**64, 2**70]
)
def test_what_is_no_handle_is_no_stream(number: Any) -> None:
    with pytest.raises(StreamMisuse):
        as_stream(number, driver=SimDriver())


@pytest.mark.parametrize("said", [(1, 5), None, 5, (0,), (0, "x"), (0, 1, 2), "01", (0, 1.5)])
def test_a_protocol_that_answers_nonsense(said: Any) -> None:
    class Odd:
        def __cuda_stream__(self) -> Any:
            return said

    with pytest.raises(UsageError, match="__cuda_stream__"):
        as_stream(Odd(), driver=SimDriver())


@pytest.mark.parametrize("said", [(0, 0), [0, 0], (np.int32(0), np.int64(0))])
def test_a_protocol_that_answers_well(said: Any) -> None:
    class Even:
        __cuda_stream__ = said

    driver = SimDriver()
    assert as_stream(Even(), driver=driver) is as_stream(0, driver=driver)


def test_a_handle_that_the_driver_does_not_know_is_said_when_work_is_queued_there() -> None:
    """A number is taken at its word until then; the driver's own word for it would be an invalid resource."""
    driver = SimDriver()
    unknown, known = as_stream(0x12345000, driver=driver), as_stream(driver.Stream(), driver=driver)
    with pytest.raises(StreamMisuse, match="does not know") as caught:
        unknown.wait_for(known, known.submit())
    assert isinstance(caught.value.__cause__, DriverError)
    assert unknown.synced == {}


@pytest.mark.parametrize("ordinal", [False, 0.0, np.float64(0), "0", None])
def test_what_equals_a_known_device_is_not_one(ordinal: Any) -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        device_state(driver, 0)
        with pytest.raises(UsageError, match="device"):
            device_state(driver, ordinal)
