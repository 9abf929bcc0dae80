"""The contracts of resources and handles, kept on a device that is not current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from graphics.subjects import BufferSubject, ImageSubject, make_buffer, make_texture, map_before
from memory_tools import LAYERS
from OpenGL import GL

import cuglue
from cuglue import AsyncCudaResource, DeviceMemoryResource, DirectCudaResource, ManagedResource, PoolResource
from cuglue.formats import by_name
from cuglue.graphics import image_copy
from cuglue.graphics.glcontext import headless
from cuglue.testing import HandleSuite, ResourceSuite
from cuglue.testing.handle_suite import Subject

# --- memory -----------------------------------------------------------------------------------------------------


class Elsewhere(ResourceSuite):
    """``malloc`` needs the device current; the other calls do not."""

    cupy = False
    two: Any

    @pytest.fixture(autouse=True)
    def _devices(self, two: Any) -> None:
        self.two = two


class TestDirect(Elsewhere):
    def make(self) -> DeviceMemoryResource:
        return DirectCudaResource(self.two.there)


class TestDirectSync(Elsewhere):
    def make(self) -> DeviceMemoryResource:
        return DirectCudaResource(self.two.there, mode="sync")


class TestAsync(Elsewhere):
    def make(self) -> DeviceMemoryResource:
        return AsyncCudaResource(self.two.there)


class TestManaged(Elsewhere):
    def make(self) -> DeviceMemoryResource:
        return ManagedResource(self.two.there)


class TestPool(Elsewhere):
    def make(self) -> DeviceMemoryResource:
        return PoolResource(AsyncCudaResource(self.two.there))


class TestAllLayers(Elsewhere):
    def make(self) -> DeviceMemoryResource:
        resource: DeviceMemoryResource = PoolResource(AsyncCudaResource(self.two.there))
        for layer in LAYERS.values():
            resource = layer(resource)
        return resource


class TestMalloc(Elsewhere):
    """With the device current, CuPy allocates."""

    cupy = True

    @pytest.fixture(autouse=True)
    def _devices(self, two: Any) -> Iterator[None]:
        self.two = two
        with two.on(two.there):
            yield

    def make(self) -> DeviceMemoryResource:
        return AsyncCudaResource(self.two.there)


class TestMallocOfAPool(TestMalloc):
    def make(self) -> DeviceMemoryResource:
        return PoolResource(AsyncCudaResource(self.two.there))


# --- maps -------------------------------------------------------------------------------------------------------


class MappedElsewhere(HandleSuite):
    """With a context on the GPU of the device that is not current."""

    two: Any

    @pytest.fixture(autouse=True)
    def _context(self, two: Any) -> Iterator[None]:
        self.two = two
        with headless(two.there):
            yield


@pytest.mark.gl
class TestBuffer(MappedElsewhere):
    mapped_before = False

    @contextmanager
    def make(self) -> Iterator[Subject]:
        name = make_buffer(1000)
        with cuglue.register_buffer(name, device=self.two.there) as handle:
            if self.mapped_before:
                map_before(handle)
            yield BufferSubject(handle, self.two.driver, name)
        GL.glDeleteBuffers(1, [name])


@pytest.mark.gl
class TestBufferMappedBefore(TestBuffer):
    """Its maps go by a plan."""

    mapped_before = True


@pytest.mark.gl
class TestTexture(MappedElsewhere):
    """Small enough for the driver's copy."""

    @contextmanager
    def make(self) -> Iterator[Subject]:
        name = make_texture(20, 7)
        with cuglue.register_texture(name, device=self.two.there) as handle:
            yield ImageSubject(handle, self.two.driver, name, GL.GL_TEXTURE_2D, by_name("RGBA8"))
        GL.glDeleteTextures([name])


@pytest.mark.gl
class TestTextureBySurface(TestTexture):
    """Copied by our kernels."""

    @pytest.fixture(autouse=True)
    def _no_image_is_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(image_copy, "SMALL_BYTES", 0)
