"""A resource for finding who writes where it must not, and who uses memory that it gave back.

Owns canaries, poison and the quarantine. Must not know how memory is allocated. For debugging: it blocks the host at
each free, to look at the canaries.
"""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any, Literal, NamedTuple

import numpy as np

from ..arguments import seconds
from ..core import process
from ..core.block import BlockId, BlockLife
from ..core.device import device_state
from ..core.stream import Stream
from ..driver.protocol import Access
from ..errors import CuglueError, LayoutError, OutOfBounds, OutOfMemory, UseAfterFree, raise_together
from ..lifecycle import BlockState
from .adaptor import Adaptor
from .block import LARGEST, UnderBlock, as_size, give_back, handed_out
from .layered import check_block, check_block_id
from .misuse import MemoryMisuseWarning, Misuse
from .quarantine import Quarantine
from .readback import read_back
from .resource import DeviceMemoryResource
from .streams import refuge
from .table import BlockTable

CANARY = 0xCA
FRESH = 0xCB  # of memory handed out and not written yet
FREED = 0xDD  # of memory given back
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
        self._canary = as_size(canary, "canary")
        if self._canary > _MOST_EXTRA:
            raise LayoutError("canary", got=f"{canary} bytes", expected=f"at most {_MOST_EXTRA}")
        self._poison = poison
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
        alignment = stream.state.capabilities.alignment
        front = -(-self._canary // alignment) * alignment
        try:
            inner = self._take(front + nbytes + self._canary, stream, tag, UnderBlock)
        except OutOfMemory:
            if not self._quarantine:
                raise
            self.flush()
            inner = self._take(front + nbytes + self._canary, stream, tag, UnderBlock)
        try:
            self._fill(inner.ptr, CANARY, front, stream)
            self._fill(inner.ptr + front + nbytes, CANARY, self._canary, stream)
            if self._poison:
                self._fill(inner.ptr + front, FRESH, nbytes, stream)
            inner.finish(stream, Access.WRITE)
            outer = kind(inner.ptr + front, nbytes, stream, inner.write_seq, tag)
            self._table.add(outer)
        except BaseException as error:
            inner.finish(stream, Access.WRITE)
            self._return(inner, error)
            raise
        self._inner[outer.generation] = inner
        return outer

    # --- deallocate ---------------------------------------------------------------------------------------------
    def _deallocate(self, block: Any) -> None:
        if block.state is not BlockState.LIVE or not self._table.remove(block):
            raise self._not_live(block)
        inner = self._inner[block.generation]
        guarded = _Guarded(block, inner)
        try:
            found = self._look_beside(guarded, stream := self._joined(guarded))
            if self._poison:
                self._fill(block.ptr, FREED, block.size, stream)
            inner.finish(stream, Access.WRITE)
        except BaseException:
            self._table.add(block)
            raise
        del self._inner[block.generation]
        block.state = BlockState.QUARANTINED
        self._quarantine.add(guarded, inner.size)
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
        stream: Stream = guarded.outer.stream
        if not stream.nameable():
            stream = refuge(stream.state)
            stream.join_context()
        stream.refuse_capture("look at guarded memory, or poison it")
        with stream.state.ordering:
            guarded.outer.join_uses(stream)
            guarded.inner.join_uses(stream)
        return stream

    # --- quarantine ---------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Give the whole quarantine back. Blocks the host for each block."""
        while self._quarantine:
            self._release_oldest()

    def _release_due(self) -> None:
        while self._quarantine.due():
            self._release_oldest()

    def _tidy(self) -> None:
        try:
            self._release_due()
        except CuglueError:
            pass  # of an older block, which stays the oldest: the next call tries again, and a reap says so

    def _release_oldest(self) -> None:
        held = self._quarantine.take()
        if held is None:
            return  # another thread was quicker
        guarded = held.thing
        said: OutOfBounds | None = None
        try:
            found = self._look_inside(guarded)
            try:
                self._give(guarded.inner)
            except OutOfBounds as error:  # a guard below complains, and has the block all the same
                said = error
        except BaseException:
            self._quarantine.put_back(held)
            raise
        guarded.outer.state = guarded.inner.state
        if guarded.inner.state is not BlockState.FREED:
            self._leaving.append(guarded)
        if found is not None:
            self.reports.append(found)
        for misuse in found, said:
            if misuse is not None:
                warnings.warn(str(misuse), MemoryMisuseWarning, stacklevel=2)

    def reap_pending(self, *, block: bool = True) -> None:
        """Inherited. Waiting also ends the quarantine; only looking ends it for blocks that were held long enough."""
        device_state(self.driver, self.device).retire.run_forgotten()  # of arrays: held back too
        if block:
            self.flush()
        else:
            self._release_due()
        self.upstream.reap_pending(block=block)
        self._follow()

    def _look(self) -> None:
        self._release_due()
        super()._look()
        self._follow()

    def _follow(self) -> None:
        """What is free below is free here."""
        for _ in range(len(self._leaving)):
            try:
                guarded = self._leaving.popleft()
            except IndexError:
                return
            guarded.outer.state = guarded.inner.state
            if guarded.inner.state is not BlockState.FREED:
                self._leaving.append(guarded)

    def close(self) -> None:
        """Close what lies below, after giving it back what is live and what is held back. Closing again does nothing.

        Memory of living arrays is given back when they die.

        Raises:
            OutOfBounds: a canary of a block that was live is broken; the guard is closed all the same.
        """
        if self._life is not process.life:
            return self.upstream.close()  # a forked child: everything belongs to the parent
        if len(self._table):  # some of it is of arrays that are dead already
            device_state(self.driver, self.device).retire.run_forgotten()
        held = handed_out(self._table)
        misuses: list[BaseException] = []
        for block in held:
            try:
                give_back(block, self)
            except OutOfBounds as error:
                misuses.append(error)
        self._quarantine.end()  # what comes back from now on is held back no longer
        self.flush()
        self.upstream.close()
        self._follow()
        if held:
            tags = ", ".join(sorted({block.tag for block in held}))
            said = f"{self!r} closed with {len(held)} blocks live (tags: {tags}; freed now)"
            warnings.warn(said, ResourceWarning, stacklevel=2)
        raise_together(f"closing {self!r}", misuses)

    # --- looking ------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Look at every canary and at everything held back, but for memory of streams that capture. Blocks the host.

        Raises:
            OutOfBounds, UseAfterFree: the first misuse found; all of them are in :attr:`reports`.
        """
        found: list[Misuse | None] = []
        for outer in list(self._table):
            inner = self._inner.get(outer.generation)
            if inner is None or any(s.capturing for s in (outer.stream, *(s for s, _ in outer.uses()))):
                continue
            guarded = _Guarded(outer, inner)
            found.append(self._look_beside(guarded, self._joined(guarded)))
        found += [self._look_inside(guarded) for guarded in self._quarantine]
        misuses = [misuse for misuse in found if misuse is not None]
        self.reports += misuses
        if misuses:
            raise misuses[0].error()

    def _look_beside(self, guarded: _Guarded, stream: Stream) -> Misuse | None:
        """Whether a canary is broken; ``stream`` comes after all uses."""
        outer, inner = guarded
        front = outer.ptr - inner.ptr
        before, after = read_back(stream, (inner.ptr, front), (outer.ptr + outer.size, self._canary))
        wrong = [
            *(np.flatnonzero(before != CANARY) - front)[-1:],
            *(np.flatnonzero(after != CANARY) + outer.size)[:1],
        ]
        return self._misuse("out of bounds", outer, int(wrong[0])) if wrong else None

    def _look_inside(self, guarded: _Guarded) -> Misuse | None:
        """Whether a block that is held back was written."""
        outer, inner = guarded
        stream = inner.write_stream
        if not self._poison or stream.capturing:
            return None
        if not stream.nameable():
            stream = refuge(stream.state)
            stream.join_context()
        (body,) = read_back(stream, (outer.ptr, outer.size))
        wrong = np.flatnonzero(body != FREED)
        return self._misuse("use after free", outer, int(wrong[0])) if wrong.size else None

    def _misuse(self, kind: Literal["out of bounds", "use after free"], block: Any, offset: int) -> Misuse:
        others = [b for b in self._table if b is not block]
        nearest = min(others, key=lambda b: abs(b.ptr - block.ptr), default=None)
        return Misuse(kind, block.tag, block.generation, offset, nearest.tag if nearest else None)

    def _fill(self, ptr: int, value: int, nbytes: int, stream: Stream) -> None:
        if nbytes:
            self.driver.fill_async(ptr, value, nbytes, stream.handle)

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
