"""Which line allocated what is live, and what two points in time differ by.

Owns the notes on live blocks. Must not know how memory is allocated.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from ..arguments import shown
from ..core.block import BlockId
from ..core.device import device_state
from ..core.stream import Stream
from ..errors import UsageError, UseAfterFree
from .adaptor import Adaptor
from .block import UNTAGGED
from .desks import Home
from .entries import Entry
from .hot import Way, give_up
from .layered import check_block
from .resource import DeviceMemoryResource

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (f"{os.sep}cupy{os.sep}", f"{os.sep}cupyx{os.sep}", f"{os.sep}contextlib.py")


_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class LiveAllocation:
    """One live block.

    Attributes:
        id: of the block.
        nbytes: its size in bytes.
        tag: what it is for.
        where: ``file:line in function`` of the Python line that asked for it.
        thread: name of the thread.
        time: seconds since the epoch.
        notes: what :meth:`TrackingResource.annotate` added, oldest first.
    """

    id: BlockId
    nbytes: int
    tag: str
    where: str
    thread: str
    time: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeakReport:
    """What two snapshots differ by.

    Attributes:
        leaked: live in the second and not in the first.
        freed: live in the first and not in the second.
    """

    leaked: tuple[LiveAllocation, ...]
    freed: tuple[LiveAllocation, ...]

    @property
    def leaked_bytes(self) -> int:
        """Bytes of :attr:`leaked`."""
        return sum(a.nbytes for a in self.leaked)

    def by_line(self) -> dict[str, tuple[int, int]]:
        """``(bytes, blocks)`` leaked, by line, largest first."""
        lines: dict[str, tuple[int, int]] = {}
        for allocation in self.leaked:
            nbytes, count = lines.get(allocation.where, (0, 0))
            lines[allocation.where] = (nbytes + allocation.nbytes, count + 1)
        return dict(sorted(lines.items(), key=lambda item: -item[1][0]))

    def __str__(self) -> str:
        if not self.leaked:
            return "no leak"
        lines = [f"{n} bytes in {count} blocks at {where}" for where, (n, count) in self.by_line().items()]
        return "\n  - ".join([f"{self.leaked_bytes} bytes leaked", *lines])


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was live at one point. Made by :meth:`TrackingResource.snapshot`."""

    live: Mapping[int, LiveAllocation] = field(repr=False)  # by generation
    tracker: int = field(repr=False)  # number of the resource that made it

    @property
    def nbytes(self) -> int:
        """Bytes live."""
        return sum(a.nbytes for a in self.live.values())

    def __len__(self) -> int:
        return len(self.live)


class TrackingResource(Adaptor):
    """Keeps, for each live block, its tag and the Python line that asked for it."""

    def __init__(self, upstream: DeviceMemoryResource) -> None:
        super().__init__(upstream)
        self._live: dict[int, LiveAllocation] = {}  # by generation
        self._number = next(_numbers)

    def _allocate(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        block = self._take(nbytes, stream, tag, kind)
        try:
            thread = threading.current_thread().name
            self._live[block.generation] = LiveAllocation(
                block.id, block.size, tag, calling_line(), thread, time.time()
            )
        except BaseException as error:  # interrupted: nobody gets this block
            self._return(block, error)
            raise
        return block

    def _given(self, block: Any) -> None:
        self._live.pop(block.generation, None)

    def _way(self, take_back: Callable[[Entry], None]) -> Way | None:
        way = self._way_below(TrackingResource, take_back)
        if way is None:
            return None
        desk, take_below, give_below = way[:3]
        desk.numbered = True
        live, ordinal = self._live, self.device_ordinal

        def take(nbytes: int, home: Home, quiet: bool) -> Entry:
            entry = take_below(nbytes, home, quiet)
            try:
                generation = entry[5]
                thread = threading.current_thread().name
                block = BlockId(entry[1], generation, home.stream.id, ordinal)
                live[generation] = LiveAllocation(
                    block, nbytes, UNTAGGED, calling_line(), thread, time.time()
                )
            except BaseException as error:  # interrupted: nobody gets this memory
                give_up(way, entry, error)
                raise
            return entry

        def give(entry: Entry) -> None:
            try:
                give_below(entry)
            finally:
                if not entry[1]:
                    live.pop(entry[5], None)

        return way.wrapped(take, give)

    def live(self) -> list[LiveAllocation]:
        """What is live, oldest first. Memory of dead arrays is given back first. Only enqueues."""
        device_state(self.driver, self.device).retire.run_forgotten()
        return sorted(list(self._live.values()), key=lambda allocation: allocation.id.generation)

    def snapshot(self) -> Snapshot:
        """What is live, to compare later. Memory of dead arrays is given back first. Only enqueues."""
        return Snapshot({allocation.id.generation: allocation for allocation in self.live()}, self._number)

    @staticmethod
    def diff(a: Snapshot, b: Snapshot) -> LeakReport:
        """What came to be live between two snapshots and still was, and what was freed between them.

        Raises:
            UsageError: not two snapshots of one resource.
        """
        for snapshot in a, b:
            if not isinstance(snapshot, Snapshot):
                raise UsageError("diff", got=shown(snapshot), expected="two snapshots of a TrackingResource")
        if a.tracker != b.tracker:
            raise UsageError(
                "diff", got="snapshots of two resources", expected="two of the same TrackingResource"
            )
        return LeakReport(
            tuple(found for generation, found in b.live.items() if generation not in a.live),
            tuple(found for generation, found in a.live.items() if generation not in b.live),
        )

    def annotate(self, block: Any, note: str) -> None:
        """Add a note to a live block: a reason found later, a name.

        Raises:
            UseAfterFree: not a live block of this resource.
        """
        if not isinstance(note, str):
            raise UsageError("note", got=shown(note), expected="a str")
        generation = check_block(block).generation
        while True:
            found = self._live.get(generation)
            if found is None:
                raise UseAfterFree(
                    f"note on {shown(block)}", expected="a live block of this resource", generation=generation
                )
            noted = replace(found, notes=(*found.notes, note))
            if self._live.get(generation) is found:  # else another thread noted something too, or freed it
                self._live[generation] = noted
                return


def calling_line() -> str:
    """``file:line in function`` of the innermost frame outside this library and CuPy."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


@cache
def _is_library(name: str) -> bool:
    return name.startswith(_HERE) or any(part in name for part in _LIBRARIES)
