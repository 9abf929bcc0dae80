"""Maps on the simulated device, whose oracle sees every access that nothing orders (contracts A15, A18)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from graphics.shared_memory import external_memory
from graphics.subjects import ImageSubject, registered_buffer, registered_texture

import cuglue
from cuglue.core.stream import as_stream
from cuglue.driver.protocol import PER_THREAD_STREAM, CaptureMode, CopyKind, MemoryType
from cuglue.driver.sim import HazardError, SimDriver
from cuglue.errors import CaptureError, StreamMisuse
from cuglue.graphics import users
from cuglue.graphics.glcontext import GlContext
from cuglue.graphics.mapping import CudaMap
from cuglue.graphics.transfer import take
from cuglue.testing import Latch, trace
from cuglue.testing.handle_suite import new_stream, peek, poke

pytestmark = [pytest.mark.gl, pytest.mark.usefixtures("way")]

WAITS = {"stream_wait_event", "context_wait"}
BOTH = pytest.mark.parametrize("registered", [registered_buffer, registered_texture])


@pytest.fixture
def others_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library is loaded that reads the CUDA array interface and names no stream."""
    monkeypatch.setitem(sys.modules, "torch", object())


# --- entering -------------------------------------------------------------------------------------------------


def test_no_stream_is_the_current_one(driver: SimDriver, context: GlContext) -> None:
    """Asked once, when the map is made."""
    with registered_texture(driver) as subject:
        stream = driver.Stream()
        with driver.current_stream(stream):
            m = subject.handle.map()
        assert m.stream.owner is stream
        m.release()


def test_one_stream_needs_no_event(driver: SimDriver, context: GlContext) -> None:
    with registered_texture(driver) as subject, trace() as calls:
        for _ in range(3):
            with subject.handle.map():
                pass
            with subject.handle.map_mut():
                pass
        assert {c.method for c in calls} & {*WAITS, "event_record", "context_record"} == set()


def test_the_calls_of_a_map(driver: SimDriver, context: GlContext) -> None:
    """And nothing else that queues work."""
    queued = {
        "graphics_map",
        "copy_from_array_async",
        "copy_to_array_async",
        "graphics_unmap",
        "stream_synchronize",
    }
    with registered_texture(driver) as subject, trace(only=queued) as calls:
        with subject.handle.map():
            pass
        assert [c.method for c in calls] == ["graphics_map", "copy_from_array_async", "graphics_unmap"]
        calls.clear()
        with subject.handle.map_mut():
            pass
        assert [c.method for c in calls] == [
            "graphics_map",
            "copy_from_array_async",
            "copy_to_array_async",
            "graphics_unmap",
        ]
        calls.clear()
        with subject.handle.map_mut(overwrite=True):
            pass
        assert [c.method for c in calls] == ["graphics_map", "copy_to_array_async", "graphics_unmap"]


def test_all_streams_are_ordered_after_the_map_where_a_reader_may_name_none(
    driver: SimDriver, context: GlContext, others_loaded: None
) -> None:
    with registered_texture(driver) as subject, trace(only={"context_wait"}) as calls:
        with subject.handle.map() as m:
            assert len(calls) == 1
            assert m.cai_stream() is None
            driver.copy_async(  # on a stream that nobody told us of
                np.empty(m.size, "u1").ctypes.data,
                m.device_ptr,
                m.size,
                CopyKind.D2H,
                (other := driver.stream_create(0)),
            )
            driver.stream_synchronize(other)
            m.record(other)
        with subject.handle.map(join=False) as m:
            assert len(calls) == 1
            assert m.cai_stream() is None  # the current stream is the map's own
            with driver.current_stream(driver.Stream()):
                assert m.cai_stream() == 1  # the legacy stream by the name that the interface allows
        driver.stream_destroy(other)


def test_nobody_else_loaded_costs_nothing(driver: SimDriver, context: GlContext) -> None:
    assert not users.unannounced_readers()
    with registered_texture(driver) as subject, trace(only=WAITS) as calls, subject.handle.map() as m:
        assert calls == []
        assert m.cai_stream() is None


def test_a_stream_of_another_device_is_refused(context: GlContext) -> None:
    with cuglue.use_driver(SimDriver(devices=2)) as driver, registered_texture(driver) as subject:
        assert isinstance(driver, SimDriver)
        with pytest.raises(StreamMisuse):
            subject.handle.map(driver.Stream(1))
        assert driver.inventory()["mapped"] == 0


