"""What a command does with memory: get some, name it, ask about it, give back what nothing needs.

Owns these calls of :class:`~cuglue.command.command.Command`. Must not know kernels or how a command lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from traceback import clear_frames
from typing import Any, NamedTuple

from ..errors import CaptureError
from ..lifecycle import CaptureState
from ..memory.pool.layouts import MemoryAllocationMode, MemoryConfiguration, PoolLayout
from ..memory.pool.usage import MemoryReport, MemoryUsage
from .buffers import Buffer, bind_storage
from .hostbytes import readable_bytes
from .hostmem import HostBuffer
from .lane import Lane
from .lanes import ResolvedStreams
from .makers import operand_of
from .progress import Report
from .writes import fill


class DeviceResource(NamedTuple):
    """Where a buffer lies: address and bytes. Keeps the memory alive."""

    ptr: int
    size: int
    owner: object


class MemoryCalls:
    """The memory half of a command."""

    _streams: ResolvedStreams

    def _lane(self) -> Lane:
        """The current lane, if the command may still be used, and here."""
        raise NotImplementedError

    def resource(self, buffer: Any) -> DeviceResource:
        """Where a buffer (or a part of one) lies, whatever stream it was made on.

        Raises:
            StorageHandleNotFound: it has no memory, or that was freed.
            ArgumentError: (a ValueError) a buffer of another runtime.
        """
        operand = operand_of(buffer, self._lane().place)
        owner = buffer.storage if isinstance(buffer, Buffer) else buffer
        return DeviceResource(operand.ptr, operand.nbytes, owner)

    def reserve(self, nbytes: int) -> Buffer:
        """Allocate ``nbytes`` bytes on this stream, to be bound to a buffer or used as one.

        Ordering: only enqueues; where memory is short, frees what it can and tries once more, which may block.

        Raises:
            BufferTooBig: no device of this kind could hold it; not retried.
            CaptureError: the stream captures a graph.
            ResourceError: there is no memory.
        """
        return self._lane().reserve(nbytes)

    empty = reserve

    def bind(self, reserved: Buffer, new: Buffer) -> None:
        """Give the memory of ``reserved`` to ``new``, a buffer without memory. ``reserved`` names nothing afterwards.

        Raises:
            StorageHandleNotFound: ``reserved`` has no memory.
            ArgumentError: (a ValueError) ``new`` has some, or does not match.
        """
        self._lane()
        bind_storage(reserved, new)

    def memory_cleanup(self) -> None:
        """Free everything that nothing needs any more: host bytes of finished copies, idle pinned memory, dead buffers.

        Buffers that are in use are not touched.

        Ordering: blocks the host until the work of every known stream is done.

        Raises:
            CaptureError: a stream of this runtime records a graph; nothing was touched.
        """
        lane = self._lane()
        self._streams.refuse_recording("clean up memory")
        lane.cleanup()

    def flush_drops(self) -> None:
        """Let go host bytes that the device is known to be done with. While the stream records, nothing moves.

        Ordering: blocks the host for the work before the previous flush at most; does nothing if nothing is held.
        """
        lane = self._lane()
        if lane.window is None and not lane.stream.capturing:
            lane.drops.flush()

    def reserve_cpu(self, nbytes: int) -> HostBuffer:
        """Host memory of exactly ``nbytes`` bytes, contents undefined: pinned where that can be had, else ordinary.

        Ordering: may block in the driver while more is pinned.
        """
        return self._lane().take_host(nbytes)

    def create_with_data(self, data: Any, progress: Report | None = None) -> Buffer:
        """A new buffer that holds a copy of ``data``: bytes, an array, a CPU tensor, or what numpy.asarray takes.

        Args:
            data: the bytes.
            progress: as of :meth:`write_to_gpu`.

        Ordering: only enqueues. ``data`` may be changed at once, unless it is pinned.

        Raises:
            ResourceError: no memory.
            UsageError: not host bytes.
        """
        return create(self._lane(), data, progress)

    # --- pools ------------------------------------------------------------------------------------------------------
    def memory_usage(self) -> MemoryUsage:
        """The device memory of this stream: buffers, bytes in them, padding, and bytes reserved for them."""
        lane = self._lane()
        return lane.usage() if lane.pools is None else lane.pools.usage()

    def memory_report(self) -> MemoryReport:
        """The pools of this stream one by one, with their peaks.

        Raises:
            UnsupportedError: the runtime has no pools: make it with ``memory=``.
        """
        return self._lane().need_pools().report()

    def allocation_mode(self, mode: MemoryAllocationMode) -> None:
        """Open a window in which buffers come from the persistent pool (PERSISTENT), or close one (AUTO). They nest.

        AUTO where no window is open does nothing but a RuntimeWarning. :meth:`persistent` closes its own window.
        While the stream records a graph, the change waits for the end.

        Raises:
            UnsupportedError: the runtime has no pools.
        """
        self._lane().need_pools().allocation_mode(mode)

    @contextmanager
    def persistent(self) -> Iterator[None]:
        """Buffers made in the ``with`` block come from the persistent pool.

        Raises:
            UnsupportedError: the runtime has no pools.
        """
        with self._lane().need_pools().persistent():
            yield

    def install_memory_pools(
        self, config: MemoryConfiguration | Sequence[PoolLayout], props: object = None
    ) -> None:
        """Exchange the pools of this stream. Streams that are used later get the new ones, even if this is refused.

        Args:
            config: the new pools.
            props: taken for the sake of other systems' calls; the device says itself what it has.

        Ordering: blocks the host until the work of every known stream is done.

        Raises:
            LayoutError: (a ValueError) no such pools; nothing has changed.
            CaptureError: a stream of the runtime prepares or records a graph; nothing has changed.
            PoolsInUse: buffers of the old pools are alive. The old pools stay, but gave back their free pages.
            UnsupportedError: the runtime has no pools.
        """
        lane = self._lane()
        lane.need_pools()
        config = MemoryConfiguration.of(config)
        self._streams.refuse_recording("exchange memory pools")
        if lane.capture_state is not CaptureState.NONE:
            raise CaptureError(f"{lane.stream!r} prepares a capture", got="an exchange of its memory pools")
        lane.cleanup()
        lane.install(config)


def create(lane: Lane, data: Any, progress: Report | None = None) -> Buffer:
    """A new buffer with a copy of ``data``; nothing is kept if that fails."""
    source = readable_bytes(data)
    buffer = lane.reserve(source.nbytes)
    try:
        fill(lane, buffer, source, progress)
    except BaseException as error:
        clear_frames(error.__traceback__)  # where it failed the memory is still held
        buffer.close()
        raise
    return buffer
