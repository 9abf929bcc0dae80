"""DLPack exports of a map that one consumer asks for again: a few calls, and the general way wherever that is not so.

The memory is the simulated device's, exported as if it were a GPU's; in place of ``cuda.core``'s views, which need a
driver, stand some that are their own capsules.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from graphics.subjects import BufferSubject, registered_buffer, registered_texture
from interrupts import interrupted

import cuglue
from cuglue.core.device import device_state
from cuglue.driver.protocol import CaptureMode, MemoryType
from cuglue.driver.sim import SimDriver
from cuglue.errors import BusyError, CaptureError, ClosedError, DriverError
from cuglue.exchange import capsule
from cuglue.graphics import users
from cuglue.graphics.glcontext import GlContext
from cuglue.graphics.mapping import CudaMap
from cuglue.testing import Latch, trace
from cuglue.testing.faults import fail

pytestmark = pytest.mark.gl

V1 = (1, 0)
QUEUED = {"event_record", "stream_wait_event", "context_record", "context_wait", "stream_synchronize"}
Ways = list[bool]


class Capsule:
    """A view that is its own capsule."""

    keep: object = None
    version: object = None

    def __init__(self, *what: Any) -> None:
        self.what = what

    def view(self, dtype: object) -> Capsule:
        return Capsule(*self.what)

    def __dlpack__(self, max_version: object = None) -> Capsule:
        self.version = max_version
        return self


@pytest.fixture(autouse=True)
def _device_memory(driver: SimDriver, context: GlContext, monkeypatch: pytest.MonkeyPatch) -> None:
    state = device_state(driver, 0)
    monkeypatch.setattr(state, "capabilities", replace(state.capabilities, device_type=MemoryType.DEVICE))
    makers = (lambda ptr, nbytes: ptr), (lambda ptr, is_readonly, **more: Capsule(ptr, is_readonly))
    monkeypatch.setattr(capsule, "_makers", lambda: makers)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Whether each export for which it was tried went the short way."""
    found: Ways = []
    real = users.export_again

    def trying(*args: Any) -> Any:
        made = real(*args)
        found.append(made is not None)
        return made

    monkeypatch.setattr(users, "export_again", trying)
    return found


@pytest.fixture
def m(driver: SimDriver) -> Iterator[CudaMap]:
    """A map on a stream of its own, of memory that was exported before."""
    with registered_buffer(driver) as subject, exported_map(subject, driver.Stream()) as found:
        yield found


def exported_map(subject: BufferSubject, stream: Any) -> CudaMap:
    """A map for writing that an export was made from already, for nobody."""
    m = subject.handle.map_mut(stream)
    m.__dlpack__(stream=-1)
    return m


# --- where all is as it was ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["its own", "the default", "another"])
def test_both_ways_order_note_and_count_the_same(driver: SimDriver, ways: Ways, whose: str) -> None:
    both: list[list[Any]] = []
    another = driver.Stream()
    for asked in ({"dl_device": (2, 0)}, {}):  # a device is not even tried the short way
        found: list[Any] = []
        with registered_buffer(driver) as subject, exported_map(subject, driver.Stream()) as m:
            ways.clear()
            handle = {"its own": m.stream.handle, "the default": 0, "another": another.ptr}[whose]
            for _ in range(3):
                with trace(only={"event_record", "stream_wait_event"}) as calls:
                    made = m.__dlpack__(stream=handle or 1, max_version=V1, **asked)
                found += [(c.method, handle in c.args, m.stream.handle in c.args) for c in calls]
                found.append((made.what == (m.device_ptr, False), made.version, made.keep.owner is m))
                found.append([export.how for export in m.ledger.live()])
                found.append([user.handle == handle for user in m.consumers])
                last = m.block.write_stream
                found.append((last.handle == handle, m.block.write_seq == last.seq, m.block.reads))
                del made
            assert m.ledger.live() == ()
        both.append(found)
    assert both[0] == both[1]
    assert ways == [True] * 3


def test_it_is_few_calls(m: CudaMap) -> None:
    """Of functions in Python, ours: they were near fifty."""
    made: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "/cuglue/" in file and "/driver/" not in file:
            made.append(frame.f_code.co_qualname)

    for number, most in ((m.stream.handle, 16), (1, 24)):
        m.__dlpack__(stream=number, max_version=V1)
        sys.setprofile(look)
        try:
            m.__dlpack__(stream=number, max_version=V1)
        finally:
            sys.setprofile(None)
        assert 5 < len(made) <= most, made
        made.clear()


@pytest.mark.parametrize(("asked", "given"), [(None, None), ((0, 8), None), (V1, (1, 3)), ((2, 0), (1, 3))])
def test_the_version_is_negotiated(m: CudaMap, ways: Ways, asked: Any, given: Any) -> None:
    assert m.__dlpack__(stream=1, max_version=asked).version == given
    assert ways == [True]


