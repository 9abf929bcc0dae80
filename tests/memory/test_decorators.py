"""Statistics, tracking and failure callbacks: what each of them adds."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from interrupts import interrupted, interrupted_after
from memory_tools import new_stream

import cuglue
from cuglue import (
    AllocationFailure,
    AsyncCudaResource,
    DirectCudaResource,
    FailureCallbackResource,
    GlobalDeviceBudget,
    Statistics,
    StatisticsResource,
    TrackingResource,
    testing,
)
from cuglue.driver.sim import SimDriver
from cuglue.errors import OutOfMemory, UsageError, UseAfterFree
from cuglue.memory import tracking

# --- statistics -------------------------------------------------------------------------------------------------


def test_report_M55_current_peak_and_total(driver: Any) -> None:
    resource = StatisticsResource(AsyncCudaResource())
    a, b = resource.allocate(100), resource.allocate(50)
    resource.deallocate(a)
    c = resource.allocate(20)
    assert resource.statistics() == Statistics(
        current_bytes=70, current_count=2, peak_bytes=150, peak_count=2, total_bytes=170, total_count=3
    )
    resource.reset()
    assert resource.statistics() == Statistics(70, 2, 70, 2, 0, 0)
    for block in (b, c):
        resource.deallocate(block)
    assert resource.statistics() == Statistics(0, 0, 70, 2, 0, 0)


def test_statistics_are_frozen(driver: Any) -> None:
    numbers = StatisticsResource(AsyncCudaResource()).statistics()
    with pytest.raises(AttributeError):
        numbers.current_bytes = 1  # type: ignore[misc]


def test_what_fails_is_not_counted(driver: Any) -> None:
    resource = StatisticsResource(AsyncCudaResource())
    block = resource.allocate(10)
    with testing.faults.fail("malloc_async", persistent=True), pytest.raises(OutOfMemory):
        resource.allocate(100)
    with testing.faults.fail("free_async"), pytest.raises(cuglue.errors.DriverError):
        resource.deallocate(block)
    assert resource.statistics() == Statistics(10, 1, 10, 1, 10, 1)
    resource.deallocate(block)
    with pytest.raises(UseAfterFree):
        resource.deallocate(block)
    assert resource.statistics() == Statistics(0, 0, 10, 1, 10, 1)


def test_scopes_nest_overlap_and_end(driver: Any) -> None:
    resource = StatisticsResource(DirectCudaResource())
    before = resource.allocate(1000)
    with resource.scope() as outer:
        a = resource.allocate(10)
        with resource.scope() as inner:
            b = resource.allocate(5)
            resource.deallocate(b)
            assert inner.statistics() == Statistics(0, 0, 5, 1, 5, 1)
        c = resource.allocate(1)
        assert inner.statistics() == Statistics(0, 0, 5, 1, 5, 1), "its time is over"
        assert outer.statistics() == Statistics(11, 2, 15, 2, 16, 3)
    first, second = resource.scope(), resource.scope()
    first.__enter__()
    second.__enter__()
    resource.deallocate(a)
    first.__exit__(None, None, None)
    resource.deallocate(before)
    second.__exit__(None, None, None)
    assert first.statistics().current_bytes == -10
    assert second.statistics().current_bytes == -1010
    assert first.statistics().peak_bytes == 0
    resource.deallocate(c)
    assert resource._scopes == []


def test_scopes_misused(driver: Any) -> None:
    resource = StatisticsResource(DirectCudaResource())
    block = resource.allocate(10)
    scope = resource.scope()
    assert scope.statistics() == Statistics(0, 0, 0, 0, 0, 0)
    with pytest.raises(UsageError, match="left"):
        scope.__exit__(None, None, None)
    with scope:
        with pytest.raises(UsageError, match="entered"):
            scope.__enter__()
        resource.deallocate(resource.allocate(5))
    assert scope.statistics() == Statistics(0, 0, 5, 1, 5, 1)
    with scope:
        resource.deallocate(block)
    assert scope.statistics() == Statistics(-10, -1, 0, 0, 0, 0)


def test_a_reset_does_not_disturb_a_scope(driver: Any) -> None:
    resource = StatisticsResource(DirectCudaResource())
    with resource.scope() as scope:
        a = resource.allocate(10)
        resource.reset()
        b = resource.allocate(5)
        assert scope.statistics() == Statistics(15, 2, 15, 2, 15, 2)
    for block in (a, b):
        resource.deallocate(block)


def test_statistics_are_exact_under_threads(driver: Any) -> None:
    resource = StatisticsResource(AsyncCudaResource())

    def work() -> None:
        stream = new_stream()
        for _ in range(200):
            resource.deallocate(resource.allocate(10, stream))

    with resource.scope() as scope:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    for numbers in (resource.statistics(), scope.statistics()):
        assert (numbers.current_bytes, numbers.current_count) == (0, 0)
        assert (numbers.total_bytes, numbers.total_count) == (12000, 1200)
        assert 10 <= numbers.peak_bytes <= 60


# --- tracking ---------------------------------------------------------------------------------------------------


def test_tracking_names_tag_and_line(driver: Any) -> None:
    resource = TrackingResource(AsyncCudaResource())
    block = resource.allocate(100, tag="weights")  # this line
    pointer = resource.malloc(50)
    by_hand, by_cupy = resource.live()
    assert (by_hand.id, by_hand.nbytes, by_hand.tag) == (block.id, 100, "weights")
    assert by_hand.where.endswith("in test_tracking_names_tag_and_line")
    assert __file__ in by_hand.where
    with open(__file__) as file:
        line = file.read().splitlines()[int(by_hand.where.split(":")[1].split()[0]) - 1]
    assert "# this line" in line
    assert by_hand.thread == threading.current_thread().name
    assert (by_cupy.nbytes, by_cupy.tag) == (50, "untagged")
    assert __file__ in by_cupy.where
    resource.deallocate(block)
    del pointer
    assert resource.live() == [], "memory of dead arrays is given back first"


def test_tracking_finds_the_line_behind_cupy(driver: Any) -> None:
    import cupy

    resource = TrackingResource(AsyncCudaResource())
    with resource.as_cupy_allocator():
        array = cupy.ndarray(100, "u1")
    (found,) = resource.live()
    assert found.where.endswith("in test_tracking_finds_the_line_behind_cupy")
    del array


def test_the_leak_between_two_points(driver: Any) -> None:
    resource = TrackingResource(DirectCudaResource())
    old, always = resource.allocate(7), resource.allocate(3)
    kept = []
    before = resource.snapshot()
    for n in (10, 20):
        kept.append(resource.allocate(n, tag="leak"))
    resource.deallocate(resource.allocate(1000))
    resource.deallocate(old)
    after = resource.snapshot()
    report = resource.diff(before, after)
    assert (len(before), before.nbytes, len(after), after.nbytes) == (2, 10, 3, 33)
    assert [a.nbytes for a in report.leaked] == [10, 20]
    assert [a.nbytes for a in report.freed] == [7]
    assert report.leaked_bytes == 30
    ((where, figures),) = report.by_line().items()
    assert figures == (30, 2)
    assert "test_the_leak_between_two_points" in where
    assert "30 bytes leaked" in str(report)
    assert where in str(report)
    for block in (*kept, always):
        resource.deallocate(block)
    nothing = resource.diff(resource.snapshot(), resource.snapshot())
    assert str(nothing) == "no leak"


def test_report_M54_a_note_afterwards(driver: Any) -> None:
    resource = TrackingResource(DirectCudaResource())
    block = resource.allocate(10)
    resource.annotate(block, "kept by the cache")
    resource.annotate(block, "seen in step 3")
    assert resource.live()[0].notes == ("kept by the cache", "seen in step 3")
    with pytest.raises(UsageError, match="note"):
        resource.annotate(block, 3)  # type: ignore[arg-type]
    resource.deallocate(block)
    with pytest.raises(UseAfterFree):
        resource.annotate(block, "too late")


def test_notes_of_several_threads_are_all_kept(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread notes, another frees or notes in the middle of it: nothing is lost, and no dead block comes back."""
    resource = TrackingResource(DirectCudaResource())
    block = resource.allocate(10)
    meanwhile: list[Any] = [lambda: resource.annotate(block, "second"), lambda: resource.deallocate(block)]
    real = tracking.replace

    def replace(*args: Any, **changes: Any) -> Any:
        made = real(*args, **changes)
        if interrupt:
            interrupt.pop()()
        return made

    monkeypatch.setattr(tracking, "replace", replace)
    interrupt = [meanwhile[0]]
    resource.annotate(block, "first")
    assert resource.live()[0].notes == ("second", "first")
    interrupt = [meanwhile[1]]
    with pytest.raises(UseAfterFree):
        resource.annotate(block, "third")
    assert resource.live() == []


