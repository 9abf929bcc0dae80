"""Questions to OpenGL through plain C functions: errors are typed, named and left nowhere, as through PyOpenGL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import OpenGL.GL as GL
import pytest

from cuglue.errors import DriverError, NoContextError, UnsupportedError
from cuglue.graphics import glcontext, glquestions
from cuglue.graphics.glquestions import Questions

pytestmark = pytest.mark.gl


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[glcontext.GlContext]:
    with glcontext.headless() as made:
        yield made


@pytest.fixture
def buffer() -> int:
    name = GL.GLuint()
    GL.glCreateBuffers(1, name)
    GL.glNamedBufferData(name.value, 24, None, GL.GL_STATIC_DRAW)
    return int(name.value)


def test_an_error_names_object_call_and_code_and_leaves_no_flag(buffer: int) -> None:
    ask = Questions("buffer x")
    with pytest.raises(DriverError, match="buffer x") as caught:
        ask.size("glGetNamedBufferParameteri64v", buffer, 0xDEAD)
    error = caught.value
    assert (error.name, error.code) == ("GL_INVALID_ENUM", 0x0500)
    assert error.call == "glGetNamedBufferParameteri64v"
    assert GL.glGetError() == 0


def test_an_error_of_one_of_several_numbers_ends_them_all() -> None:
    with pytest.raises(DriverError) as caught:
        Questions("texture x").numbers("glGetTextureParameteriv", 987654, parameters=(0x1006, 0x1006))
    assert caught.value.call == "glGetTextureParameteriv"
    assert GL.glGetError() == 0


def test_flags_pending_before_are_logged_and_dropped(buffer: int, caplog: pytest.LogCaptureFixture) -> None:
    raw = glquestions._find()
    raw["glGetNamedBufferParameteri64v"](987654, 0xDEAD, None)
    assert Questions("buffer y").size("glGetNamedBufferParameteri64v", buffer, 0x8764) == 24
    assert "before a call about buffer y: GL_INVALID" in caplog.text


def test_a_context_that_reports_for_ever_ends_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a lost context does."""
    functions: dict[str, Callable[..., Any]] = dict(glquestions._find())
    ask = Questions("buffer z")
    monkeypatch.setitem(functions, "glGetError", lambda: 0x0507)
    ask._functions = functions
    with pytest.raises(DriverError, match="GL_CONTEXT_LOST"):
        ask.exists("glIsBuffer", 1)


def test_a_library_that_lacks_a_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(glquestions._RESULTS, "glNoSuchFunction", None)
    monkeypatch.setattr("OpenGL.platform.PLATFORM.getExtensionProcedure", lambda name: None)
    glquestions._find.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=r"buffer w.*glNoSuchFunction.*4\.5 core") as caught:
            Questions("buffer w")
        assert caught.value.reason == "gl_version"
    finally:
        monkeypatch.undo()
        glquestions._find.cache_clear()


def test_a_function_that_only_the_context_knows_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows: the library exports what was there in 1997."""
    from OpenGL.platform import PLATFORM

    class Bare:
        GL = PLATFORM.EGL  # a library without glIsBuffer
        getExtensionProcedure = staticmethod(PLATFORM.getExtensionProcedure)

    result = glquestions._RESULTS["glIsBuffer"]
    assert glquestions._function(Bare, "glIsBuffer", result)(987654) == 0


def test_without_a_context_the_question_is_not_asked() -> None:
    found: list[BaseException] = []

    def elsewhere() -> None:
        try:
            Questions("buffer v")
        except NoContextError as error:
            found.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(found) == 1
