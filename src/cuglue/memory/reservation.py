"""Bytes of a budget that are charged before they are allocated.

Owns what is left of them. Must not know how the budget makes room.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from ..errors import ClosedError, OutOfBudget
from ..lifecycle import leave
from .block import UNTAGGED, DeviceBlock, as_size
from .cupy_plug import cupy_error

if TYPE_CHECKING:
    from .budget import GlobalDeviceBudget


class BudgetReservation:
    """Bytes of a budget, charged already. Made by :meth:`GlobalDeviceBudget.reserve`."""

    total = remaining = 0  # until the budget has charged them
    closed = False

    def __init__(self, budget: GlobalDeviceBudget) -> None:
        self._budget = budget

    def allocate(self, nbytes: int, stream: object = None, tag: str = UNTAGGED) -> DeviceBlock:
        """A block out of the reservation; freeing it gives its bytes to the budget, not to the reservation.

        Ordering: see the resource below the budget.

        Raises:
            OutOfBudget: more than is left here; ``limit`` is the reservation's total.
            ClosedError: the rest was given back.
        """
        size, budget = as_size(nbytes), self._budget
        # No call between a look and what it decides, here and below: see the budget.
        if self.closed:
            raise ClosedError(repr(self), got="allocate()", expected="an open reservation")
        if size > self.remaining:
            raise cupy_error(
                OutOfBudget(
                    "budget reservation",
                    current=self.total - self.remaining,
                    requested=size,
                    limit=self.total,
                    hint="Reserve more",
                )
            )
        self.remaining -= size
        try:
            block: DeviceBlock = budget._obtain(size, budget._stream(stream), tag, DeviceBlock)
        except BaseException:
            if self.closed:  # meanwhile
                budget._reserved -= size
            else:
                self.remaining += size
            raise
        block.resource = budget
        return block

    def close(self) -> None:
        """Give back what was not allocated. Closing again does nothing."""
        budget, rest = self._budget, self.remaining
        self.remaining, self.closed = 0, True
        budget._reserved -= rest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self.close, error, "closing", self)

    def __del__(self) -> None:
        if not self.closed and self.remaining:
            self._budget._returned.append(self.remaining)

    def __repr__(self) -> str:
        return f"BudgetReservation({self.total - self.remaining} of {self.total} bytes used)"
