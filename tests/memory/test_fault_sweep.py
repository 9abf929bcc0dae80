"""Nothing is lost when a driver call fails: arrays, decorators, recorders and uses told by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    DebugGuardResource,
    DirectCudaResource,
    GlobalDeviceBudget,
    InMemorySink,
    LaunchRecorder,
    LoggingResource,
    PinnedHostResource,
    StatisticsResource,
    TrackingResource,
)
from cuglue.driver.sim import SimDriver
from cuglue.testing import sweep

STACKS: dict[str, Any] = {
    "async": AsyncCudaResource,
    "direct": DirectCudaResource,
    "pinned": PinnedHostResource,
    "budget": lambda: GlobalDeviceBudget(AsyncCudaResource(), 1 << 20),
    "guard": lambda: DebugGuardResource(AsyncCudaResource()),
    "all": lambda: StatisticsResource(
        LoggingResource(
            TrackingResource(GlobalDeviceBudget(DebugGuardResource(AsyncCudaResource()), 1 << 20)),
            InMemorySink(),
        )
    ),
}


def subject(stack: str) -> Any:
    def setup(driver: Any) -> Any:
        made = SimpleNamespace(driver=driver, mr=STACKS[stack](), home=driver.Stream(), kept=[])
        made.user = cuglue.as_stream(driver.Stream())
        return made

    return setup


def with_pointer(stack: str) -> Any:
    def setup(driver: Any) -> Any:
        made = subject(stack)(driver)
        with driver.current_stream(made.home):
            made.kept.append(made.mr.malloc(100))
        return made

    return setup


def account(made: Any) -> object:
    made.mr.reap_pending()
    return made.mr.bytes_outstanding, made.mr.budget_snapshot(), len(made.mr.live_blocks())


def finish(made: Any, result: Any = None) -> None:
    made.driver.device_synchronize(0)
    made.kept.clear()
    if isinstance(result, cuglue.DeviceBlock):
        made.mr.deallocate(result)
    del result
    state = cuglue.as_stream(made.home).state
    state.retire.drain()
    made.mr.reap_pending()
    assert made.mr.bytes_outstanding == 0
    snapshot = made.mr.budget_snapshot()
    assert snapshot is None or snapshot.reserved == 0
    made.mr.close()


def malloc(made: Any) -> None:
    with made.driver.current_stream(made.home):
        made.kept.append(made.mr.malloc(200))


def drop_and_malloc(made: Any) -> None:
    """The dead array is freed on the way; that it cannot be is no reason to refuse the next one."""
    made.kept.clear()
    malloc(made)


@pytest.mark.parametrize("stack", STACKS)
def test_malloc(stack: str) -> None:
    sweep(malloc, name=f"{stack}: malloc", setup=subject(stack), teardown=finish, accounting=account).check()


@pytest.mark.parametrize("stack", STACKS)
def test_drop_and_malloc(stack: str) -> None:
    sweep(
        drop_and_malloc,
        name=f"{stack}: drop, malloc",
        setup=with_pointer(stack),
        teardown=finish,
        atomic=False,  # the array is dropped by the user, whatever fails
    ).check()


def test_use() -> None:
    def tell(made: Any) -> None:
        cuglue.use(made.kept[0], made.user, Access.WRITE)

    sweep(tell, name="use", setup=with_pointer("async"), teardown=finish, accounting=account).check()


@pytest.mark.parametrize("stack", ["async", "guard", "all"])
def test_recorder(stack: str) -> None:
    def launch(made: Any) -> None:
        block = made.kept[0].mem
        with LaunchRecorder(made.user).write(block):
            made.driver.fill_async(block.ptr, 1, 100, made.user.handle)
            made.user.submit()

    sweep(
        launch,
        name=f"{stack}: recorder",
        setup=with_pointer(stack),
        teardown=finish,
        accounting=account,
        atomic=False,  # a launch that could not be noted has been waited for, and stays launched
    ).check()


def near_the_limit(driver: Any) -> Any:
    made = subject("budget")(driver)
    for _ in range(2):
        made.mr.deallocate(made.mr.allocate(400 << 10, driver.Stream()))
    return made


def test_a_budget_that_makes_room() -> None:
    sweep(
        lambda made: made.mr.allocate(600 << 10, made.home),
        name="budget near its limit",
        setup=near_the_limit,
        teardown=finish,
        atomic=False,  # what was reaped stays reaped
    ).check()


def test_a_guard_that_ends_its_quarantine() -> None:
    def setup(driver: Any) -> Any:
        made = subject("guard")(driver)
        made.mr.deallocate(made.mr.allocate(100, made.home))
        return made

    sweep(
        lambda made: made.mr.flush(),
        name="guard: flush",
        setup=setup,
        teardown=finish,
        atomic=False,
    ).check()


def test_a_block_whose_stream_may_not_be_named() -> None:
    """Freed on a stream of our own, made for that."""

    def setup(driver: Any) -> Any:
        made = subject("async")(driver)
        handle = driver.stream_create(0)
        made.block = made.mr.allocate(100, handle)
        driver.stream_destroy(handle)
        return made

    def end(made: Any, result: Any = None) -> None:
        finish(made)
        state = cuglue.as_stream(made.home).state
        state.refuge = None
        state.retire.drain()

    for disable in ((), ("context_events",)):
        sweep(
            lambda made: made.mr.deallocate(made.block),
            name=f"free elsewhere, without {disable}",
            setup=setup,
            teardown=end,
            atomic=False,  # the stream of our own stays
            driver=lambda disable=disable: SimDriver(disable=disable),  # type: ignore[misc]
        ).check()
