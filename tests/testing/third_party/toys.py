"""A package of somebody else: a resource, a handle's functions and an array, built on cuglue's public names."""

import numpy as np

import cuglue
from cuglue.core.block import Block
from cuglue.driver.protocol import MemoryType
from cuglue.exchange import BlockOwner, Exporter
from cuglue.layout import Layout


class CountingResource(cuglue.DeviceMemoryResource):
    """Counts the allocations of another resource."""

    def __init__(self):
        self.upstream, self.count = cuglue.AsyncCudaResource(), 0

    def allocate(self, nbytes, stream=None, tag="untagged"):
        block = self.upstream.allocate(nbytes, stream, tag)
        self.count += 1
        return block

    def deallocate(self, block):
        self.upstream.deallocate(block)

    device_ordinal = property(lambda self: self.upstream.device_ordinal)
    bytes_outstanding = property(lambda self: self.upstream.bytes_outstanding)

    def reap_pending(self, *, block=True):
        self.upstream.reap_pending(block=block)

    def close(self):
        self.upstream.close()


class Canvas:
    """Device memory that is shown somewhere; CUDA may have it between map and unmap."""

    def __init__(self, driver, nbytes):
        self.driver, self.nbytes = driver, nbytes
        self.ptr = driver.malloc(nbytes, 0)

    def map(self, resource):
        return self.ptr, self.nbytes

    def unmap(self, resource):
        pass

    def unregister(self, resource):
        pass

    def close(self):
        self.driver.device_synchronize(0)
        self.driver.free(self.ptr, 0)


class HostArray(Exporter):
    """A NumPy array in pinned memory, given to all array libraries for as long as it is open."""

    def __init__(self, array, readonly=False):
        self.driver = cuglue.current_driver()
        self.device_ptr = self.driver.host_alloc(max(array.nbytes, 1))
        self.layout = Layout.of(array.shape, array.dtype)
        memory = self.driver.host_view(self.device_ptr, max(array.nbytes, 1), True)
        np.ndarray(array.shape, array.dtype, memory)[...] = array
        block = Block(self.device_ptr, max(array.nbytes, 1), cuglue.as_stream(self.driver.Stream()))
        self.export_owner = BlockOwner(block, readonly=readonly, memory_type=MemoryType.PINNED)

    def close(self):
        self.export_owner.block.advance("deallocate")
        self.driver.host_free(self.device_ptr)
