"""Graphs: recorded work, replayed without Python.

Owns :class:`Graph`, and the short way of a replay that nothing came between. Must not know how work is recorded.
"""

from __future__ import annotations

from typing import Any

from ..core.stream import Stream
from ..driver.protocol import Access
from ..errors import ClosedError, CuglueError, DriverError
from ..lifecycle import Owned
from .lane import Lane
from .lanes import Lanes, check_thread
from .perform import Skipped, perform, refused
from .uses import Uses
from .window import Primed, Window

_READ = Access.READ


class Graph(Owned):
    """Recorded work that can be replayed.

    Ownership: keeps all memory that the work touches. Close it, or use it in ``with``.
    """

    def __init__(self, lanes: Lanes, lane: Lane, executable: int, window: Window) -> None:
        self._lanes = lanes
        self._lane = lane
        self._home = lane.stream
        self._executable = executable
        alone = self._home.thread is None and all(partner is self._home for partner in window.uses.partners)
        self._direct = executable if alone else 0  # partners are waited for each time
        self._window = window
        self._uses: Uses = window.uses
        used = self._uses.blocks.items()
        self._read = tuple(block for block, access in used if access == _READ)
        self._written = tuple(block for block, access in used if access != _READ)
        self._inputs = tuple(window.reads.values())
        self.operations = window.operations
        ordering: Any = self._home.state.ordering
        # A with statement would cost half of a replay.
        self._lock, self._unlock = ordering.acquire, ordering.release
        self._locked = ordering._is_owned  # as threading.Condition asks
        self._last = 0  # newest replay on its own stream
        self._runs: dict[Stream, int] = {}  # and on others
        self._destroy = _Destroy(lane.stream.driver, executable, window)
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
            WrongThreadError: the per-thread default stream of another thread.
            DriverError: refused; what it writes counts as never written.
        """
        home = self._home
        if stream is not None or self._lane.window is not None:
            return self._replay(stream)
        skipped = None
        try:
            self._lock()
            # While the newest thing here is this graph and nobody was told of it, there is nothing to wait for, and one
            # more replay goes under the same number: whoever asks from now on learns of both.
            if home.asked < self._last == home.seq or self._unhindered():
                try:
                    home.driver.graph_launch(self._direct, home.handle)
                    # Or somebody asked just now: then it is a new thing.
                    if not home.asked < self._last == home.seq:
                        self._stamp()
                except BaseException as error:
                    if not isinstance(error, CuglueError):
                        self._stamp()  # interrupted: the driver may have it
                    refused(self._lane, self._uses, error, "graph")
                    raise
            else:
                skipped = self._replay(stream)
        except BaseException:
            if self._locked():  # else an interrupt ended the wait for the lock
                self._unlock()
            raise
        self._unlock()
        return skipped

    def _unhindered(self) -> bool:
        """Whether all memory was used here last and is as it should be, so that there is nothing to wait for."""
        home = self._home
        for block in self._read:
            if block.write_stream is not home or block.taint is not None:
                return False
        for block in self._written:
            if block.write_stream is not home or block.taint is not None:
                return False
            if block.reads and [*block.reads] != [home]:
                return False
        return bool(self._direct)

    def _stamp(self) -> None:
        """Note a replay as the newest use of all its memory."""
        self._last = seq = self._home.submit()
        for block in self._written:
            block.reads, block.write_seq = None, seq
        for block in self._read:
            block.finish(self._home, _READ, seq)

    def _replay(self, stream: object) -> Skipped | None:
        """Replay as every other operation is performed."""
        lane = self._lane if stream is None else self._lanes.lane(stream)
        check_thread(lane.stream)
        with self._home.state.ordering:  # nobody closes the graph meanwhile
            if not self._executable:
                raise ClosedError(repr(self), got="a replay", expected="an open graph")
            if lane.window is not None:
                lane.stream.refuse_capture("replay a graph")
            launch, handle = lane.stream.driver.graph_launch, lane.stream.handle
            try:
                skipped = perform(
                    lane, self._uses, "graph", launch, self._executable, handle, inputs=self._inputs
                )
            finally:  # and no call in it
                self._runs[lane.stream] = lane.stream.seq
        return skipped

    def _close(self) -> None:
        """Give the graph back once its replays are done; the memory goes with it."""
        state = self._home.state
        with state.ordering:  # a replay on another thread is over, or does not begin
            if self._executable:  # else the queue has it already, and only draining that failed
                state.retire.push(self._last_runs(), self._destroy)
                self._executable = self._direct = self._last = 0
                self._window = Window(self._home, Primed(self._lane.release))
                self._uses, self._inputs = Uses(), ()
                self._read = self._written = ()
        state.retire.drain()

    def _last_runs(self) -> list[tuple[Stream, int]]:
        return [*self._runs.items(), (self._home, self._last)]

    def _forgotten(self) -> None:
        state = self._home.state
        runs, destroy = self._last_runs(), self._destroy
        state.retire.forget(lambda: state.retire.push(runs, destroy))


class _Destroy:
    """Destroys the driver's graph, once; holds what it touches until then."""

    __slots__ = ("_driver", "_executable", "_window")

    def __init__(self, driver: Any, executable: int, window: Window) -> None:
        self._driver = driver
        self._executable = executable
        self._window: Window | None = window

    def __call__(self) -> None:
        executable, self._executable = self._executable, 0
        try:
            if executable:  # else a close that was interrupted had queued it already
                self._driver.graph_exec_destroy(executable)
        except DriverError:
            self._executable = executable
            raise
        self._window = None
