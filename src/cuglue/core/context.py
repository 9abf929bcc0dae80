"""All streams of a device as one, those that nobody told us of too.

Owns the two orders between one stream and all of them. Must not know who needs them. A driver without events of the
whole context makes the host wait instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .stream import Stream


def join_all(stream: Stream) -> None:
    """Order later work of ``stream`` after everything queued on the device."""
    state, driver = stream.state, stream.driver
    if not state.capabilities.context_events:
        state.refuse_captures("wait for the whole device")
        driver.device_synchronize(state.device)
        return
    event = state.take_event()
    try:
        with state.beginning:
            state.refuse_captures("wait for the whole device")
            driver.context_record(event, state.device)
            driver.stream_wait_event(stream.handle, event)
    finally:
        state.give_event(event)


def hold_all(stream: Stream) -> None:
    """Order everything queued on the device later after all that ``stream`` has got.

    Two calls of the driver: the event is recorded for this, and nobody else has to find it.
    """
    state, driver = stream.state, stream.driver
    if not state.capabilities.context_events:
        state.refuse_captures("let the whole device wait")
        stream.synchronize()
        return
    event = state.take_event()
    try:
        with state.beginning:
            state.refuse_captures("let the whole device wait")
            if stream.nameable():
                driver.event_record(event, stream.handle)
            else:
                driver.context_record(event, state.device)
            driver.context_wait(event, state.device)
    finally:
        state.give_event(event)
