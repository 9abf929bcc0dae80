"""The simulated device: a driver that needs no GPU and judges the order of the work it is given.

Public: people test their own stream-ordered code with it. Chosen by ``CUGLUE_DRIVER=sim`` or ``use_driver("sim")``.
"""

from .driver import SimDriver
from .hazards import DeviceHangs, Hazard, HazardError, Operation, Site
from .queues import StillRunning
from .streams import SimStream

__all__ = [
    "DeviceHangs",
    "Hazard",
    "HazardError",
    "Operation",
    "SimDriver",
    "SimStream",
    "Site",
    "StillRunning",
]
