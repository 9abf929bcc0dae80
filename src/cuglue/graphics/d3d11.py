"""Direct3D 11 textures as backings: registered once, mapped for each copy, published before a map is left.

Owns what is checked of a texture before the driver is asked, and its registration. The COM calls are in
:mod:`d3d11_com`; the order of copies is :class:`~cuglue.graphics.arrays.FencedImage`'s.
"""

from __future__ import annotations

from ..arguments import shown
from ..core.block import Block
from ..core.device import DeviceState
from ..core.stream import Stream, as_stream
from ..driver.protocol import ArrayInfo, RegisterFlags
from ..errors import DriverError, LayoutError, UnsupportedError, UsageError
from ..formats import Format, Packing, by_dxgi
from ..layout import Layout
from ..memory.resource import DeviceMemoryResource
from . import d3d11_com as com
from .arrays import FencedImage
from .backings import Part
from .d3d11_com import Description
from .defaults import image_memory
from .diagnose import explained
from .fences import Writes
from .image_copy import image_copier
from .planes import Carried, ImageLayout, image_layout, plain_format, texel_of
from .registration import Registration
from .undo import Undo

DEPTH_STENCIL = 0x40  # D3D11_BIND_DEPTH_STENCIL
SHARED = 0x2 | 0x100 | 0x800  # D3D11_RESOURCE_MISC_SHARED, _SHARED_KEYEDMUTEX, _SHARED_NTHANDLE


class D3d11Image(FencedImage):
    """A registered ``ID3D11Texture2D``.

    Args:
        registration: of the texture.
        memory: where linear buffers come from.
        info: the array of its level 0.
        shown: what maps of that show.
        writes: what the owner records of its writes.
        surfaces: registered so that surface objects may be made.
        levels, layers: how many there are.
        texture: the COM object, referenced until the end; 0 for one that is none.
    """

    kind = "D3d11"

    def __init__(
        self,
        registration: Registration,
        memory: DeviceMemoryResource,
        info: ArrayInfo,
        shown: ImageLayout,
        writes: Writes,
        *,
        surfaces: bool,
        levels: int,
        layers: int,
        texture: int,
    ) -> None:
        super().__init__(registration.state, memory, shown.layout, surfaces=surfaces)
        self.registration = registration
        self.format = shown.format
        self.writes = writes
        self._planes = shown.planes
        self._info = info
        self._levels = levels
        self._layers = layers
        self._texture = texture

    def check(self, part: Part) -> None:
        """Inherited."""
        if not 0 <= part.level < self._levels or (part.level and self._planes is not None):
            last = 0 if self._planes is not None else self._levels - 1
            raise UsageError(f"{self}", got=f"level {part.level}", expected=f"0 to {last}")
        if not 0 <= part.layer < self._layers:
            raise UsageError(f"{self}", got=f"layer {part.layer}", expected=f"0 to {self._layers - 1}")

    def acquire(self, stream: Stream) -> Block:
        """Inherited. After the writes recorded, and after what Direct3D was given before this call."""
        self.writes.order(stream, self._uses(), self)
        return self.registration.map(stream)

    def release(self, stream: Stream, error: BaseException | None = None) -> None:
        """Inherited."""
        self.registration.end_map(stream, error)

    def array(self, part: Part) -> tuple[int, ArrayInfo, int, Layout]:
        """Inherited. The driver's word for the texels is checked against the one it gave at registration."""
        driver = self.state.driver
        array = driver.graphics_array(self.registration.handle, part.layer, part.level)
        found = driver.array_info(array, self.state.device)
        expected = self._info._replace(
            width=max(self._info.width >> part.level, 1), height=max(self._info.height >> part.level, 1)
        )
        if found != expected:
            raise UnsupportedError(f"{self}", got=found, expected=expected, reason="format")
        if part.level == 0:
            return array, found, 0, self.layout
        shape = (max(found.height, 1), found.width, self.format.channels)
        return array, found, 0, Layout.of(shape, self.format.dtype)

    def destroy(self) -> None:
        """Inherited. The registration ends before the texture is let go of."""
        self.registration.unregister()
        self.drop_linear()
        if self._texture:
            com.release(self._texture)

    def _uses(self) -> Block:
        return self.registration.uses

    def __str__(self) -> str:
        return f"Direct3D 11 texture of {self._info.width} x {self._info.height} texels"


