"""Closing a resource gives back what it still holds, says what that was, and ends it."""

from __future__ import annotations

import pytest

import cuglue
from cuglue.driver.sim import SimDriver
from cuglue.errors import ClosedError


@pytest.mark.parametrize("make", [cuglue.DirectCudaResource, cuglue.AsyncCudaResource])
def test_B7_close_frees_what_is_live_and_names_it(make: type[cuglue.DirectCudaResource]) -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        resource = make()
        resource.allocate(64, tag="left behind")
        with pytest.warns(ResourceWarning, match="left behind"):
            resource.close()
        assert resource.closed
        assert driver.inventory()["bytes"] == 0
        resource.close()
        with pytest.raises(ClosedError):
            resource.allocate(64)


def test_B7_leaving_with_closes() -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        with cuglue.DirectCudaResource() as resource:
            resource.deallocate(resource.allocate(64))
        assert resource.closed