# --- leaving --------------------------------------------------------------------------------------------------


@BOTH
def test_A15_leaving_is_ordered_after_the_current_stream(
    driver: SimDriver, context: GlContext, registered: Any
) -> None:
    """Where plain array code ran, if it was switched inside the ``with``."""
    with registered(driver) as subject:
        mine = driver.Stream()
        with driver.current_stream(mine):
            with subject.handle.map_mut(0) as m:
                driver.stream_synchronize(0)
                driver.fill_async(m.device_ptr, 0x44, m.size, mine.ptr)
        assert (subject.get() == 0x44).all()


@BOTH
def test_A15_row_76_leaving_waits_for_consumers_that_were_announced(
    driver: SimDriver, context: GlContext, registered: Any
) -> None:
    """As an export announces them."""
    with registered(driver) as subject, new_stream(subject) as consumer:
        with subject.handle.map_mut() as m:
            m.order_consumer(consumer)
            m.note_consumer(consumer)
            driver.fill_async(m.device_ptr, 0x45, m.size, consumer.handle)
        assert (subject.get() == 0x45).all()


@BOTH
def test_A15_two_consumers_and_what_they_queue_after_they_were_announced(
    driver: SimDriver, context: GlContext, registered: Any
) -> None:
    with registered(driver) as subject, new_stream(subject) as one, new_stream(subject) as two:
        with subject.handle.map_mut() as m:
            half = m.size // 2
            for consumer in (one, two):
                m.order_consumer(consumer)
                m.note_consumer(consumer)
            driver.fill_async(m.device_ptr, 1, half, one.handle)
            driver.fill_async(m.device_ptr + half, 2, m.size - half, two.handle)
        assert (subject.get() == np.repeat([1, 2], [half, subject.handle.size - half])).all()


@BOTH
def test_what_nobody_announced_is_a_hazard(driver: SimDriver, context: GlContext, registered: Any) -> None:
    """The oracle would have seen the tests above fail."""
    with cuglue.use_driver(SimDriver()) as own, registered(own) as subject:
        assert isinstance(own, SimDriver)
        other = own.stream_create(0)
        m = subject.handle.map_mut()
        m.stream.synchronize()
        own.fill_async(m.device_ptr, 1, m.size, other)
        m.release()
        with pytest.raises(HazardError):
            own.device_synchronize(0)


def test_A15_leaving_joins_the_context_after_an_unannounced_reader(
    driver: SimDriver, context: GlContext, others_loaded: None
) -> None:
    """Who read the CUDA array interface, and where, nobody knows."""
    with registered_texture(driver) as subject, trace(only={"context_record"}) as joins:
        with subject.handle.map_mut() as m:
            m.note_cai_reader()
            driver.fill_async(m.device_ptr, 0x46, m.size, other := driver.stream_create(0))
            joins.clear()
        assert len(joins) == 1
        assert (subject.get() == 0x46).all()
        driver.stream_destroy(other)


def test_a_reader_that_names_its_stream_costs_no_join(driver: SimDriver, context: GlContext) -> None:
    with registered_texture(driver) as subject, trace(only={"context_record"}) as joins:
        with subject.handle.map_mut() as m:
            m.note_cai_reader()
        assert joins == []


def test_A15_a_read_map_of_an_image_does_not_hold_the_image_for_its_readers(
    driver: SimDriver, context: GlContext
) -> None:
    """They read a copy: OpenGL draws on while they do, and the next copy waits for them."""
    with registered_texture(driver) as subject, new_stream(subject) as reader:
        expected = np.full(subject.handle.size, 1, np.uint8)
        subject.put(expected)
        kept = np.zeros_like(expected)
        with subject.handle.map() as m:
            m.order_consumer(reader)
            latch = Latch(reader)
            driver.copy_async(kept.ctypes.data, m.device_ptr, m.size, CopyKind.D2H, reader.handle)
            m.note_consumer(reader)
        subject.put(expected + 1)  # the map was left though the reader is held
        second = subject.handle.map()
        assert latch.held
        latch.close()
        assert (peek(second) == 2).all()
        second.release()
        reader.synchronize()
        assert (kept == 1).all()


