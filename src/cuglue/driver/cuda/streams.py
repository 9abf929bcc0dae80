"""Streams and events."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from cupy.cuda import get_current_stream

from ...errors import CaptureError
from ..protocol import LEGACY_STREAM, PER_THREAD_STREAM, CaptureStatus
from .calls import NOT_READY, CUDARuntimeError, call, call_runtime, cu, failure, failure_of, nonzero, runtime
from .contexts import Contexts, Relaxed

_NO_CAPTURE, _ACTIVE = CaptureStatus.NONE, CaptureStatus.ACTIVE


class Streams(Contexts):
    """Streams and events of the CUDA driver."""

    #: Inherited. CuPy's own function: each array's memory is paid for in calls, and this is one of few.
    stream_current = staticmethod(get_current_stream)

    def stream_create(self, device: int) -> int:
        """Inherited."""
        with self._on(device):
            handle = call_runtime(runtime.streamCreateWithFlags, runtime.streamNonBlocking)
        return nonzero(handle, "cudaStreamCreateWithFlags")

    def stream_destroy(self, stream: int) -> None:
        """Inherited."""
        call_runtime(runtime.streamDestroy, stream)

    def stream_query(self, stream: int) -> bool:
        """Inherited."""
        with Relaxed():  # else it would end what other threads capture in global mode
            status: int = runtime.streamQuery(stream)
        return status == 0 or _pending(status, "cudaStreamQuery")

    def stream_synchronize(self, stream: int) -> None:
        """Inherited."""
        try:
            runtime.streamSynchronize(stream)
        except CUDARuntimeError as error:
            raise failure_of(error, "cudaStreamSynchronize") from error

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Inherited."""
        try:
            runtime.streamWaitEvent(stream, event)
        except CUDARuntimeError as error:
            raise failure_of(error, "cudaStreamWaitEvent") from error

    def stream_callback(self, stream: int, function: Callable[[], None]) -> None:
        """Inherited. Refused while the stream captures: a replayed graph would call what nobody keeps alive."""
        if self.capture_status(stream) is not CaptureStatus.NONE:
            raise CaptureError(f"host callback on stream {stream:#x}", got="a stream that captures")
        call_runtime(runtime.launchHostFunc, stream, _guarded(function), 0)

    def capture_status(self, stream: int) -> CaptureStatus:
        """Inherited."""
        if stream <= LEGACY_STREAM:
            return _NO_CAPTURE  # it cannot capture, and asking fails while another stream does
        try:
            capturing: bool = runtime.streamIsCapturing(stream)
        except CUDARuntimeError as error:
            raise failure_of(error, "cudaStreamIsCapturing") from error
        except RuntimeError:  # CuPy's own word for an invalidated capture
            return CaptureStatus.INVALIDATED
        return _ACTIVE if capturing else _NO_CAPTURE

    def event_create(self, device: int, timing: bool = False) -> int:
        """Inherited."""
        flags = runtime.eventDefault if timing else runtime.eventDisableTiming
        with self._on(device):
            event = nonzero(call_runtime(runtime.eventCreateWithFlags, flags), "cudaEventCreateWithFlags")
        return event if device == self._only else self._own("event", event, device)

    def event_destroy(self, event: int) -> None:
        """Inherited."""
        if self._only >= 0:
            call_runtime(runtime.eventDestroy, event)
            return
        with self._disowning("event", event):
            call_runtime(runtime.eventDestroy, event)

    def event_record(self, event: int, stream: int) -> None:
        """Inherited. A default stream is that of the event's device."""
        if stream <= PER_THREAD_STREAM and self._only < 0:
            device = self._owner("event", event)
            if self._elsewhere(device):
                with self._on(device):
                    return self.event_record(event, stream)
        try:
            runtime.eventRecord(event, stream)
        except CUDARuntimeError as error:
            raise failure_of(error, "cudaEventRecord") from error

    def event_query(self, event: int) -> bool:
        """Inherited. In relaxed mode: else the question would end what another thread captures in global mode.

        By the driver API: "not ready" is no exception there, and leaves no last error to be cleared.
        """
        with Relaxed():
            code = int(cu.cuEventQuery(event)[0])
            if code in (0, NOT_READY):
                return code == 0
            # A fault, or a thread that never called CUDA: the runtime finds it a context.
            code = runtime.eventQuery(event)
            return code == 0 or _pending(code, "cudaEventQuery")

    def event_synchronize(self, event: int) -> None:
        """Inherited."""
        try:
            runtime.eventSynchronize(event)
        except CUDARuntimeError as error:
            raise failure_of(error, "cudaEventSynchronize") from error

    def event_elapsed(self, start: int, end: int) -> float:
        """Inherited."""
        milliseconds: float = call_runtime(runtime.eventElapsedTime, start, end)
        return milliseconds

    def context_record(self, event: int, device: int) -> None:
        """Inherited."""
        call(cu.cuCtxRecordEvent, self._primary(device).context, event)

    def context_wait(self, event: int, device: int) -> None:
        """Inherited."""
        status = cu.cuCtxWaitEvent(self._primary(device).context, event)[0]  # by most maps: nothing around it
        if status:
            raise failure(int(status), status.name, "cuCtxWaitEvent")


def _pending(status: int, call_name: str) -> bool:
    """False for "not ready", an error for anything else; either way the runtime's last error is cleared."""
    try:
        runtime.check_status(status)
    except CUDARuntimeError as error:
        if status != NOT_READY:
            raise failure_of(error, call_name) from error
    return False


def _guarded(function: Callable[[], None]) -> Callable[[Any], None]:
    """``function`` as CuPy calls it; what it raises goes to ``threading.excepthook``, for C cannot take it."""

    def run(_: Any) -> None:
        try:
            function()
        except BaseException:  # noqa: BLE001 - reported, not swallowed
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    return run
