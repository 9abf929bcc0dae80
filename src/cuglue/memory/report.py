"""Why an allocation failed, in figures that say what to do about it.

Owns the report and its text. Must not know why memory was asked for, nor change anything.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

from ..core.block import BlockLife
from ..driver.protocol import Driver
from ..errors import CuglueError

_TAGS_SHOWN = 5


class Explained(Protocol):
    """What a resource tells for a report."""

    @property
    def driver(self) -> Driver: ...
    @property
    def device(self) -> int: ...
    def live_blocks(self) -> list[BlockLife]: ...
    def pending_per_stream(self) -> dict[int, int]: ...
    def free_spans(self) -> tuple[int, int, int] | None: ...


@dataclass(frozen=True, slots=True)
class ShortageReport:
    """Where the memory is. All sizes in bytes; None where nobody can tell.

    Attributes:
        requested: what was asked for.
        live, live_blocks: what the resource handed out and did not get back.
        pending: given back, and not known to be free yet, by the id of the stream that has to finish first.
        cached, largest_free, free_spans: what the resource keeps free, its largest piece and the number of pieces.
        device_free, device_total: what the driver says of the device; other programs count too.
        top_tags: ``(tag, bytes, blocks)`` of the largest users.
        tried: what was done before giving up.
    """

    requested: int
    live: int
    live_blocks: int
    pending: dict[int, int]
    cached: int | None
    largest_free: int | None
    free_spans: int | None
    device_free: int | None
    device_total: int | None
    top_tags: tuple[tuple[str, int, int], ...]
    tried: tuple[str, ...]

    @property
    def fragmentation(self) -> float | None:
        """Part of the cached bytes outside the largest free piece: 0 none, towards 1 all in crumbs."""
        if not self.cached or self.largest_free is None:
            return None
        return 1 - self.largest_free / self.cached

    def __str__(self) -> str:
        lines = [f"no {self.requested} bytes in one piece"]
        lines.append(f"live: {self.live} bytes in {self.live_blocks} blocks")
        if self.cached is not None:
            scattered = "" if self.fragmentation is None else f", {self.fragmentation:.0%} fragmented"
            lines.append(
                f"cached and free: {self.cached} bytes in {self.free_spans} pieces, "
                f"largest {self.largest_free}{scattered}"
            )
        streams = ", ".join(f"stream {stream}: {n}" for stream, n in sorted(self.pending.items())) or "none"
        lines.append(f"given back but in use on the device: {sum(self.pending.values())} bytes ({streams})")
        if self.device_free is not None:
            lines.append(f"device: {self.device_free} of {self.device_total} bytes free")
        if self.top_tags:
            tags = ", ".join(f"{tag}: {n} bytes in {count}" for tag, n, count in self.top_tags)
            lines.append(f"largest tags: {tags}")
        lines.append(f"tried: {', '.join(self.tried) or 'nothing, because no device has as much'}")
        return "\n  - ".join(lines)


def explain(resource: Explained, nbytes: int, tried: list[str]) -> ShortageReport:
    """The report on ``resource`` for a request of ``nbytes`` that failed after ``tried``. Blocks nothing."""
    blocks = resource.live_blocks()
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for block in blocks:
        sizes[block.tag].append(block.size)
    top = sorted(((tag, sum(n), len(n)) for tag, n in sizes.items()), key=lambda item: -item[1])
    free = resource.free_spans()
    try:
        info = resource.driver.memory_info(resource.device)
    except CuglueError:
        info = None  # a lost device: the report must not hide the failure that it explains
    return ShortageReport(
        requested=nbytes,
        live=sum(block.size for block in blocks),
        live_blocks=len(blocks),
        pending=resource.pending_per_stream(),
        cached=free and free[0],
        largest_free=free and free[1],
        free_spans=free and free[2],
        device_free=info and info.free,
        device_total=info and info.total,
        top_tags=tuple(top[:_TAGS_SHOWN]),
        tried=tuple(tried),
    )
