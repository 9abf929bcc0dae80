"""Asking the application for memory back before an allocation fails.

Owns the attempts and their bound. Must not know what the application gives back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..arguments import shown, whole_of
from ..core.device import device_state
from ..core.stream import Stream
from ..errors import CuglueError, OutOfMemory, UsageError
from .adaptor import Adaptor
from .block import UNTAGGED
from .desks import Home
from .entries import Entry
from .hot import Way
from .resource import DeviceMemoryResource


@dataclass(frozen=True, slots=True)
class AllocationFailure:
    """What a callback is told.

    Attributes:
        need: bytes asked for.
        free: bytes that the device has free, or None if it does not say.
        attempt: 1 for the first call of the callback for this request, 2 for the second, ...
        tag: of the request.
        error: why it failed.
    """

    need: int
    free: int | None
    attempt: int
    tag: str
    error: OutOfMemory


class FailureCallbackResource(Adaptor):
    """Calls ``callback`` when there is no memory, and tries again as long as it answers True.

    The callback may free, clear caches, collect garbage. What it allocates here itself is not retried, so that it
    cannot call itself.
    """

    def __init__(
        self,
        upstream: DeviceMemoryResource,
        callback: Callable[[AllocationFailure], bool],
        max_attempts: int = 3,
    ) -> None:
        """Put a callback over ``upstream``.

        Args:
            upstream: where memory comes from.
            callback: True if it gave something back and trying again makes sense.
            max_attempts: most calls of the callback for one request.
        """
        super().__init__(upstream)
        if not callable(callback):
            raise UsageError("failure callback", got=shown(callback), expected="something to call")
        self._callback = callback
        self._max_attempts = whole_of("max_attempts", max_attempts, 1)
        self._local = threading.local()

    def _allocate(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        try:
            return self._take(nbytes, stream, tag, kind)
        except OutOfMemory as error:
            if getattr(self._local, "inside", False):
                raise
            return self._try_again(partial(self._take, nbytes, stream, tag, kind), nbytes, tag, error)

    def _way(self, take_back: Callable[[Entry], None]) -> Way | None:
        way = self._way_below(FailureCallbackResource, take_back)
        if way is None:
            return None
        take_below = way.take

        def take(nbytes: int, home: Home, quiet: bool) -> Entry:
            try:
                return take_below(nbytes, home, quiet)
            except OutOfMemory as error:
                if getattr(self._local, "inside", False):
                    raise
                entry: Entry = self._try_again(
                    partial(take_below, nbytes, home, quiet), nbytes, UNTAGGED, error
                )
                return entry

        return way.wrapped(take, way.give)

    def _try_again(self, again: Callable[[], Any], nbytes: int, tag: str, error: OutOfMemory) -> Any:
        try:
            for attempt in range(1, self._max_attempts + 1):
                if not self._ask(AllocationFailure(nbytes, self._free(), attempt, tag, error)):
                    break
                device_state(self.driver, self.device).retire.run_forgotten()
                try:
                    return again()
                except OutOfMemory as second:
                    error = second
            raise error
        finally:
            del error  # else it and this frame keep each other alive

    def _ask(self, failure: AllocationFailure) -> bool:
        self._local.inside = True
        try:
            return bool(self._callback(failure))
        except Exception as second:  # noqa: BLE001 - the first failure is what the caller has to see
            failure.error.add_note(f"the failure callback raised {type(second).__name__}: {second}")
            return False
        finally:
            self._local.inside = False

    def _free(self) -> int | None:
        try:
            return self.driver.memory_info(self.device).free
        except CuglueError:
            return None
