"""Public functions that the fault sweep does not go through, each with the reason why nothing is lost there."""

from __future__ import annotations

LEFT_OUT: dict[str, tuple[str, ...]] = {
    "answers from what is known; no driver call, or one that only asks": (
        "Adaptor.block_at", "Adaptor.budget_snapshot", "Adaptor.live_blocks", "AllocationRecord.as_dict",
        "AsyncCudaResource.pending_per_stream", "DebugGuardResource.block_at", "DebugGuardResource.live_blocks",
        "DeviceMemoryResource.budget_snapshot", "DeviceMemoryResource.supports_block_use_tracking", "Event.query",
        "Fence.reached", "Future.done", "GlOps.here", "GlobalDeviceBudget.budget_snapshot", "InMemorySink.snapshot",
        "LayeredResource.block_at", "LayeredResource.live_blocks", "MapUsers.cai_stream",
        "MapUsers.check_exportable", "MapUsers.check_live", "MemoryCalls.memory_report", "MemoryCalls.memory_usage",
        "MemoryCalls.resource", "MemoryUsage.combine", "PinnedHostResource.pending_per_stream",
        "PoolArrays.block_at", "PoolArrays.block_in", "PoolFigures.budget_snapshot", "PoolFigures.free_spans",
        "PoolFigures.live_blocks", "PoolFigures.pending_per_stream", "PoolFigures.usage", "PoolResource.span_for",
        "Runtime.buffer", "SourceResource.block_at", "SourceResource.free_spans", "SourceResource.live_blocks",
        "SourceResource.pending_per_stream", "StatisticsResource.statistics", "Stream.query",
        "StreamMemory.free_pieces", "StreamMemory.live_spans", "StreamMemory.report", "StreamMemory.usage",
        "StreamPool.resolve", "TrackingResource.diff", "TrackingResource.live", "TrackingResource.snapshot",
        "TracksUses.pending_use_event_count", "current", "is_cuda_available", "runtime_path",
    ),
    "changes our own records only; no driver call": (
        "Adaptor.cancel_block_use", "BlockLife.advance", "CudaClientParts.mark_transferred",
        "CudaClientParts.retain", "DebugGuardResource.cancel_block_use", "DeviceMemoryResource.cancel_block_use",
        "InMemorySink.clear", "LaunchRecorder.read", "LaunchRecorder.read_write", "MapUsers.note_cai_reader",
        "MapUsers.note_consumer", "MemoryCalls.allocation_mode", "MemoryCalls.bind", "Profile.invalidate",
        "StatisticsResource.reset", "StatisticsResource.scope", "Stream.unknown", "Tensor.record_write",
        "TrackingResource.annotate", "TracksUses.cancel_block_use", "use_driver",
    ),
    "notes what a finaliser found; of a closed pool it gives pages back as close() does, which is swept": (
        "StreamMemory.abandon",
    ),
    "not on the simulated device, whose exports are host memory; it goes through Stream.wait_for, which is swept": (
        "MapUsers.order_consumer",
    ),
    "makes a view or a value; no driver call": (
        "Buffer.array", "Buffer.part", "Buffer.trust", "CudaClientParts.as_ctypes", "CudaClientParts.from_ctypes",
        "Exclusive.normalized", "Exporter.view", "Persistent.normalized", "Sliced.normalized",
    ),
    "what a subclass overrides; the overriding functions are swept": (
        "CudaGlOps.map", "CudaGlOps.unmap", "CudaGlOps.unregister", "DeviceMemoryResource.allocate",
        "DeviceMemoryResource.close", "DeviceMemoryResource.deallocate", "DeviceMemoryResource.finish_block_use",
        "DeviceMemoryResource.prepare_block_use", "DeviceMemoryResource.reap_pending",
        "DeviceMemoryResource.record_block_use",
    ),
    "calls OpenGL and no driver; tests/graphics/test_glops.py, test_glcontext.py, test_external_gl.py": (
        "GlContext.hand_over", "GlContext.make_current", "GlContext.release", "GlOps.call", "GlOps.close",
        "GlOps.inline", "GlOps.post", "GlOps.pumped", "GlOps.worker", "gl_buffer", "headless",
    ),
    "needs CuPy or PyTorch; tests/memory/test_fault_sweep.py and tests/exchange sweep what it goes through": (
        "DeviceMemoryResource.as_cupy_allocator", "Exporter.cupy", "Exporter.torch", "PerDevice.as_cupy_allocator",
        "PoolArrays.take_back",
    ),
    "chooses one that is swept": ("register", "runtime", "PerDevice.close"),
    "asks the driver for one call and hands its error on": (
        "CudaClientParts.release", "ExpandableCudaResource.ending", "ExpandableCudaResource.export_fds",
    ),
    "runs on a thread of the library, which tests/command/test_futures.py lets fail": ("Future.add_done_callback",),
    "for whoever could not leave a map; swept by what uses it: CudaHandle.read, write, Tensor.map": (
        "CudaMap.leave_later",
    ),
    "writes to a file and calls no driver; tests/memory/test_logging.py lets it fail": (
        "_FileSink.close", "_FileSink.emit", "_FileSink.flush",
    ),
}  # fmt: skip
