"""Nothing is lost when a driver call fails: registering, mapping, leaving and closing, each call failing in turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.subjects import make_buffer, make_texture, map_before, registered_buffer, registered_texture

import cuglue
from cuglue.driver.protocol import Driver
from cuglue.errors import CuglueError, DriverError, MapUnavailableError, PublishError
from cuglue.graphics import image_copy
from cuglue.graphics.glcontext import GlContext, headless
from cuglue.graphics.handle import CudaHandle
from cuglue.graphics.mapping import CudaMap
from cuglue.testing import sweep, trace
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import peek, poke

pytestmark = pytest.mark.gl

KEPT = ("kernels", "events")  # of the device's life: compiled once, spare ones


class Made(NamedTuple):
    """An object to register, and the driver that does it."""

    driver: Any
    name: int
    kind: str

    def register(self) -> CudaHandle:
        if self.kind == "buffer":
            return cuglue.register_buffer(self.name)
        if self.kind == "buffer again":
            handle = cuglue.register_buffer(self.name)
            map_before(handle)
            return handle
        return cuglue.register_texture(self.name)


@pytest.fixture(scope="module", autouse=True)
def _context() -> Iterator[GlContext]:
    with headless() as made:
        yield made


@pytest.fixture(params=["buffer", "buffer again", "small image", "image"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the subject of a sweep; the OpenGL object is the same for all its runs."""
    kind = request.param
    if kind == "image":
        monkeypatch.setattr(image_copy, "SMALL_BYTES", 0)
    name = make_buffer(4096) if kind.startswith("buffer") else make_texture(16, 9)
    yield lambda driver: Made(driver, name, kind)
    if kind.startswith("buffer"):
        GL.glDeleteBuffers(1, [name])
    else:
        GL.glDeleteTextures([name])


def close(subject: Any, result: CudaHandle) -> None:
    result.close()


@pytest.mark.parametrize("made", ["buffer", "small image", "image"], indirect=True)
def test_registering(made: Any) -> None:
    """Atomic but for kernels: one that was compiled stays for the next attempt."""
    sweep(Made.register, setup=made, teardown=close, keeps=KEPT, atomic=made(None).kind == "buffer").check()


class Held(NamedTuple):
    """A registered object."""

    driver: Any
    handle: CudaHandle

    def leave(self) -> None:
        self.handle.close()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("method", ["map", "map_mut"])
def test_mapping(made: Any, method: str, first: bool) -> None:
    """A map that failed left nothing mapped and can be tried again; the memory of a first copy stays for that."""

    def setup(driver: Any) -> Held:
        handle = made(driver).register()
        if not first:
            with handle.map():
                pass
        return Held(driver, handle)

    def operation(subject: Held) -> CudaMap:
        m: CudaMap = getattr(subject.handle, method)()
        return m

    def teardown(subject: Held, result: CudaMap) -> None:
        result.release()
        subject.leave()

    sweep(
        operation,
        setup=setup,
        teardown=teardown,
        accounting=lambda subject: subject.handle.closed,
        keeps=KEPT,
        atomic=not first or made(None).kind.startswith("buffer"),
        name=method,
    ).check()


@pytest.mark.parametrize("method", ["map", "map_mut"])
def test_leaving(made: Any, method: str) -> None:
    """A map that could not be left is a live map still, and can be left later."""

    class Live(NamedTuple):
        driver: Any
        handle: CudaHandle
        map: CudaMap

    def setup(driver: Any) -> Live:
        handle = made(driver).register()
        return Live(driver, handle, getattr(handle, method)())

    def check(subject: Live, result: None) -> None:
        assert subject.map.released

    sweep(
        lambda subject: subject.map.release(),
        setup=setup,
        check=check,
        teardown=lambda subject, result: subject.handle.close(),
        accounting=lambda subject: subject.map.released,
        keeps=KEPT,
        atomic=False,  # an image may be published already
        name=f"leaving {method}",
    ).check()


def test_closing(made: Any) -> None:
    def setup(driver: Any) -> Held:
        handle = made(driver).register()
        with handle.map():
            pass
        return Held(driver, handle)

    sweep(Held.leave, setup=setup, keeps=KEPT, atomic=False).check()


def test_the_whole_life(made: Any) -> None:
    """Contents arrive wherever something failed and was tried again."""

    maps: list[CudaMap] = []

    def operation(subject: Held) -> None:
        for method in ("map_mut", "map"):
            maps.append(getattr(subject.handle, method)())
            with maps[-1] as m:
                if m.writable:
                    poke(m, np.full(m.size, 7, np.uint8))
                else:
                    assert (peek(m) == 7).all()

    def recover(subject: Held) -> None:
        while maps:
            maps.pop().cancel()

    sweep(
        operation,
        setup=lambda driver: Held(driver, made(driver).register()),
        teardown=lambda subject, result: (recover(subject), subject.leave()),
        recover=recover,
        keeps=KEPT,
        modes=("once", "method"),
        atomic=False,
        name="the whole life",
    ).check()


# --- what the caller sees ---------------------------------------------------------------------------------------


