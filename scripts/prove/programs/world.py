"""The library's side of a random program: a device, a runtime, a resource, graphics objects, and named objects.

Owns how they are made and how it is seen that nothing of them is left. Must not know what a program should give.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from ctypes import c_int64
from typing import Any, TypeVar

import cuglue
from cuglue import as_stream, external
from cuglue.core.device import device_state
from cuglue.driver.protocol import RegisterFlags
from cuglue.driver.sim import SimDriver
from cuglue.formats import by_gl
from cuglue.graphics.buffers import GlBuffer
from cuglue.graphics.defaults import image_memory
from cuglue.graphics.glcurrent import ThreadRef
from cuglue.graphics.globjects import ImageInfo
from cuglue.graphics.glops import GlOps
from cuglue.graphics.glqueue import drain, run
from cuglue.graphics.handle import CudaHandle
from cuglue.graphics.images import GlImage
from cuglue.graphics.life import Life
from cuglue.graphics.planes import Carried, image_layout
from cuglue.graphics.registration import GlRegistration

from .memory import Bytes

T = TypeVar("T")
RGBA8, TEXTURE_2D = 0x8058, 0x0DE1

#: How the memory resource of a program is made.
RESOURCES: dict[str, Callable[[], Any]] = {
    "async": cuglue.AsyncCudaResource,
    "direct": cuglue.DirectCudaResource,
    "pool": lambda: cuglue.PoolResource(cuglue.AsyncCudaResource()),
    "pool of sync": lambda: cuglue.PoolResource(cuglue.DirectCudaResource(mode="sync")),
    "budget": lambda: cuglue.GlobalDeviceBudget(cuglue.AsyncCudaResource(), 1 << 28),
    "sliced": lambda: cuglue.PoolResource(
        cuglue.AsyncCudaResource(), layout=[cuglue.Sliced(1 << 16), cuglue.Direct()]
    ),
    "expandable": lambda: cuglue.PoolResource(cuglue.ExpandableCudaResource()),
    "guard": lambda: cuglue.DebugGuardResource(cuglue.AsyncCudaResource()),
    "layers": lambda: cuglue.StatisticsResource(cuglue.TrackingResource(cuglue.AsyncCudaResource())),
}
#: Those that are told of uses of their blocks.
TRACKING = frozenset(RESOURCES) - {"direct"}
#: Those whose driver calls concern the whole device.
WHOLE_DEVICE = frozenset({"pool of sync"})


class HereOps(GlOps):
    """Calls of simulated graphics objects: they run at once, on any thread."""

    def here(self) -> bool:
        return self._queue.empty()

    @property
    def context_id(self) -> None:
        return None

    @property
    def thread(self) -> ThreadRef:
        return ThreadRef.current()

    def call(self, fn: Callable[..., T], *args: Any) -> T:
        drain(self._queue, run)
        return fn(*args)

    def close(self) -> None:
        drain(self._queue, run)
        self._closed = True


class Size:
    """The question for a buffer's size, which nothing changes."""

    def __init__(self, size: int) -> None:
        self.answer, self._size = c_int64(), size

    def ask(self) -> None:
        self.answer.value = self._size

    def __call__(self) -> int:
        return self._size


class SimGraphics:
    """Graphics objects in memory: quick, and without a context."""

    def __init__(self, driver: SimDriver) -> None:
        self.driver = driver
        self.objects = driver.fake_gl()
        self.ops = HereOps()
        self.made: dict[int, tuple[str, int]] = {}

    def register(self, kind: str, size: int, data: Bytes) -> tuple[CudaHandle, int]:
        """A new object that holds ``data``, and a handle of it."""
        state = device_state(self.driver, 0)
        if kind == "image":
            width = size // 16
            name = self.objects.image_object(width, 4)
            info = ImageInfo(width, 4, 1, RGBA8, 0)
            format, layout, planes = image_layout(by_gl(RGBA8), Carried(), width, 4)
            resource = self.driver.gl_register_image(name, TEXTURE_2D, RegisterFlags.SURFACE_LDST, 0)
            backing: Any = GlImage(
                GlRegistration(state, self.ops, resource), image_memory(state), target=TEXTURE_2D, info=info,
                format=format, layout=layout, planes=planes, surfaces=True, describe=lambda level: info,
                what=f"image {name}",
            )  # fmt: skip
        else:
            name = self.objects.buffer_object(size)
            resource = self.driver.gl_register_buffer(name, RegisterFlags.NONE, 0)
            backing = GlBuffer(
                GlRegistration(state, self.ops, resource), size, readonly=False, current_size=Size(size),
                what=f"buffer {name}",
            )  # fmt: skip
        self.made[name] = kind, size
        self.put(name, data)
        return CudaHandle(Life(backing)), name

    def delete(self) -> None:
        """Nothing outlives the driver."""

    def put(self, name: int, data: Bytes) -> None:
        """Draw: replace what the object holds."""
        self.objects[name].data[0, 0][...] = data

    def get(self, name: int) -> Bytes:
        """What the object holds."""
        return self.objects[name].data[0, 0].copy()


