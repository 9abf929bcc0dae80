"""Arguments that are none: refused by a typed error that names them, before any driver is called."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from graphics.subjects import make_buffer, make_texture

import cuglue
from cuglue import external
from cuglue.driver.protocol import Driver
from cuglue.errors import CuglueError, LayoutError, MapConflictError, UsageError
from cuglue.graphics.glcontext import GlContext
from cuglue.graphics.glops import GlOps
from cuglue.graphics.handle import CudaHandle
from cuglue.testing import trace

pytestmark = [pytest.mark.gl, pytest.mark.usefixtures("way")]


def kind_of(junk: Any) -> str:
    return type(junk).__name__


JUNK: list[Any] = [b"x", 1.5, -1, True, object(), [], float("nan"), 2**70]


@pytest.fixture
def image(driver: Driver, context: GlContext) -> Iterator[CudaHandle]:
    with cuglue.register_texture(make_texture(8, 6)) as handle:
        yield handle


def refused(call: Callable[[], object], kind: type[CuglueError] = UsageError) -> None:
    with trace() as calls, pytest.raises(kind):
        call()
    assert calls == []


@pytest.mark.parametrize("junk", [None, *JUNK[:5], "x", JUNK[6]], ids=kind_of)
def test_what_is_no_sequence_of_handles(image: CudaHandle, junk: Any) -> None:
    refused(lambda: cuglue.map_all(junk))
    refused(lambda: cuglue.map_all([image, junk]))
    refused(lambda: cuglue.map_all(image))  # type: ignore[arg-type] # one handle is no sequence


@pytest.mark.parametrize("junk", ["x", *JUNK], ids=kind_of)
def test_what_is_no_context(context: GlContext, junk: Any) -> None:
    refused(lambda: GlOps.inline(junk))
    refused(lambda: GlOps.worker(junk))


@pytest.mark.parametrize("junk", [None, "x", *JUNK], ids=kind_of)
def test_what_is_made_on_a_worker_and_no_context(junk: Any) -> None:
    refused(lambda: GlOps.worker(lambda: junk))


@pytest.mark.parametrize("junk", ["x", b"x", -1, True, object(), float("nan"), None], ids=kind_of)
def test_what_is_no_time_limit(context: GlContext, junk: Any) -> None:
    refused(lambda: GlOps.pumped(time_limit=junk))
    refused(lambda: GlOps.pumped().pump(junk))


def test_a_pump_may_wait_for_ever(context: GlContext) -> None:
    ops = GlOps.pumped()
    ran: list[int] = []
    ops.post(lambda: ran.append(1))
    assert ops.pump(float("inf")) == 1
    assert ran == [1]
    ops.close()


@pytest.mark.parametrize(
    "options",
    [
        {"thread": "wroker"},
        {"thread": None},
        {"device": -1},
        {"device": "x"},
        {"device": 1.5},
        {"device": True},
        {"uuid": "x" * 16},
        {"uuid": b"x"},
        {"uuid": 5},
    ],
    ids=str,
)
def test_what_is_no_thread_device_or_uuid_of_a_context(options: dict[str, Any]) -> None:
    """Each of them gave a context: on this thread, on whichever device."""
    refused(lambda: cuglue.gl.headless(**options))


@pytest.mark.parametrize("junk", [None, *JUNK], ids=kind_of)
def test_what_is_no_tensor(junk: Any) -> None:
    refused(lambda: cuglue.Tensor(junk, "RGBA8"), LayoutError)
    refused(lambda: cuglue.Tensor((4, 4), junk))


@pytest.mark.parametrize("junk", ["x", *JUNK[:5], object], ids=kind_of)
def test_what_is_no_element_type(image: CudaHandle, junk: Any) -> None:
    with image.map() as m:
        refused(lambda: m.view(junk), LayoutError)


class Ops:
    """What maps for somebody else, and does nothing."""

    def map(self, res: int) -> None: ...
    def unmap(self, res: int) -> None: ...
    def unregister(self, res: int) -> None: ...


@pytest.mark.parametrize("junk", [None, "x", *JUNK[:5]], ids=kind_of)
def test_what_is_no_resource_size_or_ops(driver: Driver, junk: Any) -> None:
    refused(lambda: CudaHandle.from_gl(1, junk, Ops()), LayoutError)
    refused(lambda: CudaHandle.from_gl(1, 64, junk))


def test_whatever_is_true_means_in_place(image: CudaHandle) -> None:
    """One part however it is spelled: a map in place and a copy conflict."""
    with image.map_mut(in_place="yes") as m:  # type: ignore[arg-type] # that is the point
        assert m.in_place
        with pytest.raises(MapConflictError):
            image.map(in_place=1)  # type: ignore[arg-type] # the same
        with pytest.raises(MapConflictError):
            image.map()


def test_a_sequence_may_be_anything_that_gives_handles(image: CudaHandle, context: GlContext) -> None:
    with cuglue.register_buffer(make_buffer(64)) as buffer, cuglue.map_all(iter((image, buffer))) as maps:
        assert len(maps) == 2


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_handle_and_its_map_are_not_copied(image: CudaHandle, way: Callable[[Any], Any]) -> None:
    """The end of a copy closed the handle, or left the map, that the original still had."""
    with image.map_mut() as m:
        for subject in (image, m, m.view()) if way is not copy.copy else (image, m):
            refused(lambda subject=subject: way(subject))
    assert not image.closed
    image.read()


def test_what_is_no_format_width_function_or_memory(driver: Driver) -> None:
    memory, fd = external.export_fd(4096)
    size: dict[str, Any] = {"height": 4, "allocation_size": memory.size}
    for junk in (None, *JUNK):
        refused(lambda junk=junk: external.import_image(fd, width=4, format=junk, **size))
        refused(lambda junk=junk: external.verify(junk, fd))
    for junk in (None, "x", b"x", 1.5, -1, True):
        refused(lambda junk=junk: external.import_image(fd, width=junk, format="RGBA8", **size), LayoutError)
    for junk in ("x", 5, True):
        refused(lambda junk=junk: external.import_semaphore_fd(fd, completed=junk))
    for junk in (None, "x", 1.5, -1):
        refused(lambda junk=junk: external.verify(memory, junk))
    memory.close()
    os.close(fd)
