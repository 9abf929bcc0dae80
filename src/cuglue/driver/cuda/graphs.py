"""Stream capture and graphs."""

from __future__ import annotations

from typing import Any

from ..protocol import CaptureMode
from .calls import CUDARuntimeError, call, call_runtime, cu, failure_of, nonzero, runtime
from .contexts import Contexts

_MODES = {
    CaptureMode.GLOBAL: runtime.streamCaptureModeGlobal,
    CaptureMode.THREAD_LOCAL: runtime.streamCaptureModeThreadLocal,
    CaptureMode.RELAXED: runtime.streamCaptureModeRelaxed,
}


class Graphs(Contexts):
    """Capture and graphs of the CUDA driver."""

    def capture_begin(self, stream: int, mode: CaptureMode) -> None:
        """Inherited."""
        call_runtime(runtime.streamBeginCapture, stream, _MODES[mode])

    def capture_end(self, stream: int) -> int:
        """Inherited."""
        return nonzero(call_runtime(runtime.streamEndCapture, stream), "cudaStreamEndCapture")

    def graph_memory_nodes(self, graph: int) -> int:
        """Inherited. Child graphs are counted too."""
        with self._on(runtime.getDevice()):
            return _memory_nodes(graph)

    def graph_instantiate(self, graph: int) -> int:
        """Inherited."""
        return nonzero(call_runtime(runtime.graphInstantiate, graph), "cudaGraphInstantiate")

    def graph_upload(self, executable: int, stream: int) -> None:
        """Inherited."""
        call_runtime(runtime.graphUpload, executable, stream)

    def graph_launch(self, executable: int, stream: int) -> None:
        """Inherited."""
        try:
            runtime.graphLaunch(executable, stream)
        except CUDARuntimeError as error:
            raise failure_of(error, "cudaGraphLaunch") from error

    def graph_destroy(self, graph: int) -> None:
        """Inherited."""
        call_runtime(runtime.graphDestroy, graph)

    def graph_exec_destroy(self, executable: int) -> None:
        """Inherited."""
        call_runtime(runtime.graphExecDestroy, executable)


def _memory_nodes(graph: Any) -> int:
    kinds = cu.CUgraphNodeType
    memory = (kinds.CU_GRAPH_NODE_TYPE_MEM_ALLOC, kinds.CU_GRAPH_NODE_TYPE_MEM_FREE)
    _, size = call(cu.cuGraphGetNodes, graph, 0)
    nodes, _ = call(cu.cuGraphGetNodes, graph, size) if size else ((), 0)
    found = 0
    for node in nodes:
        kind = call(cu.cuGraphNodeGetType, node)
        if kind in memory:
            found += 1
        elif kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            found += _memory_nodes(call(cu.cuGraphChildGraphNodeGetGraph, node))
    return found
