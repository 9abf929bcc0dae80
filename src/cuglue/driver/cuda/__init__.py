"""The CUDA driver: CuPy's runtime API for memory, streams, events, kernels and graphs, the driver API for the rest.

Loads CuPy and ``cuda.bindings``; only :mod:`cuglue.driver.registry` imports it, once CUDA was chosen. One file a topic;
``calls`` turns failures into our errors, ``contexts`` keeps the current device as it was, ``several`` opens the driver
and is what more devices than one need.
"""

from __future__ import annotations

from .arrays import Arrays
from .external import External
from .graphics import Graphics
from .graphs import Graphs
from .kernels import Kernels
from .memory import Memory
from .streams import Streams
from .virtual import Virtual

__all__ = ["CudaDriver"]


class CudaDriver(Memory, Streams, Kernels, Graphs, Arrays, Graphics, External, Virtual):
    """Every device call on real devices; see :class:`cuglue.driver.protocol.Driver`."""

    name = "cuda"

    def __repr__(self) -> str:
        return f"CudaDriver({self._count} devices)"
