"""Handles whose owner brings the functions that map them (contracts A2, A3, A5), and where GL calls run."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from graphics.subjects import BufferSubject, make_buffer, make_texture, registered_texture

import cuglue
from cuglue.driver.protocol import CopyKind, Driver
from cuglue.errors import (
    ClosedError,
    LayoutError,
    MapUnavailableError,
    NoContextError,
    StreamMisuse,
    UsageError,
    WrongThreadError,
)
from cuglue.graphics import glcontext
from cuglue.graphics.glcontext import GlContext, headless
from cuglue.graphics.glops import GlOps
from cuglue.graphics.handle import CudaHandle
from cuglue.testing import trace
from cuglue.testing.handle_suite import HandleSuite, Subject, peek, poke

SIZE = 256


class CountingOps:
    """Maps memory of the driver's, and notes every call and its thread."""

    def __init__(self, driver: Driver, nbytes: int = SIZE) -> None:
        self.driver = driver
        self.nbytes = nbytes
        self.ptr = driver.malloc(max(nbytes, 1), 0)
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.answer: Callable[[], tuple[int, int] | None] = lambda: (self.ptr, self.nbytes)
        self.trouble: Exception | None = None

    def map(self, res: int) -> tuple[int, int] | None:
        self._note("map", res)
        return self.answer()

    def unmap(self, res: int) -> None:
        self._note("unmap", res)
        if self.trouble is not None:
            raise self.trouble

    def unregister(self, res: int) -> None:
        self._note("unregister", res)

    def _note(self, what: str, res: int) -> None:
        assert res == 0xC0DE
        self.calls.append(what)
        self.threads.add(threading.get_ident())

    def count(self) -> tuple[int, int, int]:
        return tuple(map(self.calls.count, ("map", "unmap", "unregister")))  # type: ignore[return-value]


@pytest.fixture
def ops(driver: Driver) -> Iterator[CountingOps]:
    made = CountingOps(driver)
    yield made
    driver.free(made.ptr, 0)


class TestForeignBuffer(HandleSuite):
    """The whole contract, with the owner's functions."""

    @pytest.fixture(autouse=True)
    def _driver(self, driver: Driver) -> None:
        self.driver = driver

    @contextmanager
    def make(self) -> Iterator[Subject]:
        ops = CountingOps(self.driver)
        with CudaHandle.from_gl(0xC0DE, SIZE, ops) as handle:
            yield OpsSubject(handle, self.driver, ops)
        assert ops.count()[2] == 1
        self.driver.free(ops.ptr, 0)


class OpsSubject:
    """What a foreign buffer holds, looked at past the code under test."""

    opaque = False

    def __init__(self, handle: CudaHandle, driver: Driver, ops: CountingOps) -> None:
        self.handle = handle
        self.driver = driver
        self._ops = ops

    def _bytes(self) -> np.ndarray[Any, Any]:
        self.driver.device_synchronize(0)
        return np.frombuffer(self.driver.host_view(self._ops.ptr, SIZE, True), np.uint8)

    def get(self) -> np.ndarray[Any, Any]:
        return self._bytes().copy()

    def put(self, data: np.ndarray[Any, Any]) -> None:
        self._bytes()[...] = data


# --- A2, A5: counts -------------------------------------------------------------------------------------------


def test_A2_making_a_handle_calls_nothing(driver: Driver, ops: CountingOps) -> None:
    with trace(without={"capabilities", "device_count"}) as calls:
        handle = CudaHandle.from_gl(0xC0DE, SIZE, ops)
    assert (calls, ops.calls) == ([], [])
    assert repr(handle) == f"CudaHandle(kind='GlBuffer', size={SIZE})"
    assert (handle.kind, handle.size, handle.shape, handle.dtype) == ("GlBuffer", SIZE, (SIZE,), np.uint8)
    assert (handle.format, handle.copy_path) == (None, None)
    handle.close()
    assert ops.calls == ["unregister"]


