"""What Ctrl-C leaves of a constructor is dropped in silence: every finaliser bears an object without its fields."""

from __future__ import annotations

import gc
import importlib
import pkgutil

import pytest

import cuglue


def finalised() -> list[type]:
    """Every class of the library with a finaliser that can be made."""
    for module in pkgutil.walk_packages(cuglue.__path__, "cuglue."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = {
        f"{thing.__module__}.{thing.__qualname__}": thing
        for thing in gc.get_objects()
        if isinstance(thing, type)
        and str(thing.__module__).startswith("cuglue.")
        and hasattr(thing, "__del__")
        and not getattr(thing, "__abstractmethods__", None)
    }
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize("kind", finalised(), ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
def test_a_constructor_that_was_interrupted_at_once_leaves_nothing_to_complain(kind: type) -> None:
    made = kind.__new__(kind)
    made.__del__()  # an error here would be printed when it is dropped
