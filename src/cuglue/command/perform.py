"""Performing an operation: the one way that work reaches a stream.

Owns the sequence around every enqueue: refuse what would read bytes that were never written, wait, enqueue, stamp, and
keep the books of taint and of a capture under way. Must not know what is enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..driver.protocol import Access
from ..errors import CaptureError
from .lanes import Lane
from .resolve import Uses
from .taint import Failure, Range, claim, clear, failures, ranges
from .window import refuse_transient


class Skipped(NamedTuple):
    """What a launch gives that was not run, because bytes that it reads were never written.

    Attributes:
        root: the failure that is the reason.
        chain: names of the work skipped because of it, newest last.
    """

    root: BaseException
    chain: tuple[str, ...]


def perform(
    lane: Lane,
    uses: Uses,
    enqueue: Callable[[], None],
    name: str,
    *,
    inputs: Iterable[Range] | None = None,
    journal: list[Range] | None = None,
) -> Skipped | None:
    """Order, enqueue and stamp one operation.

    What it writes counts as never written if it fails, and if it is skipped.

    Args:
        lane: where.
        uses: everything it touches.
        enqueue: makes the driver call.
        name: for reports.
        inputs: the bytes whose contents matter; None: all that it reads.
        journal: gets the bytes that were written.

    Ordering: only enqueues.

    Raises:
        CaptureError: a wait would cross a capture; nothing was enqueued or claimed.
        DriverError: refused; its outputs are claimed.
    """
    stream, window = lane.stream, lane.window
    with stream.state.ordering:
        if uses.tainted:
            found = failures(ranges(uses.entries, Access.READ) if inputs is None else inputs)
            if found:
                found[0].skip(name)
                claim(ranges(uses.entries, Access.WRITE), found[0])
                if window is not None:
                    window.doom(found[0].error())
                return Skipped(found[0].root, found[0].chain)
        try:
            if window is not None:
                refuse_transient(uses)
            uses.prepare(stream)
            enqueue()
        except CaptureError as error:
            if window is not None:
                window.doom(error)
            raise
        except BaseException as error:
            written = list(ranges(uses.entries, Access.WRITE))
            claim(written, Failure(error))
            if written:
                error.add_note(
                    "What it should have written counts as unwritten: write it again, or Buffer.trust() it"
                )
            if window is not None:
                window.doom(error)
            raise
        if uses.tainted:
            clear(ranges(uses.entries, Access.WRITE))
        if journal is not None:
            journal.extend(ranges(uses.entries, Access.WRITE))
        if window is not None:
            window.note(uses)
        uses.finish(stream)
    return None
