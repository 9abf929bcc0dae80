"""Counts and bytes, now and at their peak.

Owns the counters and their scopes. Must not know what the memory is for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from ..core.stream import Stream
from ..errors import UsageError
from .adaptor import Adaptor
from .desks import Home
from .entries import Entry
from .hot import Way, give_up
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


class _Counters:
    """The counters now. Slots: they are read and written for every array."""

    __slots__ = ("count", "nbytes", "peak_count", "peak_nbytes", "total_count", "total_nbytes")

    def __init__(self) -> None:
        self.count = self.nbytes = self.peak_count = self.peak_nbytes = 0
        self.total_count = self.total_nbytes = 0


def _counting(
    counters: _Counters, scopes: list[StatisticsScope], tell_scopes: Callable[[int, int], None]
) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """``(took, gave)``: count bytes in, and out.

    Between the first line of counting and the last there is no call: CPython changes threads, and looks at signals,
    only at calls and loops. Nobody who counts or looks comes between, and each array saves the price of two locks.
    """

    def took(nbytes: int) -> None:
        counters.total_count += 1
        counters.total_nbytes += nbytes
        count = counters.count = counters.count + 1
        live = counters.nbytes = counters.nbytes + nbytes
        if count > counters.peak_count:
            counters.peak_count = count
        if live > counters.peak_nbytes:
            counters.peak_nbytes = live
        if scopes:
            try:
                tell_scopes(live, count)
            except BaseException:  # interrupted
                gave(nbytes)
                raise

    def gave(nbytes: int) -> None:
        counters.count -= 1
        counters.nbytes -= nbytes

    return took, gave


class StatisticsResource(Adaptor):
    """Counts what goes through, on all threads."""

    def __init__(self, upstream: DeviceMemoryResource) -> None:
        super().__init__(upstream)
        self._lock = threading.RLock()  # re-entrant: a signal handler may allocate
        self._counters = _Counters()
        self._scopes: list[StatisticsScope] = []
        self._took, self._gave = _counting(self._counters, self._scopes, self._tell_scopes)

    def _allocate(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        block = self._take(nbytes, stream, tag, kind)
        try:
            self._took(block.size)
        except BaseException as error:  # interrupted: it is not counted, and nobody gets it
            self._return(block, error)
            raise
        return block

    def _given(self, block: Any) -> None:
        self._gave(block.size)

    def _tell_scopes(self, nbytes: int, count: int) -> None:
        with self._lock:
            for scope in self._scopes:
                scope._saw(nbytes, count)

    def _way(self, take_back: Callable[[Entry], None]) -> Way | None:
        way = self._way_below(StatisticsResource, take_back)
        if way is None:
            return None
        if way.took is None:
            return way._replace(took=self._took, gave=self._gave)
        # Another one below is told already.
        _, take_below, give_below = way[:3]
        took, counters = self._took, self._counters

        def take(nbytes: int, home: Home, quiet: bool) -> Entry:
            entry = take_below(nbytes, home, quiet)
            try:
                took(nbytes)
            except BaseException as error:  # interrupted: it is not counted, and nobody gets it
                give_up(way, entry, error)
                raise
            return entry

        def give(entry: Entry) -> None:
            try:
                give_below(entry)
            finally:
                if not entry[1]:  # as the second function of _counting, without a call
                    counters.count -= 1
                    counters.nbytes -= entry[2]

        return way.wrapped(take, give)

    def statistics(self) -> Statistics:
        """The counters now."""
        now = self._counters
        return Statistics(
            now.nbytes, now.count, now.peak_nbytes, now.peak_count, now.total_nbytes, now.total_count
        )

    def reset(self) -> None:
        """Begin again: the peak is what is live now, the totals are 0. Open scopes go on as they were."""
        now = self._counters
        with self._lock:
            nbytes, count = now.total_nbytes, now.total_count
            now.total_nbytes = now.total_count = 0  # and no call before it: others count meanwhile
            now.peak_nbytes, now.peak_count = now.nbytes, now.count
            for scope in self._scopes:
                scope._shift(nbytes, count)

    def scope(self) -> StatisticsScope:
        """``with resource.scope() as s:`` counts what goes through meanwhile, on all threads. Scopes may overlap."""
        return StatisticsScope(self)


class StatisticsScope:
    """Counters of the time of a ``with`` block. Made by :meth:`StatisticsResource.scope`."""

    def __init__(self, resource: StatisticsResource) -> None:
        self._resource = resource
        self._before = resource.statistics()
        self._bytes = self._count = 0  # highest seen, as the resource counts
        self._result: Statistics | None = Statistics(0, 0, 0, 0, 0, 0)  # None while the scope is open

    def __enter__(self) -> Self:
        resource = self._resource
        entered = False
        try:
            with resource._lock:
                if self._result is None:
                    raise self._misused("entered while it is open")
                self._before = resource.statistics()
                self._bytes, self._count = self._before.current_bytes, self._before.current_count
                self._result = None  # and no call up to the next line: it is open and told, or neither
                resource._scopes += (self,)
                entered = True
                self._saw(resource._counters.nbytes, resource._counters.count)  # others counted meanwhile
        except BaseException:
            if entered:  # interrupted: nobody leaves it
                self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        resource = self._resource
        with resource._lock:
            if self._result is not None:
                raise self._misused("left while it is not open")
            result, place = self.statistics(), resource._scopes.index(self)
            self._result = result
            del resource._scopes[place]

    def _misused(self, got: str) -> UsageError:
        return UsageError(
            "statistics scope", got=got, expected="one exit for each entry", hint="Make another scope"
        )

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
