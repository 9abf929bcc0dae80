"""Driver calls for opaque arrays, surfaces and textures.

Owns what an array is: texels that no address reaches, only array copies, surfaces and textures do. Must not know where
an array comes from: created here, mapped from a graphics object, or imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..protocol import Access, ArrayInfo, MemoryType, SurfaceArg, TexelKind
from . import codes
from .copy_calls import CopyCalls, rows
from .kernel_calls import KernelCalls
from .memory import NEW, Allocation, poison
from .memory_calls import MemoryCalls
from .queues import Handles, Queue
from .ranges import linear, pitched
from .shadow import Use
from .state import Touch, driver_call

_KINDS = {TexelKind.UINT: "u", TexelKind.SINT: "i", TexelKind.FLOAT: "f"}


@dataclass(eq=False, slots=True)
class Array:
    """An opaque array over an allocation that has no address for anybody. ``kind`` says which call frees it."""

    info: ArrayInfo
    allocation: Allocation
    kind: str

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of texels; rows are tight."""
        return self.info.width * self.info.texel_bytes

    @property
    def rows(self) -> int:
        """Rows of the first slice."""
        return max(self.info.height, 1)

    def texels(self) -> npt.NDArray[Any]:
        """The texels: shape (height, width, channels), of a 3-D array (depth, height, width, channels)."""
        depth = (self.info.depth,) if self.info.depth else ()
        dtype = np.dtype(f"{_KINDS[self.info.kind]}{self.info.bits // 8}")
        return self.allocation.data.view(dtype).reshape(
            *depth, self.rows, self.info.width, self.info.channels
        )


@dataclass(frozen=True, slots=True)
class SimSurface:
    """What a ``sim`` function gets for a surface: ``texels`` of shape ([depth,] height, width, channels)."""

    texels: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SimTexture:
    """What a ``sim`` function gets for a texture: read-only ``texels``, and how the sampler was made."""

    texels: npt.NDArray[Any]
    normalized: bool
    linear: bool


@dataclass(eq=False, slots=True)
class ImageObject:
    """A surface or texture object, and the launches that use it."""

    array: Array
    texture: bool
    normalized: bool = False
    linear: bool = False
    uses: list[Use] = field(default_factory=list)


def array_bytes(info: ArrayInfo) -> int:
    """Bytes of all texels."""
    return info.width * max(info.height, 1) * max(info.depth, 1) * info.texel_bytes


