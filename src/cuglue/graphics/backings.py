"""What stands behind a handle: the memory of somebody else's object, opened for maps and shut after them.

Owns the interface that every backing has (:class:`Backing`), what the live maps of one object share
(:class:`Share`), and what all objects of OpenGL have in common. The backings themselves are in :mod:`buffers` and
:mod:`images`. Must not know who may map when (:mod:`life`), nor what a map exports (:mod:`mapping`).

Every method runs where the backing's calls must run (:meth:`Backing.call`), with the handle's lock held. A method
that raises leaves the backing as it was.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from ..core.block import BlockLife
from ..core.device import DeviceState
from ..core.stream import Stream
from ..driver.protocol import Access
from ..errors import (
    CuglueError,
    DriverError,
    UsageError,
)
from ..formats import Format, PlaneView
from ..layout import Layout
from .diagnose import explain
from .fences import Writes
from .glcurrent import ThreadRef
from .image_copy import CopyPath
from .inplace import ImageObjects
from .registration import GlRegistration

if TYPE_CHECKING:
    from .plan import Plan

T = TypeVar("T")
log = logging.getLogger(__name__)


class Part(NamedTuple):
    """Which piece of an object is mapped, and whether in place. A buffer has only ``Part()``."""

    level: int = 0
    layer: int = 0
    in_place: bool = False

    @property
    def twin(self) -> Part:
        """The same piece, mapped the other way."""
        return Part(self.level, self.layer, not self.in_place)


#: All of a buffer; level 0, layer 0 of an image.
WHOLE = Part()
_NO_PLANES: Mapping[str, PlaneView] = {}


class Share:
    """What the live maps of one part have in common.

    Attributes:
        part: which piece.
        ptr: device address of the memory; 0 in place.
        layout: shape, strides and element type of the whole part.
        rows: into how many rows of equal size the memory falls; 1 for a buffer.
        planes: the arrays that make up an image, by name.
        keep: what has to live as long as somebody refers to the memory.
        readers: where maps note themselves that arrays were made from, for memory that may end before those arrays.
        maps, writers: how many maps are live, and how many of them may write.
        open: False once the backing has shut it.
        made: the block, or None while nobody has asked for it.
    """

    __slots__ = (
        "keep",
        "layout",
        "made",
        "maps",
        "open",
        "part",
        "planes",
        "ptr",
        "readers",
        "rows",
        "writers",
    )

    def __init__(
        self,
        part: Part,
        block: BlockLife | None,
        layout: Layout,
        *,
        rows: int = 1,
        planes: Mapping[str, PlaneView] | None = None,
        keep: object = None,
        readers: list[weakref.ref[Any]] | None = None,
    ) -> None:
        """``block``: the memory that consumers see; None: a subclass makes it when somebody asks."""
        self.part = part
        self.made = block
        self.ptr = 0 if block is None else block.ptr
        self.layout = layout
        self.rows = rows
        self.planes: Mapping[str, PlaneView] = _NO_PLANES if planes is None else planes
        self.keep = keep
        self.readers = readers
        self.maps = 0
        self.writers = 0
        self.open = True

    @property
    def block(self) -> BlockLife:
        """The memory that consumers see, with everything known to use it."""
        return self.make_block() if self.made is None else self.made

    def make_block(self) -> BlockLife:
        """The block, at the first question. For subclasses."""
        raise NotImplementedError

    def prepare(self, stream: Stream, access: Access) -> None:
        """:meth:`~cuglue.core.block.BlockLife.prepare` of the memory, for an export."""
        self.block.prepare(stream, access)

    def finish(self, stream: Stream, access: Access) -> None:
        """:meth:`~cuglue.core.block.BlockLife.finish` of the memory, for an export."""
        self.block.finish(stream, access)

    def note_reader(self, m: object) -> None:
        """Arrays are made from ``m``, a map of this part."""
        if self.readers is not None:
            self.readers.append(weakref.ref(m))


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
    #: What the owner records of its writes; None where its API orders them by itself, as OpenGL does.
    writes: Writes | None = None
    #: How an image is copied; None for what is not copied.
    copy_path: CopyPath | None = None

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function`` where this backing's calls have to run; blocks the host until it returned."""
        return function(*args)

    def post(self, function: Callable[[], object]) -> None:
        """Let ``function`` run there later. For finalisers: only appends to a queue."""
        self.state.retire.forget(lambda: _quietly(function))

    @property
    def ordering(self) -> AbstractContextManager[object]:
        """The lock held while a map opens or is left: two threads must not interleave between a wait and its stamp."""
        return self.state.ordering

    @property
    def alive(self) -> bool:
        """False once the place where calls run is gone; with it went everything that could be given back."""
        return True

    @property
    def routed(self) -> bool:
        """Whether :meth:`call` would run on another thread."""
        return False

    @property
    def last_stream(self) -> Stream | None:
        """The stream that handed the object over last, which the next map mostly names again."""
        return None

    def plan(self, stream: Stream) -> Plan | None:
        """How to map all of it on ``stream`` from the next time on, if that can be said now and is the same then."""
        return None

    def check(self, part: Part) -> None:
        """Check that the part is there and the object still as it was registered. Asks no device."""
        if part.in_place:
            raise UsageError(
                f"{self}", got="in_place=True", expected="an image: other memory is in place anyway"
            )
        if part != WHOLE:
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

    def join(self, share: Share, stream: Stream) -> None:  # noqa: B027 - most memory needs nothing
        """Queue on ``stream`` what has to come before :meth:`shut`: all known uses of what goes away with that."""

    @abstractmethod
    def shut(self, share: Share, stream: Stream) -> None:
        """Give the part back after its last map: graphics work issued later comes after ``stream``.

        Called again where it failed, or an interrupt came: what is done already is not done twice.
        """

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

    #: Whether surface objects may be made of the object.
    surfaces: bool

    @abstractmethod
    def objects(self, share: Share) -> ImageObjects:
        """The surface and texture objects of a part that is open."""

    @abstractmethod
    def publish(self, share: Share, stream: Stream) -> None:
        """Copy the memory back to the object, after everything known to use the copy."""


def _quietly(function: Callable[[], object]) -> None:
    """Run what a finaliser left behind: nobody is there to be told, but the log."""
    try:
        function()
    except CuglueError:
        log.exception("giving back a forgotten mapping failed")


def cause_in_driver(error: CuglueError) -> DriverError | None:
    """The driver's error that ``error`` is, or was made of."""
    cause = error if isinstance(error, DriverError) else error.__cause__
    return cause if isinstance(cause, DriverError) else None


class GlBacking(Backing):
    """What the backings registered in an OpenGL context share: the thread, and the end."""

    registration: GlRegistration

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Inherited. On the context's thread; driver errors say what is known there."""
        ops = self.registration.ops
        try:
            return ops.call(function, *args)
        except CuglueError as error:
            if cause_in_driver(error) is not None:
                ops.call(self.explain, error)
            raise

    def explain(self, error: CuglueError) -> None:
        """Add to a driver's error what is known where it failed: on the context's thread."""
        cause = cause_in_driver(error)
        if cause is not None:
            explain(cause, self.state.driver, self.state.device)

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

    @property
    def last_stream(self) -> Stream:
        """Inherited."""
        return self.registration.uses.write_stream

    def destroy(self) -> None:
        """Inherited. The registration ends before the GL object is deleted."""
        self.registration.unregister()
