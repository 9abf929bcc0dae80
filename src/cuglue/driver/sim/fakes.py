"""Graphics objects without a graphics API: dictionaries of named bytes, for machines and tests without one.

Owns :class:`FakeGraphics`, which stands in for OpenGL or Direct3D 11. Must not know maps or streams.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ..protocol import ArrayInfo, TexelKind
from . import codes
from .gl import GraphicsObject, PartKey
from .memory import Bytes

_KINDS = {TexelKind.UINT: "u", TexelKind.SINT: "i", TexelKind.FLOAT: "f"}


class FakeObject:
    """A buffer (``bytes``) or an image (``texels``) that registers and maps like a real one."""

    def __init__(self, api: FakeGraphics, nbytes: int, parts: dict[PartKey, ArrayInfo]) -> None:
        self._api = api
        self.nbytes = nbytes
        self.parts = parts
        sizes = {(0, 0): nbytes} if nbytes else {k: _bytes_of(i) for k, i in parts.items()}
        self.data = {part: np.zeros(size, np.uint8) for part, size in sizes.items()}
        self.lost = False

    @property
    def bytes(self) -> Bytes:
        """The bytes of a buffer."""
        return self.data[0, 0]

    def texels(self, layer: int = 0, level: int = 0) -> npt.NDArray[Any]:
        """The texels of one layer and level of an image: ([depth,] height, width, channels)."""
        info = self.parts[layer, level]
        depth = (info.depth,) if info.depth else ()
        dtype = np.dtype(f"{_KINDS[info.kind]}{info.bits // 8}")
        return (
            self.data[layer, level]
            .view(dtype)
            .reshape(*depth, max(info.height, 1), info.width, info.channels)
        )

    def delete(self) -> None:
        """Delete the object; as with OpenGL, a registration does not notice."""
        self.lost = True

    def read(self, part: PartKey, out: Bytes) -> bool:
        """Read a part."""
        if not self.lost:
            out[...] = self.data[part]
        return not self.lost

    def write(self, part: PartKey, data: Bytes) -> bool:
        """Write a part."""
        if not self.lost:
            self.data[part][...] = data
        return not self.lost

    def reachable(self, call: str) -> None:
        """Raise if this thread does not reach the object."""
        if not self._api.present():
            raise codes.refused(codes.INVALID_GRAPHICS_CONTEXT, call, "no context is current on this thread")

    def finish(self, call: str) -> None:
        """Raise if this thread does not reach the object; its bytes are always finished."""
        self.reachable(call)


class FakeGraphics:
    """Named objects. A thread may be fenced off with :attr:`thread`, as OpenGL fences off all but the context's."""

    def __init__(self) -> None:
        self._objects: dict[int, FakeObject] = {}
        self.thread: int | None = None  # identity of the only thread that reaches the objects; None: all do

    def __getitem__(self, name: int) -> FakeObject:
        return self._objects[name]

    def buffer_object(self, nbytes: int) -> int:
        """Name of a new buffer of zeros."""
        return self._add(FakeObject(self, nbytes, {}))

    def image_object(
        self,
        width: int,
        height: int,
        *,
        depth: int = 0,
        bits: int = 8,
        channels: int = 4,
        kind: TexelKind = TexelKind.UINT,
        layers: int = 1,
        levels: int = 1,
    ) -> int:
        """Name of a new image of zeros; each level halves the extents."""
        parts = {
            (layer, level): ArrayInfo(
                max(width >> level, 1),
                max(height >> level, 1),
                depth and max(depth >> level, 1),
                bits,
                channels,
                kind,
            )
            for layer in range(layers)
            for level in range(levels)
        }
        return self._add(FakeObject(self, 0, parts))

    def buffer(self, name: int, call: str) -> GraphicsObject:
        """The buffer of that name."""
        return self._find(name, call, image=False)

    def image(self, name: int, target: int, call: str) -> GraphicsObject:
        """The image of that name, whatever the target."""
        return self._find(name, call, image=True)

    def present(self) -> bool:
        """True on the thread that reaches the objects."""
        return self.thread in (None, threading.get_ident())

    def _add(self, found: FakeObject) -> int:
        name = len(self._objects) + 1
        self._objects[name] = found
        return name

    def _find(self, name: int, call: str, *, image: bool) -> FakeObject:
        if not self.present():
            raise codes.refused(codes.INVALID_VALUE, call, "no context is current on this thread")
        found = self._objects.get(name)
        if found is None or found.lost or bool(found.parts) is not image:
            raise codes.refused(
                codes.INVALID_RESOURCE_HANDLE, call, f"object {name}", got="nothing of that kind"
            )
        return found


def _bytes_of(info: ArrayInfo) -> int:
    return info.width * max(info.height, 1) * max(info.depth, 1) * info.texel_bytes
