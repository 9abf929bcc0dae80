"""What is kept of the uses of an image and of its copy, one use at a time: each of these tests fails without it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.subjects import make_texture, registered_buffer, registered_texture

import cuglue
from cuglue.core.stream import Stream
from cuglue.driver.protocol import Access, CopyKind, SurfaceArg
from cuglue.errors import ClosedError
from cuglue.graphics import image_copy
from cuglue.graphics.glcontext import GlContext
from cuglue.graphics.handle import CudaHandle
from cuglue.graphics.mapping import CudaMap
from cuglue.testing import Latch, trace
from cuglue.testing.handle_suite import new_stream, peek

pytestmark = [pytest.mark.gl, pytest.mark.usefixtures("way")]


@pytest.fixture(autouse=True)
def _context(driver: Any, context: GlContext) -> None:
    pass


@pytest.fixture
def streams(driver: Any) -> list[Stream]:
    return [cuglue.as_stream(driver.Stream()) for _ in range(3)]


@contextmanager
def volume(slices: int = 2) -> Iterator[CudaHandle]:
    """A 3-D texture: its slices are parts of one array, so that copies of two of them touch the same memory."""
    name = make_texture(4, 4, target=GL.GL_TEXTURE_3D, depth=slices)
    with cuglue.register_texture(name, GL.GL_TEXTURE_3D) as handle:
        yield handle
    GL.glDeleteTextures([name])


def copy_out(m: CudaMap, stream: Stream) -> np.ndarray[Any, Any]:
    """Bytes of the map, by a copy that is queued on ``stream`` and on no other."""
    out = np.zeros(m.size, np.uint8)
    m.driver.copy_async(out.ctypes.data, m.device_ptr, m.size, CopyKind.D2H, stream.handle)
    return out


# --- the image ------------------------------------------------------------------------------------------------


def test_a_copy_in_that_refreshes_waits_for_writes_of_the_array(driver: Any, streams: list[Stream]) -> None:
    one, two, _ = streams
    with volume() as image:
        writer = image.map_mut(one.owner, layer=0)
        with image.map(two.owner, layer=1):
            writer.release()
            with image.map(two.owner, layer=1, alias=True):
                pass


def test_publishing_waits_for_copies_out_of_the_array(driver: Any, streams: list[Stream]) -> None:
    one, two, _ = streams
    with volume() as image, image.map(one.owner, layer=0):
        with image.map_mut(two.owner, layer=1, overwrite=True) as m:
            driver.fill_async(m.device_ptr, 1, m.size, two.handle)


@pytest.mark.parametrize("small", [True, False])
def test_a_map_waits_for_what_was_published_meanwhile(
    driver: Any, streams: list[Stream], monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """The image is held mapped by another level, and the reader's stream had waited for the writer's before."""
    monkeypatch.setattr(image_copy, "SMALL_BYTES", 1 << 40 if small else 0)
    one, two, three = streams
    name = make_texture(8, 8, levels=2)
    with cuglue.register_texture(name) as image, image.map(three.owner, level=1):
        writer = image.map_mut(one.owner)
        driver.fill_async(writer.device_ptr, 5, writer.size, one.handle)
        two.wait_for(one, one.submit())
        writer.release()
        with image.map(two.owner) as m:
            seen = copy_out(m, two)
        two.synchronize()
        assert (seen == 5).all()
    GL.glDeleteTextures([name])


def test_another_stream_waits_for_the_one_that_mapped(driver: Any, streams: list[Stream]) -> None:
    """To open a second level; in place, there is no copy that would wait."""
    one, two, _ = streams
    kernel = driver.kernel_load("fill", "", (), 0, lambda grid, block, image: image.texels.fill(7))
    name = make_texture(8, 8, levels=2)
    with cuglue.register_texture(name) as image:
        with image.map(one.owner), image.map_mut(two.owner, level=1, in_place=True) as m:
            surface = m.surface().handle
            use = SurfaceArg(surface, Access.WRITE)
            driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (surface,), (use,), 0, two.handle)
        with image.map(level=1) as m:
            assert (peek(m) == 7).all()
    driver.kernel_unload(kernel)
    GL.glDeleteTextures([name])


def test_objects_in_place_outlive_the_kernels_that_use_them(driver: Any, streams: list[Stream]) -> None:
    """Also where the image stays mapped, so that nothing else waits for them."""
    one, two, _ = streams
    kernel = driver.kernel_load("fill", "", (), 0, lambda grid, block, image: image.texels.fill(7))
    name = make_texture(8, 8, levels=2)
    with cuglue.register_texture(name) as image, image.map(one.owner, level=1):
        with image.map_mut(one.owner, in_place=True) as m:
            two.wait(one.record())
            use = SurfaceArg(m.surface().handle, Access.WRITE)
            latch = Latch(two)
            driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (use.handle,), (use,), 0, two.handle)
            m.record(two.owner)
        driver.event_query(one.record().handle)
        one.state.retire.drain()
        latch.close()
    driver.kernel_unload(kernel)
    GL.glDeleteTextures([name])


def test_mapping_waits_for_the_stream_that_handed_the_object_back(driver: Any, streams: list[Stream]) -> None:
    """The graphics API is not asked in between, so nothing else orders the two."""
    one, two, _ = streams
    with registered_buffer(driver) as subject:
        with subject.handle.map(one.owner):
            pass
        with trace(only={"stream_wait_event", "graphics_map"}) as calls, subject.handle.map(two.owner):
            assert [c.method for c in calls] == ["stream_wait_event", "graphics_map"]
            assert calls[0].args[0] == two.handle


# --- the copy -------------------------------------------------------------------------------------------------


def test_a_reader_waits_for_each_copy_in(driver: Any, streams: list[Stream]) -> None:
    """Not only for the first one, whose memory was new."""
    one, two, _ = streams
    with registered_texture(driver) as subject:
        for value in (1, 2, 3):
            subject.put(np.full(subject.handle.size, value, np.uint8))
            with subject.handle.map(one.owner), subject.handle.map(two.owner) as m:
                seen = copy_out(m, two)
            two.synchronize()
            assert (seen == value).all()


def test_a_reader_waits_for_a_refresh(driver: Any, streams: list[Stream]) -> None:
    """Though it had waited for the same stream a moment before."""
    one, two, _ = streams
    with registered_texture(driver) as subject:
        subject.put(np.full(subject.handle.size, 1, np.uint8))
        with subject.handle.map(one.owner):
            two.wait_for(one, one.submit())
            with subject.handle.map(one.owner, alias=True), subject.handle.map(two.owner) as m:
                seen = copy_out(m, two)
        two.synchronize()
        assert (seen == 1).all()


def test_writing_all_of_it_waits_for_readers_of_the_map_before(driver: Any, streams: list[Stream]) -> None:
    """There is no copy in that would wait for them."""
    one, two, _ = streams
    with registered_texture(driver) as subject:
        subject.put(np.full(subject.handle.size, 1, np.uint8))
        with subject.handle.map(one.owner) as m:
            two.wait(m.stream.record())
            seen = copy_out(m, two)
            m.record(two.owner)
        with subject.handle.map_mut(one.owner, overwrite=True) as m:
            driver.fill_async(m.device_ptr, 2, m.size, one.handle)
        two.synchronize()
        assert (seen == 1).all()
        assert (subject.get() == 2).all()


def test_memory_is_not_freed_under_a_copy_back(driver: Any, streams: list[Stream]) -> None:
    """The map is left on a stream that has nothing else to do with its memory."""
    with registered_texture(driver) as subject:
        m = subject.handle.map_mut()
        m.release(streams[0].owner)
        del m
    gc.collect()
    driver.device_synchronize(0)


def test_memory_is_not_freed_under_a_reader(driver: Any) -> None:
    with registered_texture(driver) as subject, new_stream(subject) as reader:
        with subject.handle.map() as m:
            reader.wait(m.stream.record())
            copy_out(m, reader)
            m.record(reader.owner)
        del m
        subject.handle.close()
        driver.device_synchronize(0)


# --- consumers ------------------------------------------------------------------------------------------------


def test_a_consumer_of_one_map_comes_after_one_of_another(driver: Any, streams: list[Stream]) -> None:
    """Of the same memory, announced after both maps were made."""
    one, two, three = streams
    with registered_buffer(driver) as subject:
        first, second = subject.handle.map_mut(one.owner), subject.handle.map_mut(two.owner)
        first.order_consumer(three)
        first.note_consumer(three)
        driver.fill_async(first.device_ptr, 4, first.size, three.handle)
        reader = cuglue.as_stream(driver.Stream())
        second.order_consumer(reader)
        seen = copy_out(second, reader)
        second.note_consumer(reader)
        first.release()
        second.release()
        reader.synchronize()
        assert (seen == 4).all()


def test_the_host_comes_after_a_consumer_of_another_map(driver: Any, streams: list[Stream]) -> None:
    one, two, three = streams
    with registered_buffer(driver) as subject:
        first, second = subject.handle.map_mut(one.owner), subject.handle.map(two.owner)
        first.order_consumer(three)
        first.note_consumer(three)
        driver.fill_async(first.device_ptr, 4, first.size, three.handle)
        assert (np.asarray(second) == 4).all()
        first.release()
        second.release()


def test_a_consumer_comes_after_what_another_queued_since(driver: Any, streams: list[Stream]) -> None:
    """An event that was recorded before does not cover it."""
    one, two, three = streams
    with registered_buffer(driver) as subject:
        with subject.handle.map_mut(one.owner) as m:
            m.order_consumer(two)
            m.note_consumer(two)
            three.wait_for(two, two.seq)
            driver.fill_async(m.device_ptr, 4, m.size, two.handle)
            m.order_consumer(three)
            seen = copy_out(m, three)
            m.note_consumer(three)
        three.synchronize()
        assert (seen == 4).all()


def test_a_recorded_stream_is_known_to_other_maps(driver: Any, streams: list[Stream]) -> None:
    one, two, three = streams
    with registered_buffer(driver) as subject:
        first, second = subject.handle.map_mut(one.owner), subject.handle.map_mut(one.owner)
        two.wait_for(one, one.submit())
        copy_out(first, two)
        first.record(two.owner)
        second.order_consumer(three)
        driver.fill_async(second.device_ptr, 4, second.size, three.handle)
        second.note_consumer(three)
        first.release()
        second.release()


def test_a_stream_may_be_recorded_before_its_work_is_queued(driver: Any, streams: list[Stream]) -> None:
    """And an event in between does not cover that."""
    one, two, three = streams
    with registered_buffer(driver) as subject:
        with subject.handle.map_mut(one.owner) as m:
            two.wait(m.stream.record())
            m.record(two.owner)
            three.wait_for(two, two.seq)
            driver.fill_async(m.device_ptr, 4, m.size, two.handle)
        assert (subject.get() == 4).all()


def test_memory_is_not_freed_under_a_reader_that_nobody_named(
    driver: Any, streams: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map is left on a stream that has nothing else to do with its memory, and is made to wait for everybody."""
    monkeypatch.setitem(sys.modules, "torch", object())
    with registered_texture(driver) as subject:
        m = subject.handle.map()
        m.note_cai_reader()
        copy_out(m, cuglue.as_stream(unknown := driver.stream_create(0)))
        m.release(streams[0].owner)
        del m
    gc.collect()
    driver.device_synchronize(0)
    driver.stream_destroy(unknown)


