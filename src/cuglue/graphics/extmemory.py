"""Allocations of another API or process, imported; and ranges of them as backings.

Owns who uses an import and in what order it is given back: first its ranges and arrays, then itself. Must not know how
a handle or descriptor was got (:mod:`external`), nor what a map exports.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol

from ..arguments import shown, whole
from ..core.block import Block
from ..core.device import DeviceState
from ..core.stream import Stream, as_stream
from ..driver.protocol import Access
from ..errors import LayoutError, UsageError
from ..exchange.tokens import call_site
from ..layout import Layout
from ..lifecycle import Owned, OwnedState
from .backings import Backing, Part, Share
from .fences import Writes

if TYPE_CHECKING:
    from .mapping import CudaMap


class Source(Protocol):
    """An allocation as its kind of import reaches it."""

    def map(self, offset: int, nbytes: int) -> int:
        """Address of a range."""

    def unmap(self, ptr: int) -> None:
        """Give the address back."""

    def destroy(self) -> None:
        """Give the allocation back. Called again if it failed."""


class Imported:
    """Imported with the driver's external memory calls."""

    def __init__(self, state: DeviceState, handle: int) -> None:
        self._state = state
        self.handle = handle

    def map(self, offset: int, nbytes: int) -> int:
        """Inherited."""
        return self._state.driver.external_buffer(self.handle, offset, nbytes)

    def unmap(self, ptr: int) -> None:
        """Inherited."""
        self._state.driver.external_buffer_free(ptr, self._state.device)

    def destroy(self) -> None:
        """Inherited."""
        self._state.driver.external_memory_destroy(self.handle)


class Placed:
    """Virtual memory, whole at one address from the start."""

    def __init__(self, state: DeviceState, ptr: int, nbytes: int) -> None:
        self._state = state
        self._ptr = ptr
        self._nbytes = nbytes
        self._mapped = True

    def map(self, offset: int, nbytes: int) -> int:
        """Inherited."""
        return self._ptr + offset

    def unmap(self, ptr: int) -> None:
        """Inherited. The address goes with the allocation."""

    def destroy(self) -> None:
        """Inherited."""
        driver = self._state.driver
        if self._mapped:
            driver.vmm_unmap(self._ptr, self._nbytes)
            self._mapped = False
        driver.vmm_free(self._ptr, self._nbytes)


class ExternalMemory(Owned):
    """An allocation that another API or process made. Made by :func:`cuglue.external.import_fd` and its kin.

    Give it to :meth:`CudaHandle.from_external`. Several handles may use it; it is given back with the last of them
    that is closed. Close it yourself where no handle was made, or to allow no further ones.

    Attributes:
        kind: how it was imported: "opaque", "dma_buf", "vmm", or the name of a Windows handle class.
        size: bytes of the whole allocation.
    """

    def __init__(self, state: DeviceState, source: Source, size: int, kind: str) -> None:
        """Made by the import functions; owns ``source`` from now on."""
        self.state = state
        self.size = size
        self.kind = kind
        self.source = source
        self._users = 0
        self._given_back = False
        self._lock = threading.RLock()
        self._own()
        self._created_at = "{}:{}".format(*call_site())

    @property
    def device(self) -> int:
        """Ordinal of the device it was imported for."""
        return self.state.device

    def check_range(self, offset: object, size: object) -> tuple[int, int]:
        """``(offset, size)`` of a range inside the allocation; size None: all that follows ``offset``.

        Raises:
            LayoutError: it does not lie inside.
        """
        start = whole(offset)
        length = self.size - (start or 0) if size is None else whole(size)
        if start is None or length is None:
            raise LayoutError(
                f"a range of {self!r}", got=f"offset {offset!r}, size {size!r}", expected="ints of bytes"
            )
        if start < 0 or length < 0 or start + length > self.size:
            raise LayoutError(
                f"a range of {self!r}",
                got=f"{length} bytes at offset {start}",
                expected=f"a range within its {self.size} bytes",
            )
        return start, length

    def add_user(self) -> None:
        """One more range or array of it is in use.

        Raises:
            ClosedError: it was given back, or closed.
        """
        with self._lock:
            self._check_open()
            self._users += 1

    def drop_user(self) -> None:
        """One less; with the last one the allocation is given back. Can be called again if it failed."""
        with self._lock:
            if self._users == 1:
                self._give_back()
                self._owned_state = OwnedState.CLOSED
            self._users -= 1

    def cancel_user(self) -> None:
        """Take back :meth:`add_user`: the use never began, and the allocation is as it was.

        If it was closed meanwhile it is given back; this can be called again if that failed.
        """
        with self._lock:
            if self._users == 1 and self.closed:
                self._give_back()
            self._users -= 1

    def _give_back(self) -> None:
        if not self._given_back:
            self.source.destroy()
            self._given_back = True

    def _close(self) -> None:
        with self._lock:
            if not self._users:
                self._give_back()

    def _forgotten(self) -> None:
        self.state.retire.forget(self._give_back)

    def __del__(self) -> None:
        if not getattr(self, "_users", 0):  # else its handles answer for it
            super().__del__()

    def __repr__(self) -> str:
        return f"ExternalMemory(kind={self.kind!r}, size={self.size}, device={self.device})"


