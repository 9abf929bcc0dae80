"""How memory is divided among pools: what a user configures.

Owns the kinds of pool as values, and the check that they make sense. Must not know how a pool works.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ...arguments import shown, whole_of
from ...errors import LayoutError
from .spans import padded

MAX_PAGES = 65535  # of one sliced pool
MAX_POOLS = 254  # of one layout


class MemoryAllocationMode(Enum):
    """Which pools serve a request: see ``StreamMemory.allocation_mode``."""

    AUTO = "auto"
    PERSISTENT = "persistent"


@dataclass(frozen=True, slots=True)
class Sliced:
    """Pages of one size, cut into slices: first fit, free neighbours merged.

    Attributes:
        page_size: bytes of a page.
        max_slice_size: bytes of the largest request served; None: a page.
        max_pool_size: bytes of all pages at most; None: no cap. A full pool passes requests on to the next.
    """

    page_size: int
    max_slice_size: int | None = None
    max_pool_size: int | None = None

    def normalized(self) -> Sliced:
        """With sizes rounded up to the alignment, and the cap down to whole pages.

        Raises:
            LayoutError: the sizes contradict each other (a ValueError).
        """
        page = _size("page_size", self.page_size)
        largest = page if self.max_slice_size is None else _size("max_slice_size", self.max_slice_size)
        if largest > page:
            raise LayoutError("max_slice_size", got=f"{largest} bytes", expected=f"at most a page, {page}")
        cap = self.max_pool_size
        if cap is not None:
            if _size("max_pool_size", cap) < page:
                raise LayoutError("max_pool_size", got=f"{cap} bytes", expected=f"at least a page, {page}")
            pages = padded(cap) // page
            if pages > MAX_PAGES:
                raise LayoutError("max_pool_size", got=f"{pages} pages", expected=f"at most {MAX_PAGES}")
            cap = pages * page
        return Sliced(page, largest, cap)


@dataclass(frozen=True, slots=True)
class Exclusive:
    """One page for each request.

    Attributes:
        max_alloc_size: bytes of the largest request served.
        dealloc_period: how many requests of the stream a free page waits for its next use; None: until a cleanup.
    """

    max_alloc_size: int
    dealloc_period: int | None = None

    def normalized(self) -> Exclusive:
        """With sizes rounded up to the alignment.

        Raises:
            LayoutError: no size (a ValueError).
        """
        if self.dealloc_period is not None:
            _size("dealloc_period", self.dealloc_period)
        return replace(self, max_alloc_size=_size("max_alloc_size", self.max_alloc_size))


@dataclass(frozen=True, slots=True)
class Direct:
    """One page of exactly its size for each request of any size; a free page serves requests of that size again.

    Attributes:
        reclaim_at: bytes of all pages from which free ones are given back before there are more; None: never.
    """

    reclaim_at: int | None = None

    def normalized(self) -> Direct:
        """Itself, checked.

        Raises:
            LayoutError: no size (a ValueError).
        """
        if self.reclaim_at is not None:
            _size("reclaim_at", self.reclaim_at)
        return self


@dataclass(frozen=True, slots=True)
class Persistent:
    """One page of exactly its size for each request, given back by a cleanup and by nothing else."""

    def normalized(self) -> Persistent:
        """Itself."""
        return self


PoolLayout = Sliced | Exclusive | Direct | Persistent
_PERSISTENT = ("auto", "disabled", "enforced")


@dataclass(frozen=True, slots=True)
class MemoryConfiguration:
    """The pools of each stream of a runtime, in the order in which a request tries them.

    Attributes:
        pools: one or more.
        dry_run: pages get memory when the first buffer in them is looked at, so that a plan can be measured.
        persistent: ``"auto"`` follows ``allocation_mode``; ``"disabled"`` and ``"enforced"`` ignore it.
    """

    pools: tuple[PoolLayout, ...]
    dry_run: bool = False
    persistent: str = "auto"

    @classmethod
    def of(cls, layout: MemoryConfiguration | Sequence[PoolLayout]) -> MemoryConfiguration:
        """A checked configuration from one, or from a list of pools.

        Raises:
            LayoutError: no pools, too many, or a pool whose sizes contradict each other (a ValueError).
        """
        if not isinstance(layout, MemoryConfiguration | Iterable):
            raise LayoutError(
                "memory configuration",
                got=shown(layout),
                expected="a MemoryConfiguration, or a list of pools",
            )
        given = layout if isinstance(layout, MemoryConfiguration) else cls(tuple(layout))
        if not isinstance(given.pools, Sequence):
            raise LayoutError(
                "pools of a memory configuration", got=shown(given.pools), expected="a tuple of pools"
            )
        if not isinstance(given.dry_run, bool):
            raise LayoutError("dry_run", got=shown(given.dry_run), expected="True or False")
        if not given.pools:
            raise LayoutError("memory configuration", got="no pools", expected="one or more")
        if len(given.pools) > MAX_POOLS:
            raise LayoutError(
                "memory configuration", got=f"{len(given.pools)} pools", expected=f"at most {MAX_POOLS}"
            )
        if not isinstance(given.persistent, str) or given.persistent not in _PERSISTENT:
            raise LayoutError(
                "persistent", got=shown(given.persistent), expected="auto, disabled or enforced"
            )
        for pool in given.pools:
            if not isinstance(pool, PoolLayout):
                raise LayoutError(
                    "pool of a memory configuration",
                    got=shown(pool),
                    expected="Sliced, Exclusive, Direct or Persistent",
                )
        return replace(given, pools=tuple(pool.normalized() for pool in given.pools))


def _size(name: str, value: int) -> int:
    value = whole_of(name, value, 1, error=LayoutError)
    return padded(value) if name != "dealloc_period" else value
