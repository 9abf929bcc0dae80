"""cuglue: GPU memory owned by somebody else, as arrays; one memory resource; one way to issue work.

Importing this package loads NumPy at most. Names are resolved at first use (PEP 562), so that nothing of CUDA, OpenGL
or an array library is touched before it is needed.
"""

from __future__ import annotations

import importlib
from typing import Any

#: Public name -> module that defines it.
_WHERE = {
    "use_driver": "driver.registry",
    "current_driver": "driver.registry",
    "is_cuda_available": "driver.registry",
    "runtime_path": "driver.registry",
    "as_stream": "core.stream",
    "Stream": "core.stream",
    "Event": "core.event",
    "Access": "driver.protocol",
    "BlockState": "lifecycle",
    "BlockId": "core.block",
    "DeviceMemoryResource": "memory.resource",
    "BudgetSnapshot": "memory.resource",
    "DeviceBlock": "memory.block",
    "DirectCudaResource": "memory.direct",
    "AsyncCudaResource": "memory.stream_ordered",
    "ShortageReport": "memory.report",
    "LaunchRecorder": "memory.recorder",
    "use": "memory.recorder",
    "StreamPool": "memory.stream_pool",
    "PinnedHostResource": "memory.host",
    "ManagedResource": "memory.host",
    "PerDevice": "memory.per_device",
    "GlobalDeviceBudget": "memory.budget",
    "BudgetReservation": "memory.budget",
    "LoggingResource": "memory.logging",
    "AllocationRecord": "memory.records",
    "InMemorySink": "memory.records",
    "CsvSink": "memory.records",
    "JsonLinesSink": "memory.records",
    "TraceSink": "memory.records",
    "NullSink": "memory.records",
    "StatisticsResource": "memory.statistics",
    "Statistics": "memory.statistics",
    "TrackingResource": "memory.tracking",
    "DebugGuardResource": "memory.guard",
    "MemoryMisuseWarning": "memory.guard",
    "FailureCallbackResource": "memory.failure",
    "AllocationFailure": "memory.failure",
    "PoolResource": "memory.pool.resource",
    "ExpandableCudaResource": "memory.pool.expandable",
    "PoolCounters": "memory.pool.counters",
    "GraphMemory": "memory.pool.graphs",
    "StreamMemory": "memory.pool.stream_memory",
    "Reservation": "memory.pool.reservation",
    "MemoryConfiguration": "memory.pool.layouts",
    "MemoryAllocationMode": "memory.pool.layouts",
    "Sliced": "memory.pool.layouts",
    "Exclusive": "memory.pool.layouts",
    "Direct": "memory.pool.layouts",
    "Persistent": "memory.pool.layouts",
    "MemoryUsage": "memory.pool.usage",
    "MemoryReport": "memory.pool.usage",
    "PoolReport": "memory.pool.usage",
    "ArrayView": "exchange.view",
    "CudaHandle": "graphics.handle",
    "CudaMap": "graphics.mapping",
    "CudaClientParts": "graphics.parts",
    "Tensor": "graphics.tensor",
    "CudaGlOps": "graphics.clientops",
    "GlOps": "graphics.glops",
    "map_all": "graphics.together",
    "register": "graphics.gl",
    "register_buffer": "graphics.gl",
    "register_texture": "graphics.gl",
    "register_renderbuffer": "graphics.gl",
    "Runtime": "command.runtime",
    "runtime": "command.runtime",
    "Kernel": "command.kernels",
    "In": "command.operands",
    "Out": "command.operands",
    "InOut": "command.operands",
    "Buffer": "command.buffers",
    "CopyDescriptor": "command.descriptors",
    "Command": "command.command",
    "DeviceResource": "command.memory_calls",
    "HostBuffer": "command.hostmem",
    "Future": "command.futures",
    "Skipped": "command.perform",
    "Capture": "command.capture",
    "Graph": "command.graph",
    "Profile": "command.profile",
}
#: Public module -> where it is.
_MODULES = {"errors": "errors", "testing": "testing", "gl": "graphics.gl", "external": "graphics.external"}

__all__ = [*_WHERE, *_MODULES]  # noqa: PLE0604 - one table, not two
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'cuglue' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    own = (name for name in globals() if name.startswith("__"))
    return [*own, *__all__]
