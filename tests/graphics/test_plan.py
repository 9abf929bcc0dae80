"""Buffers mapped again on the same stream: a few calls, and the general way wherever something is not as it was."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.subjects import BufferSubject, make_buffer, map_before, registered_buffer

import cuglue
from cuglue.core import process
from cuglue.core.device import device_state
from cuglue.driver.protocol import CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    BusyError,
    CaptureError,
    ClosedError,
    CuglueError,
    DanglingExportWarning,
    DriverError,
    NoContextError,
    StaleHandleError,
    UsageError,
    WrongThreadError,
)
from cuglue.graphics.glcontext import GlContext, headless
from cuglue.graphics.mapping import CudaMap
from cuglue.graphics.plan import Plan
from cuglue.testing import Latch, sweep, trace
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import new_stream, peek, poke

pytestmark = pytest.mark.gl

CALLS = {"graphics_map", "graphics_unmap"}
Ways = list[bool]


@pytest.fixture
def buffer(driver: SimDriver, context: GlContext) -> Iterator[BufferSubject]:
    """A buffer that was mapped before."""
    with registered_buffer(driver) as subject:
        map_before(subject.handle)
        yield subject


@pytest.fixture
def buffers(driver: SimDriver, context: GlContext) -> Iterator[list[BufferSubject]]:
    """Buffers that were mapped together before."""
    with ExitStack() as stack:
        made = [stack.enter_context(registered_buffer(driver, 100 + n)) for n in range(4)]
        map_before(*(subject.handle for subject in made))
        yield made


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Whether each map and each leaving that a plan was asked for was done by it."""
    found: Ways = []
    map_, leave = Plan.map, Plan.leave

    def mapping(self: Plan, *args: Any) -> Any:
        maps = map_(self, *args)
        found.append(maps is not None)
        return maps

    def leaving(self: Plan, *args: Any) -> bool:
        found.append(leave(self, *args))
        return found[-1]

    monkeypatch.setattr(Plan, "map", mapping)
    monkeypatch.setattr(Plan, "leave", leaving)
    return found


def handles(subjects: list[BufferSubject]) -> list[Any]:
    return [subject.handle for subject in subjects]


def works(subject: BufferSubject) -> bool:
    """Whether the buffer can be mapped and written, and is given back."""
    with subject.handle.map_mut() as m:
        poke(m, np.full(m.size, 0x5A, np.uint8))
    return not subject.handle.mapped and bool((subject.get() == 0x5A).all())


def elsewhere(function: Callable[[], Any]) -> BaseException | None:
    """What ``function`` raises on another thread."""
    found: list[BaseException] = []

    def body() -> None:
        try:
            function()
        except CuglueError as error:
            found.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return found[0] if found else None


# --- where all is as it was -------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [None, "object", "record"])
def test_a_map_and_its_end_go_by_the_plan(
    driver: SimDriver, buffer: BufferSubject, ways: Ways, named: str | None
) -> None:
    stream = driver.Stream()
    where = {None: None, "object": stream, "record": cuglue.as_stream(stream)}[named]
    with driver.current_stream(stream):
        map_before(buffer.handle, stream=where)
        ways.clear()
        for method in ("map", "map_mut"):
            with getattr(buffer.handle, method)(where) as m:
                assert m.stream.owner is stream
                assert m.writable == (method == "map_mut")
                assert m.handle is buffer.handle
                poke(m, np.full(m.size, len(ways), np.uint8))
            assert (buffer.get() == len(ways) - 1).all()
            assert m.handle is None
    assert ways == [True] * 4


def test_the_driver_is_asked_what_it_has_to_be(driver: SimDriver, buffer: BufferSubject) -> None:
    """A default stream cannot capture, and need not be asked."""
    with trace() as calls, buffer.handle.map():
        pass
    maps = ["stream_current", "graphics_map", "graphics_pointer"]
    assert [c.method for c in calls] == [*maps, "stream_current", "graphics_unmap"]


