"""Several handles mapped by one driver call."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.subjects import (
    BufferSubject,
    ImageSubject,
    make_texture,
    registered_buffer,
    registered_texture,
)

import cuglue
from cuglue.core.device import device_state
from cuglue.driver.protocol import CaptureMode, Driver
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    BusyError,
    CaptureError,
    ClosedError,
    DriverError,
    MapConflictError,
    MapUnavailableError,
    SeveralErrors,
    StaleHandleError,
    UsageError,
)
from cuglue.graphics.glcontext import GlContext, headless
from cuglue.testing import sweep, trace
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import new_stream, peek, poke

pytestmark = pytest.mark.gl

CALLS = {"graphics_map", "graphics_unmap"}
Subjects = list[BufferSubject | ImageSubject]


@pytest.fixture
def subjects(driver: Driver, context: GlContext) -> Iterator[Subjects]:
    """Buffers and images, each with its own bytes."""
    with ExitStack() as stack:
        made: Subjects = [stack.enter_context(registered_buffer(driver, 100 + n)) for n in range(3)]
        made += [stack.enter_context(registered_texture(driver, 4 + n, 3)) for n in range(3)]
        for number, subject in enumerate(made):
            subject.put(np.full(subject.handle.size, number, np.uint8))
        yield made


def handles(subjects: Subjects) -> list[Any]:
    return [subject.handle for subject in subjects]


def test_row_80_one_call_each_way(driver: Driver, subjects: Subjects) -> None:
    with trace(only=CALLS) as calls:
        with cuglue.map_all(handles(subjects)) as maps:
            assert [c.method for c in calls] == ["graphics_map"]
            assert len(calls[0].args[0]) == len(subjects)
            assert len(maps) == len(subjects)
            for number, m in enumerate(maps):
                assert (peek(m) == number).all()
        assert [c.method for c in calls] == ["graphics_map", "graphics_unmap"]
    assert all(m.released for m in maps)


def test_writes_are_published(driver: Driver, subjects: Subjects) -> None:
    with cuglue.map_all(handles(subjects), mutable=True) as maps:
        for number, m in enumerate(maps):
            poke(m, np.full(m.size, 50 + number, np.uint8))
    for number, subject in enumerate(subjects):
        assert (subject.get() == 50 + number).all()


def test_an_interrupt_while_they_are_left(
    driver: Any, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are left before the next call of their context, though somebody still has them."""

    def interrupted(*args: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    maps = cuglue.map_all(handles(subjects), mutable=True)
    monkeypatch.setattr(driver, "copy_to_array_async", interrupted)
    with pytest.raises(KeyboardInterrupt):
        maps.release()
    for subject in subjects:
        with subject.handle.map_mut() as m:
            poke(m, np.full(m.size, 9, np.uint8))
        assert (subject.get() == 9).all()
    assert all(m.released for m in maps)


def test_what_another_map_copied_comes_before_they_are_handed_back(driver: Any, context: GlContext) -> None:
    """A copy of another level, on another stream, made and left while they were mapped."""
    name = make_texture(8, 8, levels=2)
    one, two = driver.Stream(), driver.Stream()
    with cuglue.register_texture(name) as handle, registered_buffer(driver) as buffer:
        with cuglue.map_all([handle, buffer.handle], one):
            handle.map(two, level=1).release()
        driver.device_synchronize(0)
        assert driver.hazards == []
    GL.glDeleteTextures(1, [name])


def test_writers_on_other_streams_are_waited_for(driver: Any, subjects: Subjects) -> None:
    with new_stream(subjects[0]) as stream, new_stream(subjects[0]) as other:
        with cuglue.map_all(handles(subjects), stream.owner, mutable=True) as maps:
            for m in maps:
                m.order_consumer(other)
                m.note_consumer(other)
                driver.fill_async(m.device_ptr, 9, m.size, other.handle)
        for subject in subjects:
            assert (subject.get() == 9).all()


@pytest.mark.parametrize("which", [0, -1])
def test_one_of_them_left_early(driver: Any, subjects: Subjects, which: int) -> None:
    """On another stream, with a consumer on a third; it is handed back then, the others together."""
    with new_stream(subjects[0]) as other, new_stream(subjects[0]) as third, trace(only=CALLS) as calls:
        with cuglue.map_all(handles(subjects), mutable=True) as maps:
            m = maps[which]
            m.order_consumer(third)
            driver.fill_async(m.device_ptr, 9, m.size, third.handle)
            m.note_consumer(third)
            m.release(other.owner)
            maps[1].cancel()
        given_back = [len(c.args[0]) for c in calls if c.method == "graphics_unmap"]
        assert given_back == [1, 1, len(subjects) - 2]
    assert (subjects[which].get() == 9).all()


def test_maps_left_one_by_one_hand_their_objects_back(driver: Any, subjects: Subjects) -> None:
    """The list held the objects mapped until it was left; where it was gone, OpenGL never saw them again."""
    maps = list(cuglue.map_all(handles(subjects), mutable=True))
    for m in maps:
        poke(m, np.full(m.size, 9, np.uint8))
        m.release()
    for subject in subjects:
        assert (subject.get() == 9).all()


@pytest.mark.filterwarnings("ignore:.*never released:ResourceWarning")
def test_a_list_that_is_forgotten_holds_nothing(driver: Any, subjects: Subjects) -> None:
    maps = cuglue.map_all(handles(subjects))
    del maps
    gc.collect()
    for subject in subjects:
        with subject.handle.map_mut() as m:
            poke(m, np.full(m.size, 9, np.uint8))
        assert (subject.get() == 9).all()


def test_a_capture_is_refused_before_the_driver_is_called(driver: Any, subjects: Subjects) -> None:
    with new_stream(subjects[0]) as stream:
        driver.capture_begin(stream.handle, CaptureMode.RELAXED)
        with trace(only=CALLS) as calls, pytest.raises(CaptureError):
            cuglue.map_all(handles(subjects), stream.owner)
        assert calls == []
        driver.graph_destroy(driver.capture_end(stream.handle))


def test_none_at_all() -> None:
    with cuglue.map_all([]) as maps:
        assert maps == []


def test_one_of_them_mapped_already(driver: Driver, subjects: Subjects) -> None:
    with trace(only=CALLS) as calls:
        with subjects[0].handle.map():
            with cuglue.map_all(handles(subjects)):
                pass
            assert [len(c.args[0]) for c in calls] == [1, len(subjects) - 1, len(subjects) - 1]
        assert len(calls) == 4


def test_whoever_has_one_of_them_still_is_not_waited_for(driver: Any, subjects: Subjects) -> None:
    """The object is not handed back yet: what the other map's consumer does has no end to come before."""
    with new_stream(subjects[0]) as consumer, subjects[0].handle.map() as other:
        with trace(only={"stream_wait_event"}) as waits:
            with cuglue.map_all(handles(subjects)):
                other.note_consumer(consumer)
            assert waits == []
            other.release()
        assert len(waits) == 1


def test_a_handle_that_comes_twice(driver: Driver, subjects: Subjects) -> None:
    image, buffer = subjects[-1].handle, subjects[0].handle
    with cuglue.map_all([image, buffer, image]) as maps:
        assert maps[0].device_ptr == maps[2].device_ptr
    with pytest.raises(MapConflictError):
        cuglue.map_all([image, image], mutable=True)
    with cuglue.map_all([image, buffer], mutable=True):
        pass


def test_where_one_cannot_be_mapped_none_is(driver: Any, subjects: Subjects) -> None:
    writer = subjects[-1].handle.map_mut()
    with pytest.raises(MapConflictError):
        cuglue.map_all(handles(subjects))
    assert driver.inventory()["mapped"] == 1
    writer.release()
    subjects[1].handle.close()
    with pytest.raises(ClosedError):
        cuglue.map_all(handles(subjects))
    assert driver.inventory()["mapped"] == 0


def test_a_stale_one_is_found(driver: Any, subjects: Subjects) -> None:
    import OpenGL.GL as GL

    GL.glNamedBufferData(subjects[1].name, 7, None, GL.GL_STATIC_DRAW)
    with pytest.raises(StaleHandleError):
        cuglue.map_all(handles(subjects))
    assert driver.inventory()["mapped"] == 0


def test_handles_of_two_devices(context: GlContext) -> None:
    driver = SimDriver(devices=2)
    with cuglue.use_driver(driver), registered_buffer(driver) as one:
        with cuglue.register_buffer(one.name, device=1) as other, pytest.raises(UsageError):
            cuglue.map_all([one.handle, other])


def test_two_contexts_are_mapped_each_on_its_thread(driver: Driver) -> None:
    from graphics.subjects import make_buffer

    with headless(thread="worker") as one, headless(thread="worker") as two, ExitStack() as stack:
        found = []
        for context in (one, two, one):
            name = context.ops.call(make_buffer, 64)
            found.append(stack.enter_context(cuglue.register_buffer(name, ops=context.ops)))
        with trace(only=CALLS) as calls:
            with cuglue.map_all(found, mutable=True) as maps:
                assert [len(c.args[0]) for c in calls] == [2, 1]
                assert len({m.device_ptr for m in maps}) == 3
            assert len(calls) == 4


def test_an_error_inside_publishes_and_comes_first(driver: Driver, subjects: Subjects) -> None:
    with pytest.raises(KeyError):
        fill_and_fail(subjects)
    assert all((subject.get() == 3).all() for subject in subjects)


def fill_and_fail(subjects: Subjects) -> None:
    with cuglue.map_all(handles(subjects), mutable=True) as maps:
        for m in maps:
            poke(m, np.full(m.size, 3, np.uint8))
        raise KeyError("body")


def test_what_could_not_be_left_is_tried_again(driver: Any, subjects: Subjects) -> None:
    maps = cuglue.map_all(handles(subjects), mutable=True)
    with fail("copy_to_array_async", persistent=True), pytest.raises(SeveralErrors) as caught:
        maps.release()
    assert len(caught.value.errors) == 3
    assert [m.released for m in maps] == [True] * 3 + [False] * 3
    maps.release()
    assert all(m.released for m in maps)
    assert driver.inventory()["mapped"] == 0
    maps = cuglue.map_all(handles(subjects))
    with fail("graphics_unmap"), pytest.raises(DriverError):
        maps.release()
    maps.release()
    assert driver.inventory()["mapped"] == 0


@pytest.mark.parametrize("mutable", [False, True])
def test_nothing_is_lost_whatever_fails(context: GlContext, mutable: bool) -> None:
    from graphics.subjects import make_buffer, make_texture

    names = make_buffer(64), make_texture(4, 4)

    def setup(driver: Any) -> list[Any]:
        found = [cuglue.register_buffer(names[0]), cuglue.register_texture(names[1])]
        with cuglue.map_all(found):
            pass
        return found

    def teardown(subject: list[Any], result: Any) -> None:
        result.release()
        for handle in subject:
            handle.close()

    sweep(
        lambda subject: cuglue.map_all(subject, mutable=mutable),
        setup=setup,
        teardown=teardown,
        keeps=("kernels", "events"),
        name="map_all",
    ).check()


def test_a_context_that_is_gone_takes_its_maps_along(driver: Any) -> None:
    """As with a single map: nobody is left to give anything back to."""
    from graphics.subjects import make_buffer

    with headless(thread="worker") as context:
        names = [context.ops.call(make_buffer, 64) for _ in range(2)]
        found = [cuglue.register_buffer(name, ops=context.ops) for name in names]
        maps = cuglue.map_all(found, mutable=True)
    maps.release()
    assert all(m.released for m in maps)
    with pytest.raises(MapUnavailableError, match="context that is gone"):
        cuglue.map_all(found)
    for handle in found:
        handle.close()


def test_strict_mode_names_each_map_whose_arrays_live_once(
    driver: Driver, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUGLUE_STRICT", "1")
    maps = cuglue.map_all(handles(subjects[:3]))
    kept = [maps[0].__dlpack__(stream=None), maps[2].__dlpack__(stream=None)]
    with pytest.raises(SeveralErrors, match="leaving 3 maps") as caught:
        maps.release()
    assert [type(error) for error in caught.value.errors] == [BusyError, BusyError]
    assert all(m.released for m in maps)
    maps.release()  # said once
    del kept


def test_readers_without_a_stream_cost_one_wait_for_all(
    driver: Driver, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", sys)
    with trace(only={"context_wait"}) as calls:
        with cuglue.map_all(handles(subjects)) as maps:
            assert len(calls) == 1
            assert all(m.everybody for m in maps)
    assert len(calls) == 1


def test_one_that_may_only_be_read(driver: Driver, context: GlContext) -> None:
    from graphics.subjects import make_buffer

    with cuglue.register_buffer(make_buffer(64), access="read") as handle:
        with cuglue.map_all([handle]) as (m,):
            assert m.readonly
        with trace(only=CALLS) as calls, pytest.raises(UsageError, match="registered for reading"):
            cuglue.map_all([handle], mutable=True)
        assert calls == []


def test_what_finalisers_left_is_done_first(driver: Driver, subjects: Subjects) -> None:
    """As a single map does."""
    done: list[int] = []
    device_state(driver, 0).retire.forget(lambda: done.append(1))
    with cuglue.map_all(handles(subjects)):
        assert done == [1]


def test_leaving_waits_once_for_a_stream_whatever_it_used(driver: Any, subjects: Subjects) -> None:
    """The array library's current stream is another one, and may have used each of them as well."""
    with new_stream(subjects[0]) as stream, new_stream(subjects[0]) as consumer:
        maps = cuglue.map_all(handles(subjects[:3]), stream.owner, mutable=True)
        for m in maps:
            m.order_consumer(consumer)
            driver.fill_async(m.device_ptr, 9, m.size, consumer.handle)
            m.note_consumer(consumer)
        with trace(only={"event_record", "stream_wait_event"}) as calls:
            maps.release()
        assert [c.method for c in calls] == ["event_record", "stream_wait_event"] * 2  # current, consumer
        for subject in subjects[:3]:
            assert (subject.get() == 9).all()
