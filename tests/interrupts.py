"""A keyboard interrupt at a chosen point of the library, as Ctrl-C brings one at any."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import cuglue

_HERE = str(Path(cuglue.__file__).parent)


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


def interrupted(action: Callable[[], Any], step: int, *names: str) -> str | None:
    """Run ``action`` and interrupt it at the ``step``-th point (from 1) of the library where a signal is looked at.

    CPython looks at signals when a function begins and when one that is written in C has returned.

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
        file = frame.f_code.co_filename
        inside = file.removeprefix(_HERE)[1:] if file.startswith(_HERE) else ""
        counts = inside in names if names else inside and not inside.startswith("driver")
        counts = counts and not (_finaliser(frame) or _taken(event, argument))
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
