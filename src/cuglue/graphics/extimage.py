"""Images of another API: an array over an imported allocation, at whatever size the adapter wants to be told.

Owns the ladder of sizes (contracts A25) and the order in which array and allocation are given back. Must not know maps.
"""

from __future__ import annotations

from ..core.device import DeviceState
from ..driver.protocol import ArrayInfo
from ..errors import DriverError, UsageError
from ..exchange.tokens import call_site
from ..formats import Format
from ..lifecycle import Owned
from .extmemory import ExternalMemory, Imported
from .imports import memory_by_fd, memory_by_handle
from .planes import array_info
from .undo import Undo
from .winhandles import MemoryHandle

#: How often an image's own bytes an allocation is tried to be, in this order.
FACTORS = (1, 2, 4)
SMALLEST = 4096
#: Devices whose allocations are larger than their images, with the factor that was found; for the whole process.
_padded: dict[tuple[str, bytes], int] = {}


class ExternalImage(Owned):
    """An image in an imported allocation. Made by :func:`cuglue.external.import_image`.

    Give it to :meth:`CudaHandle.from_external_image`; it is given back when that handle is closed. Without a handle,
    close it.

    Attributes:
        memory: the allocation.
        array: the driver's array.
        info: its extents and texel.
        format: what its texels are.
        taken: whether a handle gives it back.
    """

    taken = True  # until there is something to give back

    def __init__(self, memory: ExternalMemory, offset: int, info: ArrayInfo, format: Format) -> None:
        """Made by :func:`import_image`.

        Raises:
            DriverError: the driver makes no such array of the allocation, which is as it was.
        """
        assert isinstance(memory.source, Imported), "virtual memory holds no images"
        driver = memory.state.driver
        memory.add_user()
        try:
            mipmapped, self.array = driver.external_array(memory.source.handle, offset, info)
        except BaseException:
            memory.cancel_user()
            raise
        self.memory = memory
        self.info = info
        self.format = format
        self.taken = False
        self._rest = [lambda: driver.external_array_free(mipmapped), memory.drop_user]
        self._own()
        self._created_at = "{}:{}".format(*call_site())

    def take(self) -> None:
        """Become the one who gives the image back.

        Raises:
            UsageError: another handle has it. ClosedError: it was closed.
        """
        self._check_open()
        if self.taken:
            raise UsageError(f"{self!r}", got="a second handle", expected="one handle of an image")
        self.taken = True

    def _close(self) -> None:
        """Give back the array, then the allocation, each once. Goes on where it failed before."""
        while self._rest:
            self._rest[0]()
            del self._rest[0]

    def _forgotten(self) -> None:
        self.memory.state.retire.forget(self._close)

    def __del__(self) -> None:
        if not self.taken:  # else its handle answers for it
            super().__del__()

    def __repr__(self) -> str:
        return f"ExternalImage({self.info.width} x {self.info.height} {self.format}, device={self.memory.device})"


def open_image(
    state: DeviceState,
    source: int | MemoryHandle,
    format: Format,
    width: int,
    height: int,
    *,
    size: int | None,
    offset: int,
    dedicated: bool,
) -> ExternalImage:
    """The image behind a descriptor or Windows handle.

    Args:
        state: the device.
        source: stays the caller's.
        format, width, height: the image, in texels.
        size: of the allocation in bytes; None: unknown, so the sizes of the ladder are tried.
        offset: of the image in the allocation, in bytes.
        dedicated: the owner made a dedicated allocation.

    Raises:
        DriverError: no size is taken; every import that was tried was given back.
    """
    info = array_info("imported image", format, width, height)
    tight = offset + width * height * info.texel_bytes
    key = state.driver.name, state.driver.device_uuid(state.device)
    sizes = [size] if size is not None else [max(tight, SMALLEST) * f for f in _factors(key)]
    for rung in sizes:
        try:
            image = _try(state, source, rung, dedicated, offset, info, format)
        except DriverError:
            if rung == sizes[-1]:
                raise
            continue
        if size is None:
            _padded[key] = rung // max(tight, SMALLEST)
        return image
    raise AssertionError("no rung")


def _factors(key: tuple[str, bytes]) -> tuple[int, ...]:
    """The factors to try: what fitted this device's last image first."""
    known = _padded.get(key, FACTORS[0])
    return (known, *(factor for factor in FACTORS if factor != known))


def _try(
    state: DeviceState,
    source: int | MemoryHandle,
    nbytes: int,
    dedicated: bool,
    offset: int,
    info: ArrayInfo,
    format: Format,
) -> ExternalImage:
    """One rung: import and array, or neither."""
    if isinstance(source, int):
        handle = memory_by_fd(state, source, nbytes, dedicated=dedicated, dma_buf=False)
        kind = "opaque"
    else:
        handle = memory_by_handle(state, source, nbytes, dedicated=dedicated or source.dedicated)
        kind = type(source).__name__
    memory = ExternalMemory(state, Imported(state, handle), nbytes, kind)
    with Undo(state.retire) as undo:
        undo.then(memory.close)
        return ExternalImage(memory, offset, info, format)
