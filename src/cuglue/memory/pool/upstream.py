"""Where a pool's pages come from: another resource, within a limit.

Owns the count of reserved bytes and the limit. Must not know spans, arenas or layouts.
"""

from __future__ import annotations

import threading
from typing import Any

from ...core.stream import Stream
from ...errors import OutOfMemory, PoolCapacityExceeded
from ...lifecycle import BlockState
from ..block import UnderBlock
from ..layered import entry
from ..resource import DeviceMemoryResource
from .expandable import ExpandableCudaResource
from .spans import Page, Span

_TAG = "pool"
_LIVE = BlockState.LIVE
# What has pages out must not be garbage together with its pool: finalisers run in any order, and those of the resource
# below would find the pages live and free them a second time.
_holding: set[Upstream] = set()


class Upstream:
    """Takes pages and gives them back.

    Attributes:
        resource: the resource.
        limit: bytes of all pages at most; None: no limit.
        reserved, peak: bytes of all pages, now and at most so far.
        tracks: whether the resource gives a page back after its uses on every stream.
    """

    def __init__(self, resource: DeviceMemoryResource, limit: int | None) -> None:
        self.resource = resource
        self.limit = limit
        self.reserved = 0
        self.peak = 0
        self.tracks = resource.supports_block_use_tracking()
        self._allocate, self._deallocate = entry(resource)
        self._lock = threading.Lock()

    def fits(self, nbytes: int) -> bool:
        """Whether a page of this size would keep the limit."""
        return self.limit is None or self.reserved + nbytes <= self.limit

    def grow(self, nbytes: int, stream: Stream) -> Page:
        """A page that may be used on ``stream`` at once.

        Ordering: as the resource's ``allocate``.

        Raises:
            PoolCapacityExceeded: over the limit; the resource was not asked.
            OutOfMemory: the resource has no memory.
        """
        by = self.expandable
        page = Page(0, nbytes if by is None else by.whole(nbytes))
        self.place(page, stream)
        return page

    def reserve(self, nbytes: int) -> Page:
        """A page without memory, for a dry run; it counts as any other.

        Raises:
            PoolCapacityExceeded: over the limit.
        """
        self._claim(nbytes)
        return Page(0, nbytes)

    def place(self, page: Page, stream: Stream, *, claimed: bool = False) -> None:
        """Put memory behind ``page``; if that fails nothing has changed."""
        if not claimed:
            self._claim(page.nbytes)
        source: Any = None
        try:
            source = self._allocate(page.nbytes, stream, _TAG, UnderBlock)
            page.place(source.ptr, source)
        except BaseException:
            if source is not None:  # interrupted: nobody gets it
                page.place(0, None)
                self._deallocate(source)
            if not claimed:
                self._release(page.nbytes)
            raise

    def drop(self, page: Page) -> None:
        """Give a page back, after the work so far on the stream that it was taken for. If that fails it stays.

        Ordering: as the resource's ``deallocate``.
        """
        try:
            if page.source is not None:
                self._deallocate(page.source)
        except BaseException:
            if page.source is not None and page.source.state is not _LIVE:  # interrupted, but it is free
                page.gone = True
                self._release(page.nbytes)
            raise
        with self._lock:  # and no call before: an interrupt would leave it counted
            self.reserved -= page.nbytes
            page.gone = True
        self._let_go()

    # --- pages that grow in place -------------------------------------------------------------------------------
    @property
    def expandable(self) -> ExpandableCudaResource | None:
        """The resource, if its pages can be extended."""
        return self.resource if isinstance(self.resource, ExpandableCudaResource) else None

    def extend(self, page: Page, nbytes: int, by: ExpandableCudaResource) -> Span | None:
        """At least ``nbytes`` more at the end of ``page``, as a free span; None if there is no memory, or no room."""
        size = by.whole(nbytes)
        try:
            self._claim(size)
        except PoolCapacityExceeded:
            return None
        try:
            by.extend(page.source, page.nbytes, size)
        except BaseException as error:
            self._release(size)
            if isinstance(error, OutOfMemory):
                return None
            raise
        return page.extend(size)

    def shrink(self, page: Page, nbytes: int, by: ExpandableCudaResource) -> None:
        """Take ``nbytes`` away from the end of ``page``, where a span of that size is. Waits for the device."""
        by.shrink(page.source, page.nbytes, nbytes)
        page.shorten()
        self._release(nbytes)

    def _claim(self, nbytes: int) -> None:
        counted = False
        try:
            with self._lock:
                if not self.fits(nbytes):
                    raise PoolCapacityExceeded(
                        "pool",
                        got=f"{nbytes} bytes asked for, {self.reserved} reserved",
                        expected=f"at most {self.limit} in all",
                        requested=nbytes,
                        capacity=self.limit,
                        in_use=self.reserved,
                    )
                _holding.add(self)
                self.peak = max(self.peak, self.reserved + nbytes)
                self.reserved += nbytes
                counted = True
        except BaseException:
            if counted:
                self._release(nbytes)
            raise

    def _release(self, nbytes: int) -> None:
        with self._lock:
            self.reserved -= nbytes
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            if not self.reserved:
                _holding.discard(self)
