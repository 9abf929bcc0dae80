"""What was asked of a driver, in order.

Owns the record. Must not know what the calls mean. Tests assert on it where the order of queued work is the point.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..driver.protocol import Driver
from ..driver.registry import current_driver
from .interpose import METHODS, Method, interposed


class Call(NamedTuple):
    """One driver call: equal to the tuple ``(method, args)``."""

    method: str
    args: tuple[Any, ...]


_SIGNATURES = {name: inspect.signature(getattr(Driver, name)) for name in METHODS}


@contextmanager
def trace(
    *,
    only: Container[str] | None = None,
    without: Container[str] = ("capabilities",),
    driver: Driver | None = None,
) -> Iterator[list[Call]]:
    """Record the driver calls of this block, also those that fail.

    Args:
        only: method names to record; None: all.
        without: method names to leave out.
        driver: the driver; None: the current one.

    Returns:
        A list that grows as calls are made; keywords are put in their places among the arguments.
    """
    calls: list[Call] = []

    def make(name: str, method: Method) -> Method:
        signature = _SIGNATURES[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            placed = args if not kwargs else signature.bind(None, *args, **kwargs).args[1:]
            calls.append(Call(name, placed))
            return method(*args, **kwargs)

        return call

    names = [n for n in METHODS if n not in without and (only is None or n in only)]
    with interposed(driver or current_driver(), names, make):
        yield calls
