"""Futures: results for threads and for asyncio, and what they do not wait for (contracts C21, C28)."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
from driver_calls import Calls
from sample_kernels import INCREMENT

from cuglue import Future, InOut, Kernel, Out, Runtime
from cuglue.core.device import device_state
from cuglue.driver.sim import SimDriver
from cuglue.errors import DevicePoisoned, DriverError
from cuglue.testing import Latch


def test_a_result_can_be_asked_again_and_from_any_thread(rt: Runtime) -> None:
    future = rt.read(rt.create(b"abcd"))
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(bytes(future.result()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"abcd"] * 4
    assert future.done()
    assert future.result() is future.result()
    assert repr(future) == "Future(done)"


def test_done_never_blocks_and_comes_true(rt: Runtime) -> None:
    future = rt.read(rt.create(bytes(1 << 20)))
    deadline = time.monotonic() + 10
    while not future.done():
        assert time.monotonic() < deadline
    assert future.result().nbytes == 1 << 20


def test_C28_sync_covers_what_was_enqueued_and_is_independent(rt: Runtime, calls: Calls) -> None:
    x = rt.create(np.zeros(64, "i4"))
    with rt.command(InOut(x)) as cmd:
        cmd.kernel(INCREMENT, 1, 64, x, 64, 1)
        calls.clear()
        first = cmd.sync()
        assert calls.count("event_record") == 1
        cmd.kernel(INCREMENT, 1, 64, x, 64, 1)
        second = cmd.sync()
    assert first.result() is None
    assert second.result() is None
    assert rt.command().synchronize() is None  # type: ignore[func-returns-value]


def test_C28_a_later_kernel_that_never_ends_does_not_block(sim: SimDriver) -> None:
    """On the simulated device: one that would raise if it ran before the result was taken."""
    entered: list[int] = []

    def late(grid: Any, block: Any, x: Any) -> None:
        entered.append(1)

    kernel = Kernel("late", 'extern "C" __global__ void late(int* x) {}', sim=late)
    with Runtime() as rt:
        x = rt.create(np.zeros(4, "i4"))
        future = rt.read(x, dtype="i4")
        rt.launch(kernel, 1, 1, Out(x))
        assert list(future.result()) == [0] * 4
        assert entered == []
        rt.synchronize()
        assert entered == [1]


def test_C28_a_sync_raises_the_fault_it_reveals(sim: SimDriver) -> None:
    def broken(grid: Any, block: Any, x: Any) -> None:
        raise RuntimeError("illegal address")

    kernel = Kernel("broken", 'extern "C" __global__ void broken(int* x) { }', sim=broken)
    rt = Runtime()
    x = rt.empty(4)
    rt.launch(kernel, 1, 1, Out(x))
    future = rt.command().sync()
    for _ in range(2):
        with pytest.raises(DevicePoisoned, match="illegal address"):
            future.result()
    assert future.done()
    assert repr(future) == "Future(failed)"
    with pytest.raises(DriverError):
        rt.launch(INCREMENT, 1, 1, Out(x), 1, 1)
    rt.close()


def test_timeouts_give_nothing_up(sim: SimDriver) -> None:
    with Runtime() as rt:
        future = rt.read(rt.create(b"abcd"))
        hold = threading.Event()

        def gate() -> None:
            hold.wait()

        held = rt.stream(1)
        sim.stream_callback(held.handle, gate)
        later = rt.read(rt.create(b"efgh", stream=held), stream=held)
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"pending.*Stream.*0\.05 s, expected.*Ask again"):
            later.result(timeout=0.05)
        with pytest.raises(TimeoutError):
            later.result(timeout=0)
        assert time.monotonic() - start < 5
        assert not later.done()
        assert bytes(future.result(timeout=10)) == b"abcd"
        hold.set()
        assert bytes(later.result(timeout=10)) == b"efgh"


def test_callbacks_run_once_on_a_thread_that_may_use_the_device(rt: Runtime) -> None:
    seen: list[tuple[bytes, int]] = []
    both = threading.Barrier(2)

    def tell(future: Future[Any]) -> None:
        seen.append((bytes(rt.read(rt.create(bytes(future.result()))).result()), threading.get_ident()))
        both.wait(10)

    future = rt.read(rt.create(b"abcd"))
    future.add_done_callback(tell)
    both.wait(10)
    assert [text for text, _ in seen] == [b"abcd"]
    assert future.done()
    calls: list[int] = []
    future.add_done_callback(lambda _: calls.append(threading.get_ident()))
    assert calls == [threading.get_ident()]


def test_a_callback_that_raises_is_logged_and_stops_nothing(
    rt: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()
    future = rt.read(rt.create(b"abcd"))

    def broken(_: Any) -> None:
        raise ValueError("mine")

    future.add_done_callback(broken)
    future.add_done_callback(lambda _: done.set())
    assert done.wait(10)
    assert "mine" in caplog.text


def test_await(rt: Runtime) -> None:
    async def main() -> list[bytes]:
        futures = [rt.read(rt.create(bytes([i] * 4))) for i in range(10)]
        return [bytes(await f) for f in futures]

    assert asyncio.run(main()) == [bytes([i] * 4) for i in range(10)]


def test_await_many_at_once_while_the_loop_goes_on(rt: Runtime) -> None:
    async def main() -> tuple[list[Any], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())

        async def one(value: int) -> int:
            return int((await rt.read(rt.create(np.full(4, value, "i4")), dtype="i4"))[0])

        results = await asyncio.gather(*(one(i) for i in range(20)))
        ticking.cancel()
        return results, ticks

    results, ticks = asyncio.run(main())
    assert results == list(range(20))
    assert ticks > 1


def test_cancelling_an_await_gives_nothing_up(sim: SimDriver) -> None:
    with Runtime() as rt:
        hold = threading.Event()
        stream = rt.stream(1)
        sim.stream_callback(stream.handle, hold.wait)  # type: ignore[arg-type]
        future = rt.read(rt.create(b"abcd", stream=stream), stream=stream)

        async def main() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_awaited(future), 0.05)

        asyncio.run(main())
        hold.set()
        assert bytes(future.result(timeout=10)) == b"abcd"


async def _awaited(future: Future[Any]) -> Any:
    return await future


def test_a_fault_reaches_who_awaits(sim: SimDriver) -> None:
    def broken(grid: Any, block: Any, x: Any) -> None:
        raise RuntimeError("illegal address")

    kernel = Kernel("broken", 'extern "C" __global__ void broken(int* x) { }', sim=broken)
    rt = Runtime()
    x = rt.empty(4)
    rt.launch(kernel, 1, 1, Out(x))

    async def main() -> None:
        await rt.read(x)

    with pytest.raises(DevicePoisoned, match="illegal address"):
        asyncio.run(main())
    rt.close()


@pytest.mark.gpu
def test_a_read_waits_for_its_copy_alone() -> None:
    with Runtime(driver="cuda") as rt:
        stream = rt.stream(1)
        x = rt.create(b"abcd", stream=stream)
        future = rt.read(x, stream=stream)
        with Latch(stream):
            later = rt.read(x, stream=stream)
            seen = threading.Event()
            future.add_done_callback(lambda _: seen.set())
            assert bytes(future.result(timeout=10)) == b"abcd"
            assert seen.wait(10)
            assert not later.done()
        assert bytes(later.result()) == b"abcd"


@pytest.mark.gpu
def test_read_async_returns_while_a_latch_holds_the_stream() -> None:
    """Future dropped, memory given back, allocated again and overwritten, then the latch opens: nothing is hurt."""
    with Runtime(driver="cuda") as rt:
        stream = rt.stream(1)
        x = rt.create(np.full(1024, 7, "u1"), stream=stream)
        kept = rt.read(x, stream=stream)
        with Latch(stream):
            start = time.monotonic()
            wanted = rt.read(x, stream=stream)
            rt.read(x, stream=stream)  # dropped
            x.close()
            others = [rt.create(np.full(1024, value, "u1"), stream=stream) for value in range(8)]
            assert time.monotonic() - start < 5
            assert not wanted.done()
        assert set(kept.result()) == set(wanted.result()) == {7}
        assert [set(rt.read(o).result()) for o in others] == [{value} for value in range(8)]


def test_a_future_dropped_after_its_runtime_was_closed(sim: SimDriver) -> None:
    """Nobody holds its bytes then: closing waits for the copy."""
    rt = Runtime()
    x = rt.create(np.ones(4096, "u1"))
    rt.command().memory_cleanup()  # nothing else has to be waited for
    future = rt.read(x)
    rt.close()
    assert future._event is not None
    assert sim.event_query(future._event.handle)  # done, before anybody asked
    del future
    x.close()
    gc.collect()
    device_state(sim, 0).retire.drain(block=True)
    sim.check()
    assert sim.inventory()["host_alloc"] == 0
