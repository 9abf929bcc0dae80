"""The runtime of one device: buffers, kernels and work, behind one object.

Owns what belongs together for one device (driver, memory resource, lanes, compiled kernels) and the shortcuts for work
that needs no command of its own. Must not know how anything is ordered.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

from ..arguments import shown, whole_of
from ..core.device import device_state
from ..core.stream import Stream
from ..driver.protocol import Driver
from ..driver.registry import current_driver, open_driver
from ..errors import UsageError
from ..layout import element
from ..lifecycle import Owned, OwnedState
from ..memory.block import DeviceBlock
from ..memory.direct import DirectCudaResource
from ..memory.layered import LayeredResource
from ..memory.pool.layouts import MemoryConfiguration, PoolLayout
from ..memory.pool.resource import PoolResource
from ..memory.resource import DeviceMemoryResource
from . import reads
from .buffers import Buffer
from .capture import Capture
from .command import Command
from .futures import Future
from .hostmem import HostBuffer
from .kernels import KernelContext
from .lanes import Lanes, unless_lost
from .launch import launch
from .makers import operand_of
from .memory_calls import create
from .operands import Declared, Place
from .perform import Skipped
from .profile import Profile
from .progress import Report

_services = itertools.count(1)
_OPEN = OwnedState.OPEN


class Runtime(Owned):
    """Work on one device: memory, kernels, streams.

    Args:
        device: ordinal.
        driver: ``"cuda"``, ``"sim"`` or a driver; None takes the current one.
        resource: where buffers come from; None makes a :class:`~cuglue.DirectCudaResource`, closed with the runtime.
        max_streams: how many streams of its own :meth:`stream` makes at most.
        memory: pools of each stream, over ``resource``; None takes each buffer straight from the resource.

    Ownership: close it, or use it in ``with``. Buffers outlive it safely.
    Threads: may share it, its buffers, streams, kernels and futures; a command belongs to the thread that made it, a
        capture or a profile to one at a time. Closing it beside others gives them ClosedError, or their work is done.
        Work of one stream runs in the order in which threads enqueue it.

    Raises:
        UsageError: no such device, or a resource of another one.
        UnsupportedError: CUDA is not here and nobody chose the simulated device.
    """

    def __init__(
        self,
        device: int = 0,
        *,
        driver: str | Driver | None = None,
        resource: DeviceMemoryResource | None = None,
        max_streams: int = 16,
        memory: MemoryConfiguration | Sequence[PoolLayout] | None = None,
    ) -> None:
        max_streams = whole_of("max_streams", max_streams, 1)
        device = whole_of("device", device, expected="an ordinal, an int of 0 or more")
        if not isinstance(resource, DeviceMemoryResource | None):
            raise UsageError("resource of a runtime", got=shown(resource), expected="a DeviceMemoryResource")
        self.driver = current_driver() if driver is None else open_driver(driver)
        self.device = device
        self._state = device_state(self.driver, device)
        if resource is not None and (resource.device != device or resource.driver is not self.driver):
            raise UsageError(
                "resource of a runtime",
                got=f"{resource!r} (device {resource.device}, {resource.driver.name} driver)",
                expected=f"device {device} of this {self.driver.name} driver",
            )
        self._own_resource = resource is None
        self.resource = resource if resource is not None else _OwnResource(device, driver=self.driver)
        self._pool = None if memory is None else _OwnPool(self.resource, layout=memory)
        self.resource = self._pool or self.resource
        self.service = next(_services)
        self._place = Place(self.driver, device, self.service)
        if isinstance(self.resource, LayeredResource):
            self._place.block_at = self.resource.block_at
        self._lanes = Lanes(self._state, self._place, self.resource, max_streams)
        self._context = KernelContext(self.driver, device)
        self._own()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"driver={self.driver.name}"
        return f"Runtime(device={self.device}, {state})"

    # --- memory -----------------------------------------------------------------------------------------------------
    def create(self, data: Any, stream: object = None, *, progress: Report | None = None) -> Buffer:
        """A new buffer that holds a copy of ``data``.

        Args:
            data: bytes, a NumPy array, a CPU tensor, or anything numpy.asarray takes.
            stream: anything :func:`~cuglue.as_stream` takes.
            progress: ``progress(done_bytes, total_bytes)``, called as a large copy goes on and at its end: on this
                thread, for pinned data on one of the library. What it raises is counted and logged.

        Ordering: only enqueues. ``data`` may be changed at once, unless it is pinned memory.

        Raises:
            ResourceError: no memory.
        """
        self._check_open()
        return create(self._lanes.lane(stream), data, progress)

    def empty(self, nbytes: int, stream: object = None) -> Buffer:
        """A new buffer of ``nbytes`` bytes, contents undefined.

        Ordering: only enqueues.

        Raises:
            BufferTooBig: more than the device has.
            ResourceError: no memory.
        """
        self._check_open()
        return self._lanes.lane(stream).reserve(nbytes)

    def buffer(self, nbytes: int) -> Buffer:
        """A buffer without memory, for ``Command.bind``."""
        self._check_open()
        return Buffer(self._place, whole_of("buffer", nbytes, expected="a size in bytes, 0 or more"))

    def read(
        self,
        buffer: Any,
        shape: Any = None,
        dtype: Any = "u1",
        stream: object = None,
        *,
        progress: Report | None = None,
    ) -> Future[HostBuffer]:
        """A future of the buffer's bytes on the host, as an array.

        Args:
            buffer: a Buffer, or a contiguous view, map or CuPy array.
            shape: extents in elements; None: one axis over everything.
            dtype: anything NumPy takes for a dtype; None: float64, as NumPy has it.
            stream: anything :func:`~cuglue.as_stream` takes.
            progress: ``progress(done_bytes, total_bytes)``, called on a thread of the library as a large copy goes on
                and at its end. What it raises is counted and logged.

        Ordering: only enqueues.

        Raises:
            LayoutError: it does not fit the buffer.
            CaptureError: the stream captures a graph.
        """
        if self._owned_state is not _OPEN:
            self._check_open()
        item, lane = element(dtype), self._lanes.lane(stream)
        if shape is None and progress is None and type(buffer) is Buffer:
            return reads.read_buffer(lane, buffer, item)
        if shape is None:
            whole = buffer if isinstance(buffer, Buffer) else operand_of(buffer, self._place)
            shape = whole.nbytes // item.itemsize
        future = reads.read_async(lane, Buffer.descriptor(buffer, shape, item), progress)
        return future  # type: ignore[return-value] # one descriptor, one buffer

    @property
    def progress_failures(self) -> int:
        """How many calls of ``progress`` functions raised. The transfers went on."""
        return self._lanes.failures.count

    # --- work -------------------------------------------------------------------------------------------------------
    def launch(
        self,
        kernel: Any,
        grid: Any,
        block: Any,
        *args: Any,
        stream: object = None,
        shared: int = 0,
        strict: bool = False,
    ) -> Skipped | None:
        """Enqueue one kernel, ordered after everything that its arguments wait for.

        Args:
            kernel: a Kernel, ``cupy.RawKernel`` or function of a RawModule.
            grid, block: an int or up to three ints. A grid with a zero launches nothing.
            args: memory as In(x), Out(x) or InOut(x); scalars as Python or NumPy numbers.
            stream: anything :func:`~cuglue.as_stream` takes.
            shared: bytes of dynamic shared memory.
            strict: refuse arrays that nobody tracks.

        Ordering: only enqueues. A fault in the kernel is raised by the next wait.

        Returns:
            None; or why it was not run: it would have read bytes that were never written, because the work that should
            have written them failed.

        Raises:
            LaunchError: the arguments do not fit the kernel, or the driver refused; nothing was enqueued.
            UsageError: undeclared, foreign or closed memory; a stream of another device.
        """
        if self._owned_state is not _OPEN:
            self._check_open()
        lane = self._lanes.lane(stream)
        return launch(self._context, lane, kernel, grid, block, args, shared=shared, strict=strict)

    def command(self, *uses: Declared, stream: object = None, strict: bool = False) -> Command:
        """A command: one resolution, many operations. Use it in ``with``.

        Args:
            uses: everything it works on, as In(x), Out(x) or InOut(x).
            stream: anything :func:`~cuglue.as_stream` takes.
            strict: refuse arrays that nobody tracks.

        Ordering: only enqueues: the stream waits for whoever uses what was declared.

        Raises:
            UsageError: something that is no operand here.
            CaptureError: a wait would cross a capture.
        """
        self._check_open()
        return Command(self._context, self._lanes.resolve(stream, uses), self.service, strict=strict)

    def capture(self, stream: object = None) -> Capture:
        """A capture of a stream: work recorded once, to be replayed as a graph. Use it in ``with``.

        Args:
            stream: anything :func:`~cuglue.as_stream` takes, but no default stream: the legacy one cannot capture, and
                ``with`` raises CaptureError.

        Ordering: queues nothing; its ``with`` blocks the host until host bytes of earlier work are let go.
        """
        self._check_open()
        return Capture(self._lanes, self._lanes.lane(stream))

    def profile(self, stream: object = None) -> Profile:
        """A profile of a stream: ``with runtime.profile() as p: ...``, then ``p.milliseconds``.

        Args:
            stream: anything :func:`~cuglue.as_stream` takes.

        Ordering: only enqueues; asking for the time blocks the host.
        """
        self._check_open()
        return Profile(self._lanes.lane(stream))

    def stream(self, index: int) -> Stream:
        """One of the runtime's own streams, non-blocking: ``index`` modulo ``max_streams``. Made at first use."""
        self._check_open()
        return self._lanes.own(index)

    def synchronize(self) -> None:
        """Block the host until everything queued on the device is done; raises the fault that this reveals.

        Raises:
            CaptureError: a stream captures a graph.
        """
        self._check_open()
        self._state.refuse_captures("wait for the device")
        self.driver.device_synchronize(self.device)

    # --- end --------------------------------------------------------------------------------------------------------
    def _close(self) -> None:
        """Wait for what this runtime queued, and let go what it keeps. Memory of live buffers stays until they go."""
        self._lanes.close()
        unless_lost(self._context.close)
        if self._own_resource and not self.resource.bytes_outstanding:
            self.resource.close()  # else it goes with the last buffer
        elif self._pool is not None:
            self._pool.trim()

    def _forgotten(self) -> None:
        """Dropped without close: the streams and buffers free themselves; the kernels stay with the driver."""


