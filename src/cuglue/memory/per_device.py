"""One allocator for several devices.

Owns the choice by the current device. Must not know how any of them allocates.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from ..arguments import shown, whole_of
from ..core import process
from ..driver.registry import current_driver
from ..errors import CuglueError, UsageError, raise_together
from .cupy_scope import Scope
from .resource import DeviceMemoryResource

if TYPE_CHECKING:
    from .cupy_plug import Malloc


class PerDevice:
    """``PerDevice({0: a, 1: b}).malloc``: CuPy allocates from the resource of the device that is current."""

    def __init__(self, resources: Mapping[int, DeviceMemoryResource]) -> None:
        if not isinstance(resources, Mapping):
            raise UsageError(
                "PerDevice", got=shown(resources), expected="a mapping from ordinals to resources"
            )
        for ordinal, resource in resources.items():
            whole_of("PerDevice: key", ordinal, expected="an ordinal of a device")
            if not isinstance(resource, DeviceMemoryResource) or resource.device != ordinal:
                raise UsageError(
                    f"PerDevice: resource of device {ordinal}",
                    got=shown(resource),
                    expected=f"a DeviceMemoryResource of device {ordinal}",
                )
        self.resources: Mapping[int, DeviceMemoryResource] = dict(resources)

    def __getitem__(self, device: int) -> DeviceMemoryResource:
        """The resource of a device.

        Raises:
            UsageError: none was given.
        """
        try:
            return self.resources[device]
        except (KeyError, TypeError):
            raise UsageError(
                "PerDevice", got=f"device {shown(device)}", expected=f"one of {sorted(self.resources)}"
            ) from None

    @cached_property
    def malloc(self) -> Malloc:
        """CuPy's allocator for all these devices; see :attr:`DeviceMemoryResource.malloc`."""
        driver = next((resource.driver for resource in self.resources.values()), None) or current_driver()
        allocators: dict[int, Malloc] = {}
        life = process.life

        def malloc(nbytes: int) -> Any:
            try:
                device = driver.device_current()
            except CuglueError:
                if process.life is not life:
                    raise process.forked_child(self) from None
                raise
            allocate = allocators.get(device)
            if allocate is None:
                allocate = allocators[device] = self[device].malloc
            return allocate(nbytes)

        return malloc

    def as_cupy_allocator(self) -> Scope[Self]:
        """``with`` this, CuPy allocates here: this thread and task only, innermost wins, restored on the way out."""
        return Scope(self)

    def close(self) -> None:
        """Close every resource; those that fail can be closed again.

        Raises:
            SeveralErrors: two or more failed; a single error is raised as it is.
        """
        errors: list[BaseException] = []
        for resource in self.resources.values():
            try:
                resource.close()
            except Exception as error:  # noqa: BLE001 - every resource is tried; raised together
                errors.append(error)
        raise_together(f"closing {self!r}", errors)

    def __repr__(self) -> str:
        return f"PerDevice({dict(self.resources)!r})"
