"""Events that say how far a stream is: recorded when somebody asks, looked at in their order, and given back.

Owns the events that a stream's record keeps. Must not know who waits for them. A capture that begins on the stream
waits for ``stream.marking``: an event that got into it would spoil it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from ..errors import DriverError

if TYPE_CHECKING:
    from .stream import Stream

POLL_EVERY = 16  # more outstanding events of a stream: old ones are looked at
#: What a question about an event says that was recorded into a capture: cudaErrorCapturedEvent, as documented, or
#: cudaErrorInvalidValue, as driver 580 does; a handle that is none is another error.
_CAPTURED_EVENT = (907, 1)


def cover(stream: Stream, seq: int) -> tuple[int, int]:
    """``(covered, event)`` with ``covered >= seq``; records an event only if none covers it yet.

    Raises:
        CaptureError: the stream captures; nothing was recorded.
    """
    state, driver, events = stream.state, stream.driver, stream.events
    with stream.marking:
        if events and events[-1][0] >= seq:
            return events[-1]
        if len(events) > stream.poll_above:
            poll(stream)
            stream.poll_above = len(events) + POLL_EVERY
        covered = max(stream.seq, seq)  # whoever knows a seq has queued that operation
        stream.asked = stream.seq
        event = state.take_event()
        try:
            if stream.nameable():
                stream.refuse_capture("record an event")
                driver.event_record(event, stream.handle)
            elif (
                state.capabilities.context_events
            ):  # nobody may touch the handle: the whole device stands for it
                with state.beginning:
                    state.refuse_captures("record an event of the whole device")
                    driver.context_record(event, stream.device)
            else:
                state.refuse_captures("wait for the whole device")
                driver.device_synchronize(stream.device)  # after which any event is complete
        except BaseException:
            state.give_event(event)
            raise
        events.append((covered, event))
        if stream.finalised:  # else the event is lost
            state.retire.push([(stream, covered)], stream.synchronize)
        return covered, event


def poll(stream: Stream) -> None:
    """Note which events have completed (``marking`` held). They do so in their order: few are asked."""
    events, query = stream.events, stream.driver.event_query
    try:
        done = bisect_left(events, True, key=lambda known: not query(known[1]))
    except DriverError as error:
        if error.code not in _CAPTURED_EVENT:
            raise
        # One came into a capture that somebody else began just then: it says nothing, ever. The next covers all.
        return give_back(stream, len(events))
    if done:
        stream.completed = events[done - 1][0]
        give_back(stream, done)


def give_back(stream: Stream, count: int) -> None:
    """Let others have the oldest ``count`` events."""
    events, spare = stream.events, stream.state.spare
    for _ in range(count):
        spare += (
            events[0][1],
        )  # and no call up to the next line: an interrupt would lose it, or leave it in both
        del events[0]