def test_leaving_on_another_stream(driver: SimDriver, context: GlContext) -> None:
    with registered_texture(driver) as subject, new_stream(subject) as other:
        m = subject.handle.map_mut()
        poke(m, np.full(m.size, 8, np.uint8))
        with trace(only={"copy_to_array_async", "graphics_unmap"}) as calls:
            m.release(other.owner)
        assert {call.args[-1] for call in calls} == {other.handle}
        assert (subject.get() == 8).all()


def test_a_stream_known_by_its_number_alone_is_not_used_for_leaving(
    driver: SimDriver, context: GlContext
) -> None:
    """It may be gone by then, and its number somebody else's."""
    with registered_texture(driver) as subject:
        number = driver.stream_create(0)
        m = subject.handle.map_mut(number)
        driver.fill_async(m.device_ptr, 0x47, m.size, number)
        driver.stream_synchronize(number)
        driver.stream_destroy(number)
        m.release()
        assert (subject.get() == 0x47).all()


def test_a_consumer_that_died(driver: SimDriver, context: GlContext) -> None:
    """The record keeps the stream's owner, and with it the stream."""
    with registered_texture(driver) as subject:
        with subject.handle.map_mut() as m:
            stream = driver.Stream()
            m.record(stream)
            stream_handle = stream.ptr
            driver.stream_wait_event(stream_handle, m.stream.record().handle)
            driver.fill_async(m.device_ptr, 0x48, m.size, stream_handle)
            del stream
        assert (subject.get() == 0x48).all()


@pytest.mark.parametrize("several", [False, True])
@BOTH
def test_while_somebody_captures_readers_are_told_the_stream(
    driver: SimDriver, context: GlContext, monkeypatch: pytest.MonkeyPatch, registered: Any, several: bool
) -> None:
    """All streams of the device cannot wait then; the map was refused."""
    monkeypatch.setitem(sys.modules, "numba", object())
    with registered(driver) as subject, new_stream(subject) as own, new_stream(subject) as capturing:

        def mapped() -> CudaMap:
            if not several:
                return subject.handle.map(own.owner)
            (m,) = cuglue.map_all([subject.handle], own.owner)
            return m

        for _ in range(3):  # also on the way that a buffer goes when it is mapped again
            driver.capture_begin(capturing.handle, CaptureMode.RELAXED)
            with trace(only={"context_wait"}) as calls, mapped() as m:
                assert calls == []
                assert not m.everybody
                assert m.cai_stream() == own.handle
            driver.graph_destroy(driver.capture_end(capturing.handle))
            with mapped() as m:
                assert m.everybody
                assert m.cai_stream() is None


@BOTH
def test_leaving_is_refused_while_a_consumer_captures(
    driver: SimDriver, context: GlContext, registered: Any
) -> None:
    """The map stays, and can be left after the capture."""
    with registered(driver) as subject, new_stream(subject) as consumer:
        m = subject.handle.map_mut()
        m.record(consumer.owner)
        driver.capture_begin(consumer.handle, CaptureMode.RELAXED)
        with pytest.raises(CaptureError):
            m.release()
        assert not m.released
        driver.graph_destroy(driver.capture_end(consumer.handle))
        m.release()
        assert m.released


@BOTH
def test_leaving_is_refused_on_a_stream_that_captures(
    driver: SimDriver, context: GlContext, registered: Any
) -> None:
    """Before the driver is called: the capture goes on, and holds nothing of ours."""
    with registered(driver) as subject, new_stream(subject) as stream:
        m = subject.handle.map_mut(stream.owner)
        driver.capture_begin(stream.handle, CaptureMode.RELAXED)
        with trace() as calls, pytest.raises(CaptureError):
            m.release()
        assert {c.method for c in calls} <= {"capture_status", "stream_current"}
        driver.graph_destroy(driver.capture_end(stream.handle))
        m.release()


def test_leaving_is_refused_where_nothing_but_the_hand_over_would_be_queued(
    driver: Any, context: GlContext
) -> None:
    """No consumer is waited for, which would be refused anyhow: the driver itself would end the capture."""
    stream = driver.Stream()
    with stream, registered_buffer(driver) as subject:
        m = subject.handle.map()
        driver.capture_begin(stream.ptr, CaptureMode.RELAXED)
        with trace(only={"graphics_unmap"}) as calls, pytest.raises(CaptureError):
            m.release()
        assert calls == []
        driver.graph_destroy(driver.capture_end(stream.ptr))
        m.release()


