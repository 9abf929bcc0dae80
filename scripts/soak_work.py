"""What the threads of a soak do, and what they do it with.

Owns the work and its content checks. Must not know how long it goes on, nor what is counted meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

import cuglue
from cuglue import Access, CopyDescriptor, In, InOut, LaunchRecorder, Out, as_stream
from cuglue.core.device import device_state
from cuglue.driver.protocol import CopyKind
from cuglue.driver.sim import memory

from .prove.programs.kernels import ADD, SCALE
from .prove.programs.memory import pattern

Bytes = npt.NDArray[np.uint8]
MIB = 1 << 20
SIDE = 64  # texels of an image's row and column
BUFFER = 48_000  # bytes of an OpenGL buffer


class Wrong(Exception):
    """Bytes that are not what they should be."""


def compare(what: str, found: Any, wanted: Bytes) -> None:
    """Raise Wrong unless ``found`` holds ``wanted``."""
    got = np.asarray(found).reshape(-1).view(np.uint8)
    if not np.array_equal(got, wanted):
        bad = np.flatnonzero(got != wanted) if got.size == wanted.size else [-1]
        raise Wrong(f"{what}: {len(bad)} of {wanted.size} bytes wrong, the first at {bad[0]}")


class Setting:
    """What all threads share: the driver, a runtime, a resource, and an OpenGL context on its own thread."""

    def __init__(self, streams: int) -> None:
        self.driver: Any = cuglue.current_driver()
        self.state = device_state(self.driver, 0)
        self.simulated = self.state.capabilities.simulated
        if (
            self.simulated
        ):  # it parks memory that was unmapped, so that a late use finds poison: not for an hour
            memory._KEEP = 8 * MIB
        self.context = cuglue.gl.headless(thread="worker")
        self.ops: Any = self.context.ops
        self.resource: Any = cuglue.StatisticsResource(cuglue.PoolResource(cuglue.AsyncCudaResource()))
        self.rt = cuglue.Runtime(resource=self.resource, max_streams=streams)
        self.streams = [self.rt.stream(i) for i in range(streams)]

    def close(self) -> None:
        """End it all, the context last."""
        self.streams = []
        self.rt.close()
        self.resource.close()
        self.context.close()


class GlObjects:
    """A buffer and a texture of one thread: what OpenGL sees of them, on the context's thread."""

    def __init__(self, setting: Setting) -> None:
        self.ops = setting.ops
        self.names: dict[str, int] = self.ops.call(self._make)
        self.handles = {
            "buffer": cuglue.register_buffer(self.names["buffer"], ops=self.ops),
            "texture": cuglue.register_texture(self.names["texture"], ops=self.ops),
        }
        self.holds = {kind: np.zeros(handle.size, np.uint8) for kind, handle in self.handles.items()}

    @staticmethod
    def _make() -> dict[str, int]:
        from OpenGL import GL

        buffer, texture = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        GL.glCreateBuffers(1, buffer)
        GL.glNamedBufferData(int(buffer[0]), BUFFER, np.zeros(BUFFER, np.uint8), GL.GL_DYNAMIC_DRAW)
        GL.glCreateTextures(GL.GL_TEXTURE_2D, 1, texture)
        GL.glTextureStorage2D(int(texture[0]), 1, GL.GL_RGBA8, SIDE, SIDE)
        clear = np.zeros(4 * SIDE * SIDE, np.uint8)
        GL.glTextureSubImage2D(int(texture[0]), 0, 0, 0, SIDE, SIDE, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, clear)
        return {"buffer": int(buffer[0]), "texture": int(texture[0])}

    def draw(self, kind: str, number: int) -> None:
        """OpenGL replaces the contents."""
        data = self.holds[kind] = pattern(number, self.holds[kind].size)
        self.ops.call(self._put, kind, data)

    def _put(self, kind: str, data: Bytes) -> None:
        from OpenGL import GL

        name = self.names[kind]
        if kind == "buffer":
            GL.glNamedBufferSubData(name, 0, data.size, data)
        else:
            GL.glTextureSubImage2D(name, 0, 0, 0, SIDE, SIDE, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, data)

    def check(self, kind: str) -> None:
        """OpenGL sees what it should."""
        compare(f"OpenGL {kind}", self.ops.call(self._get, kind), self.holds[kind])

    def _get(self, kind: str) -> Bytes:
        from OpenGL import GL

        out = np.zeros(self.holds[kind].size, np.uint8)
        if kind == "buffer":
            GL.glGetNamedBufferSubData(self.names[kind], 0, out.size, out)
        else:
            GL.glGetTextureImage(self.names[kind], 0, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, out.nbytes, out)
        return out

    def close(self) -> None:
        """Handles first, then the objects."""
        for handle in self.handles.values():
            handle.close()
        self.ops.call(self._delete)

    def _delete(self) -> None:
        from OpenGL import GL

        GL.glDeleteBuffers(1, np.array([self.names["buffer"]], np.uint32))
        GL.glDeleteTextures(1, np.array([self.names["texture"]], np.uint32))


