"""What cuglue keeps beside a driver for each device: known streams, spare events, the retire queue.

Owns the lookup from a driver and an ordinal to these three. Must not know what the streams are used for.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from ..arguments import shown
from ..driver.protocol import LEGACY_STREAM, DeviceStream, Driver
from ..errors import UsageError

if TYPE_CHECKING:
    from .retire import RetireQueue
    from .stream import Stream

_lock = threading.RLock()


def _forked() -> None:
    """In a forked child: nobody has the lock, which another thread may have held at the fork."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)


class DeviceState:
    """The records of one device of one driver. Get it with :func:`device_state`."""

    def __init__(self, driver: Driver, device: int) -> None:
        from .retire import RetireQueue  # the queue looks back at this record

        self.driver = driver
        self.device = device
        self.capabilities = driver.capabilities(device)
        self.streams: dict[Any, weakref.ref[Stream]] = {}  # by handle; per-thread streams by (handle, thread)
        # What owns the handle of a record, by the record's id. In reach of everything, so that the collector never
        # takes an owner for garbage together with memory that is still to be freed on its stream: it would finalise
        # the two in any order.
        self.owners: dict[int, object] = {}
        self.retire: RetireQueue = RetireQueue(self)
        self.default: Stream | None = None  # the record of the default stream
        self.refuge: Stream | None = None  # where memory is freed whose own stream may not be named any more
        # Held from the first wait to the stamp of an operation: two threads on one block must not interleave there.
        self.ordering = threading.RLock()
        # Held as a capture begins, and from the question whether any stream captures to what concerns all of them.
        # Whoever wants several takes ordering first, then a stream's marking, then this one.
        self.beginning = threading.Lock()
        self.spare: deque[int] = deque()  # events; appended by finalisers, so a deque and no lock
        self.alone = driver.device_count() == 1  # no call has to say whose stream it means

    def own_handle(self, stream: int) -> int:
        """The handle by which the driver is told of ``stream``, whichever device is current then: see DeviceStream."""
        return stream if self.alone else DeviceStream(stream, self.device)

    @property
    def capturing(self) -> bool:
        """Whether any stream that we know captures a graph."""
        return any(stream.capturing for stream in self._known())

    def refuse_captures(self, what: str) -> None:
        """Raise CaptureError if any stream that we know captures: what concerns the whole device would break that."""
        for found in list(self.streams.values()):
            stream = found()
            if stream is not None and stream.handle > LEGACY_STREAM:  # a default stream cannot capture
                stream.refuse_capture(what)

    def _known(self) -> list[Stream]:
        return [stream for found in list(self.streams.values()) if (stream := found()) is not None]

    def take_event(self) -> int:
        """An event nobody uses; creates one only if there is no spare."""
        try:
            event = self.spare[0]
            del self.spare[0]  # no call since: an interrupt would lose it
            return event
        except IndexError:
            return self.driver.event_create(self.device)

    def give_event(self, event: int) -> None:
        """Keep the event for the next taker. Safe in finalisers: only appends.

        The event may be pending still: recording it again only replaces what later waits see.
        """
        self.spare.append(event)

    def close_events(self) -> None:
        """Destroy the spare events."""
        while self.spare:
            self.driver.event_destroy(self.spare.popleft())


def device_state(driver: Driver, device: int) -> DeviceState:
    """The one :class:`DeviceState` of ``driver`` and ``device``; made at first use, dies with the driver.

    Raises:
        UsageError: no such device.
    """
    states: dict[int, DeviceState] = vars(driver).setdefault("_cuglue_devices", {})
    state = states.get(device) if type(device) is int else None  # a dictionary takes False and 0.0 for 0
    if state is not None:
        return state
    with _lock:
        if type(device) is not int or device not in states:
            check_device(driver, device)
            states[device] = DeviceState(driver, device)
        return states[device]


def check_device(driver: Driver, device: object) -> None:
    """Refuse what is no device of ``driver``.

    Raises:
        UsageError: no such device.
    """
    count = driver.device_count()
    if type(device) is not int or not 0 <= device < count:
        raise UsageError(
            "device", got=shown(device), expected=f"an ordinal below {count} ({driver.name} driver)"
        )
