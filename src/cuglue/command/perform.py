"""Performing an operation: the one way that work reaches a stream.

Owns the sequence around every enqueue: refuse what would read bytes that were never written, wait, enqueue, stamp, and
keep the books of taint and of a capture under way. Must not know what is enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..driver.protocol import Access
from ..errors import CaptureError, CuglueError, LaunchError
from .lane import Lane
from .taint import Failure, Journal, Range, claim, clear, failures, ranges
from .uses import Uses
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
    name: str,
    call: Callable[..., object],
    *arguments: Any,
    inputs: Iterable[Range] | None = None,
    journal: Journal | None = None,
) -> Skipped | None:
    """Order, enqueue and stamp one operation.

    What it writes counts as never written if it fails, and if it is skipped.

    Args:
        lane: where.
        uses: everything it touches.
        name: for reports.
        call: makes the driver call, with ``arguments``.
        inputs: the bytes whose contents matter; None: all that it reads.
        journal: told what was written.

    Ordering: only enqueues.

    Raises:
        CaptureError: a wait would cross a capture; nothing was enqueued or claimed.
        DriverError: refused; its outputs are claimed.
    """
    stream, window = lane.stream, lane.window
    with stream.state.ordering:
        quiet = uses.quiet(stream)
        tainted = not quiet and uses.tainted
        if tainted:
            skipped = _skip(lane, uses, name, inputs)
            if skipped is not None:
                return skipped
        ordered = False
        try:
            if window is not None:
                refuse_transient(uses)
            if not quiet:
                uses.prepare(stream)
            ordered = True
            call(*arguments)
        except BaseException as error:
            if ordered and not isinstance(error, CuglueError):
                uses.finish(stream)  # interrupted: the driver may have it
            refused(lane, uses, error, name)
            raise
        try:
            if tainted:
                clear(ranges(uses.entries, Access.WRITE))
            if journal is not None and journal.left:
                journal.note(uses.entries)
            if window is not None:
                window.note(uses)
            uses.finish(stream)
        except CuglueError:
            raise
        except BaseException:
            uses.finish(stream)  # interrupted: a second stamp does no harm
            raise
    return None


def _skip(lane: Lane, uses: Uses, name: str, inputs: Iterable[Range] | None) -> Skipped | None:
    """Do not run what would read claimed bytes; its outputs are claimed by the same failure."""
    found = failures(ranges(uses.entries, Access.READ) if inputs is None else inputs)
    if not found:
        return None
    failure = found[0]
    failure.skip(name)
    claim(ranges(uses.entries, Access.WRITE), failure)
    _spoil(lane, failure.error())
    return Skipped(failure.root, failure.chain)


def _spoil(lane: Lane, failure: BaseException) -> None:
    """Work that was meant to be there is not: a capture under way makes no graph, open profiles tell no time."""
    if lane.window is not None:
        lane.window.doom(failure)
    for profile in lane.profiles:
        profile.invalidate(failure)


def refused(lane: Lane, uses: Uses, error: BaseException, name: str) -> None:
    """Note that an operation was not enqueued: what it writes counts as never written, unless it was a misuse."""
    if isinstance(error, LaunchError) and not error.what:
        error.what = f"kernel {name!r}"
    _spoil(lane, error)
    if isinstance(error, CaptureError):
        return  # a misuse, found before anything happened
    written = list(ranges(uses.entries, Access.WRITE))
    claim(written, Failure(error))
    if written:
        error.add_note(
            "What it should have written counts as unwritten: write it again, or Buffer.trust() it"
        )
