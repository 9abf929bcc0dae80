"""The simulated device as a driver: all calls together, and what a test asks of it beyond the protocol.

Owns the public face. The calls are in the ``*_calls`` modules.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import Any

from ..protocol import Capabilities, MemoryType
from .external_calls import ExternalCalls
from .fakes import FakeGraphics
from .gl import OpenGL
from .graph_calls import GraphCalls
from .graphics_calls import GraphicsCalls
from .hazards import Hazard
from .queues import Handles
from .state import driver_call
from .stream_calls import StreamCalls
from .streams import Choice, SimStream
from .virtual_calls import VirtualCalls


class SimDriver(GraphicsCalls, ExternalCalls, VirtualCalls, StreamCalls, GraphCalls):
    """A driver without a device: real memory, deferred work, and an oracle that judges its order.

    Nothing runs before a wait (``stream_synchronize``, ``event_synchronize``, ``device_synchronize``, a blocking
    free); a query runs one step and then answers; which stream goes on is chosen by ``seed``. Two uses of the same
    bytes that nothing orders are a hazard in whatever order they ran: it is listed in :attr:`hazards` and raised by
    the next wait.

    Args:
        seed: chooses among the streams that can go on.
        devices: number of devices.
        memory_bytes: memory of each device.
        wait_limit: seconds after which a wait for something that nobody releases raises ``DeviceHangs``.
        disable: names of Capabilities fields to switch off; the calls that they guard answer 801.

    Ordering: see each call. Python threads may share it; one call at a time is let in, and a call that waits lets
    others in while nothing can go on.
    """

    name = "sim"

    def __init__(
        self,
        seed: int = 0,
        devices: int = 1,
        *,
        memory_bytes: int = 4 << 30,
        wait_limit: float = 10.0,
        disable: Collection[str] = (),
    ) -> None:
        super().__init__(seed, devices, memory_bytes=memory_bytes, wait_limit=wait_limit, disable=disable)
        flags = (n for n, f in Capabilities.__dataclass_fields__.items() if f.type == "bool")
        self._capabilities = Capabilities(
            MemoryType.HOST, **{flag: flag not in self._disabled for flag in flags}
        )
        self._events = Handles(0x6000_0000, 32)
        self._kernels = Handles(0x7000_0000, 16)
        self._arrays = Handles(0x8000_0000, 16)
        self._objects = Handles(0x9000_0000, 1)
        self._resources = Handles(0xA000_0000, 16)
        self._graphs = Handles(0xB000_0000, 16)
        self._executables = Handles(0xC000_0000, 16)
        self._externals = Handles(0xD000_0000, 16)
        self._mipmapped = Handles(0xD800_0000, 16)
        self._semaphores = Handles(0xE000_0000, 16)
        self._physical = Handles(0xF000_0000, 16)
        self._buffers, self._win32, self._reserved, self._placed = {}, {}, {}, {}
        self._gl = OpenGL()
        self._d3d11 = FakeGraphics()

    # --- devices --------------------------------------------------------------------------------------------------
    @driver_call
    def device_count(self) -> int:
        """Number of devices."""
        return len(self._devices)

    @driver_call
    def capabilities(self, device: int) -> Capabilities:
        """Everything, less what was switched off."""
        self._check_ordinal(device, "capabilities")
        return self._capabilities

    @driver_call
    def device_name(self, device: int) -> str:
        """Its name."""
        return f"cuglue simulated device {device}"

    @driver_call
    def device_uuid(self, device: int) -> bytes:
        """16 bytes, the same in every process."""
        return uuid.uuid5(uuid.NAMESPACE_OID, f"cuglue-sim-{device}").bytes

    # --- streams as objects ---------------------------------------------------------------------------------------
    def Stream(self, device: int = 0) -> SimStream:
        """A new stream, as an object."""
        return SimStream(self, self._current, self._dropped, device)

    def current_stream(self, stream: Any) -> Choice:
        """Make ``stream`` and its device current on this thread, until the end of the ``with`` if used in one."""
        known = self._streams.get(stream) if type(stream) is int else stream
        return self._current.choose(getattr(known, "device", self._current.device), stream)

    def current_device(self, device: int) -> Choice:
        """Make ``device`` current on this thread, until the end of the ``with`` if used in one."""
        self._check_ordinal(device, "current_device")
        return self._current.choose(device)

    @driver_call
    def device_current(self) -> int:
        """The current device of this thread; the first one where nobody chose."""
        return self._current.device

    @driver_call
    def stream_current(self, device: int) -> Any:
        """The current stream of this thread on ``device``; the legacy default one where nobody chose."""
        return self._current.stream(device)

    # --- for tests ------------------------------------------------------------------------------------------------
    @property
    def hazards(self) -> list[Hazard]:
        """All hazards found so far, raised or not."""
        with self._changed:
            return list(self._hazards)

    def check(self) -> None:
        """Raise HazardError for hazards that no wait has raised yet."""
        with self._changed:
            self._raise_hazards()

    def pump(self) -> None:
        """Run everything that can run. It orders nothing and raises nothing: use it to look, not to wait."""
        with self._changed:
            while self._scheduler.step():
                pass

    def inventory(self) -> dict[str, int]:
        """What is alive, for leak checks: counts, and bytes where the name says so."""
        with self._changed:
            self._destroy_dropped()
            live = self._space.live()
            kinds = ("malloc", "malloc_async", "malloc_managed", "host_alloc")
            return {
                **{kind: sum(a.kind == kind for a in live) for kind in kinds},
                "bytes": sum(a.nbytes for a in live if a.kind in kinds),
                "streams": len(self._streams),
                "events": len(self._events),
                "kernels": len(self._kernels),
                "graphs": len(self._graphs),
                "executables": len(self._executables),
                "arrays": sum(a.kind == "array" for a in self._arrays.values()),
                "surfaces": sum(not o.texture for o in self._objects.values()),
                "textures": sum(o.texture for o in self._objects.values()),
                "resources": len(self._resources),
                "external": len(self._externals),
                "external_buffers": len(self._buffers),
                "external_arrays": len(self._mipmapped),
                "semaphores": len(self._semaphores),
                "vmm": len(self._physical),
                "vmm_reserved": len(self._reserved),
                "vmm_mapped": len(self._placed),
                "mapped": sum(bool(r.mapped) for r in self._resources.values()),
            }
