"""The streams that arrays are allocated on without questions, and what was given back there.

Owns which streams those are, one :class:`Desk` for each allocator function, and the bytes given back on each until they
are known to be free. Must not know the driver: see :mod:`.hot`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

from ..core.stream import Stream
from ..driver.protocol import LEGACY_STREAM

if TYPE_CHECKING:
    from .resource import DeviceMemoryResource
    from .source import SourceResource

_MOST_HOMES = 64


class Home:
    """A stream that arrays of one allocator function are allocated on.

    Attributes:
        owner: the stream's own object.
        stream, handle: the stream.
        asks: whether it can capture a graph, and has to be asked.
        freed: bytes given back on it, counted only (see :meth:`Desk.count`).
        batches: ``(seq, bytes)``: bytes given back before this operation, not known to be free.
        left: no array is allocated here any more, so the desk may have forgotten it.
    """

    __slots__ = ("asks", "batches", "desk", "freed", "handle", "left", "owner", "stream")

    def __init__(self, stream: Stream, desk: Desk) -> None:
        self.stream = stream
        self.owner = stream.owner
        self.handle = stream.handle
        self.asks = stream.handle > LEGACY_STREAM
        self.freed = 0
        self.batches: tuple[tuple[int, int], ...] = ()
        self.left = False
        self.desk = desk

    @property
    def pending(self) -> int:
        """Bytes given back and not known to be free. More than that for a moment while others count, never less."""
        return self.freed + sum(nbytes for _, nbytes in self.batches)


class Desk:
    """The homes of one allocator function, and the bytes that it gave back.

    Attributes:
        source: whose memory it is.
        resource: gives the top of the stack, who gets back what somebody asked about. Entries keep it alive; once it is
            gone nothing is allocated here any more.
        fast: the homes, by the id of their owner.
        last: the one allocated on last; of nobody, if there is none.
        numbered: some layer names memory by its generation, so that it gets one before anybody else can ask about it.
        left: homes where something is pending and nothing is allocated, by their id.
    """

    __slots__ = ("fast", "last", "left", "numbered", "resource", "source")

    def __init__(self, source: SourceResource) -> None:
        self.source = source
        self.resource: Callable[[], DeviceMemoryResource | None] = ref(source)
        self.fast: dict[int, Home] = {}
        self.last = _NOWHERE
        self.numbered = False
        self.left: dict[int, Home] = {}

    def homes(self) -> list[Home]:
        """Every home where something may be pending."""
        return [*list(self.fast.values()), *list(self.left.values())]

    def open_home(self, stream: Stream) -> None:
        """Allocate here without questions from now on, if ``stream`` allows that."""
        owner, source = stream.owner, self.source
        # A per-thread default stream is one object for many threads' streams, and an int may be anybody's.
        if owner is None or stream.thread is not None:
            return
        if not (source._ready and source._ordered and source._plain_calls):
            return
        if len(self.fast) >= _MOST_HOMES:
            self.leave()
        self.fast.setdefault(id(owner), Home(stream, self))

    def leave(self) -> None:
        """Let go of all streams. What is allocated there is still given back there."""
        homes = list(self.fast.values())
        for home in homes:
            home.left = True
            if home.pending:
                self.left[id(home)] = home
        self.reset()

    def reset(self) -> None:
        """Go the long way from now on."""
        self.fast.clear()
        self.last = _NOWHERE

    def find(self, owner: object) -> Home | None:
        """The home of the stream that is this object; it is :attr:`last` then."""
        home = self.fast.get(id(owner))
        if home is not None:
            self.last = home
            if home.left:  # another thread left meanwhile
                self.last = _NOWHERE
        return home

    @property
    def closed(self) -> bool:
        """Whether nobody needs this any more."""
        if self.resource() is not None:
            return False
        self.leave()
        return not self.left

    @property
    def live(self) -> int:
        """Bytes handed out and not given back."""
        return self.source._arrays.nbytes_of(self)

    @property
    def pending(self) -> int:
        """Bytes given back and not known to be free."""
        return sum(home.pending for home in self.homes())

    # --- counting what is free (the source's lock is held) --------------------------------------------------------
    def count(self) -> None:
        """Note for what was given back an operation that comes after it."""
        for home in self.homes():
            nbytes = home.freed
            if nbytes:
                home.batches = (*home.batches, (home.stream.submit(), nbytes))
                home.freed -= nbytes  # others add meanwhile

    def settle(self, done: dict[Stream, int]) -> None:
        """Forget what is free now, because these operations are done."""
        for home in self.homes():
            upto = done.get(home.stream, 0)
            if home.batches and home.batches[0][0] <= upto:
                home.batches = tuple(batch for batch in home.batches if batch[0] > upto)
            if home.left and not home.pending:
                self.left.pop(id(home), None)
                if home.pending:  # another thread gave back meanwhile
                    self.left[id(home)] = home


def forget_closed(desks: list[Desk]) -> None:
    """Drop those that nobody needs. Others may append meanwhile."""
    for desk in list(desks):
        if desk.closed:
            desks.remove(desk)


#: In the place of a home where there is none. No stream is its owner, so nothing else of it is read.
_NOWHERE = Home.__new__(Home)
_NOWHERE.owner = object()
