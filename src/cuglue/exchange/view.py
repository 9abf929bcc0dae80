"""Arrays over memory that somebody else owns: the methods by which array libraries take them.

Owns the protocols as an object shows them: ``__dlpack__``, ``__cuda_array_interface__``, ``__array_interface__``,
``__array__``, and the shortcuts ``cupy()``, ``torch()`` and ``numpy()``. Must not know what the memory is (a map, a
buffer) or how its work is ordered: that is its :class:`~cuglue.exchange.owner.ExportOwner`.

A class becomes an array by inheriting :class:`Exporter` and having three attributes; :class:`ArrayView` is the plain
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.stream import as_stream
from ..driver.protocol import MemoryType
from ..errors import LayoutError, UnsupportedError
from ..layout import Layout, element
from .cai import array_interface, cuda_array_interface
from .capsule import device_capsule, host_capsule
from .copies import copy_on_device, copy_to_host, host_bytes, host_view, on_host
from .dlpack import CPU, ExportPlan, Route, negotiate
from .dtypes import NARROW, DLType, carrier, narrow_name, travelling
from .libraries import library, torch_tensor
from .owner import ExportOwner, consumer_stream, export_on

_DEVICE = int(MemoryType.DEVICE)


class Exporter:
    """Gives a class the array protocols. It has to have the three attributes below, as attributes or properties.

    Attributes:
        export_owner: who is asked and told about exports; a map answers itself.
        device_ptr: address of the first element.
        layout: shape, strides in bytes, dtype.
        narrow: name of an element type that NumPy lacks ("bfloat16"); ``layout`` holds unsigned integers then.
        legacy_readonly: read-only memory is given also to consumers that cannot be told so.

    Every export but ``__cuda_array_interface__`` holds a token of ``export_owner.ledger``. After the owner's memory is
    gone they raise ClosedError.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # not at run time, so that a class without slots may simply assign them

        @property
        def export_owner(self) -> ExportOwner: ...
        @property
        def device_ptr(self) -> int: ...
        @property
        def layout(self) -> Layout: ...

    narrow: str | None = None
    legacy_readonly: bool = False

    # --- DLPack -------------------------------------------------------------------------------------------------
    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack ``(device type, device id)``: the host for memory of the simulated device and pinned memory."""
        owner = self.export_owner
        owner.check_exportable()
        return CPU if on_host(owner) else (_DEVICE, owner.device)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule of the memory.

        Args:
            stream: the consumer's stream: None or 1 the legacy default one, 2 the per-thread one, -1 order nothing.
                It is ordered after pending work, and whatever ends the memory waits for it.
            max_version: newest DLPack version that the consumer knows; None gets a capsule without flags.
            dl_device: where it wants the data; besides the memory's own device the host, as a copy.
            copy: True always copies, False never does.

        Ordering: only enqueues for device memory; blocks the host for host memory and copies to the host.
        Ownership: what the consumer makes keeps the owner alive; a copy is its own.

        Raises:
            ClosedError: the memory is gone.
            CaptureError: the consumer's stream captures a graph.
            BufferError, ValueError, TypeError: see :func:`~cuglue.exchange.dlpack.negotiate`.
        """
        owner = self.export_owner
        owner.check_exportable()
        hosted = on_host(owner)
        plan = negotiate(
            CPU if hosted else (_DEVICE, owner.device),
            stream=stream,
            max_version=max_version,
            dl_device=dl_device,
            copy=copy,
            readonly=owner.readonly,
            legacy_readonly=self.legacy_readonly,
        )
        element, layout = travelling(self.layout, self.narrow)
        if plan.route is Route.HOST_COPY:
            array = copy_to_host(owner, self.device_ptr, layout)
            return host_capsule(array, element, versioned=plan.versioned, copied=True)
        if hosted:
            array = host_view(owner, self.device_ptr, layout, how="DLPack", readonly=plan.readonly)
            return host_capsule(array, element, versioned=plan.versioned, copy=plan.route is Route.COPY)
        consumer = None if plan.stream is None else consumer_stream(owner, plan.stream)
        if plan.route is Route.COPY and layout.size:
            own = copy_on_device(owner, self.device_ptr, layout.nbytes, consumer)
            return device_capsule(
                own.ptr, layout, element, device=owner.device, keep=own, versioned=plan.versioned, copied=True
            )
        if consumer is None:
            return self._capsule(owner, layout, element, plan)
        with consumer.state.ordering:  # export_on, without a function made for each capsule
            owner.order_consumer(consumer)
            capsule = self._capsule(owner, layout, element, plan)
            owner.note_consumer(consumer)
        return capsule

    def _capsule(self, owner: ExportOwner, layout: Layout, element: DLType, plan: ExportPlan) -> Any:
        """A capsule of the device memory itself, with a token."""
        return device_capsule(
            self.device_ptr,
            layout,
            element,
            device=owner.device,
            keep=owner.ledger.issue(owner, "DLPack"),
            versioned=plan.versioned,
            readonly=plan.readonly,
            copied=plan.route is Route.COPY,
            plain=owner.memory_type is MemoryType.DEVICE,
        )

    # --- array interfaces ---------------------------------------------------------------------------------------
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA array interface, version 3. Builds the dictionary and does nothing else.

        Its readers hold this object, or (JAX) nothing at all: they are not counted. There is none (AttributeError) for
        host memory, read-only memory, and element types that it cannot name; DLPack has them.
        """
        owner = self.export_owner
        if on_host(owner) or owner.readonly or not self._has_typestr():
            raise AttributeError(f"{type(self).__name__} has no __cuda_array_interface__ here; use DLPack")
        owner.check_exportable()
        owner.note_cai_reader()
        return cuda_array_interface(self.device_ptr, self.layout, stream=owner.cai_stream())

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface of host memory. There is none (AttributeError) for device memory, and for element
        types that it cannot name; NumPy asks ``__array__`` then.

        Ordering: blocks the host until pending work is done. Ownership: the array made from it holds a token.
        """
        owner, layout = self.export_owner, self.layout
        if not on_host(owner) or not self._has_typestr():
            raise AttributeError(f"{type(self).__name__} has no __array_interface__ here")
        fields = array_interface(self.device_ptr, layout, readonly=owner.readonly)
        # A buffer in place of the address: NumPy keeps it as the array's base, and with it the token.
        if layout.size:
            fields["data"] = host_bytes(
                owner, self.device_ptr, layout.nbytes, how="NumPy array", readonly=owner.readonly
            )
        else:
            owner.check_exportable()
            fields["data"] = np.empty(layout.itemsize, np.uint8)
        return fields

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """A NumPy array over host memory, with NumPy's meaning of ``dtype`` and ``copy``.

        Raises:
            TypeError: it is device memory: NumPy would have to copy it, which :meth:`numpy` does when asked.
        """
        owner = self.export_owner
        owner.check_exportable()
        if not on_host(owner):
            raise TypeError(
                f"{type(self).__name__} is memory of CUDA device {owner.device}, which NumPy cannot address. "
                "Use .numpy() for a copy on the host, or .cupy()"
            )
        array = host_view(owner, self.device_ptr, self.layout, how="NumPy array", readonly=owner.readonly)
        return np.array(self._named(array), dtype=dtype, copy=copy)

    # --- libraries ----------------------------------------------------------------------------------------------
    def cupy(self) -> Any:
        """A CuPy array over the memory, in order on CuPy's current stream. Copies nothing, only enqueues.

        Raises:
            UnsupportedError: host memory, an element type that CuPy lacks, or no CuPy.
            ClosedError: the memory is gone.
        """
        owner, layout = self.export_owner, self.layout
        owner.check_exportable()
        if on_host(owner):
            raise UnsupportedError(
                f"a CuPy array over host memory ({owner.driver.name} driver)",
                hint="Use numpy.asarray(...) or .numpy()",
                reason="simulated" if owner.driver.capabilities(owner.device).simulated else "host_memory",
            )
        if self._narrow_name():
            raise UnsupportedError(
                f"a CuPy array of {self._narrow_name()}",
                hint="Use .torch(), or .view('u1') or .view('u2') for the bits",
                reason="dtype",
            )
        cupy = library("cupy", "CuPy")
        stream = as_stream(None, device=owner.device, driver=owner.driver)
        ptr = self.device_ptr if layout.size else 0

        def make() -> Any:
            memory = cupy.cuda.UnownedMemory(
                ptr, layout.nbytes, owner.ledger.issue(owner, "cupy()"), owner.device
            )
            pointer = cupy.cuda.MemoryPointer(memory, 0)
            return cupy.ndarray(layout.shape, layout.dtype, pointer, strides=layout.strides)

        return export_on(owner, stream, make)

    def torch(self) -> Any:
        """A PyTorch tensor over the memory, in order on PyTorch's current stream; a CPU tensor over host memory.

        Copies nothing, only enqueues. PyTorch knows no read-only tensors: do not write a read-only map through it.

        Raises:
            UnsupportedError: there is no PyTorch.
            ClosedError: the memory is gone.
        """
        return torch_tensor(self)

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy in host memory: a C-contiguous NumPy array of its own. Blocks the host until it is there.

        Raises:
            UnsupportedError: an element type that NumPy has only with ``ml_dtypes``, and that is not installed.
        """
        return self._named(copy_to_host(self.export_owner, self.device_ptr, self.layout))

    def view(self, dtype: Any = None, *, legacy_readonly: bool | None = None) -> ArrayView:
        """The same memory, read otherwise.

        Args:
            dtype: another element type of the same size: a NumPy one, or a name such as "bfloat16" or
                "float8_e4m3fn" that travels by DLPack only.
            legacy_readonly: give read-only memory also to consumers that cannot be told so (TensorFlow, TVM FFI).
        """
        narrow, layout = self.narrow, self.layout
        if dtype is not None:
            narrow = dtype if isinstance(dtype, str) and dtype in NARROW else None
            layout = Layout(layout.shape, layout.strides, carrier(narrow) if narrow else element(dtype))
            if layout.itemsize != self.layout.itemsize:
                raise LayoutError(
                    f"a view of {self.layout.dtype} memory",
                    got=f"{dtype}, {layout.itemsize} bytes",
                    expected=f"an element type of {self.layout.itemsize} bytes",
                )
        legacy = self.legacy_readonly if legacy_readonly is None else legacy_readonly
        return ArrayView(self.export_owner, self.device_ptr, layout, narrow=narrow, legacy_readonly=legacy)

    def _narrow_name(self) -> str | None:
        return self.narrow or narrow_name(self.layout.dtype)

    def _has_typestr(self) -> bool:
        """Whether the array interfaces can name the element type: no record, no type of ``ml_dtypes``."""
        return self.narrow is None and np.dtype(self.layout.dtype.str) == self.layout.dtype

    def _named(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """``array`` as elements of the type that :attr:`narrow` names."""
        if self.narrow is None:
            return array
        try:
            import ml_dtypes
        except ImportError as error:
            raise UnsupportedError(
                f"a NumPy array of {self.narrow}",
                hint="Install ml_dtypes, or use .view('u1') or .view('u2') for the bits",
                reason="dtype",
            ) from error
        return array.view(getattr(ml_dtypes, self.narrow))

    # --- what every array has -----------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, ...]:
        """Extents in elements."""
        return self.layout.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance between neighbours along each axis, in bytes."""
        return self.layout.strides

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type; of one that NumPy lacks, the unsigned integers that hold it."""
        return self.layout.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.layout.ndim


class ArrayView(Exporter):
    """An array over memory of an owner.

    Args:
        owner: who is asked and told about exports; kept alive.
        ptr: address of the first element.
        layout: shape, strides in bytes, dtype.
        narrow: name of an element type that NumPy lacks; ``layout`` holds unsigned integers of its size.
        legacy_readonly: give read-only memory also to consumers that cannot be told so.
    """

    __slots__ = ("__weakref__", "device_ptr", "export_owner", "layout", "legacy_readonly", "narrow")

    export_owner: ExportOwner
    device_ptr: int
    layout: Layout

    def __init__(
        self,
        owner: ExportOwner,
        ptr: int,
        layout: Layout,
        *,
        narrow: str | None = None,
        legacy_readonly: bool = False,
    ) -> None:
        self.export_owner = owner
        self.device_ptr = ptr
        self.layout = layout
        self.narrow = narrow
        self.legacy_readonly = legacy_readonly

    def __repr__(self) -> str:
        kind = self.narrow or self.layout.dtype
        return (
            f"ArrayView(shape={self.layout.shape}, dtype={kind}, strides={self.layout.strides}, "
            f"ptr={self.device_ptr:#x}, device={self.export_owner.device})"
        )
