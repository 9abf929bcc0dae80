"""Captures: work recorded once as a graph, and replayed without Python.

Owns the order of a capture's steps on a stream (contracts C31-C40), :class:`Capture` and :class:`Graph`. Must not know
how work is enqueued or what it uses: the :mod:`window` remembers that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from ..core.stream import Stream
from ..driver.protocol import LEGACY_STREAM, CaptureMode
from ..errors import CaptureError, ClosedError, CuglueError, DriverError
from ..lifecycle import CAPTURE, CaptureState, Owned, step
from .lane import Lane
from .lanes import Lanes
from .perform import Skipped, perform
from .taint import Failure, claim
from .uses import Uses
from .window import Primed, Window


class Capture:
    """One capture of a stream. Made by ``runtime.capture()``::

        with runtime.capture(stream) as capture:
            with capture.warmup():
                step()          # runs
            step()              # is recorded
        capture.graph.replay()

    The warm-up is optional: it lets recorded work use temporary buffers, whose memory the graph then keeps.

    Work of another stream cannot be recorded, nor can syncs, reads and maps. A body that raises leaves no graph.
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
            lane.stream.refuse_capture("prepare a capture")
        state = step(CAPTURE, self._state, "prepare", repr(self))
        lane.capture_state, lane.capture_owner = state, self
        self._primed = lane.warmup = Primed(lane.resource.deallocate)
        self._graph = None

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
            lane.stream.driver.capture_begin(lane.stream.handle, CaptureMode.RELAXED)
        except BaseException:
            self._reset("begin_refused")
            raise
        lane.capture_state, lane.warmup = state, None
        lane.window = Window(lane.stream, self._primed)

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
            graph = driver.capture_end(lane.stream.handle)
            nodes = driver.graph_memory_nodes(graph)
            if nodes:
                raise CaptureError(
                    f"{self!r}",
                    got=f"{nodes} memory nodes in the graph",
                    expected="memory that stays where it is",
                )
            executable = driver.graph_instantiate(graph)
        except CuglueError as error:
            claim(window.writes.values(), Failure(error))
            raise
        finally:
            if graph:
                self._destroy(graph)
            self._reset("end")
        try:
            driver.graph_upload(executable, lane.stream.handle)
        except DriverError:
            pass  # the first launch does it
        self._graph = Graph(self._lanes, lane, executable, window)
        return self._graph

    def _discard(self, window: Window, event: str) -> None:
        """End the driver's capture and throw it away: nothing of it ran, so what it would have written is claimed."""
        driver = self._lane.stream.driver
        failure = window.failure or CaptureError(f"{self!r} was abandoned")
        claim(window.writes.values(), Failure(failure))
        try:
            self._destroy(driver.capture_end(self._lane.stream.handle))
        except CuglueError as error:
            failure.add_note(f"ending the driver's capture failed too: {error}")
        finally:
            self._reset(event)

    def _destroy(self, graph: int) -> None:
        """Give the driver's graph back, now or with the next drain: what was recorded does not depend on it."""
        state = self._lane.stream.state
        try:
            state.driver.graph_destroy(graph)
        except CuglueError:
            state.retire.forget(partial(state.driver.graph_destroy, graph))

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
        self.prepare()
        self.begin()
        return self

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """In ``with capture.warmup():`` work runs for real. Only before anything is recorded.

        Raises:
            CaptureError: something was recorded already.
        """
        lane = self._lane
        self._check_owner("warmup")
        window = lane.window
        if window is None or window.operations or window.failure is not None:
            raise CaptureError(
                repr(self), got="warmup", expected="a recording in which nothing was recorded yet"
            )
        driver = lane.stream.driver
        self._destroy(driver.capture_end(lane.stream.handle))
        lane.window, lane.warmup = None, self._primed
        lane.capture_state = step(
            CAPTURE, step(CAPTURE, self._state, "end", repr(self)), "prepare", repr(self)
        )
        try:
            yield
        except BaseException:
            self._reset("end")
            raise
        self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
            return
        window = self._lane.window
        if self._lane.capture_owner is self and window is not None:
            window.doom(error)
            self._discard(window, "end")


class Graph(Owned):
    """Recorded work that can be replayed.

    Ownership: keeps all memory that the work touches. Close it, or use it in ``with``.
    """

    def __init__(self, lanes: Lanes, lane: Lane, executable: int, window: Window) -> None:
        self._lanes = lanes
        self._lane = lane
        self._executable = executable
        self._window = window
        self._uses: Uses = window.uses
        self._inputs = tuple(window.reads.values())
        self.operations = window.operations
        self._runs: dict[Stream, int] = {}  # newest replay per stream
        self._own()

    def __repr__(self) -> str:
        return f"Graph({self.operations} operations{', closed' if self.closed else ''})"

    def replay(self, stream: object = None) -> Skipped | None:
        """Run the recorded work once more, on what its inputs hold then.

        Args:
            stream: anything :func:`~cuglue.as_stream` takes; None: the stream it was captured on.

        Ordering: only enqueues, after everything that the recorded work waits for. Runs no Python per operation.

        Raises:
            ClosedError: the graph was closed.
            DriverError: refused; what it writes counts as never written.
        """
        if not self._executable:
            raise ClosedError(repr(self), got="a replay", expected="an open graph")
        lane: Lane = self._lane
        enqueue: Callable[[], None] = self._launch_at_home
        if stream is not None:
            lane = self._lanes.lane(stream)
            enqueue = partial(lane.stream.driver.graph_launch, self._executable, lane.stream.handle)
        if lane.window is not None:
            lane.stream.refuse_capture("replay a graph")
        skipped = perform(lane, self._uses, enqueue, "graph", inputs=self._inputs)
        self._runs[lane.stream] = lane.stream.seq
        return skipped

    def _launch_at_home(self) -> None:
        stream = self._lane.stream
        stream.driver.graph_launch(self._executable, stream.handle)

    def _close(self) -> None:
        """Give the graph back once its replays are done; the memory goes with it."""
        state = self._lane.stream.state
        executable, self._executable = self._executable, 0
        if executable:  # else the queue has it already, and only draining that failed
            state.retire.push(list(self._runs.items()), _Destroy(state.driver, executable, self._window))
            self._window = Window(self._lane.stream, Primed(self._lane.resource.deallocate))
            self._uses, self._inputs = Uses(), ()
        state.retire.drain()

    def _forgotten(self) -> None:
        state = self._lane.stream.state
        runs, destroy = list(self._runs.items()), _Destroy(state.driver, self._executable, self._window)
        state.retire.forget(lambda: state.retire.push(runs, destroy))


class _Destroy:
    """Destroys the driver's graph; holds what it touches until then."""

    __slots__ = ("_driver", "_executable", "_window")

    def __init__(self, driver: Any, executable: int, window: Window) -> None:
        self._driver = driver
        self._executable = executable
        self._window: Window | None = window

    def __call__(self) -> None:
        self._driver.graph_exec_destroy(self._executable)
        self._window = None
