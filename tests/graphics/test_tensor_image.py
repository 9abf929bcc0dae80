"""Tensors: host memory with padded rows, and a handle behind it (A1, A12, A13)."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import glpixels
import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.shared_memory import memory_file
from graphics.subjects import make_buffer, make_texture

import cuglue
from cuglue import external
from cuglue.driver.protocol import Driver
from cuglue.errors import (
    BusyError,
    ClosedError,
    DriverError,
    LayoutError,
    MapConflictError,
    MapUnavailableError,
    UnsupportedError,
    UsageError,
)
from cuglue.graphics.cparts import CountedChannel
from cuglue.graphics.glcontext import GlContext
from cuglue.graphics.handle import CudaHandle
from cuglue.graphics.parts import CudaClientParts
from cuglue.graphics.tensor import Tensor
from cuglue.testing.faults import fail
from cuglue.testing.handle_suite import peek, poke


# --- A1: without a handle -------------------------------------------------------------------------------------------
def test_A1_a_host_tensor_has_no_cuda_and_its_host_map_works(driver: Any) -> None:
    with Tensor((4, 6), "RGBA8") as tensor:
        assert tensor.cuda is None
        before = dict(driver.counts)
        assert tensor.cuda_map() is None
        assert tensor.cuda_map_mut() is None
        with tensor.map() as pixels:
            assert (pixels.shape, pixels.dtype) == ((4, 6, 4), np.uint8)
            pixels[...] = 5
        with tensor.map(readonly=True) as pixels:
            assert (pixels == 5).all()
            with pytest.raises(ValueError, match="read-only"):
                pixels[0] = 1
        assert driver.counts == before
    assert cuglue.Tensor is Tensor


@pytest.mark.parametrize(
    ("shape", "format", "row_stride", "expected", "strides", "nbytes"),
    [
        ((4, 6), "RGBA8", None, (4, 6, 4), (24, 4, 1), 96),
        ((4, 6, 4), "RGBA8", 32, (4, 6, 4), (32, 4, 1), 96),
        ((4, 6), "R32F", 64, (4, 6, 1), (64, 4, 4), 96),
        ((4, 8), "RGB8_PACKED", 30, (4, 8, 3), (30, 3, 1), 96),
        ((4, 8), "RGB32F_PLANAR", 64, (3, 4, 8), (256, 64, 4), 384),
        ((241, 321), "NV12", None, (362, 322), (322, 1), 362 * 322),
        ((241, 321), "NV12", 384, (362, 384), (384, 1), 362 * 384),
        ((48, 64), "NV16", 64, (96, 64), (64, 1), 96 * 64),
    ],
)
def test_A12_rows_of_the_host_are_row_stride_apart(
    shape: Any, format: str, row_stride: Any, expected: Any, strides: Any, nbytes: int
) -> None:
    tensor = Tensor(shape, format, row_stride=row_stride)
    assert tensor.shape == expected
    assert tensor.nbytes == nbytes
    with tensor.map() as pixels:
        assert (pixels.shape, pixels.strides) == (expected, strides)
        values = np.arange(pixels.size).reshape(pixels.shape).astype(pixels.dtype)
        pixels[...] = values
    with tensor.map() as pixels:
        np.testing.assert_array_equal(pixels, values)
    tensor.close()


@pytest.mark.parametrize(
    ("shape", "format", "row_stride"),
    [
        ((4, 6), "RGBA8", 23),
        ((4, 6), "RGBA8", 0),
        ((4, 6), "RGBA8", -24),
        ((4, 6), "R32F", 26),
        ((4, 6), "NV12", 7),
        ((4, 6, 3), "RGBA8", None),
        ((4,), "RGBA8", None),
        ((4, 6, 4, 1), "RGBA8", None),
        ((0, 6), "RGBA8", None),
        ((4, -6), "RGBA8", None),
        ((4.0, 6), "RGBA8", None),
        ((True, 6), "RGBA8", None),
        ((4, 7), "RGB32F_PLANAR", None),
    ],
)
def test_bad_tensors(shape: Any, format: str, row_stride: Any) -> None:
    with pytest.raises(LayoutError):
        Tensor(shape, format, row_stride=row_stride)


@pytest.mark.parametrize("format", ["RGB10_A2", "DEPTH_COMPONENT32F", "unknown"])
def test_bad_formats(format: str) -> None:
    with pytest.raises(UnsupportedError):
        Tensor((4, 4), format)


# --- with a handle --------------------------------------------------------------------------------------------------
@contextmanager
def on_texture(width: int, height: int, row_stride: int | None = None) -> Iterator[tuple[Tensor, int]]:
    name = make_texture(width, height)
    handle = cuglue.register_texture(name)
    with Tensor((height, width), "RGBA8", row_stride=row_stride, cuda=handle) as tensor:
        yield tensor, name
    GL.glDeleteTextures([name])


@pytest.mark.gl
@pytest.mark.parametrize(("width", "height", "row_stride"), [(640, 480, 2816), (256, 128, 1280)])
def test_A12_a_padded_host_image_and_tight_cuda_rows(
    driver: Any, context: GlContext, width: int, height: int, row_stride: int
) -> None:
    """``len == w*h*bpt`` while ``row_stride * h`` is more; a pattern travels through the pitched host view."""
    pattern = np.random.default_rng(1).integers(0, 256, (height, width, 4), np.uint8)
    with on_texture(width, height, row_stride=row_stride) as (tensor, name):
        with tensor.map() as pixels:
            assert pixels.strides == (row_stride, 4, 1)
            pixels[...] = pattern
        np.testing.assert_array_equal(glpixels.read_image(name, GL.GL_TEXTURE_2D), pattern)
        with tensor.cuda_map() as m:  # type: ignore[union-attr]
            assert len(m) == width * height * 4 < tensor.row_stride * height
            np.testing.assert_array_equal(peek(m), pattern.reshape(-1))
            view = m.numpy()
            with pytest.raises(IndexError):
                view.reshape(-1)[tensor.row_stride * (height - 1)]
        with tensor.cuda_map_mut() as m:  # type: ignore[union-attr]
            poke(m, 255 - pattern.reshape(-1))
        with tensor.map(readonly=True) as pixels:
            np.testing.assert_array_equal(pixels, 255 - pattern)


@pytest.mark.gl
def test_A13_semi_planar_rows_are_as_wide_as_the_stride(driver: Any, context: GlContext) -> None:
    name = make_texture(336, 362, "R8")
    handle = cuglue.register_texture(name, format="NV12", width=321, height=241)
    with Tensor((241, 321), "NV12", row_stride=336, cuda=handle) as tensor:
        data = np.random.default_rng(2).integers(0, 256, (362, 336), np.uint8)
        with tensor.map() as plane:
            plane[...] = data
        with tensor.cuda_map() as m:  # type: ignore[union-attr]
            assert tensor.row_stride * tensor.rows == len(m)
            np.testing.assert_array_equal(peek(m), data.reshape(-1))
    GL.glDeleteTextures([name])


@pytest.mark.gl
def test_a_larger_buffer_keeps_what_lies_behind_the_image(driver: Any, context: GlContext) -> None:
    name = make_buffer(200)
    glpixels.write_buffer(name, np.full(200, 9, np.uint8))
    with Tensor((4, 6), "RGBA8", row_stride=40, cuda=cuglue.register_buffer(name)) as tensor:
        with tensor.map() as pixels:
            assert (pixels == 9).all()
            pixels[...] = 1
        found = glpixels.read_buffer(name)
        assert (found[:96] == 1).all()
        assert (found[96:] == 9).all()
    GL.glDeleteBuffers(1, [name])


@pytest.mark.gl
def test_an_exception_inside_publishes(driver: Any, context: GlContext) -> None:
    with on_texture(4, 4) as (tensor, name):

        def body() -> None:
            with tensor.map() as pixels:
                pixels[...] = 3
                raise KeyError("body")

        with pytest.raises(KeyError):
            body()
        assert (glpixels.read_image(name, GL.GL_TEXTURE_2D) == 3).all()


@pytest.mark.gl
def test_an_object_that_is_too_small_is_refused(driver: Any, context: GlContext) -> None:
    name = make_buffer(95)
    with cuglue.register_buffer(name) as handle:
        with pytest.raises(LayoutError, match="at least 96"):
            Tensor((4, 6), "RGBA8", cuda=handle)
        assert not handle.closed
    GL.glDeleteBuffers(1, [name])


@pytest.mark.gl
def test_closing(driver: Any, context: GlContext) -> None:
    with on_texture(4, 4) as (tensor, _):
        handle = tensor.cuda
        assert handle is not None
        with tensor.map():
            with pytest.raises(BusyError):
                tensor.close()
        assert not handle.closed
        tensor.close()
        tensor.close()
        assert tensor.closed
        assert handle.closed
        for call in (tensor.cuda_map, tensor.cuda_map_mut, tensor.__enter__, lambda: tensor.record_write(1)):
            with pytest.raises(ClosedError):
                call()
        with pytest.raises(ClosedError), tensor.map():
            pass


def test_a_closed_host_tensor_refuses(driver: Any) -> None:
    tensor = Tensor((4, 4), "RGBA8")
    tensor.close()
    ops: Any = None
    parts = CudaClientParts(
        resource=1, size=64, map_fn=ops, unmap_fn=ops, unregister_fn=ops, channel=CountedChannel()
    )
    for call in (
        tensor.cuda_map,
        tensor.cuda_map_mut,
        lambda: tensor.record_write(1),
        lambda: tensor.attach(parts),
        tensor.map().__enter__,
    ):
        with pytest.raises(ClosedError):
            call()
    parts.unregister_fn = lambda resource: None
    parts.close()


def test_the_host_sees_what_it_waited_for(driver: Any) -> None:
    """Memory that no unmap waits for: a host map does."""
    fd = memory_file(4096, bytes(range(96)))
    handle = CudaHandle.from_external(external.import_fd(fd, allocation_size=4096), size=96)
    with Tensor((4, 6), "RGBA8", row_stride=40, cuda=handle) as tensor:
        with tensor.map() as pixels:
            assert (pixels.reshape(-1) == np.arange(96)).all()
            pixels[...] = 255 - pixels
        assert os.pread(fd, 96, 0) == bytes(255 - n for n in range(96))
    os.close(fd)


def test_record_write_reaches_the_handle(driver: Any) -> None:
    from cuglue.driver.protocol import ArrayInfo, TexelKind

    array = driver.array_create(ArrayInfo(4, 4, 0, 8, 4, TexelKind.UINT), 0)
    handle = CudaHandle.from_array(array, texels=4, rows=4, bytes_per_texel=4)
    with Tensor((4, 4), "RGBA8", cuda=handle) as tensor:
        tensor.record_write(0)
        with tensor.cuda_map():  # type: ignore[union-attr]
            pass
        tensor.record_write(3)
        assert tensor.cuda_map() is None
        with pytest.raises(MapUnavailableError), tensor.map():
            pass
        with pytest.raises(UsageError):
            tensor.record_write(-1)
    driver.array_destroy(array)


def test_repr_and_formats(driver: Driver) -> None:
    tensor = Tensor((4, 6), "RGBA8", row_stride=32)
    assert repr(tensor) == "Tensor((4, 6, 4), RGBA8, row_stride=32, cuda=None)"
    assert (tensor.dtype, tensor.rows) == (np.dtype("u1"), 4)


@pytest.mark.gl
@pytest.mark.parametrize("make", [make_buffer, None], ids=["buffer", "texture"])
def test_a_host_map_that_writes_is_alone(driver: Any, context: GlContext, make: Any) -> None:
    """Host maps of a handle's object use one copy: a second one copied the object over what the first had written."""
    name = make(64) if make else make_texture(4, 4)
    handle = cuglue.register_buffer(name) if make else cuglue.register_texture(name)
    with Tensor((4, 4), "RGBA8", cuda=handle) as tensor:
        with tensor.map() as pixels:
            pixels[...] = 7
            for another in (tensor.map(), tensor.map(readonly=True)):
                with pytest.raises(MapConflictError, match="for writing"), another:
                    pass
            for call in (tensor.cuda_map, tensor.cuda_map_mut):
                with pytest.raises(MapConflictError, match="for writing"):
                    call()
        with tensor.map(readonly=True) as one, tensor.map(readonly=True) as other:
            assert (one == 7).all()
            assert (other == 7).all()
            with tensor.cuda_map():  # type: ignore[union-attr]
                pass
            for call in (tensor.cuda_map_mut, tensor.map().__enter__):
                with pytest.raises(MapConflictError, match="for reading"):
                    call()
        with tensor.map() as pixels:
            assert (pixels == 7).all()
    (GL.glDeleteBuffers if make else GL.glDeleteTextures)(1, [name])


