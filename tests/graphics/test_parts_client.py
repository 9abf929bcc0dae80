"""Registrations given away, to Python and to C: who ends them, and how often (A20, A21)."""

from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import glpixels
import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.shared_memory import settled
from graphics.subjects import make_buffer, make_texture

import cuglue
from cuglue.driver.protocol import Driver
from cuglue.errors import (
    AlreadyTransferredError,
    BusyError,
    ClosedError,
    DriverError,
    LayoutError,
    MapConflictError,
    UsageError,
)
from cuglue.graphics import cparts
from cuglue.graphics.cparts import ClientParts, CountedChannel
from cuglue.graphics.glcontext import GlContext, headless
from cuglue.graphics.handle import CudaHandle
from cuglue.graphics.parts import CudaClientParts, NotTransferableError
from cuglue.graphics.tensor import Tensor
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import peek, poke

N = 4096


class MockOps:
    """Functions of somebody else, counted; the memory is the simulated device's."""

    def __init__(self, driver: Any, nbytes: int = N) -> None:
        self.driver = driver
        self.ptr = driver.malloc(nbytes, 0)
        self.nbytes = nbytes
        self.calls: list[tuple[str, int]] = []

    def map(self, res: int) -> tuple[int, int]:
        self.calls.append(("map", res))
        return self.ptr, self.nbytes

    def unmap(self, res: int) -> None:
        self.calls.append(("unmap", res))

    def unregister(self, res: int) -> None:
        self.calls.append(("unregister", res))

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


@pytest.fixture
def ops(driver: Any) -> Iterator[MockOps]:
    made = MockOps(driver)
    yield made
    driver.device_synchronize(0)
    driver.free(made.ptr, 0)


@pytest.fixture
def parts(driver: Driver, ops: MockOps) -> Iterator[CudaClientParts]:
    with CudaHandle.from_gl(7, N, ops, driver=driver).into_client_parts() as made:
        yield made


def channel(parts: CudaClientParts) -> CountedChannel:
    assert isinstance(parts.channel, CountedChannel)
    return parts.channel


# --- A20: taking a handle apart -------------------------------------------------------------------------------------
def test_A20_a_handle_becomes_parts_without_an_unregister(driver: Driver, ops: MockOps) -> None:
    handle = CudaHandle.from_gl(7, N, ops, driver=driver)
    with handle.into_client_parts() as parts:
        assert (parts.resource, parts.size, parts.transferred) == (7, N, False)
        assert handle.closed
        handle.close()
        with pytest.raises(ClosedError):
            handle.map()
        with pytest.raises(ClosedError):
            handle.into_client_parts()
        assert ops.calls == []
        assert repr(parts) == f"CudaClientParts(size={N})"


def test_A20_parts_that_nobody_takes_end_the_registration_once(parts: CudaClientParts, ops: MockOps) -> None:
    parts.close()
    parts.close()
    assert ops.calls == [("unregister", 7)]
    assert channel(parts).count == 0
    with pytest.raises(ClosedError):
        parts.check()
    with pytest.raises(ClosedError):
        parts.as_ctypes()


def test_A20_other_handles_are_refused_and_stay_valid(driver: Any) -> None:
    from cuglue.driver.protocol import ArrayInfo, TexelKind

    array = driver.array_create(ArrayInfo(4, 4, 0, 8, 4, TexelKind.UINT), 0)
    with CudaHandle.from_array(array, texels=4, rows=4, bytes_per_texel=4) as handle:
        for kind in (NotTransferableError, TypeError, UsageError):
            with pytest.raises(kind, match="Array"):
                handle.into_client_parts()
        assert not handle.closed
        with handle.map():
            pass
    driver.array_destroy(array)


def test_A20_live_maps_are_a_conflict_and_nothing_is_transferred(driver: Driver, ops: MockOps) -> None:
    with CudaHandle.from_gl(7, N, ops, driver=driver) as handle:
        with handle.map() as m:
            with pytest.raises(MapConflictError):
                handle.into_client_parts()
            assert not handle.closed
            peek(m)
        handle.into_client_parts().close()
    assert ops.count("unregister") == 1


