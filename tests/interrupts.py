"""A keyboard interrupt at a chosen line of the library, as Ctrl-C brings one at any."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import cuglue

_HERE = str(Path(cuglue.__file__).parent)


def interrupted(action: Callable[[], Any], step: int, *names: str) -> str | None:
    """Run ``action`` and interrupt it before the ``step``-th line (from 1) that it runs in the library.

    Args:
        action: what to run.
        step: number of the line.
        names: of modules, as ``core/stream.py``, whose lines count; none: all but the simulated device's.

    Returns:
        The line, as ``core/stream.py:70``; None if ``action`` ended before.
    """
    lines = 0
    where: str | None = None

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        inside = name.removeprefix(_HERE)[1:] if name.startswith(_HERE) else ""
        counts = inside in names if names else inside and not inside.startswith("driver")
        return line if counts else None

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines, where
        if event == "line" and where is None:
            lines += 1
            if lines == step:
                where = f"{frame.f_code.co_filename.removeprefix(_HERE)[1:]}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return line

    former = sys.gettrace()
    sys.settrace(call)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(former)
    return where
