"""The contract of handles and maps, on each backing and driver: see :mod:`cuglue.testing.handle_suite`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import OpenGL.GL as GL
import pytest
from graphics.subjects import map_before, registered_buffer, registered_renderbuffer, registered_texture

from cuglue.driver.protocol import Driver
from cuglue.graphics import image_copy
from cuglue.graphics.glcontext import GlContext
from cuglue.graphics.image_copy import CopyPath
from cuglue.testing.handle_suite import HandleSuite, Subject


class OnADevice(HandleSuite):
    """With a driver and a context current."""

    driver: Driver

    @pytest.fixture(autouse=True, params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
    def _with_a_context(self, request: pytest.FixtureRequest) -> None:
        self.driver = request.getfixturevalue("driver")
        request.getfixturevalue("context")


@pytest.mark.gl
class TestGlBuffer(OnADevice):
    def make(self) -> AbstractContextManager[Subject]:
        return registered_buffer(self.driver)


@pytest.mark.gl
class TestGlBufferMappedBefore(OnADevice):
    """Its maps go by a plan."""

    @contextmanager
    def make(self) -> Iterator[Subject]:
        with registered_buffer(self.driver) as subject:
            map_before(subject.handle)
            yield subject


@pytest.mark.gl
class TestGlTexture(OnADevice):
    """Small enough for the driver's copy."""

    def make(self) -> AbstractContextManager[Subject]:
        return registered_texture(self.driver)


@pytest.mark.gl
class TestGlTextureBySurface(OnADevice):
    """Copied by our kernels."""

    @pytest.fixture(autouse=True)
    def _no_image_is_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(image_copy, "SMALL_BYTES", 0)

    def make(self) -> AbstractContextManager[Subject]:
        return registered_texture(self.driver)

    def test_the_surface_path_was_taken(self) -> None:
        with self.make() as subject:
            assert subject.handle.copy_path is CopyPath.SURFACE


@pytest.mark.gl
class TestGlTextureOfFloats(OnADevice):
    def make(self) -> AbstractContextManager[Subject]:
        return registered_texture(self.driver, 5, 3, "RG16", GL.GL_TEXTURE_RECTANGLE)


@pytest.mark.gl
class TestGlRenderbuffer(OnADevice):
    def make(self) -> AbstractContextManager[Subject]:
        return registered_renderbuffer(self.driver)


def test_the_suite_would_notice(context: GlContext) -> None:
    """It is run on something: a suite without tests passes always."""
    assert sum(name.startswith("test_") for name in dir(HandleSuite)) > 20