def test_A15_a_publish_that_fails_can_be_repeated(driver: Driver) -> None:
    with registered_texture(driver) as subject:
        expected = np.full(subject.handle.size, 0x21, np.uint8)
        m = subject.handle.map_mut()
        poke(m, expected)
        assert "could not be left yet" not in repr(m)
        with fail("copy_to_array_async"), pytest.raises(PublishError) as caught:
            m.release()
        assert isinstance(caught.value.__cause__, DriverError)
        assert not m.released
        assert m.handle is subject.handle  # a live map still: the object's owner must not go
        assert "could not be left yet" in repr(m)
        np.testing.assert_array_equal(peek(m), expected)
        m.release()
        assert m.released
        assert m.handle is None
        np.testing.assert_array_equal(subject.get(), expected)


def test_A15_nothing_is_published_twice(driver: Driver) -> None:
    """The copy succeeded, the hand-over did not: leaving again only hands over."""
    with registered_texture(driver) as subject, trace(only={"copy_to_array_async"}) as copies:
        m = subject.handle.map_mut()
        with fail("graphics_unmap"), pytest.raises(DriverError):
            m.release()
        assert "could not be left yet" in repr(m)
        m.release()
        assert "could not be left yet" not in repr(m)
        assert len(copies) == 1


def test_a_failed_publish_can_be_cancelled(driver: Driver) -> None:
    with registered_texture(driver) as subject:
        expected = np.full(subject.handle.size, 0x21, np.uint8)
        subject.put(expected)
        m = subject.handle.map_mut()
        poke(m, ~expected)
        with fail("copy_to_array_async", persistent=True):
            with pytest.raises(PublishError):
                m.release()
            m.cancel()
        assert m.released
        np.testing.assert_array_equal(subject.get(), expected)


def test_the_body_s_error_comes_first(driver: Driver) -> None:
    """What went wrong on the way out is a note on it."""
    with registered_texture(driver) as subject:
        m = subject.handle.map_mut()
        with pytest.raises(KeyError) as caught, fail("copy_to_array_async"), m:
            raise KeyError("body")
        assert any("not published" in note for note in caught.value.__notes__)
        m.release()


def test_A10_no_memory_for_the_copy(driver: Driver) -> None:
    with registered_texture(driver) as subject:
        with fail("malloc_async", persistent=True), pytest.raises(MapUnavailableError) as caught:
            subject.handle.map()
        assert vars(caught.value)["reason"] == "alloc_failed"
        with fail("malloc_async", persistent=True):
            assert subject.handle.try_map() is None
            assert subject.handle.try_map_mut() is None
        with subject.handle.map():
            pass


def test_the_copy_s_memory_is_kept_for_the_next_map(driver: Driver) -> None:
    """One allocation per handle, however many maps, also after one that failed (A7, A10)."""
    with registered_texture(driver) as subject, trace(only={"malloc_async"}) as taken:
        with fail("copy_from_array_async"), pytest.raises(CuglueError):
            subject.handle.map()
        addresses = set()
        for _ in range(5):
            with subject.handle.map() as m:
                addresses.add(m.device_ptr)
            with subject.handle.map_mut() as m:
                addresses.add(m.device_ptr)
        assert (len(taken), len(addresses)) == (1, 1)


def test_A22_an_end_that_fails_can_be_repeated(driver: Driver) -> None:
    with registered_buffer(driver) as subject:
        with fail("graphics_unregister"), pytest.raises(DriverError):
            subject.handle.close()
        assert not subject.handle.closed
        with subject.handle.map():
            pass
        subject.handle.close()
        assert subject.handle.closed


def test_A22_a_deferred_end_that_fails_can_be_repeated(driver: Driver) -> None:
    with registered_buffer(driver) as subject, trace(only={"graphics_unregister"}) as ends:
        m = subject.handle.map()
        subject.handle.close()
        with fail("graphics_unregister"), pytest.raises(DriverError):
            m.release()
        assert m.released
        subject.handle.close()
        subject.handle.close()
        assert len(ends) == 1  # the one that was let fail never got so far


def test_a_read_or_write_whose_map_cannot_be_left_is_undone_by_the_next_call(driver: Any) -> None:
    """Nobody else could leave that map: as a reader it would be in every writer's way."""
    with registered_texture(driver) as subject:
        for call in (
            subject.handle.read,
            lambda: subject.handle.write(np.zeros(subject.handle.shape, np.uint8)),
        ):
            with fail("graphics_unmap"), pytest.raises(DriverError):
                call()
            with subject.handle.map_mut():
                pass
            assert driver.inventory()["mapped"] == 0


def test_a_map_that_not_everybody_can_wait_for_is_left_at_once_or_by_the_next_call(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", sys)  # a reader that names no stream
    with registered_texture(driver) as subject:
        with fail("context_wait"), pytest.raises(DriverError):
            subject.handle.map_mut()
        assert driver.inventory()["mapped"] == 0
        with fail("context_wait"), fail("graphics_unmap"), pytest.raises(DriverError) as caught:
            subject.handle.map_mut()
        assert "failed too" in caught.value.__notes__[0]
        with subject.handle.map_mut():
            pass
        assert driver.inventory()["mapped"] == 0
