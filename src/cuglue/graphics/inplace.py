"""Surface and texture objects of an image that is mapped in place: kernels work on the image itself, nothing is copied.

Owns the objects as kernel arguments. Must not know how the image was mapped, nor commands: those find what they need
as attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..core.stream import Stream
from ..driver.protocol import Driver
from ..errors import UsageError

if TYPE_CHECKING:
    from ..core.block import BlockLife
    from .mapping import CudaMap

Kind = Literal["surface", "texture"]


class ImageObject:
    """A ``cudaSurfaceObject_t`` or ``cudaTextureObject_t`` of a map in place; ends with the map.

    In a command it is an argument like any array: ``InOut(m.surface())``. A plain CuPy launch takes its number,
    ``numpy.uint64(m.surface())``, and is ordered as any CuPy code on the current stream is.

    Attributes:
        map: the map it belongs to.
        kind: "surface" or "texture".
    """

    __slots__ = ("_handle", "kind", "map")

    def __init__(self, m: CudaMap, kind: Kind, handle: int) -> None:
        self.map = m
        self.kind = kind
        self._handle = handle

    @property
    def handle(self) -> int:
        """The driver's object. Raises ClosedError after the map was left."""
        self.map.check_live()
        return self._handle

    @property
    def writable(self) -> bool:
        """Whether kernels may write through it."""
        return self.kind == "surface" and self.map.writable

    def __index__(self) -> int:
        return self.handle

    def __cuglue_operand__(self, place: Any) -> ImageOperand:
        """The object as commands see it. Raises UsageError if the image is of another device."""
        m = self.map
        if place.driver is not m.driver or place.device != m.device:
            raise UsageError(
                repr(self),
                got=f"device {m.device} of the {m.driver.name} driver",
                expected=f"device {place.device} of the {place.driver.name} driver",
            )
        return ImageOperand(self)

    def __repr__(self) -> str:
        return f"ImageObject({self.kind} of {self.map!r})"


class ImageOperand:
    """An image as an argument of a command: no address, but uses that are ordered like those of memory."""

    __slots__ = (
        "block",
        "dtype",
        "fitted",
        "kind",
        "nbytes",
        "partners",
        "ptr",
        "shape",
        "strides",
        "writable",
    )

    def __init__(self, image: ImageObject) -> None:
        m = image.map
        self.ptr = image.handle
        self.block: BlockLife = m.block
        self.partners: tuple[Stream, ...] = m.consumers
        self.kind = image.kind
        self.writable = image.writable
        self.nbytes = m.size
        self.shape = m.shape
        self.dtype = None
        self.strides = None
        self.fitted: object = None


class ImageObjects:
    """The objects made of one array while it is mapped.

    Args:
        driver, device: where.
        array: the driver's array.
    """

    __slots__ = ("_array", "_device", "_driver", "_made")

    def __init__(self, driver: Driver, device: int, array: int) -> None:
        self._driver = driver
        self._device = device
        self._array = array
        self._made: dict[tuple[Kind, bool, bool], int] = {}

    def surface(self) -> int:
        """The surface object; made at first use."""
        key: tuple[Kind, bool, bool] = ("surface", False, False)
        if key not in self._made:
            self._made[key] = self._driver.surface_create(self._array, self._device)
        return self._made[key]

    def texture(self, *, normalized: bool, linear: bool) -> int:
        """A texture object; made at first use of these options."""
        key: tuple[Kind, bool, bool] = ("texture", normalized, linear)
        if key not in self._made:
            self._made[key] = self._driver.texture_create(self._array, self._device, normalized, linear)
        return self._made[key]

    def retire(self, stream: Stream) -> None:
        """Let every object go once what is queued on ``stream`` so far is done. Only appends to a queue."""
        made, self._made = self._made, {}
        for (kind, *_), handle in made.items():
            destroy = self._driver.surface_destroy if kind == "surface" else self._driver.texture_destroy
            stream.state.retire.push(((stream, stream.seq),), _destroyer(destroy, handle))


def _destroyer(destroy: Any, handle: int) -> Any:
    return lambda: destroy(handle)
