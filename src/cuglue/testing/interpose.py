"""Standing in front of a driver's methods for the time of a ``with`` block.

Owns the replacing of methods on one driver object and their return. Must not know what the replacements do. The driver
and the library know nothing of it: it works because nobody keeps a method of a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..driver.protocol import Driver
from ..errors import UsageError

#: Every method of a driver.
METHODS = tuple(name for name, value in vars(Driver).items() if callable(value) and not name.startswith("_"))

Method = Callable[..., Any]


@contextmanager
def interposed(driver: Driver, names: Iterable[str], make: Callable[[str, Method], Method]) -> Iterator[None]:
    """Replace methods of ``driver``; blocks may nest, and must end in reverse order.

    Args:
        driver: the driver object.
        names: methods to replace.
        make: ``make(name, method)`` gives what to call instead of ``method``.

    Raises:
        UsageError: no such method.
    """
    chosen = list(names)
    unknown = sorted(set(chosen) - set(METHODS))
    if unknown:
        raise UsageError(
            "driver method", got=", ".join(unknown), expected="a method of cuglue.driver.protocol.Driver"
        )
    own = vars(driver)
    before = {name: own[name] for name in chosen if name in own}
    for name in chosen:
        setattr(driver, name, make(name, getattr(driver, name)))
    try:
        yield
    finally:
        for name in chosen:
            if name in before:
                setattr(driver, name, before[name])
            else:
                delattr(driver, name)
