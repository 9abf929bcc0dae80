"""Points in a stream that others can wait for.

Owns one driver event each, borrowed from the device's spare ones. Must not know when a wait is needed: ``stream`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .stream import Stream


class Event:
    """A point in a stream: everything queued there when it was recorded. Give it to :meth:`Stream.wait`."""

    __slots__ = ("handle", "seq", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.seq = stream.asked = stream.seq
        self.handle = stream.state.take_event()
        try:
            stream.driver.event_record(self.handle, stream.handle)
        except BaseException:
            stream.state.give_event(self.handle)
            self.handle = 0
            raise

    def query(self) -> bool:
        """True if complete. Never blocks."""
        return self.stream.driver.event_query(self.handle)

    def synchronize(self) -> None:
        """Block the host until complete; raises the fault that this reveals."""
        self.stream.driver.event_synchronize(self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            self.stream.state.give_event(self.handle)


def follow(stream: Stream, origin: Stream) -> None:
    """Order later work of ``stream`` after all that ``origin`` has got, by an event that nobody else has to find.

    Two calls of the driver, and nothing to be looked at later: exports and arrays of others do it each time. Both were
    asked whether they capture, and ``origin`` can be named.
    """
    seq = origin.submit()
    state = origin.state
    event = state.take_event()
    try:
        state.driver.event_record(event, origin.handle)
        stream.wait_event(event)
    finally:
        state.give_event(event)
    if stream.synced.get(origin.id, 0) < seq:
        stream.synced[origin.id] = seq
