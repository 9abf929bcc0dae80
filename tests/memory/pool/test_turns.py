"""A lock whose waiters do not line up."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from cuglue.memory.pool import turns
from cuglue.memory.pool.turns import Turns


@pytest.fixture
def quick_switches() -> Iterator[None]:
    former = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(former)


def test_a_thread_may_enter_again() -> None:
    lock = Turns()
    with lock, lock:
        pass
    entered = []

    def other() -> None:
        with lock:
            entered.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(5)
    assert entered, "it was left as often as it was entered"


def test_one_thread_at_a_time(quick_switches: None) -> None:
    lock = Turns()
    count = 0

    def work() -> None:
        nonlocal count
        for _ in range(2000):
            with lock:
                seen = count
                for _ in range(5):
                    pass
                count = seen + 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert count == 8000


def test_who_waits_for_long_lines_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_PAUSES", (0.0, 1e-4))
    lock = Turns()
    entered = threading.Event()

    def other() -> None:
        with lock:
            entered.set()

    thread = threading.Thread(target=other)
    with lock:
        thread.start()
        time.sleep(0.05)
        assert not entered.is_set()
    assert entered.wait(5)
    thread.join(5)


def test_an_error_inside_lets_the_next_one_in() -> None:
    lock = Turns()
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    entered = []
    thread = threading.Thread(target=lambda: entered.append(lock.__enter__()))
    thread.start()
    thread.join(5)
    assert entered == [None]
