"""The driver's calls for an array's memory: without its methods where nobody stands in front of them.

Owns what stands in for a driver without shortcuts, the question whether a stream captures, and what a refusal means.
Must not know how memory is handed out: see :mod:`.hot`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..driver.protocol import CaptureStatus
from ..errors import CuglueError, DriverError, OutOfMemory
from .desks import Home

if TYPE_CHECKING:
    from .source import SourceResource

_NO_CAPTURE = CaptureStatus.NONE


class NoShortcuts:
    """Of a driver that has none: its methods are called."""

    on = False
    refusals = (OutOfMemory, DriverError)
    malloc = free = current = captures = None
    error = ()

    @staticmethod
    def failure(error: BaseException, call: str, nbytes: int | None = None) -> BaseException:
        """``error`` is one of ours."""
        return error


def shortcuts_of(driver: Any) -> Any:
    """The functions that may be called in the place of methods of ``driver``, while they are ``on``."""
    return getattr(driver, "shortcuts", None) or NoShortcuts


def capture_question(driver: Any, shortcuts: Any) -> Callable[[int], bool]:
    """``(stream)``: whether that one, which can, captures a graph."""
    quick = shortcuts.captures

    def captures(handle: int) -> bool:
        if shortcuts.on:
            try:
                found: bool = quick(handle)
                return found
            except RuntimeError:
                pass  # the driver's method says it in our words
        return driver.capture_status(handle) is not _NO_CAPTURE

    return captures


def free_refused(shortcuts: Any, home: Home, error: BaseException) -> BaseException:
    """Why a free on the stream of ``home`` failed with ``error``, as an error of ours: maybe it captures."""
    if isinstance(error, shortcuts.refusals) and home.asks:
        try:
            home.stream.refuse_capture("free memory")
        except CuglueError as refusal:
            return refusal
    ours: BaseException = shortcuts.failure(error, "cudaFreeAsync")
    return ours


def take_again(source: SourceResource, shortcuts: Any, nbytes: int, home: Home, error: Exception) -> int:
    """Address of memory for which the driver had no room, or none at first; raises ``error`` as one of ours."""
    ours = shortcuts.failure(error, "cudaMallocAsync", nbytes)
    try:
        address = source._take_again(nbytes, home.stream, ours)
        if address is None:
            raise ours from (None if ours is error else error)
        return address
    finally:
        del ours, error  # else they and this frame keep each other alive
