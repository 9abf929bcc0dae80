"""Maps and registrations by the ten thousand: afterwards the process and the device hold what they held before.

On a GPU ``CUGLUE_SOAK=100000`` makes 100,000 maps and 2,000 registrations, which take a minute or two (an object
changes hands in 0.3 ms on the device).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import OpenGL.GL as GL
import pytest
from graphics.subjects import make_buffer, make_renderbuffer, make_texture

import cuglue
from cuglue.core.device import device_state
from cuglue.driver.protocol import Driver
from cuglue.driver.sim import memory
from cuglue.graphics.glcontext import GlContext

pytestmark = pytest.mark.gl

MIB = 1 << 20
CYCLES = int(os.environ.get("CUGLUE_SOAK", "5000"))


class Holdings:
    """What the process and the device hold, once all work is done."""

    def __init__(self, driver: Any) -> None:
        GL.glFinish()
        state = device_state(driver, 0)
        state.retire.drain(block=True)
        driver.device_synchronize(0)
        gc.collect()
        self.fds = len(os.listdir("/proc/self/fd"))
        self.objects = sys.getallocatedblocks()
        self.host = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        room = driver.memory_info(0)
        self.device = room.total - room.free
        self.waiting = len(state.retire)
        self.streams = len(state.streams)
        # What the driver made for us: the simulated one's inventory, the handles that the CUDA one has not ended.
        inventory = getattr(driver, "inventory", None)
        self.handles = (
            len(driver._owners)
            if inventory is None
            else {k: n for k, n in inventory().items() if k != "events"}
        )

    def check(self, after: Holdings, cycles: int) -> None:
        """Nothing of it grew with the cycles; allocators keep a little."""
        assert after.fds == self.fds
        assert after.handles == self.handles
        assert after.waiting == self.waiting
        assert after.streams <= self.streams  # those that nobody uses any more go
        assert after.device - self.device < 2 * MIB
        assert after.host - self.host < 16 * MIB
        assert after.objects - self.objects < max(500, cycles // 100)


def soak(driver: Any, cycle: Callable[[int], None], cycles: int) -> None:
    """Run so many cycles after a few of them, from which on nothing may grow."""
    for turn in range(min(cycles // 10, 1000)):
        cycle(turn)
    before = Holdings(driver)
    for turn in range(cycles):
        cycle(turn)
    before.check(Holdings(driver), cycles)


@pytest.fixture(autouse=True)
def _little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device keeps freed memory for late readers: so little here that it is full at once."""
    monkeypatch.setattr(memory, "_KEEP", 1 << 16)


@pytest.fixture
def streams(driver: Any) -> Iterator[list[Any]]:
    """Two streams, so that maps wait for each other."""
    handles = [driver.stream_create(0) for _ in range(2)]
    yield [_Stream(handle) for handle in handles]
    driver.device_synchronize(0)
    for handle in handles:
        driver.stream_destroy(handle)


class _Stream:
    """A stream object as array libraries have them."""

    device_id = 0

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def maps(driver: Any, streams: list[Any], cycles: int) -> None:
    """Buffers and images, read and written, exported and not, alone and together, on two streams by turns."""
    with ExitStack() as stack:
        handles = [cuglue.register_buffer(make_buffer(4096)), cuglue.register_texture(make_texture(16, 16))]
        handles += [cuglue.register_renderbuffer(make_renderbuffer(8, 8))]
        handles += [cuglue.register_buffer(make_buffer(100))]
        for handle in handles:
            stack.enter_context(handle)

        def cycle(turn: int) -> None:
            # Mostly buffers: an image changes hands more slowly.
            stream, kind = streams[turn // 8 % 2], turn % 64
            if turn % 8 == 0:
                # While one stream waits for the other, each change of hands takes an H200 two milliseconds.
                driver.device_synchronize(0)
            if kind == 63:
                with cuglue.map_all(handles, stream):
                    return
            if kind == 62:
                with handles[1].map(stream, in_place=True) as m:
                    m.surface()
                    return
            handle = handles[kind % 4] if kind > 55 else handles[0]
            with handle.map_mut(stream) if kind % 3 == 0 else handle.map(stream) as m:
                if kind % 16 == 5:
                    m.__dlpack__(max_version=(1, 0))
                elif kind % 16 == 6:
                    m.record(streams[1 - turn // 8 % 2])

        soak(driver, cycle, cycles)


def registrations(driver: Any, cycles: int) -> None:
    """Objects made, registered, mapped once, closed and deleted."""

    def cycle(turn: int) -> None:
        if turn % 2:
            name = make_buffer(1 << 16)
            with cuglue.register_buffer(name) as handle, handle.map():
                pass
            GL.glDeleteBuffers(1, [name])
        else:
            name = make_texture(64, 64)
            with cuglue.register_texture(name) as handle, handle.map_mut():
                pass
            GL.glDeleteTextures([name])

    soak(driver, cycle, cycles)


def test_maps_leave_nothing_behind(driver: Driver, context: GlContext, streams: list[Any]) -> None:
    maps(driver, streams, 800)


def test_row_69_registrations_leave_nothing_behind(driver: Driver, context: GlContext) -> None:
    registrations(driver, 200)


@pytest.mark.gpu
@pytest.mark.alone
def test_maps_on_a_gpu_leave_nothing_behind(driver: Driver, context: GlContext, streams: list[Any]) -> None:
    maps(driver, streams, CYCLES)


@pytest.mark.gpu
@pytest.mark.alone
def test_row_69_registrations_on_a_gpu_leave_nothing_behind(driver: Driver, context: GlContext) -> None:
    registrations(driver, CYCLES // 50)
