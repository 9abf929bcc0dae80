"""Whose memory an array has: the block behind anything that has memory of ours.

Owns the way from an array to its block. Must not know what is done with the block, nor import an array library.

CuPy arrays say which memory object they have, and that says whose it is, views and round trips included. All others
(PyTorch, Numba, JAX) give an address only: it is looked up among the live blocks, so that an address which has a new
owner by now never means the old one.
"""

from __future__ import annotations

import sys
from typing import Any

from ..core.block import BlockLife
from ..exchange.tokens import ExportToken
from ..exchange.view import Exporter
from .cupy_plug import block_of
from .layered import living_resources
from .resource import DeviceMemoryResource

_DEEPEST = 32  # owners of owners that are followed


def block_behind(thing: object) -> BlockLife | None:
    """The live block that ``thing`` has memory of; None if it is not ours, or has no memory.

    Args:
        thing: a block, view, map, buffer, CuPy array (any view of one), CuPy memory object, PyTorch tensor, or anything
            with ``__cuda_array_interface__``.

    Ordering: touches no stream.
    """
    block, lowest = _descend(thing)
    if block is not None:
        return block
    address = _address_of(lowest)
    return block_at(address) if address else None


def owned_block(thing: object) -> BlockLife | None:
    """The live block that ``thing`` says it has its memory from; None if it says none. No address is looked up.

    Raises:
        ClosedError: it was made from a map that was left.
    """
    return _descend(thing)[0]


def _descend(thing: object) -> tuple[BlockLife | None, object]:
    """The block found on the way down from owner to owner, and the last one that was asked."""
    for _ in range(_DEEPEST):
        block = block_of(thing)
        if block is not None:
            return block, thing
        below = _below(thing)
        if below is None:
            break
        thing = below
    return None, thing


def block_at(address: int) -> BlockLife | None:
    """The live block that ``address`` lies in; of several (a pool's block lies in a page), the smallest."""
    found = {block for resource in living_resources() if (block := resource.block_at(address)) is not None}
    return min(found, key=lambda block: block.size, default=None)


def resource_of(block: BlockLife) -> DeviceMemoryResource | None:
    """The resource that ``block`` goes back to; None of memory that is somebody else's, a mapped buffer say."""
    found = getattr(block, "resource", None)
    return found if isinstance(found, DeviceMemoryResource) else None


def _below(thing: Any) -> Any:
    """What ``thing`` has its memory from, as it says itself."""
    if isinstance(thing, ExportToken):
        return thing.owner
    if isinstance(thing, Exporter):
        return thing.export_owner
    if type(thing).__module__.partition(".")[0] == "cupy":
        # From the array to its pointer, from there to the memory object, from there to who gave it to CuPy.
        names = ("data", "mem", "_owner")
        return next((found for name in names if (found := getattr(thing, name, None)) is not None), None)
    return None


def _address_of(thing: Any) -> int:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor):
        return int(thing.data_ptr()) if thing.device.type == "cuda" else 0
    if type(thing).__module__.partition(".")[0] == "cupy":
        return int(getattr(thing, "ptr", 0))
    try:
        interface = getattr(thing, "__cuda_array_interface__", None)
    except (ValueError, TypeError, RuntimeError):  # some exporters refuse by raising
        return 0
    data = interface.get("data") if isinstance(interface, dict) else None
    address = data[0] if isinstance(data, tuple | list) and data else 0
    return address if isinstance(address, int) else 0
