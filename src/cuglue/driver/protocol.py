"""What a driver is: ints in, ints out, one device call per method, no policy.

Owns the names and shapes of every device call cuglue makes. Must not know streams as objects, blocks, maps, arrays
or any policy: those live above. Everything that some driver cannot do is a field of :class:`Capabilities`, tested
by the caller before the call; a driver never falls back silently. Tracing, fault injection and call counts wrap a
driver from outside (``cuglue.testing``).

Conventions for every method
    * ``device`` is an ordinal, ``stream``/``event``/``resource``/... are handles, addresses and sizes are ints in
      bytes. Handle 0 of a stream is the legacy default stream, 1 the same by its own name, 2 the per-thread one.
    * These three are the same numbers on every device. They mean the streams of the device that the call names or
      that its event, kernel, semaphore or graphics resource belongs to; in any other call of the device that the
      handle says (:class:`DeviceStream`), and of the current one where it says none. Copies on a stream of one's own
      are refused, too, where the current device does not reach the memory.
    * A method named ``*_async`` or taking ``stream`` only enqueues, unless its docstring says that it blocks.
    * A refused call raises :class:`~cuglue.errors.DriverError` (``LaunchError`` for a launch, ``DevicePoisoned`` for
      a sticky fault) and leaves the driver as it was. The current device and context are as before after each call.
    * Blocking calls release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, NamedTuple, Protocol

LEGACY_STREAM = 1
PER_THREAD_STREAM = 2


class DeviceStream(int):
    """Handle of a stream that says its device. Needed where there are several only."""

    device: int

    def __new__(cls, handle: int, device: int) -> DeviceStream:
        self = super().__new__(cls, handle)
        self.device = device
        return self


class CopyKind(IntEnum):
    """Direction of a copy: H host, D device. The numbers are CUDA's, so that no copy has to look one up."""

    H2D = 1
    D2H = 2
    D2D = 3


class Access(IntEnum):
    """What an operation does with memory; ``|`` merges two uses (contracts B3).

    An int, because ``access & 2`` on every launch argument must cost nothing.
    """

    READ = 1
    WRITE = 2
    READ_WRITE = 3

    @property
    def reads(self) -> bool:
        """True if the operation reads."""
        return bool(int(self) & 1)

    @property
    def writes(self) -> bool:
        """True if the operation writes."""
        return bool(int(self) & 2)

    def __or__(self, other: int) -> Access:
        return Access(int(self) | int(other))


class MemoryType(IntEnum):
    """Where an address lives; the values are DLPack device types."""

    HOST = 1
    DEVICE = 2
    PINNED = 3
    MANAGED = 13


class CaptureMode(Enum):
    """How strictly a capture forbids unsafe calls elsewhere."""

    GLOBAL = "global"
    THREAD_LOCAL = "thread_local"
    RELAXED = "relaxed"


class CaptureStatus(Enum):
    """Whether a stream captures."""

    NONE = "none"
    ACTIVE = "active"
    INVALIDATED = "invalidated"


class RegisterFlags(Enum):
    """How a graphics object is registered."""

    NONE = "none"
    READ_ONLY = "read_only"
    WRITE_DISCARD = "write_discard"
    SURFACE_LDST = "surface_ldst"


class TexelKind(Enum):
    """How the bits of one channel are read."""

    UINT = "u"
    SINT = "i"
    FLOAT = "f"


class PointerInfo(NamedTuple):
    """What the driver knows of an address."""

    type: MemoryType
    device: int


class MemoryInfo(NamedTuple):
    """Memory of a device in bytes."""

    free: int
    total: int


class ArrayInfo(NamedTuple):
    """An opaque array: extents in texels (0 where the dimension is absent) and its texel."""

    width: int
    height: int
    depth: int
    bits: int  # of one channel
    channels: int
    kind: TexelKind

    @property
    def texel_bytes(self) -> int:
        """Bytes of one texel."""
        return self.bits // 8 * self.channels


class Span(NamedTuple):
    """A pointer argument of a kernel: the bytes it may touch, and the view a ``sim`` function gets of them."""

    ptr: int
    nbytes: int
    access: Access
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]  # bytes


class SurfaceArg(NamedTuple):
    """A surface or texture argument of a kernel: the object handle and how the kernel uses it."""

    handle: int
    access: Access


