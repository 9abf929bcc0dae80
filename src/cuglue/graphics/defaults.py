"""The memory that images are copied to where the caller names none. Owns that one resource per device."""

from __future__ import annotations

from ..core.device import DeviceState
from ..memory.direct import DirectCudaResource
from ..memory.resource import DeviceMemoryResource


class _DriverMemory(DirectCudaResource):
    """Memory that nobody closes: it goes with the driver's record of the device."""

    def __del__(self) -> None:
        """Says nothing about live blocks: the maps that hold them are the ones to speak."""


def default_memory(state: DeviceState) -> DeviceMemoryResource:
    """Where linear buffers come from unless told otherwise: one resource per device, kept on its record."""
    memory: DeviceMemoryResource | None = vars(state).get("_image_memory")
    if memory is None:
        memory = vars(state).setdefault("_image_memory", _DriverMemory(state.device))
    return memory
