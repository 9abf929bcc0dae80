"""What a failed graphics call is told besides its code."""

from __future__ import annotations

import pytest
from graphics.subjects import make_texture, registered_texture

import cuglue
from cuglue.driver.protocol import Driver, MemoryInfo
from cuglue.errors import DriverError, PublishError
from cuglue.graphics import diagnose
from cuglue.graphics.glcontext import GlContext
from cuglue.testing.faults import fail

pytestmark = pytest.mark.gl


@pytest.mark.parametrize("code", sorted(diagnose.MEANINGS))
def test_rows_49_54_every_code_gets_findings(driver: Driver, context: GlContext, code: int) -> None:
    with fail("gl_register_image", persistent=True, code=code), pytest.raises(DriverError) as caught:
        cuglue.register_texture(make_texture(8, 8))
    found = caught.value.findings
    assert isinstance(found, dict)
    assert found["meaning"] == diagnose.MEANINGS[code]
    assert str(context.id) == found["context"]
    assert context.renderer in found["renderer"]
    assert driver.device_name(0) in found["device"]
    assert found["meaning"] in str(caught.value)


def test_other_codes_get_none(driver: Driver, context: GlContext) -> None:
    with fail("gl_register_image", persistent=True, code=719), pytest.raises(DriverError) as caught:
        cuglue.register_texture(make_texture(8, 8))
    assert not caught.value.findings


@pytest.mark.parametrize("call", ["graphics_map", "graphics_unmap"])
def test_mapping_and_leaving_are_explained(driver: Driver, context: GlContext, call: str) -> None:
    with registered_texture(driver) as subject:
        with fail(call, code=304):
            m = None if call == "graphics_map" else subject.handle.map()
            with pytest.raises(DriverError) as caught:
                (subject.handle.map if m is None else m.release)()
        assert caught.value.findings
        if m is not None:
            m.release()


def test_the_cause_of_a_failed_publish_is_explained(driver: Driver, context: GlContext) -> None:
    with registered_texture(driver) as subject:
        m = subject.handle.map_mut()
        with fail("copy_to_array_async", code=999), pytest.raises(PublishError) as caught:
            m.release()
        assert isinstance(caught.value.__cause__, DriverError)
        assert caught.value.__cause__.findings
        m.cancel()


def test_row_83_little_memory_left_is_said(
    driver: Driver, context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "memory_info", lambda device: MemoryInfo(1 << 20, 1 << 30))
    with fail("gl_register_image", persistent=True, code=801), pytest.raises(DriverError) as caught:
        cuglue.register_texture(make_texture(8, 8))
    assert "possibly out of memory" in str(caught.value)


def test_a_question_that_fails_is_left_out(
    driver: Driver, context: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error is the one to see."""
    with (
        fail("gl_register_image", persistent=True, code=304),
        fail("memory_info", persistent=True),
        pytest.raises(DriverError) as caught,
    ):
        cuglue.register_texture(make_texture(8, 8))
    assert caught.value.call == "gl_register_image"
    assert isinstance(caught.value.findings, dict)
    assert "memory" not in caught.value.findings
    assert "thread" in caught.value.findings


def test_without_a_context_the_findings_say_so(driver: Driver) -> None:
    found = diagnose.findings(219, driver, 0)
    assert found["context"] == "no OpenGL context is current on this thread"
    assert "renderer" not in found
