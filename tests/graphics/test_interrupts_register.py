"""Ctrl-C at any point of registering an object and of closing its handle: the registration ends, once."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.subjects import make_buffer, make_texture
from interrupts import interrupted

import cuglue
from cuglue.core.device import device_state
from cuglue.driver.protocol import RegisterFlags
from cuglue.errors import ClosedError, DriverError
from cuglue.graphics.glcontext import GlContext, headless
from cuglue.graphics.handle import CudaHandle
from cuglue.graphics.registration import Registration
from cuglue.testing import SimDriver
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import poke

pytestmark = [
    pytest.mark.gl,
    pytest.mark.filterwarnings("ignore:.*never (released|closed):ResourceWarning"),
    # Python prints an interrupt that comes while a generator is dropped, and goes on.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <generator:pytest.PytestUnraisableExceptionWarning"
    ),
]

Register = Callable[[int], CudaHandle]


@pytest.fixture(scope="module", autouse=True)
def context() -> Any:
    with headless() as made:
        yield made


def register_and_close(register: Register, name: int, kept: list[Any]) -> None:
    kept.append(register(name))
    kept[0].close()


def close_with_a_live_map(register: Register, name: int, kept: list[Any]) -> None:
    kept.append(register(name))
    kept.append(kept[0].map())
    kept[0].close()
    kept[1].release()


def register_twice(register: Register, name: int, kept: list[Any]) -> None:
    kept += [register(name), register(name)]
    kept[0].close()
    kept[1].close()


def forget(register: Register, name: int, kept: list[Any]) -> None:
    register(name)


PROGRAMS = (register_and_close, close_with_a_live_map, register_twice, forget)


@pytest.mark.parametrize("again", [False, True], ids=["dropped", "closed again"])
@pytest.mark.parametrize(
    ("make", "register", "program"),
    [
        *((lambda: make_buffer(64), cuglue.register_buffer, program) for program in PROGRAMS),
        (lambda: make_texture(4, 3), cuglue.register_texture, register_and_close),
    ],
    ids=[*(f"buffer: {program.__name__}" for program in PROGRAMS), "texture"],
)
def test_an_interrupt_loses_no_registration(
    context: GlContext,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[], int],
    register: Register,
    program: Callable[[Register, int, list[Any]], None],
    again: bool,
) -> None:
    """Whether the caller lets go of the handle or closes it again; and the object can be registered anew."""
    name = make()
    for step in itertools.count(1):
        driver = SimDriver()
        with cuglue.use_driver(driver), caplog.at_level(logging.WARNING):
            with register(name):
                pass
            kept: list[Any] = []
            where = interrupted(lambda k=kept: program(register, name, k), step)  # type: ignore[misc]
            sys.last_exc = None  # type: ignore[attr-defined]
            if again:
                for thing in reversed(kept):
                    thing.close() if isinstance(thing, CudaHandle) else thing.release()
            thing = None
            kept.clear()
            gc.collect()
            context.ops.call(int)
            found = driver.inventory()
            assert (found["resources"], found["mapped"]) == (0, 0), f"step {step}, {where}"
            with register(name) as handle, handle.map_mut() as m:
                poke(m, np.full(m.size, 7, np.uint8))
            assert driver.inventory()["resources"] == 0, f"step {step}, {where}"
            assert driver.hazards == []
        if where is None:
            break
    assert step > 20
    assert GL.glGetError() == 0
    assert caplog.messages == []


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_an_interrupt_while_the_driver_unregisters(
    context: GlContext, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    """Nobody knows then whether it has; the handle is closed, and closing it again ends what there is."""
    with cuglue.use_driver(SimDriver()) as driver:
        name = make_buffer(64)
        handle = cuglue.register_buffer(name)
        call = driver.graphics_unregister

        def interrupted(resource: int) -> None:
            monkeypatch.undo()
            if done:
                call(resource)
            raise KeyboardInterrupt

        monkeypatch.setattr(driver, "graphics_unregister", interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.close()
        assert handle.closed
        with pytest.raises(ClosedError):
            handle.map()
        with cuglue.register_buffer(name) as anew, anew.map():
            pass
        handle.close()
        handle.close()
        assert driver.inventory()["resources"] == 0  # type: ignore[attr-defined] # of the simulated device
    GL.glDeleteBuffers(1, [name])


def test_a_refusal_leaves_the_handle_open(context: GlContext) -> None:
    with cuglue.use_driver(SimDriver()):
        name = make_buffer(64)
        handle = cuglue.register_buffer(name)
        with fail("graphics_unregister"), pytest.raises(DriverError):
            handle.close()
        assert not handle.closed
        with handle.map():
            pass
        handle.close()
        assert handle.closed
    GL.glDeleteBuffers(1, [name])


def test_a_registration_of_no_context_that_is_dropped_ends_with_the_next_drain() -> None:
    """As one of Direct3D is, whose calls run on any thread."""
    with cuglue.use_driver(SimDriver()) as driver:
        assert isinstance(driver, SimDriver)
        state = device_state(driver, 0)
        registration = Registration(state)
        registration.handle = driver.d3d11_register(driver.fake_d3d11(4, 4), RegisterFlags.NONE, 0)
        del registration
        assert driver.inventory()["resources"] == 1
        state.retire.drain()
        assert driver.inventory()["resources"] == 0