def test_forgotten_parts_end_the_registration_with_a_warning(driver: Driver, ops: MockOps) -> None:
    parts = CudaHandle.from_gl(7, N, ops, driver=driver).into_client_parts()
    with pytest.warns(ResourceWarning, match="test_parts_client.py.*never closed"):
        del parts
    gc.collect()
    settled(driver)
    assert ops.calls == [("unregister", 7)]


def test_closing_goes_on_where_it_failed(
    driver: Driver, ops: MockOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = CudaHandle.from_gl(7, N, ops, driver=driver).into_client_parts()
    calls: list[int] = []

    def failing(res: int) -> None:
        calls.append(res)
        if len(calls) == 1:
            raise DriverError("no", code=999, name="X", call="unregister")

    parts.unregister_fn = failing
    with pytest.raises(DriverError):
        parts.close()
    assert not parts.closed
    assert channel(parts).count == 1
    parts.close()
    assert calls == [7, 7]
    assert channel(parts).count == 0


# --- A21: attaching -------------------------------------------------------------------------------------------------
def test_A20_attach_and_free_unregister_once_and_release_once(parts: CudaClientParts, ops: MockOps) -> None:
    tensor = Tensor((32, 32), "RGBA8")
    tensor.attach(parts)
    assert parts.transferred
    assert channel(parts).count == 2  # ours, and the tensor's
    parts.close()
    assert channel(parts).count == 1
    assert ops.calls == []
    tensor.close()
    tensor.close()
    assert ops.calls == [("unregister", 7)]
    assert channel(parts).count == 0


def test_A21_the_callee_retains_and_the_caller_may_drop_at_once(parts: CudaClientParts, ops: MockOps) -> None:
    with Tensor((32, 32), "RGBA8") as tensor:
        tensor.attach(parts)
        parts.release()
        parts.close()
        assert channel(parts).count == 1
        m = tensor.cuda_map()
        assert m is not None
        with m:
            assert len(m) == N
        assert ops.calls == [("map", 7), ("unmap", 7)]
    assert ops.count("unregister") == 1


def test_A20_a_second_attach_is_refused(parts: CudaClientParts, ops: MockOps) -> None:
    with Tensor((32, 32), "RGBA8") as first, Tensor((32, 32), "RGBA8") as second:
        first.attach(parts)
        with pytest.raises(AlreadyTransferredError):
            second.attach(parts)
        with pytest.raises(AlreadyTransferredError):
            CudaHandle.from_client_parts(parts)
        with pytest.raises(AlreadyTransferredError):
            parts.mark_transferred()
        assert second.cuda is None
    assert ops.count("unregister") == 1


def test_A21_a_buffer_that_is_too_small_is_refused(parts: CudaClientParts, ops: MockOps) -> None:
    with Tensor((33, 32), "RGBA8") as tensor:
        with pytest.raises(LayoutError, match="at least 4224"):
            tensor.attach(parts)
        assert tensor.cuda is None
    assert not parts.transferred
    assert channel(parts).count == 1


def test_A21_a_map_that_is_too_small_is_undone(driver: Any) -> None:
    ops = MockOps(driver, 100)
    with (
        CudaHandle.from_gl(7, N, ops, driver=driver).into_client_parts() as parts,
        CudaHandle.from_client_parts(parts, driver=driver) as handle,
    ):
        with pytest.raises(LayoutError):
            handle.map()
        assert ops.calls == [("map", 7), ("unmap", 7)]
    driver.free(ops.ptr, 0)


@pytest.mark.parametrize("missing", ["map_fn", "unmap_fn", "unregister_fn", "channel"])
def test_A21_missing_functions_are_refused(parts: CudaClientParts, ops: MockOps, missing: str) -> None:
    kept = getattr(parts, missing)
    setattr(parts, missing, None)
    with Tensor((32, 32), "RGBA8") as tensor:
        with pytest.raises(UsageError, match=missing):
            tensor.attach(parts)
        assert tensor.cuda is None
    setattr(parts, missing, kept)
    assert not parts.transferred
    assert ops.calls == []


@pytest.mark.parametrize(
    ("name", "value"), [("resource", 0), ("resource", None), ("size", -1), ("size", None)]
)
def test_A21_bad_resources(parts: CudaClientParts, name: str, value: Any) -> None:
    kept = getattr(parts, name)
    setattr(parts, name, value)
    with pytest.raises(LayoutError):
        CudaHandle.from_client_parts(parts)
    setattr(parts, name, kept)
    assert not parts.transferred


def test_what_are_no_parts(driver: Driver) -> None:
    with Tensor((4, 4), "RGBA8") as tensor:
        for wrong in (None, 7, ClientParts()):
            with pytest.raises(UsageError):
                tensor.attach(wrong)  # type: ignore[arg-type]
            with pytest.raises(UsageError):
                CudaHandle.from_client_parts(wrong)  # type: ignore[arg-type]


def test_A21_attaching_over_a_registration_ends_that_once(driver: Driver, ops: MockOps) -> None:
    other = MockOps(driver)
    with Tensor((32, 32), "RGBA8") as tensor:
        with CudaHandle.from_gl(7, N, ops, driver=driver).into_client_parts() as first:
            tensor.attach(first)
        with CudaHandle.from_gl(8, N, other, driver=driver).into_client_parts() as second:
            with tensor.cuda_map():  # type: ignore[union-attr]
                with pytest.raises(MapConflictError):
                    tensor.attach(second)
            assert not second.transferred
            assert ops.count("unregister") == 0
            tensor.attach(second)
        assert ops.calls[-1] == ("unregister", 7)
        assert ops.count("unregister") == 1
        with tensor.cuda_map() as m:  # type: ignore[union-attr]
            assert m.device_ptr == other.ptr
    assert other.count("unregister") == 1
    assert ops.count("unregister") == 1
    driver.device_synchronize(0)
    driver.free(other.ptr, 0)


def test_counts_are_given_back_as_often_as_they_were_taken(parts: CudaClientParts) -> None:
    parts.retain()
    parts.release()
    parts.release()
    with pytest.raises(UsageError, match="retained"):
        parts.release()
    with pytest.raises(UsageError, match="not given up"):
        parts.retain()
    with pytest.raises(UsageError, match="not given up"):
        channel(parts).release()


# --- registered buffers ---------------------------------------------------------------------------------------------
@pytest.mark.gl
def test_A20_a_registered_buffer_travels_to_a_tensor(driver: Any, context: GlContext) -> None:
    name = make_buffer(N)
    before = driver.inventory()["resources"]
    handle = cuglue.register_buffer(name)
    with Tensor((32, 32), "RGBA8") as tensor:
        with handle.into_client_parts() as parts:
            tensor.attach(parts)
        data = np.random.default_rng(0).integers(0, 256, N, np.uint8)
        with tensor.cuda_map_mut() as m:  # type: ignore[union-attr]
            poke(m, data)
        np.testing.assert_array_equal(glpixels.read_buffer(name), data)
        with tensor.cuda_map() as m:  # type: ignore[union-attr]
            np.testing.assert_array_equal(peek(m), data)
        assert driver.inventory()["resources"] == before + 1
    assert driver.inventory()["resources"] == before
    GL.glDeleteBuffers(1, [name])


@pytest.mark.gl
def test_A20_a_handle_that_others_share_is_busy(driver: Driver, context: GlContext) -> None:
    name = make_buffer(N)
    with cuglue.register_buffer(name) as first:
        with cuglue.register_buffer(name), pytest.raises(BusyError):
            first.into_client_parts()
        first.into_client_parts().close()
    GL.glDeleteBuffers(1, [name])


@pytest.mark.gl
def test_A20_a_closed_handle_gives_nothing_of_another_away(driver: Driver, context: GlContext) -> None:
    name = make_buffer(N)
    first = cuglue.register_buffer(name)
    with cuglue.register_buffer(name) as second:
        first.close()
        with pytest.raises(ClosedError):
            first.into_client_parts()
        with second.map():
            pass
    GL.glDeleteBuffers(1, [name])


@pytest.mark.gl
def test_A20_textures_are_refused(driver: Driver, context: GlContext) -> None:
    name = make_texture(4, 4)
    with cuglue.register_texture(name) as handle:
        with pytest.raises(NotTransferableError, match="GlImage"):
            handle.into_client_parts()
        with handle.map():
            pass
    GL.glDeleteTextures([name])


@pytest.mark.gl
def test_A3_the_functions_run_on_the_contexts_thread(driver: Any) -> None:
    from cuglue.testing.interpose import interposed

    seen: set[int] = set()

    def noting(name: str, method: Any) -> Any:
        def call(*args: Any) -> Any:
            seen.add(threading.get_ident())
            return method(*args)

        return call

    with headless(thread="worker") as context:
        name = context.ops.call(make_buffer, N)
        handle = cuglue.register_buffer(name, ops=context.ops)
        names = ["graphics_map", "graphics_unmap", "graphics_pointer", "graphics_unregister"]
        with interposed(driver, names, noting), handle.into_client_parts() as parts:
            with CudaHandle.from_client_parts(parts) as taken, taken.map() as m:
                assert len(m) == N
        assert len(seen) == 1
        assert threading.get_ident() not in seen


@pytest.mark.gl
def test_a_handle_of_parts_and_others_map_at_the_same_time(driver: Any) -> None:
    """One thread waits for the context's thread, which works for the other: neither holds what the other wants."""
    with headless(thread="worker") as context:
        names = [context.ops.call(make_buffer, N) for _ in range(2)]
        direct = cuglue.register_buffer(names[0], ops=context.ops)
        parts = cuglue.register_buffer(names[1], ops=context.ops).into_client_parts()
        taken = CudaHandle.from_client_parts(parts)
        failures: list[BaseException] = []

        def maps(handle: CudaHandle) -> None:
            stream = driver.Stream()
            try:
                for _ in range(200):
                    with handle.map(stream):
                        pass
            except BaseException as error:  # noqa: BLE001 - reported below
                failures.append(error)

        threads = [threading.Thread(target=maps, args=(handle,), daemon=True) for handle in (direct, taken)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []
        for each in (direct, taken, parts):
            each.close()


@pytest.mark.gl
def test_A3_without_a_context_nothing_maps_and_ending_does_nothing(driver: Driver) -> None:
    with headless(thread="worker") as context:
        name = context.ops.call(make_buffer, N)
        parts = cuglue.register_buffer(name, ops=context.ops).into_client_parts()
        handle = CudaHandle.from_client_parts(parts)
    assert handle.try_map() is None
    assert parts.map_fn(parts.resource) is None
    parts.unmap_fn(parts.resource)
    handle.close()
    parts.close()


@pytest.mark.gl
def test_one_map_at_a_time_and_only_of_the_resource(driver: Any, context: GlContext) -> None:
    name = make_buffer(N)
    with cuglue.register_buffer(name).into_client_parts() as parts:
        res = parts.resource
        assert parts.map_fn(res) is not None
        with pytest.raises(UsageError, match="unmap it first"):
            parts.map_fn(res)
        parts.unmap_fn(res)
        with pytest.raises(UsageError, match="map before it"):
            parts.unmap_fn(res)
        for function in (parts.map_fn, parts.unmap_fn, parts.unregister_fn):
            with pytest.raises(UsageError, match="resource"):
                function(res + 1)
        with fail("graphics_pointer"), pytest.raises(DriverError):
            parts.map_fn(res)
        assert driver.inventory()["mapped"] == 0
    GL.glDeleteBuffers(1, [name])


# --- C --------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A C library that takes parts, and gives some."""
    library = tmp_path_factory.mktemp("client") / "client.so"
    source = Path(__file__).with_name("client.c")
    subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.client_parts_bytes.restype = ctypes.c_size_t
    loaded.client_attach.argtypes = [ctypes.POINTER(ClientParts), ctypes.c_size_t]
    loaded.client_parts.argtypes = [ctypes.POINTER(ClientParts), ctypes.c_size_t]
    return loaded


def test_A20_the_structure_is_the_one_of_C(client: Any) -> None:
    assert client.client_parts_bytes() == ctypes.sizeof(ClientParts) == 64
    offsets = {name: getattr(ClientParts, name).offset for name, _ in ClientParts._fields_}
    names = ("context", "retain", "release", "map", "unmap", "unregister", "resource", "size")
    assert offsets == {name: 8 * n for n, name in enumerate(names)}


def test_A21_a_C_library_takes_maps_and_ends(client: Any, parts: CudaClientParts, ops: MockOps) -> None:
    assert client.client_attach(parts.as_ctypes(), N + 1) == -2
    assert channel(parts).count == 1
    assert client.client_attach(parts.as_ctypes(), N) == 0
    parts.mark_transferred()
    assert channel(parts).count == 2
    parts.close()
    gc.collect()  # the pointers live on: the library has retained them
    address, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
    assert client.client_map_once(ctypes.byref(address), ctypes.byref(nbytes)) == 0
    assert (address.value, nbytes.value) == (ops.ptr, N)
    assert channel(parts).number in cparts._kept
    assert client.client_free() == 0
    assert ops.calls == [("map", 7), ("unmap", 7), ("unregister", 7)]
    assert channel(parts).count == 0
    assert channel(parts).number not in cparts._kept


@pytest.mark.gl
def test_A21_C_writes_a_registered_buffer(client: Any, driver: Any, context: GlContext) -> None:
    name = make_buffer(64)
    with cuglue.register_buffer(name).into_client_parts() as parts:
        assert client.client_attach(parts.as_ctypes(), 64) == 0
        parts.mark_transferred()
    address, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
    assert client.client_map(ctypes.byref(address), ctypes.byref(nbytes)) == 0
    stream = driver.Stream()
    assert address.value is not None
    driver.fill_async(address.value, 0x42, nbytes.value, stream.ptr)
    assert client.client_unmap() == 0
    assert (glpixels.read_buffer(name) == 0x42).all()
    stream.synchronize()
    assert client.client_free() == 0
    assert driver.inventory()["resources"] == 0
    GL.glDeleteBuffers(1, [name])


def test_errors_do_not_leave_through_C(
    client: Any, parts: CudaClientParts, ops: MockOps, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(res: int) -> Any:
        raise ValueError("broken")

    parts.map_fn = parts.unmap_fn = broken
    assert client.client_attach(parts.as_ctypes(), 0) == 0
    parts.mark_transferred()
    address, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
    with caplog.at_level(logging.CRITICAL + 1, "cuglue"):
        assert client.client_map(ctypes.byref(address), ctypes.byref(nbytes)) == -1
        assert client.client_unmap() == -1
    assert address.value is None
    assert client.client_free() == 0


def test_calls_of_C_come_from_any_thread(client: Any, parts: CudaClientParts, ops: MockOps) -> None:
    assert client.client_attach(parts.as_ctypes(), N) == 0
    parts.mark_transferred()
    address, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
    thread = threading.Thread(
        target=lambda: client.client_map_once(ctypes.byref(address), ctypes.byref(nbytes))
    )
    thread.start()
    thread.join()
    assert address.value == ops.ptr
    client.client_free()


def test_A21_parts_of_a_C_library_are_attached(client: Any, driver: Any) -> None:
    given = ClientParts()
    client.client_parts(given, 64)
    with CudaClientParts.from_ctypes(given) as parts, Tensor((4, 4), "RGBA8") as tensor:
        assert (client.client_owners(), client.client_count(0)) == (2, 1)
        tensor.attach(parts)
        assert client.client_owners() == 3
        parts.close()
        assert client.client_owners() == 2
        m = tensor.cuda_map()
        assert m is not None
        assert len(m) == 64
        m.release()
        assert [client.client_count(n) for n in (2, 3, 4)] == [1, 1, 0]
    with CudaClientParts.from_ctypes(given) as again:
        with pytest.raises(UsageError, match="came from C"):
            again.as_ctypes()
        again.mark_transferred()
    assert client.client_count(4) == 1
    assert client.client_count(1) == client.client_count(0) == 3


@pytest.mark.parametrize("name", ["context", "retain", "release", "map", "unmap", "unregister", "resource"])
def test_A21_nulls_are_refused(client: Any, driver: Driver, name: str) -> None:
    given = ClientParts()
    client.client_parts(given, 64)
    kind = dict(ClientParts._fields_)[name]
    setattr(given, name, kind())
    with pytest.raises(UsageError, match=name):
        CudaClientParts.from_ctypes(given)
    assert client.client_owners() == 1
    assert [client.client_count(n) for n in range(5)] == [0] * 5
