"""Ctrl-C at any point of mapping and leaving: the object works as before, and OpenGL has it back."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from graphics.subjects import BufferSubject, ImageSubject, map_before, registered_buffer, registered_texture
from interrupts import interrupted

import cuglue
from cuglue.driver.protocol import Driver
from cuglue.graphics import life
from cuglue.graphics.glcontext import GlContext
from cuglue.testing import Latch
from cuglue.testing.handle_suite import peek, poke

pytestmark = [
    pytest.mark.gl,
    pytest.mark.filterwarnings("ignore:.*never (released|closed):ResourceWarning"),
]

FILES = (
    "backings",
    "buffers",
    "handle",
    "images",
    "inplace",
    "life",
    "linear",
    "mapping",
    "plan",
    "registration",
)
MODULES = (*(f"graphics/{name}.py" for name in (*FILES, "together", "users")), "driver/sim/graphics_calls.py")
Subjects = list[BufferSubject | ImageSubject]


@contextmanager
def objects(driver: Driver, kinds: str) -> Iterator[Subjects]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                registered_buffer(driver, 64) if kind == "b" else registered_texture(driver, 4, 3)
            )
            for kind in kinds
        ]


def map_one(subjects: Subjects) -> None:
    with subjects[0].handle.map_mut():
        pass


def map_all(subjects: Subjects) -> None:
    with cuglue.map_all([subject.handle for subject in subjects], mutable=True):
        pass


def map_one_by_one(subjects: Subjects) -> None:
    for m in cuglue.map_all([subject.handle for subject in subjects], mutable=True):
        m.release()


@pytest.mark.parametrize(
    ("kinds", "action", "again", "loaded"),
    [
        pytest.param("b", map_one, False, False, id="buffer"),
        pytest.param("t", map_one, False, False, id="texture"),
        pytest.param("bt", map_all, False, False, id="together"),
        pytest.param("bt", map_one_by_one, False, False, id="one by one"),
        pytest.param("b", map_one, True, False, id="buffer again"),
        pytest.param("b", map_one, True, True, id="buffer again, joined"),
        pytest.param("bbb", map_all, True, True, id="together again"),
        pytest.param("bb", map_one_by_one, True, False, id="one by one again"),
    ],
)
def test_an_interrupt_loses_no_object(
    driver: Any,
    context: GlContext,
    monkeypatch: pytest.MonkeyPatch,
    kinds: str,
    action: Callable[[Subjects], None],
    again: bool,
    loaded: bool,
) -> None:
    """The driver refused every later map of the object, or gave it back no more. Also on the way of a plan."""
    if loaded:
        monkeypatch.setitem(sys.modules, "torch", object())
    step = 0
    where: str | None = ""
    while where is not None:
        step += 1
        with objects(driver, kinds) as subjects:
            if again:
                map_before(*(subject.handle for subject in subjects))
            where = interrupted(lambda subjects=subjects: action(subjects), step, *MODULES)
            gc.collect()
            for number, subject in enumerate(subjects):
                with subject.handle.map_mut() as m:
                    poke(m, np.full(m.size, number + 7, np.uint8))
                assert not subject.handle.mapped, where
                assert (subject.get() == number + 7).all(), where
    assert step > 10


@pytest.mark.parametrize(
    ("size", "aliased"), [((4, 3), False), ((4, 3), True), ((300, 300), False)]
)  # the last is copied by a kernel
def test_an_interrupt_loses_no_order(
    driver: Any, context: GlContext, size: tuple[int, int], aliased: bool
) -> None:
    """A copy that the driver has got uses the image and its linear copy: the next map, on another stream, waits."""
    step = 0
    where: str | None = ""
    while where is not None:
        step += 1
        one, two = (cuglue.as_stream(driver.Stream()) for _ in range(2))
        with registered_texture(driver, *size) as subject:
            held = subject.handle.map_mut(two) if aliased else None
            two.join(one)  # and so is behind all that came before

            def act(subject: Any = subject, stream: Any = one) -> None:
                with subject.handle.map_mut(stream, alias=True):
                    pass

            where = interrupted(act, step, *MODULES, "core/stream.py", "core/block.py")
            if held is not None:
                held.release()
            gc.collect()
            with subject.handle.map_mut(two) as m:
                poke(m, np.full(m.size, 7, np.uint8))
            assert (subject.get() == 7).all(), where
            assert driver.hazards == [], where
    assert step > 50


def interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """The next call of this ends in an interrupt, before it does anything."""

    def interrupted_call(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted_call)


def test_a_map_that_is_left_is_left_though_somebody_still_has_it(
    driver: Any, context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next map of the object, which would conflict with it."""
    with objects(driver, "t") as (subject,):
        m = subject.handle.map_mut()
        interrupt_once(monkeypatch, driver, "copy_to_array_async")
        with pytest.raises(KeyboardInterrupt):
            m.release()
        with subject.handle.map_mut():
            assert m.released


def test_a_second_map_that_is_interrupted_leaves_the_first_alone(
    driver: Any, context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with objects(driver, "b") as (subject,):
        subject.put(np.full(64, 5, np.uint8))
        with subject.handle.map() as m:
            interrupt_once(monkeypatch, life, "CudaMap")
            with pytest.raises(KeyboardInterrupt):
                subject.handle.map()
            assert (peek(m) == 5).all()
        assert not subject.handle.mapped


def test_host_memory_of_a_tensor_stays_until_the_device_is_done(
    driver: Any, context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, other = (cuglue.as_stream(driver.Stream()) for _ in range(2))
    with objects(driver, "t") as (subject,), Latch(other):
        event = driver.event_create(0)
        driver.event_record(event, other.handle)
        driver.stream_wait_event(stream.handle, event)
        tensor = cuglue.Tensor((3, 4), "RGBA8", row_stride=64, cuda=subject.handle)
        memory = weakref.ref(tensor._memory)
        interrupt_once(monkeypatch, driver, "stream_synchronize")
        with pytest.raises(KeyboardInterrupt), tensor.map(stream, readonly=True):
            pass
        tensor._memory = None  # type: ignore[assignment] # as if it were gone
        gc.collect()
        stream.state.retire.drain()
        assert memory() is not None
    stream.synchronize()
    stream.state.retire.drain()
    gc.collect()
    assert memory() is None
    driver.event_destroy(event)