class Worker:
    """One thread: it does one thing after another, and holds nothing in between but its OpenGL objects and a graph."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.random = Random(seed)
        self.done: Counter[str] = Counter()
        self.objects = GlObjects(setting)
        self.kept = setting.rt.create(pattern(seed, 4096))
        self.value = pattern(seed, 4096)
        self.graph = self._captured()
        things = (self.maps, self.maps, self.writes, self.blocks, self.buffers, self.batches, self.graphs)
        self.things: Sequence[Callable[[], None]] = (*things, self.registers, self.exports)

    def step(self) -> None:
        """One thing, chosen at random."""
        thing = self.random.choice(self.things)
        thing()
        self.done[thing.__name__] += 1

    def _stream(self) -> Any:
        return self.random.choice(self.setting.streams)

    def _captured(self) -> Any:
        rt, stream = self.setting.rt, cuglue.as_stream(self.setting.streams[0])
        rt.launch(ADD, 8, 512, InOut(self.kept), 4096, 0, stream=stream)
        rt.synchronize()
        with rt.capture(stream) as capture:
            rt.launch(ADD, 8, 512, InOut(self.kept), 4096, 3, stream=stream)
        return capture.graph

    # --- what is done -----------------------------------------------------------------------------------------------
    def maps(self) -> None:
        """OpenGL draws; a map is read and, if writable, changed on two streams; OpenGL sees the change."""
        rt, objects = self.setting.rt, self.objects
        kind = self.random.choice(("buffer", "texture"))
        objects.draw(kind, self.random.randrange(10_000))
        before, size = objects.holds[kind], objects.holds[kind].size
        one, other, mutable = self._stream(), self._stream(), self.random.random() < 0.6
        handle = objects.handles[kind]
        grid = -(-size // 256)
        with handle.map_mut(one) if mutable else handle.map(one) as m:
            copy = rt.empty(size, stream=other)
            rt.launch(SCALE, grid, 256, In(m), size, Out(copy), size, 1, 0, stream=other)
            if mutable:
                rt.launch(ADD, grid, 256, InOut(m), size, 7, stream=other)
                objects.holds[kind] = before + np.uint8(7)
        compare(f"a copy of a map of the {kind}", rt.read(copy, stream=one).result(), before)
        objects.check(kind)

    def writes(self) -> None:
        """Whole contents in one line, both ways."""
        objects = self.objects
        kind = self.random.choice(("buffer", "texture"))
        handle = objects.handles[kind]
        data = objects.holds[kind] = pattern(self.random.randrange(10_000), handle.size)
        handle.write(data.reshape(handle.shape), self._stream())
        objects.check(kind)
        found = handle.read(stream := self._stream())
        if not self.setting.simulated:
            import cupy

            stream.synchronize()  # CuPy copies on its own current stream
            found = cupy.asnumpy(found)
        compare(f"{kind} read", found, data)

    def blocks(self) -> None:
        """Blocks of a resource, written on one stream, copied on another, given back on a third."""
        setting, driver = self.setting, self.setting.driver
        size = self.random.choice((256, 5000, 70_000, 600_000, 3 * MIB))
        value = self.random.randrange(256)
        home, writer, reader = (as_stream(self._stream(), driver=driver) for _ in range(3))
        one = setting.resource.allocate(size, home, "soak")
        other = setting.resource.allocate(size, home, "soak")
        with LaunchRecorder(writer).write(one):
            driver.fill_async(one.ptr, value, size, writer.handle)
        with LaunchRecorder(reader).read(one).write(other):
            driver.copy_async(other.ptr, one.ptr, size, CopyKind.D2D, reader.handle)
        setting.resource.deallocate(one)
        host = np.zeros(size, np.uint8)
        cuglue.use(other, home, Access.READ)
        driver.copy_async(host.ctypes.data, other.ptr, size, CopyKind.D2H, home.handle)
        home.synchronize()
        setting.resource.deallocate(other)
        compare("a block", host, np.full(size, value, np.uint8))

    def buffers(self) -> None:
        """A buffer handed from stream to stream; some of the reads are never looked at."""
        rt = self.setting.rt
        size = self.random.choice((64, 4096, 100_000))
        data = pattern(self.random.randrange(10_000), size)
        buffer = rt.create(data, stream=self._stream())
        for _ in range(3):
            rt.launch(ADD, -(-size // 256), 256, InOut(buffer), size, 5, stream=self._stream())
            rt.read(buffer, stream=self._stream())
        future = rt.read(buffer, stream=self._stream())
        buffer.close()
        compare("a buffer", future.result(), data + np.uint8(15))

    def batches(self) -> None:
        """A command with a temporary buffer and bytes written from pinned memory."""
        rt, size = self.setting.rt, 8192
        data = pattern(self.random.randrange(10_000), size)
        source, target = rt.create(data), rt.empty(size, stream=self._stream())
        with rt.command(InOut(source), Out(target), stream=self._stream()) as cmd, cmd.empty(size) as middle:
            aside = cmd.reserve_cpu(size)
            aside[...] = data[::-1]
            cmd.write_to_gpu(CopyDescriptor(source, (size,), (1,), 1), aside)
            del aside
            cmd.kernel(SCALE, 32, 256, In(source), size, Out(middle), size, 3, 1)
            cmd.kernel(SCALE, 32, 256, In(middle), size, Out(target), size, 1, 1)
            future = cmd.read_async(target.descriptor(size))
        compare("a batch", future.result(), data[::-1] * np.uint8(3) + np.uint8(2))

    def graphs(self) -> None:
        """Replays of one graph on changing streams."""
        for _ in range(3):
            self.graph.replay(self._stream())
        self.value = self.value + np.uint8(9)
        compare(
            "what a graph writes", self.setting.rt.read(self.kept, stream=self._stream()).result(), self.value
        )

    def registers(self) -> None:
        """Objects of OpenGL that come and go."""
        objects = GlObjects(self.setting)
        kind = self.random.choice(("buffer", "texture"))
        objects.draw(kind, 5)
        found = objects.handles[kind].map(stream := self._stream())
        future = self.setting.rt.read(found, stream=stream)
        found.release()
        compare("a new object", future.result(), objects.holds[kind])
        objects.close()

    def exports(self) -> None:
        """Arrays made from a buffer that outlive it."""
        data = pattern(self.random.randrange(10_000), 2048)
        buffer = self.setting.rt.create(data, stream=self._stream())
        view = buffer.array()
        buffer.close()
        if self.setting.simulated:
            compare("an export", np.from_dlpack(view), data)
        else:
            import cupy

            compare("an export", cupy.asnumpy(cupy.from_dlpack(view)), data)

    def close(self) -> None:
        """Give back what it keeps."""
        self.graph.close()
        self.kept.close()
        self.objects.close()
