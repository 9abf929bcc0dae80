"""Taint: which bytes were never written because the work that should have written them failed or was skipped.

Owns failures, the byte ranges that they claim in each allocation, and what reading them raises (contracts C30). Must
not know launches, copies or streams: it is told what failed and what succeeded.

Fresh memory is trusted. A failure takes over the bytes it claims; work that succeeds clears exactly the bytes it
writes; work that would read claimed bytes is not run, and its outputs are claimed by the same failure.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator

from ..core.block import BlockLife
from ..driver.protocol import Access
from ..errors import SeveralErrors, UnwrittenError
from .uses import Use

HOPS = 16  # skipped work named in a report, newest kept

Range = tuple[BlockLife, int, int]  # bytes from start to end of an allocation


class Failure:
    """One failure and the work that was skipped because of it.

    Attributes:
        root: the error.
        chain: names of skipped work, newest last.
    """

    __slots__ = ("_chain", "root")

    def __init__(self, root: BaseException) -> None:
        self.root = without_frames(root)
        self._chain: deque[str] = deque(maxlen=HOPS)

    @property
    def chain(self) -> tuple[str, ...]:
        """Names of skipped work, newest last."""
        return tuple(self._chain)

    def skip(self, name: str) -> None:
        """Note that work was skipped because of it."""
        self._chain.append(name)

    def error(self) -> UnwrittenError:
        """What a read raises."""
        skipped = f", and {', '.join(self._chain)} skipped because of it" if self._chain else ""
        error = UnwrittenError(
            f"bytes that were never written: {type(self.root).__name__}: {self.root}{skipped}",
            hint="Write them again",
            root=self.root,
            chain=self.chain,
        )
        error.__cause__ = self.root
        return error


def without_frames(error: BaseException) -> BaseException:
    """A copy without traceback: whoever keeps it must not keep alive what the frames of a failed call hold."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 - an exception of somebody else, which cannot be copied
        copied = RuntimeError(f"{type(error).__name__}: {error}")
    copied.__traceback__ = copied.__context__ = copied.__cause__ = None
    return copied


class Claims:
    """Claimed ranges of one allocation: sorted, disjoint, neighbours of one failure fused."""

    __slots__ = ("__weakref__", "ranges")

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int, Failure]] = []

    def claim(self, start: int, end: int, failure: Failure) -> None:
        """Give the bytes to ``failure``, whoever claimed them before."""
        if start >= end:
            return
        kept = self._without(start, end)
        fused: list[tuple[int, int, Failure]] = []
        for low, high, owner in sorted([*kept, (start, end, failure)], key=lambda item: item[0]):
            if fused and fused[-1][1] == low and fused[-1][2] is owner:
                fused[-1] = (fused[-1][0], high, owner)
            else:
                fused.append((low, high, owner))
        self.ranges = fused

    def clear(self, start: int, end: int) -> None:
        """Free the bytes of claims."""
        if start < end:
            self.ranges = self._without(start, end)

    def _without(self, start: int, end: int) -> list[tuple[int, int, Failure]]:
        kept = []
        for low, high, owner in self.ranges:
            if low < start:
                kept.append((low, min(high, start), owner))
            if high > end:
                kept.append((max(low, end), high, owner))
        return kept

    def within(self, start: int, end: int) -> Iterator[Failure]:
        """Failures that claim any of the bytes, each once, in order of address."""
        seen: list[Failure] = []
        if start >= end:
            return
        for low, high, owner in self.ranges:
            if low < end and high > start and owner not in seen:
                seen.append(owner)
                yield owner


def ranges(uses: Iterable[Use], access: Access) -> Iterator[Range]:
    """The bytes that ``uses`` touch with ``access`` (READ or WRITE), where somebody keeps a record of them."""
    for _, operand, own, shape in uses:
        block = operand.block
        if block is None or not own & access or operand.kind != "memory":
            continue
        start = operand.ptr - block.ptr
        if shape is None:
            yield block, start, start + operand.nbytes
            continue
        for row in range(shape.height):
            yield block, start + row * shape.pitch, start + row * shape.pitch + shape.width


def without(touched: Iterable[Range], written: Iterable[Range]) -> list[Range]:
    """What of ``touched`` is not among ``written``."""
    left = list(touched)
    for block, start, end in written:
        left = [
            piece
            for own, low, high in left
            for piece in (
                [(own, low, min(high, start)), (own, max(low, end), high)]
                if own is block
                else [(own, low, high)]
            )
            if piece[1] < piece[2]
        ]
    return left


class Journal:
    """What was declared to be written, less what was."""

    __slots__ = ("left",)

    def __init__(self, declared: Iterable[Use]) -> None:
        self.left = list(ranges(declared, Access.WRITE))

    def note(self, uses: Iterable[Use]) -> None:
        """These were written."""
        self.left = without(self.left, ranges(uses, Access.WRITE))


def claim(touched: Iterable[Range], failure: Failure) -> None:
    """These bytes were not written because of ``failure``."""
    for block, start, end in touched:
        if start < end:
            claims = block.taint
            if not isinstance(claims, Claims):
                claims = block.taint = Claims()
            claims.claim(start, end, failure)
            block.write_stream.asked = block.write_stream.seq  # a graph that uses it has to look again


def clear(touched: Iterable[Range]) -> None:
    """These bytes were written."""
    for block, start, end in touched:
        claims = block.taint
        if isinstance(claims, Claims):
            claims.clear(start, end)
            if not claims.ranges:
                block.taint = None


def failures(touched: Iterable[Range]) -> list[Failure]:
    """What claims any of these bytes, each failure once."""
    found: list[Failure] = []
    for block, start, end in touched:
        claims = block.taint
        if isinstance(claims, Claims):
            found += [failure for failure in claims.within(start, end) if failure not in found]
    return found


def check_written(touched: Iterable[Range]) -> None:
    """Raise if any of these bytes is claimed.

    Raises:
        UnwrittenError: by one failure.
        SeveralErrors: by more than one.
    """
    found = [failure.error() for failure in failures(touched)]
    if len(found) == 1:
        raise found[0]
    if found:
        raise SeveralErrors("reading bytes that were never written", errors=found) from found[0]
