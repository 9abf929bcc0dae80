"""Counts and bytes, now and at their peak.

Owns the counters and their scopes. Must not know what the memory is for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from ..core.stream import Stream
from .adaptor import Adaptor
from .resource import DeviceMemoryResource


@dataclass(frozen=True, slots=True)
class Statistics:
    """What went through a resource. Bytes are those of the blocks; a block counts until it is given back.

    Attributes:
        current_bytes, current_count: live now. In a scope: more (or less) than when it began.
        peak_bytes, peak_count: the highest that ``current_`` was.
        total_bytes, total_count: allocated in all.
    """

    current_bytes: int
    current_count: int
    peak_bytes: int
    peak_count: int
    total_bytes: int
    total_count: int


class StatisticsResource(Adaptor):
    """Counts what goes through, on all threads."""

    def __init__(self, upstream: DeviceMemoryResource) -> None:
        super().__init__(upstream)
        self._lock = threading.RLock()  # re-entrant: a signal handler may allocate
        self._bytes = self._count = self._total_bytes = self._total_count = 0
        self._peak_bytes = self._peak_count = 0
        self._scopes: list[StatisticsScope] = []

    def _allocate(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        block = self._take(nbytes, stream, tag, kind)
        size = block.size
        with self._lock:
            self._total_count += 1
            self._total_bytes += size
            self._count += 1
            self._bytes += size
            if self._count > self._peak_count:
                self._peak_count = self._count
            if self._bytes > self._peak_bytes:
                self._peak_bytes = self._bytes
            for scope in self._scopes:
                scope._saw(self._bytes, self._count)
        return block

    def _given(self, block: Any) -> None:
        with self._lock:
            self._count -= 1
            self._bytes -= block.size

    def statistics(self) -> Statistics:
        """The counters now."""
        with self._lock:
            return Statistics(
                self._bytes,
                self._count,
                self._peak_bytes,
                self._peak_count,
                self._total_bytes,
                self._total_count,
            )

    def reset(self) -> None:
        """Begin again: the peak is what is live now, the totals are 0. Open scopes go on as they were."""
        with self._lock:
            for scope in self._scopes:
                scope._shift(self._total_bytes, self._total_count)
            self._total_bytes = self._total_count = 0
            self._peak_bytes, self._peak_count = self._bytes, self._count

    def scope(self) -> StatisticsScope:
        """``with resource.scope() as s:`` counts what goes through meanwhile, on all threads. Scopes may overlap."""
        return StatisticsScope(self)


class StatisticsScope:
    """Counters of the time of a ``with`` block. Made by :meth:`StatisticsResource.scope`."""

    def __init__(self, resource: StatisticsResource) -> None:
        self._resource = resource
        self._before = resource.statistics()
        self._bytes = self._count = 0  # highest seen, as the resource counts
        self._result: Statistics | None = None

    def __enter__(self) -> Self:
        resource = self._resource
        with resource._lock:
            self._before = resource.statistics()
            self._result = None
            self._bytes, self._count = self._before.current_bytes, self._before.current_count
            resource._scopes.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._resource._lock:
            self._result = self.statistics()
            self._resource._scopes.remove(self)

    def statistics(self) -> Statistics:
        """The counters since the scope began: up to now, or to its end."""
        with self._resource._lock:
            if self._result is not None:
                return self._result
            now, before = self._resource.statistics(), self._before
            return Statistics(
                now.current_bytes - before.current_bytes,
                now.current_count - before.current_count,
                self._bytes - before.current_bytes,
                self._count - before.current_count,
                now.total_bytes - before.total_bytes,
                now.total_count - before.total_count,
            )

    def _saw(self, nbytes: int, count: int) -> None:
        self._bytes, self._count = max(self._bytes, nbytes), max(self._count, count)

    def _shift(self, nbytes: int, count: int) -> None:
        """The resource's totals begin again at 0."""
        before = self._before
        self._before = replace(
            before, total_bytes=before.total_bytes - nbytes, total_count=before.total_count - count
        )
