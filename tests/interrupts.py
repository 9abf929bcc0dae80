"""A keyboard interrupt at a chosen point of the library, as Ctrl-C brings one at any."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import cuglue

_HERE = str(Path(cuglue.__file__).parent)
_CALLS = frozenset(code for name, code in dis.opmap.items() if name.startswith("CALL"))


def _finaliser(frame: FrameType | None) -> bool:
    """Whether a finaliser, or a weak reference's callback, runs: Python prints an interrupt there and goes on."""
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "_forget", "<lambda>") and _HERE in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _taken(event: str, argument: Any) -> bool:
    """Whether something was taken out of a queue just now, and is nowhere else: commands do not promise that."""
    return event == "c_return" and getattr(argument, "__name__", "") == "popleft"


def _inside(frame: FrameType, names: tuple[str, ...]) -> str:
    """The library's module of a frame, as ``core/stream.py``, if its points count; else nothing."""
    file = frame.f_code.co_filename
    inside = file.removeprefix(_HERE)[1:] if file.startswith(_HERE) else ""
    counts = inside in names if names else not inside.startswith("driver")
    return inside if counts else ""


def interrupted(action: Callable[[], Any], step: int, *names: str) -> str | None:
    """Run ``action`` and interrupt it at the ``step``-th point (from 1) of the library where a signal is looked at.

    CPython looks at signals when a function begins and when one that is written in C has returned. Not among the points
    are those after the call of a type, as ``deque(...)``: no profiler learns of it. See :func:`interrupted_after`.

    Args:
        action: what to run.
        step: number of the point.
        names: of modules, as ``core/stream.py``, whose points count; none: all but the drivers'.

    Returns:
        The point, as ``core/stream.py:70``; None if ``action`` ended before.
    """
    points = 0
    where: str | None = None

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal points, where
        inside = _inside(frame, names)
        counts = inside and not (_finaliser(frame) or _taken(event, argument))
        if counts and where is None and event in ("call", "c_return"):
            points += 1
            if points == step:
                where = f"{inside}:{frame.f_lineno}"
                sys.setprofile(None)
                raise KeyboardInterrupt

    former = sys.getprofile()
    sys.setprofile(look)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(former)
    return where


def interrupted_after(action: Callable[[], Any], step: int, *names: str) -> str | None:
    """As :func:`interrupted`, at the points after each call, those of types too: looked for instruction by instruction.

    That takes its time, so name the modules. What a call gave is lost: it is on the stack, and in no variable yet.
    """
    points = 0
    where: str | None = None
    called: dict[FrameType, bool] = {}  # whether a frame's newest instruction was a call that signals end

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal points, where
        caller = frame.f_back
        if event == "call" and caller in called and frame.f_code.co_name != "__init__":
            called[caller] = (
                False  # a function in Python returns without a look at signals; a type of Python's not
            )
        inside = _inside(frame, names) if event == "call" or frame in called else ""
        if where is not None or not inside or _finaliser(frame):
            return None
        if event == "call":
            frame.f_trace_opcodes = True
            called[frame] = False
        elif event == "opcode":
            code = frame.f_code.co_code[frame.f_lasti]
            if called[frame]:
                points += 1
                if points == step:
                    where = f"{inside}:{frame.f_lineno}"
                    sys.settrace(None)
                    raise KeyboardInterrupt
            called[frame] = code in _CALLS
        elif event == "return":
            del called[frame]
        return look

    former = sys.gettrace()
    sys.settrace(look)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(former)
    return where
