"""Driver calls that register, map and unmap graphics objects.

Owns what mapping means: the object's bytes are read when it is mapped, live at a new address while it is, and are
written back when it is unmapped, after its stream ran to that point. For the clocks both are operations of the stream,
as on a real device. Must not know how bytes get out of a graphics API (:mod:`gl`, :mod:`fakes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..protocol import Access, MemoryType, RegisterFlags, TexelKind
from . import codes
from .array_calls import Array, ArrayCalls, array_bytes
from .fakes import FakeGraphics
from .gl import GraphicsApi, GraphicsObject, OpenGL, PartKey
from .hazards import Operation
from .memory import DEAD, NEW, Allocation, Bytes, poison
from .queues import Handles, Mark, Queue
from .ranges import linear
from .state import Touch, driver_call

_BUFFER: PartKey = (0, 0)


@dataclass(eq=False, slots=True)
class Mapping:
    """One part of a mapped object. ``before`` is what it held, None if it was not read."""

    allocation: Allocation
    before: Bytes | None
    array: int = 0


@dataclass(eq=False, slots=True)
class Resource:
    """A registration; ``mapped`` is empty while it is not mapped."""

    source: GraphicsObject
    flags: RegisterFlags
    device: int
    mapped: dict[PartKey, Mapping] = field(default_factory=dict)


class GraphicsCalls(ArrayCalls):
    """Graphics objects."""

    _resources: Handles[Resource]
    _gl: GraphicsApi
    _d3d11: FakeGraphics

    # --- what there is to register --------------------------------------------------------------------------------
    def fake_gl(self) -> FakeGraphics:
        """Use named bytes instead of OpenGL from now on; the objects to name are made on what this returns."""
        with self._changed:
            if not isinstance(self._gl, FakeGraphics):
                self._gl = FakeGraphics()
            return self._gl

    def real_gl(self) -> None:
        """Use OpenGL again."""
        with self._changed:
            self._gl = OpenGL()

    def fake_d3d11(
        self, width: int, height: int, *, bits: int = 8, channels: int = 4, kind: TexelKind = TexelKind.UINT
    ) -> int:
        """An address-like number that ``d3d11_register`` takes, standing for a Direct3D 11 texture of zeros."""
        with self._changed:
            return self._d3d11.image_object(width, height, bits=bits, channels=channels, kind=kind)

    @property
    def d3d11(self) -> FakeGraphics:
        """The objects made by :meth:`fake_d3d11`."""
        return self._d3d11

    # --- registering ----------------------------------------------------------------------------------------------
    @driver_call
    def gl_devices(self) -> tuple[int, ...]:
        """All devices, where a context is current: the simulated ones draw with whatever there is."""
        return tuple(range(len(self._devices))) if self._gl.present() else ()

    @driver_call
    def gl_register_buffer(self, name: int, flags: RegisterFlags, device: int) -> int:
        """Register a buffer of the context current on this thread."""
        self._needs("graphics_gl", "gl_register_buffer")
        self._device(device, "gl_register_buffer")
        return self._resources.add(Resource(self._gl.buffer(name, "gl_register_buffer"), flags, device))

    @driver_call
    def gl_register_image(self, name: int, target: int, flags: RegisterFlags, device: int) -> int:
        """Register a texture or renderbuffer of the context current on this thread."""
        self._needs("graphics_gl", "gl_register_image")
        self._device(device, "gl_register_image")
        return self._resources.add(Resource(self._gl.image(name, target, "gl_register_image"), flags, device))

    @driver_call
    def d3d11_register(self, resource: int, flags: RegisterFlags, device: int) -> int:
        """Register what :meth:`fake_d3d11` gave."""
        self._needs("graphics_d3d11", "d3d11_register")
        self._device(device, "d3d11_register")
        return self._resources.add(Resource(self._d3d11.image(resource, 0, "d3d11_register"), flags, device))

    @driver_call
    def graphics_unregister(self, resource: int) -> None:
        """Give the registration back."""
        found = self._resource(resource, "graphics_unregister")
        if found.mapped:
            raise codes.refused(
                codes.ALREADY_MAPPED, "graphics_unregister", f"resource {resource:#x} is mapped"
            )
        found.source.reachable("graphics_unregister")
        self._resources.pop(resource)

    # --- mapping --------------------------------------------------------------------------------------------------
    def _queue_for(self, resources: Sequence[int], stream: int, call: str) -> Queue:
        """The stream; a default one is that of the device which the first resource is registered with."""
        own = self._resources.get(resources[0]) if resources and stream in (0, 1, 2) else None
        return self._queue(stream, call, None if own is None else own.device)

    @driver_call
    def graphics_map(self, resources: Sequence[int], stream: int) -> None:
        """Read each object to memory at an address it did not have before; all or none is mapped."""
        queue = self._queue_for(resources, stream, "graphics_map")
        if queue.capture is not None:
            raise self._refuse_capture(
                queue.capture, codes.CAPTURE_UNSUPPORTED, "graphics_map", "the stream captures"
            )
        found = [self._resource(handle, "graphics_map") for handle in resources]
        for resource in found:
            if resource.mapped or found.count(resource) > 1:
                raise codes.refused(codes.ALREADY_MAPPED, "graphics_map", "resource is mapped")
        for resource in found:
            resource.source.finish("graphics_map")
        began = self._operation("graphics_map", queue)
        read = [self._read(resource, began) for resource in found]
        for resource, parts in zip(found, read, strict=True):
            resource.mapped = parts  # first: what an interrupt leaves of this can be unmapped
            for key, mapping in parts.items():
                if resource.source.nbytes:
                    self._space.add(mapping.allocation)
                else:
                    mapping.array = self._arrays.add(
                        Array(resource.source.parts[key], mapping.allocation, "mapped")
                    )
        touches = [
            Touch(m.allocation, linear(0, m.allocation.nbytes), Access.WRITE)
            for parts in read
            for m in parts.values()
        ]
        self._submit(queue, "graphics_map", _nothing, touches)
        for resource in found:
            for mapping in resource.mapped.values():
                mapping.allocation.read_only = resource.flags is RegisterFlags.READ_ONLY

    @driver_call
    def graphics_unmap(self, resources: Sequence[int], stream: int) -> None:
        """Run ``stream`` to this point, write each object back, and take its memory away.

        Where an interrupt (Ctrl-C) ends it, it can be called again: what is mapped still has its bytes.
        """
        queue = self._queue_for(resources, stream, "graphics_unmap")
        if queue.capture is not None:
            raise self._refuse_capture(
                queue.capture, codes.CAPTURE_UNSUPPORTED, "graphics_unmap", "the stream captures"
            )
        found = [self._resource(handle, "graphics_unmap") for handle in resources]
        for resource in found:
            if not resource.mapped or found.count(resource) > 1:
                raise codes.refused(codes.NOT_MAPPED, "graphics_unmap", "resource is not mapped")
        for resource in found:
            resource.source.finish("graphics_unmap")
        # Of an unmap that was interrupted, what it had not come to.
        mappings = [m for resource in found for m in resource.mapped.values() if m.allocation.live]
        for mapping in mappings:
            mapping.allocation.read_only = False  # the hand-off itself is no write of the program
        touches = [Touch(m.allocation, linear(0, m.allocation.nbytes), Access.WRITE) for m in mappings]
        point = self._submit(queue, "graphics_unmap", _nothing, touches)
        mark = Mark(queue)
        self._run_until(lambda: mark.reached, "graphics_unmap")
        for resource in found:
            for key, mapping in resource.mapped.items():
                self._write_back(resource, key, mapping, point.operation)
        for resource in found:
            for mapping in resource.mapped.values():
                self._take_away(mapping, point.operation)
            resource.mapped = {}
        self._reveal([queue.device], "graphics_unmap")

    @driver_call
    def graphics_pointer(self, resource: int) -> tuple[int, int]:
        """Address and size of a mapped buffer."""
        found = self._mapped(resource, "graphics_pointer")
        if not found.source.nbytes:
            raise codes.refused(codes.NOT_MAPPED_AS_POINTER, "graphics_pointer", "an image has no address")
        allocation = found.mapped[_BUFFER].allocation
        return allocation.ptr, allocation.nbytes

    @driver_call
    def graphics_array(self, resource: int, layer: int, level: int) -> int:
        """Array of one layer or face and level of a mapped image."""
        found = self._mapped(resource, "graphics_array")
        if found.source.nbytes:
            raise codes.refused(codes.NOT_MAPPED, "graphics_array", "a buffer is no array")
        mapping = found.mapped.get((layer, level))
        if mapping is None:
            raise codes.refused(
                codes.INVALID_VALUE, "graphics_array", "part", got=f"layer {layer}, level {level}"
            )
        return mapping.array

    # --- shared ---------------------------------------------------------------------------------------------------
    def _resource(self, handle: int, call: str) -> Resource:
        found = self._resources.get(handle)
        if found is None:
            raise codes.refused(codes.INVALID_RESOURCE_HANDLE, call, "graphics resource", got=f"{handle:#x}")
        self._device(found.device, call)
        return found

    def _mapped(self, handle: int, call: str) -> Resource:
        found = self._resource(handle, call)
        if not found.mapped:
            raise codes.refused(codes.NOT_MAPPED, call, f"resource {handle:#x} is not mapped")
        return found

    def _read(self, resource: Resource, began: Operation) -> dict[PartKey, Mapping]:
        """Memory with the bytes of each part; what cannot be read (gone, resized, to be discarded) is poison."""
        source = resource.source
        sizes = (
            {_BUFFER: source.nbytes}
            if source.nbytes
            else {k: array_bytes(i) for k, i in source.parts.items()}
        )
        parts: dict[PartKey, Mapping] = {}
        for key, nbytes in sizes.items():
            data = self._storage.take(nbytes, fresh=True)
            wanted = resource.flags is not RegisterFlags.WRITE_DISCARD
            if not (wanted and source.read(key, data)):
                wanted = False
                poison(data, NEW)
            allocation = Allocation(
                data.ctypes.data, nbytes, resource.device, MemoryType.DEVICE, "mapped", data, began
            )
            parts[key] = Mapping(allocation, data.copy() if wanted else None)
        return parts

    def _write_back(self, resource: Resource, key: PartKey, mapping: Mapping, unmap: Operation) -> None:
        allocation = mapping.allocation
        if not allocation.live:
            return  # an interrupted unmap has done it
        now = np.empty_like(allocation.data)
        if (
            mapping.before is not None
            and resource.source.read(key, now)
            and not np.array_equal(now, mapping.before)
        ):
            self._hazard(
                "graphics use of a mapped object",
                allocation,
                linear(0, allocation.nbytes),
                allocation.began,
                unmap,
            )
        changed = mapping.before is None or not np.array_equal(mapping.before, allocation.data)
        mapping.before = None  # from here on the object may hold what is written now
        if resource.flags is not RegisterFlags.READ_ONLY and changed:
            resource.source.write(key, allocation.data)

    def _take_away(self, mapping: Mapping, unmap: Operation) -> None:
        """The memory of a part ends, and with it the array it was seen through."""
        allocation = mapping.allocation
        if not allocation.live:
            return
        array, mapping.array = mapping.array, 0
        if array:
            self._arrays.pop(array)
        self._end(allocation, unmap)
        poison(allocation.data, DEAD)
        self._storage.park(allocation.data)


def _nothing() -> None:
    """A map and an unmap are points in a stream; the bytes move when they are called."""
