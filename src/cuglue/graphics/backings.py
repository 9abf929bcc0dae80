"""What stands behind a handle: the memory of somebody else's object, opened for maps and shut after them.

Owns the interface that every backing has (:class:`Backing`), what the live maps of one object share
(:class:`Share`), and the two backings without images: a GL buffer, and an object that the caller's own functions map.
Must not know who may map when (:mod:`handle`), nor what a map exports (:mod:`mapping`).

Every method runs where the backing's calls must run (:meth:`Backing.call`), with the handle's lock held. A method
that raises leaves the backing as it was.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..core.block import Block, BlockLife
from ..core.device import DeviceState
from ..core.stream import Stream
from ..errors import CuglueError, LayoutError, MapUnavailableError, StaleHandleError, UsageError
from ..formats import Format, PlaneView
from ..layout import Layout
from .glcurrent import ThreadRef
from .glops import CudaGlOps
from .image_copy import CopyPath
from .registration import Registration

T = TypeVar("T")
log = logging.getLogger(__name__)


class Part(NamedTuple):
    """Which piece of an object is mapped. A buffer has only ``Part(0, 0)``."""

    level: int = 0
    layer: int = 0


class Share:
    """What the live maps of one part have in common.

    Attributes:
        part: which piece.
        block: the memory that consumers see, with everything known to use it.
        layout: shape, strides and element type of the whole part.
        rows: into how many rows of equal size the memory falls; 1 for a buffer.
        planes: the arrays that make up an image, by name.
        keep: what has to live as long as somebody refers to the memory.
        maps, writers: how many maps are live, and how many of them may write.
    """

    __slots__ = ("block", "keep", "layout", "maps", "part", "planes", "rows", "writers")

    def __init__(
        self,
        part: Part,
        block: BlockLife,
        layout: Layout,
        *,
        rows: int = 1,
        planes: Mapping[str, PlaneView] | None = None,
        keep: object = None,
    ) -> None:
        self.part = part
        self.block = block
        self.layout = layout
        self.rows = rows
        self.planes = planes or {}
        self.keep = keep
        self.maps = 0
        self.writers = 0


class Backing(ABC):
    """The object behind a handle.

    Class attributes:
        kind: the word in the handle's repr.
        survives: the memory that consumers see outlives the map.
    """

    kind: ClassVar[str]
    survives: ClassVar[bool] = False

    state: DeviceState
    #: Bytes of the base part.
    size: int
    #: Shape and element type of the base part.
    layout: Layout
    #: What an image's texels are; None for bytes.
    format: Format | None = None
    readonly = False
    #: How an image is copied; None for what is not copied.
    copy_path: CopyPath | None = None

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function`` where this backing's calls have to run; blocks the host until it returned."""
        return function(*args)

    def post(self, function: Callable[[], object]) -> None:
        """Let ``function`` run there later. For finalisers: only appends to a queue."""
        self.state.retire.forget(lambda: _quietly(function))

    @property
    def alive(self) -> bool:
        """False once the place where calls run is gone; with it went everything that could be given back."""
        return True

    @property
    def routed(self) -> bool:
        """Whether :meth:`call` would run on another thread."""
        return False

    def check(self, part: Part) -> None:
        """Check that the part is there and the object still as it was registered. Asks no device."""
        if part != (0, 0):
            raise UsageError(
                f"{self}", got=f"level {part.level}, layer {part.layer}", expected="level 0, layer 0"
            )

    @abstractmethod
    def open(self, part: Part, stream: Stream, load: bool) -> Share:
        """Make the part's memory usable by work queued on ``stream`` from now on.

        Args:
            part: which piece.
            stream: where to queue; everything needed before is waited for there.
            load: of an opaque object: copy its contents in.
        """

    @abstractmethod
    def shut(self, share: Share, stream: Stream) -> None:
        """Give the part back after its last map: graphics work issued later comes after ``stream``."""

    @abstractmethod
    def destroy(self) -> None:
        """Give back everything. Called once nothing is open; called again if it failed."""

    def __str__(self) -> str:
        return self.kind


class OpaqueBacking(Backing):
    """An object whose memory nobody can address: maps see a linear copy of it.

    So maps can conflict, and writes have to be published.

    Class attributes:
        volatile: the object can change while it is mapped, so that each map copies it in again.
    """

    survives = True
    volatile: ClassVar[bool] = False

    @abstractmethod
    def refresh(self, share: Share, stream: Stream) -> None:
        """Copy the contents in again, after everything known to use the copy."""

    @abstractmethod
    def publish(self, share: Share, stream: Stream) -> None:
        """Copy the memory back to the object, after everything known to use the copy."""


