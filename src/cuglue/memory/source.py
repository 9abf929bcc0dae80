"""The bottom of every stack of resources: what gets its memory from a driver.

Owns the checks, the table of live blocks, the second attempt when memory is short, and closing. Must not know which
driver calls allocate and free: subclasses do.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from ..arguments import shown, whole_of
from ..core import process
from ..core.block import BlockLife
from ..core.device import DeviceState, check_device, device_state
from ..core.stream import INVALID_HANDLE, Stream
from ..driver.protocol import LEGACY_STREAM, Driver
from ..driver.registry import driver_of
from ..errors import (
    CaptureError,
    ClosedError,
    CuglueError,
    DriverError,
    OutOfMemory,
    StreamMisuse,
    UsageError,
    raise_together,
)
from ..lifecycle import BlockState, Owned
from . import report
from .block import LARGEST, UnderBlock, give_back, handed_out
from .cupy_plug import cupy_error
from .desks import Desk
from .entries import Entries
from .layered import LayeredResource, keeps, living_resources
from .stream_pool import StreamPool
from .streams import prepare_refuge, refuge
from .table import BlockTable, gone, wrong_device

_LIVE = BlockState.LIVE


def _disown() -> None:
    """In a forked child: every resource belongs to the parent."""
    for resource in living_resources():
        if isinstance(resource, SourceResource):
            resource._ready = False
            for desk in resource._desks:
                desk.reset()


os.register_at_fork(after_in_child=_disown)


class SourceResource(Owned, LayeredResource):
    """A resource that allocates from a driver, block by block."""

    _ordered = True  # new memory is there after an operation of its stream; False: at once, for everybody
    _counts_pending = False  # memory that was given back counts until it is free

    def __init__(
        self,
        device: int = 0,
        device_ordinal: int | None = None,
        *,
        check: bool = True,
        stream_pool: StreamPool | None = None,
        driver: str | Driver | None = None,
    ) -> None:
        """Make the resource; calls no driver.

        Args:
            device: ordinal that the driver knows the device by.
            device_ordinal: ordinal that the resource and its blocks go by; the same unless ``check`` is False.
            check: refuse two different ordinals.
            stream_pool: what an int stands for where a stream is expected: an id of this pool. None: a handle.
            driver: where the memory comes from, or its name ("sim": a new simulated device); None: the current one.

        Raises:
            UsageError: no such device.
        """
        self._device = whole_of("device ordinal", device)
        self._ordinal = self._device if device_ordinal is None else whole_of("device ordinal", device_ordinal)
        self._driver = driver_of(driver)
        if self._device:  # the first one is there with any driver
            check_device(self._driver, self._device)
        if check and self._ordinal != self._device:
            given = f"{shown(device_ordinal)} for {self._device}"
            hint = "Pass check=False if it is a label only"
            raise UsageError("device ordinal", got=given, expected="the same", hint=hint)
        if stream_pool is not None and not isinstance(stream_pool, StreamPool):
            raise UsageError("stream_pool", got=shown(stream_pool), expected="a StreamPool or None")
        self._stream_pool = stream_pool
        self._table = BlockTable()
        self._arrays = Entries(self._table)
        self._desks: list[Desk] = []
        #: Nobody overrides how memory is taken and dropped: then it is done here, without a call.
        self._plain_calls = keeps(self, SourceResource, "_take", "_drop")
        self._ready = False  # one flag for all that keeps an allocation from going straight to the driver
        self._life = process.life
        self._known_state: DeviceState | None = None
        self._own(3)

    # --- what it is ---------------------------------------------------------------------------------------------
    @property
    def device(self) -> int:
        """Ordinal that the driver knows the device by."""
        return self._device

    @property
    def device_ordinal(self) -> int:
        """Inherited."""
        return self._ordinal

    @property
    def driver(self) -> Driver:
        """The driver whose memory this is."""
        return self._driver

    @property
    def _state(self) -> DeviceState:
        if self._known_state is None:
            self._known_state = device_state(self._driver, self._device)
        return self._known_state

    def live_blocks(self) -> list[BlockLife]:
        """Inherited."""
        self._arrays.ask_all()
        return list(self._table)

    def pending_per_stream(self) -> dict[int, int]:
        """Bytes given back and not known to be free yet, by the id of the stream they were freed on."""
        return {}

    def free_spans(self) -> tuple[int, int, int] | None:
        """Bytes kept free, the largest piece and the number of pieces; None where the driver does not tell."""
        return None

    def block_at(self, address: int) -> BlockLife | None:
        """Inherited."""
        return self._table.around(address) or self._arrays.around(address)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={self._device}, {self._driver.name})"

    @property
    def bytes_outstanding(self) -> int:
        """Inherited."""
        return self.live_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes handed out and not given back."""
        return self._table.nbytes + self._arrays.nbytes

    def _stream(self, stream: object) -> Stream:
        if self._stream_pool is None or not isinstance(stream, int):
            return super()._stream(stream)
        found = self._stream_pool.resolve(stream)
        if found is None:
            raise StreamMisuse("stream id", got=shown(stream), expected=f"an id of {self._stream_pool!r}")
        return found

    # --- allocate -----------------------------------------------------------------------------------------------
    def _take(self, nbytes: int, stream: Stream) -> int:
        """Address of new memory; one driver call. Where memory is not stream-ordered a subclass says which."""
        return self._driver.malloc_async(nbytes, stream.handle, self._device)

    def _drop(self, ptr: int, stream: Stream) -> None:
        """Free what :meth:`_take` gave; one driver call."""
        self._driver.free_async(ptr, stream.handle, self._device)

    def _allocate(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        if not self._ready or not 0 < nbytes <= LARGEST:
            self._get_ready(nbytes)
        if stream.handle > LEGACY_STREAM:
            if stream.capturing:
                raise self._in_capture(stream)
            prepare_refuge(stream)
        try:
            if self._plain_calls:
                ptr = self._driver.malloc_async(nbytes, stream.handle, self._device)
            else:
                ptr = self._take(nbytes, stream)
        except (OutOfMemory, DriverError) as error:
            if (again := self._take_again(nbytes, stream, error)) is None:
                raise
            ptr = again
        try:
            block = kind(ptr, nbytes, stream, stream.submit() if self._ordered else 0, tag)
            self._table.add(block)
        except BaseException as error:
            if not isinstance(error, DriverError):  # of an address that is live: it is not ours to free
                self._table.forget(ptr)
                self._drop(ptr, stream)
            raise
        return block

    def _in_capture(self, stream: Stream) -> CaptureError:
        return CaptureError(
            f"{self!r}",
            got=f"an allocation on {stream!r}, which captures a graph",
            expected="memory that was there before, and stays as long as the graph",
            hint="Allocate before the capture, or use PoolResource and its graph_memory()",
        )

    def _get_ready(self, nbytes: int) -> None:
        """Refuse what cannot be; else see to what has to be done before the next allocation."""
        self._check_process()
        if self.closed:
            raise ClosedError(repr(self), got="a call after close()", expected="an open resource")
        if nbytes == 0:
            raise DriverError(
                repr(self), got="0 bytes", expected="1 or more", code=1, name="cudaErrorInvalidValue"
            )
        if nbytes > LARGEST:
            raise cupy_error(self._explain(nbytes, []))
        self._ready = True

    def _check_process(self) -> None:
        if self._life is not process.life:
            raise process.forked_child(self)

    def _take_again(self, nbytes: int, stream: Stream, error: CuglueError) -> int | None:
        """A second attempt after the first one failed with ``error``; None where there is no sense in one."""
        if isinstance(error, OutOfMemory):
            tried = self._make_room(stream)
            try:
                return self._take(nbytes, stream)
            except OutOfMemory:
                raise cupy_error(self._explain(nbytes, tried)) from error
        if isinstance(error, DriverError) and error.code == INVALID_HANDLE:
            raise stream.unknown() from error
        return None

    def _make_room(self, stream: Stream) -> list[str]:
        """Give back whatever can be given back; what was tried. Holds no lock: the collector runs finalisers."""
        state = self._state
        tried = ["freed the memory of dead arrays", "collected garbage"]
        state.retire.run_forgotten()
        gc.collect()
        state.retire.run_forgotten()
        if state.capturing:
            return [*tried, "waited for nothing, because a stream captures"]
        self.reap_pending()
        tried.append("waited for pending frees")
        if state.capabilities.async_memory:
            self._driver.pool_trim(0, self._device)
            tried.append("trimmed the driver's pool")
        return tried

    def _explain(self, nbytes: int, tried: list[str]) -> OutOfMemory:
        found = report.explain(self, nbytes, tried)
        return OutOfMemory(
            f"{nbytes} bytes of device memory for {self!r}",
            got=str(found),
            hint="Free arrays, or trim the pools that cache memory",
            requested=nbytes,
            in_use=self.bytes_outstanding,
            report=found,
        )

    # --- deallocate ---------------------------------------------------------------------------------------------
    def _release(self, block: Any) -> Stream:
        """Free ``block`` after all its uses; the stream it was freed on. If that fails the block stays live."""
        if self._life is not process.life:
            self._check_process()
        if block.state is not _LIVE or not self._table.remove(block):
            raise self._not_live(block)
        try:
            stream: Stream = block.stream
            if (stream.owner is not None and stream.thread is None) or stream.nameable():
                if stream.handle > LEGACY_STREAM:
                    stream.refuse_capture("free memory")
                if block.reads is not None or block.write_stream is not stream:
                    with self._state.ordering:
                        block.join_uses(stream)
            else:  # gone, or of another thread: its handle must not be touched
                stream = refuge(self._state)
                stream.join_context()
            if self._plain_calls:
                self._driver.free_async(block.ptr, stream.handle, self._device)
            else:
                self._drop(block.ptr, stream)
        except BaseException:
            self._table.add(block)
            raise
        return stream

    def _not_live(self, block: Any) -> CuglueError:
        if block.device_ordinal not in (self._ordinal, self._device):
            return wrong_device(self, block.device_ordinal, "deallocate")
        return gone(block.ptr, block.generation)

    def reap_pending(self, *, block: bool = True) -> None:
        """Inherited. Takes the memory of dead arrays back."""
        self._check_process()
        self._state.retire.run_forgotten()

    # --- closing ------------------------------------------------------------------------------------------------
    def _close(self) -> None:
        """Free every block still live, then say which those were.

        Memory of living arrays stays until they die, memory below another layer until that gives it back.
        """
        if self._known_state is not None:
            self._known_state.retire.run_forgotten()  # the memory of arrays that are dead already
        live = list(self._table)
        held = handed_out(live)
        under = sum(isinstance(b, UnderBlock) for b in live)
        arrays = len(live) - len(held) - under + len(self._arrays)
        errors: list[BaseException] = []
        frees: list[Callable[[], None]] = [partial(give_back, block, self) for block in held]
        for step in (*frees, self.reap_pending):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - every block is tried; raised together
                errors.append(error)
        raise_together(f"closing {self!r}", errors)
        self._stop()
        if held or arrays or under:
            tags = ", ".join(sorted({b.tag for b in held})) or "none"
            layers = f" and {under} held by layers over it (freed when they let go)" if under else ""
            warnings.warn(
                f"{self!r} closed with {len(held)} blocks live (tags: {tags}; freed now) and "
                f"{arrays} in use by CuPy arrays (freed with them){layers}",
                ResourceWarning,
                stacklevel=4,
            )

    def _stop(self) -> None:
        """From here on every allocation looks first whether this is closed."""
        self._ready = False
        for desk in self._desks:
            desk.leave()

    def _forgotten(self) -> None:
        for block in self._table:
            self._state.retire.forget(partial(self._deallocate, block))

    def __del__(self) -> None:
        if self._ending() or not len(getattr(self, "_table", ())):
            return
        if self.closed and self._life is process.life:
            self._forgotten()  # what a layer held, which is garbage too
        super().__del__()