def open_texture(
    state: DeviceState,
    texture: int,
    writes: Writes,
    carried: Carried,
    memory: DeviceMemoryResource | None,
) -> D3d11Image:
    """Check and register a texture.

    Args:
        state: the device.
        texture: the COM object; on the simulated device the number of one of its fakes.
        writes: what the owner records of its writes.
        carried: the image that its texels carry.
        memory: where linear buffers come from.

    Raises: see :meth:`CudaHandle.from_d3d11`.
    """
    if not state.capabilities.graphics_d3d11:
        raise UnsupportedError(
            "Direct3D 11 interop",
            got=f"the {state.driver.name} driver here",
            expected="CUDA on Windows",
            hint="Import shared memory by descriptor or handle: cuglue.external",
            reason="platform",
        )
    if isinstance(texture, bool) or not isinstance(texture, int) or texture <= 0:
        raise UsageError("ID3D11Texture2D", got=shown(texture), expected="the address of one: an int above 0")
    described = None if state.capabilities.simulated else com.describe(texture)
    format = None if described is None else check_description(described)
    with Undo(state.retire) as undo, explained(state.driver, state.device):
        if described is not None:
            com.protect_device(texture)
            com.add_ref(texture)
            undo.then(com.release, texture)
        handle, surfaces = _register(state, texture)
        registration = Registration(state, handle)
        undo.then(registration.unregister)
        info = _probe(state, registration)
        if described is not None:
            _compare(described, format, info)
        visible = image_layout(
            format or plain_format(texel_of(info)), carried, info.width, max(info.height, 1)
        )
        if surfaces:
            image_copier(state).prepare(info.width * info.texel_bytes, 0)
        return D3d11Image(
            registration,
            image_memory(state, memory),
            info,
            visible,
            writes,
            surfaces=surfaces,
            levels=1 if described is None else described.levels,
            layers=1 if described is None else described.layers,
            texture=0 if described is None else texture,
        )


def check_description(described: Description) -> Format:
    """The format of a texture that CUDA can register; asked before the driver, which says only "invalid".

    Raises:
        UnsupportedError: it does not register; the message names format or flag, and the way out.
    """
    found = by_dxgi(described.dxgi)
    what = f"a Direct3D 11 texture of DXGI format {described.dxgi} ({found})"
    if not found.registers:
        raise UnsupportedError(f"{what}: {found.reason}", reason="format", hint=found.way_out)
    if found.packing is not Packing.PLAIN:
        raise UnsupportedError(
            f"{what} has several planes",
            hint="Copy its planes to textures of R8 and R8G8, and register those",
            reason="format",
        )
    if described.samples > 1:
        raise UnsupportedError(
            f"{what} is multisampled",
            got=f"{described.samples} samples",
            hint="Resolve it first (ID3D11DeviceContext::ResolveSubresource)",
            reason="multisample",
        )
    if described.bind_flags & DEPTH_STENCIL:
        raise UnsupportedError(
            f"{what} is bound as depth", hint="Draw the depth into an R32_FLOAT texture", reason="format"
        )
    if described.misc_flags & SHARED:
        raise UnsupportedError(
            f"{what} is shared, and CUDA registers no shared textures",
            got=f"MiscFlags 0x{described.misc_flags:X}",
            hint="Import it by its handle: cuglue.external.import_image(D3D11Texture(handle), ...)",
            reason="shared",
        )
    return found


def _compare(described: Description, format: Format | None, info: ArrayInfo) -> None:
    """Refuse a texture of which CUDA and Direct3D say different things."""
    assert format is not None
    expected = described.width, described.height, format.texel
    found = info.width, max(info.height, 1), texel_of(info)
    if found != expected:
        raise LayoutError(
            "CUDA sees another texture than Direct3D describes",
            got=f"{found[0]} x {found[1]} texels of {found[2]}",
            expected=f"{expected[0]} x {expected[1]} texels of {expected[2]}",
        )


def _register(state: DeviceState, texture: int) -> tuple[int, bool]:
    """``(resource, surfaces)``: for surface access where the driver takes it, else plainly."""
    driver = state.driver
    if state.capabilities.surfaces:
        try:
            return driver.d3d11_register(texture, RegisterFlags.SURFACE_LDST, state.device), True
        except DriverError:
            pass  # asked again without: if that fails too, it was not the surface access
    return driver.d3d11_register(texture, RegisterFlags.NONE, state.device), False


def _probe(state: DeviceState, registration: Registration) -> ArrayInfo:
    """The array of level 0; what it holds is not looked at."""
    stream = as_stream(0, device=state.device, driver=state.driver)
    registration.map(stream)
    try:
        array = state.driver.graphics_array(registration.handle, 0, 0)
        info = state.driver.array_info(array, state.device)
    except BaseException as error:
        registration.undo_map(stream, error)
        raise
    registration.unmap(stream)
    return info
