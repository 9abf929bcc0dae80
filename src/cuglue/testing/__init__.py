"""For tests of cuglue and of what is built on it: contract suites to inherit, the simulated device, and tools in front
of a driver.

Names are loaded at first use. Nothing here is imported by the library itself.
"""

from __future__ import annotations

import importlib
from typing import Any

#: Public name -> module that defines it.
_WHERE = {
    "DeviceHangs": "..driver.sim",
    "DriverSuite": ".driver_suite",
    "HandleSuite": ".handle_suite",
    "Hazard": "..driver.sim",
    "HazardError": "..driver.sim",
    "Latch": ".latch",
    "ResourceSuite": ".resource_suite",
    "SimDriver": "..driver.sim",
    "SweepReport": ".fault_sweep",
    "ViewSuite": ".view_suite",
    "in_order": ".order",
    "sweep": ".fault_sweep",
    "trace": ".tracing",
}

#: Public modules.
_MODULES = ("faults",)

__all__ = [
    "DeviceHangs",
    "DriverSuite",
    "HandleSuite",
    "Hazard",
    "HazardError",
    "Latch",
    "ResourceSuite",
    "SimDriver",
    "SweepReport",
    "ViewSuite",
    "faults",
    "in_order",
    "sweep",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'cuglue.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
