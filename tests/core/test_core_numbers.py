"""Ordinals and stream handles as callers give them: NumPy's ints are ints, bools and floats are not."""

from typing import Any

import numpy as np
import pytest

import cuglue
from cuglue.core.device import device_state
from cuglue.core.stream import as_stream
from cuglue.driver.sim import SimDriver
from cuglue.errors import StreamMisuse, UsageError


@pytest.mark.parametrize("number", [np.int64(0), np.uint8(0), np.intp(0)])
def test_a_numpy_int_is_a_stream_handle(number: Any) -> None:
    driver = SimDriver()
    assert as_stream(number, driver=driver) is as_stream(0, driver=driver)


@pytest.mark.parametrize("number", [True, 0.0, np.float64(0), np.True_, "0", -1, np.int64(-1)])
def test_what_is_no_handle_is_no_stream(number: Any) -> None:
    with pytest.raises(StreamMisuse):
        as_stream(number, driver=SimDriver())


@pytest.mark.parametrize("ordinal", [False, 0.0, np.float64(0), "0", None])
def test_what_equals_a_known_device_is_not_one(ordinal: Any) -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        device_state(driver, 0)
        with pytest.raises(UsageError, match="device"):
            device_state(driver, ordinal)
