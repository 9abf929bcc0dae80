"""What every array of cuglue promises to its consumers, as a suite to inherit.

Owns the contract of :class:`~cuglue.exchange.view.Exporter`, checked with NumPy and the ctypes reader alone. Must not
know what the memory is. A test class gives :meth:`ViewSuite.make` and perhaps its own :meth:`ViewSuite.samples`::

    class TestMyView(ViewSuite):
        @contextmanager
        def make(self, array, *, readonly=False):
            with my_handle(array).map(readonly=readonly) as view:
                yield view
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from ..errors import ClosedError, UnsupportedError
from ..exchange import Exporter
from . import dlpack_reader
from .dlpack_reader import IS_COPIED, READ_ONLY

V1 = (1, 0)


class ViewSuite:
    """Inherit it; every method named ``test_...`` is a test."""

    def make(
        self, array: np.ndarray[Any, Any], *, readonly: bool = False
    ) -> AbstractContextManager[Exporter]:
        """A view whose memory holds the elements of ``array``; leaving the context takes the memory away."""
        raise NotImplementedError

    def samples(self) -> list[np.ndarray[Any, Any]]:
        """Arrays to make views of."""
        rng = np.random.default_rng(0)
        shapes: list[tuple[int, ...]] = [(), (1,), (5,), (2, 3), (3, 1, 4), (0,), (0, 3), (2, 0)]
        codes = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]
        arrays = [rng.integers(0, 100, shape).astype("f4") for shape in shapes]
        return arrays + [rng.integers(0, 2, (2, 3)).astype(code) for code in codes]

    def sample(self) -> np.ndarray[Any, Any]:
        """One that is not empty."""
        return next(array for array in self.samples() if array.size)

    # --- what a consumer sees -----------------------------------------------------------------------------------
    def test_numpy_gives_a_copy_with_the_values(self) -> None:
        """``numpy()``: the same values, memory of its own, writable."""
        for array in self.samples():
            with self.make(array) as view:
                got = view.numpy()
                assert (got.shape, got.dtype) == (array.shape, array.dtype)
                assert got.flags.owndata or got.base is not None
                assert got.flags.writeable
                got[...] = 0
                np.testing.assert_array_equal(view.numpy(), array)

    def test_capsule_fields(self) -> None:
        """Every field of both capsules, for all samples."""
        for array, version in itertools.product(self.samples(), (None, (0, 8), V1, (1, 3), (2, 0))):
            with self.make(array) as view:
                capsule = view.__dlpack__(max_version=version)
                seen = dlpack_reader.read(capsule)
                versioned = version is not None and version[0] >= 1
                assert seen.name == ("dltensor_versioned" if versioned else "dltensor")
                assert seen.version is None or seen.version[0] == 1
                assert seen.flags == 0
                assert seen.device == view.__dlpack_device__()
                assert seen.shape == array.shape
                assert seen.dtype[1:] == (array.itemsize * 8, 1)
                assert (seen.data is None) == (array.size == 0), (
                    "data is NULL exactly if there are no elements"
                )
                if array.size:
                    assert seen.data == view.device_ptr
                if array.ndim:
                    assert seen.strides is not None, "consumers of DLPack 1.2 may refuse missing strides"
                    assert tuple(n * array.itemsize for n in seen.strides) == view.strides or not array.size
                assert seen.byte_offset == 0, "some consumers ignore it"
                assert seen.deleter, "JAX aborts without one"

    def test_every_combination_of_arguments(self) -> None:
        """array-api-tests: each combination of copy, max_version and dl_device is answered."""
        for array in self.samples():
            with self.make(array) as view:
                own = view.__dlpack_device__()
                for copy, version, device in itertools.product(
                    (None, True, False), (None, (0, 0), V1, (2, 0)), (None, own, (1, 0))
                ):
                    moves = device not in (None, own)
                    if moves and copy is False:
                        with raises(BufferError):
                            view.__dlpack__(max_version=version, dl_device=device, copy=copy)
                        continue
                    capsule = view.__dlpack__(max_version=version, dl_device=device, copy=copy)
                    seen = dlpack_reader.read(capsule)
                    assert seen.device == (device or own)
                    copied = copy is True or moves
                    if array.size:
                        assert (seen.data == view.device_ptr) != copied
                    if seen.version is not None:
                        assert bool(seen.flags & IS_COPIED) == copied

    def test_refusals_are_no_type_errors(self) -> None:
        """Consumers answer TypeError with fewer keywords, so it must mean a wrong type and nothing else."""
        with self.make(self.sample()) as view:
            for wrong in ({"dl_device": (10, 0)}, {"dl_device": (9, 0)}, {"dl_device": (2, 2**30)}):
                with raises(BufferError):
                    view.__dlpack__(max_version=V1, **wrong)  # type: ignore[arg-type]
            with raises(ValueError):
                view.__dlpack__(stream=0)
            with raises(TypeError):
                view.__dlpack__(stream=1.5)  # type: ignore[arg-type]
            with raises(TypeError):
                view.__dlpack__(copy=np.array([1, 2]))  # type: ignore[arg-type]

    def test_read_only_memory(self) -> None:
        """READ_ONLY where it can be said, BufferError where it cannot, no CUDA array interface."""
        array = self.sample()
        with self.make(array, readonly=True) as view:
            assert dlpack_reader.read(view.__dlpack__(max_version=V1)).flags == READ_ONLY
            with raises(BufferError):
                view.__dlpack__()
            with raises(BufferError):
                view.__dlpack__(max_version=(0, 8))
            assert dlpack_reader.read(view.__dlpack__(copy=True)).name == "dltensor"
            assert dlpack_reader.read(view.__dlpack__(copy=True, max_version=V1)).flags == IS_COPIED
            assert dlpack_reader.read(view.view(legacy_readonly=True).__dlpack__()).name == "dltensor"
            assert not hasattr(view, "__cuda_array_interface__")
            np.testing.assert_array_equal(view.numpy(), array)

    def test_one_array_interface_and_never_the_other(self) -> None:
        """Host memory has NumPy's, device memory CUDA's; reading it twice gives the same."""
        for array in self.samples():
            with self.make(array) as view:
                on_host = view.__dlpack_device__()[0] == 1
                assert hasattr(view, "__array_interface__") == on_host
                assert hasattr(view, "__cuda_array_interface__") != on_host
                if on_host:
                    continue
                fields = view.__cuda_array_interface__
                assert fields == view.__cuda_array_interface__
                assert fields["version"] == 3
                assert fields["shape"] == array.shape
                assert fields["typestr"] == array.dtype.str
                assert fields["data"] == (view.device_ptr if array.size else 0, False)
                assert fields["stream"] != 0

    def test_numpy_never_makes_an_object_array(self) -> None:
        """``np.asarray``: a real array of host memory, TypeError with advice for device memory."""
        for array in self.samples():
            with self.make(array) as view:
                if view.__dlpack_device__()[0] != 1:
                    with raises(TypeError):
                        np.asarray(view)
                    continue
                seen = np.asarray(view)
                assert seen.dtype == array.dtype
                np.testing.assert_array_equal(seen, array)
                np.testing.assert_array_equal(np.from_dlpack(view), array)

    # --- views are views ----------------------------------------------------------------------------------------
    def test_host_consumers_share_the_memory(self) -> None:
        """What one writes the other reads; a copy stays apart."""
        array = self.sample()
        with self.make(array) as view:
            if view.__dlpack_device__()[0] != 1:
                return
            first, second, apart = np.asarray(view), np.from_dlpack(view), np.from_dlpack(view, copy=True)
            assert np.may_share_memory(first, second)
            assert not np.may_share_memory(first, apart)
            first[...] = 1
            np.testing.assert_array_equal(second, np.ones_like(array))
            np.testing.assert_array_equal(apart, array)
            first[...] = array

    # --- lifetime -----------------------------------------------------------------------------------------------
    def test_exports_are_counted_until_the_last_holder_drops_them(self) -> None:
        """Unconsumed capsules, consumed ones released on any thread, and NumPy arrays."""
        with self.make(self.sample()) as view:
            ledger = view.export_owner.ledger
            before = len(ledger.live())
            for version in (None, V1, (100, 3)):
                capsule = view.__dlpack__(max_version=version)
                assert len(ledger.live()) == before + 1
                del capsule
                assert len(ledger.live()) == before, "an unconsumed capsule frees itself"
                taken = dlpack_reader.consume(view.__dlpack__(max_version=version))
                assert len(ledger.live()) == before + 1
                taken.release()
                assert len(ledger.live()) == before
            capsules = [view.__dlpack__(max_version=V1), view.__dlpack__()]
            assert len(ledger.live()) == before + 2, "two capsules of one view live apart"
            assert all(export.filename == __file__ or export.line for export in ledger.live())
            del capsules
            gc.collect()
            assert len(ledger.live()) == before

    def test_a_refused_export_counts_as_none(self) -> None:
        """Nothing is held after an error."""
        with self.make(self.sample()) as view:
            ledger = view.export_owner.ledger
            before = len(ledger.live())
            with raises(BufferError):
                view.__dlpack__(dl_device=(99, 0))
            with raises(ValueError):
                view.__dlpack__(stream=-5)
            assert len(ledger.live()) == before

    def test_after_the_end_exports_raise(self) -> None:
        """A17: nothing is exported from memory that is gone."""
        with self.make(self.sample()) as view:
            device = view.__dlpack_device__()[0]
        for export in (
            view.__dlpack_device__,
            view.__dlpack__,
            view.numpy,
            view.__array__,
            lambda: view.__array_interface__ if device == 1 else view.__cuda_array_interface__,
        ):
            with raises(ClosedError):
                export()

    def test_cupy_needs_device_memory(self) -> None:
        """On the host ``cupy()`` says what to use instead."""
        with self.make(self.sample()) as view:
            if view.__dlpack_device__()[0] == 1:
                with raises(UnsupportedError):
                    view.cupy()


@contextmanager
def raises(error: type[BaseException]) -> Iterator[None]:
    """Fail unless the body raises ``error``."""
    try:
        yield
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")
