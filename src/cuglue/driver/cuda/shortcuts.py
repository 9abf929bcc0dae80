"""CuPy's own functions, where a method of the driver would only pass its arguments on.

Owns which functions those are and when they may be called in the place of a method. Must not know who calls them. An
array's memory is two such calls and two questions, and the methods around them cost a tenth of it.
"""

from __future__ import annotations

from typing import Any

from cupy.cuda import get_current_stream

from ...errors import DriverError, OutOfMemory
from .calls import CUDARuntimeError, failure_of, runtime

_METHODS = frozenset(["malloc_async", "free_async", "stream_current", "capture_status"])


class Shortcuts:
    """On the only device, which is always current.

    Attributes:
        on: whether they may be called: nobody stands in front of the driver's methods.
        malloc, free: ``(bytes, stream)`` to an address, ``(address, stream)``.
        current: ``(device)`` to the current stream.
        captures: ``(stream)``: whether it captures. A default stream must not be asked.
        error: what they raise.
        refusals: what an allocation may raise, also by way of the methods.
    """

    __slots__ = ("captures", "current", "error", "free", "malloc", "on", "refusals")

    def __init__(self) -> None:
        self.on = True
        self.malloc: Any = runtime.mallocAsync
        self.free: Any = runtime.freeAsync
        self.current: Any = get_current_stream
        self.captures: Any = runtime.streamIsCapturing
        self.error: Any = CUDARuntimeError
        self.refusals: tuple[Any, ...] = (OutOfMemory, DriverError, CUDARuntimeError)

    def failure(self, error: BaseException, call: str, nbytes: int | None = None) -> BaseException:
        """``error`` of the function behind ``call``, as an error of ours; any other as it is."""
        return failure_of(error, call, nbytes) if isinstance(error, CUDARuntimeError) else error


class HasShortcuts:
    """The part of the driver that turns them off while one of the methods is replaced on the driver object."""

    shortcuts: Shortcuts | None = None

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        self._look(name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._look(name)

    def _look(self, name: str) -> None:
        if name in _METHODS and self.shortcuts is not None:
            self.shortcuts.on = _METHODS.isdisjoint(vars(self))
