"""Nothing is lost when a driver call fails: every public operation of several calls, with each failing in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from graphics.subjects import make_buffer, make_texture
from prove_operations import CASES, Case, graphics_cases

from cuglue.graphics.glcontext import headless


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_is_lost(case: Case) -> None:
    case.sweep().check()


@pytest.fixture(scope="module")
def objects() -> Iterator[tuple[int, int]]:
    """An OpenGL buffer and an OpenGL texture."""
    with headless():
        yield make_buffer(256), make_texture(8, 8)


@pytest.mark.gl
@pytest.mark.parametrize("first", [0, 2], ids=["buffer", "texture"])
def test_nothing_of_graphics_is_lost(first: int, objects: tuple[int, int]) -> None:
    """Written, then read: the read finds what the write left."""
    for case in list(graphics_cases(*objects))[first : first + 2]:
        case.sweep().check()
