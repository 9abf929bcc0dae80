"""What only a removed statement showed: each test here fails if one particular line of graphics goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphics.subjects import registered_buffer

from cuglue.core.device import device_state
from cuglue.driver.protocol import Driver
from cuglue.errors import DriverError
from cuglue.graphics import life
from cuglue.graphics.glcontext import GlContext
from cuglue.graphics.registration import Registration
from cuglue.testing import trace

pytestmark = pytest.mark.gl


def interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def test_a_map_that_is_interrupted_leaves_the_others_of_the_object(
    driver: Driver, context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registered_buffer(driver, 64) as subject:
        first = subject.handle.map()
        with monkeypatch.context() as patch, trace(only={"graphics_unmap"}) as calls:
            patch.setattr(life, "CudaMap", interrupt)
            with pytest.raises(KeyboardInterrupt):
                subject.handle.map()
        assert calls == []
        assert np.array_equal(first.numpy().reshape(-1), subject.get().reshape(-1))
        first.release()


def test_a_map_whose_leaving_is_interrupted_is_left_before_the_next(
    driver: Driver, context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registered_buffer(driver, 64) as subject:
        m = subject.handle.map_mut()
        with monkeypatch.context() as patch:
            patch.setattr(type(subject.handle._life.backing), "call", interrupt)
            with pytest.raises(KeyboardInterrupt):
                m.release()
        with trace(only={"graphics_unmap", "graphics_map"}) as calls:
            subject.handle.map_mut().release()
        assert [name for name, _ in calls] == ["graphics_unmap", "graphics_map", "graphics_unmap"]


def test_users_are_waited_for_when_the_last_map_of_a_part_is_left(
    driver: Driver, context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[Any] = []
    with registered_buffer(driver, 64) as subject:
        first, second = subject.handle.map(), subject.handle.map()
        with monkeypatch.context() as patch:
            patch.setattr(type(subject.handle._life.backing), "join", lambda self, *args: joined.append(args))
            first.release()
            assert joined == []
            second.release()
            assert len(joined) == 1


def test_a_map_whose_users_cannot_be_waited_for_says_so(
    driver: Driver, context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise DriverError("refused")

    with registered_buffer(driver, 64) as subject:
        first, second = subject.handle.map(), subject.handle.map()
        first.release()
        with monkeypatch.context() as patch:
            patch.setattr(type(subject.handle._life.backing), "join", refuse)
            with pytest.raises(DriverError):
                second.release()
        assert "could not be left yet" in repr(second)
        second.release()
        assert not subject.handle.mapped


def test_a_registration_that_is_dropped_ends_with_the_next_drain(driver: Driver) -> None:
    state = device_state(driver, 0)
    ended: list[int] = []
    Registration.forget(Registration(state, 0), lambda: ended.append(1))
    assert ended == []
    state.retire.drain()
    assert ended == [1]
