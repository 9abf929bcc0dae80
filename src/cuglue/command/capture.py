"""Captures: work recorded once as a graph.

Owns the order of a capture's steps on a stream (contracts C31-C40) and :class:`Capture`. Must not know how work is
enqueued or what it uses: the :mod:`window` remembers that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import TracebackType
from typing import Self, TypeVar, cast

from ..driver.protocol import LEGACY_STREAM
from ..errors import CaptureError, CuglueError, DriverError
from ..lifecycle import CAPTURE, CaptureState, step
from . import recording
from .graph import Graph
from .lane import Lane
from .lanes import Lanes
from .taint import Failure, claim
from .window import Primed, Window

T = TypeVar("T")


def _one_at_a_time(step: Callable[[Capture], T]) -> Callable[[Capture], T]:
    """A step of a capture, beside which no other thread makes one on the stream, of this capture or another."""

    @wraps(step)
    def alone(self: Capture) -> T:
        with self._lane.stepping:
            return step(self)

    return alone


class Capture:
    """One capture of a stream. Made by ``runtime.capture()``::

        with runtime.capture(stream) as capture:
            with capture.warmup():
                step()          # runs
            step()              # is recorded
        capture.graph.replay()

    The warm-up is optional: it lets recorded work use temporary buffers, whose memory the graph then keeps.

    Work of another stream cannot be recorded, nor can syncs, reads and maps. A body that raises leaves no graph, and
    what the recorded work would have written (``Out``, ``InOut``) counts as unwritten, for nothing of it ran: write it
    again, or say that its bytes are right with ``Buffer.trust()``.

    One that is dropped between :meth:`prepare` and :meth:`end` keeps its stream. ``runtime.capture(stream).end()`` ends
    it: that raises CaptureError, and the stream can be captured again.
    """

    def __init__(self, lanes: Lanes, lane: Lane) -> None:
        self._lanes = lanes
        self._lane = lane
        self._primed: Primed | None = None
        self._graph: Graph | None = None

    def __repr__(self) -> str:
        return f"Capture(stream={self._lane.stream.id}, {self._state.value})"

    @property
    def _state(self) -> CaptureState:
        return self._lane.capture_state

    @property
    def graph(self) -> Graph:
        """The graph, once the capture has ended well.

        Raises:
            CaptureError: it has not ended, or not well.
        """
        if self._graph is None:
            raise CaptureError(
                repr(self), got="no graph", expected="a capture that has ended without a failure"
            )
        return self._graph

    # --- in steps -----------------------------------------------------------------------------------------------
    @_one_at_a_time
    def prepare(self) -> None:
        """First step: from now on work runs for real, and the memory it allocates and drops is kept for the recording.

        Raises:
            CaptureError: the stream has a capture already.
        """
        lane = self._lane
        if lane.stream.handle in (0, LEGACY_STREAM):
            raise CaptureError(
                repr(self),
                got="the legacy default stream, which cannot capture",
                expected="another stream",
                hint="Use runtime.stream(0), or work under `with cupy.cuda.Stream(non_blocking=True)`",
            )
        if lane.capture_owner is None:
            lane.refuse_other_capture("prepare a capture")
        state = step(CAPTURE, self._state, "prepare", repr(self))
        lane.capture_state, lane.capture_owner = state, self
        self._primed = lane.warmup = Primed(lane.release)
        self._graph = None

    @_one_at_a_time
    def begin(self) -> None:
        """Second step: from now on work on the stream is recorded, not run.

        Ordering: blocks the host until host bytes of earlier work are let go.

        Raises:
            CaptureError: not prepared, or by somebody else; nothing changes.
            DriverError: the driver refused. The stream is as before :meth:`prepare`, which can be repeated.
        """
        lane = self._lane
        self._check_owner("begin")
        state = step(CAPTURE, self._state, "begin", repr(self))
        assert self._primed is not None
        try:
            lane.drops.drain()
            lane.stream.state.retire.run_forgotten()
            recording.begin(lane.stream)
            lane.window = Window(lane.stream, self._primed)
            lane.capture_state, lane.warmup = state, None
        except BaseException:
            self._drop()
            raise

    @_one_at_a_time
    def end(self) -> Graph:
        """Last step: the graph of what was recorded.

        Raises:
            CaptureError: nothing is recorded, by this capture; or something failed while it was, which is the cause;
                or the graph would allocate memory. The stream records no longer.
            DriverError: the driver made no graph.
        """
        lane = self._lane
        if lane.capture_state is not CaptureState.RECORDING:
            if lane.capture_state is CaptureState.PREPARED:
                cast(Capture, lane.capture_owner)._reset("end")
            raise CaptureError(
                repr(self),
                got="end",
                expected="a capture that is recording",
                hint="Call prepare() and begin() first",
            )
        window = lane.window
        assert window is not None
        if lane.capture_owner is not self:
            owner = cast(Capture, lane.capture_owner)
            owner._discard(window, "abandon")
            because = f"; before that: {window.failure}" if window.failure is not None else ""
            raise CaptureError(
                repr(self),
                got=f"the end of somebody else's recording, which is abandoned{because}",
                expected=f"its own, begun by {owner!r}",
            ) from window.failure
        if window.failure is not None:
            self._discard(window, "end")
            raise CaptureError(
                f"{self!r} has no graph",
                got=f"{type(window.failure).__name__}: {window.failure}",
                expected="recorded work without a failure",
            ) from window.failure
        return self._seal(window)

    def _seal(self, window: Window) -> Graph:
        lane, driver = self._lane, self._lane.stream.driver
        graph = executable = 0
        try:
            graph = recording.end(lane.stream)
            nodes = driver.graph_memory_nodes(graph)
            if nodes:
                raise CaptureError(
                    f"{self!r}",
                    got=f"{nodes} memory nodes in the graph",
                    expected="memory that stays where it is",
                )
            executable = driver.graph_instantiate(graph)
        except BaseException as error:
            claim(window.writes.values(), Failure(error))
            if not isinstance(error, CuglueError):  # an interrupt
                self._stop()
            raise
        finally:
            if graph:
                recording.destroy(lane.stream, graph)
            self._reset("end")
        try:
            driver.graph_upload(executable, lane.stream.handle)
        except DriverError:
            pass  # the first launch does it
        self._graph = Graph(self._lanes, lane, executable, window)
        return self._graph

    def _discard(self, window: Window, event: str) -> None:
        """End the driver's capture and throw it away: nothing of it ran, so what it would have written is claimed."""
        stream = self._lane.stream
        failure = window.failure or CaptureError(f"{self!r} was abandoned")
        claim(window.writes.values(), Failure(failure))
        try:
            recording.discard(stream)
        except CuglueError as error:
            failure.add_note(f"ending the driver's capture failed too: {error}")
        except BaseException:  # an interrupt
            self._stop()
            raise
        finally:
            self._reset(event)

    @_one_at_a_time
    def _drop(self) -> None:
        """Leave nothing of this capture: an interrupt, or a refusal, came between its steps."""
        lane = self._lane
        if lane.capture_owner is self and lane.window is not None:
            self._discard(lane.window, "end")
        elif lane.capture_owner is self:
            self._stop()
            self._reset("end")

    def _stop(self) -> None:
        """End the driver's capture, if it is under way still, without a graph; now or with the next drain."""
        stream = self._lane.stream
        try:
            recording.throw_away(stream)
        except CuglueError:
            stream.state.retire.forget(partial(recording.throw_away, stream))

    def _reset(self, event: str) -> None:
        lane = self._lane
        lane.capture_state = step(CAPTURE, lane.capture_state, event, repr(self))
        lane.capture_owner = lane.window = lane.warmup = None
        if self._primed is not None:
            self._primed.close()
            self._primed = None

    def _check_owner(self, what: str) -> None:
        if self._lane.capture_owner not in (None, self):
            raise CaptureError(
                repr(self),
                got=f"'{what}' of a capture that {self._lane.capture_owner!r} began",
                expected="its own",
            )

    # --- in `with` ----------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        try:
            self.prepare()
            self.begin()
        except CuglueError:
            raise  # a refusal changed nothing
        except BaseException:
            self._drop()
            raise
        return self

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """In ``with capture.warmup():`` work runs for real. Only before anything is recorded.

        Raises:
            CaptureError: something was recorded already.
        """
        self._prepare_again()
        try:
            yield
            self.begin()
        except BaseException:
            self._drop_empty()
            raise

    @_one_at_a_time
    def _prepare_again(self) -> None:
        """From a recording of nothing back to where :meth:`prepare` leads."""
        lane = self._lane
        self._check_owner("warmup")
        window = lane.window
        if window is None or window.operations or window.failure is not None:
            raise CaptureError(
                repr(self), got="warmup", expected="a recording in which nothing was recorded yet"
            )
        try:
            recording.discard(lane.stream)
            lane.window, lane.warmup = None, self._primed
            lane.capture_state = step(
                CAPTURE, step(CAPTURE, self._state, "end", repr(self)), "prepare", repr(self)
            )
        except BaseException:
            self._drop_empty()
            raise

    @_one_at_a_time
    def _drop_empty(self) -> None:
        if self._lane.capture_owner is self:
            self._lane.window = None  # nothing was recorded
            self._drop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        window = self._lane.window
        try:
            if error is None:
                self.end()
            elif self._lane.capture_owner is self:
                if window is not None:
                    window.doom(error)
                self._drop()
        except CuglueError:
            raise
        except BaseException:
            self._drop()
            raise
