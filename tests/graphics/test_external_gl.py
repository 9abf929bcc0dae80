"""Imported memory as an OpenGL buffer: which may be, and that nothing is left where it fails."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import OpenGL.GL as GL
import pytest
from graphics.shared_memory import descriptors, memory_file

from cuglue import external
from cuglue.driver.protocol import Driver
from cuglue.errors import DriverError, LayoutError, NoContextError, UnsupportedError, UsageError
from cuglue.graphics.glcontext import GlContext
from cuglue.graphics.glmemory import SharedGlBuffer

pytestmark = pytest.mark.gl

N = 8192


def test_virtual_memory_is_refused(driver: Driver, context: GlContext) -> None:
    """OpenGL's copies would reach only about a quarter of the bytes."""
    memory, fd = external.export_fd(N)
    with memory, pytest.raises(UnsupportedError) as caught:
        external.gl_buffer(memory, fd)
    assert vars(caught.value)["reason"] == "vmm"
    assert "Vulkan" in str(caught.value)
    os.close(fd)


@pytest.mark.gpu
def test_virtual_memory_is_refused_on_a_gpu(driver: Driver, context: GlContext) -> None:
    memory, fd = external.export_fd(N)
    with memory, pytest.raises(UnsupportedError, match="Vulkan"):
        external.gl_buffer(memory, fd)
    os.close(fd)


def test_other_kinds_are_refused(driver: Any, context: GlContext) -> None:
    fd = memory_file(N)
    heap = external.D3D12Heap(driver.fake_win32(fd))
    with (
        external.import_win32(heap, allocation_size=N) as memory,
        pytest.raises(UnsupportedError, match="D3D12Heap"),
    ):
        external.gl_buffer(memory, fd)
    os.close(fd)


def test_ranges_and_descriptors_are_checked(driver: Driver, context: GlContext) -> None:
    fd = memory_file(N)
    with external.import_fd(fd, allocation_size=N) as memory:
        for options in ({"offset": N + 1}, {"size": N + 1}, {"offset": -1}, {"offset": 1, "size": N}):
            with pytest.raises(LayoutError):
                external.gl_buffer(memory, fd, **options)
        with pytest.raises(UsageError):
            external.gl_buffer(memory, -1)
        with pytest.raises(UsageError):
            external.gl_buffer(fd, fd)  # type: ignore[arg-type]
    os.close(fd)


def test_without_a_context(driver: Driver) -> None:
    fd = memory_file(N)
    with external.import_fd(fd, allocation_size=N) as memory, pytest.raises(NoContextError):
        external.gl_buffer(memory, fd)
    os.close(fd)


def test_an_import_that_opengl_refuses_leaves_nothing(driver: Driver, context: GlContext) -> None:
    """A software renderer takes the descriptor, and then makes no buffer of it."""
    fd = memory_file(N)
    with external.import_fd(fd, allocation_size=N) as memory:
        with pytest.raises(DriverError):
            external.gl_buffer(memory, fd)
        before = descriptors()
        for _ in range(5):
            with pytest.raises(DriverError):
                external.gl_buffer(memory, fd, dedicated=True)
        assert descriptors() == before
        assert GL.glGetError() == 0
    os.close(fd)


def test_a_forgotten_buffer_is_reported_and_deleted_on_its_thread() -> None:
    posted: list[Any] = []
    buffer = SharedGlBuffer(SimpleNamespace(post=posted.append), 7, 8, 100)  # type: ignore[arg-type] # as much as is used
    with pytest.warns(ResourceWarning, match=r"SharedGlBuffer.*test_external_gl\.py.*never closed"):
        del buffer
    assert len(posted) == 1
