"""The retire queue: nothing runs too early, nothing runs twice, nothing is lost, and finalisers only append."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from typing import Any

import pytest
from interrupts import interrupted, interrupted_after

import cuglue
from cuglue import testing
from cuglue.core.device import device_state
from cuglue.core.retire import RetireQueue
from cuglue.driver.protocol import CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.errors import SeveralErrors


@pytest.fixture
def queue(sim: SimDriver) -> RetireQueue:
    return device_state(sim, 0).retire


def test_it_is_one_per_device(sim: SimDriver, queue: RetireQueue) -> None:
    assert device_state(sim, 0).retire is queue
    driver = SimDriver(devices=2)
    assert device_state(driver, 0).retire is not device_state(driver, 1).retire


def test_an_action_runs_after_its_uses(sim: SimDriver, queue: RetireQueue, streams: Any) -> None:
    (a,) = streams(1)
    ran: list[int] = []
    with testing.Latch(a) as latch:
        queue.push([(a, a.submit())], lambda: ran.append(1), nbytes=100)
        assert queue.drain() == 0
        assert queue.bytes_waiting == 100
        assert len(queue) == 1
        latch.release()
        sim.pump()
        assert queue.drain() == 1
    assert ran == [1]
    assert (len(queue), queue.bytes_waiting, queue.drain()) == (0, 0, 0)


def test_every_use_counts(sim: SimDriver, queue: RetireQueue, streams: Any) -> None:
    a, b = streams(2)
    ran: list[int] = []
    with testing.Latch(b):
        queue.push([(a, a.submit()), (b, b.submit())], lambda: ran.append(1))
        a.synchronize()
        queue.drain()
        assert ran == []
    b.synchronize()
    queue.drain()
    assert ran == [1]


def test_block_waits(sim: SimDriver, queue: RetireQueue, streams: Any) -> None:
    a, b = streams(2)
    ran: list[int] = []
    queue.push([(a, a.submit()), (b, b.submit())], lambda: ran.append(1))
    assert queue.drain(block=True) == 1
    assert ran == [1]


def test_block_leaves_captures_alone(sim: SimDriver, queue: RetireQueue, streams: Any) -> None:
    a, b = streams(2)
    ran: list[str] = []
    queue.push([(a, a.submit())], lambda: ran.append("a"))
    queue.push([(b, b.submit())], lambda: ran.append("b"))
    sim.capture_begin(a.handle, CaptureMode.RELAXED)
    assert queue.drain(block=True) == 1
    assert ran == ["b"]
    sim.graph_destroy(sim.capture_end(a.handle))
    assert queue.drain(block=True) == 1


def test_a_failing_action_stays_and_the_others_run(queue: RetireQueue) -> None:
    ran: list[str] = []
    broken = [ValueError("one"), ValueError("two")]

    def fail() -> None:
        if broken:
            raise broken.pop(0)
        ran.append("at last")

    queue.push((), fail)
    queue.push((), lambda: ran.append("other"))
    with pytest.raises(ValueError, match="one"):
        queue.drain()
    assert ran == ["other"]
    queue.push((), lambda: 1 / 0)
    with pytest.raises(SeveralErrors) as caught:
        queue.drain()
    assert [type(e) for e in caught.value.errors] == [ValueError, ZeroDivisionError]
    with pytest.raises(ZeroDivisionError):
        queue.drain()
    assert ran == ["other", "at last"]


def test_an_interrupted_drain_loses_nothing(queue: RetireQueue) -> None:
    ran: list[str] = []
    interrupt = [KeyboardInterrupt()]

    def action() -> None:
        if interrupt:
            raise interrupt.pop()
        ran.append("interrupted")

    queue.push((), action)
    queue.push((), lambda: ran.append("other"))
    queue.forget(lambda: ran.append("forgotten"))
    with pytest.raises(KeyboardInterrupt):
        queue.drain()
    assert queue.drain() == 3
    assert sorted(ran) == ["forgotten", "interrupted", "other"]


def test_an_interrupted_run_of_the_forgotten_loses_nothing(queue: RetireQueue) -> None:
    interrupt = [KeyboardInterrupt()]
    ran: list[int] = []

    def action() -> None:
        if interrupt:
            raise interrupt.pop()
        ran.append(1)

    queue.forget(action)
    with pytest.raises(KeyboardInterrupt):
        queue.run_forgotten()
    queue.run_forgotten()
    assert ran == [1]


def test_only_the_named_thread_runs_an_action(queue: RetireQueue) -> None:
    ran: list[int] = []
    worker_turn, main_turn = threading.Event(), threading.Event()

    def work() -> None:
        main_turn.set()
        worker_turn.wait(30)
        queue.drain()

    thread = threading.Thread(target=work)
    thread.start()
    main_turn.wait(30)
    queue.push((), lambda: ran.append(threading.get_ident()), thread=thread.ident)
    assert queue.drain() == 0
    worker_turn.set()
    ident = thread.ident
    thread.join(30)
    assert ran == [ident]


def test_forget_only_appends(sim: SimDriver, queue: RetireQueue) -> None:
    ran: list[int] = []
    with testing.trace() as calls:
        queue.forget(lambda: ran.append(1))
    assert calls == []
    assert ran == []
    assert len(queue) == 1
    queue.run_forgotten()
    assert ran == [1]
    queue.forget(lambda: ran.append(2))
    assert queue.drain() == 1
    assert ran == [1, 2]


def test_run_forgotten_reports_and_keeps_what_fails(
    queue: RetireQueue, caplog: pytest.LogCaptureFixture
) -> None:
    broken = [ValueError("no")]
    ran: list[int] = []

    def action() -> None:
        if broken:
            raise broken[0]
        ran.append(1)

    queue.forget(action)
    queue.forget(lambda: ran.append(2))
    with caplog.at_level(logging.WARNING):
        queue.run_forgotten()
    assert "tried again" in caplog.text
    assert ran == [2]
    with pytest.raises(ValueError, match="no"):
        queue.drain()
    broken.clear()
    assert queue.drain() == 1
    assert ran == [2, 1]


def test_actions_may_push_forget_and_drain(queue: RetireQueue) -> None:
    ran: list[str] = []

    def first() -> None:
        queue.push((), lambda: ran.append("pushed"))
        queue.forget(lambda: ran.append("forgotten"))
        assert queue.drain() == 0, "a drain inside a drain does nothing"
        ran.append("first")

    queue.push((), first)
    assert queue.drain() == 3
    assert ran[0] == "first"
    assert sorted(ran) == ["first", "forgotten", "pushed"]


def test_two_threads_run_each_action_once(queue: RetireQueue) -> None:
    ran: list[int] = []
    stop = threading.Event()

    def drain() -> None:
        while not stop.is_set():
            queue.run_forgotten()
            queue.drain()

    threads = [threading.Thread(target=drain) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(3000):
        (queue.forget if number % 2 else lambda a: queue.push((), a))(lambda n=number: ran.append(n))
    stop.set()
    for thread in threads:
        thread.join(30)
    queue.drain(block=True)
    assert sorted(ran) == list(range(3000))


@pytest.mark.parametrize("points", [interrupted, interrupted_after])
@pytest.mark.parametrize("block", [False, True])
def test_an_interrupted_drain_lets_go_its_lock_and_loses_nothing(
    sim: SimDriver, points: Any, block: bool
) -> None:
    """Also one that comes as the lock was just taken, after ``deque(...)``, or while an error is dealt with."""
    found = set()
    for step in itertools.count(1):
        queue = RetireQueue(device_state(sim, 0))
        ran: list[int] = []

        def refused() -> None:
            raise ValueError

        def drain(block: bool = block, queue: RetireQueue = queue) -> None:
            with contextlib.suppress(ValueError):
                queue.drain(block=block)

        queue.push((), lambda ran=ran: ran.append(1))  # type: ignore[misc]
        queue.push((), refused)
        queue.push((), lambda ran=ran: ran.append(2))  # type: ignore[misc]
        queue.forget(lambda ran=ran: ran.append(3))  # type: ignore[misc]
        where = points(drain, step, "core/retire.py")
        other = threading.Thread(target=drain, args=(True,), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), where
        assert set(ran) == {1, 2, 3}, where
        assert [item.action for item in queue._waiting] == [refused], where
        if where is None:
            break
        found.add(where)
    assert len(found) > 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_runs_nothing(queue: RetireQueue) -> None:
    ran: list[int] = []
    queue.push((), lambda: ran.append(1))
    queue.forget(lambda: ran.append(2))
    child = os.fork()
    if child == 0:
        queue.run_forgotten()
        queue.drain(block=True)
        os._exit(len(ran))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert queue.drain() == 2


def test_destroyed_streams_of_the_library_come_back(sim: SimDriver, queue: RetireQueue) -> None:
    import gc

    from cuglue.memory.streams import OwnStream, refuge

    state = device_state(sim, 0)
    record = cuglue.as_stream(OwnStream(state))
    assert refuge(state) is refuge(state)
    assert refuge(state).nameable()
    assert sim.inventory()["streams"] == 2
    del record
    gc.collect()
    queue.drain()
    assert sim.inventory()["streams"] == 1
