"""Profiles: how long the device took for the work of a ``with`` block.

Owns the two timing events of a profile and what makes it invalid. Must not know what the work is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from ..errors import UsageError
from .lane import Lane
from .taint import without_frames


class Profile:
    """Device time of one stream between the beginning and the end of a ``with`` block. Made by ``runtime.profile()``.

    Work inside that the driver refuses, or that is skipped, makes the profile invalid: its time would be that of
    something else. The refusal itself is raised where it happens, as without a profile. A call whose arguments are
    refused was no work yet, and leaves the profile as it is.

    Attributes:
        failure: what made it invalid, or None.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._events: list[int] = []
        self.failure: BaseException | None = None

    def __repr__(self) -> str:
        state = ("new", "open", "closed")[len(self._events)]
        return f"Profile(stream={self._lane.stream.id}, {'invalid' if self.failure is not None else state})"

    def __enter__(self) -> Self:
        """Begin. Only enqueues.

        Raises:
            UsageError: it was used before.
            CaptureError: the stream captures a graph.
        """
        if self._events:
            raise UsageError(
                repr(self), got="a second with statement", expected="one", hint="Make a new profile"
            )
        self._mark()
        self._lane.profiles.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lane.profiles.remove(self)
        if error is not None:
            self.invalidate(error)
        if self.failure is None:
            self._mark()

    def _mark(self) -> None:
        stream = self._lane.stream
        stream.refuse_capture("time work")
        event = stream.driver.event_create(stream.device, timing=True)
        try:
            stream.driver.event_record(event, stream.handle)
        except BaseException:
            stream.state.retire.forget(_DestroyEvents(stream.driver, [event]))
            stream.state.retire.run_forgotten()  # now, and again at the next call should that fail
            raise
        self._events.append(event)

    def invalidate(self, failure: BaseException) -> None:
        """Say that the time is not that of the work in the block."""
        if self.failure is None:
            self.failure = without_frames(failure)

    @property
    def milliseconds(self) -> float:
        """The time. Blocks the host until the work is done.

        Raises:
            UsageError: the block has not ended, or something in it failed (the cause).
            DriverError: the fault that the wait revealed.
        """
        if self.failure is not None:
            raise UsageError(
                repr(self),
                got=f"{type(self.failure).__name__}: {self.failure}",
                expected="work that was enqueued",
            ) from self.failure
        if len(self._events) < 2:
            raise UsageError(repr(self), got="its time", expected="a profile whose with statement has ended")
        driver = self._lane.stream.driver
        driver.event_synchronize(self._events[1])
        return driver.event_elapsed(*self._events)

    def begins_after(self, first: Profile) -> float:
        """Milliseconds from the beginning of ``first`` to the beginning of this one. Blocks until both have begun.

        Raises:
            UsageError: one of them has not begun.
        """
        for profile in (self, first):
            if not profile._events:
                raise UsageError(repr(profile), got="its beginning", expected="a profile that was entered")
        driver = self._lane.stream.driver
        driver.event_synchronize(first._events[0])
        driver.event_synchronize(self._events[0])
        return driver.event_elapsed(first._events[0], self._events[0])

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_events", ()) and not _ending():  # none if its making was interrupted
            state = self._lane.stream.state
            state.retire.forget(_DestroyEvents(state.driver, self._events))


class _DestroyEvents:
    __slots__ = ("_driver", "_events")

    def __init__(self, driver: Any, events: list[int]) -> None:
        self._driver = driver
        self._events = events

    def __call__(self) -> None:
        while self._events:
            self._driver.event_destroy(self._events[-1])
            self._events.pop()
