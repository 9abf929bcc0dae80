"""Both drivers have exactly the surface of the Protocol: nothing missing, nothing extra unless listed here."""

from __future__ import annotations

import inspect
from types import BuiltinFunctionType
from typing import Any

import pytest

from cuglue.driver.protocol import Driver

#: What a driver shows beyond the Protocol.
EXTRA: dict[str, set[str]] = {
    "cuda": {"shortcuts"},
    # What people test with, and the graphics objects behind its interop.
    "sim": {"Stream", "current_stream", "current_device", "hazards", "check", "pump", "inventory"}
    | {"d3d11", "fake_d3d11", "fake_gl", "real_gl"}
    # What there is to import where no other API is.
    | {"fake_win32", "semaphore_fd", "semaphore_value"},
}


def driver_class(name: str) -> Any:
    if name == "sim":
        from cuglue.driver.sim import SimDriver

        return SimDriver
    pytest.importorskip("cupy", reason="the CUDA driver is made of CuPy")
    from cuglue.driver.cuda import CudaDriver

    return CudaDriver


def public(cls: Any) -> dict[str, Any]:
    """Public attributes of a class and its bases, ``object`` left out."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        if base.__module__ != "typing":
            found |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    return found


METHODS = {name: value for name, value in public(Driver).items() if inspect.isfunction(value)}


def test_the_protocol_is_read() -> None:
    assert len(METHODS) > 80
    assert "name" in Driver.__annotations__


@pytest.mark.parametrize("name", ["cuda", "sim"])
def test_nothing_missing(name: str) -> None:
    found = public(driver_class(name))
    assert sorted(set(METHODS) - set(found)) == []
    assert found["name"] == name


@pytest.mark.parametrize("name", ["cuda", "sim"])
def test_nothing_extra(name: str) -> None:
    extra = set(public(driver_class(name))) - set(METHODS) - {"name"}
    assert extra == EXTRA[name]


@pytest.mark.parametrize("name", ["cuda", "sim"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_same_signature(name: str, method: str) -> None:
    function = public(driver_class(name))[method]
    if isinstance(getattr(function, "__func__", None), BuiltinFunctionType):
        # CuPy's own function, which takes the ordinal and tells its signature in words alone.
        assert (method, name) == ("stream_current", "cuda")
        assert function.__doc__.startswith("get_current_stream(int device_id=")
        return
    found = inspect.signature(function)
    wanted = inspect.signature(METHODS[method])
    assert list(found.parameters.values()) == list(wanted.parameters.values())
    assert found.return_annotation == wanted.return_annotation
