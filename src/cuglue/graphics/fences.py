"""Fences: the semaphores of another API in stream order, and the writes that an object's owner recorded.

Owns :class:`Fence`, and :class:`Writes`, which decides what a map has to wait for (contracts A8). Must not know where
a semaphore came from, nor what it guards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ..arguments import shown, whole
from ..core.block import BlockLife
from ..core.device import DeviceState
from ..core.stream import Stream, as_stream
from ..driver.protocol import Access
from ..errors import CuglueError, DriverError, MapUnavailableError, UsageError
from ..exchange.tokens import call_site
from ..lifecycle import Owned

LARGEST_VALUE = 2**64 - 1
_POLL_SECONDS = 0.0005


class WriteTimeoutError(MapUnavailableError, TimeoutError):
    """The owner of an object did not finish a recorded write in time; nothing was queued or mapped."""


def check_value(what: object, value: object, lowest: int = 0) -> int:
    """``value`` as the value of a timeline.

    Raises:
        UsageError: not an int, or out of range.
    """
    number = whole(value)
    if number is None or not lowest <= number <= LARGEST_VALUE:
        raise UsageError(f"{what}: value", got=shown(value), expected=f"an int of {lowest} to 2**64 - 1")
    return number


class Fence(Owned):
    """A semaphore or fence of another API. Made by :func:`cuglue.external.import_semaphore_fd` and its kin.

    A timeline counts upwards: a wait for 5 passes once somebody has signalled 5 or more. A binary one ignores values:
    each wait passes once and takes the signal away.

    Attributes:
        timeline: whether it counts.
        newest: the largest value waited for, signalled or recorded through this object; 0 for none.

    Ownership: close it when nothing will be queued on it any more; handles that use it do not close it.
    """

    def __init__(
        self, state: DeviceState, semaphore: int, *, timeline: bool, completed: Callable[[], int] | None
    ) -> None:
        """Made by the import functions.

        Args:
            state: the device.
            semaphore: the driver's handle; owned from now on.
            timeline: whether it counts.
            completed: asks the owner for the value reached; None where nobody can tell.
        """
        self.state = state
        self.timeline = timeline
        self.newest = 0
        self._semaphore = semaphore
        self._completed = completed
        self._uses: dict[Stream, int] = {}
        self._retired = False
        self._own()
        self._created_at = "{}:{}".format(*call_site())

    @property
    def device(self) -> int:
        """Ordinal of the device that it was imported for."""
        return self.state.device

    @property
    def can_tell(self) -> bool:
        """Whether :meth:`reached` may be asked."""
        return self._completed is not None

    def reached(self, value: int) -> bool:
        """Whether ``value`` was signalled, as the owner says. Queues nothing; costs what the owner's answer costs.

        Raises:
            UsageError: the fence was imported without ``completed``.
        """
        if self._completed is None:
            raise UsageError(
                f"{self!r} cannot tell how far it is",
                hint="Import it with completed=, a function that asks its owner for the value",
            )
        return self._completed() >= value

    def note(self, value: int) -> None:
        """Somebody will signal ``value``: what is signalled next has to be more."""
        self.newest = max(self.newest, value)

    def wait(self, value: int, stream: Any = None) -> None:
        """Let later work of a stream wait for ``value``.

        Args:
            value: of a timeline; a binary fence ignores it.
            stream: anything :func:`~cuglue.as_stream` takes; None: the array library's current stream.

        Ordering: only enqueues. A value that nobody ever signals holds the stream for ever.

        Raises:
            UsageError: not a value of a timeline.
            ClosedError, CaptureError, StreamMisuse, DriverError: as they say; nothing was queued.
        """
        check_value(self, value)
        where = self._stream(stream, "wait for a fence")
        self._enqueue(self.state.driver.semaphore_wait, value, where)

    def signal(self, value: int, stream: Any = None) -> None:
        """Signal ``value`` after all work queued on a stream so far.

        Args:
            value: of a timeline: more than any value before it; a binary fence ignores it.
            stream: as for :meth:`wait`.

        Ordering: only enqueues.

        Raises:
            UsageError: not more than every value known to be waited for, signalled or recorded: a timeline never goes
                back. Else as :meth:`wait`.
        """
        check_value(self, value)
        if self.timeline and value <= self.newest:
            raise UsageError(f"{self!r}: signalling", got=value, expected=f"more than {self.newest}")
        where = self._stream(stream, "signal a fence")
        self._enqueue(self.state.driver.semaphore_signal, value, where)

    def _enqueue(self, call: Callable[[int, int, int], None], value: int, where: Stream) -> None:
        try:
            call(self._semaphore, value, where.handle)
            self._note_use(value, where)
        except BaseException as error:
            if not isinstance(error, CuglueError):
                self._note_use(value, where)  # interrupted: the driver may have it
            raise

    def _note_use(self, value: int, where: Stream) -> None:
        self.note(value)
        self._uses[where] = where.submit()

    def _stream(self, stream: Any, what: str) -> Stream:
        self._check_open()
        where = as_stream(stream, device=self.state.device, driver=self.state.driver)
        where.refuse_capture(what)
        return where

    def _close(self) -> None:
        if not self._retired:  # closing that failed is repeated: the queue has the semaphore since
            self._retire()
        self.state.retire.drain()

    def _forgotten(self) -> None:
        self.state.retire.forget(self._retire)

    def _retire(self) -> None:
        """Give the semaphore back once what was queued on it is done: destroying it under a wait is undefined."""
        self._retired = True
        destroy, semaphore = self.state.driver.semaphore_destroy, self._semaphore
        self.state.retire.push(tuple(self._uses.items()), lambda: destroy(semaphore))

    def __repr__(self) -> str:
        kind = "timeline" if self.timeline else "binary"
        return f"Fence({kind}, device={self.device}{', closed' if self.closed else ''})"


def check_fence(fence: object, device: int) -> None:
    """Refuse what cannot be the fence of an object on ``device``.

    Raises:
        UsageError: not a Fence, or one of another device.
        ClosedError: it was closed.
    """
    if fence is None:
        return
    if not isinstance(fence, Fence):
        raise UsageError(
            "fence",
            got=shown(fence),
            expected="a Fence",
            hint="Import it first: cuglue.external.import_semaphore_fd",
        )
    fence._check_open()
    if fence.device != device:
        raise UsageError(
            f"{fence!r} of an object on device {device}",
            got=f"device {fence.device}",
            expected="the same device",
        )


class Writes:
    """What an object's owner said of its writes, and the fence that orders maps after them.

    | recorded | fence | a map |
    |---|---|---|
    | nothing, or waited for already | any | waits for nothing |
    | a new value | takes the wait | waits on the GPU for the largest value |
    | a new value | none, closed, or refuses | is declined, reason ``unordered_write`` |

    Attributes:
        fence: what the owner signals; None where it gave none.
        recorded: the largest value recorded; 0 for none.
        handed_back: the value that the newest publishing signalled; 0 for none.
    """

    __slots__ = ("_lock", "_waited", "fence", "handed_back", "recorded")

    def __init__(self, fence: Fence | None) -> None:
        self.fence = fence
        self.recorded = 0
        self.handed_back = 0
        self._waited = 0
        self._lock = threading.Lock()

    def record(self, value: int) -> None:
        """The owner's device writes, and signals ``value`` when that is done. An older value changes nothing."""
        with self._lock:
            self.recorded = max(self.recorded, value)
            if self.fence is not None:
                self.fence.note(value)

    def poll(self, timeout: float, what: object) -> None:
        """Block the host until the newest recorded write is done, as the owner says, or the time is up.

        Raises:
            WriteTimeoutError: it is not done after ``timeout`` seconds.
            UsageError: the owner cannot tell.
        """
        value = self.recorded
        if value <= self._waited or self.fence is None or self.fence.closed:
            return
        if not self.fence.can_tell:
            raise UsageError(
                f"{what}: timeout={timeout}",
                got="a fence that cannot tell how far it is",
                expected="a fence imported with completed=",
            )
        end = time.monotonic() + timeout
        while not self.fence.reached(value):
            left = end - time.monotonic()
            if left <= 0:
                raise WriteTimeoutError(
                    f"{what}: a recorded write was not done",
                    got=f"no signal of {value} within {timeout} s",
                    reason="unordered_write",
                )
            time.sleep(min(_POLL_SECONDS, left))

    def order(self, stream: Stream, uses: BlockLife, what: object) -> None:
        """Order ``stream`` after the newest recorded write; ``uses`` learns of the wait, for other streams.

        Ordering: only enqueues.

        Raises:
            MapUnavailableError: it cannot be waited for; nothing was queued.
        """
        value = self.recorded
        if value <= self._waited:
            return
        if self.fence is None or self.fence.closed:
            raise self._declined(what, "no fence" if self.fence is None else "a fence that was closed")
        uses.prepare(stream, Access.READ_WRITE)
        try:
            self.fence.wait(value, stream)
            uses.finish(stream, Access.WRITE)
        except DriverError as error:
            raise self._declined(what, str(error)) from error
        except BaseException as error:
            if not isinstance(error, CuglueError):  # interrupted: it may be queued here
                uses.finish(stream, Access.WRITE)
                if not self.fence.timeline:
                    self._waited = value  # a second wait for one signal would never end
            raise
        self._waited = value

    def hand_back(self, stream: Stream) -> None:
        """Let the owner know that what ``stream`` wrote is there: signal the next value, or block the host for it."""
        if self.fence is None or self.fence.closed:
            stream.synchronize()
            return
        value = self.fence.newest + 1
        self.fence.signal(value, stream)
        self.handed_back = value

    def _declined(self, what: object, got: str) -> MapUnavailableError:
        return MapUnavailableError(
            f"{what}: a write of its owner was recorded that cannot be waited for",
            got=got,
            expected="the fence that the write signals",
            hint="Wait on the host for the write, or register with fence=",
            reason="unordered_write",
        )
