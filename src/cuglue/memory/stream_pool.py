"""Streams by number: a bounded set of non-blocking streams for who wants to name them by small ints.

Owns the ids. Must not know what is queued on the streams.
"""

from __future__ import annotations

import threading

from ..arguments import whole, whole_of
from ..core.device import check_device, device_state
from ..core.stream import Stream, as_stream
from ..driver.registry import current_driver
from ..errors import StreamPoolCapacity
from .streams import OwnStream

DEFAULT = 0


class StreamPool:
    """Hands out up to ``max_streams`` streams of a device; id 0 is the default stream and counts for nothing."""

    def __init__(self, device: int = 0, max_streams: int = 16) -> None:
        """Make the pool; makes no stream.

        Args:
            device: ordinal.
            max_streams: most streams besides the default one; below 1 counts as 1.

        Raises:
            UsageError: no such device.
        """
        self.device = whole_of("device ordinal", device)
        self.max_streams = max(1, whole_of("max_streams", max_streams, -(2**63), expected="an int"))
        self._driver = current_driver()
        if self.device:  # the first one is there with any driver
            check_device(self._driver, self.device)
        self._lock = threading.Lock()
        self._streams: dict[int, Stream] = {}
        self._next = 1

    def acquire(self) -> int:
        """The id of a new stream; ids are never used again. Never gives the default stream.

        Raises:
            StreamPoolCapacity: all streams were handed out.
            DriverError: the driver could not make one; the id is not used up.
        """
        state = device_state(self._driver, self.device)
        state.retire.run_forgotten()  # streams that were released before, and whose last user has gone since
        number = 0
        try:
            with self._lock:
                if len(self._streams) >= self.max_streams:
                    raise StreamPoolCapacity(
                        repr(self),
                        got="one more stream",
                        expected=f"at most {self.max_streams}",
                        hint="Release one, or make the pool larger",
                        max_streams=self.max_streams,
                    )
                stream = as_stream(OwnStream(state), device=self.device, driver=self._driver)
                number = self._next
                self._next += 1
                self._streams[number] = stream
        except BaseException:
            if number:  # interrupted: nobody knows it
                self._streams.pop(number, None)
            raise
        return number

    def resolve(self, number: int) -> Stream | None:
        """The stream with this id; None if there is none. 0 is the legacy default stream, always."""
        known = whole(number)
        if known == DEFAULT:
            return as_stream(0, device=self.device, driver=self._driver)
        return None if known is None else self._streams.get(known)

    def release(self, number: int) -> None:
        """Take a stream back; it is destroyed once nothing is ordered by it any more. Unknown ids do nothing."""
        known = whole(number)
        if known is not None:
            with self._lock:
                self._streams.pop(known, None)  # its record ends here, unless somebody else has it
            device_state(self._driver, self.device).retire.run_forgotten()

    def __len__(self) -> int:
        return len(self._streams)

    def __repr__(self) -> str:
        return f"StreamPool(device={self.device}, {len(self)} of {self.max_streams} streams)"