# --- failure callbacks ------------------------------------------------------------------------------------------


def test_report_M53_a_callback_knows_need_free_and_attempt(driver: Any) -> None:
    asked: list[AllocationFailure] = []
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    hoard = [budget.allocate(300) for _ in range(3)]

    def give_back(failure: AllocationFailure) -> bool:
        asked.append(failure)
        budget.deallocate(hoard.pop())
        return True

    resource = FailureCallbackResource(budget, give_back)
    block = resource.allocate(600, tag="needed")
    assert [(f.need, f.attempt, f.tag) for f in asked] == [(600, 1, "needed"), (600, 2, "needed")]
    assert asked[0].free is not None
    assert asked[0].free > 0
    assert isinstance(asked[0].error, OutOfMemory)
    for rest in (*hoard, block):
        resource.deallocate(rest)
    resource.reap_pending()


def test_a_callback_is_bounded(driver: Any) -> None:
    asked: list[int] = []
    resource = FailureCallbackResource(
        GlobalDeviceBudget(AsyncCudaResource(), 10), lambda f: not asked.append(f.attempt), max_attempts=5
    )
    with pytest.raises(OutOfMemory):
        resource.allocate(11)
    assert asked == [1, 2, 3, 4, 5]


def test_a_callback_may_give_up(driver: Any) -> None:
    asked: list[int] = []

    def no(failure: AllocationFailure) -> bool:
        asked.append(failure.attempt)
        return False

    resource = FailureCallbackResource(GlobalDeviceBudget(AsyncCudaResource(), 10), no)
    with pytest.raises(OutOfMemory):
        resource.malloc(11)
    assert asked == [1]


