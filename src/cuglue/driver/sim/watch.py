"""Host access through views: what the host may not write, because nothing orders it with queued work.

Owns the views handed out of one allocation and the checksums of bytes that queued operations use. A host write that
comes between the queueing of an operation and the wait for it changes a checksum that no operation changed; so does
any host write to bytes that were only viewed read-only. Must not know queues: it is told when an operation is queued,
runs, and becomes known to the host. Host reads cannot be seen; the state judges those when the view is taken.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .hazards import Operation
from .pages import Pages
from .ranges import Range, linear
from .shadow import Clock, Use

Report = Callable[[str, Range, Operation, Operation], None]


@dataclass(slots=True)
class _View:
    """A view the host holds, while ``held`` is alive. ``checksum`` is kept only of a read-only one."""

    range: Range
    operation: Operation
    checksum: int | None
    held: weakref.ref[memoryview]


@dataclass(slots=True)
class _Pending:
    """A queued operation over viewed bytes, and what they were when last accounted for."""

    use: Use
    view: Operation
    checksum: int


class Watch:
    """The views of one allocation and the operations under way over them."""

    __slots__ = ("_bytes", "_pending", "_report", "_views")

    def __init__(self, data: npt.NDArray[np.uint8], report: Report) -> None:
        self._bytes = data
        self._report = report
        self._views: list[_View] = []
        self._pending: Pages[_Pending] = Pages()

    def note_view(self, range: Range, writable: bool, operation: Operation, view: memoryview) -> None:
        """The host got a view. A newer view of the same bytes replaces the older, unless that is held and may write:
        then the bytes are not taken for read-only.
        """
        self.check(range)
        shared = any(_writable(v, range) for v in self._views)
        kept = [
            v
            for v in self._views
            if _writable(v, range) or not (range.covers(v.range) or (writable and _read_only(v, range)))
        ]
        self._views = _joined(kept)
        checksum = None if writable or shared else self._checksum(range)
        self._views.append(_View(range, operation, checksum, weakref.ref(view)))

    def queued(self, use: Use) -> None:
        """An operation was queued: from now on its bytes are the device's until the host waits for it."""
        for view in self._views:
            if view.range.overlaps(use.range):
                self._pending.add(use.range, _Pending(use, view.operation, self._checksum(use.range)))
                return

    def before_run(self, use: Use) -> None:
        """The operation runs now: the host must not have touched its bytes."""
        self._verify(p for p in self._pending.around(use.range) if p.use is use)

    def after_run(self, use: Use) -> None:
        """The operation ran: what it wrote is accounted for."""
        if not use.access.writes:
            return
        for pending in self._pending.around(use.range):
            if pending.use.range.overlaps(use.range):
                pending.checksum = self._checksum(pending.use.range)
        for view in self._views:
            if view.checksum is not None and view.range.overlaps(use.range):
                view.checksum = self._checksum(view.range)

    def fence(self, host: Clock) -> None:
        """The host waited: what it knows to be done is its own again."""
        self.check()
        self._pending.keep(lambda pending: not pending.use.known_to(host))

    def check(self, range: Range | None = None) -> None:
        """Report host writes that nothing ordered, of all bytes or of those in ``range``."""
        self._verify(self._pending if range is None else self._pending.around(range))
        for view in self._views:
            if view.checksum is None or not (range is None or view.range.overlaps(range)):
                continue
            if view.checksum != (now := self._checksum(view.range)):
                view.checksum = now
                self._report(
                    "host write through a read-only view", view.range, view.operation, view.operation
                )

    def _verify(self, pending: Iterable[_Pending]) -> None:
        for one in pending:
            now = self._checksum(one.use.range)
            if now != one.checksum:
                one.checksum = now
                self._report("host write that nothing orders", one.use.range, one.use.operation, one.view)

    def _checksum(self, range: Range) -> int:
        if range.rows == 1:
            return zlib.crc32(self._bytes[range.start : range.end].data)
        rows = np.lib.stride_tricks.as_strided(
            self._bytes[range.start :], (range.rows, range.width), (range.pitch, 1), writeable=False
        )
        return zlib.crc32(np.ascontiguousarray(rows).data)


def _joined(views: list[_View]) -> list[_View]:
    """The same bytes in fewer records: writable views that nobody holds, but whoever took them may keep the address.

    What a slab hands out piece by piece, and every piece that is viewed anew, would otherwise stay a record for good.
    """
    loose = [view for view in views if view.checksum is None and view.held() is None]
    loose.sort(key=lambda view: view.range.start)
    runs: list[_View] = []
    for view in loose:
        if runs and view.range.start <= runs[-1].range.end:
            last = runs[-1].range
            runs[-1].range = linear(last.start, max(last.end, view.range.end) - last.start)
        else:
            runs.append(view)
    return [view for view in views if view.checksum is not None or view.held() is not None] + runs


def _writable(view: _View, range: Range) -> bool:
    return view.checksum is None and view.range.overlaps(range) and view.held() is not None


def _read_only(view: _View, range: Range) -> bool:
    return view.checksum is not None and view.range.overlaps(range)
