"""Vulkan as the owner of memory and semaphores that others import by fd; what a renderer would export.

Needs the ``vulkan`` package and a loader. One device, found by UUID, no queue work: memory is read and written through
the importer, semaphores from the host.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import vulkan as vk

OPAQUE_MEMORY = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT
OPAQUE_SEMAPHORE = vk.VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT


class VulkanDevice:
    """A device that exports; ``with`` frees everything made through it.

    Args:
        uuid: the 16 bytes that name the GPU across APIs, or None for the first device.
    """

    def __init__(self, uuid: bytes | None, semaphores: bool = True) -> None:
        application = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 2, 0))
        self._instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=application), None)
        self._memory: list[Any] = []
        self._semaphores: list[Any] = []
        self._physical = next(
            device
            for device in vk.vkEnumeratePhysicalDevices(self._instance)
            if uuid is None or _uuid(device) == uuid
        )
        extensions = ["VK_KHR_external_memory_fd"] + ["VK_KHR_external_semaphore_fd"] * semaphores
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=0, queueCount=1, pQueuePriorities=[1.0])
        features = vk.VkPhysicalDeviceTimelineSemaphoreFeatures(timelineSemaphore=vk.VK_TRUE)
        wanted = vk.VkDeviceCreateInfo(
            pNext=features, pQueueCreateInfos=[queue], ppEnabledExtensionNames=extensions
        )
        self._device = vk.vkCreateDevice(self._physical, wanted, None)

    def _call(self, name: str) -> Any:
        return vk.vkGetDeviceProcAddr(self._device, name)

    def export_memory(self, nbytes: int) -> tuple[int, int]:
        """``(fd, allocation size)`` of device memory usable as a storage buffer. The caller owns the fd."""
        external = vk.VkExternalMemoryBufferCreateInfo(handleTypes=OPAQUE_MEMORY)
        usage = vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        wanted = vk.VkBufferCreateInfo(
            pNext=external, size=nbytes, usage=usage, sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE
        )
        buffer = vk.vkCreateBuffer(self._device, wanted, None)
        needs = vk.vkGetBufferMemoryRequirements(self._device, buffer)
        types = vk.vkGetPhysicalDeviceMemoryProperties(self._physical).memoryTypes
        index = next(
            i
            for i, kind in enumerate(types)
            if needs.memoryTypeBits >> i & 1 and kind.propertyFlags & vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT
        )
        export = vk.VkExportMemoryAllocateInfo(handleTypes=OPAQUE_MEMORY)
        allocation = vk.VkMemoryAllocateInfo(pNext=export, allocationSize=needs.size, memoryTypeIndex=index)
        memory = vk.vkAllocateMemory(self._device, allocation, None)
        self._memory.append((buffer, memory))
        vk.vkBindBufferMemory(self._device, buffer, memory, 0)
        get = vk.VkMemoryGetFdInfoKHR(memory=memory, handleType=OPAQUE_MEMORY)
        return int(self._call("vkGetMemoryFdKHR")(self._device, get)), int(needs.size)

    def export_semaphore(self, timeline: bool) -> tuple[int, Any]:
        """``(fd, semaphore)``, a timeline starting at 0 or a binary one. The caller owns the fd."""
        kind = vk.VkSemaphoreTypeCreateInfo(
            pNext=vk.VkExportSemaphoreCreateInfo(handleTypes=OPAQUE_SEMAPHORE),
            semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE if timeline else vk.VK_SEMAPHORE_TYPE_BINARY,
            initialValue=0,
        )
        semaphore = vk.vkCreateSemaphore(self._device, vk.VkSemaphoreCreateInfo(pNext=kind), None)
        self._semaphores.append(semaphore)
        get = vk.VkSemaphoreGetFdInfoKHR(semaphore=semaphore, handleType=OPAQUE_SEMAPHORE)
        return int(self._call("vkGetSemaphoreFdKHR")(self._device, get)), semaphore

    def value(self, semaphore: Any) -> int:
        """Value that a timeline semaphore has reached."""
        return int(vk.vkGetSemaphoreCounterValue(self._device, semaphore))

    def signal(self, semaphore: Any, value: int) -> None:
        """Set a timeline semaphore from the host."""
        vk.vkSignalSemaphore(self._device, vk.VkSemaphoreSignalInfo(semaphore=semaphore, value=value))

    def wait(self, semaphore: Any, value: int, seconds: float) -> None:
        """Block until a timeline semaphore has reached ``value``; raises ``vk.VkTimeout``."""
        info = vk.VkSemaphoreWaitInfo(pSemaphores=[semaphore], pValues=[value])
        vk.vkWaitSemaphores(self._device, info, int(seconds * 1e9))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for semaphore in self._semaphores:
            vk.vkDestroySemaphore(self._device, semaphore, None)
        for buffer, memory in self._memory:
            vk.vkDestroyBuffer(self._device, buffer, None)
            vk.vkFreeMemory(self._device, memory, None)
        vk.vkDestroyDevice(self._device, None)
        vk.vkDestroyInstance(self._instance, None)


def _uuid(device: Any) -> bytes:
    identity = vk.VkPhysicalDeviceIDProperties()
    # The binding's own wrapper makes the outer struct itself and so cannot take a chained one.
    properties = vk.ffi.new("VkPhysicalDeviceProperties2 *")
    properties.sType = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2
    properties.pNext = vk.ffi.addressof(identity) if vk.ffi.typeof(identity).kind == "struct" else identity
    vk.lib.vkGetPhysicalDeviceProperties2(device, properties)
    return bytes(vk.ffi.buffer(identity.deviceUUID, 16))
