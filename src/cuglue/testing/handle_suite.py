"""What every handle promises, whatever stands behind it, as a suite to inherit.

Owns the contract of :class:`~cuglue.CudaHandle` and :class:`~cuglue.CudaMap` that holds for all backings, on any
driver. The oracle is the graphics API itself: what an object holds is asked of a :class:`Subject`, never of the code
under test. A test class gives :meth:`HandleSuite.make`::

    class TestMyTexture(HandleSuite):
        @contextmanager
        def make(self):
            with my_texture() as texture, cuglue.register_texture(texture.name) as handle:
                yield MySubject(handle, texture)
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager

import numpy as np

from ..core.device import device_state
from ..driver.protocol import CaptureMode, CopyKind
from ..errors import CaptureError, ClosedError, LayoutError, MapConflictError, UsageError
from .handle_subjects import Bytes, Subject, holdings, new_stream, peek, poke, raised


class HandleSuite:
    """Inherit it; every method named ``test_...`` is a test."""

    def make(self) -> AbstractContextManager[Subject]:
        """A registered object with a handle that nobody else uses."""
        raise NotImplementedError

    def pattern(self, subject: Subject, seed: int = 1) -> Bytes:
        """Bytes to put into the object."""
        return np.random.default_rng(seed).integers(0, 256, subject.handle.size, np.uint8)

    # --- reading and writing ------------------------------------------------------------------------------------
    def test_A5_a_map_shows_what_the_object_holds(self) -> None:
        """Each map, not only the first one."""
        with self.make() as subject:
            for seed in (1, 2, 3):
                expected = self.pattern(subject, seed)
                subject.put(expected)
                with subject.handle.map() as m:
                    np.testing.assert_array_equal(peek(m), expected)

    def test_A15_every_byte_written_arrives(self) -> None:
        """Leaving a writable map is enough: no further wait is needed to see it."""
        with self.make() as subject:
            for overwrite in (False, True):
                expected = self.pattern(subject, 4 + overwrite)
                with subject.handle.map_mut(overwrite=overwrite) as m:
                    assert m.writable
                    poke(m, expected)
                np.testing.assert_array_equal(subject.get(), expected)

    def test_A15_unwritten_bytes_survive(self) -> None:
        """A writable map holds the contents, so a part may be changed."""
        with self.make() as subject:
            expected = self.pattern(subject)
            subject.put(expected)
            half = expected.size // 2
            with subject.handle.map_mut() as m:
                poke(m, ~expected[:half])
            expected[:half] ^= 255
            np.testing.assert_array_equal(subject.get(), expected)

    def test_A15_a_read_map_of_an_image_writes_nothing_back(self) -> None:
        """Its memory is a copy."""
        with self.make() as subject:
            expected = self.pattern(subject)
            subject.put(expected)
            with subject.handle.map() as m:
                assert not m.writable
                poke(m, ~expected)
            np.testing.assert_array_equal(subject.get(), expected if subject.opaque else ~expected)

    def test_A15_an_exception_inside_publishes(self) -> None:
        """And is raised as it was."""
        with self.make() as subject:
            expected = self.pattern(subject)

            def body() -> None:
                with subject.handle.map_mut() as m:
                    poke(m, expected)
                    raise KeyError("body")

            raised(KeyError, body)
            np.testing.assert_array_equal(subject.get(), expected)

    def test_A15_cancel_publishes_nothing(self) -> None:
        """An image keeps what it held; memory that is the object's own has been written already."""
        with self.make() as subject:
            expected = self.pattern(subject)
            subject.put(expected)
            with subject.handle.map_mut() as m:
                poke(m, ~expected)
                m.cancel()
                assert m.released
            np.testing.assert_array_equal(subject.get(), expected if subject.opaque else ~expected)

    def test_read_and_write_in_one_line(self) -> None:
        """``read()`` gives an array of the caller's own, ``write()`` takes exactly such a one."""
        with self.make() as subject:
            handle, expected = subject.handle, self.pattern(subject)
            subject.put(expected)
            array = handle.read()
            assert (tuple(array.shape), array.dtype) == (handle.shape, handle.dtype)
            host = np.asarray(array if isinstance(array, np.ndarray) else array.get())
            np.testing.assert_array_equal(host.reshape(-1).view(np.uint8), expected)
            flipped = handle.read(flip=True)
            flipped = flipped if isinstance(flipped, np.ndarray) else flipped.get()
            np.testing.assert_array_equal(flipped, host[::-1])
            handle.write(host[::-1].copy(), flip=True)
            np.testing.assert_array_equal(subject.get(), expected)
            handle.write(host[::-1].copy())
            np.testing.assert_array_equal(
                subject.get(), np.ascontiguousarray(host[::-1]).reshape(-1).view("u1")
            )
            raised(LayoutError, lambda: handle.write(host[:-1]))
            raised(LayoutError, lambda: handle.write(host.astype("c16")))

    # --- the guard ------------------------------------------------------------------------------------------------
    def test_A11_geometry(self) -> None:
        """Rows are tight."""
        with self.make() as subject, subject.handle.map() as m:
            handle = subject.handle
            assert len(m) == m.size == handle.size == m.rows * m.row_bytes
            assert m.shape == handle.shape
            assert m.dtype == handle.dtype
            assert m.layout.is_c_contiguous
            assert m.device == handle.device
            assert m.device_ptr

    def test_A17_a_map_that_was_left(self) -> None:
        """Says so, and gives nothing away."""
        with self.make() as subject:
            m = subject.handle.map()
            with m as entered:
                assert entered is m
                assert not m.released
            assert m.released
            assert (m.device_ptr, m.size, len(m)) == (0, 0, 0)
            m.release()
            m.cancel()
            raised(ClosedError, m.__enter__)
            raised(ClosedError, m.__dlpack__)
            raised(ClosedError, m.numpy)
            raised(ClosedError, lambda: m.planes)
            raised(ClosedError, lambda: m.block)
            raised(ClosedError, lambda: m.record())
            assert "released" in repr(m)

    def test_bad_arguments(self) -> None:
        """A typed error before the driver is called, and nothing is mapped."""
        with self.make() as subject:
            handle = subject.handle
            raised(UsageError, lambda: handle.map(level=-1))
            raised(UsageError, lambda: handle.map(layer=1 << 20))
            raised(UsageError, lambda: handle.map(timeout=-1.0))
            raised(UsageError, lambda: handle.map(timeout=float("nan")))
            raised(UsageError, lambda: handle.map("a stream"))
            raised(UsageError, lambda: handle.map(-5))
            with handle.map():
                pass

    # --- several maps ---------------------------------------------------------------------------------------------
    def test_A18_readers_share_one_pointer(self) -> None:
        """And leaving one leaves the other."""
        with self.make() as subject:
            expected = self.pattern(subject)
            subject.put(expected)
            first, second = subject.handle.map(), subject.handle.map()
            assert first.device_ptr == second.device_ptr
            first.release()
            assert first.device_ptr == 0
            np.testing.assert_array_equal(peek(second), expected)
            second.release()
            with subject.handle.map() as m:
                np.testing.assert_array_equal(peek(m), expected)

    def test_A19_maps_that_would_lose_data_are_refused(self) -> None:
        """Of images; maps of memory that is the object's own are true aliases."""
        with self.make() as subject:
            handle = subject.handle
            expected = self.pattern(subject)
            subject.put(expected)
            for hold, ask, held in (
                (handle.map_mut, handle.map, "write"),
                (handle.map_mut, handle.map_mut, "write"),
                (handle.map, handle.map_mut, "read"),
            ):
                with hold() as m:
                    if subject.opaque:
                        error = raised(MapConflictError, ask)
                        assert vars(error)["held"] == held
                        assert f"mapped for {'writing' if held == 'write' else 'reading'}" in str(error)
                    else:
                        with ask() as other:
                            assert other.device_ptr == m.device_ptr
                    np.testing.assert_array_equal(peek(m), expected)
            np.testing.assert_array_equal(subject.get(), expected)

    def test_A19_alias_is_the_seed_s_aliasing(self) -> None:
        """The reader's copy overwrites the writer's bytes, and the writer publishes those."""
        with self.make() as subject:
            old, new = self.pattern(subject, 1), self.pattern(subject, 2)
            subject.put(old)
            writer = subject.handle.map_mut()
            poke(writer, new)
            reader = subject.handle.map(alias=True)
            assert reader.device_ptr == writer.device_ptr
            writer.release()
            reader.release()
            np.testing.assert_array_equal(subject.get(), old if subject.opaque else new)

    def test_A19_a_writer_that_left_is_no_conflict(self) -> None:
        """Though a reader that shared its memory is there still."""
        with self.make() as subject:
            writer = subject.handle.map_mut()
            with subject.handle.map(alias=True):
                writer.release()
                with subject.handle.map():
                    pass

    # --- streams --------------------------------------------------------------------------------------------------
    def test_A15_leaving_waits_for_recorded_streams(self) -> None:
        """A writer on another stream is published, though nobody waited for it on the host."""
        with self.make() as subject:
            expected = np.full(subject.handle.size, 0x5A, np.uint8)
            with new_stream(subject) as other:
                with subject.handle.map_mut() as m:
                    other.wait(m.stream.record())
                    m.driver.fill_async(m.device_ptr, 0x5A, m.size, other.handle)
                    m.record(other.owner)
                np.testing.assert_array_equal(subject.get(), expected)

    def test_A15_the_next_map_waits_for_readers_of_the_last(self) -> None:
        """A copy out on another stream gets the bytes of its own map."""
        with self.make() as subject, new_stream(subject) as other:
            expected = self.pattern(subject)
            subject.put(expected)
            kept = np.zeros_like(expected)
            with subject.handle.map() as m:
                other.wait(m.stream.record())
                m.driver.copy_async(kept.ctypes.data, m.device_ptr, m.size, CopyKind.D2H, other.handle)
                m.record(other.owner)
            subject.put(~expected)
            with subject.handle.map() as m:
                np.testing.assert_array_equal(peek(m), ~expected)
            other.synchronize()
            np.testing.assert_array_equal(kept, expected)

    def test_maps_on_several_streams(self) -> None:
        """Each sees what the one before it wrote."""
        with self.make() as subject, new_stream(subject) as one, new_stream(subject) as two:
            for round_, stream in enumerate((one, two, one)):
                with subject.handle.map_mut(stream.owner) as m:
                    assert m.stream is stream
                    m.driver.fill_async(m.device_ptr, round_ + 1, m.size, stream.handle)
                with subject.handle.map() as m:
                    np.testing.assert_array_equal(peek(m), np.full(m.size, round_ + 1, np.uint8))

    def test_a_capture_is_refused_before_the_driver_is_called(self) -> None:
        """Mapping would lose the capture."""
        with self.make() as subject, new_stream(subject) as stream:
            driver = subject.driver
            driver.capture_begin(stream.handle, CaptureMode.THREAD_LOCAL)
            raised(CaptureError, lambda: subject.handle.map(stream.owner))
            driver.graph_destroy(driver.capture_end(stream.handle))
            with subject.handle.map(stream.owner):
                pass

    # --- the end --------------------------------------------------------------------------------------------------
    def test_A22_close(self) -> None:
        """Once, and then nothing maps."""
        with self.make() as subject:
            handle = subject.handle
            with handle.map():
                pass
            handle.close()
            assert handle.closed
            handle.close()
            raised(ClosedError, handle.map)
            raised(ClosedError, handle.map_mut)
            raised(ClosedError, handle.try_map)
            raised(ClosedError, handle.read)
            raised(ClosedError, handle.__enter__)

    def test_A22_close_with_live_maps_waits_for_them(self) -> None:
        """The last of them ends the registration."""
        with self.make() as subject:
            handle, expected = subject.handle, self.pattern(subject)
            m = handle.map_mut()
            handle.close()
            handle.close()
            assert handle.closed
            assert not m.released
            raised(ClosedError, handle.map)
            poke(m, expected)
            m.release()
            np.testing.assert_array_equal(subject.get(), expected)
            handle.close()

    def test_A23_repr(self) -> None:
        """Kind and size, and no address."""
        with self.make() as subject:
            handle = subject.handle
            assert repr(handle) == f"CudaHandle(kind={handle.kind!r}, size={handle.size})"

    def test_nothing_is_left(self) -> None:
        """A hundred maps of each kind, then close: the driver holds what it held."""
        with self.make() as subject:
            state = device_state(subject.driver, subject.handle.device)

            def held() -> dict[str, int]:
                gc.collect()
                state.retire.drain(block=True)
                return holdings(subject.driver, subject.handle.device)

            with subject.handle.map():
                pass
            with subject.handle.map_mut():
                pass
            before = held()
            for _ in range(100):
                with subject.handle.map(), subject.handle.map():
                    pass
                with subject.handle.map_mut():
                    pass
            assert held() == before


__all__ = ["HandleSuite", "Subject", "holdings", "new_stream", "peek", "poke", "raised"]
