"""Memory that a captured graph uses.

Owns the handle that keeps it out of general use, and whose place on a stream it takes meanwhile. Must not know graphs.
"""

from __future__ import annotations

from functools import partial

from ...core.stream import Stream
from ...lifecycle import Owned
from .homes import Home, Homes


class GraphHomes(Homes):
    """Homes whose place on a stream memory of a graph may take."""

    def set_apart(self, stream: Stream) -> Home:
        """A new, private home for ``stream`` in the place of the one that it has."""
        with self.lock:
            former = self._by_stream.get(stream.id)
            home = Home(stream, private=True)
            home.former = former
            if former is not None:
                self._forget_fast(former)
            self._by_stream[stream.id] = home
            self._note_fast(home)  # in the place of the former one
            return home

    def put_back(self, private: Home) -> None:
        """End :meth:`set_apart`, also of a home in whose place is another one meanwhile; its memory stays apart."""
        with self.lock:
            self._others.append(private)
            stream, former = private.stream.id, private.former
            later = self._by_stream[stream]
            if later is private:
                self._forget_fast(private)
                del self._by_stream[stream]
                if former is not None:
                    self._by_stream[stream] = former
                    self._note_fast(former)
            else:
                while later.former is not private:
                    assert later.former is not None  # it is in the chain until it is put back
                    later = later.former
                later.former = former
            private.former = None

    def release_private(self, private: Home) -> None:
        """The graph is gone: what is free of its memory may be given back."""
        with self.all_locked():
            private.private = False
            self._drop_unused(lambda page: True, [], only=private)
        if self.came_back is not None:
            self.came_back()

    def abandon(self, private: Home) -> None:
        """Nobody can say any more that the graph is gone: its memory stays apart until the pool is closed."""
        private.abandoned = True
        if self.came_back is not None:
            self.release_private(private)


class GraphMemory(Owned):
    """Memory that a captured graph uses. Keep it as long as the graph.

    One that is dropped instead of closed warns (ResourceWarning); its memory stays out of use until the pool is closed.
    """

    def __init__(self, homes: GraphHomes, stream: Stream) -> None:
        self._homes = homes
        self._home = homes.set_apart(stream)
        self._own(4)  # made by the call of graph_memory() in a ``with``

    @property
    def bytes_reserved(self) -> int:
        """Bytes kept out of general use."""
        return self._home.reserved

    def leave(self) -> None:
        """End of the block: the stream takes its memory where it did before."""
        self._homes.put_back(self._home)

    def _close(self) -> None:
        """The graph is gone: its memory may be given back."""
        self._homes.release_private(self._home)
        self._homes.state.retire.run_forgotten()

    def _forgotten(self) -> None:
        self._homes.state.retire.forget(partial(self._homes.abandon, self._home))

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"GraphMemory({self._home.stream!r}, {self.bytes_reserved} bytes reserved{closed})"
