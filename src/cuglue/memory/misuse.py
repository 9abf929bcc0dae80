"""What a guard finds, and how it says so.

Owns the report. Must not know how misuse is found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

from ..core.block import BlockLife
from ..errors import OutOfBounds, UseAfterFree

Kind = Literal["out of bounds", "use after free"]


class MemoryMisuseWarning(UserWarning):
    """A guard found misuse where it could not raise an error to whoever is to blame."""


@dataclass(frozen=True, slots=True)
class Misuse:
    """What a guard found.

    Attributes:
        kind: ``"out of bounds"``: bytes beside a block were written. ``"use after free"``: a block was written after it
            was given back.
        tag, generation: of the block.
        offset: of the first wrong byte from the start of the block; negative before it.
        neighbour: tag of the nearest live block, which may be the one that ran over; None if there is none.
    """

    kind: Kind
    tag: str
    generation: int
    offset: int
    neighbour: str | None

    @classmethod
    def of(cls, kind: Kind, block: BlockLife, offset: int, live: Iterable[BlockLife]) -> Self:
        """What was found at a block, among those that are ``live``."""
        others = [other for other in live if other is not block]
        nearest = min(others, key=lambda other: abs(other.ptr - block.ptr), default=None)
        return cls(kind, block.tag, block.generation, offset, nearest.tag if nearest else None)

    def __str__(self) -> str:
        beside = f", nearest live block {self.neighbour!r}" if self.neighbour is not None else ""
        return f"{self.kind}: block {self.tag!r} (generation {self.generation}) at byte {self.offset}{beside}"

    def error(self) -> OutOfBounds | UseAfterFree:
        """The misuse as an error."""
        cls = OutOfBounds if self.kind == "out of bounds" else UseAfterFree
        return cls(str(self), generation=self.generation)
