"""What the tests of a memory resource are made of: the resource under test, streams, fills and contents.

Owns set-up and clean-up. Must not know any test.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.device import device_state
from ..core.stream import Stream, as_stream
from ..driver.protocol import Access, CopyKind
from ..memory.resource import DeviceMemoryResource
from ..memory.streams import OwnStream

Bytes = npt.NDArray[np.uint8]


class ResourceCase:
    """A memory resource and helpers to use it."""

    #: False for pinned memory: it is written and read by the host, after waiting for the stream.
    device_memory = True
    #: ``malloc`` is tested too; needs CuPy.
    cupy = True

    def make(self) -> DeviceMemoryResource:
        """A fresh resource."""
        raise NotImplementedError

    # --- helpers ------------------------------------------------------------------------------------------------
    @contextmanager
    def resource(self) -> Iterator[DeviceMemoryResource]:
        """A fresh resource; afterwards nothing may be out, and it closes without a warning."""
        made = self.make()
        before = made.bytes_outstanding
        yield made
        gc.collect()
        self.drain(made)
        made.reap_pending()
        assert made.bytes_outstanding == before, "what was given back must be free after a reap"
        made.close()
        made.close()

    def stream(self, resource: DeviceMemoryResource) -> Stream:
        """A stream of the resource's device."""
        driver = resource.driver
        return as_stream(OwnStream(device_state(driver, resource.device)), driver=driver)

    def drain(self, resource: DeviceMemoryResource) -> None:
        """Run what finalisers left."""
        device_state(resource.driver, resource.device).retire.run_forgotten()

    def fill(self, block: Any, value: int, stream: Stream) -> None:
        """Queue a fill of the whole block; the caller orders it."""
        if not self.device_memory:
            stream.synchronize()
            np.asarray(stream.driver.host_view(block.ptr, block.nbytes, True))[:] = value
            return
        stream.driver.fill_async(block.ptr, value, block.nbytes, stream.handle)
        stream.submit()

    def contents(self, block: Any, stream: Stream) -> Bytes:
        """The bytes of the block once ``stream`` got here."""
        if not self.device_memory:
            stream.synchronize()
            return np.array(stream.driver.host_view(block.ptr, block.nbytes, False))
        host: Bytes = np.zeros(block.nbytes, np.uint8)
        stream.driver.copy_async(host.ctypes.data, block.ptr, block.nbytes, CopyKind.D2H, stream.handle)
        stream.submit()
        stream.synchronize()
        return host

    @staticmethod
    def refused(kinds: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> Any:
        """``call`` raises one of ``kinds``; the error."""
        try:
            call()
        except kinds as error:
            return error
        raise AssertionError(f"expected {kinds}, but nothing was raised")

    def written(self, resource: DeviceMemoryResource, nbytes: int, value: int, stream: Stream) -> Any:
        """A block on ``stream`` with all bytes ``value``."""
        block = resource.allocate(nbytes, stream)
        self.fill(block, value, stream)
        block.finish(stream, Access.WRITE)
        return block
