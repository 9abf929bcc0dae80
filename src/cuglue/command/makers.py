"""Arrays and buffers of every maker, turned into operands.

Owns how Buffers, maps, views, CuPy arrays, torch tensors and readers of the CUDA array interface are recognised, and
what is asked of each. Must not know kernels, commands or how waits are queued. Foreign libraries are recognised, never
imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arguments import shown
from ..core.stream import Stream, as_stream
from ..errors import UsageError
from ..exchange.view import Exporter
from ..memory.lookup import owned_block
from .operands import Operand, Place


def operand_of(array: Any, place: Place) -> Operand:
    """The operand that ``array`` is, checked to be on the right device.

    Raises:
        ClosedError: a buffer or map that is no longer there.
        UsageError: host memory, another device or runtime, or no array at all.
    """
    kind = type(array)
    make = _makers.get(kind)
    if make is None:
        make = _makers[kind] = _maker(array)
    return make(array, place)


def is_tracked(value: object) -> bool:
    """Whether ``value`` is memory that must be declared with In, Out or InOut when a kernel gets it."""
    make = _makers.get(type(value))
    if make is None:
        if isinstance(value, (int, float, complex, np.generic, str, bytes)) or value is None:
            return False
        make = _makers[type(value)] = _maker(value)
    return make is not _no_array


Maker = Callable[[Any, Place], Operand]
_makers: dict[type, Maker] = {}


def _maker(array: Any) -> Maker:
    """How operands are made of objects of this type. Protocols first, then what is loaded."""
    kind = type(array)
    if hasattr(kind, "__cuglue_operand__"):
        own: Maker = kind.__cuglue_operand__
        return own
    if issubclass(kind, Exporter):
        return _exporter
    if issubclass(kind, np.ndarray):
        return _host_array
    root = kind.__module__.partition(".")[0]
    if root == "cupy" and hasattr(kind, "data"):
        return _cupy_array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch_tensor
    try:
        if getattr(array, "__cuda_array_interface__", None) is not None:
            return _interface
    except (ValueError, TypeError, RuntimeError, AttributeError):  # some exporters refuse by raising
        return _interface
    return _no_array


def _exporter(array: Any, place: Place) -> Operand:
    """A view or a map: the record its owner keeps, and the streams that exports were made for."""
    owner = array.export_owner
    owner.check_exportable()
    if owner.driver is not place.driver:
        raise UsageError(
            repr(array),
            got=f"memory of the {owner.driver.name} driver",
            expected=f"{place.driver.name} memory",
        )
    _on_device(array, owner.device, place)
    layout = array.layout
    return Operand(
        array.device_ptr,
        layout.nbytes,
        layout.shape,
        None if getattr(array, "untyped", False) else layout.dtype,
        None if layout.is_c_contiguous else layout.strides,
        owner.block,
        partners_of(owner, place),
        writable=not owner.readonly,
    )


def partners_of(owner: Any, place: Place) -> tuple[Stream, ...]:
    """Streams that exports of ``owner`` were made for: their libraries use the memory without telling."""
    partners: tuple[Stream, ...] = owner.consumers
    if owner.cai_read:
        partners = (*partners, place.current())
    return partners


def _cupy_array(array: Any, place: Place) -> Operand:
    memory = array.data.mem
    block = owned_block(memory)
    _on_device(array, memory.device_id, place)
    current = place.current()
    home = block.stream if block is not None else current
    return Operand(
        array.data.ptr,
        array.nbytes if block is None else min(array.nbytes, block.size),
        array.shape,
        array.dtype,
        None if array.flags.c_contiguous else array.strides,
        block,
        (current,) if home is current else (home, current),
    )


def _torch_tensor(tensor: Any, place: Place) -> Operand:
    if tensor.device.type != "cuda":
        raise _not_device(tensor, f"a tensor on {tensor.device}")
    _on_device(tensor, tensor.device.index, place)
    torch = sys.modules["torch"]
    current = as_stream(torch.cuda.current_stream(place.device), device=place.device, driver=place.driver)
    ptr = tensor.data_ptr()
    block = place.block_at(ptr)
    home = block.stream if block is not None else current
    size = tensor.element_size()
    return Operand(
        ptr,
        tensor.numel() * size,
        tuple(tensor.shape),
        _torch_dtype(str(tensor.dtype).partition(".")[2], size),
        None if tensor.is_contiguous() else tuple(step * size for step in tensor.stride()),
        block,
        (current,) if home is current else (home, current),
    )


_TORCH = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
}


def _torch_dtype(name: str, size: int) -> np.dtype[Any]:
    """NumPy's twin of a torch dtype; unsigned integers of the same size for types NumPy lacks."""
    try:
        return np.dtype(_TORCH.get(name, name))
    except TypeError:
        return np.dtype(f"u{size}")


def _interface(array: Any, place: Place) -> Operand:
    """A stranger with a CUDA array interface: ordered with the stream it names, and with the current one."""
    fields = array.__cuda_array_interface__
    ptr, readonly = fields["data"]
    dtype = np.dtype(fields["typestr"])
    shape = tuple(fields["shape"])
    count = int(np.prod(shape, dtype=np.int64))
    if ptr:
        _on_device(array, place.driver.pointer_info(ptr).device, place)
    current = place.current()
    named = fields.get("stream")
    partners: tuple[Stream, ...] = (current,)
    if named:
        other = as_stream(int(named), device=place.device, driver=place.driver)
        partners = (current,) if other is current else (current, other)
    return Operand(
        int(ptr),
        count * dtype.itemsize,
        shape,
        dtype,
        fields.get("strides"),
        None,
        partners,
        writable=not readonly,
    )


def _host_array(array: Any, place: Place) -> Operand:
    raise _not_device(array, f"a NumPy array of {array.nbytes} bytes")


def _no_array(value: Any, place: Place) -> Operand:
    raise UsageError(
        f"operand of type {type(value).__name__}",
        got=shown(value)[:80],
        expected="a Buffer, CudaMap, view, CuPy array, torch tensor or __cuda_array_interface__",
    )


def _not_device(array: Any, got: str) -> UsageError:
    return UsageError(
        f"operand of type {type(array).__name__}",
        got=got,
        expected="memory of the device",
        hint="Copy it there: runtime.create(array)",
    )


def _on_device(array: Any, device: int, place: Place) -> None:
    if device != place.device:
        raise UsageError(
            f"operand of type {type(array).__name__}",
            got=f"device {device}",
            expected=f"device {place.device}",
            hint="Use the runtime of that device",
        )
