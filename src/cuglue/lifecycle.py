"""States as tables: which event leads from which state to which, and nothing else.

Owns every state machine of the library. A state or an event is added here and nowhere else; the objects call
:func:`step` and act on the answer. Must not know what a handle, block or capture is made of.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from enum import Enum
from types import TracebackType
from typing import Any, Self, TypeVar

from .errors import BusyError, CaptureError, ClosedError, CuglueError, MapConflictError, UsageError


class State(Enum):
    """A state is itself and no other: its hash is its address, not its name's, which every step would work out."""

    __hash__ = object.__hash__


class HandleState(State):
    """Life of a registration (:class:`CudaHandle`)."""

    REGISTERED = "registered"
    MAPPED = "mapped"
    CLOSING = "closing"  # closed by its owner while maps live: torn down when the last one is left
    CLOSED = "closed"
    TRANSFERRED = "transferred"


class MapState(State):
    """Life of one map of a handle (:class:`CudaMap`)."""

    LIVE = "live"
    FAILED = "failed"  # publishing failed: can be released again
    RELEASED = "released"


class BlockState(State):
    """Life of a device block. See contracts B4."""

    LIVE = "live"
    RETIRED = "retired"  # given back; the device may still use it
    QUARANTINED = "quarantined"  # held by a debug guard
    FREED = "freed"


class CaptureState(State):
    """Life of a graph capture on one stream. See contracts C31b."""

    NONE = "none"
    PREPARED = "prepared"
    RECORDING = "recording"


class OwnedState(State):
    """Life of anything that is closed once."""

    OPEN = "open"
    CLOSED = "closed"


S = TypeVar("S", bound=Enum)
Table = Mapping[S, Mapping[str, S]]

HANDLE: Table[HandleState] = {
    HandleState.REGISTERED: {
        "map": HandleState.MAPPED,
        "close": HandleState.CLOSED,
        "transfer": HandleState.TRANSFERRED,
    },
    HandleState.MAPPED: {
        "map": HandleState.MAPPED,
        "unmap": HandleState.MAPPED,
        "unmap_last": HandleState.REGISTERED,
        "close": HandleState.CLOSING,
    },
    HandleState.CLOSING: {
        "unmap": HandleState.CLOSING,
        "unmap_last": HandleState.CLOSED,
        "close": HandleState.CLOSING,
    },
    HandleState.CLOSED: {"close": HandleState.CLOSED},
    HandleState.TRANSFERRED: {"close": HandleState.TRANSFERRED},
}

MAP: Table[MapState] = {
    MapState.LIVE: {"release": MapState.RELEASED, "fail": MapState.FAILED, "cancel": MapState.RELEASED},
    MapState.FAILED: {"release": MapState.RELEASED, "fail": MapState.FAILED, "cancel": MapState.RELEASED},
    MapState.RELEASED: {"release": MapState.RELEASED, "cancel": MapState.RELEASED},
}

BLOCK: Table[BlockState] = {
    BlockState.LIVE: {
        "use": BlockState.LIVE,
        "deallocate": BlockState.RETIRED,
        "quarantine": BlockState.QUARANTINED,
    },
    BlockState.QUARANTINED: {"deallocate": BlockState.RETIRED},
    BlockState.RETIRED: {"free": BlockState.FREED},
    BlockState.FREED: {},
}

CAPTURE: Table[CaptureState] = {
    CaptureState.NONE: {"prepare": CaptureState.PREPARED},
    CaptureState.PREPARED: {
        "begin": CaptureState.RECORDING,
        "end": CaptureState.NONE,  # refused with an error, and unwound
    },
    CaptureState.RECORDING: {"end": CaptureState.NONE, "abandon": CaptureState.NONE},
}

OWNED: Table[OwnedState] = {
    OwnedState.OPEN: {"use": OwnedState.OPEN, "close": OwnedState.CLOSED},
    OwnedState.CLOSED: {"close": OwnedState.CLOSED},
}

_REFUSALS: dict[Enum, type[CuglueError]] = {
    HandleState.CLOSING: ClosedError,
    HandleState.CLOSED: ClosedError,
    HandleState.TRANSFERRED: ClosedError,
    HandleState.MAPPED: MapConflictError,
    MapState.RELEASED: ClosedError,
    OwnedState.CLOSED: ClosedError,
    BlockState.RETIRED: UsageError,
    CaptureState.NONE: CaptureError,
    CaptureState.PREPARED: CaptureError,
    CaptureState.RECORDING: CaptureError,
}


