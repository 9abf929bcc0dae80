"""Streams that the memory side makes for itself.

Owns a driver stream as an object, and the one stream per device on which memory is freed whose own stream may not be
named any more. Must not know resources.
"""

from __future__ import annotations

from functools import partial

from ..core.device import DeviceState
from ..core.stream import Stream, as_stream


class OwnStream:
    """A non-blocking stream of ours; its last user's end destroys it. Give it to :func:`~cuglue.as_stream`."""

    __slots__ = ("__weakref__", "_state", "device_id", "ptr")

    def __init__(self, state: DeviceState) -> None:
        self.ptr = 0
        self._state = state
        self.device_id = state.device
        self.ptr = state.driver.stream_create(state.device)

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):  # else its making was interrupted
            self._state.retire.forget(partial(self._state.driver.stream_destroy, self.ptr))

    def __repr__(self) -> str:
        return f"OwnStream({self.ptr:#x}, device={self.device_id})"


def refuge(state: DeviceState) -> Stream:
    """The stream for freeing what has no stream to be freed on: that one is gone, or belongs to another thread."""
    if state.refuge is None:
        state.refuge = as_stream(OwnStream(state), device=state.device, driver=state.driver)
    return state.refuge


def or_refuge(stream: Stream) -> Stream:
    """``stream``; where it may not be named the :func:`refuge`, behind everything that the device has got."""
    if stream.nameable():
        return stream
    found = refuge(stream.state)
    found.join_context()
    return found


def prepare_refuge(stream: Stream) -> None:
    """Make the :func:`refuge` now if memory of ``stream`` may have to be freed there.

    A free makes nothing: it must not fail for want of a stream, and a driver that is ending a thread may make none.
    """
    if stream.owner is None or stream.thread is not None:
        refuge(stream.state)