@contextmanager
def tensor_over(kind: str, driver: Any) -> Iterator[Tensor]:
    """Of 4 x 4 pixels in a buffer, a texture, or a buffer that was given away."""
    name = make_texture(4, 4) if kind == "texture" else make_buffer(64)
    handle = cuglue.register_texture(name) if kind == "texture" else cuglue.register_buffer(name)
    with Tensor((4, 4), "RGBA8", cuda=None if kind == "parts" else handle) as tensor:
        if kind == "parts":
            with handle.into_client_parts() as parts:
                tensor.attach(parts)
                yield tensor
                tensor.close()
        else:
            yield tensor
    (GL.glDeleteTextures if kind == "texture" else GL.glDeleteBuffers)(1, [name])


@pytest.mark.gl
@pytest.mark.parametrize("kind", ["buffer", "texture", "parts"])
@pytest.mark.parametrize("by", ["tensor", "handle"])
@pytest.mark.parametrize(
    ("cuda_writes", "host_writes"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_A20_A21_a_host_map_beside_one_of_cuda(
    driver: Any, context: GlContext, kind: str, by: str, cuda_writes: bool, host_writes: bool
) -> None:
    """Readers share; where one of them writes, the second is refused and the first goes on: its pixels arrive."""
    with tensor_over(kind, driver) as tensor:
        with tensor.map() as pixels:
            pixels[...] = 5
        for _ in range(3):  # also on the way that a buffer goes when it is mapped again
            calls: Any = (tensor.cuda_map, tensor.cuda_map_mut)
            if by == "handle":
                assert tensor.cuda is not None
                calls = (tensor.cuda.map, tensor.cuda.map_mut)
            with calls[cuda_writes]() as m:
                if cuda_writes:
                    poke(m, np.full(m.size, 9, np.uint8))
                if cuda_writes or host_writes:
                    with pytest.raises(MapConflictError) as caught, tensor.map(readonly=not host_writes):
                        pass
                    assert caught.value.held == ("write" if cuda_writes else "read")
                    assert f"by CUDA for {'writing' if cuda_writes else 'reading'}" in str(caught.value)
                else:
                    with tensor.map(readonly=True) as pixels:
                        assert (pixels == 5).all()
                        assert (peek(m) == 5).all()
            with tensor.map(readonly=True) as pixels:
                assert (pixels == (9 if cuda_writes else 5)).all()
        with tensor.map() as pixels:
            pixels[...] = 6
        with tensor.cuda_map() as m:  # type: ignore[union-attr]
            assert (peek(m) == 6).all()


def maps_of(tensor: Tensor, *, writes: bool) -> list[Callable[[], Any]]:
    """Every way to map the object of a tensor by CUDA."""
    handle = tensor.cuda
    assert handle is not None
    if writes:
        calls: list[Callable[[], Any]] = [tensor.cuda_map_mut, handle.map_mut, handle.try_map_mut]
    else:
        calls = [tensor.cuda_map, handle.map, handle.try_map]
    return [*calls, lambda: cuglue.map_all([handle], mutable=writes)]


@pytest.mark.gl
@pytest.mark.parametrize("kind", ["buffer", "texture", "parts"])
@pytest.mark.parametrize(
    ("cuda_writes", "host_writes"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_A20_A21_a_map_of_cuda_beside_one_of_the_host(
    driver: Any, context: GlContext, kind: str, cuda_writes: bool, host_writes: bool
) -> None:
    """Whoever asks the handle itself is told as well: what it wrote was undone when the host left its map."""
    with tensor_over(kind, driver) as tensor:
        for _ in range(2):  # so that buffers go by a plan
            for call in maps_of(tensor, writes=True):
                with call():
                    pass
        with tensor.map(readonly=not host_writes) as pixels:
            if host_writes:
                pixels[...] = 8
            for call in maps_of(tensor, writes=cuda_writes):
                if cuda_writes or host_writes:
                    with pytest.raises(MapConflictError) as caught:
                        call()
                    assert caught.value.held == ("write" if host_writes else "read")
                    assert "by the host" in str(caught.value)
                else:
                    with call():
                        pass
        for call in maps_of(tensor, writes=True):
            with call() as m:
                seen = m[0] if isinstance(m, list) else m
                assert (peek(seen) == (8 if host_writes else 0)).all()


@pytest.mark.gl
def test_A19_alias_shares_with_the_host_too(driver: Any, context: GlContext) -> None:
    with tensor_over("buffer", driver) as tensor:
        with tensor.map() as pixels:
            with tensor.cuda_map_mut(alias=True) as m:  # type: ignore[union-attr]
                poke(m, np.full(m.size, 9, np.uint8))
            pixels[...] = 8
        with tensor.cuda_map() as m:  # type: ignore[union-attr]
            assert (peek(m) == 8).all(), "the host's came last"


@pytest.mark.gl
def test_A20_a_registration_is_not_given_away_under_a_map_of_the_host(
    driver: Any, context: GlContext
) -> None:
    with tensor_over("buffer", driver) as tensor:
        assert tensor.cuda is not None
        for readonly in (True, False):
            with tensor.map(readonly=readonly), pytest.raises(MapConflictError, match="by the host"):
                tensor.cuda.into_client_parts()
        with tensor.cuda_map():  # type: ignore[union-attr]
            pass


@pytest.mark.gl
@pytest.mark.parametrize("kind", ["buffer", "texture", "parts"])
def test_A22_a_handle_is_not_closed_under_a_map_of_the_host(
    driver: Any, context: GlContext, kind: str
) -> None:
    """What the host wrote was lost: there was nothing any more to copy it to."""
    with tensor_over(kind, driver) as tensor:
        handle = tensor.cuda
        assert handle is not None
        with tensor.map() as pixels:
            pixels[...] = 4
            with pytest.raises(BusyError, match="a map of the host"):
                handle.close()
            assert not handle.closed
        with handle.map() as m:
            assert (peek(m) == 4).all()
        handle.close()
        assert handle.closed


@pytest.mark.gl
def test_tensors_over_one_object_tell_each_other(driver: Any, context: GlContext) -> None:
    """Both would copy it back."""
    with tensor_over("texture", driver) as tensor, Tensor((4, 4), "RGBA8", cuda=tensor.cuda) as other:
        with tensor.map(), pytest.raises(MapConflictError, match="by the host"), other.map(readonly=True):
            pass
        with tensor.map(readonly=True), other.map(readonly=True) as pixels:
            assert (pixels == 0).all()


@pytest.mark.gl
@pytest.mark.parametrize("kind", ["buffer", "texture"])
def test_a_host_map_that_could_not_be_made_holds_nothing(driver: Any, context: GlContext, kind: str) -> None:
    with tensor_over(kind, driver) as tensor:
        with fail("copy_2d_async"), pytest.raises(DriverError), tensor.map():
            pass
        with tensor.cuda_map_mut():  # type: ignore[union-attr]
            with pytest.raises(MapConflictError), tensor.map():
                pass
        with tensor.cuda_map_mut():  # type: ignore[union-attr]
            pass


@pytest.mark.gl
@pytest.mark.filterwarnings("ignore:.*never released:ResourceWarning")
def test_a_map_of_cuda_that_was_forgotten_is_no_conflict(driver: Any, context: GlContext) -> None:
    with tensor_over("texture", driver) as tensor:
        m = tensor.cuda_map_mut()
        poke(m, np.full(64, 3, np.uint8))
        del m
        gc.collect()
        with tensor.map() as pixels:
            assert (pixels == 3).all()


def test_host_maps_without_a_handle_share(driver: Any) -> None:
    with Tensor((4, 4), "RGBA8") as tensor, tensor.map() as one, tensor.map() as other:
        one[...] = 7
        assert (other == 7).all()


@pytest.mark.gl
def test_an_image_with_other_rows_is_refused(driver: Any, context: GlContext) -> None:
    """Its rows were taken for the tensor's: every row after the first was sheared."""
    name = make_texture(9, 5)
    with cuglue.register_texture(name) as handle:
        with pytest.raises(LayoutError, match="5 rows of 36 bytes"):
            Tensor((5, 7), "RGBA8", cuda=handle)
        with pytest.raises(LayoutError, match="4 rows of 36 bytes"):
            Tensor((4, 9), "RGBA8", cuda=handle)
        assert not handle.closed
    GL.glDeleteTextures(1, [name])


def test_what_is_no_handle_is_refused(driver: Any) -> None:
    with pytest.raises(UsageError, match="a CudaHandle"):
        Tensor((4, 4), "RGBA8", cuda=5)  # type: ignore[arg-type]