#: Events as what a person does; the other ones follow from something else.
_DOINGS = {
    "map": "map()",
    "unmap": "leaving a map",
    "close": "close()",
    "transfer": "into_client_parts()",
    "release": "leaving it",
    "cancel": "cancel()",
    "use": "a use",
    "deallocate": "deallocate()",
    "prepare": "prepare()",
    "begin": "begin()",
    "end": "end()",
}
_WAYS_OUT: dict[Enum, str] = {
    HandleState.MAPPED: "Leave its maps first",
    HandleState.CLOSING: "Register the object again",
    HandleState.CLOSED: "Register the object again",
    HandleState.TRANSFERRED: "Whoever has its parts now maps it, and closes it",
    MapState.RELEASED: "Map the object again",
    OwnedState.CLOSED: "What is closed stays closed: make another",
    BlockState.RETIRED: "Allocate another block",
    CaptureState.NONE: "Call prepare() first, or use `with runtime.capture(stream)`",
    CaptureState.PREPARED: "Call begin(), or end() to give it up",
    CaptureState.RECORDING: "End it first, with end()",
}


def step(table: Table[S], state: S, event: str, who: object = "object") -> S:
    """The state that ``event`` leads to, or an error naming object, state, event, what would be allowed and a way out.

    Args:
        table: one of the tables of this module.
        state: the state the object is in.
        event: what happens to it.
        who: the object, for the message only.

    Raises:
        ClosedError, MapConflictError, CaptureError, UsageError: the event has no entry for this state.
    """
    try:
        return table[state][event]
    except KeyError:
        pass
    allowed = " or ".join(_DOINGS[known] for known in table[state] if known in _DOINGS) or "nothing"
    error = _REFUSALS.get(state, UsageError)
    raise error(
        f"{who} is {state.value}",
        got=_DOINGS.get(event, event),
        expected=allowed,
        hint=_WAYS_OUT.get(state, ""),
    )


def leave(end: Callable[[], None], error: BaseException | None, doing: str, who: object) -> None:
    """End a ``with`` block by ``end()``, whose failure must not hide ``error``, the one of the block's body.

    Args:
        end: gives back what the block held.
        error: what the body raised; a failure of ``end`` becomes a note on it. None: the failure is raised.
        doing: what ``end`` does, for the note.
        who: the object, for the note alone: its name is not made where nothing fails.
    """
    try:
        end()
    except Exception as second:
        if error is None:
            raise
        error.add_note(f"{doing} {who!r} failed too: {second}")


class Owned:
    """Something with a ``close()``: idempotent, usable in ``with``, reported (never freed) when forgotten.

    A subclass implements ``_close()``, which runs once; it may override ``_forgotten()``, which runs in a finaliser
    on any thread and may only append to a queue. In a forked child nothing is freed: the parent owns it. It is neither
    copied nor pickled.
    """

    _owned_state = OwnedState.OPEN
    _owned_pid = 0
    _created_at = ""

    def _own(self, depth: int = 2) -> None:
        """Note who made this object; call it once the object really owns something."""
        self._owned_pid = os.getpid()
        frame = sys._getframe(min(depth, _stack_depth()))
        self._created_at = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    @property
    def closed(self) -> bool:
        """True after ``close()``."""
        return self._owned_state is OwnedState.CLOSED

    def _check_open(self) -> None:
        step(OWNED, self._owned_state, "use", self)

    def close(self) -> None:
        """Give everything back. Closing again does nothing.

        If giving back fails the object stays open, so that the call can be repeated.
        """
        if self.closed:
            return
        if self._owned_pid in (0, os.getpid()):
            self._close()
        self._owned_state = step(OWNED, self._owned_state, "close", self)

    def _close(self) -> None:
        raise NotImplementedError

    def _forgotten(self) -> None:
        """Called by the finaliser when nobody closed this object."""

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self.close, error, "closing", self)

    def __reduce__(self) -> tuple[Any, ...]:
        # For copies and pickles both: the end of a copy would give back what the original still has.
        raise UsageError(repr(self), got="a copy or pickle of it", expected="the object itself, shared")

    #: Asked by finalisers: when the last objects go, the names of modules may be gone.
    _ending = staticmethod(sys.is_finalizing)

    def __del__(self) -> None:
        if self._ending() or self._owned_pid != os.getpid() or self.closed:
            return
        self._forgotten()
        warnings.warn(
            f"{self!r}, made at {self._created_at}, was never closed",
            ResourceWarning,
            stacklevel=1,
            source=self,
        )


def _stack_depth() -> int:
    depth = 0
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        depth += 1
    return depth


def busy(who: object, what: str, hint: str) -> BusyError:
    """The error for closing or replacing something in use."""
    return BusyError(f"{who}", got=what, expected="nobody using it", hint=hint)