# --- its memory -----------------------------------------------------------------------------------------------


def test_closing_gives_the_memory_back_at_once(driver: Any) -> None:
    name = make_texture(8, 8)
    handle = cuglue.register_texture(name)
    with handle.map():
        pass
    assert driver.inventory()["malloc_async"] == 1
    handle.close()
    assert driver.inventory()["malloc_async"] == 0


def test_memory_comes_from_the_resource_given(driver: Any) -> None:
    name = make_texture(8, 8)
    with cuglue.DirectCudaResource() as memory:
        with cuglue.register_texture(name, memory=memory) as handle:
            with handle.map() as m:
                assert memory.bytes_outstanding == len(m)
            del m
        assert memory.bytes_outstanding == 0


def test_a_resource_that_is_closed_first(driver: Any) -> None:
    """Its memory is gone, and is not used again."""
    name = make_texture(8, 8)
    memory = cuglue.DirectCudaResource()
    with cuglue.register_texture(name, memory=memory) as handle:
        with handle.map():
            pass
        with pytest.warns(ResourceWarning, match="image copy"):
            memory.close()
        with pytest.raises(ClosedError):
            handle.map()
        assert driver.inventory()["mapped"] == 0


def test_a_larger_level_gets_larger_memory(driver: Any) -> None:
    """The buffer that is kept may have been made for a smaller one."""
    name = make_texture(16, 16, levels=3)
    with cuglue.register_texture(name) as handle:
        for level in (2, 1, 0, 2):
            with handle.map_mut(level=level, overwrite=True) as m:
                driver.fill_async(m.device_ptr, level + 1, m.size, m.stream.handle)
        for level in (2, 1, 0):
            with handle.map(level=level) as m:
                assert (peek(m) == level + 1).all()


def test_a_handle_of_an_object_that_was_closed_meanwhile(driver: Any) -> None:
    """By another thread, between finding the registration and sharing it."""
    handle = cuglue.register_texture(make_texture(8, 8))
    handle.close()
    with pytest.raises(ClosedError):
        CudaHandle(handle._life)