@pytest.mark.parametrize(("resource", "size"), [(0, 4), (0xC0DE, -1), ("x", 4)])
def test_A2_no_resource_or_a_negative_size(
    driver: Driver, ops: CountingOps, resource: Any, size: int
) -> None:
    with pytest.raises(LayoutError):
        CudaHandle.from_gl(resource, size, ops)
    with pytest.raises(ValueError):
        CudaHandle.from_gl(resource, size, ops)
    assert ops.calls == []


def test_A5_each_map_is_one_call_and_each_release_another(driver: Driver, ops: CountingOps) -> None:
    with CudaHandle.from_gl(0xC0DE, SIZE, ops) as handle:
        for number in range(1, 4):
            with handle.map() as m:
                assert ops.count() == (number, number - 1, 0)
                assert (m.device_ptr, len(m)) == (ops.ptr, SIZE)
            m.release()
            assert ops.count() == (number, number, 0)
    assert ops.count() == (3, 3, 1)


def test_A18_maps_share_one_call(driver: Driver, ops: CountingOps) -> None:
    with CudaHandle.from_gl(0xC0DE, SIZE, ops) as handle:
        first, second = handle.map(), handle.map_mut()
        assert ops.count() == (1, 0, 0)
        first.release()
        assert ops.count() == (1, 0, 0)
        assert second.device_ptr == ops.ptr
        second.release()
        assert ops.count() == (1, 1, 0)


def test_A2_the_mapped_length_is_what_ops_say(driver: Driver) -> None:
    ops = CountingOps(driver, 100)
    with CudaHandle.from_gl(0xC0DE, 64, ops) as handle, handle.map() as m:
        assert (len(m), m.shape, handle.size) == (100, (100,), 64)
    driver.free(ops.ptr, 0)


def test_A2_a_shorter_mapping_is_given_back(driver: Driver, ops: CountingOps) -> None:
    with CudaHandle.from_gl(0xC0DE, SIZE + 1, ops) as handle:
        with pytest.raises(LayoutError):
            handle.map()
        assert ops.count() == (1, 1, 0)


@pytest.mark.parametrize(
    "answer",
    [5, (1,), (4096, SIZE, 0), ("a", SIZE), (4096, 256.0), (True, SIZE), (-8, SIZE), (2**64, SIZE), "ab"],
)
def test_A2_what_is_no_mapping_is_refused_and_given_back(
    driver: Driver, ops: CountingOps, answer: Any
) -> None:
    ops.answer = lambda: answer
    with CudaHandle.from_gl(0xC0DE, SIZE, ops) as handle:
        with pytest.raises(UsageError, match=r"map\(\) of the ops .*expected \(address, bytes\)"):
            handle.map()
        assert ops.count() == (1, 1, 0)
        ops.answer = lambda: (ops.ptr, SIZE)
        with handle.map():
            pass


def test_A2_row_67_a_null_pointer_is_no_mapping(driver: Driver, ops: CountingOps) -> None:
    ops.answer = lambda: (0, SIZE)
    with CudaHandle.from_gl(0xC0DE, SIZE, ops) as handle:
        with pytest.raises(MapUnavailableError, match="null pointer"):
            handle.map()
        assert ops.count() == (1, 1, 0)


def test_A2_A6_a_buffer_of_nothing(driver: Driver, ops: CountingOps) -> None:
    ops.answer = lambda: (0, 0)
    with CudaHandle.from_gl(0xC0DE, 0, ops) as handle, handle.map() as m:
        assert (len(m), m.device_ptr) == (0, 0)
        assert m
        assert m.numpy().shape == (0,)


def test_A5_none_means_not_now(driver: Driver, ops: CountingOps) -> None:
    ops.answer = lambda: None
    with CudaHandle.from_gl(0xC0DE, SIZE, ops) as handle:
        with pytest.raises(MapUnavailableError) as caught:
            handle.map()
        assert vars(caught.value)["reason"] == "ops_failed"
        assert handle.try_map() is None
        assert handle.try_map_mut() is None
        assert ops.count() == (3, 0, 0)
        ops.answer = lambda: (ops.ptr, SIZE)
        with handle.map():
            pass


