"""Arrays of another owner as backings: imported images, and arrays that somebody else made.

Owns when an owner's writes are waited for and when it learns of ours. Must not know how an array was imported, nor how
it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..core.block import Block
from ..core.device import DeviceState
from ..core.stream import Stream, as_stream
from ..driver.protocol import Access, ArrayInfo
from ..errors import LayoutError
from ..formats import Format, PlaneView
from ..layout import Layout
from ..memory.resource import DeviceMemoryResource
from .backings import Part, Share
from .fences import Writes
from .image_copy import image_copier
from .images import ImageBacking
from .planes import Carried, ImageLayout, image_layout, plain_format, texel_of


class FencedImage(ImageBacking):
    """An image whose owner tells of its writes, and has to be told of ours.

    Maps wait for recorded writes; publishing signals the fence, or blocks the host where there is none.
    """

    format: Format
    writes: Writes
    _planes: Mapping[str, PlaneView] | None

    def refresh(self, share: Share, stream: Stream) -> None:
        """Inherited."""
        self.writes.order(stream, self._uses(), self)
        super().refresh(share, stream)

    def publish(self, share: Share, stream: Stream) -> None:
        """Inherited. Blocks the host, unless a fence tells the owner."""
        super().publish(share, stream)
        share.block.join_uses(stream)  # in place nothing is copied, so nothing waited for the kernels yet
        self.writes.hand_back(stream)

    def planes(self, layout: Layout) -> Mapping[str, PlaneView]:
        """Inherited."""
        return super().planes(layout) if self._planes is None else self._planes


class ArrayImage(FencedImage):
    """A 2-D array that stays reachable all the time, so that its owner may write while it is mapped.

    Args:
        state: the device.
        memory: where linear buffers come from.
        array, info: the driver's array.
        shown: what maps of it show.
        writes: what the owner records of its writes.
        give_back: ends what the array belongs to; None: that is the caller's affair.
        what: its name for messages.
    """

    kind = "Array"
    volatile = True

    def __init__(
        self,
        state: DeviceState,
        memory: DeviceMemoryResource,
        array: int,
        info: ArrayInfo,
        shown: ImageLayout,
        writes: Writes,
        *,
        give_back: Callable[[], None] | None = None,
        what: str,
    ) -> None:
        surfaces = state.capabilities.surfaces
        if surfaces:  # so that no map pays for the compiler
            image_copier(state).prepare(info.width * info.texel_bytes, 0)
        super().__init__(state, memory, shown.layout, surfaces=surfaces)
        self.format = shown.format
        self.writes = writes
        self._planes = shown.planes
        self._array = array
        self._info = info
        self._give_back = give_back
        self._what = what
        home = as_stream(0, device=state.device, driver=state.driver)
        self._block = Block(0, 0, home, 0, "imported image")

    def check(self, part: Part) -> None:
        """Inherited. Level and layer alone: an image may be mapped in place."""
        super().check(part._replace(in_place=False))

    def acquire(self, stream: Stream) -> Block:
        """Inherited. After all that used the array: kernels in place may write, and are not told apart."""
        self.writes.order(stream, self._block, self)
        self._block.prepare(stream, Access.READ_WRITE)
        return self._block

    def release(self, stream: Stream, error: BaseException | None = None) -> None:
        """Inherited. Nothing to give back."""

    def array(self, part: Part) -> tuple[int, ArrayInfo, int, Layout]:
        """Inherited."""
        return self._array, self._info, 0, self.layout

    def destroy(self) -> None:
        """Inherited. The linear buffer first, then the array with its allocation, once nothing uses them."""
        self.drop_linear()
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            self.state.retire.push(tuple(self._block.uses()), give_back)

    def _uses(self) -> Block:
        return self._block

    def __str__(self) -> str:
        return self._what


def shown_by(
    what: str,
    info: ArrayInfo,
    carried: Carried,
    *,
    texels: int | None = None,
    rows: int | None = None,
    texel_bytes: int | None = None,
) -> ImageLayout:
    """What maps of a driver's array show, checked against what the caller says of it.

    Raises:
        LayoutError: the array has other extents or texels, or more than two dimensions.
        UnsupportedError: texels that have no NumPy type.
    """
    found = info.width, max(info.height, 1), info.texel_bytes
    said = tuple(f if s is None else s for s, f in zip((texels, rows, texel_bytes), found, strict=True))
    if info.depth or said != found:
        depth = f" x {info.depth} slices" if info.depth else ""
        raise LayoutError(
            what,
            got=f"{said[0]} x {said[1]} texels of {said[2]} bytes",
            expected=f"what the array has: {found[0]} x {found[1]}{depth} texels of {found[2]} bytes",
        )
    return image_layout(plain_format(texel_of(info)), carried, info.width, max(info.height, 1))