class World:
    """The objects of one program by their names.

    Args:
        seed: of the simulated device.
        resource: one of :data:`RESOURCES`.
        graphics: makes what registers graphics objects, given the driver.
    """

    def __init__(self, seed: int, resource: str, graphics: Callable[[Any], Any] = SimGraphics) -> None:
        self.driver = SimDriver(seed=seed)
        self._choice = cuglue.use_driver(self.driver)
        self.driver.current_stream(None)
        self.resource = RESOURCES[resource]()
        self.rt = cuglue.Runtime(resource=self.resource, max_streams=2)
        self.graphics = graphics(self.driver)
        self.names: dict[str, Any] = {}
        self.streams: dict[str, Any] = {f"own{i}": self.rt.stream(i) for i in range(2)}
        self.objects: dict[str, int] = {}  # graphics objects and files by the name of the handle
        self.sizes: dict[str, int] = {}  # bytes of the files
        self.recording_stream: Any = None
        self._raw: set[int] = set()

    def stream(self, name: str | None) -> Any:
        """What stands for a stream in a call."""
        return None if name is None else self.streams[name]

    def current(self, name: str) -> Any:
        """A ``with`` in which the stream is current."""
        return self.driver.current_stream(self.streams[name] if name else None)

    def external(self, name: str, size: int, data: Bytes) -> CudaHandle:
        """A handle of memory of another owner: a file in memory."""
        fd = os.memfd_create(name)
        self.objects[name], self.sizes[name] = fd, size
        os.ftruncate(fd, 4096)
        os.pwrite(fd, data.tobytes(), 256)
        memory = external.import_fd(fd, allocation_size=4096)
        return CudaHandle.from_external(memory, offset=256, size=size)

    def raw_stream(self) -> int:
        """A stream made by somebody else."""
        made = self.driver.stream_create(0)
        self._raw.add(made)
        return made

    def destroy_raw(self, stream: int) -> None:
        """Destroy it behind the library's back."""
        self._raw.discard(stream)
        self.driver.stream_destroy(stream)

    def collect(self) -> None:
        """Run the collector, and what finalisers left."""
        gc.collect()
        device_state(self.driver, 0).retire.run_forgotten()

    def settle(self) -> None:
        """Let everything go that nobody holds, also what waits for the device."""
        found = 1
        while found:  # what goes may be the last that held something else
            found = gc.collect()
            device_state(self.driver, 0).retire.drain(block=True)

    def leave(self) -> dict[str, int]:
        """Let everything go; what the driver still holds, but for what serves as long as it does."""
        for found in list(self.names.values()):  # what a shrunk program left open
            if isinstance(found, cuglue.Capture):
                found.__exit__(Exception, Exception(), None)
        for found in list(self.names.values()):
            if isinstance(found, cuglue.CudaMap):
                found.release()
        found = None
        self.rt.close()
        self.recording_stream = None
        self.names.clear()
        self.streams.clear()
        self.resource.close()
        self.graphics.ops.close()
        self.graphics.delete()
        while self._raw:
            self.driver.stream_destroy(self._raw.pop())
        for fd in [fd for name, fd in self.objects.items() if name.startswith("x")]:
            os.close(fd)
        self.driver.current_stream(None)
        state = device_state(self.driver, 0)
        self.rt = self.resource = self.graphics = None
        for _ in range(4):  # what one round lets go may be what held the next
            gc.collect()
            state.retire.drain(block=True)
            as_stream(
                0, driver=self.driver
            ).synchronize()  # its record is kept, and with it events to be looked at
            state.close_events()
            if not (held := self._held(state)):
                break
        self.driver.check()
        return held

    def _held(self, state: Any) -> dict[str, int]:
        held = {kind: n for kind, n in self.driver.inventory().items() if n}
        copies = len(getattr(vars(state).get("_image_copier"), "_kernels", ()))
        held["kernels"] = held.get("kernels", 0) - copies
        held["streams"] = held.get("streams", 0) - (state.refuge is not None)
        return {kind: n for kind, n in held.items() if n}

    def abandon(self) -> None:
        """Give the driver's choice back, whatever happened."""
        self._choice.__exit__(None, None, None)
