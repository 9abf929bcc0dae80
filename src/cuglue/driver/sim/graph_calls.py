"""Driver calls for graphs: beginning and ending a capture, and running what it recorded.

Owns graphs and executables. Must not know what nodes do. A run is one operation of its stream: all its nodes carry the
clock of the launch, and what the nodes touch is judged anew at each launch. Order inside a graph was judged when it
was captured.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ..protocol import Access, CaptureMode
from . import codes
from .capture import Capture, Graph, GraphRun
from .hazards import Operation, call_site
from .memory_calls import MemoryCalls
from .queues import Handles, Mark, Queue, Record
from .ranges import linear
from .shadow import Use
from .state import Touch, driver_call


@dataclass(eq=False, slots=True)
class Executable:
    """An executable graph; ``last`` is its newest run, which the next one follows."""

    graph: Graph
    last: Record | None = None
    newest: Use | None = None


class GraphCalls(MemoryCalls):
    """Capture and graphs."""

    _graphs: Handles[Graph]
    _executables: Handles[Executable]

    @driver_call
    def capture_begin(self, stream: int, mode: CaptureMode) -> None:
        """Record work queued on ``stream`` from now on; the legacy stream cannot."""
        self._needs("graphs", "capture_begin")
        queue = self._queue(stream, "capture_begin")
        if queue.handle == 1:
            raise codes.refused(
                codes.CAPTURE_UNSUPPORTED, "capture_begin", "the legacy stream cannot capture"
            )
        if queue.capture is not None:
            raise codes.refused(codes.ILLEGAL_STATE, "capture_begin", "the stream captures already")
        capture = Capture(queue, mode, threading.get_ident(), self._hazard)
        capture.include(queue)
        self._captures.append(capture)

    @driver_call
    def capture_end(self, stream: int) -> int:
        """End the capture that began on ``stream``; the streams that joined it must have been joined back."""
        queue = self._queue(stream, "capture_end")
        capture = queue.capture
        if capture is None:
            raise codes.refused(codes.ILLEGAL_STATE, "capture_end", "the stream does not capture")
        if capture.origin is not queue:
            raise self._refuse_capture(
                capture, codes.CAPTURE_UNMATCHED, "capture_end", "the capture began on another stream"
            )
        graph = self._leave_capture(capture)
        if capture.mode is not CaptureMode.RELAXED and capture.thread != threading.get_ident():
            self._drop_graph(graph)
            raise codes.refused(
                codes.CAPTURE_WRONG_THREAD, "capture_end", "the capture began on another thread"
            )
        if capture.invalid:
            self._drop_graph(graph)
            raise codes.refused(
                codes.CAPTURE_INVALIDATED, "capture_end", "a forbidden call ended the capture"
            )
        if not capture.joined():
            self._drop_graph(graph)
            raise codes.refused(
                codes.CAPTURE_UNJOINED, "capture_end", "work on another stream was not joined back"
            )
        return self._graphs.add(graph)

    @driver_call
    def graph_memory_nodes(self, graph: int) -> int:
        """Number of allocation and free nodes."""
        return sum(node.memory for node in self._graph(graph, "graph_memory_nodes").nodes)

    @driver_call
    def graph_instantiate(self, graph: int) -> int:
        """Make the executable graph; it outlives the graph."""
        found = self._graph(graph, "graph_instantiate")
        self._unsafe_in_capture("graph_instantiate")
        found.holders += 1
        return self._executables.add(Executable(found))

    @driver_call
    def graph_upload(self, executable: int, stream: int) -> None:
        """Nothing to prepare here; refuses what a launch refuses."""
        queue = self._queue(stream, "graph_upload")
        self._no_capture(queue, "graph_upload")
        self._executable(executable, "graph_upload")

    @driver_call
    def graph_launch(self, executable: int, stream: int) -> None:
        """Queue one run. Runs of one executable follow each other, on whatever streams."""
        queue = self._queue(stream, "graph_launch")
        found = self._executable(executable, "graph_launch")
        graph = found.graph
        touches = [
            (Touch(allocation, use.range, use.access), node.operation)
            for node in graph.nodes
            for allocation, use in node.uses
            if allocation.live or allocation not in graph.owned
        ]
        run = GraphRun(graph, self._graph_random)
        if queue.capture is not None:
            self._submit(queue, "graph_launch", run, [touch for touch, _ in touches])
            return
        operation = self._operation("graph_launch", queue)
        if found.last is not None:
            self._wait_for(queue, found.last, "graph_launch", operation.site)
        number = self._next(queue, operation.site)
        self._push(queue, operation, run, self._judge(queue, number, touches))
        found.last = Record((Mark(queue),), dict(queue.clock))
        found.newest = Use(linear(0, 0), Access.READ, queue.party, number, operation)

    @driver_call
    def graph_destroy(self, graph: int) -> None:
        """Destroy a graph; its executables stay."""
        found = self._graph(graph, "graph_destroy")
        self._graphs.pop(graph)
        self._drop_graph(found)

    @driver_call
    def graph_exec_destroy(self, executable: int) -> None:
        """Destroy an executable graph; a run that the host has not waited for is a hazard."""
        found = self._executable(executable, "graph_exec_destroy")
        if found.newest is not None and not found.newest.known_to(self._host):
            operation = Operation("graph_exec_destroy", None, call_site())
            self._note("object destroyed while in use", 0, 0, found.newest.operation, operation)
        self._executables.pop(executable)
        self._drop_graph(found.graph)

    # --- shared ---------------------------------------------------------------------------------------------------
    def _leave_capture(self, capture: Capture) -> Graph:
        capture.leave()
        self._captures.remove(capture)
        return Graph(capture.origin.device, tuple(capture.nodes), tuple(capture.owned))

    def _lose_capture(self, capture: Capture, queue: Queue) -> None:
        if capture.origin is queue:
            self._drop_graph(self._leave_capture(capture))
        else:
            capture.invalid = True

    def _graph(self, handle: int, call: str) -> Graph:
        found = self._graphs.get(handle)
        if found is None:
            raise codes.refused(codes.INVALID_RESOURCE_HANDLE, call, "graph", got=f"{handle:#x}")
        self._device(found.device, call)
        return found

    def _executable(self, handle: int, call: str) -> Executable:
        found = self._executables.get(handle)
        if found is None:
            raise codes.refused(codes.INVALID_RESOURCE_HANDLE, call, "executable graph", got=f"{handle:#x}")
        self._device(found.graph.device, call)
        return found

    def _drop_graph(self, graph: Graph) -> None:
        """Give up one hold; the last one frees what the capture allocated."""
        graph.holders -= 1
        if graph.holders:
            return
        for allocation in graph.owned:
            if allocation.live:
                self._end(allocation, self._operation("graph_destroy"))
            self._discharge(self._devices[graph.device], allocation)