SimFunction = Callable[..., None]
"""``sim(grid, block, *args)``: does to NumPy views (and scalars) what the kernel does to device memory."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a driver can do on one device. Test a field before the call it guards."""

    device_type: (
        MemoryType  # DLPack type of ordinary device memory: DEVICE on CUDA, HOST on the simulated device
    )
    simulated: bool = False
    async_memory: bool = False  # malloc_async, free_async, pool_trim
    managed_memory: bool = False
    graphs: bool = False
    surfaces: bool = False  # array_*, surface_*, texture_*
    graphics_gl: bool = False
    graphics_d3d11: bool = False
    external_fd: bool = False
    external_dma_buf: bool = False
    external_win32: bool = False
    timeline_semaphores: bool = False
    virtual_memory: bool = False  # vmm_*
    context_events: bool = False  # context_record, context_wait
    host_callbacks: bool = False  # stream_callback
    pageable_read_at_once: bool = False  # copy_async has read ordinary host memory when it returns
    alignment: int = 512  # bytes; of every device allocation


class Driver(Protocol):
    """The whole driver surface. One ``grep "def "`` of this class lists every device call that cuglue can make."""

    name: str

    # --- devices ----------------------------------------------------------------------------------------------
    def device_count(self) -> int:
        """Number of devices."""

    def device_current(self) -> int:
        """Ordinal of the device that the array library uses on this thread."""

    def capabilities(self, device: int) -> Capabilities:
        """What this driver can do on ``device``; cached by the driver, cheap."""

    def device_name(self, device: int) -> str:
        """Marketing name."""

    def device_uuid(self, device: int) -> bytes:
        """16 bytes that identify the physical device across APIs."""

    def memory_info(self, device: int) -> MemoryInfo:
        """Free and total bytes."""

    def device_synchronize(self, device: int) -> None:
        """Block until all work of ``device`` is done; raises the fault that this reveals."""

    def pointer_info(self, ptr: int) -> PointerInfo:
        """Where an address lives; plain host memory is ``(HOST, 0)``."""

    # --- memory -----------------------------------------------------------------------------------------------
    def malloc(self, nbytes: int, device: int) -> int:
        """Allocate device memory, synchronous path. Raises OutOfMemory when there is none."""

    def free(self, ptr: int, device: int) -> None:
        """Free what :meth:`malloc` or :meth:`malloc_managed` gave; blocks until the device is done with it."""

    def malloc_async(self, nbytes: int, stream: int, device: int) -> int:
        """Allocate in stream order. Raises OutOfMemory when there is none."""

    def free_async(self, ptr: int, stream: int, device: int) -> None:
        """Free in stream order what :meth:`malloc_async` gave.

        A stream that captures refuses what no capture allocated, and the capture goes on: that a free is done says that
        its stream captures nothing.
        """

    def pool_trim(self, keep: int, device: int) -> None:
        """Let the driver's own pool give back what it caches beyond ``keep`` bytes."""

    def malloc_managed(self, nbytes: int, device: int) -> int:
        """Allocate memory that host and device share by migration."""

    def host_alloc(self, nbytes: int) -> int:
        """Allocate pinned host memory."""

    def host_free(self, ptr: int) -> None:
        """Free what :meth:`host_alloc` gave."""

    def host_view(self, ptr: int, nbytes: int, writable: bool) -> memoryview:
        """Bytes that the host can address: pinned and managed memory, and everything on the simulated device.

        The simulated device notes the view, so that host access which nothing ordered is reported. Plain device
        memory is refused with UnsupportedError.
        """

    # --- copies and fills -------------------------------------------------------------------------------------
    def copy_async(self, dst: int, src: int, nbytes: int, kind: CopyKind, stream: int) -> None:
        """Linear copy. From pageable host memory the driver may read the source before it returns."""

    def copy_2d_async(
        self,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        height: int,
        kind: CopyKind,
        stream: int,
    ) -> None:
        """Copy ``height`` rows of ``width`` bytes; pitches in bytes."""

    def copy_from_array_async(
        self, dst: int, dst_pitch: int, array: int, width: int, height: int, stream: int
    ) -> None:
        """Copy ``height`` rows of ``width`` bytes from the start of an opaque array to linear device memory."""

    def copy_to_array_async(
        self, array: int, src: int, src_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Copy ``height`` rows of ``width`` bytes from linear device memory to the start of an opaque array."""

    def fill_async(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """Set each byte to ``value`` (0-255)."""

    # --- streams ----------------------------------------------------------------------------------------------
    def stream_current(self, device: int) -> Any:
        """The array library's current stream of this thread as its own object (has ``.ptr``), or an int handle."""

    def stream_create(self, device: int) -> int:
        """Make a non-blocking stream; where there are several devices, the handle says its own."""

    def stream_destroy(self, stream: int) -> None:
        """Destroy it; queued work still runs. The handle may be given out again at once."""

    def stream_query(self, stream: int) -> bool:
        """True if all queued work is done; raises the fault that this reveals."""

    def stream_synchronize(self, stream: int) -> None:
        """Block until all queued work is done; raises the fault that this reveals."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Later work of ``stream`` runs after the last record of ``event``."""

    def stream_callback(self, stream: int, function: Callable[[], None]) -> None:
        """Run ``function`` on a driver thread once the queued work is done. It must not call the driver."""

    def capture_status(self, stream: int) -> CaptureStatus:
        """Whether ``stream`` captures; legal at any time."""

    # --- events -----------------------------------------------------------------------------------------------
    def event_create(self, device: int, timing: bool = False) -> int:
        """Make an event."""

    def event_destroy(self, event: int) -> None:
        """Destroy it; waits already queued keep their meaning. The handle may be given out again at once."""

    def event_record(self, event: int, stream: int) -> None:
        """The event completes when the work queued on ``stream`` so far is done."""

    def event_query(self, event: int) -> bool:
        """True if complete (or never recorded); raises the fault that this reveals."""

    def event_synchronize(self, event: int) -> None:
        """Block until complete; raises the fault that this reveals."""

    def event_elapsed(self, start: int, end: int) -> float:
        """Milliseconds between two completed timing events."""

    def context_record(self, event: int, device: int) -> None:
        """Record into ``event`` all work of every stream of the device's context."""

    def context_wait(self, event: int, device: int) -> None:
        """Later work of every stream of the device's context runs after ``event``."""

    # --- kernels ----------------------------------------------------------------------------------------------
    def kernel_load(
        self, name: str, source: str, options: Sequence[str], device: int, sim: SimFunction | None = None
    ) -> int:
        """Compile (or find) a kernel and give its handle. The simulated device runs ``sim`` and needs it."""

    def kernel_adopt(self, function: Any, device: int) -> int:
        """Handle of an array library's own compiled function (``cupy.RawKernel``)."""

    def kernel_unload(self, kernel: int) -> None:
        """Forget the handle."""

    def kernel_launch(
        self,
        kernel: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        values: tuple[Any, ...],
        spans: tuple[Span | SurfaceArg | None, ...],
        shared: int,
        stream: int,
    ) -> None:
        """Enqueue a launch; raises LaunchError if refused.

        ``values`` are what the kernel gets: ints for pointers and objects, NumPy scalars of the exact C width else.
        ``spans`` stands beside it and says what a pointer may touch; only the simulated device reads it.
        """

    # --- graphs -----------------------------------------------------------------------------------------------
    def capture_begin(self, stream: int, mode: CaptureMode) -> None:
        """Work queued on ``stream`` from now on is recorded, not run."""

    def capture_end(self, stream: int) -> int:
        """End the capture; the graph's handle. An invalidated capture raises and is ended."""

    def graph_memory_nodes(self, graph: int) -> int:
        """Number of allocation and free nodes in the graph."""

    def graph_instantiate(self, graph: int) -> int:
        """Make the executable graph."""

    def graph_upload(self, executable: int, stream: int) -> None:
        """Prepare the device for a launch ahead of time."""

    def graph_launch(self, executable: int, stream: int) -> None:
        """Enqueue one run."""

    def graph_destroy(self, graph: int) -> None:
        """Destroy a graph."""

    def graph_exec_destroy(self, executable: int) -> None:
        """Destroy an executable graph; queued runs must be done."""

    # --- opaque arrays, surfaces, textures --------------------------------------------------------------------
    def array_create(self, info: ArrayInfo, device: int) -> int:
        """Allocate an opaque array usable as a surface."""

    def array_destroy(self, array: int) -> None:
        """Free it; blocks until the device is done with it."""

    def array_info(self, array: int, device: int) -> ArrayInfo:
        """Its extents and texel."""

    def surface_create(self, array: int, device: int) -> int:
        """Object for ``surf2Dread``/``surf2Dwrite``."""

    def surface_destroy(self, surface: int) -> None:
        """Destroy it; queued work that uses it must be done."""

    def texture_create(self, array: int, device: int, normalized: bool = False, linear: bool = False) -> int:
        """Object for ``tex2D``: element reads, or floats in 0..1 if ``normalized``; ``linear`` filters."""

    def texture_destroy(self, texture: int) -> None:
        """Destroy it; queued work that uses it must be done."""

    # --- graphics objects -------------------------------------------------------------------------------------
    def gl_devices(self) -> tuple[int, ...]:
        """Ordinals of the devices behind the current GL context; empty if none of ours."""

    def gl_register_buffer(self, name: int, flags: RegisterFlags, device: int) -> int:
        """Register a GL buffer of the current context; the resource handle, never 0."""

    def gl_register_image(self, name: int, target: int, flags: RegisterFlags, device: int) -> int:
        """Register a GL texture or renderbuffer of the current context; the resource handle, never 0."""

    def d3d11_register(self, resource: int, flags: RegisterFlags, device: int) -> int:
        """Register an ``ID3D11Resource``; the resource handle, never 0."""

    def graphics_unregister(self, resource: int) -> None:
        """Give the registration back."""

    def graphics_map(self, resources: Sequence[int], stream: int) -> None:
        """Hand objects to the device: work queued on ``stream`` later sees what the graphics API did before."""

    def graphics_unmap(self, resources: Sequence[int], stream: int) -> None:
        """Hand objects back: graphics work issued later sees what ``stream`` did before, as :meth:`graphics_map`."""

    def graphics_pointer(self, resource: int) -> tuple[int, int]:
        """``(address, bytes)`` of a mapped buffer. Never ask it of an image."""

    def graphics_array(self, resource: int, layer: int, level: int) -> int:
        """Opaque array of one layer or face and level of a mapped image."""

    # --- external memory and semaphores -----------------------------------------------------------------------
    def import_memory_fd(self, fd: int, nbytes: int, dedicated: bool, dma_buf: bool, device: int) -> int:
        """Import an allocation. The driver owns ``fd`` from then on if it succeeds, never if it fails."""

    def import_memory_win32(self, kind: str, handle: int, nbytes: int, dedicated: bool, device: int) -> int:
        """Import an NT or KMT handle; ``kind`` is opaque, opaque_kmt, d3d12_heap, d3d12_resource or d3d11."""

    def external_buffer(self, memory: int, offset: int, nbytes: int) -> int:
        """Address of a range of an imported allocation; freed by :meth:`external_buffer_free`."""

    def external_buffer_free(self, ptr: int, device: int) -> None:
        """Free the address; blocks until the device is done with it."""

    def external_array(self, memory: int, offset: int, info: ArrayInfo) -> tuple[int, int]:
        """``(mipmapped, level 0 array)`` over an imported allocation."""

    def external_array_free(self, mipmapped: int) -> None:
        """Free the mipmapped array."""

    def external_memory_destroy(self, memory: int) -> None:
        """Give the import back; its buffers and arrays must be freed before."""

    def import_semaphore_fd(self, fd: int, timeline: bool, device: int) -> int:
        """Import a semaphore. The driver owns ``fd`` from then on if it succeeds, never if it fails."""

    def import_semaphore_win32(self, kind: str, handle: int, device: int) -> int:
        """Import a fence by NT handle; ``kind`` is d3d12_fence, d3d11_fence or opaque."""

    def semaphore_signal(self, semaphore: int, value: int, stream: int) -> None:
        """Signal ``value`` (ignored by a binary one) after the work queued on ``stream``."""

    def semaphore_wait(self, semaphore: int, value: int, stream: int) -> None:
        """Later work of ``stream`` waits for ``value``."""

    def semaphore_destroy(self, semaphore: int) -> None:
        """Give the import back."""

    # --- virtual memory ---------------------------------------------------------------------------------------
    def vmm_granularity(self, device: int) -> int:
        """Bytes that every vmm size and offset is a multiple of."""

    def vmm_create(self, nbytes: int, device: int, shareable: bool) -> int:
        """Physical memory; exportable as an fd if ``shareable``."""

    def vmm_release(self, handle: int) -> None:
        """Drop the reference; mappings keep the memory."""

    def vmm_export_fd(self, handle: int) -> int:
        """A new fd for the memory; the caller closes it."""

    def vmm_import_fd(self, fd: int, device: int) -> int:
        """Handle of memory exported by another process; the fd stays the caller's."""

    def vmm_reserve(self, nbytes: int, device: int) -> int:
        """Reserve addresses."""

    def vmm_free(self, ptr: int, nbytes: int) -> None:
        """Give reserved addresses back."""

    def vmm_map(self, ptr: int, nbytes: int, handle: int, device: int) -> None:
        """Put the memory at a reserved address, readable and writable by ``device``."""

    def vmm_unmap(self, ptr: int, nbytes: int) -> None:
        """Take the memory away from the address; blocks until the device is done with it."""
