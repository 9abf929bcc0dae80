"""One driver allocation per block, and nothing kept: the resource to compare with, and the one a sanitizer sees.

Owns the choice between the driver's asynchronous and synchronous path. Must not pool or track anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from ..arguments import shown
from ..core.stream import Stream
from ..driver.protocol import Driver
from ..errors import UnsupportedError, UsageError
from ..lifecycle import BlockState
from .entries import Entry
from .hot import Way, driver_way
from .layered import keeps
from .source import SourceResource
from .stream_pool import StreamPool

_FREED = BlockState.FREED
Mode = Literal["auto", "async", "sync"]


class DirectCudaResource(SourceResource):
    """Non-pooled device memory.

    A block counts as free once it is given back. Uses of it on other streams are not tracked (see
    :class:`AsyncCudaResource`), but for those that this library itself made with the block.
    """

    def __init__(
        self,
        device: int = 0,
        device_ordinal: int | None = None,
        *,
        mode: Mode = "auto",
        check: bool = True,
        stream_pool: StreamPool | None = None,
        driver: str | Driver | None = None,
    ) -> None:
        """Make the resource; calls no driver.

        Args:
            device: ordinal that the driver knows the device by.
            device_ordinal: ordinal that the resource and its blocks go by; the same unless ``check`` is False.
            mode: ``"async"`` allocates and frees in stream order; ``"sync"`` waits for the device at each free, and
                compute-sanitizer sees every block; ``"auto"`` is ``"async"`` where the device can. Decided once: a
                block is always freed by the path that allocated it.
            check: refuse two different ordinals.
            stream_pool: what an int stands for where a stream is expected: an id of this pool. None: a handle.
            driver: where the memory comes from, or its name ("sim": a new simulated device); None: the current one.
        """
        if not isinstance(mode, str) or mode not in get_args(Mode):
            raise UsageError("mode", got=shown(mode), expected=f"one of {', '.join(get_args(Mode))}")
        super().__init__(device, device_ordinal, check=check, stream_pool=stream_pool, driver=driver)
        self.mode: Mode = mode

    @property
    def asynchronous(self) -> bool:
        """Whether blocks are allocated and freed in stream order."""
        able = self._state.capabilities.async_memory
        if self.mode == "async" and not able:
            raise UnsupportedError(
                f"{self!r} in mode 'async'",
                got="a device without stream-ordered memory",
                hint="Use mode='auto' or mode='sync'",
                reason="async_memory",
            )
        return able and self.mode != "sync"

    def _get_ready(self, nbytes: int) -> None:
        super()._get_ready(nbytes)
        self._ordered = self.asynchronous
        self._plain_calls = self._ordered and keeps(self, DirectCudaResource, "_take", "_drop")

    def _way(self, take_back: Callable[[Entry], None]) -> Way | None:
        if not keeps(self, DirectCudaResource, "_take", "_drop", "_allocate", "_deallocate"):
            return None
        return driver_way(self, take_back)

    def _take(self, nbytes: int, stream: Stream) -> int:
        if self._ordered:
            return super()._take(nbytes, stream)
        self._state.refuse_captures("allocate")
        return self._driver.malloc(nbytes, self._device)

    def _drop(self, ptr: int, stream: Stream) -> None:
        if self._ordered:
            super()._drop(ptr, stream)
        else:
            self._state.refuse_captures("free memory")
            self._driver.free(ptr, self._device)

    def _deallocate(self, block: Any) -> None:
        self._release(block)
        block.state = _FREED  # by way of RETIRED: the free is issued already
