"""State tables, walked pair by pair, and the owner that every closeable object is."""

import copy
import itertools
import os
import pickle
import re
import warnings

import pytest

from cuglue import errors, lifecycle
from cuglue.lifecycle import BlockState, CaptureState, HandleState, MapState, Owned, OwnedState, step

#: (table, states, events) and what each pair leads to, written out by hand: None is a refusal.
R, M, CG, C, T = HandleState
HANDLE_WALK = {
    "map": (M, M, None, None, None),
    "unmap": (None, M, CG, None, None),
    "unmap_last": (None, R, C, None, None),
    "close": (C, CG, CG, C, T),
    "transfer": (T, None, None, None, None),
}
LIVE, FAILED, RELEASED = MapState
MAP_WALK = {
    "release": (RELEASED, RELEASED, RELEASED),
    "fail": (FAILED, FAILED, None),
    "cancel": (RELEASED, RELEASED, RELEASED),
}
L, RT, Q, F = BlockState
BLOCK_WALK = {
    "use": (L, None, None, None),
    "deallocate": (RT, None, RT, None),
    "quarantine": (Q, None, None, None),
    "free": (None, F, None, None),
}
N, P, REC = CaptureState
CAPTURE_WALK = {
    "prepare": (P, None, None),
    "begin": (None, REC, None),
    "end": (None, N, N),
    "abandon": (None, None, N),
}
OWNED_WALK = {"use": (OwnedState.OPEN, None), "close": (OwnedState.CLOSED, OwnedState.CLOSED)}
#: Events that nobody makes by a call of that name.
INTERNAL = {"unmap_last", "fail", "abandon", "free", "quarantine", "unmap", "transfer"}
WALKS = [
    (lifecycle.HANDLE, HandleState, HANDLE_WALK),
    (lifecycle.MAP, MapState, MAP_WALK),
    (lifecycle.BLOCK, BlockState, BLOCK_WALK),
    (lifecycle.CAPTURE, CaptureState, CAPTURE_WALK),
    (lifecycle.OWNED, OwnedState, OWNED_WALK),
]


@pytest.mark.parametrize(("table", "states", "walk"), WALKS, ids=lambda x: getattr(x, "__name__", ""))
def test_every_pair_of_state_and_event(table, states, walk):
    events = set(itertools.chain.from_iterable(table.values()))
    assert events == set(walk), "an event was added without saying what it does in every state"
    assert set(table) == set(states)
    for event, targets in walk.items():
        for state, target in zip(states, targets, strict=True):
            if target is None:
                with pytest.raises(errors.CuglueError) as caught:
                    step(table, state, event, "thing 7")
                text = str(caught.value)
                assert "thing 7" in text
                assert state.value in text
                assert "got " in text
                assert not INTERNAL & set(text.split("expected ")[1].split())
            else:
                assert step(table, state, event) is target


@pytest.mark.parametrize(
    ("table", "state", "event", "text"),
    [
        (
            lifecycle.OWNED,
            OwnedState.CLOSED,
            "use",
            "got a use, expected close(). What is closed stays closed",
        ),
        (
            lifecycle.CAPTURE,
            CaptureState.NONE,
            "begin",
            "got begin(), expected prepare(). Call prepare() first",
        ),
        (
            lifecycle.CAPTURE,
            CaptureState.PREPARED,
            "prepare",
            "got prepare(), expected begin() or end(). Call",
        ),
        (
            lifecycle.HANDLE,
            HandleState.MAPPED,
            "transfer",
            "got into_client_parts(), expected map() or leaving",
        ),
        (
            lifecycle.HANDLE,
            HandleState.CLOSED,
            "map",
            "got map(), expected close(). Register the object again",
        ),
    ],
)
def test_the_refusal_says_what_is_done_and_the_way_out(table, state, event, text):
    with pytest.raises(errors.CuglueError, match=re.escape(text)):
        step(table, state, event, "thing 7")


@pytest.mark.parametrize(
    ("table", "state", "event", "error"),
    [
        (lifecycle.HANDLE, HandleState.CLOSED, "map", errors.ClosedError),
        (lifecycle.HANDLE, HandleState.CLOSING, "map", errors.ClosedError),
        (lifecycle.HANDLE, HandleState.TRANSFERRED, "map", errors.ClosedError),
        (lifecycle.HANDLE, HandleState.MAPPED, "transfer", errors.MapConflictError),
        (lifecycle.CAPTURE, CaptureState.NONE, "begin", errors.CaptureError),
        (lifecycle.MAP, MapState.RELEASED, "fail", errors.ClosedError),
    ],
)
def test_the_refusal_has_the_type_that_says_why(table, state, event, error):
    with pytest.raises(error):
        step(table, state, event)


class Thing(Owned):
    def __init__(self, fail=0):
        self.closes = 0
        self.fail = fail
        self.reported = []
        self._own()

    def _close(self):
        if self.fail:
            self.fail -= 1
            raise errors.UsageError("thing", got="a refusal")
        self.closes += 1

    def _forgotten(self):
        self.reported.append(1)


def test_close_is_idempotent_and_use_after_it_is_refused():
    thing = Thing()
    with thing as same:
        assert same is thing
    thing.close()
    assert thing.closes == 1
    assert thing.closed
    with pytest.raises(errors.ClosedError), thing:
        pass


def test_a_failed_close_leaves_the_object_open_for_another_try():
    thing = Thing(fail=1)
    with pytest.raises(errors.UsageError):
        thing.close()
    assert not thing.closed
    thing.close()
    assert thing.closed


def test_an_error_in_the_body_is_kept_and_the_failed_close_becomes_a_note():
    thing = Thing(fail=1)
    with pytest.raises(ZeroDivisionError) as caught, thing:
        raise ZeroDivisionError
    assert "a refusal" in caught.value.__notes__[0]
    thing.close()


def test_a_forgotten_object_is_reported_with_the_line_that_made_it():
    thing = Thing()
    reported = thing.reported
    line = thing._created_at
    assert line.startswith(__file__)
    with pytest.warns(ResourceWarning, match="never closed") as caught:
        del thing
    assert line in str(caught[0].message)
    assert reported == [1]


def test_a_forked_child_frees_nothing_and_says_nothing():
    thing = Thing()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            warnings.simplefilter("error")
            thing.close()
            code = thing.closes
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    thing.close()
    assert thing.closes == 1


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_owner_is_not_copied(way):
    """A forgotten copy would give back what the original still has."""
    with Thing() as thing:
        with pytest.raises(errors.UsageError, match="a copy or pickle"):
            way(thing)
    assert thing.closes == 1


def test_a_failure_on_the_way_out_does_not_hide_the_one_inside() -> None:
    def end() -> None:
        raise OSError("disk full")

    inside = KeyError("the user's")
    lifecycle.leave(end, inside, "closing", "the log")
    assert inside.__notes__ == ["closing 'the log' failed too: disk full"]
    with pytest.raises(OSError, match="disk full"):
        lifecycle.leave(end, None, "closing", "the log")
    with pytest.raises(KeyboardInterrupt):  # nothing stands against an interrupt
        lifecycle.leave(_interrupt, inside, "closing", "the log")


def _interrupt() -> None:
    raise KeyboardInterrupt
