"""Persistent windows of a stream: what is reserved in one comes from a pool of its own (contract C12).

Owns which windows are open, and changes that wait for the end of a capture. Must not know pools.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ...arguments import shown
from ...core.stream import Stream
from ...errors import UsageError
from .layouts import MemoryAllocationMode, MemoryConfiguration


class PersistentWindows:
    """The part of a stream's memory that knows the windows."""

    configuration: MemoryConfiguration

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._depth = 0  # open windows
        self._deferred: list[MemoryAllocationMode] = []

    @property
    def persistent_now(self) -> bool:
        """Whether a request is served from the persistent pool."""
        mode = self.configuration.persistent
        return mode == "enforced" or (mode == "auto" and self._depth > 0)

    def allocation_mode(self, mode: MemoryAllocationMode) -> None:
        """Open a persistent window (PERSISTENT), or close the innermost (AUTO). Windows nest.

        While the stream captures a graph the change waits for the end of the capture.

        Raises:
            UsageError: no :class:`MemoryAllocationMode`.
        """
        if not isinstance(mode, MemoryAllocationMode):
            raise UsageError("allocation mode", got=shown(mode), expected="a MemoryAllocationMode")
        self._apply_deferred()
        if self.configuration.persistent != "auto":
            return
        if self.stream.capturing:
            self._deferred.append(mode)
        else:
            self._change(mode)

    def _change(self, mode: MemoryAllocationMode) -> None:
        if mode is MemoryAllocationMode.PERSISTENT:
            self._depth += 1
        elif self._depth:
            self._depth -= 1
        else:
            warnings.warn(
                f"allocation_mode(AUTO) on {self.stream!r}: no persistent window is open",
                RuntimeWarning,
                stacklevel=3,
            )

    def _apply_deferred(self) -> None:
        if self._deferred and not self.stream.capturing:
            waiting, self._deferred = self._deferred, []
            for mode in waiting:
                self._change(mode)

    @contextmanager
    def persistent(self) -> Iterator[None]:
        """What is reserved in the ``with`` block comes from the persistent pool."""
        self.allocation_mode(MemoryAllocationMode.PERSISTENT)
        try:
            yield
        finally:
            self.allocation_mode(MemoryAllocationMode.AUTO)
