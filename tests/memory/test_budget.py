"""GlobalDeviceBudget: limits, its own ledger, room made before refusing, reservations (contracts B29, B30b, B33)."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import Any

import pytest
from memory_tools import new_stream

import cuglue
from cuglue import (
    AsyncCudaResource,
    BlockState,
    DebugGuardResource,
    DeviceMemoryResource,
    DirectCudaResource,
    GlobalDeviceBudget,
    InMemorySink,
    LoggingResource,
    PoolResource,
    StatisticsResource,
    TrackingResource,
    testing,
)
from cuglue.driver.protocol import CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.errors import ClosedError, DriverError, LayoutError, OutOfBudget, OutOfMemory, UseAfterFree
from cuglue.memory.adaptor import Adaptor
from cuglue.memory.budget import reserve
from cuglue.memory.records import Action

K = 1024


def figures(error: OutOfBudget) -> tuple[int, int, int, int, int]:
    return error.current, error.requested, error.required, error.limit, error.remaining


def test_B29_exact_limit_and_the_next_byte(driver: Any) -> None:
    budget = GlobalDeviceBudget(DirectCudaResource(), 16 * K)
    block = budget.allocate(16 * K)
    assert (budget.reserved_bytes, budget.remaining) == (16 * K, 0)
    with pytest.raises(OutOfBudget) as caught:
        budget.allocate(1)
    assert figures(caught.value) == (16 * K, 1, 16 * K + 1, 16 * K, 0)
    assert isinstance(caught.value, MemoryError)
    budget.deallocate(block)
    assert budget.reserved_bytes == 0


def test_B5_the_message_has_the_figures_in_order(driver: Any) -> None:
    budget = GlobalDeviceBudget(DirectCudaResource(), 100)
    with pytest.raises(OutOfBudget) as caught:
        budget.allocate(101)
    text = str(caught.value)
    places = [text.index(f"{name}=") for name in ("current", "requested", "required", "limit", "remaining")]
    assert places == sorted(places)
    again = pickle.loads(pickle.dumps(caught.value))
    assert figures(again) == figures(caught.value)


LAYERS_ABOVE: dict[str, Any] = {
    "nothing": lambda budget: budget,
    "layers": lambda budget: StatisticsResource(TrackingResource(budget)),
}
BELOW: dict[str, Any] = {
    "async": AsyncCudaResource,
    "direct": DirectCudaResource,
    "pool": lambda: PoolResource(AsyncCudaResource()),
    "guard": lambda: DebugGuardResource(AsyncCudaResource()),
    "budget": lambda: GlobalDeviceBudget(AsyncCudaResource(), 10**9),
}


@pytest.mark.parametrize("above", LAYERS_ABOVE)
@pytest.mark.parametrize("below", BELOW)
def test_a_refusal_says_where_the_memory_is_and_what_was_tried(driver: Any, above: str, below: str) -> None:
    budget = GlobalDeviceBudget(BELOW[below](), 900 * K)
    top = LAYERS_ABOVE[above](budget)
    blocks = [top.allocate(100 * K, None, f"net{number % 2}") for number in range(4)]
    with pytest.raises(OutOfBudget) as caught:
        top.allocate(800 * K)
    report: Any = caught.value.report
    assert report.requested == 800 * K
    assert report.live_blocks == 4
    assert {tag: count for tag, _, count in report.top_tags} == {"net0": 2, "net1": 2}
    assert all(nbytes >= 200 * K for _, nbytes, _ in report.top_tags)
    assert report.pending == {}
    assert "waited for pending frees" in report.tried
    assert "largest tags: net0: " in str(caught.value)
    assert "tried: looked what is free by now, collected garbage, waited for pending frees" in str(
        caught.value
    )
    with pytest.raises(OutOfBudget) as caught:
        top.allocate(901 * K)
    assert str(caught.value).endswith("tried: nothing, because the limit is lower")
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.report == caught.value.report
    for block in blocks:
        top.deallocate(block)
    top.reap_pending()
    top.close()


def test_a_refusal_names_what_is_pending(sim: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), 100)
    stream = cuglue.as_stream(sim.Stream())
    block = budget.allocate(60, stream)
    budget.deallocate(budget.allocate(40, stream))
    with testing.faults.fail("stream_synchronize"), testing.faults.fail("event_query", persistent=True):
        with pytest.raises(OutOfBudget) as caught:
            budget.allocate(50, stream)
    report: Any = caught.value.report
    assert report.pending == {stream.id: 40}
    budget.deallocate(block)
    budget.close()


def test_a_refusal_over_a_resource_that_tells_nothing(driver: Any) -> None:
    class Plain(DeviceMemoryResource):
        device_ordinal = 0
        bytes_outstanding = 0

        def allocate(self, nbytes: int, stream: object = None, tag: str = "") -> Any: ...
        def deallocate(self, block: Any) -> None: ...

    with pytest.raises(OutOfBudget) as caught:
        GlobalDeviceBudget(Plain(), 10).allocate(11)
    assert caught.value.report is None
    assert "\n" not in str(caught.value)


def test_B29_what_is_out_already_is_charged(driver: Any) -> None:
    inner = DirectCudaResource()
    first = inner.allocate(1000)
    budget = GlobalDeviceBudget(inner, 3000)
    assert budget.reserved_bytes == 1000
    second = budget.allocate(500)
    assert budget.reserved_bytes == 1500
    budget.deallocate(first)
    assert budget.reserved_bytes == 500
    budget.deallocate(second)
    assert budget.reserved_bytes == 0


def test_B29_what_was_out_and_is_reaped_is_discharged(driver: Any) -> None:
    inner = AsyncCudaResource()
    inner.deallocate(inner.allocate(1000))
    budget = GlobalDeviceBudget(inner, 3000)
    assert budget.reserved_bytes == 1000
    inner.reap_pending()
    assert budget.reserved_bytes == 0


def test_B29_beyond_the_limit_nothing_is_touched(driver: Any) -> None:
    sink = InMemorySink()
    budget = GlobalDeviceBudget(LoggingResource(AsyncCudaResource(), sink), 100)
    with testing.faults.counts() as counted, pytest.raises(OutOfBudget):
        budget.allocate(101)
    assert not {"malloc_async", "stream_synchronize", "event_query"} & set(counted)
    assert len(sink) == 0


def test_B29_an_inner_failure_is_rolled_back(driver: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    with testing.faults.fail("malloc_async", code=999), pytest.raises(DriverError):
        budget.allocate(600)
    assert budget.reserved_bytes == 0
    for bad in (0, -1, 2.0):
        with pytest.raises((DriverError, ValueError, TypeError)):
            budget.allocate(bad)  # type: ignore[arg-type]
    assert budget.reserved_bytes == 0
    budget.deallocate(budget.allocate(600))
    budget.reap_pending()


def test_B29_a_synchronous_inner_releases_at_once(driver: Any) -> None:
    budget = GlobalDeviceBudget(DirectCudaResource(), 1000)
    budget.deallocate(budget.allocate(1000))
    assert budget.budget_snapshot() == (1000, 0)


def test_B29_an_asynchronous_inner_releases_at_the_reap(driver: Any) -> None:
    inner = AsyncCudaResource()
    budget = GlobalDeviceBudget(inner, 1000)
    budget.deallocate(budget.allocate(1000, new_stream()))
    assert budget.budget_snapshot() == (1000, 1000)
    budget.reap_pending()
    assert budget.budget_snapshot() == (1000, 0)
    budget.deallocate(budget.allocate(1000, new_stream()))
    inner.reap_pending()  # somebody else reaps
    assert budget.reserved_bytes == 0


def test_B29_a_bogus_deallocate_releases_nothing(driver: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    block = budget.allocate(400)
    other = AsyncCudaResource()
    foreign = other.allocate(300)
    with pytest.raises(UseAfterFree):
        budget.deallocate(foreign)
    assert budget.reserved_bytes == 400
    budget.deallocate(block)
    with pytest.raises(UseAfterFree):
        budget.deallocate(block)
    budget.reap_pending()
    assert budget.reserved_bytes == 0
    other.deallocate(foreign)


def test_B29_after_a_reap_there_is_room(driver: Any) -> None:
    """alloc(limit), dealloc, alloc(limit): refused by budgets that look at their figures only."""
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    for _ in range(3):
        budget.deallocate(budget.allocate(1000, new_stream()))
    budget.reap_pending()


def test_report_M17_cached_or_pending_memory_is_given_up_before_refusing(driver: Any) -> None:
    """Limit 1 GiB: 512 MiB, free, 768 MiB (scaled down)."""
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1 << 20)
    pointer = budget.malloc(512 << 10)
    del pointer
    assert budget.malloc(768 << 10).mem.size == 768 << 10


def test_B29_arrays_in_cycles_are_collected_before_refusing(driver: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1 << 20)

    class Node:
        pass

    gc.disable()
    try:
        node: Any = Node()
        node.me, node.pointer = node, budget.malloc(600 << 10)
        del node
        assert budget.malloc(700 << 10).mem.size == 700 << 10
    finally:
        gc.enable()


def test_B29_arrays_in_cycles_over_a_resource_that_frees_at_once(driver: Any) -> None:
    """Its reap does nothing, so the budget itself has dead arrays given back."""
    budget = GlobalDeviceBudget(DirectCudaResource(), 1 << 20)

    class Node:
        pass

    gc.disable()
    try:
        node: Any = Node()
        node.me, node.pointer = node, budget.malloc(600 << 10)
        del node
        block = budget.allocate(700 << 10)
    finally:
        gc.enable()
    budget.deallocate(block)


def test_B29_it_looks_before_it_waits(driver: Any) -> None:
    """What is free by now is counted without blocking the host."""
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    stream = cuglue.as_stream(new_stream())
    budget.deallocate(budget.allocate(900, stream))
    stream.synchronize()
    with testing.faults.counts() as counted:
        block = budget.allocate(900, stream)
    assert counted["stream_synchronize"] == 0
    budget.deallocate(block)


def test_B29_it_waits_before_it_refuses(driver: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    stream = cuglue.as_stream(new_stream())
    with testing.Latch(stream) as latch:
        budget.deallocate(budget.allocate(900, stream))
        threading.Timer(0.2, latch.release).start()
        block = budget.allocate(900, new_stream())
        assert block.state is BlockState.LIVE
    budget.deallocate(block)


def test_B29_a_failing_reap_is_the_cause(driver: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    stream = new_stream()
    budget.deallocate(budget.allocate(900, stream))
    with (
        testing.faults.fail("stream_synchronize", persistent=True),
        testing.faults.fail("event_query", persistent=True),
        pytest.raises((OutOfBudget, DriverError)) as caught,
    ):
        budget.allocate(900, stream)
    assert isinstance(caught.value, DriverError) or isinstance(caught.value.__cause__, DriverError)
    assert budget.reserved_bytes == 900
    budget.deallocate(budget.allocate(900, stream))


def test_B29_no_memory_on_the_device_is_tried_once_more(driver: Any) -> None:
    """Not the budget's fault, but a reap may help all the same."""
    calls: list[str] = []

    class Scarce(Adaptor):
        def _allocate(self, nbytes: int, stream: Any, tag: str, kind: Any) -> Any:
            calls.append("allocate")
            if "reap" not in calls:
                raise OutOfMemory("no", requested=nbytes)
            return super()._allocate(nbytes, stream, tag, kind)

        def reap_pending(self, *, block: bool = True) -> None:
            calls.append("reap")
            super().reap_pending(block=block)

    budget = GlobalDeviceBudget(Scarce(AsyncCudaResource()), 1000)
    block = budget.allocate(500)
    assert calls == ["allocate", "reap", "allocate"]
    assert budget.reserved_bytes == 500
    budget.deallocate(block)
    calls.clear()

    class Empty(Adaptor):
        def _allocate(self, nbytes: int, stream: Any, tag: str, kind: Any) -> Any:
            calls.append("allocate")
            raise OutOfMemory("no", requested=nbytes)

    budget = GlobalDeviceBudget(Empty(AsyncCudaResource()), 1000)
    with pytest.raises(OutOfMemory):
        budget.allocate(500)
    assert calls == ["allocate", "allocate"]
    assert budget.reserved_bytes == 0


