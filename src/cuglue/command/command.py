"""One command: a unit of work on one stream, resolved once against everything it was declared to use.

Owns the life of a command and what may be asked of it. Must not know how arguments are bound, copies made or memory
found: :mod:`launch`, :mod:`copies` and :mod:`lanes` do that.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from types import TracebackType
from typing import Any, Self

from ..core.stream import Stream
from ..errors import ArgumentError, ClosedError, UsageError, WrongThreadError
from . import reads, short, writes
from .descriptors import CopyDescriptor
from .futures import Future
from .hostmem import HostBuffer
from .kernels import KernelContext
from .lane import Lane
from .lanes import ResolvedStreams
from .launch import launch
from .memory_calls import MemoryCalls
from .operands import Declared
from .perform import Skipped
from .progress import Report
from .taint import Failure, Journal, claim
from .uses import Uses


class Command(MemoryCalls):
    """A unit of work. Made by ``runtime.command(...)``; use it in ``with``, once, on the thread that made it.

    An exception that leaves the ``with`` block leaves what was declared to be written, and was not yet, as unwritten.

    Args:
        ctx: the compiled kernels of the device.
        streams: what it was resolved against.
        service: which runtime it belongs to; buffers of another one are refused.
        strict: refuse arrays that nobody tracks.
    """

    def __init__(
        self, ctx: KernelContext, streams: ResolvedStreams, service: int, *, strict: bool = False
    ) -> None:
        place = streams.current.place
        if place.service != service or place.device != ctx.device or place.driver is not ctx.driver:
            raise ArgumentError(
                "command",
                got="streams, kernels and a service of different runtimes",
                expected="all of one runtime",
            )
        self._context = ctx
        self._streams = streams
        self._strict = strict
        self._thread = get_ident()  # 0 once it is closed
        self._entered = False
        self._declared = {id(d.array): d for d in streams.declared}
        self._journal = Journal(streams.uses.entries)
        streams.uses = Uses()  # each operation asks anew: memory that is closed meanwhile must not be kept

    def __repr__(self) -> str:
        state = f"cursor={self._streams.cursor}" if self._thread else "closed"
        return f"Command(stream={self._streams.current.stream.id}, {state})"

    # --- life -------------------------------------------------------------------------------------------------------
    def _lane(self) -> Lane:
        """The current lane, if this command may still be used, and here."""
        if self._thread == get_ident():
            return self._streams.current
        if not self._thread:
            raise ClosedError(repr(self), got="a use", expected="a command inside its with statement")
        raise WrongThreadError(
            repr(self),
            got=f"thread {get_ident()}",
            expected=f"thread {self._thread}, which made it",
            hint="Make one command per thread",
            owner=self._thread,
            caller=get_ident(),
        )

    def __enter__(self) -> Self:
        self._lane()
        if self._entered:
            raise UsageError(
                repr(self), got="a second with statement", expected="one", hint="Make a new command"
            )
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._thread:
            claim(self._journal.left, Failure(error))
        self.close()

    def close(self) -> None:
        """End the command; nothing can be asked of it afterwards. What was enqueued goes on."""
        if self._thread:
            self._thread = 0
            self._declared = {}
            self._journal = Journal(())

    # --- what it is -------------------------------------------------------------------------------------------------
    @property
    def stream(self) -> Stream:
        """The stream that the command is issued on; ``stream.handle`` is the driver's int."""
        return self._lane().stream

    @property
    def cursor(self) -> int:
        """How many commands were resolved on this stream, with this one."""
        self._lane()
        return self._streams.cursor

    # --- copies -----------------------------------------------------------------------------------------------------
    def read_async(
        self, descriptors: CopyDescriptor | Sequence[CopyDescriptor], progress: Report | None = None
    ) -> Future[HostBuffer] | Future[list[HostBuffer]]:
        """Copy to the host: see :func:`cuglue.command.reads.read_async`."""
        return reads.read_async(self._lane(), descriptors, progress)

    def write_to_gpu(self, descriptor: CopyDescriptor, data: Any, progress: Report | None = None) -> None:
        """Copy host bytes to the device: see :func:`cuglue.command.writes.write_to_gpu`."""
        lane = self._lane()
        if progress is not None or not short.send(lane, descriptor, data, self._journal):
            writes.write_to_gpu(lane, descriptor, data, self._journal, progress)

    def write_to_cpu(
        self, descriptor: CopyDescriptor, buffer: Any, stream: object = None, progress: Report | None = None
    ) -> None:
        """Copy device memory into ``buffer``: see :func:`cuglue.command.reads.write_to_cpu`.

        Args:
            descriptor: what is read.
            buffer: a writable C-contiguous buffer of the same size.
            stream: where to queue the copy; None: the command's stream.
            progress: ``progress(done_bytes, total_bytes)``, called as a large copy goes on and at its end.

        Ordering: only enqueues into pinned memory of the library; the bytes are there after a sync. Blocks the host for
            any other memory; the bytes are there when it returns. In a capture only enqueues; the bytes are there after
            a replay and a sync.
        """
        lane = self._lane()
        lane = lane if stream is None else self._streams.lane(stream)
        if progress is not None or not short.fetch(lane, descriptor, buffer):
            reads.write_to_cpu(lane, descriptor, buffer, progress)

    # --- work -------------------------------------------------------------------------------------------------------
    def kernel(self, kernel: Any, grid: Any, block: Any, *args: Any, shared: int = 0) -> Skipped | None:
        """Enqueue a kernel. Arguments declared to the command are given bare, others as In(x), Out(x) or InOut(x).

        What the command writes may be given bare to a ``const`` pointer as well: that kernel reads it.

        Args:
            kernel: a Kernel, ``cupy.RawKernel`` or function of a RawModule.
            grid, block: an int or up to three ints. A grid with a zero launches nothing.
            args: memory, and scalars as Python or NumPy numbers.
            shared: bytes of dynamic shared memory.

        Ordering: only enqueues. That the driver takes the launch says nothing about its execution: a fault in it is
            raised by the next wait.

        Returns:
            None; or why it was not run: it would have read bytes that were never written.

        Raises:
            LaunchError: the arguments do not fit the kernel, or the driver refused; nothing was enqueued.
            UsageError: memory that was not declared.
        """
        return launch(
            self._context,
            self._lane(),
            kernel,
            grid,
            block,
            args,
            shared=shared,
            strict=self._strict,
            declared=self._declaration,
            journal=self._journal,
        )

    def _declaration(self, argument: Any) -> Declared | None:
        return self._declared.get(id(argument))

    def sync(self) -> Future[None]:
        """A future that is done when everything enqueued on this stream so far is. It raises the fault this reveals.

        Ordering: only enqueues.

        Raises:
            CaptureError: the stream captures a graph.
        """
        return Future(self._lane().stream.record(), _nothing)

    def synchronize(self) -> None:
        """Block the host until everything enqueued on this stream so far is done; raises the fault this reveals."""
        self._lane().wait()


def _nothing() -> None:
    return None
