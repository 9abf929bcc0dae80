"""What ``cuda.core`` is asked for capsules of device memory. Its own classes need a driver: others stand for them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from cuglue.exchange import capsule
from cuglue.exchange.capsule import device_capsule
from cuglue.exchange.dtypes import DLType
from cuglue.layout import Layout

F4 = DLType(2, 32)


class View:
    """Stands for a ``StridedMemoryView``; its capsule is itself."""

    def __init__(self, *what: Any) -> None:
        self.what = what
        self.keep: object = None

    def view(self, dtype: object) -> View:
        return View(*self.what)

    def __dlpack__(self, max_version: object = None) -> View:
        return self


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was wrapped anew: (address, bytes, whether read-only)."""
    made: list[Any] = []

    def view_of(memory: Any, shape: Any, strides: Any, dtype: Any, is_readonly: bool) -> View:
        made.append((*memory, is_readonly))
        return View(*memory, is_readonly)

    monkeypatch.setattr(capsule, "_makers", lambda: (lambda ptr, nbytes: (ptr, nbytes), view_of))
    monkeypatch.setattr(capsule, "_open", lambda *what, **more: (Fields(), None))
    return made


class Fields:
    """Stands for the struct in a capsule."""


def test_the_driver_is_asked_of_an_address_once(asked: list[Any]) -> None:
    layout = Layout.of((4, 4), "f4")
    tokens = [object() for _ in range(3)]
    made = [device_capsule(4096, layout, F4, device=0, keep=token, versioned=True) for token in tokens]
    assert asked == [(4096, 64, False)]
    assert [one.keep for one in made] == tokens, "each keeps its own token"


def test_another_address_device_or_flag_is_asked_again(asked: list[Any]) -> None:
    layout = Layout.of((4, 4), "f4")
    for ptr, device, readonly in [(4096, 0, False), (8192, 0, False), (8192, 0, True), (8192, 1, True)]:
        made = device_capsule(ptr, layout, F4, device=device, keep=1, versioned=True, readonly=readonly)
        assert made.what == (ptr, 64, readonly)
    assert len(asked) == 4
    device_capsule(8192, Layout.of((4, 4), "f4"), F4, device=1, keep=1, versioned=True, readonly=True)
    assert len(asked) == 5, "another layout"


def test_a_layout_travels_without_what_was_asked(asked: list[Any]) -> None:
    layout = Layout.of((4, 4), "f4")
    device_capsule(4096, layout, F4, device=0, keep=1, versioned=True)
    sent = pickle.loads(pickle.dumps(layout))
    assert sent == layout
    device_capsule(4096, sent, F4, device=0, keep=1, versioned=True)
    assert len(asked) == 2


def test_memory_that_the_driver_calls_something_else_is_asked_each_time(asked: list[Any]) -> None:
    layout = Layout.of((4, 4), "f4")
    for _ in range(2):
        device_capsule(4096, layout, F4, device=0, keep=1, versioned=True, plain=False)
    device_capsule(4096, layout, F4, device=0, keep=1, versioned=True)
    device_capsule(4096, layout, F4, device=0, keep=1, versioned=True, plain=False)
    assert len(asked) == 4
