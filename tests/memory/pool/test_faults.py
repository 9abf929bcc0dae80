"""Nothing is lost when a driver call fails: each call of an operation of the pool fails in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cuglue import Access, AsyncCudaResource, Direct, DirectCudaResource, PoolResource, Sliced, as_stream
from cuglue.core.device import device_state
from cuglue.driver.sim import SimDriver
from cuglue.errors import CuglueError
from cuglue.testing import sweep

MIB = 1 << 20
KEPT = ("events", "streams")  # spare events, and streams of the subject


@dataclass
class Subject:
    """A pool with two streams, and blocks that the operation works on."""

    driver: SimDriver
    pool: PoolResource
    streams: list[Any]
    blocks: list[Any]


def make(layout: Any = None, limit: int | None = None, source: Any = AsyncCudaResource) -> Any:
    def setup(driver: SimDriver) -> Subject:
        pool = PoolResource(source(), layout=layout, max_bytes=limit)
        return Subject(driver, pool, [as_stream(driver.Stream()) for _ in range(3)], [])

    return setup


def with_blocks(setup: Any, *sizes: tuple[int, int]) -> Any:
    """``setup``, and blocks of (bytes, index of the stream)."""

    def more(driver: SimDriver) -> Subject:
        subject: Subject = setup(driver)
        subject.blocks = [subject.pool.allocate(n, subject.streams[i]) for n, i in sizes]
        return subject

    return more


def freed(setup: Any, *sizes: tuple[int, int]) -> Any:
    """``setup``, with memory that was used and given back."""

    def more(driver: SimDriver) -> Subject:
        subject: Subject = setup(driver)
        for n, i in sizes:
            block = subject.pool.allocate(n, subject.streams[i])
            driver.fill_async(block.ptr, 1, n, block.stream.handle)
            subject.pool.deallocate(block)
        return subject

    return more


def teardown(subject: Subject, result: Any) -> None:
    blocks = [*subject.blocks, *([result] if hasattr(result, "generation") else [])]
    for block in blocks:
        if block.state.value == "live":
            subject.pool.deallocate(block)
    subject.driver.device_synchronize(0)
    device_state(subject.driver, 0).retire.drain(block=True)
    subject.pool.close()


def accounting(subject: Subject) -> object:
    return subject.pool.bytes_outstanding, sorted(b.ptr for b in subject.pool.live_blocks())


def grow(subject: Subject) -> Any:
    return subject.pool.allocate(3 * MIB, subject.streams[0])


def small(subject: Subject) -> Any:
    return subject.pool.allocate(1000, subject.streams[0])


def at_the_limit(subject: Subject) -> Any:
    return subject.pool.allocate(16 * MIB, subject.streams[0])


def take_over(subject: Subject) -> Any:
    return subject.pool.allocate(7 * MIB, subject.streams[0])


def give_back_after_a_use_elsewhere(subject: Subject) -> None:
    (block,) = subject.blocks
    if block.reads is None and block.state.value == "live":
        block.prepare(subject.streams[1], Access.READ)
        block.finish(subject.streams[1], Access.READ)
    subject.pool.deallocate(block)


def idle(setup: Any) -> Any:
    """``setup``, and the device has done everything."""

    def more(driver: SimDriver) -> Subject:
        subject: Subject = setup(driver)
        driver.device_synchronize(0)
        for home in subject.pool.homes.all():
            home.looked = home.hits + home.misses
        return subject

    return more


def large(subject: Subject) -> Any:
    return subject.pool.allocate(20 * MIB, subject.streams[0])


def trim(subject: Subject) -> None:
    subject.pool.trim()


def clean_up(subject: Subject) -> None:
    subject.pool.stream_memory(subject.streams[0]).cleanup()


def install(subject: Subject) -> None:
    subject.pool.install([Direct()], subject.streams[0])


SYNC = lambda: DirectCudaResource(mode="sync")  # noqa: E731 - a name for a factory
CASES: dict[str, tuple[Any, Any, bool]] = {
    "growth": (grow, make(), True),
    "growth, synchronous": (grow, make(source=SYNC), True),
    "a small page": (small, make(), True),
    "at the limit": (
        at_the_limit,
        freed(make(limit=16 * MIB), (4 * MIB, 1), (4 * MIB, 2), (7 * MIB, 1)),
        False,
    ),
    "at the limit, synchronous": (
        at_the_limit,
        freed(make(limit=16 * MIB, source=SYNC), (4 * MIB, 1), (4 * MIB, 2)),
        False,
    ),
    "stealing": (take_over, freed(make(limit=16 * MIB), (8 * MIB, 1), (8 * MIB, 2)), False),
    "a page changes hands": (large, idle(freed(make(), (70 * MIB, 1), (20 * MIB, 2))), False),
    "pages of idle streams go": (
        large,
        idle(freed(make(), (50 * MIB, 1), (12 * MIB, 2), (12 * MIB, 1))),
        False,
    ),
    "use elsewhere": (give_back_after_a_use_elsewhere, with_blocks(make(), (MIB, 0)), True),
    "trim": (trim, freed(make(), (4 * MIB, 0), (8 * MIB, 1), (1000, 2)), False),
    "sliced": (small, make(layout=[Sliced(MIB)]), True),
    "direct": (grow, make(layout=[Direct(4 * MIB)]), True),
    "direct, reclaiming": (grow, freed(make(layout=[Direct(4 * MIB)]), (2 * MIB, 0), (MIB, 0)), False),
    "cleanup": (clean_up, freed(make(layout=[Sliced(MIB), Direct()]), (1000, 0), (5 * MIB, 0)), False),
    "install": (install, freed(make(layout=[Sliced(MIB)]), (1000, 0)), False),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_lost(name: str) -> None:
    operation, setup, atomic = CASES[name]
    sweep(
        operation,
        setup=setup,
        teardown=teardown,
        accounting=accounting,
        name=name,
        atomic=atomic,
        keeps=KEPT,
    ).check()


def test_a_failure_while_closing_can_be_repeated() -> None:
    def close(subject: Subject) -> None:
        subject.pool.close()

    sweep(
        close,
        setup=freed(make(), (4 * MIB, 0), (8 * MIB, 1)),
        teardown=teardown,
        name="close",
        atomic=False,
        keeps=KEPT,
    ).check()


def test_what_went_wrong_on_the_way_is_told(device: Any) -> None:
    from cuglue.testing import faults

    device(mib=32)
    pool = PoolResource(AsyncCudaResource())
    held = pool.allocate(20 * MIB, 0)
    pool.deallocate(pool.allocate(8 * MIB, 0))
    with faults.fail("stream_synchronize", persistent=True), pytest.raises(CuglueError) as caught:
        pool.allocate(30 * MIB, 0)
    text = (
        str(caught.value)
        + str(caught.value.__cause__)
        + str(getattr(caught.value.__cause__, "__cause__", ""))
    )
    assert "stream_synchronize" in text
    pool.deallocate(held)
    pool.close()