def test_one_event_and_one_wait_each_time_and_no_question_twice(driver: SimDriver, m: CudaMap) -> None:
    consumer = driver.Stream()
    m.stream.state.give_event(m.stream.state.take_event())  # one to spare
    for _ in range(3):
        with trace() as calls:
            m.__dlpack__(stream=consumer.ptr, max_version=V1)
        assert [c.method for c in calls] == ["capture_status"] * 2 + ["event_record", "stream_wait_event"]
    with trace() as calls:
        m.__dlpack__(stream=1, max_version=V1)  # a second consumer: the general way
    assert len([c for c in calls if c.method == "stream_wait_event"]) == 2


def test_the_token_names_the_line_that_asked(m: CudaMap) -> None:
    made = m.__dlpack__(stream=1, max_version=V1)
    (export,) = m.ledger.live()
    assert export.filename == __file__
    line = sys._getframe().f_lineno - 3
    assert export.line == line
    del made


# --- order --------------------------------------------------------------------------------------------------------


def test_the_consumer_waits_for_what_nobody_counted(driver: SimDriver, m: CudaMap, ways: Ways) -> None:
    """Each time anew: array libraries queue work on the map's stream, and say so to nobody."""
    consumer = cuglue.as_stream(driver.Stream())
    for value in (1, 2, 3):
        with Latch(m.stream):
            driver.fill_async(m.device_ptr, value, m.size, m.stream.handle)
            m.__dlpack__(stream=consumer.handle, max_version=V1)
            driver.fill_async(m.device_ptr, 7, m.size, consumer.handle)
            assert not consumer.query()
        m.stream.join(consumer)
    assert ways == [True] * 3


def test_whoever_comes_next_waits_for_the_consumer(driver: SimDriver, m: CudaMap, ways: Ways) -> None:
    """Also after it waited for all that the consumer had got before."""
    consumer, other = (cuglue.as_stream(driver.Stream()) for _ in range(2))
    for value in (1, 2):
        m.__dlpack__(stream=consumer.handle, max_version=V1)
        driver.fill_async(m.device_ptr, value, m.size, consumer.handle)
        assert m.block.prepare(other, cuglue.Access.READ) == 1
    assert ways == [True, True]


def test_what_others_read_is_waited_for(driver: SimDriver, m: CudaMap, ways: Ways) -> None:
    reader, consumer = (cuglue.as_stream(driver.Stream()) for _ in range(2))
    m.block.prepare(reader, cuglue.Access.READ)
    m.stream.synchronize()
    with Latch(reader):
        m.block.finish(reader, cuglue.Access.READ)
        m.__dlpack__(stream=consumer.handle, max_version=V1)
        m.stream.synchronize()
        assert not consumer.query()
    assert ways == [True]


def test_leaving_waits_for_the_consumer(driver: SimDriver) -> None:
    """On the map's own stream and on another: the object is given back after what was queued there."""
    for own in (True, False):
        with registered_buffer(driver) as subject:
            with exported_map(subject, driver.Stream()) as m:
                consumer = m.stream if own else cuglue.as_stream(driver.Stream())
                m.__dlpack__(stream=consumer.handle, max_version=V1)
                driver.fill_async(m.device_ptr, 9, m.size, consumer.handle)
            assert (subject.get() == 9).all()


def test_another_consumer_is_waited_for(driver: SimDriver, m: CudaMap, ways: Ways) -> None:
    one, two = (cuglue.as_stream(driver.Stream()) for _ in range(2))
    for value, consumer in enumerate((one, two, one, m.stream, two)):
        m.__dlpack__(stream=consumer.handle, max_version=V1)
        driver.fill_async(m.device_ptr, value, m.size, consumer.handle)
    assert ways == [True] + [False] * 4


def test_a_stream_known_by_its_number_alone_is_not_recorded(driver: SimDriver, ways: Ways) -> None:
    """The map's own may be gone: the whole device stands for it."""
    kept = driver.Stream()
    with registered_buffer(driver) as subject, exported_map(subject, kept.ptr) as m:
        assert not m.stream.nameable()
        with trace(only={"event_record"}) as calls:
            m.__dlpack__(stream=1, max_version=V1)
        assert calls == []
    assert ways[-1] is False


# --- where something is not as it was -----------------------------------------------------------------------------


