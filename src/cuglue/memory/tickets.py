"""What ties a prepared use of a block to its finish.

Owns the tickets of blocks in preparation. Must not know resources: it sees blocks and streams.

A write that is finished replaces the uses before it, which is right only for those that its ``prepare`` waited for. The
ticket says which those were; every other use stays, so that no later write and no free forgets it. Between ``prepare``
and ``finish`` the work is not noted yet, so a conflicting ``prepare`` of another thread waits for the ``finish``.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from ..core.block import BlockLife
from ..core.stream import Stream
from ..driver.protocol import Access
from ..errors import StreamMisuse

_PATIENCE = 10.0  # seconds that a prepare waits for another thread's finish
_LOOK = 0.2  # seconds between looks whether that thread still lives


class Ticket(NamedTuple):
    """One prepared use: who it is for, and the uses that it waited for."""

    thread: threading.Thread
    stream: Stream
    access: Access
    write: tuple[Stream, int]
    reads: dict[Stream, int]


class Tickets:
    """Tickets of the blocks of one resource.

    Args:
        ordering: the device's lock for ordering, so that commands and these calls do not interleave.
    """

    def __init__(self, ordering: threading.RLock) -> None:
        self._changed = threading.Condition(ordering)
        self._open: dict[int, list[Ticket]] = {}  # by generation

    def open(self, block: BlockLife, stream: Stream, access: Access) -> None:
        """Queue on ``stream`` the waits for ``access`` and keep what they covered.

        Blocks the host while another thread has a conflicting use prepared and not finished.

        Raises:
            StreamMisuse: that thread did not finish in time.
        """
        me = threading.current_thread()
        with self._changed:
            self._await_turn(block, stream, access, me)
            block.prepare(stream, access)
            ticket = Ticket(
                me, stream, access, (block.write_stream, block.write_seq), dict(block.reads or {})
            )
            # One ticket per thread, stream and kind: a use prepared again and again piles up nothing.
            others = [
                t
                for t in self._open.get(block.generation, ())
                if (t.thread, t.stream, t.access & 2) != (me, stream, access & 2)
            ]
            self._open[block.generation] = [*others, ticket]

    def close(self, block: BlockLife, stream: Stream, access: Access) -> None:
        """Note the work as an operation of ``stream``; a write drops the uses that its ticket covers."""
        with self._changed:
            ticket = self._take(block, stream, access)
            kept = _uncovered(block, stream, ticket) if access & 2 else None
            block.finish(stream, access)
            if kept:
                block.reads = kept
            self._changed.notify_all()

    def note(self, block: BlockLife, stream: Stream) -> None:
        """Note work queued on ``stream`` that only keeps the block alive."""
        with self._changed:
            block.finish(stream, Access.READ)

    def cancel(self, block: BlockLife, stream: Stream, access: Access) -> None:
        """The prepared work was never enqueued."""
        with self._changed:
            self._take(block, stream, access)
            self._changed.notify_all()

    def forget(self, block: BlockLife) -> None:
        """The block is gone."""
        if block.generation in self._open:
            with self._changed:
                self._open.pop(block.generation, None)
                self._changed.notify_all()

    def _take(self, block: BlockLife, stream: Stream, access: Access) -> Ticket | None:
        tickets = self._open.get(block.generation, [])
        fitting = [t for t in tickets if t.stream is stream and (t.access & 2) == (access & 2)]
        if not fitting:
            return None
        me = threading.current_thread()
        ticket = next((t for t in fitting if t.thread is me), fitting[-1])
        tickets.remove(ticket)
        if not tickets:
            del self._open[block.generation]
        return ticket

    def _await_turn(self, block: BlockLife, stream: Stream, access: Access, me: threading.Thread) -> None:
        deadline = 0.0
        while True:
            rivals = self._rivals(block, stream, access, me)
            if rivals:  # a recorder that was dropped takes its ticket back here
                stream.state.retire.run_forgotten()
                rivals = self._rivals(block, stream, access, me)
            if not rivals:
                return
            now = time.monotonic()
            deadline = deadline or now + _PATIENCE
            if now >= deadline:
                raise StreamMisuse(
                    f"block of generation {block.generation}",
                    got=f"a use on {rivals[0].stream!r} that {rivals[0].thread.name} prepared and did not finish",
                    expected="a finish_block_use for each prepare_block_use",
                    hint="Call finish_block_use, or cancel_block_use if nothing was enqueued",
                )
            self._changed.wait(_LOOK)

    def _rivals(self, block: BlockLife, stream: Stream, access: Access, me: threading.Thread) -> list[Ticket]:
        """Prepared uses of other threads that a use on ``stream`` conflicts with."""
        return [
            t
            for t in self._open.get(block.generation, ())
            if t.thread is not me
            and t.stream is not stream
            and (t.access | access) & 2
            and t.thread.is_alive()
        ]


def _uncovered(block: BlockLife, stream: Stream, ticket: Ticket | None) -> dict[Stream, int]:
    """The uses of ``block`` that a write on ``stream`` with this ticket was not ordered after."""
    waited = {} if ticket is None else ticket.reads
    kept = {
        reader: seq
        for reader, seq in (block.reads or {}).items()
        if reader is not stream and waited.get(reader) != seq
    }
    writer, seq = block.write_stream, block.write_seq
    if writer is not stream and (ticket is None or ticket.write != (writer, seq)):
        kept[writer] = max(seq, kept.get(writer, 0))
    return kept
