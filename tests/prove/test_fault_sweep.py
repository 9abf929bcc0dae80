"""Every public operation of several driver calls, with each of its calls failing in turn: nothing is lost."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

import prove_objects
import prove_operations
import prove_pools
import pytest
from graphics.subjects import make_buffer, make_texture
from prove_left_out import LEFT_OUT
from prove_operations import Case

import cuglue
from cuglue.driver.sim import SimDriver
from cuglue.graphics.glcontext import headless

CASES = [*prove_operations.CASES, *prove_pools.CASES, *prove_objects.CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_is_lost(case: Case) -> None:
    case.sweep().check()


@pytest.fixture(scope="module")
def gl_cases() -> Iterator[dict[str, Case]]:
    """Those over an OpenGL buffer and an OpenGL texture."""
    with headless():
        yield {case.name: case for case in prove_objects.gl_cases(make_buffer(256), make_texture(8, 8))}


GL_NAMES = [case.name for case in prove_objects.gl_cases(0, 0)]


@pytest.mark.gl
@pytest.mark.parametrize("name", GL_NAMES)
def test_nothing_of_graphics_is_lost(name: str, gl_cases: dict[str, Case]) -> None:
    gl_cases[name].sweep().check()


def test_names_are_unique() -> None:
    names = [case.name for case in CASES] + GL_NAMES
    assert len(names) == len(set(names))


def functions_in(case: Case) -> set[str]:
    """The functions of the library that a case's operation goes through when nothing fails."""
    seen: set[CodeType] = set()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    driver = case.options.get("driver", SimDriver)()
    with cuglue.use_driver(driver):
        subject = case.setup(driver)
        sys.setprofile(note)
        try:
            result = case.operation(subject)
        finally:
            sys.setprofile(None)
        case.teardown(subject, result)
    return {code.co_qualname for code in seen if "cuglue" in code.co_filename}


@pytest.mark.parametrize("case", [case for case in CASES if case.of], ids=lambda case: case.name)
def test_a_case_goes_through_what_it_names(case: Case) -> None:
    assert set(case.of) <= functions_in(case)


@pytest.mark.gl
def test_a_case_of_graphics_goes_through_what_it_names(gl_cases: dict[str, Case]) -> None:
    for case in gl_cases.values():
        assert set(case.of) <= functions_in(case), case.name


def public_functions(thing: object) -> Iterator[str]:
    """The functions and methods that a public name offers, by the names they were written under."""
    if inspect.isclass(thing) and not issubclass(thing, BaseException):
        for base in thing.__mro__:
            for name, value in vars(base).items() if base.__module__.startswith("cuglue") else ():
                function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                if inspect.isfunction(function) and not name.startswith("_"):
                    yield inspect.unwrap(function).__qualname__
    elif inspect.isfunction(thing):
        yield thing.__qualname__
    elif isinstance(thing, ModuleType):
        for name in getattr(thing, "__all__", [name for name in vars(thing) if not name.startswith("_")]):
            if getattr(getattr(thing, name), "__module__", "").startswith("cuglue"):
                yield from public_functions(getattr(thing, name))


@pytest.mark.gl
def test_every_public_operation_is_swept_or_left_out_with_a_reason(gl_cases: dict[str, Case]) -> None:
    """Add a case to tests/prove_*.py, or the name to tests/prove_left_out.py where nothing could be lost."""
    public = {
        name
        for offered in set(cuglue.__all__) - {"testing", "errors"}
        for name in public_functions(getattr(cuglue, offered))
    }
    swept = set().union(*(functions_in(case) for case in [*CASES, *gl_cases.values()]))
    left_out = [name for names in LEFT_OUT.values() for name in names]
    assert len(left_out) == len(set(left_out))
    assert public - swept - set(left_out) == set()
    assert set(left_out) - public == set(), "no such public function any more"
    assert len(public & swept) > 150