def test_other_memory_goes_the_general_way(driver: SimDriver, ways: Ways) -> None:
    with registered_buffer(driver) as subject:
        with subject.handle.map() as m:
            m.__dlpack__(stream=1, max_version=V1)
            m.__dlpack__(stream=1, max_version=V1)
        with subject.handle.map(readonly=True) as m:
            assert m.__dlpack__(stream=1, max_version=V1).what == (m.device_ptr, True)
            with pytest.raises(BufferError, match="read-only"):
                m.__dlpack__(stream=1)
            m.__dlpack__(stream=1, max_version=V1)
    assert ways == [False, True] + [False] * 3


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"stream": 0}, ValueError),
        ({"stream": -2}, ValueError),
        ({"stream": True}, TypeError),
        ({"stream": "1"}, TypeError),
        ({"stream": 1, "max_version": 1}, TypeError),
        ({"stream": 1, "max_version": (1.0, 0)}, TypeError),
        ({"stream": 1, "dl_device": (2, 1)}, BufferError),
        ({"stream": 1, "dl_device": (1, 0), "copy": False}, BufferError),
    ],
)
def test_wrong_requests_are_refused_and_nothing_is_queued(
    m: CudaMap, asked: Any, error: type[Exception]
) -> None:
    with trace(only=QUEUED) as calls, pytest.raises(error):
        m.__dlpack__(**asked)
    assert calls == []
    assert m.ledger.live() == ()
    assert m.consumers == (m.stream,)


def test_captures_are_refused(driver: SimDriver, m: CudaMap) -> None:
    consumer = cuglue.as_stream(driver.Stream())
    for capturing in (consumer, m.stream):
        driver.capture_begin(capturing.handle, CaptureMode.RELAXED)
        with trace(only=QUEUED) as calls, pytest.raises(CaptureError):
            m.__dlpack__(stream=consumer.handle, max_version=V1)
        assert calls == []
        driver.graph_destroy(driver.capture_end(capturing.handle))
    assert m.consumers == (m.stream,)


def test_a_capture_on_the_map_s_own_stream_gets_its_array(driver: SimDriver, m: CudaMap, ways: Ways) -> None:
    driver.capture_begin(m.stream.handle, CaptureMode.RELAXED)
    m.__dlpack__(stream=m.stream.handle, max_version=V1)
    driver.graph_destroy(driver.capture_end(m.stream.handle))
    assert ways == [True]


def test_a_map_that_was_left_exports_nothing(driver: SimDriver) -> None:
    with registered_buffer(driver) as subject:
        with exported_map(subject, driver.Stream()) as m:
            m.__dlpack__(stream=1, max_version=V1)
        with pytest.raises(ClosedError):
            m.__dlpack__(stream=1, max_version=V1)
        assert m.ledger.live() == ()


def test_exports_that_outlive_their_map_are_told(driver: SimDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUGLUE_STRICT", "1")
    with registered_buffer(driver) as subject:
        m = exported_map(subject, driver.Stream())
        held = m.__dlpack__(stream=1, max_version=V1)
        with pytest.raises(BusyError, match=r"DLPack at .*test_exports\.py"):
            m.release()
        assert held.keep.owner is m


def test_images_too(driver: SimDriver, ways: Ways) -> None:
    """Their copy is the same memory in each map; not where a map is in place, which has none."""
    with registered_texture(driver) as subject:
        with subject.handle.map() as m:
            m.__dlpack__(stream=-1)
            made = m.__dlpack__(stream=1, max_version=V1)
            assert made.what == (m.device_ptr, False)
            address = m.device_ptr
        with subject.handle.map_mut() as m:
            assert m.device_ptr == address
            m.__dlpack__(stream=1, max_version=V1)
    assert ways == [False, True, True]


# --- faults and interrupts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["capture_status", "event_record", "stream_wait_event"])
def test_a_refused_call_exports_nothing(driver: SimDriver, m: CudaMap, method: str) -> None:
    consumer = driver.Stream()
    m.stream.state.give_event(m.stream.state.take_event())  # one to spare
    before = driver.inventory()
    with fail(method), pytest.raises(DriverError):
        m.__dlpack__(stream=consumer.ptr, max_version=V1)
    assert m.ledger.live() == ()
    assert m.consumers == (m.stream,)
    m.__dlpack__(stream=consumer.ptr, max_version=V1)
    assert driver.inventory() == before, "the event was given back"


def test_an_interrupt_leaves_no_export_without_a_holder(driver: SimDriver, m: CudaMap) -> None:
    consumer = cuglue.as_stream(driver.Stream())
    modules = (
        "graphics/exports.py",
        "graphics/users.py",
        "core/event.py",
        "exchange/tokens.py",
        "exchange/capsule.py",
    )
    step = 0
    where: str | None = ""
    while where is not None:
        step += 1
        where = interrupted(lambda: m.__dlpack__(stream=consumer.handle, max_version=V1), step, *modules)
        gc.collect()
        assert m.ledger.live() == (), where
        m.__dlpack__(stream=consumer.handle, max_version=V1)
        driver.fill_async(m.device_ptr, step % 256, m.size, consumer.handle)
    assert step > 10
