"""The end of a pool, beside other threads that still allocate and arrays that outlive it.

Owns what is given back when, and what is left to those who hold it. Must not know how memory is divided.

From the first step on nothing is handed out: who is on the way to a span finds the pool closed afterwards and gives it
back. What is handed out comes back to bins that say so (:class:`.bins.Late`), and its page goes upstream then.
"""

from __future__ import annotations

import warnings
from functools import partial

from ...core import process
from ...lifecycle import Owned
from ..block import DeviceBlock, give_back, handed_out
from .arrays import PoolArrays
from .ladder import Ladder
from .plans import Plans


class PoolClosing(Owned, PoolArrays):
    """The part of a pool that gives everything back."""

    _life: object
    _ready: bool  # False from the first step of closing on, and in a forked child

    def _close(self) -> None:
        """Give back what nobody holds; raises CaptureError, and stays open, where a capture is in the way."""
        retire = self._state.retire
        retire.run_forgotten()
        blocks = self._give_blocks_back()
        self._ready = False
        try:
            blocks += self._give_blocks_back()  # what other threads got meanwhile
            self._keeper.seal(partial(retire.forget, self._come_back))
            self._empty()
        except BaseException:
            self._ready = True
            self._keeper.unseal()
            raise
        self._warn_of(blocks)

    def _warn_of(self, blocks: list[DeviceBlock]) -> None:
        """Say what was freed under its users, and what they still have."""
        left = len(self._keeper.live_spans())
        if blocks or left:
            tags = ", ".join(sorted({block.tag for block in blocks})) or "none"
            warnings.warn(
                f"{self!r} closed with {len(blocks)} blocks live (tags: {tags}; freed now) and "
                f"{left} pieces in use by CuPy arrays (freed with them)",
                ResourceWarning,
                stacklevel=5,
            )

    def _give_blocks_back(self) -> list[DeviceBlock]:
        blocks = handed_out(self._table)
        for block in blocks:
            give_back(block, self)
        return blocks

    def _empty(self) -> None:
        """Give back the pages that nothing is in, and upstream with the last one."""
        self._keeper.trim()
        if not self._pages.reserved:
            self.upstream.close()

    def _come_back(self) -> None:
        """Something came back after the pool was closed; the retire queue repeats this after a capture in the way."""
        if not self._ready and self._life is process.life:
            self._empty()

    def _forgotten(self) -> None:
        for block in self._table:
            self._state.retire.forget(partial(self._take_in, block))
        self._state.retire.forget(partial(_abandon, self._keeper))

    def __del__(self) -> None:
        if self._ending():
            return
        made_here = getattr(self, "_life", None) is process.life  # set last: no __init__ that failed has it
        if not made_here or self.closed:
            return
        if len(self._table):
            super().__del__()
        elif self._pages.reserved:
            self._forgotten()


def _abandon(keeper: Ladder | Plans) -> None:
    keeper.trim()
