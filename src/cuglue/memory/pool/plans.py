"""The configured memories of all streams of one pool.

Owns which stream has which :class:`StreamMemory`, and the layout of streams that come later. Must not know blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ...core.device import DeviceState
from ...core.stream import Stream
from ...errors import CaptureError
from .counters import PoolCounters
from .layouts import MemoryConfiguration, PoolLayout
from .spans import Span
from .stream_memory import StreamMemory
from .upstream import Upstream


class Plans:
    """All stream memories of a pool with a configured layout."""

    def __init__(self, state: DeviceState, upstream: Upstream, configuration: MemoryConfiguration) -> None:
        self.state = state
        self.upstream = upstream
        self.configuration = configuration
        self._memories: dict[int, StreamMemory] = {}
        self._came_back: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def of(self, stream: Stream) -> StreamMemory:
        """The memory of a stream."""
        found = self._memories.get(stream.id)
        if found is None:
            made = StreamMemory(stream, self.upstream, self.configuration, lambda: self._reclaim(keep=stream))
            with self._lock:
                found = self._memories.setdefault(stream.id, made)
                found.seal(self._came_back)
        return found

    def install(self, stream: Stream, layout: MemoryConfiguration | Sequence[PoolLayout]) -> None:
        """Exchange the pools of ``stream``; streams that come later get the new ones even if that is refused."""
        self.configuration = MemoryConfiguration.of(layout)
        self.of(stream).install(self.configuration)

    def supply(self, memory: StreamMemory, nbytes: int) -> Span:
        """A span with memory behind it."""
        self.state.retire.run_forgotten()
        span = memory.take(nbytes)
        try:
            memory.address(span)
        except BaseException:
            memory.put(span)
            raise
        return span

    def _reclaim(self, keep: Stream) -> None:
        """Give back what other streams keep free, after what the device still does with it."""
        self.state.retire.drain(block=True)
        for memory in self.all():
            if memory.stream is not keep and not memory.stream.capturing:
                memory.sweep()
        self.upstream.resource.reap_pending()

    def seal(self, came: Callable[[], None] | None) -> None:
        """The pool closes: nothing is taken any more, and ``came`` called when something comes back. None: it stays."""
        with self._lock:
            self._came_back = came
            for memory in self.all():
                memory.seal(came)

    def unseal(self) -> None:
        """The pool could not be closed."""
        self.seal(None)

    def all(self) -> list[StreamMemory]:
        """Every memory."""
        return list(self._memories.values())

    def trim(self, keep: int = 0) -> int:
        """Give back unused pages until ``keep`` bytes are reserved; the bytes given back.

        Raises:
            CaptureError: a capture is in the way of some pages; all others were given back.
        """
        before = self.upstream.reserved
        refused: list[CaptureError] = []
        for memory in self.all():
            try:
                if self.upstream.reserved > keep:
                    memory.sweep()
            except CaptureError as error:
                refused.append(error)
        if refused and self.upstream.reserved > keep:
            raise refused[0]
        return before - self.upstream.reserved

    def snapshot(self) -> PoolCounters:
        """No bins, no counts: the reports of the memories say more."""
        return PoolCounters()

    def live_spans(self) -> list[tuple[Span, Stream]]:
        """What is handed out, and on which stream."""
        return [(span, memory.stream) for memory in self.all() for span in memory.live_spans()]

    def free_pieces(self) -> list[int]:
        """Bytes of each free span."""
        return [size for memory in self.all() for size in memory.free_pieces()]
