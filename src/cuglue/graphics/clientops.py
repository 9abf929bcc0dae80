"""What others bring to have a buffer of theirs mapped: three functions. Owns that interface alone."""

from __future__ import annotations

from typing import Protocol


class CudaGlOps(Protocol):
    """What a GL-backed handle calls to map itself. Others may bring their own."""

    def map(self, res: int) -> tuple[int, int] | None:
        """Map the registered resource; returns its device pointer and size in bytes, or None when it cannot be."""

    def unmap(self, res: int) -> None:
        """Give a mapped resource back to OpenGL."""

    def unregister(self, res: int) -> None:
        """End the registration."""
