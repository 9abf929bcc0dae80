"""How often a pool did what. Must not know how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PoolCounters:
    """Figures since the pool was made. Threads that hit the same bin at once may lose a count.

    Attributes:
        hits, misses: requests served from a bin, and behind it.
        splits, coalesced: spans cut in two, and merged with a neighbour.
        flushes: how often the bins of a stream were emptied.
        grown: pages taken from upstream; fallbacks: of these, those of the exact size after more was refused.
        extended: pages made longer where they were.
        replaced: unused pages given back before a larger one was taken.
        stolen: spans, and whole pages, taken over from another stream.
        drained: pages of other streams given back for a request.
        trimmed, shrunk: pages given back by ``trim``, and for having been idle.
        retries: requests to upstream repeated after waiting for the device.
    """

    hits: int = 0
    misses: int = 0
    splits: int = 0
    coalesced: int = 0
    flushes: int = 0
    grown: int = 0
    fallbacks: int = 0
    extended: int = 0
    replaced: int = 0
    stolen: int = 0
    drained: int = 0
    trimmed: int = 0
    shrunk: int = 0
    retries: int = 0


def sum_of(*counters: PoolCounters) -> PoolCounters:
    """The sum, field by field."""
    return PoolCounters(*(sum(getattr(one, name) for one in counters) for name in PoolCounters.__slots__))