class Range:
    """A range of an allocation at its address, until it is given back. ``ptr`` is 0 for an empty one."""

    __slots__ = ("_memory", "_rest", "ptr")

    def __init__(self, memory: ExternalMemory, offset: int, nbytes: int) -> None:
        memory.add_user()
        try:
            self.ptr = memory.source.map(offset, nbytes) if nbytes else 0
        except BaseException:
            memory.cancel_user()
            raise
        self._memory = memory
        self._rest = [self._unmap, memory.drop_user]

    def _unmap(self) -> None:
        if self.ptr:
            self._memory.source.unmap(self.ptr)

    def withdraw(self) -> None:
        """Give back the address alone, once; the allocation is as it was before. Goes on where it failed before."""
        self._rest[-1:] = [self._memory.cancel_user] if self._rest else []
        self.give_back()

    def give_back(self) -> None:
        """Give back the address, then the share of the allocation, each once. Goes on where it failed before."""
        while self._rest:
            self._rest[0]()
            del self._rest[0]


class Lease:
    """What maps and exports of a range hold: while one lives, the address does.

    The last reference may go on any thread: the retire queue gives the range back, after everything known to use it.
    """

    __slots__ = ("__weakref__", "_block", "_range", "readers")

    def __init__(self, range_: Range, block: Block) -> None:
        self._range = range_
        self._block = block
        self.readers: list[weakref.ref[CudaMap]] = []

    def exported(self) -> bool:
        """Whether an array of the memory may be alive."""
        maps = [m for m in (reader() for reader in self.readers) if m is not None]
        return any(m.cai_read or m.ledger.live() for m in maps)

    def end(self) -> None:
        """Give the range back once its uses are done. Only appends to a queue."""
        self._block.stream.state.retire.push(tuple(self._block.uses()), self._range.give_back)

    def __del__(self) -> None:
        if not hasattr(self, "_block"):
            return  # its making was interrupted
        state, range_, block = self._block.stream.state, self._range, self._block
        state.retire.forget(lambda: state.retire.push(tuple(block.uses()), range_.give_back))


class ExternalBuffer(Backing):
    """A range of an imported allocation: one address for the handle's whole life, the same in each map.

    Args:
        memory: the allocation.
        offset, size: the range in bytes, checked to lie inside.
        writes: what the owner records of its writes.
    """

    kind = "ExternalMem"
    survives = True
    writes: Writes

    def __init__(self, memory: ExternalMemory, offset: int, size: int, writes: Writes) -> None:
        self.state = memory.state
        self.size = size
        self.layout = Layout.of((size,), "u1")
        self.writes = writes
        range_ = Range(memory, offset, size)
        home = as_stream(0, device=self.state.device, driver=self.state.driver)
        self._block = Block(range_.ptr, size, home, 0, "external memory")
        self._lease: Lease | None = Lease(range_, self._block)
        self._what = f"{memory!r} at offset {offset}"

    def open(self, part: Part, stream: Stream, load: bool) -> Share:
        """Inherited. Nothing is mapped: the address is there."""
        assert self._lease is not None, "open after the end"
        self.writes.order(stream, self._block, self)
        self._block.prepare(stream, Access.READ_WRITE)
        readers = self._lease.readers
        readers[:] = [reader for reader in readers if reader() is not None]
        return Share(part, self._block, self.layout, keep=self._lease, readers=readers)

    def shut(self, share: Share, stream: Stream) -> None:
        """Inherited. Nothing to give back; the next map waits for what this one's consumers queued."""
        share.block.taint = None  # the owner may write it from now on, and nobody would tell us

    def destroy(self) -> None:
        """Inherited. Exports that are alive keep the address, and with it the allocation."""
        lease, self._lease = self._lease, None
        if lease is not None and not lease.exported():
            lease.end()

    def __str__(self) -> str:
        return self._what


def check_external(memory: object) -> ExternalMemory:
    """``memory``, if it is an :class:`ExternalMemory`.

    Raises:
        UsageError: something else, such as a file descriptor or an address.
    """
    if not isinstance(memory, ExternalMemory):
        raise UsageError(
            "external memory",
            got=shown(memory),
            expected="an ExternalMemory",
            hint="Import it first: cuglue.external.import_fd",
        )
    return memory