class ArrayCalls(MemoryCalls, CopyCalls, KernelCalls):
    """Arrays, the copies that reach them, surfaces and textures."""

    _arrays: Handles[Array]
    _objects: Handles[ImageObject]

    @driver_call
    def array_create(self, info: ArrayInfo, device: int) -> int:
        """Allocate an opaque array; its bytes are 0xCD."""
        self._needs("surfaces", "array_create")
        own = self._device(device, "array_create")
        self._unsafe_in_capture("array_create")
        good = (
            info.channels in (1, 2, 4)
            and info.bits in (8, 16, 32)
            and info.width > 0 <= min(info.height, info.depth)
        )
        if not good or (info.kind is TexelKind.FLOAT and info.bits == 8):
            raise codes.refused(
                codes.INVALID_VALUE,
                "array_create",
                "array",
                got=info,
                expected="1, 2 or 4 channels of 8, 16 or 32 bits",
            )
        data = self._charge(own, array_bytes(info))
        poison(data, NEW)
        allocation = Allocation(
            data.ctypes.data,
            data.nbytes,
            device,
            MemoryType.DEVICE,
            "array",
            data,
            self._operation("array_create"),
        )
        return self._arrays.add(Array(info, allocation, "array"))

    @driver_call
    def array_destroy(self, array: int) -> None:
        """Run everything queued on the device, then free it."""
        found = self._array(array, "array_destroy")
        if found.kind != "array":
            raise codes.refused(
                codes.INVALID_RESOURCE_HANDLE, "array_destroy", "array of a mapped or imported image"
            )
        self._unsafe_in_capture("array_destroy")
        device = found.allocation.device
        self._drain([device], "array_destroy")
        self._reveal([device], "array_destroy")
        self._end(found.allocation, self._operation("array_destroy"))
        self._arrays.pop(array)
        self._discharge(self._devices[device], found.allocation)

    @driver_call
    def array_info(self, array: int, device: int) -> ArrayInfo:
        """Its extents and texel."""
        found = self._array(array, "array_info")
        if found.allocation.device != device:
            raise codes.refused(
                codes.INVALID_RESOURCE_HANDLE,
                "array_info",
                f"array {array:#x} of device {found.allocation.device}",
                got=f"device {device}",
            )
        return found.info

    @driver_call
    def copy_from_array_async(
        self, dst: int, dst_pitch: int, array: int, width: int, height: int, stream: int
    ) -> None:
        """Copy rows from the start of an array to linear memory."""
        self._copy_array(
            "copy_from_array_async", array, dst, dst_pitch, width, height, stream, to_array=False
        )

    @driver_call
    def copy_to_array_async(
        self, array: int, src: int, src_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Copy rows from linear memory to the start of an array."""
        self._copy_array("copy_to_array_async", array, src, src_pitch, width, height, stream, to_array=True)

    def _copy_array(
        self,
        call: str,
        array: int,
        ptr: int,
        pitch: int,
        width: int,
        height: int,
        stream: int,
        *,
        to_array: bool,
    ) -> None:
        queue = self._queue(stream, call)
        found = self._array(array, call)
        if pitch < width:
            raise codes.refused(
                codes.INVALID_PITCH, call, "pitch", got=pitch, expected=f"at least {width} bytes"
            )
        if not (0 <= width <= found.row_bytes and 0 <= height <= found.rows):
            raise codes.refused(
                codes.INVALID_VALUE,
                call,
                "extent",
                got=f"{height} rows of {width} bytes",
                expected=f"at most {found.rows} rows of {found.row_bytes}",
            )
        if width == 0 or height == 0:
            return
        memory_access, array_access = (Access.READ, Access.WRITE) if to_array else (Access.WRITE, Access.READ)
        reach = self._reach(ptr, pitched(0, width, height, pitch), memory_access, call)
        texels = Touch(found.allocation, pitched(0, width, height, found.row_bytes), array_access)
        memory, image = rows(reach.data, reach.range), rows(texels.allocation.data, texels.range)
        read, write = (memory, image) if to_array else (image, memory)
        touches = [*reach.touches, texels] if to_array else [texels, *reach.touches]

        def run() -> None:
            write.reshape(-1, width)[...] = read.reshape(-1, width)

        self._submit(queue, call, run, touches)

    # --- surfaces and textures ------------------------------------------------------------------------------------
    @driver_call
    def surface_create(self, array: int, device: int) -> int:
        """Object for surface reads and writes of an array."""
        self._needs("surfaces", "surface_create")
        self._device(device, "surface_create")
        return self._objects.add(ImageObject(self._array(array, "surface_create"), texture=False))

    @driver_call
    def surface_destroy(self, surface: int) -> None:
        """Destroy it; a queued launch that uses it and that the host has not waited for is a hazard."""
        self._destroy_object(surface, "surface_destroy", texture=False)

    @driver_call
    def texture_create(self, array: int, device: int, normalized: bool = False, linear: bool = False) -> int:
        """Object for texture reads of an array."""
        self._needs("surfaces", "texture_create")
        self._device(device, "texture_create")
        found = self._array(array, "texture_create")
        if linear and not normalized and found.info.kind is not TexelKind.FLOAT:
            raise codes.refused(
                codes.INVALID_VALUE,
                "texture_create",
                "filtering of integers",
                expected="normalized reads or floats",
            )
        return self._objects.add(ImageObject(found, True, normalized, linear))

    @driver_call
    def texture_destroy(self, texture: int) -> None:
        """Destroy it; a queued launch that uses it and that the host has not waited for is a hazard."""
        self._destroy_object(texture, "texture_destroy", texture=True)

    def _destroy_object(self, handle: int, call: str, *, texture: bool) -> None:
        found = self._objects.get(handle)
        if found is None or found.texture is not texture:
            raise codes.refused(codes.INVALID_RESOURCE_HANDLE, call, "object", got=f"{handle:#x}")
        allocation = found.array.allocation
        self._device(allocation.device, call)
        for use in found.uses:
            if not use.known_to(self._host):
                whole = linear(0, allocation.nbytes)
                self._hazard(
                    "object destroyed while in use", allocation, whole, use.operation, self._operation(call)
                )
        self._objects.pop(handle)

    def _image_argument(self, argument: SurfaceArg) -> tuple[Any, Touch, ImageObject]:
        found = self._objects.get(argument.handle)
        if found is None:
            raise codes.launch_refused(codes.INVALID_VALUE, "surface or texture", got=f"{argument.handle:#x}")
        if found.texture and argument.access.writes:
            raise codes.launch_refused(codes.INVALID_VALUE, "write to a texture", expected="a surface")
        texels = found.array.texels()
        texels.flags.writeable = argument.access.writes
        image = SimTexture(texels, found.normalized, found.linear) if found.texture else SimSurface(texels)
        allocation = found.array.allocation
        return image, Touch(allocation, linear(0, allocation.nbytes), argument.access), found

    def _launched(self, queue: Queue, objects: list[Any], point: Use) -> None:
        """Remember which launches use which objects, for their destruction."""
        for found in objects:
            found.uses = [use for use in found.uses if not use.known_to(self._host)]
            if queue.capture is None:
                found.uses.append(point)

    def _array(self, handle: int, call: str) -> Array:
        found = self._arrays.get(handle)
        if found is None:
            raise codes.refused(codes.INVALID_RESOURCE_HANDLE, call, "array", got=f"{handle:#x}")
        self._device(found.allocation.device, call)
        return found