def test_a_map_and_its_end_are_thirty_calls(driver: SimDriver, buffer: BufferSubject) -> None:
    """Of functions in Python, ours: they were a hundred. The simulated device's own are not counted."""
    made: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "/cuglue/" in file and "/driver/" not in file:
            made.append(frame.f_code.co_qualname)

    sys.setprofile(look)
    try:
        with buffer.handle.map():
            pass
    finally:
        sys.setprofile(None)
    assert 5 < len(made) <= 30, made


def test_several_go_by_the_plan_with_one_call_each_way(
    driver: SimDriver, buffers: list[BufferSubject], ways: Ways
) -> None:
    with trace(only=CALLS) as calls:
        with cuglue.map_all(handles(buffers), mutable=True) as maps:
            for number, m in enumerate(maps):
                assert (m.size, m.writable, m.handle) == (100 + number, True, buffers[number].handle)
                poke(m, np.full(m.size, number + 1, np.uint8))
        assert [(c.method, len(c.args[0])) for c in calls] == [("graphics_map", 4), ("graphics_unmap", 4)]
    assert ways == [True, True]
    for number, subject in enumerate(buffers):
        assert (subject.get() == number + 1).all()


def test_a_map_that_was_left_says_nothing_of_the_next_one(buffer: BufferSubject, ways: Ways) -> None:
    """They have their memory one after the other."""
    with buffer.handle.map() as first:
        block = first.block
    with buffer.handle.map() as second:
        assert (first.device_ptr, first.size, first.released) == (0, 0, True)
        assert second.block is not block
        assert second.block.ptr == second.device_ptr != block.ptr
        with pytest.raises(ClosedError):
            first.block  # noqa: B018 - it raises
    assert ways == [True] * 4
    first.release()
    assert ways[4:] == [False]


def test_work_on_the_map_s_own_stream_is_no_reason_to_wait(
    driver: SimDriver, buffer: BufferSubject, ways: Ways
) -> None:
    stream = driver.Stream()
    with driver.current_stream(stream):
        map_before(buffer.handle)
        ways.clear()
        with buffer.handle.map_mut() as m:
            m.order_consumer(m.stream)
            m.note_consumer(m.stream)
            driver.fill_async(m.device_ptr, 3, m.size, stream.ptr)
            assert m.share.made is None
        assert (buffer.get() == 3).all()
    assert ways == [True, True]


def test_work_on_the_map_s_own_stream_is_waited_for_by_others(
    driver: SimDriver, buffer: BufferSubject, ways: Ways
) -> None:
    """Also by one that came after the map itself before."""
    other = cuglue.as_stream(driver.Stream())
    with buffer.handle.map_mut() as m:
        other.join(m.stream)
        m.order_consumer(m.stream)
        driver.fill_async(m.device_ptr, 3, m.size, m.stream.handle)
        m.note_consumer(m.stream)
        assert m.share.made is None
        assert m.block.prepare(other, cuglue.Access.READ_WRITE) == 1
        driver.fill_async(m.device_ptr, 4, m.size, other.handle)
        m.block.finish(other, cuglue.Access.READ_WRITE)
    assert (buffer.get() == 4).all()
    assert ways == [True, False]


def test_what_waits_to_be_given_back_is_given_back_by_a_map(buffer: BufferSubject, ways: Ways) -> None:
    done: list[int] = []
    buffer.handle._life.backing.state.retire.push((), lambda: done.append(1))
    with buffer.handle.map():
        assert done == [1]
    assert ways == [True, True]


def test_readonly(driver: SimDriver, buffer: BufferSubject, ways: Ways) -> None:
    with buffer.handle.map(readonly=True) as m:
        assert m.readonly
    with cuglue.register_buffer(buffer.name, access="read") as handle:
        map_before(handle)
        ways.clear()
        with handle.map() as m:
            assert m.readonly
        with pytest.raises(UsageError, match="registered for reading"):
            handle.map_mut()
    assert ways == [True, True, False]


# --- where something is not as it was: mapping ------------------------------------------------------------------


def test_another_stream_waits_for_the_one_before(
    driver: SimDriver, buffer: BufferSubject, ways: Ways
) -> None:
    other = driver.Stream()
    with buffer.handle.map_mut() as m:
        driver.fill_async(m.device_ptr, 9, m.size, m.stream.handle)
    with trace(only={"stream_wait_event"}) as waits, buffer.handle.map(other) as m:
        assert len(waits) == 1
        assert (peek(m) == 9).all()
    assert ways == [True, True, False]


