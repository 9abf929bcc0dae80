"""OpenGL and D3D11 objects: registration and mapping."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from ...errors import UnsupportedError
from ..protocol import RegisterFlags
from .calls import call, cu, failure, nonzero
from .contexts import Contexts

_FLAGS = {
    RegisterFlags.NONE: 0,
    RegisterFlags.READ_ONLY: 1,
    RegisterFlags.WRITE_DISCARD: 2,
    RegisterFlags.SURFACE_LDST: 4,
}

#: What the driver answers where no GL context is current or another vendor's renders.
_NO_GL = frozenset({100, 219, 304, 999})


class Graphics(Contexts):
    """Graphics interop of the CUDA driver."""

    def gl_devices(self) -> tuple[int, ...]:
        """Inherited."""
        with self._on(0):
            status, count, devices = cu.cuGLGetDevices(self._count, cu.CUGLDeviceList.CU_GL_DEVICE_LIST_ALL)
        if status:
            if int(status) in _NO_GL:
                return ()
            raise failure(int(status), status.name, "cuGLGetDevices")
        return tuple(int(device) for device in devices[:count])

    def gl_register_buffer(self, name: int, flags: RegisterFlags, device: int) -> int:
        """Inherited."""
        return self._register(cu.cuGraphicsGLRegisterBuffer, device, name, _FLAGS[flags])

    def gl_register_image(self, name: int, target: int, flags: RegisterFlags, device: int) -> int:
        """Inherited."""
        return self._register(cu.cuGraphicsGLRegisterImage, device, name, target, _FLAGS[flags])

    def d3d11_register(self, resource: int, flags: RegisterFlags, device: int) -> int:
        """Inherited."""
        return self._register(_register_d3d11, device, resource, _FLAGS[flags])

    def _register(self, function: Any, device: int, *args: Any) -> int:
        with self._on(device):
            resource = nonzero(call(function, *args), function.__name__)
        return self._own("graphics resource", resource, device)

    def graphics_unregister(self, resource: int) -> None:
        """Inherited."""
        with self._disowning("graphics resource", resource):
            call(cu.cuGraphicsUnregisterResource, resource)

    def graphics_map(self, resources: Sequence[int], stream: int) -> None:
        """Inherited. An ``array("Q")``, which some keep of theirs, is handed on as it is."""
        self._map(cu.cuGraphicsMapResources, resources, stream)

    def graphics_unmap(self, resources: Sequence[int], stream: int) -> None:
        """Inherited. As :meth:`graphics_map`."""
        self._map(cu.cuGraphicsUnmapResources, resources, stream)

    def _map(self, function: Any, resources: Sequence[int], stream: int) -> None:
        if not resources:
            return
        if not self._here_alone():
            device = self._owner("graphics resource", resources[0])
            if not self._here(device):
                with self._on(device):
                    self._map(function, resources, stream)
                    return
        packed = (
            resources if type(resources) is array and resources.typecode == "Q" else array("Q", resources)
        )
        address, count = packed.buffer_info()
        status = function(count, address, stream)[0]
        if status:
            raise failure(int(status), status.name, function.__name__)

    def graphics_pointer(self, resource: int) -> tuple[int, int]:
        """Inherited. The answer is the same in any context that gives one, so none is looked for before."""
        status, pointer, size = cu.cuGraphicsResourceGetMappedPointer(resource)
        if not status:
            return int(pointer) or nonzero(0, "cuGraphicsResourceGetMappedPointer"), size
        device = self._owner("graphics resource", resource)
        if not self._here(device):
            with self._on(device):
                return self.graphics_pointer(resource)
        raise failure(int(status), status.name, "cuGraphicsResourceGetMappedPointer")

    def graphics_array(self, resource: int, layer: int, level: int) -> int:
        """Inherited."""
        with self._on(self._owner("graphics resource", resource)):
            found = call(cu.cuGraphicsSubResourceGetMappedArray, resource, layer, level)
        return nonzero(found, "cuGraphicsSubResourceGetMappedArray")


def _register_d3d11(resource: int, flags: int) -> tuple[Any, int]:
    """``cuGraphicsD3D11RegisterResource``, which no binding has; shaped like those of ``cuda.bindings``."""
    if sys.platform == "win32":
        handle = ctypes.c_void_p()
        status = ctypes.WinDLL("nvcuda").cuGraphicsD3D11RegisterResource(
            ctypes.byref(handle), ctypes.c_void_p(resource), ctypes.c_uint(flags)
        )
        return cu.CUresult(status), handle.value or 0
    raise UnsupportedError("D3D11 interop", got=sys.platform, expected="Windows", reason="platform")
