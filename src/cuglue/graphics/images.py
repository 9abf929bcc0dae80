"""Opaque images as backings: a linear copy that consumers see, filled when a map opens and published when it shuts.

Owns the linear buffers (one per handle; a second one only while two levels or layers are mapped at once), the order
of the copies, and the OpenGL image. Must not know conflicts between maps, nor how a copy is done.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

from ..core.block import Block, BlockLife, finish_all
from ..core.device import DeviceState
from ..core.stream import Stream
from ..driver.protocol import Access, ArrayInfo
from ..errors import (
    CuglueError,
    NotAllocatedError,
    StaleHandleError,
    UnsupportedError,
    UsageError,
)
from ..formats import Format, PlaneView
from ..layout import Layout
from ..memory.resource import DeviceMemoryResource
from .backings import GlBacking, OpaqueBacking, Part, Share
from .globjects import ImageInfo
from .image_copy import Image, choose_path, image_copier
from .inplace import ImageObjects
from .linear import Linear, LinearStore
from .planes import texel_of
from .registration import GlRegistration

TEXTURE_3D = 0x806F  # its slices lie in one array
_LAST_LEVEL = 31  # more than any texture has; OpenGL would take 2**32 for 0


class Copied:
    """What a share of an image keeps: the linear buffer (none in place), and the array while the image is open."""

    __slots__ = ("image", "linear")

    def __init__(self, linear: Linear | None, image: Image) -> None:
        self.linear = linear
        self.image: Image | None = image


class ImageBacking(OpaqueBacking):
    """An opaque array behind a linear copy.

    Args:
        state: the device.
        memory: where linear buffers come from.
        layout: shape and element type of the base part.
        surfaces: whether surface objects of the array are allowed.
        depth: slices of a 3-D image, else 0.
    """

    def __init__(
        self,
        state: DeviceState,
        memory: DeviceMemoryResource,
        layout: Layout,
        *,
        surfaces: bool,
        depth: int = 0,
    ) -> None:
        self.state = state
        self.layout = layout
        self.size = layout.nbytes
        self._store = LinearStore(memory)
        self.surfaces = surfaces
        self._copier = image_copier(state)
        self.copy_path = choose_path(self.size, surfaces=surfaces, depth=depth)

    # --- what a concrete image adds ------------------------------------------------------------------------------
    @abstractmethod
    def acquire(self, stream: Stream) -> Block:
        """Get hold of the image for work on ``stream``; gives the record of what uses the image itself."""

    @abstractmethod
    def release(self, stream: Stream, error: BaseException | None = None) -> None:
        """Undo one :meth:`acquire`; ``error`` is what happened in between, if something did."""

    @abstractmethod
    def array(self, part: Part) -> tuple[int, ArrayInfo, int, Layout]:
        """``(array, info, slice, layout)`` of a part of the image held."""

    def planes(self, layout: Layout) -> Mapping[str, PlaneView]:
        """The arrays that make up a part of this layout."""
        return {"image": PlaneView(0, layout)}

    # --- the life-cycle -------------------------------------------------------------------------------------------
    def open(self, part: Part, stream: Stream, load: bool) -> Share:
        """Inherited."""
        uses = self.acquire(stream)
        image = linear = None
        try:
            array, info, slice_, layout = self.array(part)
            image = Image(self.state, array, info, slice_=slice_, surfaces=self.surfaces)
            if part.in_place:
                return Share(part, uses, layout, rows=image.rows, keep=Copied(None, image))
            linear = self._store.take(image.nbytes, stream, self)
            share = Share(
                part,
                linear.block,
                layout,
                rows=image.rows,
                planes=self.planes(layout),
                keep=Copied(linear, image),
            )
            if load:
                self.refresh(share, stream)
            else:
                share.block.prepare(stream, Access.READ_WRITE)
            share.block.taint = None  # that a command failed to write it concerned the map that is left
        except BaseException as error:
            self._store.give(linear)
            if image is not None:
                image.objects.retire(stream)
            self.release(stream, error)
            raise
        return share

    def refresh(self, share: Share, stream: Stream) -> None:
        """Inherited. Nothing in place."""
        if _copied(share).linear is None:
            return
        self._uses().prepare(stream, Access.READ)
        share.block.prepare(stream, Access.READ_WRITE)
        self._enqueue(self._copier.load, share, stream, Access.READ)

    def publish(self, share: Share, stream: Stream) -> None:
        """Inherited. Nothing in place."""
        if _copied(share).linear is None:
            return
        self._uses().prepare(stream, Access.READ_WRITE)
        share.block.prepare(stream, Access.READ_WRITE)
        self._enqueue(self._copier.store, share, stream, Access.WRITE)

    def _enqueue(
        self, copy: Callable[[Image, int, Stream], None], share: Share, stream: Stream, on_image: Access
    ) -> None:
        """Enqueue a copy between the image and its linear buffer, in order already, and note it as a use of both."""
        image, linear = _copied(share).image, share.block
        assert image is not None, "a copy of a shut image"
        used: dict[BlockLife, Access] = {self._uses(): on_image, linear: Access.WRITE}
        try:
            copy(image, linear.ptr, stream)
            finish_all(used, stream, stream.submit())
        except BaseException as error:
            if not isinstance(error, CuglueError):
                finish_all(used, stream, stream.submit())  # interrupted: the driver may have it
            raise

    def join(self, share: Share, stream: Stream) -> None:
        """Inherited. Readers of the linear copy are not waited for: the next copy into it waits for them."""
        if share.open and _copied(share).linear is None:
            share.block.join_uses(stream)

    def shut(self, share: Share, stream: Stream) -> None:
        """Inherited."""
        copied = _copied(share)
        if share.open:
            self.release(stream)
            share.open = False
        if copied.image is not None:
            copied.image.objects.retire(stream)
            copied.image = None
        self._store.give(copied.linear)

    def objects(self, share: Share) -> ImageObjects:
        """The surface and texture objects of a part that is open."""
        image = _copied(share).image
        assert image is not None, "objects of a shut image"
        return image.objects

    def drop_linear(self) -> None:
        """Let the linear buffer go; exports that are alive keep it."""
        self._store.drop()

    @abstractmethod
    def _uses(self) -> Block:
        """The record that :meth:`acquire` gave."""


def _copied(share: Share) -> Copied:
    assert isinstance(share.keep, Copied), "a share of another backing"
    return share.keep


class GlImage(ImageBacking, GlBacking):
    """A registered GL texture or renderbuffer.

    Args:
        registration: of the image.
        memory: where linear buffers come from.
        target: the GL target.
        info: the base level, as OpenGL described it at registration.
        format: what its texels are, or what image they carry.
        layout: the base part as consumers see it.
        planes: of a carried image, the arrays that make it up.
        surfaces: registered so that surface objects may be made.
        describe: asks OpenGL about a level now; raises NotAllocatedError where there is none.
        what: the image's name for messages.
    """

    kind = "GlImage"
    format: Format

    def __init__(
        self,
        registration: GlRegistration,
        memory: DeviceMemoryResource,
        *,
        target: int,
        info: ImageInfo,
        format: Format,
        layout: Layout,
        planes: Mapping[str, PlaneView] | None,
        surfaces: bool,
        describe: Callable[[int], ImageInfo],
        what: str,
    ) -> None:
        self.registration = registration
        self.info = info
        self.format = format
        self._volume = target == TEXTURE_3D
        self._describe = describe
        self._levels = {0: info}
        self._planes = planes
        self._what = what
        depth = info.depth if self._volume else 0
        super().__init__(registration.state, memory, layout, surfaces=surfaces, depth=depth)

    def check(self, part: Part) -> None:
        """Inherited. The driver itself would map the old storage of an image that was resized or deleted."""
        if not self.registration.mapped:
            self._check_base()
        if not 0 <= part.level <= _LAST_LEVEL:
            raise UsageError(f"{self}", got=f"level {part.level}", expected=f"a level of 0 to {_LAST_LEVEL}")
        if part.level and self._planes is not None:
            raise UsageError(
                f"{self} holds a {self.format} image", got=f"level {part.level}", expected="level 0"
            )
        if part.level:
            self._levels[part.level] = self._describe(part.level)
        layers = self._levels[part.level].depth
        if not 0 <= part.layer < layers:
            raise UsageError(f"{self}", got=f"layer {part.layer}", expected=f"0 to {layers - 1}")

    def _check_base(self) -> None:
        hint = "Close the handle and register it again"
        try:
            now = self._describe(0)
        except NotAllocatedError as error:
            raise StaleHandleError(f"{self} was deleted after it was registered", hint=hint) from error
        if now != self.info:
            raise StaleHandleError(
                f"{self} got other storage after it was registered", got=now, expected=self.info, hint=hint
            )

    def planes(self, layout: Layout) -> Mapping[str, PlaneView]:
        """Inherited."""
        return super().planes(layout) if self._planes is None else self._planes

    def acquire(self, stream: Stream) -> Block:
        """Inherited."""
        return self.registration.map(stream)

    def release(self, stream: Stream, error: BaseException | None = None) -> None:
        """Inherited."""
        self.registration.end_map(stream, error)

    def array(self, part: Part) -> tuple[int, ArrayInfo, int, Layout]:
        """Inherited. What the driver says of the array is checked against what OpenGL says of the image."""
        driver = self.state.driver
        layer, slice_ = (0, part.layer) if self._volume else (part.layer, 0)
        array = driver.graphics_array(self.registration.handle, layer, part.level)
        found = driver.array_info(array, self.state.device)
        level = self._levels[part.level]
        texel = texel_of(found)
        expected = level.width, level.height, self.format.texel
        if (found.width, max(found.height, 1), texel) != expected:
            raise UnsupportedError(
                f"{self}: CUDA sees another array than OpenGL describes",
                got=f"{found.width} x {found.height} texels of {texel}",
                expected=f"{level.width} x {level.height} texels of {self.format.texel}",
                reason="format",
            )
        if part.level == 0:
            return array, found, slice_, self.layout
        shape = (level.height, level.width, self.format.channels)
        return array, found, slice_, Layout.of(shape, self.format.dtype)

    def destroy(self) -> None:
        """Inherited."""
        super().destroy()
        self.drop_linear()

    def _uses(self) -> Block:
        return self.registration.uses

    def __str__(self) -> str:
        return self._what
