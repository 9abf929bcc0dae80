"""Memory of another owner, for tests: a file of memory that the host sees, and a handle over it."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuglue import external
from cuglue.core.device import device_state
from cuglue.driver.protocol import Driver
from cuglue.graphics.handle import CudaHandle


def memory_file(nbytes: int, content: bytes = b"") -> int:
    """A descriptor of new memory: what a renderer would export."""
    fd = os.memfd_create("cuglue-test")
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, content, 0)
    return fd


def descriptors() -> list[str]:
    """What is open in this process."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing's own
            pass
    return sorted(found)


def settled(driver: Any, device: int = 0) -> dict[str, int]:
    """What the driver holds once nothing waits any more, events and kernels aside."""
    gc.collect()
    device_state(driver, device).retire.drain(block=True)
    return {kind: n for kind, n in driver.inventory().items() if kind not in ("events", "kernels")}


@dataclass
class FileSubject:
    """External memory with a handle, and the host's way to its bytes."""

    handle: CudaHandle
    driver: Driver
    file: mmap.mmap
    offset: int
    opaque: bool = False

    def get(self) -> np.ndarray[Any, Any]:
        self.driver.device_synchronize(0)
        return np.frombuffer(self.file[self.offset : self.offset + self.handle.size], np.uint8).copy()

    def put(self, data: np.ndarray[Any, Any]) -> None:
        self.driver.device_synchronize(0)
        self.file[self.offset : self.offset + data.size] = data.tobytes()


@contextmanager
def external_memory(driver: Driver, nbytes: int = 8192, offset: int = 256) -> Iterator[FileSubject]:
    """A range of imported memory with a handle."""
    fd = memory_file(nbytes)
    with mmap.mmap(fd, nbytes) as file:
        memory = external.import_fd(fd, allocation_size=nbytes)
        os.close(fd)
        with CudaHandle.from_external(memory, offset=offset, size=1000) as handle:
            yield FileSubject(handle, driver, file, offset)
