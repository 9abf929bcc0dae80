"""Who still holds memory that was exported.

Owns export tokens and the ledger that counts them. Every array made from exported memory holds a token, directly or
through the library that made it; the token keeps the owner of the memory alive and leaves the ledger when the last
holder drops it. Must not know what is exported, or how.

The CUDA array interface has no such holder: its readers keep the exporting object itself, or nothing at all.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import warnings
from collections import deque
from functools import cache
from typing import NamedTuple

from ..errors import BusyError, DanglingExportWarning

_ARRAY_LIBRARIES = frozenset(
    ["numpy", "torch", "cupy", "cupyx", "jax", "jaxlib", "numba", "numba_cuda", "cuda", "warp"]
)
#: Packages whose frames are not "the line that made the array".
_LIBRARIES = _ARRAY_LIBRARIES | {"cuglue", "contextlib"}
_numbers = itertools.count(1)
_FOLD_ABOVE = 64  # dropped exports of an owner that nobody asks for its live ones


class Export(NamedTuple):
    """One live export: how it was made and where."""

    how: str
    filename: str
    line: int

    def __str__(self) -> str:
        return f"{self.how} at {self.filename}:{self.line}"


class ExportToken:
    """Held by whatever was exported; keeps ``owner`` alive. Made by :meth:`ExportLedger.issue`."""

    __slots__ = ("__weakref__", "_dropped", "_number", "owner")

    def __init__(self, owner: object, number: int, dropped: deque[int]) -> None:
        self.owner = owner
        self._number = number
        self._dropped = dropped

    def __del__(self) -> None:
        try:
            self._dropped.append(self._number)  # on any thread, also in the collector: nothing but this
        except AttributeError:
            pass  # its making was interrupted


class ExportLedger:
    """The live exports of one owner. Exact: an export is in it from its making until its last holder is gone."""

    __slots__ = ("_dropped", "_live")

    def __init__(self) -> None:
        self._live: dict[int, tuple[str, tuple[str, int]]] = {}
        self._dropped: deque[int] = deque()

    def issue(self, owner: object, how: str, depth: int = 1) -> ExportToken:
        """Enter an export and give the token that its holders keep.

        Args:
            owner: what has to stay alive with the export.
            how: the call that makes it, for messages.
            depth: where the search for the line that asked for it begins; 1: with the caller of this.
        """
        if len(self._dropped) > _FOLD_ABOVE:
            self._fold()
        number = next(_numbers)
        # The token first: an interrupt leaves no entry without a holder.
        token = ExportToken(owner, number, self._dropped)
        self._live[number] = how, call_site(depth + 1)
        return token

    def live(self) -> tuple[Export, ...]:
        """Every export that somebody still holds, oldest first."""
        self._fold()
        return tuple(Export(how, *site) for how, site in self._live.values())

    def _fold(self) -> None:
        """Strike out what was dropped."""
        while self._dropped:
            try:
                number = self._dropped.popleft()
            except IndexError:
                return  # another thread was quicker
            self._live.pop(number, None)

    def check_leave(self, what: object, *, strict: bool | None = None, reader: object = None) -> None:
        """Report exports that are alive while their memory goes away. Call it after the memory was given back.

        Args:
            what: the object that is left, for the message.
            strict: raise; None asks :func:`strict_mode`.
            reader: the object that gave its CUDA array interface to somebody; strict mode looks for who kept it.

        Raises:
            BusyError: in strict mode; else :class:`~cuglue.errors.DanglingExportWarning` is issued.
        """
        strict = strict_mode() if strict is None else strict
        held = [str(export) for export in self.live()]
        if strict and reader is not None:
            held += cai_holders(reader)
        if not held:
            return
        text = (
            f"{what} was left while what was made from it is alive, and its memory goes away: {'; '.join(held)}. "
            "Drop the arrays before leaving, or copy what has to stay"
        )
        if strict:
            raise BusyError(text)
        filename, line = call_site(2)
        warnings.warn_explicit(text, DanglingExportWarning, filename, line)


def strict_mode() -> bool:
    """Whether ``CUGLUE_STRICT=1`` makes errors of what only warns otherwise."""
    return os.environ.get("CUGLUE_STRICT", "0") not in ("", "0")


def cai_holders(obj: object) -> list[str]:
    """Array-library objects that hold ``obj``: readers of its CUDA array interface.

    Finds what Python's collector can see (CuPy, Numba). PyTorch holds the object out of its sight, JAX not at all.
    """
    found = []
    for holder in gc.get_referrers(obj):
        kind = type(holder)
        if kind.__module__.partition(".")[0] in _ARRAY_LIBRARIES:
            found.append(f"__cuda_array_interface__ read by {kind.__module__}.{kind.__qualname__}")
    return found


def call_site(depth: int = 1) -> tuple[str, int]:
    """File and line of the nearest caller outside this package and the array libraries."""
    frame = sys._getframe(depth)
    while _in_library(frame.f_globals.get("__name__")) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@cache
def _in_library(module: object) -> bool:
    """Whether a module of this name makes arrays for others; every export asks it of several frames."""
    return str(module).partition(".")[0] in _LIBRARIES