class _OwnResource(DirectCudaResource):
    """The resource of a runtime that was given none: it may die silently, for every block is some buffer's."""

    def _close(self) -> None:
        """Free nothing that is handed out: another thread may have got it meanwhile, and its buffer gives it back."""
        self.reap_pending()
        self._stop()

    def __del__(self) -> None:
        pass


class _OwnPool(PoolResource):
    """The pool of a runtime, likewise: what it keeps goes back with the last buffer."""

    def _give_blocks_back(self) -> list[DeviceBlock]:
        return []

    def _warn_of(self, blocks: list[DeviceBlock]) -> None:
        pass

    def __del__(self) -> None:
        if not self._ending() and getattr(self, "_life", None) is not None and not self.closed:
            self._forgotten()


_cached: dict[tuple[int, int], tuple[Driver, Runtime]] = {}
_cache_lock = threading.RLock()


def runtime(device: int = 0) -> Runtime:
    """The runtime of ``device`` on the current driver, made at first use and kept for the process.

    Raises:
        UsageError: no such device.
    """
    driver = current_driver()
    with _cache_lock:
        key = (id(driver), device)
        found = _cached.get(key)  # the driver is kept, so its id is not another one's
        if found is None or found[1].closed:
            found = _cached[key] = driver, Runtime(device, driver=driver)
        return found[1]
