"""Memory of a resource as bytes on the host, to look at.

Owns the way there, which host memory has another one of. Must not know what is looked for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..core.stream import Stream
from ..driver.protocol import CopyKind, MemoryType

Bytes = npt.NDArray[np.uint8]


def read_back(stream: Stream, *places: tuple[int, int]) -> list[Bytes]:
    """The bytes at each (address, size) once ``stream`` is there. Blocks the host."""
    driver = stream.driver
    found = [(ptr, np.zeros(nbytes, np.uint8)) for ptr, nbytes in places]
    pinned = (
        driver.pointer_info(places[0][0]).type is MemoryType.PINNED
    )  # a copy "from the device" is refused
    for ptr, host in found:
        if host.nbytes and not pinned:
            driver.copy_async(host.ctypes.data, ptr, host.nbytes, CopyKind.D2H, stream.handle)
    stream.synchronize()
    for ptr, host in found:
        if host.nbytes and pinned:
            host[...] = driver.host_view(ptr, host.nbytes, False)
    return [host for _, host in found]
