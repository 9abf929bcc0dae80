"""What a runtime keeps beside one stream: memory, host bytes in flight, and the capture and profiles under way.

Owns :class:`Lane`. Must not know other streams, kernels or how copies are made.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary

from ..arguments import whole_of
from ..core.block import BlockLife
from ..core.stream import Stream
from ..driver.protocol import Access, CaptureStatus
from ..errors import BufferTooBig, ResourceError, UnsupportedError, UsageError
from ..lifecycle import CaptureState
from ..memory.pool.layouts import MemoryConfiguration
from ..memory.pool.resource import PoolResource
from ..memory.pool.stream_memory import StreamMemory
from ..memory.pool.usage import MemoryUsage
from ..memory.resource import DeviceMemoryResource
from .buffers import Buffer
from .hostmem import HostBuffer, HostPool
from .operands import Place
from .planned import PlannedBlock, give_back
from .progress import Failures
from .slab import Slab
from .staging import DropQueue
from .storage import Storage, unallocated
from .window import Primed, Window

_NO_CAPTURE = CaptureStatus.NONE


class Lane:
    """One stream of a runtime.

    Attributes:
        stream: the record of the stream.
        named: whether the handle means this stream for good, and on every thread.
        cursor: commands resolved on it so far.
        drops: host bytes and other things that work queued here still needs.
        slab: host memory that small transfers go through.
        failures: what progress callbacks raised.
        release: gives back a block that was allocated here.
        window: the capture under way, from the beginning of its recording to the end; else None.
        warmup: memory of the capture that is being prepared; else None.
        capture_state, capture_owner: how far a capture of this stream is, and whose it is.
        stepping: held while a capture makes a step: each is of several of these fields.
        profiles: open ones; work that fails makes them invalid.
        pools: the configured memory of this stream; None if the runtime has no pools.
    """

    __slots__ = (
        "__weakref__",
        "_live",
        "capture_owner",
        "capture_state",
        "cursor",
        "drops",
        "failures",
        "host",
        "named",
        "place",
        "pools",
        "profiles",
        "release",
        "resource",
        "slab",
        "stepping",
        "stream",
        "total",
        "warmup",
        "window",
    )

    def __init__(
        self,
        stream: Stream,
        place: Place,
        resource: DeviceMemoryResource,
        host: HostPool,
        total: int,
        failures: Failures,
    ) -> None:
        self.stream = stream
        self.named = stream.thread is None and stream.owner is not None
        self.place = place
        self.resource = resource
        self.release = partial(give_back, resource)  # nothing of the lane: buffers outlive it
        self.host = host
        self.total = total  # bytes of the device
        self.cursor = 0
        self.drops = DropQueue(stream)
        self.slab = Slab(stream, host, self.drops)
        self.failures = failures
        self.profiles: list[Any] = []
        self._live: WeakValueDictionary[int, Storage] = WeakValueDictionary()  # by id
        self.pools = _pools_of(resource, stream)
        self.capture_state = CaptureState.NONE
        self.capture_owner: object = None
        self.stepping = threading.RLock()
        self.window: Window | None = None
        self.warmup: Primed | None = None

    def reserve(self, nbytes: int, tag: str = "buffer") -> Buffer:
        """Allocate on this stream.

        Ordering: only enqueues; where memory is short, frees what can be freed and tries once more, which may block.

        Raises:
            BufferTooBig: no device of this kind could hold it; nothing was tried.
            CaptureError: the stream captures a graph.
            ResourceError: still no memory.
        """
        nbytes = whole_of("buffer", nbytes, expected="a size in bytes, 0 or more")
        if nbytes == 0:
            return self._buffer(unallocated(self.stream), 0)
        state = self.stream.state
        if nbytes > self.total:
            raise BufferTooBig(
                f"device {state.device}",
                got=f"{nbytes} bytes asked for",
                expected=f"at most {self.total}",
                requested=nbytes,
            )
        if self.window is not None:
            return self._buffer(self.window.reserve(nbytes), nbytes)
        self.stream.refuse_capture("allocate memory")
        state.retire.run_forgotten()
        try:
            block = self._allocate(nbytes, tag)
        except BufferTooBig:
            raise
        except ResourceError as first:
            self.cleanup()
            try:
                block = self._allocate(nbytes, tag)
            except ResourceError as second:
                second.add_note(f"the first attempt failed too: {first}")
                raise
        try:
            if (
                not block.write_seq
            ):  # one stamp for every resource: the memory is there once the allocation is
                block.finish(self.stream, Access.WRITE)
            storage = Storage(block, self.release if self.warmup is None else self.warmup.take_back)
        except BaseException:  # interrupted
            self.release(block)
            raise
        return self._buffer(storage, nbytes)

    def _allocate(self, nbytes: int, tag: str) -> BlockLife:
        pools = self.pools
        if pools is not None and pools.configuration.dry_run:
            return PlannedBlock(pools.reserve(nbytes), self.stream)
        return self.resource.allocate(nbytes, self.stream, tag)

    def _buffer(self, storage: Storage, nbytes: int) -> Buffer:
        self._live[id(storage)] = storage
        buffer = Buffer(self.place, nbytes)
        buffer._cell.storage = storage
        return buffer

    def cleanup(self) -> None:
        """Free everything on this device that nothing needs any more. Blocks the host for the streams we know.

        Raises:
            CaptureError: the stream captures a graph.
        """
        self.stream.refuse_capture("clean up memory")
        state = self.stream.state
        self.slab.close()
        self.drops.drain()
        for reference in list(state.streams.values()):
            stream = reference()
            if stream is not None and not stream.capturing:
                stream.synchronize()
        state.retire.drain(block=True)
        if self.pools is not None:
            self.pools.sweep()
        self.resource.reap_pending()
        self.host.trim()

    def usage(self) -> MemoryUsage:
        """Memory of this stream's buffers, where there are no pools to ask: nothing is padded or kept."""
        found = [reference() for reference in self._live.valuerefs()]  # a list: others allocate meanwhile
        sizes = [storage.block.size for storage in found if storage is not None]
        return MemoryUsage(len(sizes), sum(sizes), 0, sum(sizes))

    def need_pools(self) -> StreamMemory:
        """The configured pools.

        Raises:
            UnsupportedError: there are none.
        """
        if self.pools is None:
            raise UnsupportedError(
                f"memory pools on {self.stream!r}",
                got=f"memory straight from {self.resource!r}",
                hint="Make the runtime with memory=MemoryConfiguration(...)",
                reason="no_pools",
            )
        return self.pools

    def install(self, configuration: MemoryConfiguration) -> None:
        """Exchange the pools of this stream, and those of streams that come later."""
        self.need_pools()
        cast(PoolResource, self.resource).install(configuration, self.stream)

    def let_go(self) -> bool:
        """Let go what the device is done with, without waiting for it; whether nothing is lost if the lane goes now."""
        if self.profiles or self.capture_state is not CaptureState.NONE or self.stream.capturing:
            return False
        self.slab.close()
        self.drops.collect()
        return not self.drops

    def take_host(self, nbytes: int) -> HostBuffer:
        """Host memory for a copy of this stream: what earlier copies used and are done with, if there is some."""
        return self.host.take(nbytes, grow=self.window is None, reclaim=self.reclaim)

    def reclaim(self) -> None:
        """Let go the host memory that earlier copies are done with, as far as this may be asked."""
        if self.window is None and not self.stream.capturing:
            self.drops.collect()

    def refuse_other_capture(self, what: str) -> None:
        """Raise CaptureError if the stream captures a graph that is not ours: nothing could be kept for its replays."""
        stream = self.stream
        if self.window is None and (
            not self.named or stream.driver.capture_status(stream.handle) is not _NO_CAPTURE
        ):
            stream.state.retire.run_forgotten()  # a capture of ours whose end was refused is among it
            stream.refuse_capture(what)

    def hold(self, thing: object, nbytes: int) -> None:
        """Keep host bytes until the work queued here is done; in a capture, as long as the graph lives."""
        if self.window is not None:
            self.window.hold(thing)
        else:
            self.drops.push(thing, nbytes)

    def finish(self) -> None:
        """Block the host until all work queued here is done; not for a capture, whose work does not run."""
        if not self.stream.state.capturing:
            self.stream.synchronize()

    def wait(self) -> None:
        """Block the host until all that was queued here so far is done; raises the fault that this reveals."""
        if self.named or self.stream.nameable():
            self.stream.synchronize()
        else:
            self.stream.record().synchronize()  # not for the whole device, which stands for a stream of a bare number

    def settle(self) -> None:
        """After an operation: let go what is due. Blocks only for work of two flushes ago."""
        if self.drops.due and self.window is None and not self.stream.capturing:
            self.drops.flush()
            self.host.settle()


def _pools_of(resource: DeviceMemoryResource, stream: Stream) -> StreamMemory | None:
    """The configured pools of a stream, if the resource has such."""
    try:
        return resource.stream_memory(stream) if isinstance(resource, PoolResource) else None
    except UsageError:
        return None  # a pool without a layout