def test_turns_of_two_streams_never_skip_a_wait(driver: SimDriver, buffer: BufferSubject, ways: Ways) -> None:
    one, two = driver.Stream(), driver.Stream()
    for number in range(1, 8):
        with buffer.handle.map_mut((one, two)[number % 2]) as m:
            assert (peek(m) == number - 1).all() or number == 1
            driver.fill_async(m.device_ptr, number, m.size, m.stream.handle)
    assert not any(ways)
    assert buffer.handle._life.plan is None  # nobody made plans that nothing comes of


def test_a_map_and_its_end_are_operations_that_others_wait_for(
    driver: SimDriver, buffer: BufferSubject, ways: Ways
) -> None:
    """Also others that waited for all that was there before them."""
    other = cuglue.as_stream(driver.Stream())
    where = cuglue.as_stream()
    other.join(where)
    with buffer.handle.map() as m:
        assert m.block.prepare(other, cuglue.Access.READ) == 1
        other.join(where)
    with trace(only={"stream_wait_event"}) as waits, buffer.handle.map(other):
        assert len(waits) == 1
    assert ways == [True, True, False]


def records(m: CudaMap) -> list[Any]:
    """What is noted of a map besides the map."""
    life, share = m._life, m.share
    registration = life.backing.registration  # type: ignore[attr-defined] # of a buffer
    noted = [
        life._state,
        share.maps,
        share.writers,
        share.open,
        share.part,
        share.layout,
        share.ptr == m.device_ptr,
    ]
    return [*noted, life._live == {share.part: share}, registration._users, registration._mapped]


@pytest.mark.parametrize("method", ["map", "map_mut"])
def test_both_ways_note_the_same(driver: SimDriver, buffer: BufferSubject, ways: Ways, method: str) -> None:
    """So that they can take turns: left generally, then again by the plan."""
    found = []
    for stream in (driver.Stream(), None, None, None):
        m = getattr(buffer.handle, method)(stream)
        found.append(records(m))
        m.release()
        found.append(
            [
                buffer.handle._life._state,
                buffer.handle._life._live,
                buffer.handle._life.backing.registration._users,
            ]
        )
    assert ways == [False, True, True]
    assert found[0] == found[2] == found[4] == found[6]
    assert found[1] == found[3] == found[5] == found[7]


def test_a_reader_shares_a_map_and_the_last_one_gives_it_back(buffer: BufferSubject, ways: Ways) -> None:
    for last in (0, 1):
        with trace(only=CALLS) as calls:
            maps = [buffer.handle.map(), buffer.handle.map()]
            assert maps[0].device_ptr == maps[1].device_ptr != 0
            maps[1 - last].release()
            assert [c.method for c in calls] == ["graphics_map"]
            assert maps[last].device_ptr
            maps[last].release()
            assert [c.method for c in calls] == ["graphics_map", "graphics_unmap"]
    assert works(buffer)


def test_another_handle_of_the_object(driver: SimDriver, buffer: BufferSubject, ways: Ways) -> None:
    other = cuglue.register_buffer(buffer.name)
    with other.map() as m:
        assert m.handle is other
    buffer.handle.close()
    with pytest.raises(ClosedError):
        buffer.handle.map()
    with other.map():
        pass
    assert ways == [True, True, False, True, True]
    other.close()
    with pytest.raises(ClosedError):
        other.map()


def test_a_handle_that_was_given_away(buffer: BufferSubject) -> None:
    with buffer.handle.into_client_parts(), pytest.raises(ClosedError):
        buffer.handle.map()


def test_arguments_of_other_maps_are_looked_at(buffer: BufferSubject) -> None:
    for wrong in ({"level": 1}, {"layer": 1}, {"in_place": True}, {"level": False}, {"timeout": -1}):
        with pytest.raises(UsageError):
            buffer.handle.map(**wrong)
    with buffer.handle.map(alias=True, timeout=1):
        pass


