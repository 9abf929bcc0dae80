"""The memory that images are copied to. Owns one resource per device for where the caller names none."""

from __future__ import annotations

from ..arguments import shown
from ..core.device import DeviceState
from ..errors import UsageError
from ..memory.direct import DirectCudaResource
from ..memory.resource import DeviceMemoryResource


class _DriverMemory(DirectCudaResource):
    """Memory that nobody closes: it goes with the driver's record of the device."""

    def __del__(self) -> None:
        """Says nothing about live blocks: the maps that hold them are the ones to speak."""


def image_memory(state: DeviceState, memory: object = None) -> DeviceMemoryResource:
    """Where linear buffers come from: ``memory``, or one resource per device, kept on its record.

    Raises:
        UsageError: no resource, or one of another device or driver.
    """
    if memory is None:
        made: DeviceMemoryResource | None = vars(state).get("_image_memory")
        if made is None:
            made = vars(state).setdefault("_image_memory", _DriverMemory(state.device, driver=state.driver))
        return made
    if (
        not isinstance(memory, DeviceMemoryResource)
        or memory.device != state.device
        or memory.driver is not state.driver
    ):
        raise UsageError(
            "memory for an image's linear copy",
            got=shown(memory),
            expected=f"a DeviceMemoryResource of device {state.device} of this {state.driver.name} driver",
        )
    return memory
