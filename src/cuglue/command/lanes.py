"""What a runtime keeps beside each stream, and the resolution of a command against them.

Owns the lanes of a runtime (one beside each stream it meets), the runtime's own streams, and
:class:`ResolvedStreams`: the streams a command was resolved against. Must not know kernels, copies or futures.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

from ..arguments import shown, whole_of
from ..core.device import DeviceState
from ..core.stream import Stream, as_stream
from ..errors import ClosedError, DevicePoisoned, SeveralErrors, UsageError, WrongThreadError
from ..memory.resource import DeviceMemoryResource
from .hostmem import HostPool
from .lane import Lane
from .makers import operand_of
from .operands import Declared, Place
from .progress import Failures
from .uses import Uses

_LANES = 64  # lanes of streams that are not ours; beyond it idle ones go


class _OwnStream:
    """A stream that a runtime made: the owner of its handle."""

    __slots__ = ("__weakref__", "_state", "device", "ptr")

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self.device = state.device
        self.ptr = state.driver.stream_create(state.device)

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        ptr = getattr(self, "ptr", 0)
        if ptr and not _ending():
            self._state.retire.forget(_Destroy(self._state, ptr))


class _Destroy:
    """Destroys a stream. The collector runs finalisers in any order, so memory that is still to be freed on the stream
    may be in the queue behind: it goes first.
    """

    __slots__ = ("_ptr", "_state", "_waited")

    def __init__(self, state: DeviceState, ptr: int) -> None:
        self._state = state
        self._ptr = ptr
        self._waited = False

    def __call__(self) -> None:
        if not self._waited:
            self._waited = True
            self._state.retire.push((), self)
            return
        self._state.driver.stream_destroy(self._ptr)


class Lanes:
    """All lanes of one runtime. Lanes keep their streams alive, so idle ones of other people's streams go in time."""

    def __init__(
        self, state: DeviceState, place: Place, resource: DeviceMemoryResource, max_streams: int
    ) -> None:
        self._state = state
        self._place = place
        self.resource = resource
        self.host = HostPool(state)
        self.failures = Failures()
        self.max_streams = max_streams
        self._own: dict[int, Stream] = {}
        self._lanes: dict[int, Lane] = {}  # by the stream's id, oldest first
        self._total = state.driver.memory_info(state.device).total
        self._lock = threading.Lock()
        self._closed = False

    def lane(self, stream: object = None) -> Lane:
        """The lane of anything that :func:`~cuglue.as_stream` takes.

        Raises:
            StreamMisuse: no stream, or one of another device.
            WrongThreadError: the per-thread default stream of another thread.
        """
        record = self._place.current() if stream is None else self._record(stream)
        found = self._lanes.get(record.id)
        return found if found is not None else self._add(record)

    def _record(self, stream: object) -> Stream:
        if type(stream) is Stream and stream.state is self._state:
            record = stream
        else:
            record = as_stream(stream, device=self._place.device, driver=self._place.driver)
        if record.thread is not None:
            check_thread(record)
        return record

    def _add(self, stream: Stream) -> Lane:
        if len(self._lanes) >= _LANES + len(self._own):
            self._drop_idle()
        with self._lock:
            lane = self._lanes.get(stream.id)
            if lane is None:
                lane = Lane(stream, self._place, self.resource, self.host, self._total, self.failures)
                # Of a closed runtime it belongs to whoever asks: a graph, or a thread that was on the way.
                if not self._closed:
                    self._lanes[stream.id] = lane
            return lane

    def _drop_idle(self) -> None:
        """Forget lanes that hold nothing and are not ours. What another thread queues on one yet outlives it."""
        ours = set(self._own.values())
        for key, lane in list(self._lanes.items()):
            if lane.stream not in ours and lane.let_go():
                self._lanes.pop(key, None)

    def own(self, index: int) -> Stream:
        """One of the runtime's own streams: ``index`` modulo their number. Made at first use."""
        slot = whole_of("stream of a runtime", index) % self.max_streams
        with self._lock:
            if self._closed:
                raise ClosedError("stream of a runtime", got="a use", expected="an open runtime")
            if slot not in self._own:
                made = _OwnStream(self._state)
                self._own[slot] = as_stream(made, device=self._place.device, driver=self._place.driver)
            return self._own[slot]

    def all(self) -> list[Lane]:
        """Every lane whose stream is alive."""
        return list(self._lanes.values())

    def resolve(self, stream: object, declared: Sequence[Declared] = ()) -> ResolvedStreams:
        """Order ``stream`` behind whoever owns or uses what is declared, and count the command.

        Ordering: only enqueues: one event and one wait per stream that is not waited for yet.

        Raises:
            UsageError: something declared cannot be an operand here.
            CaptureError: a wait would cross a capture; neither stream was touched.
        """
        current = self.lane(stream)
        uses = Uses()
        for declaration in declared:
            if not isinstance(declaration, Declared):
                raise UsageError(
                    "use of a command", got=shown(declaration)[:80], expected="In(x), Out(x) or InOut(x)"
                )
            array = declaration.array
            uses.add(array, operand_of(array, self._place), declaration.access)
        with self._state.ordering:
            uses.prepare(current.stream)
            current.cursor += 1
            return ResolvedStreams(self, current, tuple(declared), uses, current.cursor)

    def close(self) -> None:
        """Let everything go. Blocks the host until it may go; a device that is lost is not waited for.

        Whoever got a lane before may use it to the end: it goes with the last one, and leaves what it holds to the
        retire queue.
        """
        for lane in self.all():
            unless_lost(lane.finish)  # reads too: once their futures are dropped, nobody holds their bytes
            lane.slab.close()
            unless_lost(lane.drops.drain)
        with self._lock:
            self._closed = True
            self._lanes.clear()
            self._own.clear()
        unless_lost(lambda: self._state.retire.drain(block=True))
        unless_lost(self.host.close)


def check_thread(stream: Stream) -> None:
    """Refuse the per-thread default stream of another thread: its handle means another stream here.

    Raises:
        WrongThreadError: it is one.
    """
    if stream.thread is not None and not stream.nameable():
        raise WrongThreadError(
            repr(stream),
            got="the per-thread default stream of another thread",
            expected="a stream that means the same on every thread",
            hint="Use runtime.stream(n)",
        )


def unless_lost(action: Callable[[], object]) -> None:
    """Do ``action``; that the device is lost is no failure of it."""
    try:
        action()
    except DevicePoisoned:
        pass
    except SeveralErrors as several:
        if not all(isinstance(error, DevicePoisoned) for error in several.errors):
            raise


class ResolvedStreams:
    """The streams that one command was resolved against.

    Attributes:
        current: the lane of the stream the command is issued on.
        declared, uses: what the command works on; it takes the uses.
        cursor: of the current stream, after this resolution.
    """

    __slots__ = ("_lanes", "current", "cursor", "declared", "uses")

    def __init__(
        self, lanes: Lanes, current: Lane, declared: tuple[Declared, ...], uses: Uses, cursor: int
    ) -> None:
        self._lanes = lanes
        self.current = current
        self.declared = declared
        self.uses = uses
        self.cursor = cursor

    def refuse_recording(self, what: str) -> None:
        """Raise CaptureError if any stream of the runtime records a graph."""
        for lane in self._lanes.all():
            if lane.window is not None:
                lane.stream.refuse_capture(what)

    def lane(self, stream: object) -> Lane:
        """The lane of another stream of the same runtime."""
        return self._lanes.lane(stream)