def test_the_wrong_thread_is_refused(buffer: BufferSubject) -> None:
    assert isinstance(elsewhere(buffer.handle.map), WrongThreadError)
    m = buffer.handle.map()
    assert isinstance(elsewhere(m.release), WrongThreadError)
    m.release()
    assert works(buffer)


def test_another_context_is_refused(buffer: BufferSubject, context: GlContext) -> None:
    m = buffer.handle.map()
    with headless():
        with pytest.raises(NoContextError):
            m.release()
        with pytest.raises(NoContextError):
            buffer.handle.map()
    context.make_current()
    m.release()
    assert works(buffer)


def test_a_closed_context_and_a_forked_child_are_refused(
    buffer: BufferSubject, context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = context.ops
    with monkeypatch.context() as child:
        child.setattr(process, "life", object())
        assert not ops.here()
        with pytest.raises(UsageError, match="forked"):
            buffer.handle.map()
    with monkeypatch.context() as closed:
        closed.setattr(ops, "_closed", True)
        assert not ops.here()
        with pytest.raises(CuglueError):
            buffer.handle.map()
    assert works(buffer)


def test_what_finalisers_left_comes_before_a_map(buffer: BufferSubject, context: GlContext) -> None:
    done: list[bool] = []
    context.ops.post(lambda: done.append(buffer.handle.mapped))
    with buffer.handle.map():
        assert done == [False]
    context.ops.post(lambda: done.append(buffer.handle.mapped))
    with buffer.handle.map():
        pass
    assert done == [False, False]


@pytest.mark.filterwarnings("ignore:.*never released:ResourceWarning")
def test_a_map_that_was_forgotten_is_left_before_the_next(buffer: BufferSubject) -> None:
    buffer.handle.map()
    gc.collect()
    assert works(buffer)


@pytest.mark.parametrize("together", [False, True])
def test_a_stream_that_captures_is_left_alone(
    driver: SimDriver, buffers: list[BufferSubject], together: bool
) -> None:
    """Before the driver is called, which would end the capture."""
    stream = driver.Stream()
    chosen = handles(buffers)
    map_: Callable[[], Any] = (lambda: cuglue.map_all(chosen)) if together else chosen[0].map
    with driver.current_stream(stream):
        map_before(*chosen)
        m = map_()
        driver.capture_begin(stream.ptr, CaptureMode.RELAXED)
        with trace(only=CALLS) as calls:
            with pytest.raises(CaptureError):
                m.release()
            assert chosen[0].mapped
            driver.graph_destroy(driver.capture_end(stream.ptr))
            m.release()
            calls.clear()
            driver.capture_begin(stream.ptr, CaptureMode.RELAXED)
            with pytest.raises(CaptureError):
                map_()
            assert calls == []
        driver.graph_destroy(driver.capture_end(stream.ptr))
    assert all(works(subject) for subject in buffers)


@pytest.mark.parametrize("together", [False, True])
def test_an_object_that_was_resized_or_deleted_is_found(
    driver: SimDriver, context: GlContext, together: bool
) -> None:
    with registered_buffer(driver) as first:
        name = make_buffer(64)
        with cuglue.register_buffer(name) as handle:
            chosen = [first.handle, handle]
            map_before(*chosen)
            map_: Callable[[], Any] = (lambda: cuglue.map_all(chosen)) if together else handle.map
            GL.glNamedBufferData(name, 32, None, GL.GL_DYNAMIC_DRAW)
            with pytest.raises(StaleHandleError, match="resized"):
                map_()
            GL.glNamedBufferData(name, 64, None, GL.GL_DYNAMIC_DRAW)
            map_().release()
            GL.glDeleteBuffers(1, [name])
            with trace(only=CALLS) as calls, pytest.raises(StaleHandleError, match="deleted"):
                map_()
            assert calls == []
            assert GL.glGetError() == 0
        assert works(first)


@pytest.mark.parametrize(("nbytes", "raises"), [(999, True), (1001, False)])
def test_another_size_of_the_driver(
    driver: SimDriver, buffer: BufferSubject, monkeypatch: pytest.MonkeyPatch, nbytes: int, raises: bool
) -> None:
    """A larger one counts; a smaller one is an object that changed."""
    with monkeypatch.context() as other:
        answer = driver.graphics_pointer
        other.setattr(driver, "graphics_pointer", lambda resource: (answer(resource)[0], nbytes))
        if raises:
            with pytest.raises(StaleHandleError, match="999 bytes"):
                buffer.handle.map()
        else:
            with buffer.handle.map() as m:
                assert (m.size, m.shape, m.block.size) == (1001, (1001,), 1001)
    assert works(buffer)


def test_a_reader_that_names_no_stream_finds_all_of_them_in_order(
    driver: SimDriver, buffers: list[BufferSubject], monkeypatch: pytest.MonkeyPatch, ways: Ways
) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())
    with trace(only={"context_wait", "context_record", "event_create"}) as calls:
        with buffers[0].handle.map() as m:
            assert m.everybody
            assert m.cai_stream() is None
        with buffers[0].handle.map(join=False) as m:
            assert not m.everybody
        with cuglue.map_all(handles(buffers)) as maps:
            assert all(m.everybody for m in maps)
    assert [c.method for c in calls].count("context_wait") == 2
    assert ways == [True] * 6


