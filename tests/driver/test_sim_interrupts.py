"""Ctrl-C at any point inside the simulated device's calls that hand objects over: they can be repeated."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from interrupts import interrupted, interrupted_after

import cuglue
from cuglue.driver.protocol import RegisterFlags
from cuglue.driver.sim import SimDriver
from cuglue.errors import DriverError

FOLDER = Path(cuglue.__file__).parent / "driver" / "sim"
MODULES = tuple(f"driver/sim/{path.name}" for path in FOLDER.glob("*.py"))
N = 256
NOT_MAPPED, ALREADY_MAPPED = 211, 208

pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator:pytest.PytestUnraisableExceptionWarning"
)


class Objects:
    """A buffer and an image, registered, whose bytes are all 1."""

    def __init__(self) -> None:
        self.sim = sim = SimDriver()
        gl = sim.fake_gl()
        names = gl.buffer_object(N), gl.image_object(8, 8)
        self.bytes = [gl[name].data[0, 0].reshape(-1) for name in names]
        for data in self.bytes:
            data[:] = 1
        self.resources = [
            sim.gl_register_buffer(names[0], RegisterFlags.NONE, 0),
            sim.gl_register_image(names[1], 0x0DE1, RegisterFlags.NONE, 0),
        ]
        self.stream = sim.stream_create(0)

    def map(self) -> None:
        self.sim.graphics_map(self.resources, self.stream)

    def write(self) -> None:
        """Queue that all bytes become 2."""
        sim, (buffer, image) = self.sim, self.resources
        sim.fill_async(sim.graphics_pointer(buffer)[0], 2, N, self.stream)
        self.source = sim.malloc(N, 0)
        sim.fill_async(self.source, 2, N, self.stream)
        sim.copy_to_array_async(sim.graphics_array(image, 0, 0), self.source, 32, 32, 8, self.stream)

    def unmap(self) -> None:
        self.sim.graphics_unmap(self.resources, self.stream)

    def repeat(self, call: str) -> None:
        """``call`` for each object that it was not done for."""
        for resource in self.resources:
            try:
                getattr(self.sim, call)([resource], self.stream)
            except DriverError as error:
                assert error.code in (NOT_MAPPED, ALREADY_MAPPED)  # noqa: PT017 - mostly it raises nothing


def test_an_unmap_loses_no_bytes() -> None:
    for step in itertools.count(1):
        objects = Objects()
        objects.map()
        objects.write()
        where = interrupted(objects.unmap, step, *MODULES)
        objects.repeat("graphics_unmap")
        assert all((data == 2).all() for data in objects.bytes), f"step {step}, {where}"
        objects.map()
        objects.unmap()
        assert all((data == 2).all() for data in objects.bytes), f"step {step}, {where}"
        assert objects.sim.inventory()["mapped"] == 0
        objects.sim.free(objects.source, 0)
        assert objects.sim.hazards == []
        if where is None:
            break
    assert step > 50


def test_a_map_can_be_taken_back() -> None:
    for step in itertools.count(1):
        objects = Objects()
        where = interrupted(objects.map, step, *MODULES)
        objects.repeat("graphics_unmap")
        assert all((data == 1).all() for data in objects.bytes), f"step {step}, {where}"
        objects.map()
        objects.write()
        objects.unmap()
        assert all((data == 2).all() for data in objects.bytes), f"step {step}, {where}"
        objects.sim.free(objects.source, 0)
        assert objects.sim.hazards == []
        if where is None:
            break
    assert step > 20


@pytest.mark.parametrize("points", [interrupted, interrupted_after])
@pytest.mark.parametrize("what", ["fill", "wait"])
def test_the_device_goes_on_after_an_interrupt(what: str, points: Any) -> None:
    """A step that left its queue and was not counted, or came in and was: whoever waits for it waits for ever."""
    tried = 0
    for step in itertools.count(1):
        sim = SimDriver(wait_limit=0.01)
        stream = sim.stream_create(0)
        ptr = sim.malloc(N, 0)

        def fill(value: int = 1, sim: SimDriver = sim, ptr: int = ptr, stream: int = stream) -> None:
            sim.fill_async(ptr, value, N, stream)

        def wait(sim: SimDriver = sim, stream: int = stream) -> None:
            sim.stream_synchronize(stream)

        if what == "wait":
            fill()
            fill(2)
        where = points(fill if what == "fill" else wait, step, "driver/sim/queues.py")
        fill(3)
        wait()
        assert bytes(sim.host_view(ptr, N, False)) == bytes([3]) * N, where
        if where is None:
            break
        tried += 1
    assert tried > 0
