"""A resource for finding who writes where it must not, and who uses memory that it gave back.

Owns when canaries are laid and looked at, and who is held back. Must not know how memory is allocated, nor how canaries
and poison look: see :mod:`.patterns`. For debugging: it blocks the host at each free, to look at the canaries.
"""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from ..arguments import seconds
from ..core import process
from ..core.block import BlockId, BlockLife
from ..core.device import device_state
from ..core.stream import Stream
from ..driver.protocol import Access
from ..errors import (
    CaptureError,
    CuglueError,
    LayoutError,
    OutOfBounds,
    OutOfMemory,
    UseAfterFree,
    raise_together,
)
from ..lifecycle import BlockState
from .adaptor import Adaptor
from .block import LARGEST, UnderBlock, as_size, give_back, handed_out
from .layered import check_block, check_block_id
from .misuse import MemoryMisuseWarning, Misuse
from .patterns import Patterns
from .quarantine import Quarantine
from .resource import DeviceMemoryResource
from .streams import or_refuge
from .table import BlockTable

_MOST_EXTRA = 1 << 20


class _Guarded(NamedTuple):
    """A block as the user has it, and the larger one below it."""

    outer: Any
    inner: Any


class DebugGuardResource(Adaptor):
    """Puts canaries beside each block, poisons memory as it comes and goes, and holds freed memory back for a while.

    Broken canaries raise OutOfBounds at the free. Writes to freed memory are found when it leaves the quarantine, or by
    :meth:`check`. Reads of freed memory show as the byte 0xDD, of memory never written as 0xCB.
    """

    def __init__(
        self,
        upstream: DeviceMemoryResource,
        *,
        canary: int = 64,
        poison: bool = True,
        quarantine_bytes: int = 64 << 20,
        quarantine_age: float = 60.0,
    ) -> None:
        """Put a guard over ``upstream``.

        Args:
            upstream: where memory comes from.
            canary: bytes beside each block that are watched, at either end.
            poison: overwrite memory as it comes and goes.
            quarantine_bytes: most bytes held back.
            quarantine_age: seconds after which a block is held back no longer.
        """
        super().__init__(upstream)
        self._patterns = Patterns(as_size(canary, "canary"), poison)
        if self._patterns.canary > _MOST_EXTRA:
            raise LayoutError("canary", got=f"{canary} bytes", expected=f"at most {_MOST_EXTRA}")
        self._quarantine: Quarantine[_Guarded] = Quarantine(
            as_size(quarantine_bytes, "quarantine_bytes"), seconds("quarantine_age", quarantine_age)
        )
        self._table = BlockTable()
        self._inner: dict[int, Any] = {}  # by generation of the outer block
        self._leaving: deque[_Guarded] = deque()  # given back to upstream, maybe not free yet
        self._life = process.life
        self.reports: list[Misuse] = []

    # --- allocate -----------------------------------------------------------------------------------------------
    def _allocate(self, nbytes: int, stream: Stream, tag: str, kind: Any) -> Any:
        self._tidy()
        if not 0 < nbytes <= LARGEST - 2 * _MOST_EXTRA:
            return self._take(nbytes, stream, tag, kind)  # upstream says what is wrong with that
        stream.refuse_capture("guarded memory, whose canaries would be written by the graph")
        patterns, front = self._patterns, self._patterns.front(stream)
        size = front + nbytes + patterns.canary
        try:
            inner = self._take(size, stream, tag, UnderBlock)
        except OutOfMemory:
            if not self._quarantine:
                raise
            self.flush()
            inner = self._take(size, stream, tag, UnderBlock)
        try:
            patterns.lay(inner.ptr, front, nbytes, stream)
            inner.finish(stream, Access.WRITE)
            outer = kind(inner.ptr + front, nbytes, stream, inner.write_seq, tag)
            self._table.add(outer)
            self._inner[outer.generation] = inner  # no call since it is there
        except BaseException as error:
            inner.finish(stream, Access.WRITE)
            self._return(inner, error)
            raise
        return outer

    # --- deallocate ---------------------------------------------------------------------------------------------
    def _deallocate(self, block: Any) -> None:
        if block.state is not BlockState.LIVE or not self._table.remove(block):
            raise self._not_live(block)
        try:
            guarded = _Guarded(block, self._inner[block.generation])
            offset = self._patterns.broken_beside(block, guarded.inner, stream := self._joined(guarded))
            found = None if offset is None else Misuse.of("out of bounds", block, offset, self._table)
            self._patterns.spoil(block, stream)
            guarded.inner.finish(stream, Access.WRITE)
            self._quarantine.add(guarded, guarded.inner.size)
            del self._inner[block.generation]  # no call since it is held: see there
            block.state = BlockState.QUARANTINED
        except BaseException:
            self._table.add(block)
            raise
        self._tidy()
        if found is not None:
            self.reports.append(found)
            raise found.error()

    def _not_live(self, block: Any) -> UseAfterFree:
        owner = self.block_at(block.ptr)
        now = f"given back (its address belongs to block {owner.tag!r} now)" if owner else "given back"
        return UseAfterFree(
            f"block {block.tag!r} of generation {block.generation}",
            got="a copy, or another guard's" if block.state is BlockState.LIVE else f"one that was {now}",
            expected="a live block of this guard",
            generation=block.generation,
        )

    def _joined(self, guarded: _Guarded) -> Stream:
        """A stream that comes after all uses of the block, and does not capture: looks and poison are for no graph."""
        stream = or_refuge(guarded.outer.stream)
        stream.refuse_capture("look at guarded memory, or poison it")
        with stream.state.ordering:
            guarded.outer.join_uses(stream)
            guarded.inner.join_uses(stream)
        return stream

    # --- quarantine ---------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Give the quarantine back, but for what a capture is in the way of. Blocks the host for each block.

        Raises:
            SeveralErrors: more than one block could not be given back; a single error is raised as it is. They stay.
        """
        self._release(due=False)

    def _tidy(self) -> None:
        with suppress(
            CuglueError
        ):  # of older blocks, which stay: the next call tries again, and a reap says so
            self._release(due=True)

    def _release(self, *, due: bool) -> None:
        """Give back what is held back, oldest first, all of it or what is due. Each block is tried."""
        errors: list[BaseException] = []
        stay = 0
        while (held := self._quarantine.take(due=due, at=(at := stay))) is not None:
            outer, inner = held.thing
            try:
                self._give_held(held.thing)
            except CuglueError as error:
                stay += 1
                if not isinstance(error, CaptureError):  # else its time comes when the capture is over
                    errors.append(error)
            finally:
                if inner.state is BlockState.LIVE:
                    self._quarantine.put_back(held, at)
                else:
                    outer.state = inner.state
                    if inner.state is not BlockState.FREED:
                        self._leaving += (held.thing,)
        raise_together(f"ending the quarantine of {self!r}", errors)

    def _give_held(self, guarded: _Guarded) -> None:
        """Give one block back that is held no longer, and tell what was found in it."""
        said: OutOfBounds | None = None
        found = self._look_inside(guarded)
        try:
            self._give(guarded.inner)
        except OutOfBounds as error:  # a guard below complains, and has the block all the same
            said = error
        if found is not None:
            self.reports.append(found)
        for misuse in found, said:
            if misuse is not None:
                warnings.warn(str(misuse), MemoryMisuseWarning, stacklevel=2)

    def reap_pending(self, *, block: bool = True) -> None:
        """Inherited. Waiting also ends the quarantine; only looking ends it for blocks that were held long enough."""
        device_state(self.driver, self.device).retire.run_forgotten()  # of arrays: held back too
        self._release(due=not block)
        self.upstream.reap_pending(block=block)
        self._follow()

    def _look(self) -> None:
        self._release(due=True)
        super()._look()
        self._follow()

    def _follow(self) -> None:
        """What is free below is free here."""
        for _ in range(len(self._leaving)):
            if not self._leaving:
                return  # another thread was quicker
            guarded = self._leaving[0]
            del self._leaving[0]
            guarded.outer.state = guarded.inner.state
            if guarded.inner.state is not BlockState.FREED:
                self._leaving += (guarded,)

    def close(self) -> None:
        """Close what lies below, after giving it back what is live and what is held back. Closing again does nothing.

        Memory of living arrays is given back when they die.

        Raises:
            CaptureError: a capture is in the way of some blocks; close it again when that is over.
            OutOfBounds: a canary of a block that was live is broken; the guard is closed all the same.
        """
        if self._life is not process.life:
            return self.upstream.close()  # a forked child: everything belongs to the parent
        if len(self._table):  # some of it is of arrays that are dead already
            device_state(self.driver, self.device).retire.run_forgotten()
        held = handed_out(self._table)
        misuses: list[BaseException] = []
        errors: list[BaseException] = []
        for block in held:
            try:
                give_back(block, self)
            except CuglueError as error:
                (misuses if isinstance(error, OutOfBounds) else errors).append(error)
        raise_together(f"closing {self!r}", errors)
        self._quarantine.end()  # what comes back from now on is held back no longer
        self.flush()
        if self._quarantine:
            raise CaptureError(
                repr(self), got="close()", expected="the end of a capture, which is in the way"
            )
        self.upstream.close()
        self._follow()
        if held:
            tags = ", ".join(sorted({block.tag for block in held}))
            said = f"{self!r} closed with {len(held)} blocks live (tags: {tags}; freed now)"
            warnings.warn(said, ResourceWarning, stacklevel=2)
        raise_together(f"closing {self!r}", misuses)

    # --- looking ------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Look at every canary and at everything held back, but for what a capture is in the way of. Blocks the host.

        Raises:
            OutOfBounds, UseAfterFree: the first misuse found; all of them are in :attr:`reports`.
        """
        looks = [partial(self._look_at_live, outer) for outer in list(self._table)]
        looks += [partial(self._look_inside, guarded) for guarded in self._quarantine]
        misuses: list[Misuse] = []
        for look in looks:
            try:
                found = look()
            except CaptureError:
                continue
            if found is not None:
                misuses.append(found)
        self.reports += misuses
        if misuses:
            raise misuses[0].error()

    def _look_at_live(self, outer: Any) -> Misuse | None:
        """Whether a canary of a live block is broken. Looks at nothing that a graph uses."""
        inner = self._inner.get(outer.generation)
        if inner is None or any(s.capturing for s in (outer.stream, *(s for s, _ in outer.uses()))):
            return None
        offset = self._patterns.broken_beside(outer, inner, self._joined(_Guarded(outer, inner)))
        return None if offset is None else Misuse.of("out of bounds", outer, offset, self._table)

    def _look_inside(self, guarded: _Guarded) -> Misuse | None:
        """Whether a block that is held back was written."""
        outer, inner = guarded
        stream = inner.write_stream
        if not self._patterns.poison or stream.capturing:
            return None
        offset = self._patterns.written_inside(outer, or_refuge(stream))
        return None if offset is None else Misuse.of("use after free", outer, offset, self._table)

    # --- uses ---------------------------------------------------------------------------------------------------
    # Told to the resource below, and noted at the block that the user has: cuglue.use looks there.
    def _pair(self, block_id: BlockId, call: str) -> tuple[BlockLife, BlockId]:
        """The block that the user means, and the id of the one below it."""
        check_block_id(self, block_id, call)
        outer = self._table.find(block_id)
        inner = self._inner[outer.generation]
        return outer, BlockId(inner.ptr, inner.generation, inner.stream.id, inner.device_id)

    def record_block_use(self, block: Any, stream: object) -> None:
        """Inherited."""
        outer, user = self._table.find(check_block(block).id), self._stream(stream)
        self.upstream.record_block_use(self._inner[outer.generation], user)
        with user.state.ordering:
            outer.finish(user, Access.READ)

    def prepare_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Inherited."""
        (outer, below), user = self._pair(block_id, "prepare_block_use"), self._stream(stream)
        self.upstream.prepare_block_use(below, user, access)
        with user.state.ordering:
            outer.prepare(user, access)

    def finish_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Inherited."""
        (outer, below), user = self._pair(block_id, "finish_block_use"), self._stream(stream)
        self.upstream.finish_block_use(below, user, access)
        with user.state.ordering:
            outer.finish(user, access)

    def cancel_block_use(self, block_id: BlockId, stream: object, access: Access) -> None:
        """Inherited."""
        self.upstream.cancel_block_use(self._pair(block_id, "cancel_block_use")[1], stream, access)

    def live_blocks(self) -> list[BlockLife]:
        """Inherited."""
        return list(self._table)

    def block_at(self, address: int) -> BlockLife | None:
        """Inherited."""
        return self._table.around(address)


__all__ = ["DebugGuardResource", "MemoryMisuseWarning", "Misuse"]
