"""Buffers as backings: one registered with the driver, and one that the caller's own functions map.

Owns how their memory is got and given back. Must not know who may map when, nor what a map exports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int, c_int64
from typing import Protocol

from ..arguments import shown, whole
from ..core.block import Block, BlockLife
from ..core.device import DeviceState
from ..core.stream import Stream
from ..driver.protocol import Access, MemoryType
from ..errors import LayoutError, MapUnavailableError, NotAllocatedError, StaleHandleError, UsageError
from ..layout import Layout
from .backings import WHOLE, Backing, GlBacking, Part, Share
from .clientops import CudaGlOps
from .plan import Plan, may_plan
from .registration import GlRegistration

log = logging.getLogger(__name__)


class SizeQuestion(Protocol):
    """Asks OpenGL for the size of a buffer now. Called, it raises NotAllocatedError if the buffer is gone."""

    @property
    def answer(self) -> c_int | c_int64:
        """Where :attr:`ask` puts the size, if OpenGL has an answer."""

    @property
    def ask(self) -> Callable[[], object]:
        """The question alone."""

    def __call__(self) -> int: ...


class BufferShare(Share):
    """Memory of a GL buffer, which is a block once somebody asks: most maps are left without.

    Attributes:
        backing: whose memory it is.
        stream, seq: the operation there that mapped it, or a later one.
    """

    __slots__ = ("backing", "seq", "stream")

    def __init__(self, backing: GlBuffer, ptr: int, layout: Layout, stream: Stream, seq: int) -> None:
        super().__init__(WHOLE, None, layout)
        self.backing = backing
        self.ptr = ptr
        self.stream = stream
        self.seq = seq

    def prepare(self, stream: Stream, access: Access) -> None:
        """Inherited. Nothing on the map's own stream, as long as nobody else uses the memory."""
        if self.made is not None or stream is not self.stream:
            (self.made or self.make_block()).prepare(stream, access)

    def finish(self, stream: Stream, access: Access) -> None:
        """Inherited. A use on the map's own stream needs no block: it is one that the memory begins with."""
        if self.made is None and stream is self.stream:
            self.seq = stream.submit()
        else:
            (self.made or self.make_block()).finish(stream, access)

    def make_block(self) -> BlockLife:
        """Inherited."""
        with self.stream.state.ordering:  # two threads may ask
            if self.made is None:
                self.made = Block(self.ptr, self.layout.nbytes, self.stream, self.seq, "mapped GL buffer")
            return self.made


class GlBuffer(GlBacking):
    """A registered GL buffer. Its memory goes away with the unmap; the address may differ each time.

    Args:
        registration: of the buffer.
        size: bytes, as OpenGL said at registration.
        readonly: registered for reading only.
        current_size: asks OpenGL for the size now.
        what: the buffer's name for messages.
    """

    kind = "GlBuffer"

    def __init__(
        self,
        registration: GlRegistration,
        size: int,
        *,
        readonly: bool,
        current_size: SizeQuestion,
        what: str,
    ) -> None:
        self.state = registration.state
        self.registration = registration
        self.size = size
        self.layout = Layout.of((size,), "u1")
        self.readonly = readonly
        self.current_size = current_size
        self._what = what

    def check(self, part: Part) -> None:
        """Inherited. The driver itself would map the old memory of a buffer that was resized."""
        if part is not WHOLE:
            super().check(part)
        if self.registration.mapped:
            return
        hint = "Close the handle and register the buffer again"
        try:
            now = self.current_size()
        except NotAllocatedError as error:
            raise StaleHandleError(f"{self._what} was deleted after it was registered", hint=hint) from error
        if now != self.size:
            raise StaleHandleError(
                f"{self._what} was resized after it was registered",
                got=f"{now} bytes",
                expected=f"{self.size} bytes",
                hint=hint,
            )

    def plan(self, stream: Stream) -> Plan | None:
        """Inherited."""
        return Plan((self,), stream) if may_plan(self, stream) else None

    def open(self, part: Part, stream: Stream, load: bool) -> Share:
        """Inherited."""
        registration = self.registration
        registration.map(stream)
        try:
            return self.share(stream, stream.seq, *self.state.driver.graphics_pointer(registration.handle))
        except BaseException as error:
            registration.undo_map(stream, error)
            raise

    def share(self, stream: Stream, seq: int, ptr: int, nbytes: int) -> BufferShare:
        """What maps show of the buffer, which the operation ``seq`` of ``stream``, or one before it, has mapped there.

        Raises:
            StaleHandleError: it is smaller than it was.
        """
        if nbytes < self.size:
            raise StaleHandleError(
                f"{self._what}", got=f"a mapping of {nbytes} bytes", expected=f"{self.size} bytes"
            )
        layout = self.layout if nbytes == self.size else Layout.of((nbytes,), "u1")
        return BufferShare(self, ptr, layout, stream, seq)

    def join(self, share: Share, stream: Stream) -> None:
        """Inherited."""
        if share.open:
            share.block.join_uses(stream)

    def shut(self, share: Share, stream: Stream) -> None:
        """Inherited."""
        if share.open:
            self.registration.unmap(stream)
            share.open = False

    def __str__(self) -> str:
        return self._what