def test_B29_what_is_charged_is_what_is_out(driver: Any) -> None:
    """An inner resource that rounds up is charged rounded up, and discharged the same."""

    class Rounds(Adaptor):
        def _allocate(self, nbytes: int, stream: Any, tag: str, kind: Any) -> Any:
            return super()._allocate(-(-nbytes // 512) * 512, stream, tag, kind)

    budget = GlobalDeviceBudget(Rounds(DirectCudaResource()), 10_000)
    block = budget.allocate(100)
    assert (block.nbytes, budget.reserved_bytes) == (512, 512)
    budget.deallocate(block)
    assert budget.reserved_bytes == 0


def test_B29_racing_allocations_leak_no_reservation(driver: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), 64 * K)
    refused: list[int] = []
    above: list[int] = []

    def work(seed: int) -> None:
        stream = new_stream()
        for i in range(120):
            try:
                block = budget.allocate(1 + (seed * 7919 + i * 104729) % (12 * K), stream)
            except OutOfBudget:
                refused.append(1)
                continue
            if budget.upstream.live_bytes > 64 * K:  # type: ignore[attr-defined]
                above.append(1)
            budget.deallocate(block)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not above, "the limit was passed"
    budget.reap_pending()
    assert budget.reserved_bytes == 0
    assert budget._ledger == {}


def test_B29_remaining_never_goes_below_zero(driver: Any) -> None:
    inner = DirectCudaResource()
    block = inner.allocate(1000)
    budget = GlobalDeviceBudget(inner, 100)
    assert (budget.reserved_bytes, budget.remaining) == (1000, 0)
    snapshot = budget.budget_snapshot()
    assert (snapshot.limit, snapshot.reserved, snapshot.remaining) == (100, 1000, 0)
    assert budget.bytes_outstanding == 1000
    inner.deallocate(block)


@pytest.mark.parametrize("bad", [-1, 1.5, "1", None])
def test_bad_limits(driver: Any, bad: Any) -> None:
    with pytest.raises(LayoutError):
        GlobalDeviceBudget(DirectCudaResource(), bad)


def test_budgets_nest(driver: Any) -> None:
    shared = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    left, right = GlobalDeviceBudget(shared, 600), GlobalDeviceBudget(shared, 600)
    a = left.allocate(600)
    with pytest.raises(OutOfBudget) as own:
        left.allocate(1)
    assert own.value.limit == 600
    b = right.allocate(400)
    with pytest.raises(OutOfBudget) as outer:
        right.allocate(100)
    assert outer.value.limit == 1000, "refused by the shared one"
    assert (left.reserved_bytes, right.reserved_bytes, shared.reserved_bytes) == (600, 400, 1000)
    left.deallocate(a)
    right.deallocate(b)
    shared.reap_pending()
    assert (left.reserved_bytes, right.reserved_bytes, shared.reserved_bytes) == (0, 0, 0)


def test_report_M48_the_limit_is_the_resources_own_on_every_thread(driver: Any) -> None:
    from memory_tools import in_thread

    budget = GlobalDeviceBudget(AsyncCudaResource(), 1234)
    assert in_thread(lambda: budget.limit) == 1234
    assert budget.device_ordinal == 0


def test_B30b_the_reference_trace(driver: Any) -> None:
    sink = InMemorySink()
    budget = GlobalDeviceBudget(LoggingResource(AsyncCudaResource(), sink), 16 * K)
    stream = cuglue.as_stream(new_stream())
    with testing.Latch(stream) as latch:
        budget.deallocate(budget.allocate(12 * K, stream))
        threading.Timer(0.2, latch.release).start()
        block = budget.allocate(8 * K, stream)
    actions = [record.action for record in sink.snapshot()]
    assert actions == [Action.ALLOCATE, Action.DEALLOCATE, Action.REAP_PENDING, Action.ALLOCATE]
    assert all(record.ok for record in sink.snapshot())
    assert budget.reserved_bytes == 8 * K
    with pytest.raises(OutOfBudget) as caught:
        budget.allocate(9 * K, stream)
    error = caught.value
    assert (error.requested, error.current, error.remaining, error.limit) == (9 * K, 8 * K, 8 * K, 16 * K)
    assert [record.action for record in sink.snapshot()[4:]] == [Action.REAP_PENDING]
    with pytest.raises(OutOfBudget):
        budget.allocate(17 * K, stream)
    assert len(sink) == 5
    budget.deallocate(block)


# --- reservations -----------------------------------------------------------------------------------------------


def test_B33_a_reservation_counts_against_everybody(driver: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    with budget.reserve(600) as token:
        assert (budget.reserved_bytes, token.total, token.remaining) == (600, 600, 600)
        with pytest.raises(OutOfBudget):
            budget.allocate(500)
        with pytest.raises(OutOfBudget):
            budget.reserve(500)
        block = token.allocate(400, tag="mine")
        assert (budget.reserved_bytes, token.remaining, block.tag) == (600, 200, "mine")
        with pytest.raises(OutOfBudget) as caught:
            token.allocate(201)
        assert (caught.value.limit, caught.value.current, caught.value.requested) == (600, 400, 201)
    assert budget.reserved_bytes == 400
    assert block.resource is budget
    budget.deallocate(block)
    budget.reap_pending()
    assert budget.reserved_bytes == 0


def test_B33_a_failed_allocation_goes_back_to_the_reservation(driver: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    token = budget.reserve(600)
    with testing.faults.fail("malloc_async", code=999), pytest.raises(DriverError):
        token.allocate(400)
    assert (token.remaining, budget.reserved_bytes) == (600, 600)
    token.close()
    token.close()
    assert budget.reserved_bytes == 0
    with pytest.raises(ClosedError):
        token.allocate(1)


def test_B33_dropping_one_gives_the_rest_back(driver: Any) -> None:
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    token = budget.reserve(600)
    block = token.allocate(100)
    del token
    gc.collect()
    assert budget.reserved_bytes == 100
    budget.deallocate(block)


def test_B33_it_needs_a_budget_in_the_stack(driver: Any) -> None:
    sink = InMemorySink()
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
    with reserve(LoggingResource(budget, sink), 300) as token:
        assert token.total == 300
        assert budget.reserved_bytes == 300
    with pytest.raises(DriverError, match="without a budget"):
        reserve(LoggingResource(AsyncCudaResource(), sink), 300)


def test_a_long_loop_under_a_budget(driver: Any) -> None:
    """Pending frees fill the budget again and again; each time room is made."""
    budget = GlobalDeviceBudget(AsyncCudaResource(), 100 * K)
    stream = new_stream()
    for _ in range(1000):
        budget.deallocate(budget.allocate(10 * K, stream))
    assert budget.reserved_bytes <= 100 * K
    budget.reap_pending()
    assert budget.reserved_bytes == 0
    assert len(budget._pending) == 0


def test_the_error_is_cupys_too(driver: Any) -> None:
    import cupy

    budget = GlobalDeviceBudget(AsyncCudaResource(), 100)
    with budget.as_cupy_allocator(), pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        cupy.ndarray(200, "u1")
    assert isinstance(caught.value, OutOfBudget)
    assert caught.value.requested == 200


def test_in_a_capture_nothing_is_waited_for_by_a_budget() -> None:
    driver = SimDriver()
    with cuglue.use_driver(driver):
        budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)
        stream = driver.Stream()
        keep = budget.allocate(900, stream)
        driver.capture_begin(stream.ptr, CaptureMode.RELAXED)
        with testing.faults.counts() as counted, pytest.raises(OutOfBudget):
            budget.allocate(900, stream)
        assert counted["stream_synchronize"] == 0
        driver.graph_destroy(driver.capture_end(stream.ptr))
        budget.deallocate(keep)
        budget.reap_pending()


@pytest.mark.parametrize("nested", [False, True])
def test_report_M24_threads_near_the_limit_wait_for_each_others_frees(driver: Any, nested: bool) -> None:
    """Four threads with a block each fit, always: what is in the way is pending."""
    budget = GlobalDeviceBudget(AsyncCudaResource(), 4 * K)
    outer = GlobalDeviceBudget(budget, 4 * K) if nested else budget
    failed: list[BaseException] = []

    def work() -> None:
        stream = new_stream()
        try:
            for _ in range(60):
                outer.deallocate(outer.allocate(K, stream))
        except BaseException as error:  # noqa: BLE001 - shown below
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [str(error) for error in failed] == []
    outer.reap_pending()
    assert (budget.reserved_bytes, outer.reserved_bytes) == (0, 0)


def test_B29_a_look_that_fails_is_followed_by_the_wait() -> None:
    with cuglue.use_driver(SimDriver()):
        budget = GlobalDeviceBudget(AsyncCudaResource(), K)
        stream = new_stream()
        budget.deallocate(budget.allocate(K, stream))
        with testing.faults.fail("event_query") as looks:
            block = budget.allocate(K, stream)
        assert looks.raised == 1
        budget.deallocate(block)
        with testing.faults.fail("event_query", persistent=True):
            with testing.faults.fail("stream_synchronize", persistent=True):
                with pytest.raises(OutOfBudget) as caught:
                    budget.allocate(K, stream)
        assert isinstance(caught.value.__cause__, DriverError)
        budget.close()


def test_dead_arrays_are_given_back_before_a_refusal_whatever_lies_below(sim: Any) -> None:
    """What others write need not take back the memory of dead arrays when it is asked to reap."""

    class Plain(DeviceMemoryResource):
        device_ordinal = 0

        def __init__(self) -> None:
            self.inner = DirectCudaResource()

        def allocate(self, nbytes: int, stream: object = None, tag: str = "") -> Any:
            return self.inner.allocate(nbytes, stream, tag)

        def deallocate(self, block: Any) -> None:
            self.inner.deallocate(block)

        @property
        def bytes_outstanding(self) -> int:
            return self.inner.bytes_outstanding

    budget = GlobalDeviceBudget(Plain(), 1000)
    pointer = budget.malloc(900)
    del pointer
    budget.deallocate(budget.allocate(900))
    assert budget.reserved_bytes == 0


def test_bytes_are_discharged_once_though_an_interrupt_settles_too(sim: Any) -> None:
    """A signal handler may allocate, anywhere in Python."""
    budget = GlobalDeviceBudget(AsyncCudaResource(), 1000)

    class Interrupting:
        @property
        def state(self) -> BlockState:
            if 1 in budget._pending and not entered:
                entered.append(True)
                budget._settle()
            return BlockState.FREED

    entered: list[bool] = []
    budget._reserved += 10
    budget._pending[1] = Interrupting(), 10
    assert budget.reserved_bytes == 0
