"""Exports of device memory as far as they go without a GPU: the order they queue, the copies they make, what they hold.

The memory is the simulated device's, exported as if it were a GPU's; only the capsule itself, which ``cuda.core`` makes
with the help of a driver, is replaced by a record of what it would be made of.
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

import cuglue
from cuglue.core.block import Block
from cuglue.core.device import device_state
from cuglue.driver.protocol import CaptureMode, CopyKind, MemoryType
from cuglue.errors import CaptureError, ClosedError, DriverError, UnsupportedError
from cuglue.exchange import ArrayView, BlockOwner
from cuglue.exchange import view as view_module
from cuglue.exchange.owner import export_on
from cuglue.layout import Layout
from cuglue.testing.dlpack_reader import IS_COPIED, read

V1 = (1, 0)
N = 16


@pytest.fixture
def driver():
    with cuglue.use_driver("sim") as sim:
        yield sim
        sim.check()


class Made:
    """What a capsule would be made of."""

    def __init__(self, ptr, layout, element, **rest):
        self.ptr, self.layout, self.element = ptr, layout, element
        vars(self).update(rest)


@pytest.fixture(autouse=True)
def capsules(monkeypatch):
    monkeypatch.setattr(view_module, "device_capsule", Made)


@contextmanager
def counted(driver, monkeypatch, *names):
    """The calls of these driver methods, in order."""
    calls = []
    with monkeypatch.context() as patch:
        for name in names:
            real = getattr(driver, name)

            def call(*args, _name=name, _real=real, **kw):
                calls.append((_name, args))
                return _real(*args, **kw)

            patch.setattr(driver, name, call)
        yield calls


QUEUED = (
    "event_record",
    "stream_wait_event",
    "copy_async",
    "context_record",
    "context_wait",
    "stream_synchronize",
)


def make(driver, *, readonly=False, memory_type=MemoryType.DEVICE, data=None):
    data = np.arange(N, dtype="f4") if data is None else data
    stream = cuglue.as_stream(driver.Stream())
    ptr = driver.malloc(data.nbytes, 0)
    block = Block(ptr, data.nbytes, stream)
    driver.copy_async(ptr, data.ctypes.data, data.nbytes, CopyKind.H2D, stream.handle)
    block.finish(stream, cuglue.Access.WRITE)
    owner = BlockOwner(block, readonly=readonly, memory_type=memory_type)
    return ArrayView(owner, ptr, Layout.of(data.shape, data.dtype)), stream


def waits(calls):
    return [name for name, _ in calls if name == "stream_wait_event"]


# --- order ----------------------------------------------------------------------------------------------------


def test_another_stream_waits_once(driver, monkeypatch):
    view, home = make(driver)
    consumer = driver.Stream()
    with counted(driver, monkeypatch, *QUEUED) as calls:
        made = view.__dlpack__(stream=consumer.ptr, max_version=V1)
        assert [name for name, _ in calls] == ["event_record", "stream_wait_event"]
        assert calls[0][1][1] == home.handle
        assert calls[1][1][0] == consumer.ptr
    assert (made.ptr, made.device, made.versioned, made.readonly, made.copied) == (
        view.device_ptr, 0, True, False, False,
    )  # fmt: skip
    assert [s.handle for s in view.export_owner.consumers] == [consumer.ptr]


def test_the_same_stream_queues_nothing(driver, monkeypatch):
    view, home = make(driver)
    with counted(driver, monkeypatch, *QUEUED) as calls:
        view.__dlpack__(stream=home.handle, max_version=V1)
        view.__dlpack__(stream=home.handle)
        assert calls == []


def test_minus_one_queues_nothing_and_notes_nobody(driver, monkeypatch):
    view, _ = make(driver)
    with counted(driver, monkeypatch, *QUEUED) as calls:
        view.__dlpack__(stream=-1, max_version=V1)
        assert calls == []
    assert view.export_owner.consumers == ()


@pytest.mark.parametrize("stream", [None, 1])
def test_none_and_one_are_the_legacy_stream(driver, monkeypatch, stream):
    view, _ = make(driver)
    with counted(driver, monkeypatch, *QUEUED) as calls:
        view.__dlpack__(stream=stream)
        assert waits(calls) == ["stream_wait_event"]
        assert calls[-1][1][0] in (0, 1)


def test_the_legacy_stream_does_not_wait_for_itself_under_its_other_name(driver, monkeypatch):
    data = np.zeros(N, "f4")
    stream = cuglue.as_stream(0)
    ptr = driver.malloc(data.nbytes, 0)
    driver.copy_async(ptr, data.ctypes.data, data.nbytes, CopyKind.H2D, 0)
    block = Block(ptr, data.nbytes, stream)
    block.finish(stream, cuglue.Access.WRITE)
    view = ArrayView(BlockOwner(block, memory_type=MemoryType.DEVICE), ptr, Layout.of((N,), "f4"))
    with counted(driver, monkeypatch, *QUEUED) as calls:
        view.__dlpack__(stream=1)
        view.__dlpack__()
        assert calls == []


def test_a_second_consumer_waits_for_all_that_the_first_queued(driver, monkeypatch):
    view, _ = make(driver)
    first, second = driver.Stream(), driver.Stream()
    view.__dlpack__(stream=first.ptr)
    for _ in range(2):  # nobody tells us what a consumer queues: asked again, its stream is joined again
        with counted(driver, monkeypatch, *QUEUED) as calls:
            view.__dlpack__(stream=second.ptr)
            names = [name for name, _ in calls]
        assert names == ["context_record", "stream_wait_event"], (
            "its number alone may not be touched: it may be gone"
        )
    third = driver.Stream()
    known = cuglue.as_stream(third)
    view.__dlpack__(stream=third.ptr)
    with counted(driver, monkeypatch, *QUEUED) as calls:
        view.__dlpack__(stream=second.ptr)
        assert ("event_record", third.ptr) in [(name, args[1]) for name, args in calls]
    assert known in view.export_owner.consumers


def test_readers_of_read_only_memory_are_ordered_after_the_write(driver, monkeypatch):
    view, home = make(driver, readonly=True)
    consumer = driver.Stream()
    with counted(driver, monkeypatch, *QUEUED) as calls:
        made = view.__dlpack__(stream=consumer.ptr, max_version=V1)
        assert made.readonly
        assert [args[1] for name, args in calls if name == "event_record"] == [home.handle]


def test_the_consumer_sees_the_bytes_in_its_own_order(driver):
    data = np.arange(N, dtype="f4")
    view, _ = make(driver, data=data)
    consumer = driver.Stream()
    view.__dlpack__(stream=consumer.ptr)
    out = np.zeros_like(data)
    driver.copy_async(out.ctypes.data, view.device_ptr, out.nbytes, CopyKind.D2H, consumer.ptr)
    driver.stream_synchronize(consumer.ptr)
    np.testing.assert_array_equal(out, data)


def test_without_order_the_oracle_objects(driver):
    view, _ = make(driver)
    consumer = driver.Stream()
    view.__dlpack__(stream=-1)
    out = np.zeros(N, "f4")
    driver.copy_async(out.ctypes.data, view.device_ptr, out.nbytes, CopyKind.D2H, consumer.ptr)
    with pytest.raises(Exception, match="copy_async"):
        driver.stream_synchronize(consumer.ptr)
    assert driver.hazards, "a consumer that passes -1 has to order itself"


# --- captures -------------------------------------------------------------------------------------------------


def test_a_capture_is_not_disturbed(driver, monkeypatch):
    view, home = make(driver)
    home.synchronize()
    driver.capture_begin(home.handle, CaptureMode.RELAXED)
    with counted(driver, monkeypatch, *QUEUED) as calls:
        view.__dlpack__(stream=-1)
        view.__dlpack__(stream=home.handle)
        assert calls == []
    with pytest.raises(CaptureError):
        view.__dlpack__(stream=-1, copy=True)
    with pytest.raises(CaptureError):
        view.numpy()
    graph = driver.capture_end(home.handle)
    driver.graph_destroy(graph)


@pytest.mark.parametrize("known", [True, False])
def test_a_consumer_that_captures_is_refused_before_anything_is_queued(driver, monkeypatch, known):
    view, _ = make(driver)
    consumer = driver.Stream()
    record = cuglue.as_stream(consumer) if known else None
    driver.capture_begin(consumer.ptr, CaptureMode.RELAXED)
    for copy in (None, True):
        with counted(driver, monkeypatch, *QUEUED) as calls:
            with pytest.raises(CaptureError, match="captures"):
                view.__dlpack__(stream=consumer.ptr, copy=copy)
            assert calls == []
    view.__dlpack__(stream=-1)
    assert view.export_owner.ledger.live() == ()
    assert view.export_owner.consumers == ()
    driver.graph_destroy(driver.capture_end(consumer.ptr))
    assert record is None or not record.capturing


# --- copies ---------------------------------------------------------------------------------------------------


def to_host(driver, ptr, stream):
    out = np.zeros(N, "f4")
    driver.copy_async(out.ctypes.data, ptr, out.nbytes, CopyKind.D2H, stream)
    driver.stream_synchronize(stream)
    return out


def test_copy_true_gives_memory_of_its_own(driver):
    view, _ = make(driver)
    consumer = driver.Stream()
    made = view.__dlpack__(stream=consumer.ptr, max_version=V1, copy=True)
    assert made.copied
    assert not hasattr(made, "readonly")
    assert made.ptr != view.device_ptr
    assert view.export_owner.ledger.live() == (), "the copy does not hold the original"
    np.testing.assert_array_equal(to_host(driver, made.ptr, consumer.ptr), np.arange(N, dtype="f4"))


def test_a_dropped_copy_is_freed_after_the_consumers_work(driver):
    view, _ = make(driver)
    consumer = driver.Stream()
    retire = device_state(driver, 0).retire
    made = view.__dlpack__(stream=consumer.ptr, copy=True)
    assert driver.inventory()["malloc_async"] == 1
    out = np.zeros(N, "f4")
    driver.copy_async(out.ctypes.data, made.ptr, out.nbytes, CopyKind.D2H, consumer.ptr)  # its own work
    del made
    assert driver.inventory()["malloc_async"] == 1, "a finaliser frees nothing"
    retire.drain(block=True)
    assert driver.inventory()["malloc_async"] == 0
    driver.device_synchronize(0)
    np.testing.assert_array_equal(out, np.arange(N, dtype="f4"))


def test_copies_of_a_consumer_that_orders_itself_are_made_on_the_home_stream(driver, monkeypatch):
    view, home = make(driver)
    with counted(driver, monkeypatch, *QUEUED) as calls:
        made = view.__dlpack__(stream=-1, copy=True)
        assert [(name, args[-1]) for name, args in calls] == [("copy_async", home.handle)]
    np.testing.assert_array_equal(to_host(driver, made.ptr, home.handle), np.arange(N, dtype="f4"))


@pytest.mark.parametrize("async_memory", [True, False])
def test_a_copy_that_fails_leaves_nothing_behind(async_memory, monkeypatch):
    from cuglue.driver.sim import SimDriver

    with cuglue.use_driver(SimDriver(disable=() if async_memory else ("async_memory",))) as driver:
        view, _ = make(driver)
        consumer = driver.Stream()
        before = driver.inventory()

        def refuse(*_):
            raise DriverError("copy", code=1, name="cudaErrorInvalidValue", call="copy_async")

        with monkeypatch.context() as patch:
            patch.setattr(driver, "copy_async", refuse)
            with pytest.raises(DriverError):
                view.__dlpack__(stream=consumer.ptr, copy=True)
        device_state(driver, 0).retire.drain(block=True)
        after = driver.inventory()
        assert (after["malloc"], after["malloc_async"]) == (before["malloc"], before["malloc_async"])
        assert view.export_owner.ledger.live() == ()
        made = view.__dlpack__(stream=consumer.ptr, copy=True)
        np.testing.assert_array_equal(to_host(driver, made.ptr, consumer.ptr), np.arange(N, dtype="f4"))
        del made
        device_state(driver, 0).retire.drain(block=True)
        assert driver.inventory()["malloc"] == before["malloc"]


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("stream", [None, 1, -1])
def test_to_the_host(driver, readonly, stream):
    view, _ = make(driver, readonly=readonly)
    for version in (None, (0, 8), V1):
        seen = read(view.__dlpack__(dl_device=(1, 0), max_version=version, stream=stream))
        assert seen.device == (1, 0)
        assert seen.flags == (IS_COPIED if version == V1 else 0)
    with pytest.raises(BufferError):
        view.__dlpack__(dl_device=(1, 0), copy=False, max_version=V1)
    assert view.export_owner.ledger.live() == ()


def test_numpy_copies_and_waits(driver):
    view, home = make(driver)
    np.testing.assert_array_equal(view.numpy(), np.arange(N, dtype="f4"))
    assert home.completed == home.seq


def test_numpy_comes_after_what_a_consumer_queued(driver):
    view, _ = make(driver)
    consumer = driver.Stream()
    taken = view.__dlpack__(stream=consumer.ptr, max_version=V1)
    driver.fill_async(view.device_ptr, 0, view.layout.nbytes, consumer.ptr)
    np.testing.assert_array_equal(view.numpy(), np.zeros(N, "f4"))
    del taken


def test_numpy_copies_strided_memory_tightly(driver):
    data = np.arange(16, dtype="f4")
    view, _ = make(driver, data=data)
    part = ArrayView(view.export_owner, view.device_ptr, Layout((3, 2), (20, 8), "f4"))
    got = part.numpy()
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, [[0, 2], [5, 7], [10, 12]])


# --- interfaces -----------------------------------------------------------------------------------------------


def test_cuda_array_interface_is_built_and_nothing_else(driver, monkeypatch):
    view, home = make(driver)
    with counted(driver, monkeypatch, *QUEUED) as calls:
        fields = view.__cuda_array_interface__
        assert view.__cuda_array_interface__ == fields
        assert hasattr(view, "__cuda_array_interface__")
        assert calls == []
    assert fields == {
        "shape": (N,), "typestr": "<f4", "data": (view.device_ptr, False), "strides": None, "version": 3,
        "stream": home.handle,
    }  # fmt: skip
    assert view.export_owner.cai_read
    assert view.export_owner.ledger.live() == ()


def test_device_memory_is_never_a_numpy_array(driver):
    for memory_type in (MemoryType.DEVICE, MemoryType.MANAGED):
        view, _ = make(driver, memory_type=memory_type)
        assert not hasattr(view, "__array_interface__")
        assert view.__dlpack_device__() == (2, 0)
        for attempt in (np.asarray, np.array, lambda v: np.add(v, 1), lambda v: v.__array__()):
            with pytest.raises(TypeError, match=r"numpy\(\)"):
                attempt(view)
        with pytest.raises(RuntimeError, match="device"):
            np.from_dlpack(_Capsule(view))


class _Capsule:
    """Says what a real capsule of device memory says."""

    def __init__(self, view):
        self._view = view

    def __dlpack__(self, **_):
        raise RuntimeError("unsupported device")

    def __dlpack_device__(self):
        return self._view.__dlpack_device__()


def test_pinned_memory_is_host_memory(driver):
    view, _ = make(driver, memory_type=MemoryType.PINNED)
    assert view.__dlpack_device__() == (1, 0)
    np.testing.assert_array_equal(np.asarray(view), np.arange(N, dtype="f4"))
    with pytest.raises(UnsupportedError):
        view.cupy()


def test_read_only_memory_has_no_cuda_array_interface(driver):
    view, _ = make(driver, readonly=True)
    assert not hasattr(view, "__cuda_array_interface__")
    assert not view.export_owner.cai_read


def test_types_that_the_interface_cannot_name(driver):
    view, _ = make(driver, data=np.arange(N, dtype="u2"))
    half = view.view("bfloat16")
    assert not hasattr(half, "__cuda_array_interface__")
    made = half.__dlpack__(stream=-1, max_version=V1)
    assert made.element == (4, 16)
    assert made.layout.dtype == "u2"
    with pytest.raises(UnsupportedError, match="bfloat16"):
        half.cupy()


# --- CuPy -----------------------------------------------------------------------------------------------------


def test_cupy_array_over_the_memory(driver, monkeypatch):
    view, _ = make(driver)
    current = driver.Stream()
    with driver.current_stream(current), counted(driver, monkeypatch, *QUEUED) as calls:
        array = view.cupy()
        assert waits(calls) == ["stream_wait_event"]
        assert calls[-1][1][0] == current.ptr
    assert (array.shape, array.dtype, array.data.ptr) == ((N,), np.dtype("f4"), view.device_ptr)
    token = array.data.mem._owner
    assert token.owner is view.export_owner, "this is how a command finds the block of an array"
    (export,) = view.export_owner.ledger.live()
    assert export.filename == __file__
    part = array[3:]
    del array, token
    gc.collect()
    assert len(view.export_owner.ledger.live()) == 1, "a view of the array holds it too"
    del part
    assert view.export_owner.ledger.live() == ()


def test_cupy_arrays_of_all_layouts(driver):
    view, _ = make(driver, data=np.arange(64, dtype="u1"))
    for shape, strides in (((4, 8), (16, 1)), ((4, 4), (1, 4)), ((), ()), ((0, 3), (3, 1))):
        array = ArrayView(view.export_owner, view.device_ptr, Layout(shape, strides, "u1")).cupy()
        assert array.shape == shape
        assert array.strides == strides or 0 in shape
        assert array.data.ptr == (0 if 0 in shape else view.device_ptr)


def test_a_dead_block_exports_nothing(driver, monkeypatch):
    view, _ = make(driver)
    view.export_owner.block.advance("deallocate")
    with counted(driver, monkeypatch, *QUEUED) as calls:
        for attempt in (
            view.__dlpack_device__,
            view.__dlpack__,
            view.cupy,
            view.numpy,
            view.__array__,
            lambda: view.__cuda_array_interface__,
            lambda: view.__dlpack__(copy=True),
        ):
            with pytest.raises(ClosedError, match="generation"):
                attempt()
        assert calls == []


def test_whoever_an_export_is_made_for_is_noted(driver):
    owner = make(driver)[0].export_owner
    consumer = cuglue.as_stream(driver.Stream())
    assert export_on(owner, consumer, lambda: "made") == "made"
    assert owner.consumers == (consumer,)
    assert export_on(owner, None, lambda: "made") == "made"
    assert owner.consumers == (consumer,)


@pytest.mark.parametrize("raw", ["a stream", "the default stream"])
def test_torch_gets_a_capsule_for_its_current_stream(driver, monkeypatch, raw):
    """Stands for PyTorch: it says its stream as a number, and takes capsules as well as objects."""
    side = driver.Stream()
    expected = cuglue.as_stream(side if raw == "a stream" else 0)

    class Torch:
        initialized = True
        cuda = SimpleNamespace(is_initialized=lambda: Torch.initialized)
        _C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: side.ptr if raw == "a stream" else 0)
        from_dlpack = staticmethod(lambda given: given)

    monkeypatch.setitem(sys.modules, "torch", Torch)
    view, _ = make(driver)
    with counted(driver, monkeypatch, *QUEUED) as calls:
        made = view.torch()
    assert isinstance(made, Made)
    assert not made.versioned, "a capsule that every version takes"
    (consumer,) = view.export_owner.consumers
    assert consumer is expected
    assert [name for name, _ in calls] == ["event_record", "stream_wait_event"]
    Torch.initialized = False
    assert view.torch() is view, "PyTorch asks itself, once it is ready"
    Torch.initialized = True
    read_only, _ = make(driver, readonly=True)
    assert read_only.torch() is read_only
    del Torch._C._cuda_getCurrentRawStream
    assert view.torch() is view
