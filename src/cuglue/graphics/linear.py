"""Linear buffers: device memory that shows the contents of an image.

Owns their life. Must not know images, copies or maps.
"""

from __future__ import annotations

from ..core.stream import Stream
from ..errors import MapUnavailableError, OutOfMemory, UseAfterFree
from ..lifecycle import BlockState
from ..memory.block import DeviceBlock
from ..memory.resource import DeviceMemoryResource

TAG = "image copy"


class Linear:
    """A linear buffer: it lives as long as anybody refers to this object.

    The last reference may go on any thread: the retire queue gives the memory back, after everything known to use it.
    """

    __slots__ = ("__weakref__", "_memory", "block")

    def __init__(self, memory: DeviceMemoryResource, block: DeviceBlock) -> None:
        self._memory = memory
        self.block = block

    def __del__(self) -> None:
        if not hasattr(self, "block"):
            return  # its making was interrupted
        block, memory = self.block, self._memory
        block.stream.state.retire.forget(lambda: _free(memory, block))


def _free(memory: DeviceMemoryResource, block: DeviceBlock) -> None:
    try:
        memory.deallocate(block)
    except UseAfterFree:
        pass  # the resource was closed first, and freed everything


class LinearStore:
    """The linear buffers of one handle: one, kept from map to map; more only while several are needed at once."""

    def __init__(self, memory: DeviceMemoryResource) -> None:
        self._memory = memory
        self._spare: Linear | None = None

    def take(self, nbytes: int, stream: Stream, what: object) -> Linear:
        """The buffer that is kept, if it is free, alive and large enough; else a new one.

        Raises:
            MapUnavailableError: there is no memory for ``what``.
        """
        linear, self._spare = self._spare, None
        if linear is not None and linear.block.state is BlockState.LIVE and linear.block.nbytes >= nbytes:
            return linear
        try:
            block = self._memory.allocate(nbytes, stream, TAG)
        except OutOfMemory as error:
            raise MapUnavailableError(
                f"{what}: no memory for its linear copy",
                got=f"{nbytes} bytes asked for",
                hint=f"Free memory, or give the handle a larger resource ({error})",
                reason="alloc_failed",
            ) from error
        try:
            return Linear(self._memory, block)
        except BaseException:  # an interrupt: nobody else knows the block
            self._memory.deallocate(block)
            raise

    def give(self, linear: Linear | None) -> None:
        """Keep a buffer for the next map; one is enough."""
        if self._spare is None:
            self._spare = linear

    def drop(self) -> None:
        """Keep none; exports that are alive keep theirs."""
        self._spare = None
