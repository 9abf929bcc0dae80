"""Streams as records, and the arithmetic that decides when one has to wait for another.

Owns: which (stream, seq) another stream has already waited for, and the matching of foreign stream objects to records;
the events that make it so are of ``cover``. Must not know blocks, maps or arrays.

``seq`` counts what we submitted to a stream. A wait is needed only where ``synced[origin] < seq``; then one event is
recorded on the origin (it covers everything issued there so far), one wait is queued here, and ``synced`` moves up.
No event exists until somebody needs it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from typing import Any

from ..arguments import shown
from ..driver.protocol import LEGACY_STREAM, PER_THREAD_STREAM, CaptureStatus, Driver
from ..driver.registry import driver_of
from ..errors import CaptureError, DriverError, StreamMisuse, UsageError
from .context import hold_all, join_all
from .cover import POLL_EVERY, cover, give_back, poll
from .device import DeviceState, device_state
from .event import Event, follow
from .foreign import check_driver, handle_of
from .process import ThreadToken, this_thread

_ids = itertools.count(1)
_NO_CAPTURE = CaptureStatus.NONE
INVALID_HANDLE = 400  # cudaErrorInvalidResourceHandle


class Stream:
    """One stream of one device. Made by :func:`as_stream`; one live record per live stream.

    Attributes:
        id: our own counter, never the handle (handles are reused).
        handle: what the driver calls it.
        device: ordinal.
        owner: the object that owns the handle, kept alive; None if nobody told us.
        seq: how much was submitted.
        synced: per stream id, the seq of that stream which work queued here from now on comes after.
        completed: the seq known to be done.
        asked: the seq up to which anybody was told of; while it is behind, a replay may go on under the newest one.
        thread: whose per-thread default stream this is; None for every other stream.
        events: (seq covered, event), oldest first: recorded, and not known to be complete.
        marking: held while ``events`` change, from the question whether the stream captures to the record of an event,
            and as a capture begins.
        poll_above: with more events than this old ones are looked at.
        finalised: it was dropped once, and may be in use again: no finaliser gives back what it gets from now on.
    """

    __slots__ = (
        "__weakref__",
        "_count",
        "asked",
        "completed",
        "device",
        "driver",
        "events",
        "finalised",
        "handle",
        "id",
        "marking",
        "owner",
        "poll_above",
        "seq",
        "state",
        "synced",
        "thread",
    )

    def __init__(
        self, state: DeviceState, handle: int, owner: object, thread: ThreadToken | None = None
    ) -> None:
        self.state = state
        self.driver: Driver = state.driver
        self.device = state.device
        self.handle = state.own_handle(handle)
        self.thread = thread  # of a per-thread default stream; other threads cannot name it
        self.id = next(_ids)
        self.events: deque[tuple[int, int]] = deque()
        self.finalised = False
        self.own(owner)  # with the finaliser's three fields there: from here on it has something to undo
        self.seq = self.completed = self.asked = 0
        self._count = itertools.count(1)  # atomic, and half the price of a lock on every allocation and free
        self.synced: dict[int, int] = {}
        self.marking = threading.Lock()
        self.poll_above = POLL_EVERY

    def own(self, owner: object) -> None:
        """Keep ``owner`` alive as long as this record."""
        self.owner = owner
        if owner is not None:
            self.state.owners[self.id] = owner

    # --- what we submitted --------------------------------------------------------------------------------------
    def submit(self) -> int:
        """Count one more operation queued here and give its seq."""
        seq = next(self._count)
        # No call between these two lines: CPython switches threads only at calls and loops.
        if seq > self.seq:
            self.seq = seq
        return seq

    # --- ordering -----------------------------------------------------------------------------------------------
    def wait_for(self, origin: Stream, seq: int) -> bool:
        """Order later work here after the first ``seq`` operations of ``origin``.

        Ordering: only enqueues. Returns True if a wait had to be queued, False if it was implied already.

        Raises:
            CaptureError: one of the two streams captures; neither was touched.
        """
        if origin is self or self.synced.get(origin.id, 0) >= seq:
            return False
        self.refuse_capture("wait for another stream", "Run the work once before, or in the warmup()")
        covered, event = cover(origin, seq)
        self.wait_event(event)
        if self.synced.get(origin.id, 0) < covered:
            self.synced[origin.id] = covered
        return True

    def wait_event(self, event: int) -> None:
        """Order later work here after an event of the driver. Only enqueues."""
        try:
            self.driver.stream_wait_event(self.handle, event)
        except DriverError as error:
            if self.owner is None and error.code == INVALID_HANDLE:
                raise self.unknown() from error
            raise

    def join(self, origin: Stream) -> bool:
        """Order later work here after *everything* queued on ``origin``, also what others queued there.

        Ordering: only enqueues. Never elided unless both are the same stream.
        """
        if origin is self:
            return False
        if not origin.nameable():
            return self.wait_for(origin, origin.submit())
        self.refuse_capture("wait for another stream", "Run the work once before, or in the warmup()")
        with origin.marking:
            origin.refuse_capture("record an event")
            follow(self, origin)
        return True

    def join_context(self) -> None:
        """Order later work here after everything queued on any stream of the device, unknown ones too.

        Ordering: only enqueues where the driver has context events, else blocks the host for the device.
        """
        join_all(self)

    def hold_context(self) -> None:
        """Order later work of every stream of the device, unknown ones too, after all queued here.

        Ordering: only enqueues where the driver has context events, else blocks the host for this stream.
        """
        hold_all(self)

    def nameable(self) -> bool:
        """Whether the handle surely means this stream on this thread: its owner lives, or it is a default stream."""
        if self.thread is not None:
            return self.thread is this_thread()
        return self.owner is not None or self.handle in (0, LEGACY_STREAM)

    # --- progress -----------------------------------------------------------------------------------------------
    def done(self, seq: int) -> bool:
        """Whether the first ``seq`` operations are complete. Never blocks; queues an event if none covers them.

        A capturing stream answers False: its work has not run.
        """
        if self.completed >= seq:
            return True
        if self.capture_status() is not _NO_CAPTURE:
            return False
        cover(self, seq)
        with self.marking:
            poll(self)
        return self.completed >= seq

    def query(self) -> bool:
        """True if everything queued here is done. Never blocks; raises the fault that this reveals."""
        return self.driver.stream_query(self.handle)

    def synchronize(self) -> None:
        """Block the host until everything queued here is done; raises the fault that this reveals."""
        seq = self.asked = self.seq
        if (self.thread is None and self.owner is not None) or self.nameable():
            if self.driver.capture_status(self.handle) is not _NO_CAPTURE:
                self.refuse_capture("synchronize")
            self.driver.stream_synchronize(self.handle)
        else:
            self.state.refuse_captures("wait for the device")
            self.driver.device_synchronize(self.device)
        if seq > self.completed:
            self.completed = seq
        if self.events:
            with self.marking:
                give_back(self, sum(covered <= self.completed for covered, _ in self.events))

    def record(self) -> Event:
        """An event of everything queued here so far. Only enqueues."""
        with self.marking:
            self.refuse_capture("record an event")
            return Event(self)

    def wait(self, event: Event) -> None:
        """Order later work here after ``event``. Only enqueues.

        Raises:
            UsageError: not an :class:`Event`, or one of another driver.
            CaptureError: this stream captures.
        """
        if not isinstance(event, Event) or event.stream.driver is not self.driver:
            raise UsageError(
                f"event for {self!r}",
                got=shown(event),
                expected="what record() of a stream of this driver gave",
            )
        self.refuse_capture("wait for an event")
        if event.stream is self:
            return
        self.driver.stream_wait_event(self.handle, event.handle)
        self.synced[event.stream.id] = max(self.synced.get(event.stream.id, 0), event.seq)

    # --- captures -----------------------------------------------------------------------------------------------
    def capture_status(self) -> CaptureStatus:
        """Whether this stream captures a graph; a stream that cannot be named from here does not."""
        return self.driver.capture_status(self.handle) if self.nameable() else _NO_CAPTURE

    @property
    def capturing(self) -> bool:
        """True while a graph is captured on this stream, by us or by anybody."""
        return self.capture_status() is not _NO_CAPTURE

    def refuse_capture(self, what: str, hint: str = "End the capture first") -> None:
        """Raise CaptureError if this stream captures: what reaches it from outside would break the capture."""
        if self.nameable() and self.driver.capture_status(self.handle) is not _NO_CAPTURE:
            raise CaptureError(f"{self!r} captures a graph", got=what, expected="recorded work", hint=hint)

    def unknown(self) -> StreamMisuse:
        """The error for a number that the driver has no stream for."""
        return StreamMisuse(
            repr(self), got="a handle that the driver does not know", expected="a live stream"
        )

    def __repr__(self) -> str:
        return f"Stream(id={self.id}, handle={self.handle:#x}, device={self.device})"

    def __del__(self) -> None:
        # What was freed in the same cycle may bring this record back to life: it must not give an event twice, and
        # its own reference to the owner, which is still there, is what keeps the handle good then.
        if not hasattr(self, "events"):
            return  # its making was interrupted
        self.finalised = True
        self.state.owners.pop(self.id, None)
        give_back(self, len(self.events))


def as_stream(obj: object = None, *, device: int | None = None, driver: str | Driver | None = None) -> Stream:
    """The record of a stream.

    Args:
        obj: None (the array library's current stream on this thread), a CuPy or PyTorch stream, anything with
            ``__cuda_stream__``, a ``Stream`` of this module, or an int handle. A handle is taken at its word: memory
            used on it waits for all streams of the device, since it may be gone by then; work is queued on it at once.
        device: ordinal that the stream must belong to; None takes the stream's own, or where that does not say the
            one that is current.
        driver: the driver, "cuda", or "sim" for a new simulated device; None takes the current one.

    Ordering: touches no queue. Ownership: the record keeps the object alive as long as anything is ordered by it.

    Raises:
        StreamMisuse: not a stream, no possible handle, or a stream of another device or driver.
    """
    if isinstance(obj, Stream):
        check_driver(obj, obj.driver, driver or obj.driver)
        _check_device(obj, obj.device, device)
        return obj
    if driver is None or isinstance(driver, str):
        driver = driver_of(driver)
    if obj is None:
        device = driver.device_current() if device is None else device
        device_state(driver, device)  # an unknown device gets our error, not the array library's
        obj = driver.stream_current(device)
    handle, own_device, owner = handle_of(obj, driver)
    if handle == LEGACY_STREAM:
        handle = 0  # two names of one stream: DLPack says 1, CuPy 0, and one must not wait for the other
    _check_device(obj, own_device, device)
    here = device if own_device is None else own_device
    state = device_state(driver, driver.device_current() if here is None else here)
    thread = this_thread() if handle == PER_THREAD_STREAM else None
    key: Any = handle if thread is None else (handle, thread)
    reference = state.streams.get(key)
    record = reference() if reference is not None else None
    if record is not None and record.owner is None and owner is not None:
        if record.nameable():
            record.own(owner)
        else:
            record = None  # known by its number alone: it may be gone, and its handle somebody else's by now
    if record is None:
        record = Stream(state, handle, owner, thread)
        number = record.id
        state.streams[key] = weakref.ref(record, lambda _: _forget(state, key, number))
        if handle == 0:
            state.default = record  # it never ends, and every map and launch asks for it
    return record


def _forget(state: DeviceState, key: Any, number: int) -> None:
    """Drop a dead entry, unless a new record took its place, and what others noted of the record of this number.

    Runs inside the collector: no lock.
    """
    reference = state.streams.get(key)
    if reference is not None and reference() is None:
        state.streams.pop(key, None)
    for found in list(state.streams.values()):
        stream = found()
        if stream is not None:
            stream.synced.pop(number, None)


def _check_device(obj: object, own: int | None, wanted: int | None) -> None:
    if own is not None and wanted is not None and own != wanted:
        got, expected = f"device {own}", f"device {wanted}"
        raise StreamMisuse(f"stream {shown(obj)}", got=got, expected=expected, hint="Use one of that device")