def test_an_order_that_is_refused_leaves_nothing_mapped(
    driver: SimDriver, buffers: list[BufferSubject], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())
    for map_ in (buffers[0].handle.map, lambda: cuglue.map_all(handles(buffers))):
        with fail("context_wait"), pytest.raises(DriverError):
            map_()
        assert not any(subject.handle.mapped for subject in buffers)
    assert all(works(subject) for subject in buffers)


# --- where something is not as it was: leaving ------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
def test_leaving_waits_for_a_consumer_on_another_stream(
    driver: SimDriver, buffers: list[BufferSubject], ways: Ways, together: bool
) -> None:
    with new_stream(buffers[0]) as other:
        left = cuglue.map_all(handles(buffers), mutable=True) if together else buffers[0].handle.map_mut()
        m: CudaMap = left[0] if isinstance(left, list) else left
        m.order_consumer(other)
        m.note_consumer(other)
        driver.fill_async(m.device_ptr, 0x45, m.size, other.handle)
        left.release()
        assert (buffers[0].get() == 0x45).all()
    assert ways == [True, False]


def test_leaving_waits_for_a_use_that_is_noted_on_the_memory_alone(
    driver: SimDriver, buffer: BufferSubject, ways: Ways
) -> None:
    """As commands note them; a reader's, too."""
    for access in ("read", "write"):
        with new_stream(buffer) as other:
            with buffer.handle.map_mut() as m:
                other.join(m.stream)
                driver.fill_async(m.device_ptr, 0x46, m.size, other.handle)
                m.block.finish(other, cuglue.Access.READ if access == "read" else cuglue.Access.WRITE)
            assert (buffer.get() == 0x46).all()
    assert ways == [True, False, True, False]


def test_leaving_waits_for_the_current_stream(driver: SimDriver, buffer: BufferSubject, ways: Ways) -> None:
    stream = driver.Stream()
    m = buffer.handle.map_mut()
    with driver.current_stream(stream):
        driver.stream_wait_event(stream.ptr, m.stream.record().handle)
        latch = Latch(cuglue.as_stream(stream))
        driver.fill_async(m.device_ptr, 0x47, m.size, stream.ptr)
        latch.release()
        m.release()
    assert (buffer.get() == 0x47).all()
    assert ways == [True, False]


def test_leaving_on_another_stream(driver: SimDriver, buffer: BufferSubject, ways: Ways) -> None:
    other = driver.Stream()
    m = buffer.handle.map_mut()
    poke(m, np.full(m.size, 5, np.uint8))
    with trace(only={"graphics_unmap"}) as calls:
        m.release(other)
    assert calls[0].args[1] == other.ptr
    assert (buffer.get() == 5).all()
    with buffer.handle.map() as m:  # its own stream did not have the object last
        assert (peek(m) == 5).all()
    assert ways == [True, False]


