"""Streams of the simulated device as objects, and what is current on each thread.

Owns :class:`SimStream` and how a stream and a device become current. Must not know queues. It plays the part
that CuPy's streams play on CUDA.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from ...arguments import shown
from ...errors import UsageError

_AS_IT_IS = object()


class _Streams(Protocol):
    def stream_create(self, device: int) -> int: ...
    def stream_destroy(self, stream: int) -> None: ...
    def stream_synchronize(self, stream: int) -> None: ...
    def stream_query(self, stream: int) -> bool: ...


class SimStream:
    """A stream of the simulated device: ``ptr``, ``device``, ``driver``; current inside ``with``; ends when dropped."""

    def __init__(
        self, driver: _Streams, current: CurrentStreams, dropped: deque[int], device: int = 0
    ) -> None:
        self.ptr = 0
        self.device = device
        self.driver = driver
        self._dropped = dropped
        self._current = current
        self._entered: list[Choice] = []
        self.ptr = driver.stream_create(device)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which CUDA libraries take each other's streams."""
        return 0, self.ptr

    def synchronize(self) -> None:
        """Block until all work queued on it is done."""
        self.driver.stream_synchronize(self.ptr)

    def query(self) -> bool:
        """True if all work queued on it is done."""
        return self.driver.stream_query(self.ptr)

    def close(self) -> None:
        """Destroy it; queued work still runs."""
        if self.ptr:
            self.driver.stream_destroy(self.ptr)
            self.ptr = 0

    def __enter__(self) -> SimStream:
        self._entered.append(self._current.choose(self.device, self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().restore()

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):  # else its making was interrupted
            # Any thread, perhaps inside a driver call: the next call destroys it.
            self._dropped.append(self.ptr)

    def __repr__(self) -> str:
        return f"SimStream(ptr={self.ptr:#x}, device={self.device})"


class Choice:
    """What ``current_stream`` and ``current_device`` give: the choice is made; leaving ``with`` takes it back."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self.restore = restore

    def __enter__(self) -> Choice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


class CurrentStreams(threading.local):
    """The current device of each thread, and its current stream on each: an object, or a handle as a number."""

    device = 0

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}

    def stream(self, device: int) -> Any:
        """The current stream of this thread on ``device``."""
        return self._streams.get(device, 0)

    def choose(self, device: int, stream: Any = _AS_IT_IS) -> Choice:
        """Make ``device`` current, and there ``stream``: an object with ``.ptr`` or ``.handle``, an int, None."""
        former = self.device, self._streams
        if stream is not _AS_IT_IS:
            self._streams = {**self._streams, device: _current(stream)}
        self.device = device

        def restore() -> None:
            self.device, self._streams = former

        return Choice(restore)


def _current(stream: Any) -> Any:
    """What says which stream is current: an object that has an address, else the number."""
    if hasattr(stream, "ptr"):
        return stream
    handle = getattr(stream, "handle", 0 if stream is None else stream)
    if not isinstance(handle, int):
        raise UsageError("current stream", got=shown(stream), expected="a stream object or a handle")
    return int(handle)