class ForeignBuffer(Backing):
    """A buffer that the caller's own functions map (:class:`~cuglue.graphics.clientops.CudaGlOps`).

    Those name no stream. So a map's stream waits for everything queued on the device when they mapped, and everything
    queued after the map waits for the map's consumers before they unmap.
    """

    kind = "GlBuffer"

    def __init__(self, state: DeviceState | None, resource: int, size: int, ops: CudaGlOps) -> None:
        if state is not None:  # else there is no runtime, and the handle maps nothing
            self.state = state
        self.size = size
        self.layout = Layout.of((size,), "u1")
        self.resource = resource
        self.ops = ops

    def open(self, part: Part, stream: Stream, load: bool) -> Share:
        """Inherited."""
        try:
            answer = self.ops.map(self.resource)
        except Exception as error:
            log.warning("the ops of %s could not map it: %s", self, error)
            raise self._unavailable(f"{type(error).__name__}: {error}") from error
        if answer is None:
            raise self._unavailable("None from its ops")
        try:
            ptr, nbytes = self._checked(answer)
            if not self.state.alone:
                self._check_device(ptr)
            with self.state.ordering:
                stream.join_context()
                block = Block(ptr, nbytes, stream, stream.submit(), "mapped GL buffer")
            return Share(part, block, Layout.of((nbytes,), "u1"))
        except BaseException as error:
            try:
                self.ops.unmap(self.resource)
            except Exception as second:  # noqa: BLE001 - the caller's code; the first error is the one to raise
                error.add_note(f"its ops could not unmap it: {second}")
            raise

    @property
    def ordering(self) -> AbstractContextManager[object]:
        """Inherited. None: the ops may wait for another thread, which may itself be waiting for the lock."""
        return nullcontext()

    def post(self, function: Callable[[], object]) -> None:
        """Inherited. Without a runtime there is no queue, and nothing to give back."""
        if hasattr(self, "state"):
            super().post(function)

    def _checked(self, answer: object) -> tuple[int, int]:
        """``(address, bytes)`` of a mapping. What may be none at all would be read by kernels and copies."""
        pair = answer if isinstance(answer, tuple | list) and len(answer) == 2 else (None, None)
        ptr, nbytes = whole(pair[0]), whole(pair[1])
        if ptr is None or nbytes is None or not 0 <= ptr < 2**64:
            raise UsageError(
                f"map() of the ops of {self}",
                got=shown(answer),
                expected="(address, bytes), or None where it cannot be mapped now",
            )
        if nbytes and not ptr:
            raise self._unavailable(f"a null pointer to {nbytes} bytes from its ops")
        if not self.size <= nbytes < 2**63:
            raise LayoutError(
                f"{self}", got=f"a mapping of {nbytes} bytes from its ops", expected=f"at least {self.size}"
            )
        return ptr, nbytes

    def _unavailable(self, got: str) -> MapUnavailableError:
        return MapUnavailableError(f"{self} cannot be mapped", got=got, reason="ops_failed")

    def _check_device(self, ptr: int) -> None:
        """Refuse memory of another device: it would be ordered with this one's streams."""
        found = self.state.driver.pointer_info(ptr)
        if found.type is MemoryType.DEVICE and found.device != self.state.device:
            raise UsageError(
                f"{self} of device {self.state.device}",
                got=f"memory of device {found.device} from its ops",
                expected="its own",
                hint="Say device= where the handle is made",
            )

    def join(self, share: Share, stream: Stream) -> None:
        """Inherited."""
        if share.open:
            with self.state.ordering:
                share.block.join_uses(stream)
                stream.hold_context()

    def shut(self, share: Share, stream: Stream) -> None:
        """Inherited."""
        if share.open:
            self.ops.unmap(self.resource)
            share.open = False

    def destroy(self) -> None:
        """Inherited."""
        self.ops.unregister(self.resource)
