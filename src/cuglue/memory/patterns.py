"""What a guard writes beside its blocks and into them, and whether it is still there.

Owns the bytes and the looks at them. Must not know what a finding leads to, nor when somebody looks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.stream import Stream
from .readback import read_back

CANARY = 0xCA
FRESH = 0xCB  # of memory handed out and not written yet
FREED = 0xDD  # of memory given back


class Patterns:
    """The canaries and the poison of one guard. A block has a larger one below it: the two are called outer and inner.

    Args:
        canary: bytes at either end of a block.
        poison: overwrite memory as it comes and goes.
    """

    def __init__(self, canary: int, poison: bool) -> None:
        self.canary = canary
        self.poison = poison

    def front(self, stream: Stream) -> int:
        """Bytes before a block: the canary, and what keeps the block's address aligned."""
        alignment = stream.state.capabilities.alignment
        return -(-self.canary // alignment) * alignment

    def lay(self, ptr: int, front: int, nbytes: int, stream: Stream) -> None:
        """Queue the canaries beside ``nbytes`` bytes at ``ptr + front``, and the poison in them."""
        _fill(ptr, CANARY, front, stream)
        _fill(ptr + front + nbytes, CANARY, self.canary, stream)
        if self.poison:
            _fill(ptr + front, FRESH, nbytes, stream)

    def spoil(self, block: Any, stream: Stream) -> None:
        """Queue the poison of memory given back."""
        if self.poison:
            _fill(block.ptr, FREED, block.size, stream)

    def broken_beside(self, outer: Any, inner: Any, stream: Stream) -> int | None:
        """Where a canary is broken, from the start of the block. Blocks the host for ``stream``."""
        front = outer.ptr - inner.ptr
        before, after = read_back(stream, (inner.ptr, front), (outer.ptr + outer.size, self.canary))
        wrong = [
            *(np.flatnonzero(before != CANARY) - front)[-1:],
            *(np.flatnonzero(after != CANARY) + outer.size)[:1],
        ]
        return int(wrong[0]) if wrong else None

    def written_inside(self, outer: Any, stream: Stream) -> int | None:
        """Where a block that was given back was written since. Blocks the host for ``stream``."""
        (body,) = read_back(stream, (outer.ptr, outer.size))
        wrong = np.flatnonzero(body != FREED)
        return int(wrong[0]) if wrong.size else None


def _fill(ptr: int, value: int, nbytes: int, stream: Stream) -> None:
    if nbytes:
        stream.driver.fill_async(ptr, value, nbytes, stream.handle)