def _quietly(function: Callable[[], object]) -> None:
    """Run what a finaliser left behind: nobody is there to be told, but the log."""
    try:
        function()
    except CuglueError:
        log.exception("giving back a forgotten mapping failed")


class GlBacking(Backing):
    """What the backings registered in an OpenGL context share: the thread, and the end."""

    registration: Registration

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Inherited. On the context's thread."""
        return self.registration.ops.call(function, *args)

    def post(self, function: Callable[[], object]) -> None:
        """Inherited. On the context's thread, with its next call."""
        self.registration.ops.post(function)

    @property
    def alive(self) -> bool:
        """Inherited."""
        return self.registration.ops.alive

    @property
    def routed(self) -> bool:
        """Inherited."""
        return self.registration.ops.thread != ThreadRef.current()

    def destroy(self) -> None:
        """Inherited. The registration ends before the GL object is deleted."""
        self.registration.unregister()


class GlBuffer(GlBacking):
    """A registered GL buffer. Its memory goes away with the unmap; the address may differ each time.

    Args:
        registration: of the buffer.
        size: bytes, as OpenGL said at registration.
        readonly: registered for reading only.
        current_size: asks OpenGL for the size now; raises if the buffer is gone.
        what: the buffer's name for messages.
    """

    kind = "GlBuffer"

    def __init__(
        self,
        registration: Registration,
        size: int,
        *,
        readonly: bool,
        current_size: Callable[[], int],
        what: str,
    ) -> None:
        self.state = registration.state
        self.registration = registration
        self.size = size
        self.layout = Layout.of((size,), "u1")
        self.readonly = readonly
        self._current_size = current_size
        self._what = what

    def check(self, part: Part) -> None:
        """Inherited. The driver itself would map the old memory of a buffer that was resized."""
        super().check(part)
        if self.registration.mapped:
            return
        now = self._current_size()
        if now != self.size:
            raise StaleHandleError(
                f"{self._what} was resized after it was registered",
                got=f"{now} bytes",
                expected=f"{self.size} bytes",
                hint="Close the handle and register the buffer again",
            )

    def open(self, part: Part, stream: Stream, load: bool) -> Share:
        """Inherited."""
        registration = self.registration
        registration.map(stream)
        try:
            ptr, nbytes = self.state.driver.graphics_pointer(registration.handle)
            if nbytes < self.size:
                raise StaleHandleError(
                    f"{self._what}", got=f"a mapping of {nbytes} bytes", expected=f"{self.size} bytes"
                )
        except BaseException as error:
            registration.undo_map(stream, error)
            raise
        return Share(
            part, Block(ptr, nbytes, stream, stream.seq, "mapped GL buffer"), Layout.of((nbytes,), "u1")
        )

    def shut(self, share: Share, stream: Stream) -> None:
        """Inherited."""
        share.block.join_uses(stream)
        self.registration.unmap(stream)

    def __str__(self) -> str:
        return self._what


class ForeignBuffer(Backing):
    """A buffer that the caller's own functions map (:class:`~cuglue.graphics.glops.CudaGlOps`).

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
            ptr, nbytes = answer
            if nbytes < self.size:
                raise LayoutError(
                    f"{self}",
                    got=f"a mapping of {nbytes} bytes from its ops",
                    expected=f"at least {self.size}",
                )
            stream.join_context()
        except BaseException as error:
            try:
                self.ops.unmap(self.resource)
            except Exception as second:  # noqa: BLE001 - the caller's code; the first error is the one to raise
                error.add_note(f"its ops could not unmap it: {second}")
            raise
        block = Block(ptr, nbytes, stream, stream.submit(), "mapped GL buffer")
        return Share(part, block, Layout.of((nbytes,), "u1"))

    def post(self, function: Callable[[], object]) -> None:
        """Inherited. Without a runtime there is no queue, and nothing to give back."""
        if hasattr(self, "state"):
            super().post(function)

    def _unavailable(self, got: str) -> MapUnavailableError:
        return MapUnavailableError(f"{self} cannot be mapped", got=got, reason="ops_failed")

    def shut(self, share: Share, stream: Stream) -> None:
        """Inherited."""
        share.block.join_uses(stream)
        stream.hold_context()
        self.ops.unmap(self.resource)

    def destroy(self) -> None:
        """Inherited."""
        self.ops.unregister(self.resource)
