"""What the oracle reports: two operations that touch the same bytes in no order, each with the line that queued it.

Owns call sites, the hazard record and its error. Must not know how a hazard is found.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import CuglueError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_BELOW = (
    _PACKAGE + "driver" + os.sep,
    _PACKAGE + "testing" + os.sep,
)  # the plumbing: never the site of a call
_OUTSIDE, _LIBRARY, _PLUMBING, _GENERATED = range(4)


class _Parts(dict[str, int]):
    """Which part of the program a file belongs to: every queued operation asks for a dozen frames."""

    def __missing__(self, file: str) -> int:
        if file.startswith(_PACKAGE):
            part = _PLUMBING if file.startswith(_BELOW) else _LIBRARY
        else:
            part = _GENERATED if file.startswith("<") else _OUTSIDE
        self[file] = part
        return part


_PART = _Parts()


class Site(NamedTuple):
    """Where a call came from: the first line outside the package, and the library line on the way (may be empty)."""

    file: str
    line: int
    library_file: str = ""
    library_line: int = 0

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}"
        return f"{text} (through {self.library_file}:{self.library_line})" if self.library_file else text


def call_site() -> Site:
    """The site of the running driver call. Costs a walk of the stack, no source line is read."""
    frame = sys._getframe(1)
    library: tuple[str, int] | None = None
    while (part := _PART[frame.f_code.co_filename]) != _OUTSIDE:
        if part == _LIBRARY and library is None:
            library = (frame.f_code.co_filename, frame.f_lineno)
        if frame.f_back is None:
            break
        frame = frame.f_back
    if library is None:
        return Site(frame.f_code.co_filename, frame.f_lineno)
    return Site(frame.f_code.co_filename, frame.f_lineno, *library)


@dataclass(frozen=True, slots=True)
class Operation:
    """One side of a hazard: the driver call, the stream it was queued on (None: the host) and its site."""

    name: str
    stream: int | None
    site: Site

    def __str__(self) -> str:
        where = "by the host" if self.stream is None else f"on stream {self.stream:#x}"
        return f"{self.name} {where} at {self.site}"


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two operations on the same bytes that nothing orders, or a use of memory that is gone.

    Attributes:
        kind: what is wrong, in words.
        ptr: address of the first byte that both touch.
        nbytes: extent in bytes.
        first: the operation that was issued first.
        second: the one that does not wait for it.
    """

    kind: str
    ptr: int
    nbytes: int
    first: Operation
    second: Operation

    def __str__(self) -> str:
        return (
            f"{self.kind} of {self.nbytes} bytes at {self.ptr:#x}\n"
            f"      first:  {self.first}\n      second: {self.second}"
        )


class HazardError(CuglueError):
    """Work was queued that nothing orders. Raised at the next wait; ``hazards`` holds the records."""

    FIELDS = ("hazards",)
    hazards: tuple[Hazard, ...]

    def __str__(self) -> str:
        return self.what + "".join(f"\n  {i}. {hazard}" for i, hazard in enumerate(self.hazards, 1))


class DeviceHangs(CuglueError, TimeoutError):
    """A wait outlasted the driver's ``wait_limit``: work is blocked by a latch or semaphore nobody released."""