def test_leaving_joins_the_context_after_a_reader_that_named_no_stream(
    driver: SimDriver, buffer: BufferSubject, monkeypatch: pytest.MonkeyPatch, ways: Ways
) -> None:
    with buffer.handle.map_mut() as m:
        m.note_cai_reader()  # nobody is loaded that would not name its stream
    monkeypatch.setitem(sys.modules, "torch", object())
    with trace(only={"context_record"}) as joins:
        with buffer.handle.map_mut() as m:
            m.note_cai_reader()
            other = driver.stream_create(0)
            driver.fill_async(m.device_ptr, 0x46, m.size, other)
        assert len(joins) == 1
    assert (buffer.get() == 0x46).all()
    driver.stream_destroy(other)
    assert ways == [True, True, True, False]


def test_closing_while_a_map_is_live_ends_with_the_map(
    driver: SimDriver, context: GlContext, ways: Ways
) -> None:
    name = make_buffer(64)
    handle = cuglue.register_buffer(name)
    map_before(handle)
    m = handle.map()
    handle.close()
    with trace(only={"graphics_unregister"}) as calls:
        m.release()
    assert len(calls) == 1
    assert not ways[-1]
    GL.glDeleteBuffers(1, [name])


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_arrays_that_are_alive_are_told_of(
    driver: SimDriver,
    buffers: list[BufferSubject],
    monkeypatch: pytest.MonkeyPatch,
    ways: Ways,
    together: bool,
    strict: bool,
) -> None:
    """And what was dropped is not."""
    monkeypatch.setenv("CUGLUE_STRICT", str(int(strict)))
    one = buffers[0].handle
    for keep in (False, True):
        left = cuglue.map_all(handles(buffers)) if together else one.map()
        m: CudaMap = left[0] if isinstance(left, list) else left
        array = np.asarray(m)
        if not keep:
            del array
            left.release()
        elif strict:
            with pytest.raises(BusyError, match=r"test_plan\.py"):
                left.release()
        else:
            with pytest.warns(DanglingExportWarning, match=r"test_plan\.py"):
                left.release()
        assert not one.mapped
    assert ways == [True] * 4


# --- what fails -------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Handles, and their maps if they are mapped."""

    driver: Any
    handles: list[Any]
    maps: Any = None

    def map(self) -> Any:
        return (
            cuglue.map_all(self.handles, mutable=True) if len(self.handles) > 1 else self.handles[0].map_mut()
        )

    def close(self) -> None:
        for handle in self.handles:
            handle.close()


@pytest.fixture(scope="module")
def names() -> Iterator[list[int]]:
    """Names of buffers in a context of their own: one for all runs of a sweep."""
    with headless():
        yield [make_buffer(64 + n) for n in range(3)]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("loaded", [False, True], ids=["", "joined"])
@pytest.mark.parametrize("operation", ["map", "leave"])
def test_nothing_is_lost_when_a_call_fails(
    names: list[int], monkeypatch: pytest.MonkeyPatch, operation: str, loaded: bool, count: int
) -> None:
    if loaded:
        monkeypatch.setitem(sys.modules, "torch", object())

    def setup(driver: Any) -> Held:
        made = Held(driver, [cuglue.register_buffer(name) for name in names[:count]])
        map_before(*made.handles)
        return made._replace(maps=made.map()) if operation == "leave" else made

    def check(subject: Held, result: Any) -> None:
        assert all(handle.mapped == (operation == "map") for handle in subject.handles)

    def teardown(subject: Held, result: Any) -> None:
        if operation == "map":
            result.release()
        assert not any(handle.mapped for handle in subject.handles)
        subject.close()

    sweep(
        Held.map if operation == "map" else lambda subject: subject.maps.release(),
        setup=setup,
        check=check,
        teardown=teardown,
        accounting=lambda subject: [handle.mapped for handle in subject.handles],
        keeps=("events",),
        name=f"{operation} of {count} again",
    ).check()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["graphics_map", "graphics_pointer", "graphics_unmap"])
def test_an_interrupt_in_a_call_of_the_driver(
    driver: SimDriver,
    buffers: list[BufferSubject],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    done: bool,
    count: int,
) -> None:
    """Nobody knows then whether the driver has done it."""
    held = Held(driver, handles(buffers)[:count])
    map_before(*held.handles)
    call = getattr(driver, method)

    def interrupted(*args: Any) -> None:
        monkeypatch.undo()
        if done:
            call(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, method, interrupted)
    with pytest.raises(KeyboardInterrupt), held.map():
        pass
    assert all(works(subject) for subject in buffers)


