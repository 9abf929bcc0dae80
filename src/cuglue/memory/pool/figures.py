"""What a pool tells of itself.

Owns the figures, all of them counted when asked for: a counter would need a lock on every allocation. Must not change
anything.
"""

from __future__ import annotations

from ...core.block import Block, BlockLife
from ...core.device import DeviceState
from ...driver.protocol import Driver
from ..block import UNTAGGED
from ..resource import BudgetSnapshot, DeviceMemoryResource
from ..uses import TracksUses
from .counters import PoolCounters
from .ladder import Ladder
from .plans import Plans
from .upstream import Upstream
from .usage import MemoryUsage


class PoolFigures(TracksUses):
    """The part of a pool that answers questions."""

    upstream: DeviceMemoryResource
    homes: Ladder
    _driver: Driver
    _device: int
    _ordinal: int
    _known_state: DeviceState
    _pages: Upstream
    _plans: Plans | None

    @property
    def driver(self) -> Driver:
        """The driver whose memory this is."""
        return self._driver

    @property
    def device(self) -> int:
        """Ordinal that the driver knows the device by."""
        return self._device

    @property
    def device_ordinal(self) -> int:
        """Inherited."""
        return self._ordinal

    @property
    def _state(self) -> DeviceState:
        return self._known_state

    @property
    def max_bytes(self) -> int | None:
        """Bytes kept at most; None: no limit."""
        return self._pages.limit

    @property
    def bytes_reserved(self) -> int:
        """Bytes taken from upstream: in use, and kept for the next request."""
        return self._pages.reserved

    @property
    def peak_bytes_reserved(self) -> int:
        """The most that :attr:`bytes_reserved` ever was."""
        return self._pages.peak

    @property
    def bytes_outstanding(self) -> int:
        """Bytes handed out, padding included, and given back while a stream still has them."""
        self._state.retire.run_forgotten()
        return self._pages.reserved - self.free_spans()[0]

    @property
    def counters(self) -> PoolCounters:
        """How often the pool did what, since it was made."""
        return (self.homes if self._plans is None else self._plans).snapshot()

    def usage(self) -> MemoryUsage:
        """Of all streams. What arrays asked for is not kept: without a layout, their padding counts as in use."""
        live = [span for span, _ in self._keeper.live_spans()]
        asked = sum(span.requested or span.size for span in live)
        return MemoryUsage(len(live), asked, sum(span.size for span in live) - asked, self._pages.reserved)

    def budget_snapshot(self) -> BudgetSnapshot | None:
        """Inherited. Of the budget below: it counts what this pool keeps."""
        return self.upstream.budget_snapshot()

    def live_blocks(self) -> list[BlockLife]:
        """Inherited. For memory of arrays that nobody asked about, a stand-in with its address, size and stream."""
        live = self._keeper.live_spans()
        return [
            self._table.at(span.ptr) or Block(span.ptr, span.size, stream, 0, UNTAGGED)
            for span, stream in live
        ]

    def pending_per_stream(self) -> dict[int, int]:
        """Bytes given back and not known to be free yet, by stream: none, later work of the stream comes after."""
        return {}

    def free_spans(self) -> tuple[int, int, int]:
        """Bytes kept free, the largest piece and the number of pieces."""
        pieces = self._keeper.free_pieces()
        return sum(pieces), max(pieces, default=0), len(pieces)

    @property
    def _keeper(self) -> Ladder | Plans:
        return self.homes if self._plans is None else self._plans

    def __repr__(self) -> str:
        limit = "" if self.max_bytes is None else f", max_bytes={self.max_bytes}"
        return f"PoolResource({self.upstream!r}{limit})"
