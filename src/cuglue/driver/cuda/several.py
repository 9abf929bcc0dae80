"""What calls on a stream need where there are several devices, and the choice of the driver.

Owns the one rule: a call on a stream that says its device runs while that device is current. CUDA takes a default
stream for one of the current device, and on any stream refuses to copy memory that the current device does not reach
(stream-ordered and virtual memory). Must not know what any call does. With one device none of this is there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from ..protocol import DeviceStream
from . import CudaDriver
from .calls import call_runtime, runtime

#: The calls that take a stream and nothing else that belongs to a device.
BY_STREAM_ALONE = (
    "copy_async",
    "copy_2d_async",
    "copy_from_array_async",
    "copy_to_array_async",
    "fill_async",
    "stream_query",
    "stream_synchronize",
    "stream_wait_event",
    "stream_callback",
    "capture_status",
    "capture_begin",
    "capture_end",
    "graph_upload",
    "graph_launch",
)


def _on_device_of_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    place = list(signature(method).parameters).index("stream") - 1  # among the arguments after self

    @wraps(method)
    def call(self: CudaDriver, *args: Any, **named: Any) -> Any:
        stream = named["stream"] if "stream" in named else args[place]
        if isinstance(stream, DeviceStream) and self._elsewhere(stream.device):
            with self._on(stream.device):
                return method(self, *args, **named)
        return method(self, *args, **named)

    return call


class SeveralDevices(CudaDriver):
    """The CUDA driver of a machine with several devices."""

    def stream_create(self, device: int) -> DeviceStream:
        """Inherited."""
        return DeviceStream(super().stream_create(device), device)


for _name in BY_STREAM_ALONE:
    setattr(SeveralDevices, _name, _on_device_of_stream(getattr(CudaDriver, _name)))


def open_cuda() -> CudaDriver:
    """The CUDA driver of this machine."""
    return SeveralDevices() if call_runtime(runtime.getDeviceCount) > 1 else CudaDriver()