def test_a_failure_says_what_is_known_where_it_happened(buffer: BufferSubject) -> None:
    for method in ("graphics_map", "graphics_pointer"):
        with fail(method), pytest.raises(DriverError) as caught:
            buffer.handle.map()
        assert "context" in caught.value.findings
    m = buffer.handle.map()
    with fail("graphics_unmap"), pytest.raises(DriverError) as caught:
        m.release()
    assert "context" in caught.value.findings
    assert "could not be left yet" in repr(m)
    m.release()
    assert works(buffer)


# --- groups -----------------------------------------------------------------------------------------------------


def test_other_handles_than_last_time(driver: SimDriver, buffers: list[BufferSubject], ways: Ways) -> None:
    """Some of them, in another order, one twice, more, and others."""
    one, two, three, four = handles(buffers)
    with registered_buffer(driver) as more:
        for chosen in (
            [one, two],
            [one, three, two, four],
            [one, two, two, four],
            [one, two, three, four, more.handle],
            [one, two, three, more.handle],
        ):
            ways.clear()
            with cuglue.map_all(chosen) as maps:
                assert [m.handle for m in maps] == chosen
                assert [m.size for m in maps] == [handle.size for handle in chosen]
            assert not any(ways), chosen
        with cuglue.map_all([one, two, three, more.handle]):
            pass
        assert any(ways)
    assert all(works(subject) for subject in buffers)


@pytest.mark.parametrize("which", [0, 2])
def test_one_of_them_closed(buffers: list[BufferSubject], which: int) -> None:
    buffers[which].handle.close()
    with pytest.raises(ClosedError):
        cuglue.map_all(handles(buffers))
    assert all(works(subject) for subject in buffers if not subject.handle.closed)


def test_one_of_them_mapped_already(buffers: list[BufferSubject], ways: Ways) -> None:
    with buffers[1].handle.map() as m:
        with cuglue.map_all(handles(buffers)) as maps:
            assert maps[1].device_ptr == m.device_ptr
        assert (peek(m) >= 0).all()
    assert ways == [True, False, False]  # its memory has another reader then
    assert all(works(subject) for subject in buffers)


@pytest.mark.parametrize("which", [0, 2])
def test_one_of_them_left_early(buffers: list[BufferSubject], ways: Ways, which: int) -> None:
    with trace(only=CALLS) as calls, cuglue.map_all(handles(buffers)) as maps:
        maps[which].release()
        assert not buffers[which].handle.mapped
    assert [len(c.args[0]) for c in calls] == [4, 1, 3]
    assert ways == [True, False]


def test_one_of_them_mapped_elsewhere_meanwhile(buffers: list[BufferSubject], ways: Ways) -> None:
    """It stays mapped when the others are left."""
    with cuglue.map_all(handles(buffers)):
        m = buffers[0].handle.map()
    assert buffers[0].handle.mapped
    assert not buffers[1].handle.mapped
    m.release()
    assert all(works(subject) for subject in buffers)


def test_a_list_that_is_released_twice(buffers: list[BufferSubject]) -> None:
    with trace(only=CALLS) as calls:
        maps = cuglue.map_all(handles(buffers))
        maps.release()
        maps.release()
        assert [c.method for c in calls] == ["graphics_map", "graphics_unmap"]
        maps = cuglue.map_all(handles(buffers))
        with fail("graphics_unmap"), pytest.raises(DriverError):
            maps.release()
        assert all(subject.handle.mapped for subject in buffers)
        maps.release()
    assert not any(subject.handle.mapped for subject in buffers)


def test_plans_keep_nothing_alive(driver: SimDriver, context: GlContext) -> None:
    """A handle that is dropped is reported at once, with what it registered."""
    with registered_buffer(driver) as first:
        name = make_buffer(64)
        handle = cuglue.register_buffer(name)
        map_before(first.handle, handle)
        with pytest.warns(ResourceWarning, match="never closed"):
            del handle
        context.ops.call(int)
        assert works(first)
    assert device_state(driver, 0).retire is not None
    GL.glDeleteBuffers(1, [name])
