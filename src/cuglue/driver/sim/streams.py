"""Streams of the simulated device as objects, and the current one of each thread.

Owns :class:`SimStream` and how a stream becomes current. Must not know queues. It plays the part that CuPy's streams
play on CUDA.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Any, Protocol

from ...arguments import shown
from ...errors import UsageError


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
        self._entered: list[StreamChoice] = []
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
        self._entered.append(self._current.choose(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().restore()

    def __del__(self) -> None:
        if self.ptr:
            self._dropped.append(
                self.ptr
            )  # any thread, perhaps inside a driver call: the next call destroys it

    def __repr__(self) -> str:
        return f"SimStream(ptr={self.ptr:#x}, device={self.device})"


class StreamChoice:
    """What ``current_stream`` gives: the choice is made; leaving ``with`` takes it back."""

    def __init__(self, current: CurrentStreams, former: Any) -> None:
        self._current = current
        self._former = former

    def restore(self) -> None:
        """Make the former stream current again."""
        self._current.set(self._former)

    def __enter__(self) -> StreamChoice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


class CurrentStreams:
    """The current stream of each thread: a stream object, or the handle of a default stream."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self) -> Any:
        """The current stream of this thread."""
        return getattr(self._local, "stream", 0)

    def set(self, stream: Any) -> None:
        """Make ``stream`` current on this thread."""
        self._local.stream = stream

    def choose(self, stream: Any) -> StreamChoice:
        """Make ``stream`` (an object with ``.ptr`` or ``.handle``, an int, None: the legacy one) current."""
        if stream is None:
            stream = 0
        if not isinstance(stream, int) and not (hasattr(stream, "ptr") or hasattr(stream, "handle")):
            raise UsageError("current stream", got=shown(stream), expected="a stream object or a handle")
        choice = StreamChoice(self, self.get())
        self.set(stream if hasattr(stream, "ptr") or isinstance(stream, int) else stream.handle)
        return choice
