"""Memory that a captured graph uses.

Owns the handle that keeps it out of general use. Must not know graphs.
"""

from __future__ import annotations

from .homes import Home, Homes


class GraphMemory:
    """Memory that a captured graph uses. Keep it as long as the graph."""

    def __init__(self, homes: Homes, home: Home) -> None:
        self._homes = homes
        self._home = home

    @property
    def bytes_reserved(self) -> int:
        """Bytes kept out of general use."""
        return self._home.reserved

    def close(self) -> None:
        """The graph is gone: its memory may be given back. Closing again does nothing."""
        self._homes.release_private(self._home)
