"""The ways to a handle that no registration of ours leads to, and the way out of one.

Owns the ``from_`` class methods of :class:`~cuglue.graphics.handle.CudaHandle`: what they check before any device is
asked, and which backing they choose; and giving a registration away. Must not know maps.
"""

from __future__ import annotations

from typing import Self

from ..arguments import shown, whole, whole_of
from ..core.device import device_state
from ..driver.protocol import Driver
from ..driver.registry import driver_of
from ..errors import LayoutError, UnsupportedError, UsageError
from ..formats import Format
from ..memory.resource import DeviceMemoryResource
from .arrays import ArrayImage, shown_by
from .buffers import ForeignBuffer
from .channel import parts_of
from .clientops import CudaGlOps
from .d3d11 import open_texture
from .defaults import image_memory
from .extimage import ExternalImage
from .extmemory import ExternalBuffer, ExternalMemory, check_external
from .fences import Fence, Writes, check_fence
from .life import Life
from .parts import CudaClientParts, TakenOps
from .planes import carried


class HandleMakers:
    """The constructors of a handle; its class inherits them."""

    def __init__(self, life: Life, *, no_runtime: str | None = None) -> None:
        raise NotImplementedError

    _life: Life
    _closed: bool

    def _check_open(self) -> None:
        raise NotImplementedError

    @classmethod
    def from_gl(
        cls, resource: int, size: int, ops: CudaGlOps, *, device: int = 0, driver: str | Driver | None = None
    ) -> Self:
        """A handle of a GL buffer that was registered elsewhere.

        Args:
            resource: the registered resource, as ``ops`` knows it.
            size: bytes of the buffer; what a map holds is what ``ops.map`` says, which may not be less.
            ops: maps, unmaps and unregisters it. They name no stream, so maps are ordered with the whole device.
            device: ordinal of the CUDA device.
            driver: None takes the current one.

        Ordering: calls nothing. Ownership: the handle unregisters the resource when it is closed.

        Raises:
            LayoutError: no resource, or a negative size.
            UsageError: ops that lack one of the three.
        """
        if whole(resource) in (None, 0):
            raise LayoutError("registered resource", got=shown(resource), expected="a handle that is not 0")
        size = whole_of(
            f"size of registered resource {resource:#x}", size, expected="0 or more bytes", error=LayoutError
        )
        if not all(callable(getattr(ops, name, None)) for name in ("map", "unmap", "unregister")):
            raise UsageError("ops", got=shown(ops), expected="an object with map, unmap and unregister")
        try:
            state = device_state(driver_of(driver), device)
        except UnsupportedError as error:
            return cls(Life(ForeignBuffer(None, resource, size, ops)), no_runtime=str(error))
        return cls(Life(ForeignBuffer(state, resource, size, ops)))

    @classmethod
    def from_external(
        cls,
        memory: ExternalMemory,
        *,
        offset: int = 0,
        size: int | None = None,
        fence: Fence | None = None,
    ) -> Self:
        """A handle of a range of an imported allocation.

        Its address is the same in every map, and leaving a map hands nothing over: order the owner with ``fence``
        (:meth:`Fence.signal`) or on the host.

        Args:
            memory: what :mod:`cuglue.external` imported.
            offset: first byte of the range.
            size: bytes; None: all that follows ``offset``.
            fence: what the owner signals after the writes that :meth:`record_write` tells of.

        Ordering: queues nothing. Ownership: the memory is given back with the last of its handles that is closed.

        Raises:
            LayoutError: the range does not lie inside the allocation.
            ClosedError, UsageError, DriverError: as they say; the memory is as it was.
        """
        whole = check_external(memory)
        range_ = whole.check_range(offset, size)
        check_fence(fence, whole.device)
        return cls(Life(ExternalBuffer(whole, *range_, Writes(fence))))

    @classmethod
    def from_array(
        cls,
        array: int,
        *,
        texels: int,
        rows: int,
        bytes_per_texel: int,
        fence: Fence | None = None,
        format: str | Format | None = None,
        width: int | None = None,
        height: int | None = None,
        memory: DeviceMemoryResource | None = None,
        device: int = 0,
        driver: str | Driver | None = None,
    ) -> Self:
        """A handle of a 2-D CUDA array that somebody else made (``cudaArray_t``).

        Args:
            array: stays the caller's, and has to outlive the handle.
            texels, rows, bytes_per_texel: checked against what the driver says of the array.
            fence: what the owner signals after the writes that :meth:`record_write` tells of, and what publishing
                signals (:attr:`handed_back`). None: publishing blocks the host until the array holds it.
            format, width, height: the image that the texels carry, as for :func:`cuglue.register_texture`.
            memory: where the linear copy comes from; None: straight from the driver.
            device: ordinal of the CUDA device.
            driver: None takes the current one.

        Ordering: queues nothing; compiles the copies at first. Ownership: as said.

        Raises:
            LayoutError: the array is another one than described, or carries no such image.
            UsageError, UnsupportedError, DriverError: as they say.
        """
        if isinstance(array, bool) or not isinstance(array, int) or array <= 0:
            raise UsageError("CUDA array", got=shown(array), expected="a cudaArray_t: an int above 0")
        state = device_state(driver_of(driver), device)
        check_fence(fence, device)
        what = f"array of {texels} x {rows} texels"
        info = state.driver.array_info(array, state.device)
        visible = shown_by(
            what,
            info,
            carried(what, format, width, height),
            texels=texels,
            rows=rows,
            texel_bytes=bytes_per_texel,
        )
        backing = ArrayImage(
            state, image_memory(state, memory), array, info, visible, Writes(fence), what=what
        )
        return cls(Life(backing))

    @classmethod
    def from_external_image(
        cls,
        image: ExternalImage,
        *,
        fence: Fence | None = None,
        format: str | Format | None = None,
        width: int | None = None,
        height: int | None = None,
        memory: DeviceMemoryResource | None = None,
    ) -> Self:
        """A handle of an image that :func:`cuglue.external.import_image` imported.

        Args:
            image: given back when the handle is closed, in this order: linear copy, array, allocation.
            fence, format, width, height, memory: as for :meth:`from_array`.

        Ordering: queues nothing; compiles the copies at first. Raises: as :meth:`from_array`.
        """
        if not isinstance(image, ExternalImage):
            raise UsageError("external image", got=shown(image), expected="an ExternalImage")
        state, what = image.memory.state, repr(image)
        check_fence(fence, state.device)
        visible = shown_by(what, image.info, carried(what, format, width, height))
        backing = ArrayImage(
            state,
            image_memory(state, memory),
            image.array,
            image.info,
            visible,
            Writes(fence),
            give_back=image.close,
            what=what,
        )
        image.take()
        return cls(Life(backing))

    @classmethod
    def from_d3d11(
        cls,
        texture: int,
        *,
        fence: Fence | None = None,
        format: str | Format | None = None,
        width: int | None = None,
        height: int | None = None,
        memory: DeviceMemoryResource | None = None,
        device: int = 0,
        driver: str | Driver | None = None,
    ) -> Self:
        """A handle of a Direct3D 11 texture. Windows only, where it has never been run: see docs/platforms.md.

        The texture's device is set to bear several threads (``ID3D11Multithread``): CUDA uses its immediate context in
        every map.

        Args:
            texture: address of an ``ID3D11Texture2D``; referenced until the handle is closed.
            fence: what Direct3D signals (``ID3D11DeviceContext4::Signal``) after the writes that :meth:`record_write`
                tells of, and what publishing signals. None: publishing blocks the host.
            format, width, height, memory, device, driver: as for :meth:`from_array`.

        Ordering: maps the texture once, to see what CUDA makes of it.

        Raises:
            UnsupportedError: no Windows, or a texture that does not register; the message names format or flag.
            LayoutError, UsageError, DriverError: as they say. Nothing is left registered.
        """
        state = device_state(driver_of(driver), device)
        check_fence(fence, device)
        described = carried("Direct3D 11 texture", format, width, height)
        return cls(Life(open_texture(state, texture, Writes(fence), described, memory)))

    # --- giving away ----------------------------------------------------------------------------------------------
    def into_client_parts(self) -> CudaClientParts:
        """Take the registration of a GL buffer out of this handle, which is closed then without ending it.

        Ordering: queues nothing. Ownership: whoever takes the parts ends the registration; close them.

        Raises:
            NotTransferableError: another kind of handle (a UsageError and a TypeError).
            MapConflictError: a map is live. BusyError: another handle of the object is open.
            ClosedError: the handle was closed. In each case the handle is as it was.
        """
        self._check_open()
        parts = parts_of(self._life)
        self._closed = True
        return parts

    @classmethod
    def from_client_parts(
        cls, parts: CudaClientParts, *, device: int | None = None, driver: str | Driver | None = None
    ) -> Self:
        """A handle that takes a registration which another one, or another library, gave away.

        Args:
            parts: their functions are retained, and released when the handle is closed.
            device: ordinal of the CUDA device; None: the one that the parts say, else the first.
            driver: None takes the current one.

        Ordering: calls nothing but ``retain``. Ownership: the handle ends the registration; the caller's own count is
        untouched: close ``parts``.

        Raises:
            AlreadyTransferredError: somebody has them already.
            UsageError, LayoutError: something is missing, or they are of another device; nothing was taken.
        """
        if not isinstance(parts, CudaClientParts):
            raise UsageError("client parts", got=shown(parts), expected="CudaClientParts")
        device = parts.device_for(device)
        parts.take()
        return cls.from_gl(parts.resource, parts.size, TakenOps(parts), device=device, driver=driver)

    @property
    def mapped(self) -> bool:
        """Whether a map of the object is live."""
        return self._life.mapped