def test_A18_the_second_of_two_maps_waits_for_what_opened_the_first(
    driver: SimDriver, context: GlContext
) -> None:
    with registered_texture(driver) as subject, new_stream(subject) as one, new_stream(subject) as two:
        subject.put(np.full(subject.handle.size, 3, np.uint8))
        first = subject.handle.map(one.owner)
        second = subject.handle.map(two.owner)
        kept = np.zeros(second.size, np.uint8)
        driver.copy_async(kept.ctypes.data, second.device_ptr, second.size, CopyKind.D2H, two.handle)
        first.release()
        second.release()
        two.synchronize()
        assert (kept == 3).all()


def test_a_level_held_while_another_is_written(driver: SimDriver, context: GlContext) -> None:
    """The image itself is handed back once, after both."""
    from graphics.subjects import make_texture

    name = make_texture(16, 8, levels=2)
    with cuglue.register_texture(name) as handle, trace(only={"graphics_map", "graphics_unmap"}) as calls:
        with handle.map(driver.Stream()), handle.map_mut(driver.Stream(), level=1):
            pass
        assert [c.method for c in calls] == ["graphics_map", "graphics_unmap"]


@pytest.fixture(params=range(20))
def seeded(request: pytest.FixtureRequest, context: GlContext) -> Iterator[ImageSubject]:
    with cuglue.use_driver(SimDriver(seed=request.param)) as driver, registered_texture(driver) as subject:
        yield subject
        assert isinstance(driver, SimDriver)
        driver.device_synchronize(0)
        assert driver.hazards == []


def test_random_programs(seeded: ImageSubject) -> None:
    """Maps of both kinds on three streams, with consumers on the others, checked against what they must have seen."""
    subject, driver = seeded, seeded.driver
    assert isinstance(driver, SimDriver)
    rng = np.random.default_rng(driver.seed)
    streams = [driver.Stream() for _ in range(3)]
    value = 1
    subject.put(np.full(subject.handle.size, value, np.uint8))
    seen: list[tuple[int, np.ndarray[Any, Any]]] = []
    for _ in range(40):
        where, other = (streams[i] for i in rng.choice(3, 2, replace=False))
        with driver.current_stream(streams[rng.integers(3)]):
            if rng.random() < 0.5:
                with subject.handle.map_mut(where, overwrite=bool(rng.random() < 0.5)) as m:
                    value = int(rng.integers(1, 255))
                    consumer = cuglue.as_stream(other)
                    m.order_consumer(consumer)
                    m.note_consumer(consumer)
                    driver.fill_async(m.device_ptr, value, m.size, other.ptr)
            else:
                with subject.handle.map(where) as m:
                    out = np.zeros(m.size, np.uint8)
                    consumer = cuglue.as_stream(other)
                    m.order_consumer(consumer)
                    driver.copy_async(out.ctypes.data, m.device_ptr, m.size, CopyKind.D2H, other.ptr)
                    m.record(other)
                    seen.append((value, out))
    driver.device_synchronize(0)
    for expected, out in seen:
        assert (out == expected).all()
    assert (subject.get() == value).all()


def test_work_on_the_stream_of_a_read_comes_after_its_copy(driver: Any) -> None:
    """The copy runs on the array library's current stream; leaving the map of an image would not wait for it."""
    stream, current = driver.Stream(), driver.Stream()
    m: Any = SimpleNamespace(
        memory_type=MemoryType.DEVICE,
        cupy=lambda: np.arange(3),
        stream=as_stream(stream),
        device=0,
        driver=driver,
    )
    with current, trace(only={"event_record", "stream_wait_event"}) as calls:
        assert take(m, flip=False).tolist() == [0, 1, 2]
    assert [c.args[0 if c.method == "stream_wait_event" else 1] for c in calls] == [current.ptr, stream.ptr]


def test_one_object_means_each_threads_default_stream(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy has one object for the per-thread default stream: on another thread it is another stream."""
    everyones = SimpleNamespace(ptr=PER_THREAD_STREAM, device_id=0)
    monkeypatch.setattr(driver, "stream_current", lambda device: everyones)
    with external_memory(driver) as subject, subject.handle.map() as m:
        assert m.current_stream() is m.stream
        with ThreadPoolExecutor(1) as other:
            there = other.submit(m.current_stream).result(20)
            again = other.submit(subject.handle._stream, everyones).result(20)
        assert there is not m.stream
        assert again is there
        assert there.thread is not m.stream.thread