def test_a_callback_that_allocates_here_does_not_call_itself(driver: Any) -> None:
    depth: list[int] = []

    def loops(failure: AllocationFailure) -> bool:
        depth.append(1)
        try:
            resource.allocate(50)
        except OutOfMemory:
            pass
        return True

    resource = FailureCallbackResource(GlobalDeviceBudget(AsyncCudaResource(), 10), loops)
    with pytest.raises(OutOfMemory):
        resource.allocate(11)
    assert len(depth) == 3


def test_a_callback_that_raises_is_a_note(driver: Any) -> None:
    def broken(failure: AllocationFailure) -> bool:
        raise KeyError("cache")

    resource = FailureCallbackResource(GlobalDeviceBudget(AsyncCudaResource(), 10), broken)
    with pytest.raises(OutOfMemory) as caught:
        resource.allocate(11)
    assert "KeyError: 'cache'" in "".join(caught.value.__notes__)
    assert resource.bytes_outstanding == 0


def test_other_failures_call_nobody(driver: Any) -> None:
    resource = FailureCallbackResource(AsyncCudaResource(), lambda f: pytest.fail("called"))
    with pytest.raises(ValueError, match="-1"):
        resource.allocate(-1)
    with testing.faults.fail("malloc_async", code=999), pytest.raises(cuglue.errors.DriverError):
        resource.allocate(1)


@pytest.mark.parametrize(
    ("callback", "attempts"), [(None, 3), (print, 0), (print, -1), (print, 1.5), (print, True)]
)
def test_bad_callbacks(driver: Any, callback: Any, attempts: Any) -> None:
    with pytest.raises(UsageError):
        FailureCallbackResource(AsyncCudaResource(), callback, attempts)


def test_snapshots_of_two_trackers_are_not_compared(driver: Any) -> None:
    one, other = TrackingResource(DirectCudaResource()), TrackingResource(DirectCudaResource())
    block = one.allocate(10)
    with pytest.raises(UsageError, match="two resources"):
        TrackingResource.diff(one.snapshot(), other.snapshot())
    one.deallocate(block)


@pytest.mark.parametrize("points", [interrupted, interrupted_after])
def test_an_interrupted_scope_is_not_counted_on(sim: SimDriver, points: Any) -> None:
    """It is open, and told of every allocation, or closed and can be entered again."""
    for step in itertools.count(1):
        resource = cuglue.StatisticsResource(cuglue.DirectCudaResource())
        scope = resource.scope()
        entered: list[Any] = []

        def enter(scope: Any = scope, entered: list[Any] = entered) -> None:
            entered += (scope.__enter__(),)

        where = points(enter, step, "memory/statistics.py")
        assert resource._scopes == entered, where
        if entered:
            scope.__exit__(None, None, None)
        with scope:
            resource.deallocate(resource.allocate(10))
        assert scope.statistics().total_bytes == 10, where
        assert resource._scopes == [], where
        if where is None:
            break
    assert step > 3
