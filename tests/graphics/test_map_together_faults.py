"""Leaving maps that were made together, each driver call of it failing: nobody takes for left what is mapped still."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from graphics.subjects import BufferSubject, ImageSubject, map_before, registered_buffer, registered_texture

import cuglue
from cuglue.driver.sim import SimDriver
from cuglue.errors import CuglueError, DriverError
from cuglue.graphics.glcontext import GlContext
from cuglue.graphics.together import MapList
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import new_stream, peek, poke
from cuglue.testing.numbered import UNKNOWN, NumberedCalls

pytestmark = [
    pytest.mark.gl,
    pytest.mark.filterwarnings("ignore:.*never released:ResourceWarning"),
]

Subjects = list[BufferSubject | ImageSubject]


def one_by_one(held: list[MapList], subjects: Subjects) -> None:
    for m in held.pop():
        m.release()
        assert m.released


def the_list_again(held: list[MapList], subjects: Subjects) -> None:
    maps = held.pop()
    maps.__exit__(None, None, None)
    assert all(m.released for m in maps)


def another_map(held: list[MapList], subjects: Subjects) -> None:
    """Of each, once the caller has let go of the maps that he left."""
    held.clear()
    gc.collect()
    for subject in subjects:
        with subject.handle.map():
            pass


def another_map_of_all(held: list[MapList], subjects: Subjects) -> None:
    held.clear()
    gc.collect()
    with cuglue.map_all([subject.handle for subject in subjects]):
        pass


def closed(held: list[MapList], subjects: Subjects) -> None:
    """The end waits for the maps."""
    for subject in subjects:
        subject.handle.close()
    one_by_one(held, subjects)


GO_ON = [one_by_one, the_list_again, another_map, another_map_of_all, closed]


def left(maps: MapList, error: Exception | None) -> bool:
    """Leave them as ``with`` does; whether it went without an error."""
    try:
        maps.__exit__(None if error is None else type(error), error, None)
    except CuglueError:
        return False
    return not hasattr(error, "__notes__")


def run(
    kinds: str,
    again: bool,
    go_on: Callable[[list[MapList], Subjects], None],
    number: int,
    *,
    persistent: bool,
    early: bool,
    body: bool,
    consumer: bool,
) -> int:
    """One round, with that call of leaving failing (0: none); how many calls leaving takes."""
    driver, calls = SimDriver(), NumberedCalls()
    with cuglue.use_driver(driver), ExitStack() as stack:
        subjects: Subjects = [
            stack.enter_context(
                registered_buffer(driver, 64) if kind == "b" else registered_texture(driver, 4, 3)
            )
            for kind in kinds
        ]
        handles = [subject.handle for subject in subjects]
        if again:
            map_before(*handles)
        other = stack.enter_context(new_stream(subjects[0]))
        maps = cuglue.map_all(handles, mutable=True)
        for m in maps:
            poke(m, np.full(m.size, 7, np.uint8))
            if consumer:
                m.order_consumer(other)
                driver.fill_async(m.device_ptr, 8, m.size, other.handle)
                m.note_consumer(other)
        if early:
            maps[0].release()
        method: list[str] = []

        def chosen(now: int, name: str) -> int | None:
            if now == number:
                method.append(name)
            return UNKNOWN if now == number or (persistent and name in method) else None

        with calls.of(driver):
            calls.arm(chosen)
            went = left(maps, KeyError("body") if body else None)
            names = calls.disarm()
        what = f"call {number} of {names}"
        live = sum(not m.released for m in maps)
        assert went == (not live), what
        assert [handle.mapped for handle in handles] == [not m.released for m in maps], what
        assert driver.inventory()["mapped"] == live, what
        held = [maps]
        del maps, m
        go_on(held, subjects)
        assert driver.inventory()["mapped"] == 0, what
        for subject in subjects:
            assert (subject.get() == (8 if consumer else 7)).all(), what
            if not subject.handle.closed:
                assert not subject.handle.mapped, what
                subject.put(np.full(subject.handle.size, 9, np.uint8))
                with subject.handle.map() as m:
                    assert (peek(m) == 9).all(), what
        assert driver.hazards == [], what
    return len(names)


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistently"])
@pytest.mark.parametrize("go_on", GO_ON, ids=lambda function: function.__name__)
@pytest.mark.parametrize(
    ("kinds", "again", "options"),
    [
        pytest.param("bb", True, {}, id="short"),
        pytest.param("bb", True, {"body": True}, id="short, an error inside"),
        pytest.param("bb", True, {"early": True}, id="short, one left before"),
        pytest.param("bb", True, {"consumer": True}, id="short, a consumer"),
        pytest.param("bb", False, {}, id="long"),
        pytest.param("bt", False, {"consumer": True}, id="mixed"),
        pytest.param("bt", False, {"body": True}, id="mixed, an error inside"),
        pytest.param("btt", False, {"early": True}, id="mixed, one left before"),
    ],
)
def test_a_map_that_could_not_be_left_is_live(
    context: GlContext, kinds: str, again: bool, go_on: Any, persistent: bool, options: dict[str, bool]
) -> None:
    """Whichever call fails: the maps, the handles and the driver agree on what is mapped, and it can be left."""
    all_options = dict.fromkeys(("early", "body", "consumer"), False) | options
    number = 0
    while number <= run(kinds, again, go_on, number, persistent=persistent, **all_options):
        number += 1
    assert number > 1


@pytest.mark.parametrize("again", [False, True], ids=["long", "short"])
def test_what_the_caller_sees(context: GlContext, again: bool) -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver), registered_buffer(driver) as one, registered_buffer(driver) as two:
        if again:
            map_before(one.handle, two.handle)
        maps = cuglue.map_all([one.handle, two.handle], mutable=True)
        with fail("graphics_unmap"), pytest.raises(DriverError) as caught:
            maps.release()
        assert "context: EGL" in str(caught.value)
        for m, subject in zip(maps, (one, two), strict=True):
            assert "could not be left yet" in repr(m)
            assert m.handle is subject.handle  # its owner must not go
            poke(m, np.full(m.size, 5, np.uint8))
        maps.release()
        assert (one.get() == 5).all()
        assert (two.get() == 5).all()


def test_one_context_s_failure_holds_up_no_other(context: GlContext) -> None:
    """Nor does a current stream that nobody can tell."""
    from graphics.subjects import make_buffer

    from cuglue.graphics.glcontext import headless

    driver = SimDriver()
    with cuglue.use_driver(driver), ExitStack() as stack:
        contexts = [stack.enter_context(headless(thread="worker")) for _ in range(2)]
        found = [cuglue.register_buffer(c.ops.call(make_buffer, 64), ops=c.ops) for c in contexts]
        for call in ("graphics_unmap", "stream_current"):
            maps = cuglue.map_all(found, mutable=True)
            with fail(call), pytest.raises(DriverError):
                maps.release()
            assert [m.released for m in maps] == [False, True], call
            maps.release()
            assert driver.inventory()["mapped"] == 0
        for handle in found:
            handle.close()
