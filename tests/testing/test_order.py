"""Partial orders of traced calls."""

from __future__ import annotations

import pytest

from cuglue.testing import in_order
from cuglue.testing.tracing import Call

CALLS = [
    Call("malloc", (64, 0)),
    Call("copy", (1, 2, 64)),
    Call("record", (5, 7)),
    Call("fill", (1, 0, 64)),
    Call("record", (6, 7)),
    Call("sync", (7,)),
]


@pytest.mark.parametrize(
    "steps",
    [
        (),
        ("malloc", "sync"),
        (("copy", ..., 2), "record", ("record", 6)),
        (["fill", "copy"], "record"),
        ({"record", "fill", "copy"}, ("record", 6), "sync"),
        (["record", "record"], "sync"),
        (("copy", ..., ..., 64),),
    ],
)
def test_orders_that_hold(steps: tuple[object, ...]) -> None:
    in_order(CALLS, *steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "steps",
    [
        ("sync", "malloc"),
        ("free",),
        (("copy", 2),),
        (("copy", 1, 2, 64, ...),),
        ("record", "record", "record"),
        (["record", "record", "record"],),
        (["fill", "copy"], ("record", 5)),  # it came before the fill
        (["sync", "malloc"], "copy"),
    ],
)
def test_orders_that_do_not(steps: tuple[object, ...]) -> None:
    with pytest.raises(AssertionError, match=r"step \d: no .*\n.*0 malloc"):
        in_order(CALLS, *steps)  # type: ignore[arg-type]
