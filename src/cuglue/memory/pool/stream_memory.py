"""The configured pools of one stream, and what a runtime asks of them (contracts C8-C13).

Owns the routing of a request and the exchange of a layout for another. Must not know how pools
work inside, nor commands: spans are given back by whoever has them, after the work that used them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ...arguments import shown
from ...core.stream import Stream
from ...errors import (
    BufferTooBig,
    CaptureError,
    ClosedError,
    CuglueError,
    OutOfMemory,
    PoolCapacityExceeded,
    PoolsInUse,
    UsageError,
)
from ...lifecycle import BlockState
from .layouts import MemoryConfiguration, Persistent, PoolLayout
from .planned import Pool, make_pool
from .reservation import Reservation
from .spans import Page, Span, taken
from .upstream import Upstream
from .usage import MemoryReport, MemoryUsage
from .windows import PersistentWindows

_FREED = BlockState.FREED
_log = logging.getLogger(__name__)


class _Pages:
    """The source of the pools of one stream."""

    def __init__(self, upstream: Upstream, stream: Stream) -> None:
        self.dry = False
        self._upstream = upstream
        self._stream = stream

    def grow(self, nbytes: int) -> Page:
        """Inherited."""
        return self._upstream.reserve(nbytes) if self.dry else self._upstream.grow(nbytes, self._stream)

    def place(self, page: Page) -> None:
        """Put memory behind a page of a dry run."""
        self._upstream.place(page, self._stream, claimed=True)

    def drop(self, page: Page) -> None:
        """Inherited."""
        self._upstream.drop(page)


class StreamMemory(PersistentWindows):
    """Memory of one stream of a runtime.

    Args:
        stream: the stream; memory is usable there at once and given back there.
        upstream: where pages come from.
        configuration: the layout, checked.
        reclaim: gives back what other streams keep; called before a second attempt.
    """

    def __init__(
        self,
        stream: Stream,
        upstream: Upstream,
        configuration: MemoryConfiguration,
        reclaim: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(stream)
        self._reclaim = reclaim
        self._pages = _Pages(upstream, stream)
        self._lock = threading.RLock()
        self._dropped: deque[Span] = deque()  # of reservations that nobody can release any more
        self._came_back: Callable[[], None] | None = (
            None  # called when something does; the pool is closed then
        )
        self._total = stream.driver.memory_info(stream.device).total
        self._persistent = make_pool(Persistent(), self._pages)
        self._set(configuration)

    def _set(self, configuration: MemoryConfiguration) -> None:
        self.configuration = configuration
        self._pages.dry = configuration.dry_run
        self._pools: list[Pool] = [make_pool(kind, self._pages) for kind in configuration.pools]

    # --- requests -----------------------------------------------------------------------------------------------
    def reserve(self, nbytes: int) -> Reservation:
        """Memory for ``nbytes`` bytes.

        Ordering: only enqueues; where memory is short, gives back what is free and tries once more, which may block.

        Raises:
            BufferTooBig: no pool here, or not this device, could ever hold it; nothing was tried.
            CaptureError: the stream captures a graph and there is nothing free.
            PoolCapacityExceeded: every pool that accepts it is full.
            OutOfMemory: upstream has none.
            ClosedError: the pool is closed.
        """
        if type(nbytes) is not int or nbytes < 1:
            raise UsageError("reservation", got=shown(nbytes), expected="a size in bytes, 1 or more")
        made = Reservation(self, nbytes)  # first: an interrupt finds the span taken by nobody, or by this
        made.span = self.take(nbytes)
        made.state = BlockState.LIVE
        return made

    def take(self, nbytes: int) -> Span:
        """The span behind :meth:`reserve`."""
        former, taken.span = taken.span, None  # another one's, where a signal's handler reserves
        try:
            self._apply_deferred()
            return self._take(nbytes)
        except CuglueError:
            raise
        except BaseException:
            self._mend(taken.span)
            raise
        finally:
            taken.span = former

    def _mend(self, lost: Span | None) -> None:
        """After an interrupt: everything free can be found again, ``lost`` too."""
        with self._lock:
            if lost is not None:
                lost.free = True
                lost.requested = 0
            for pool in (*self._pools, self._persistent):
                pool.mend()

    def _take(self, nbytes: int) -> Span:
        if nbytes > self._total:
            raise _too_big(nbytes, self._total, "the device's memory")
        try:
            return self._route(nbytes)
        except (BufferTooBig, CaptureError, ClosedError):
            raise
        except CuglueError as first:
            if self.stream.capturing:
                raise
            _log.info("no memory for %d bytes (%s); cleaning up and trying once more", nbytes, first)
            self.cleanup()
            self._reclaim()
            try:
                return self._route(nbytes)
            except CuglueError as second:
                second.add_note(f"the first attempt failed too: {first}")
                raise

    def _route(self, nbytes: int) -> Span:
        with self._lock:
            self._check_open()
            for pool in self._pools:
                pool.tick()
            if self.persistent_now:
                span = self._persistent.take(nbytes)
                if span is not None:
                    return span
            accepting = [pool for pool in self._pools if pool.accepts(nbytes)]
            for pool in accepting:
                span = pool.take(nbytes)
                if span is not None:
                    return span
                if not pool.spilled:
                    pool.spilled = True
                    _log.warning(
                        "%r is full: %d bytes go to the next pool, if there is one", pool.kind, nbytes
                    )
        if not accepting:
            most = max((_largest(pool.kind) for pool in self._pools), default=0)
            raise _too_big(nbytes, most, "the largest request of its pools")
        in_use = sum(pool.usage.bytes_in_use for pool in accepting)
        capacity = sum(pool.capacity or 0 for pool in accepting)
        raise PoolCapacityExceeded(
            f"pools of {self.stream!r}",
            got=f"{nbytes} bytes asked for, {in_use} in use",
            expected=f"at most {capacity} bytes in all",
            hint="Free buffers, raise max_pool_size, or add a pool that takes what the others cannot",
            requested=nbytes,
            capacity=capacity,
            in_use=in_use,
        )

    def address(self, span: Span) -> int:
        """The address of a span, with memory behind it."""
        if not span.ptr or not span.page.ptr:
            with self._lock:
                if not span.page.ptr:
                    self._pages.place(span.page)
        return span.ptr

    def put(self, span: Span, block: Any = None) -> None:
        """Take a span back, and the block in it; what used it is ordered before what :attr:`stream` does next.

        An interrupt finds the block live, or freed and its span in the pool: called again, this does nothing then.
        """
        try:
            with self._lock:
                if block is not None:
                    if block.state is _FREED:
                        return
                    block.state = _FREED
                span.life = None
                span.free = True
                span.home.give(span)
        except BaseException:
            self._mend(None)
            raise
        if self._came_back is not None:
            self._came_back()
            self.stream.state.retire.run_forgotten()

    def abandon(self, span: Span) -> None:
        """Nobody can give ``span`` back any more: it stays out of use until the pool is closed. For finalisers."""
        self._dropped.append(span)
        if self._came_back is not None:
            self._came_back()

    # --- closing ------------------------------------------------------------------------------------------------
    def seal(self, came: Callable[[], None] | None) -> None:
        """The pool closes: nothing is taken any more, and ``came`` called when something comes back. None: it stays."""
        with self._lock:
            self._came_back = came

    def _check_open(self) -> None:
        if self._came_back is not None:
            raise ClosedError(repr(self), got="a call after the pool was closed", expected="an open pool")

    def __repr__(self) -> str:
        found, closed = self.usage(), ", closed" if self._came_back is not None else ""
        return f"StreamMemory({self.stream!r}, {found.bytes_in_use} of {found.bytes_reserved} bytes in use{closed})"

    # --- figures ------------------------------------------------------------------------------------------------
    def usage(self) -> MemoryUsage:
        """Now, of all pools."""
        return self.report().usage

    def report(self) -> MemoryReport:
        """Pool by pool, with peaks."""
        with self._lock:
            return MemoryReport(tuple(pool.report() for pool in self._pools), self._persistent.report())

    def live_spans(self) -> list[Span]:
        """What is handed out."""
        with self._lock:
            pages = [page for pool in (*self._pools, self._persistent) for page in pool.pages]
            return [span for page in pages for span in page.spans() if not span.free]

    def free_pieces(self) -> list[int]:
        """Bytes of each free span."""
        with self._lock:
            pages = [page for pool in (*self._pools, self._persistent) for page in pool.pages]
            return [span.size for page in pages for span in page.spans() if span.free]

    # --- changes ------------------------------------------------------------------------------------------------
    def cleanup(self) -> None:
        """Give every page that nothing is in back to upstream. Peaks stay.

        Ordering: only enqueues, unless upstream blocks to free.

        Raises:
            CaptureError: a stream of the device captures a graph; nothing has changed.
        """
        self._refuse_captures("give memory back")
        self.sweep()

    def sweep(self) -> None:
        """:meth:`cleanup` without the question whether a stream captures."""
        with self._lock:
            while self._came_back is not None and self._dropped:
                span = self._dropped.popleft()
                span.home.give(span)
            for pool in (*self._pools, self._persistent):
                pool.cleanup()

    def install(self, layout: MemoryConfiguration | Sequence[PoolLayout]) -> None:
        """Exchange the pools. Persistent memory stays; peaks and warnings start anew.

        Raises:
            LayoutError: no such layout (a ValueError); nothing has changed.
            CaptureError: a stream of the device captures a graph; nothing has changed.
            PoolsInUse: memory of the old pools is in use; they stay, but have given back their free pages.
            ClosedError: the pool is closed.
        """
        configuration = MemoryConfiguration.of(layout)
        with self._lock:
            self._check_open()
            self.cleanup()
            usages = [pool.usage for pool in self._pools]
            allocs = sum(usage.number_allocs for usage in usages)
            if allocs:
                in_use = sum(usage.bytes_in_use for usage in usages)
                raise PoolsInUse(
                    f"pools of {self.stream!r}",
                    got=f"{in_use} bytes in use in {allocs} buffers",
                    expected="nothing in use",
                    hint="Close the buffers of this stream first",
                    bytes_in_use=in_use,
                    number_allocs=allocs,
                )
            self._set(configuration)

    def _refuse_captures(self, what: str) -> None:
        for reference in list(self.stream.state.streams.values()):
            stream = reference()
            if stream is not None:
                stream.refuse_capture(what)


def _largest(kind: PoolLayout) -> int:
    found = getattr(kind, "max_slice_size", None) or getattr(kind, "max_alloc_size", None)
    return int(found or 0)


def _too_big(nbytes: int, most: int, what: str) -> OutOfMemory:
    return BufferTooBig(
        "buffer", got=f"{nbytes} bytes asked for", expected=f"at most {most}, {what}", requested=nbytes
    )