def test_A3_an_exception_in_ops_map_means_not_now(
    driver: Driver, ops: CountingOps, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> tuple[int, int]:
        raise RuntimeError("the window is gone")

    ops.answer = fail
    with CudaHandle.from_gl(0xC0DE, SIZE, ops) as handle:
        with pytest.raises(MapUnavailableError) as caught:
            handle.map()
        assert "the window is gone" in str(caught.value)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert ops.count() == (1, 0, 0)
    assert "the window is gone" in caplog.text


def test_A3_an_exception_in_ops_unmap_is_raised_by_release(driver: Driver, ops: CountingOps) -> None:
    with CudaHandle.from_gl(0xC0DE, SIZE, ops) as handle:
        m = handle.map()
        ops.trouble = RuntimeError("lost")
        with pytest.raises(RuntimeError, match="lost"):
            m.release()
        assert not m.released
        ops.trouble = None
        m.release()
        assert m.released


def test_maps_are_ordered_with_the_whole_device(driver: Driver, ops: CountingOps) -> None:
    """The owner's functions name no stream: the map waits for all of them, and all of them for the map's end."""
    with CudaHandle.from_gl(0xC0DE, SIZE, ops) as handle:
        other = driver.stream_create(0)
        driver.fill_async(ops.ptr, 3, SIZE, other)  # as ops.map might have queued it
        with handle.map() as m:
            assert (peek(m) == 3).all()
            driver.fill_async(m.device_ptr, 4, SIZE, m.stream.handle)
        driver.fill_async(ops.ptr, 5, SIZE, other)  # as ops.unmap might queue it
        driver.stream_synchronize(other)
        driver.stream_destroy(other)


def test_what_ops_do_after_a_map_comes_after_its_consumers(driver: Driver, ops: CountingOps) -> None:
    """Also after those on other streams: who unmaps, and where, nobody says."""
    with CudaHandle.from_gl(0xC0DE, SIZE, ops) as handle:
        consumer, third = driver.stream_create(0), driver.stream_create(0)
        with handle.map() as m:
            driver.stream_wait_event(consumer, m.stream.record().handle)
            driver.fill_async(m.device_ptr, 4, SIZE, consumer)
            m.record(consumer)
        driver.fill_async(ops.ptr, 5, SIZE, third)  # as ops.unmap might queue it
        for stream in (third, consumer):
            driver.stream_synchronize(stream)
            driver.stream_destroy(stream)


def test_a_second_map_comes_after_what_the_first_waited_for(driver: Any, ops: CountingOps) -> None:
    """Though the first map's stream has an older event, which covers less."""
    with CudaHandle.from_gl(0xC0DE, SIZE, ops) as handle:
        one, two = (cuglue.as_stream(driver.Stream()) for _ in range(2))
        two.wait_for(one, one.submit())
        driver.fill_async(ops.ptr, 3, SIZE, other := driver.stream_create(0))
        seen = np.zeros(SIZE, np.uint8)
        with handle.map(one.owner), handle.map(two.owner) as m:
            driver.copy_async(seen.ctypes.data, m.device_ptr, SIZE, CopyKind.D2H, two.handle)
        two.synchronize()
        assert (seen == 3).all()
        driver.stream_synchronize(other)
        driver.stream_destroy(other)


def test_A1_without_a_runtime_nothing_is_mapped(tmp_path: Any) -> None:
    """And nothing but that fails."""
    program = """
import cuglue
from cuglue.graphics.handle import CudaHandle
from cuglue.driver import registry
registry.is_cuda_available = lambda: False
calls = []
class Ops:
    def map(self, res): calls.append("map")
    def unmap(self, res): calls.append("unmap")
    def unregister(self, res): calls.append("unregister")
handle = CudaHandle.from_gl(7, 16, Ops())
try:
    handle.map()
except cuglue.errors.MapUnavailableError as error:
    print(error.reason)
print(handle.try_map(), handle.try_map_mut(), handle.size)
handle.close()
print(calls)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stderr == ""
    assert done.stdout.split("\n")[:3] == ["no_runtime", "None None 16", "['unregister']"]


# --- A3: the thread -------------------------------------------------------------------------------------------


@pytest.mark.gl
class TestOnAWorker(HandleSuite):
    """The contract, with the context on a thread of its own and every call made from this one."""

    @pytest.fixture(autouse=True)
    def _worker(self, driver: Driver) -> Iterator[None]:
        self.driver = driver
        with headless(thread="worker") as self.context:
            yield

    @contextmanager
    def make(self) -> Iterator[Subject]:
        ops = self.context.ops
        name = ops.call(make_buffer, 1000)
        with cuglue.register_buffer(name, ops=ops) as handle:
            yield RoutedSubject(handle, self.driver, name, ops)


class RoutedSubject:
    """A buffer whose context is elsewhere."""

    opaque = False

    def __init__(self, handle: CudaHandle, driver: Driver, name: int, ops: GlOps) -> None:
        self.handle = handle
        self.driver = driver
        self._buffer = BufferSubject(handle, driver, name)
        self._ops = ops

    def get(self) -> np.ndarray[Any, Any]:
        return self._ops.call(self._buffer.get)

    def put(self, data: np.ndarray[Any, Any]) -> None:
        self._ops.call(self._buffer.put, data)


@pytest.mark.gl
def test_A3_row_33_registering_mapping_and_closing_run_on_one_thread(driver: Driver) -> None:
    """Whoever calls: here four threads, of which none has the context."""
    seen: set[int] = set()
    methods = ("gl_register_image", "graphics_map", "graphics_array", "graphics_unmap", "graphics_unregister")
    for method in methods:
        spy_on(driver, method, seen)
    with headless(thread="worker") as context:
        texture = context.ops.call(make_texture, 8, 8)
        handle = elsewhere(lambda: cuglue.register_texture(texture, ops=context.ops))
        m = elsewhere(handle.map_mut)
        poke(m, np.full(m.size, 9, np.uint8))
        elsewhere(m.release)
        with handle.map() as again:
            assert (peek(again) == 9).all()
        elsewhere(handle.close)
        assert context.thread is not None
        assert seen == {context.thread.ident}


def spy_on(driver: Driver, method: str, seen: set[int]) -> None:
    original = getattr(driver, method)

    def call(*args: Any) -> Any:
        seen.add(threading.get_ident())
        return original(*args)

    setattr(driver, method, call)


def elsewhere(call: Callable[[], Any]) -> Any:
    """The result of a call on a thread of its own."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join(30)
    assert len(answers) == 1
    return answers[0]


@pytest.mark.gl
def test_A3_no_deadlock_between_the_context_s_thread_and_a_caller(driver: Driver) -> None:
    """Both map the same handle at the same time; neither holds anything while it waits for the other."""
    with headless(thread="worker") as context:
        texture = context.ops.call(make_texture, 8, 8)
        with cuglue.register_texture(texture, ops=context.ops) as handle:
            done: list[int] = []

            def work() -> None:
                for _ in range(50):
                    with handle.map():
                        pass
                done.append(1)

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            for _ in range(20):
                context.ops.call(lambda: handle.map().release())
            for thread in threads:
                thread.join(60)
            assert len(done) == 3


@pytest.mark.gl
def test_A3_an_inline_context_is_not_reached_from_another_thread(driver: Driver, context: GlContext) -> None:
    with registered_texture(driver) as subject:
        errors: list[BaseException] = []

        def work() -> None:
            for call in (subject.handle.map, subject.handle.close):
                try:
                    call()
                except WrongThreadError as error:
                    errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
        assert len(errors) == 2
        assert {vars(e)["owner"].ident for e in errors} == {threading.get_ident()}
        assert {vars(e)["caller"].ident for e in errors} == {thread.ident}
        with subject.handle.map():
            pass


@pytest.mark.gl
def test_another_context_current_is_named(driver: Driver, context: GlContext) -> None:
    """Two contexts; the wrong one is made current in between, as window libraries do."""
    with registered_texture(driver) as subject:
        with headless() as other:
            with pytest.raises(NoContextError) as caught:
                subject.handle.map()
            assert str(other.id) in str(caught.value)
        context.make_current()
        with subject.handle.map():
            pass


@pytest.mark.gl
def test_A3_row_63_a_context_that_is_gone_takes_its_registrations(driver: Driver) -> None:
    context = headless()
    handle = cuglue.register_texture(make_texture(8, 8), ops=context.ops)
    live = handle.map_mut()
    context.close()
    with pytest.raises(MapUnavailableError) as caught:
        handle.map()
    assert vars(caught.value)["reason"] == "ops_failed"
    assert handle.try_map() is None
    live.release()
    assert live.released
    handle.close()
    assert handle.closed
    assert handle._life.closed
    with pytest.raises(ClosedError):
        handle.map()


@pytest.mark.gl
def test_the_per_thread_stream_cannot_be_named_on_the_context_s_thread(driver: Driver) -> None:
    with headless(thread="worker") as context:
        texture = context.ops.call(make_texture, 8, 8)
        with cuglue.register_texture(texture, ops=context.ops) as handle:
            with pytest.raises(StreamMisuse):
                handle.map(2)
            with handle.map():
                pass


@pytest.mark.gl
def test_the_per_thread_stream_maps_where_the_context_is(driver: Driver, context: GlContext) -> None:
    with registered_texture(driver) as subject:
        expected = np.arange(subject.handle.size, dtype="u1")
        subject.put(expected)
        with subject.handle.map(2) as m:
            np.testing.assert_array_equal(peek(m), expected)


@pytest.mark.gl
def test_A3_pumped_calls_wait_for_the_application(driver: Driver, context: GlContext) -> None:
    ops = GlOps.pumped()
    with cuglue.register_texture(make_texture(8, 8), ops=ops) as handle:
        finished = threading.Event()

        def work() -> None:
            with handle.map():
                pass
            finished.set()

        thread = threading.Thread(target=work)
        thread.start()
        ran = 0
        while not finished.is_set():
            ran += ops.pump(0.1)
        thread.join(30)
        assert ran == 2  # map and leave


@pytest.mark.gl
@pytest.mark.parametrize("make", [make_texture, make_buffer], ids=["texture", "buffer"])
def test_A3_a_second_handle_has_the_ops_of_the_first(
    driver: Driver, context: GlContext, make: Callable[..., int]
) -> None:
    """Its calls would run where the first one's do, whatever ops were named."""
    register = cuglue.register_texture if make is make_texture else cuglue.register_buffer
    name, pumped = make(8, 8) if make is make_texture else make(64), GlOps.pumped()
    pumped.pump()
    with register(name) as first, register(name, ops=context.ops) as second:
        with pytest.raises(
            UsageError, match=r"got <PumpedOps .*expected <InlineOps .*Close that handle first"
        ):
            register(name, ops=pumped)
        assert not first.closed
        with second.map():
            pass
    with register(name, ops=pumped) as first, register(name) as second, register(name, ops=pumped):
        with pytest.raises(UsageError, match="got <InlineOps"):
            register(name, ops=context.ops)
        with second.map():
            pass


# --- forgotten ------------------------------------------------------------------------------------------------


@pytest.mark.gl
def test_A22_a_forgotten_handle_warns_and_is_given_back_with_the_next_call(
    driver: Any, context: GlContext
) -> None:
    handle = cuglue.register_texture(make_texture(8, 8), ops=context.ops)
    assert driver.inventory()["resources"] == 1
    with pytest.warns(ResourceWarning, match="test_handle_ops.py"):  # noqa: PT031 - forgetting takes two statements
        del handle
        gc.collect()
    context.ops.call(lambda: None)
    assert driver.inventory()["resources"] == 0


@pytest.mark.gl
@pytest.mark.parametrize("ours", [True, False])
def test_a_forgotten_handle_is_given_back_though_nobody_named_ops(
    driver: Any, context: GlContext, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ours:  # as if the application had made it
        monkeypatch.setattr(glcontext, "_ours", {})
    for _ in range(3):
        handle = cuglue.register_texture(make_texture(8, 8))
        with pytest.warns(ResourceWarning, match="test_handle_ops.py"):  # noqa: PT031 - as above
            del handle
            gc.collect()
    with cuglue.register_texture(make_texture(8, 8)):
        assert driver.inventory()["resources"] == 1


@pytest.mark.gl
def test_a_handle_without_named_ops_ends_with_its_context(driver: Any) -> None:
    context = headless()
    handle = cuglue.register_texture(make_texture(8, 8))
    m = handle.map_mut()
    context.close()
    m.release()
    with pytest.raises(MapUnavailableError) as caught:
        handle.map()
    assert caught.value.reason == "ops_failed"
    handle.close()
    assert m.released
    assert handle.closed
    assert driver.inventory()["mapped"] == 1, "with the context went what could be given back"


@pytest.mark.gl
def test_a_handle_without_named_ops_follows_its_context_to_another_thread(driver: Any) -> None:
    with headless() as context:
        handle = cuglue.register_texture(make_texture(8, 8))
        context.release()

        def there() -> tuple[int, ...]:
            context.make_current()
            try:
                with handle, handle.map() as m:
                    return m.shape
            finally:
                context.release()

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(there).result(30) == (8, 8, 4)
        context.make_current()
    assert driver.inventory()["resources"] == 0


AT_EXIT = """
import atexit
import numpy as np
import cuglue
from OpenGL import GL

context = cuglue.gl.headless()
name = GL.glGenTextures(1)
GL.glBindTexture(GL.GL_TEXTURE_2D, name)
GL.glTexImage2D(GL.GL_TEXTURE_2D, 0, GL.GL_RGBA8, 4, 4, 0, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, bytes([7] * 64))
handle = cuglue.register_texture(name)

@atexit.register
def last():
    print(handle.read().sum(), flush=True)
    handle.close()
    print(cuglue.current_driver().inventory()["resources"], flush=True)
    context.close()
"""


AFTER_THE_END = """
import cuglue
from OpenGL import GL

context = cuglue.gl.headless()

def mapped():
    name = GL.glGenBuffers(1)
    GL.glBindBuffer(GL.GL_ARRAY_BUFFER, name)
    GL.glBufferData(GL.GL_ARRAY_BUFFER, 64, None, GL.GL_STATIC_DRAW)
    with cuglue.register_buffer(name).map_mut() as m:
        yield m

kept = mapped()
next(kept)
"""


@pytest.mark.gl
@pytest.mark.parametrize(
    ("program", "printed"), [(AT_EXIT, ["448", "0"]), (AFTER_THE_END, [])], ids=["atexit", "finalizing"]
)
def test_rows_65_66_handles_work_in_atexit_functions_and_are_quiet_after(
    program: str, printed: list[str]
) -> None:
    """The main thread counts as ended already when ``atexit`` runs; generators are closed later still."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, printed, "")


@pytest.mark.gl
@pytest.mark.parametrize("worker", [False, True])
def test_a_forgotten_map_warns_and_is_left_with_the_next_call(driver: Any, worker: bool) -> None:
    with headless(thread="worker" if worker else "inline") as context:
        texture = context.ops.call(make_texture, 8, 8)
        with cuglue.register_texture(texture, ops=context.ops) as handle:
            with pytest.warns(ResourceWarning, match="never released"):  # noqa: PT031 - see above
                handle.map_mut()
                gc.collect()
            context.ops.call(lambda: None)
            assert driver.inventory()["mapped"] == 0
            with handle.map_mut():
                pass
