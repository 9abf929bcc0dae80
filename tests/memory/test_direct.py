"""DirectCudaResource, sentence by sentence (contracts B1-B18)."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted, interrupted_after
from memory_tools import contents, fill, new_stream

import cuglue
from cuglue import (
    Access,
    AsyncCudaResource,
    BlockState,
    DirectCudaResource,
    ExpandableCudaResource,
    ManagedResource,
    PinnedHostResource,
    StreamPool,
    testing,
)
from cuglue.driver.sim import SimDriver
from cuglue.errors import (
    ClosedError,
    DriverError,
    LayoutError,
    OutOfMemory,
    StreamMisuse,
    UnsupportedError,
    UsageError,
    UseAfterFree,
)

MODES = ["auto", "async", "sync"]


@pytest.fixture(params=MODES)
def direct(request: pytest.FixtureRequest, driver: Any) -> DirectCudaResource:
    return DirectCudaResource(mode=request.param)


# --- B.1 types --------------------------------------------------------------------------------------------------


def test_B1_generations_are_fresh_across_resources(driver: Any) -> None:
    one, two = DirectCudaResource(), DirectCudaResource(mode="sync")
    blocks = [r.allocate(64) for _ in range(3) for r in (one, two)]
    generations = [b.generation for b in blocks]
    assert generations == sorted(set(generations))
    for block, resource in zip(blocks, [one, two] * 3, strict=True):
        resource.deallocate(block)


def test_B2_a_block_says_what_it_is(direct: DirectCudaResource) -> None:
    stream = new_stream()
    block = direct.allocate(1000, stream, "weights")
    assert (block.nbytes, block.device_ordinal, block.tag) == (1000, 0, "weights")
    assert block.alloc_stream is cuglue.as_stream(stream)
    assert block.align >= 256
    assert block.ptr % block.align == 0
    assert block.resource is direct
    identity = block.id
    assert identity == (block.ptr, block.generation, block.alloc_stream.id, 0)
    direct.deallocate(block)
    assert block.id == identity, "the id outlives the block"


@pytest.mark.parametrize(
    "name", ["ptr", "size", "nbytes", "generation", "device_ordinal", "alloc_stream", "id"]
)
def test_B2_what_identifies_a_block_is_read_only(direct: DirectCudaResource, name: str) -> None:
    block = direct.allocate(64)
    with pytest.raises(AttributeError):
        setattr(block, name, 1)
    direct.deallocate(block)


def test_B4_states_of_the_direct_resource(direct: DirectCudaResource) -> None:
    block = direct.allocate(64)
    assert block.state is BlockState.LIVE
    direct.deallocate(block)
    assert block.state is BlockState.FREED


def test_B4_a_failed_deallocate_leaves_the_block_live(driver: Any, direct: DirectCudaResource) -> None:
    block = direct.allocate(64)
    for method in ("free", "free_async"):
        with testing.faults.fail(method, code=999) as failure:
            if (direct.mode == "sync") is (method == "free"):
                with pytest.raises(DriverError):
                    direct.deallocate(block)
                assert failure.raised == 1
                assert block.state is BlockState.LIVE
                assert direct.bytes_outstanding == 64
                assert direct.live_blocks() == [block]
    direct.deallocate(block)
    assert direct.bytes_outstanding == 0


# --- B.2 sentence by sentence -----------------------------------------------------------------------------------


def test_B6_one_driver_allocation_per_block(direct: DirectCudaResource) -> None:
    stream = new_stream()
    with testing.faults.counts() as counted:
        blocks = [direct.allocate(100 + i, stream) for i in range(10)]
    assert counted["malloc"] + counted["malloc_async"] == 10
    spans = sorted((b.ptr, b.ptr + b.nbytes) for b in blocks)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    with testing.faults.counts() as counted:
        for block in blocks:
            direct.deallocate(block)
    assert counted["free"] + counted["free_async"] == 10


def test_B7_dropping_a_block_frees_nothing(direct: DirectCudaResource) -> None:
    ptr = direct.allocate(64).ptr
    gc.collect()
    assert direct.bytes_outstanding == 64
    (block,) = direct.live_blocks()
    assert block.ptr == ptr
    direct.deallocate(block)


def test_B7_close_frees_what_is_live_and_names_the_tags(driver: Any, direct: DirectCudaResource) -> None:
    blocks = [direct.allocate(64, tag=tag) for tag in ("picture", "sound", "sound")]
    with pytest.warns(ResourceWarning, match=r"3 blocks live \(tags: picture, sound"):
        direct.close()
    assert direct.bytes_outstanding == 0
    assert {b.state for b in blocks} == {BlockState.FREED}
    direct.close()
    with pytest.raises(ClosedError):
        direct.allocate(64)


def test_B7_closing_in_a_with_statement(driver: Any) -> None:
    with DirectCudaResource() as resource:
        resource.deallocate(resource.allocate(64))
    assert resource.closed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del resource
        gc.collect()


def test_B7_a_forgotten_resource_frees_and_warns(driver: Any) -> None:
    resource: Any = DirectCudaResource()
    block: Any = resource.allocate(64, tag="lost")
    stream = block.alloc_stream
    del resource
    gc.collect()
    assert block.resource.bytes_outstanding == 64, "a block keeps its resource alive"
    del block
    with pytest.warns(ResourceWarning, match="never closed"):
        gc.collect()
    stream.state.retire.run_forgotten()


def test_B8_the_free_path_matches_the_allocation_path(driver: Any) -> None:
    for mode, names in (
        ("sync", ("malloc", "free")),
        ("async", ("malloc_async", "free_async")),
        ("auto", ("malloc_async", "free_async")),
    ):
        resource = DirectCudaResource(mode=mode)
        with testing.trace(only={"malloc", "free", "malloc_async", "free_async"}) as calls:
            resource.deallocate(resource.allocate(64, new_stream()))
        assert tuple(call.method for call in calls) == names, mode


def test_B8_auto_is_synchronous_where_the_device_is() -> None:
    driver = SimDriver(disable=["async_memory"])
    with cuglue.use_driver(driver):
        resource = DirectCudaResource()
        with testing.trace(only={"malloc", "free", "malloc_async", "free_async"}) as calls:
            resource.deallocate(resource.allocate(64))
        assert [call.method for call in calls] == ["malloc", "free"]
        with pytest.raises(UnsupportedError) as caught:
            DirectCudaResource(mode="async").allocate(64)
        assert caught.value.reason == "async_memory"


def test_B9_eight_threads_and_their_bytes(direct: DirectCudaResource) -> None:
    baseline = direct.bytes_outstanding
    wrong: list[str] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        stream = new_stream()
        for _ in range(64):
            nbytes = int(random.integers(64, 4097))
            value = int(random.integers(1, 256))
            block = direct.allocate(nbytes, stream)
            fill(block, value, stream)
            if not (contents(block, stream) == value).all():
                wrong.append(f"{seed}: {block}")
            direct.deallocate(block)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert direct.bytes_outstanding == baseline


def test_B10_making_one_calls_no_driver(driver: Any) -> None:
    with testing.faults.counts() as counted:
        for mode in MODES:
            DirectCudaResource(mode=mode)
    assert not counted


def test_B10_the_ordinal_is_checked_unless_it_is_a_label(driver: Any) -> None:
    with pytest.raises(UsageError, match="got 3 for 0"):
        DirectCudaResource(0, 3)
    resource = DirectCudaResource(0, 3, check=False)
    assert (resource.device, resource.device_ordinal) == (0, 3)
    block = resource.allocate(64)
    assert block.device_ordinal == 3
    assert block.id.device_ordinal == 3
    resource.deallocate(block)


@pytest.mark.parametrize("bad", [-1, 1.0, "0", True, None])
def test_B10_bad_ordinals(driver: Any, bad: Any) -> None:
    with pytest.raises(UsageError, match="ordinal"):
        DirectCudaResource(bad)


def test_B10_a_device_that_is_not_there(driver: Any) -> None:
    for make in (
        DirectCudaResource,
        AsyncCudaResource,
        PinnedHostResource,
        ManagedResource,
        ExpandableCudaResource,
        StreamPool,
    ):
        for ordinal in (99, 2**40, np.int64(99)):
            with pytest.raises(UsageError, match="an ordinal below"):
                make(ordinal)


def test_B10_a_mode_that_is_not_there(driver: Any) -> None:
    with pytest.raises(UsageError, match="'lazy'"):
        DirectCudaResource(mode="lazy")  # type: ignore[arg-type]


def test_B11_device_and_driver(driver: Any, direct: DirectCudaResource) -> None:
    assert direct.device == 0
    assert direct.driver is driver


def test_B12_zero_bytes(direct: DirectCudaResource) -> None:
    with testing.faults.counts() as counted, pytest.raises(DriverError, match="0 bytes"):
        direct.allocate(0)
    assert counted["malloc"] + counted["malloc_async"] == 0
    assert direct.bytes_outstanding == 0


def test_B12_what_an_allocation_gives(direct: DirectCudaResource) -> None:
    stream = new_stream()
    first = direct.allocate(1, stream)
    second = direct.allocate(12345, stream, tag="second")
    assert (first.nbytes, second.nbytes) == (1, 12345)
    assert first.state is second.state is BlockState.LIVE
    assert second.generation > first.generation
    assert direct.bytes_outstanding == 12346
    for block in (first, second):
        direct.deallocate(block)


def test_B12_negative(direct: DirectCudaResource) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        direct.allocate(-1)
    with pytest.raises(LayoutError):
        direct.allocate(-(2**63))


def test_B12_a_live_address_is_never_replaced(sim: Any) -> None:
    resource = DirectCudaResource(mode="sync")
    block = resource.allocate(64)
    again = block.ptr
    sim.malloc = lambda nbytes, device: again
    try:
        with pytest.raises(DriverError, match="gave it out again"):
            resource.allocate(64)
    finally:
        del sim.malloc
    assert resource.live_blocks() == [block]
    assert resource.bytes_outstanding == 64
    resource.deallocate(block)


def test_B12_a_refused_allocation_changes_nothing(direct: DirectCudaResource) -> None:
    method = "malloc" if direct.mode == "sync" else "malloc_async"
    with testing.faults.fail(method, code=999), pytest.raises(DriverError):
        direct.allocate(64)
    with testing.faults.fail(method, persistent=True), pytest.raises(OutOfMemory) as caught:
        direct.allocate(64)
    assert (caught.value.requested, caught.value.in_use) == (64, 0)
    assert direct.bytes_outstanding == 0
    assert direct.live_blocks() == []


def test_B12_streams_it_cannot_take(driver: Any, direct: DirectCudaResource) -> None:
    with pytest.raises(StreamMisuse):
        direct.allocate(64, "a stream")
    with pytest.raises(StreamMisuse):
        direct.allocate(64, -5)
    with pytest.raises(StreamMisuse, match="99"):
        direct.allocate(64, 99)  # no address
    if driver.name == "sim" and direct.mode != "sync":
        with pytest.raises(StreamMisuse, match="does not know"):
            direct.allocate(64, 0x12345000)


@pytest.mark.parametrize("bad", [3, None, b"x"])
def test_B12_tags_are_strings(direct: DirectCudaResource, bad: Any) -> None:
    with pytest.raises(UsageError, match="tag"):
        direct.allocate(64, tag=bad)


def test_B13_wrong_ordinal(direct: DirectCudaResource) -> None:
    other = DirectCudaResource(0, 7, check=False)
    block = other.allocate(64)
    with pytest.raises(DriverError, match="device 7") as caught:
        direct.deallocate(block)
    assert caught.value.code == 101
    assert block.state is BlockState.LIVE
    other.deallocate(block)


def test_B13_unknown_block(direct: DirectCudaResource) -> None:
    other = DirectCudaResource()
    block = other.allocate(64)
    with pytest.raises(UseAfterFree) as caught:
        direct.deallocate(block)
    assert caught.value.generation == block.generation
    assert block.state is BlockState.LIVE
    other.deallocate(block)


def test_B13_twice(direct: DirectCudaResource) -> None:
    block = direct.allocate(64)
    direct.deallocate(block)
    for _ in range(2):
        with pytest.raises(UseAfterFree) as caught:
            direct.deallocate(block)
        assert caught.value.generation == block.generation
    assert direct.bytes_outstanding == 0


def test_B13_stale_generation_at_a_reused_address(driver: Any) -> None:
    """The new block at the address must survive the old one's second deallocate."""
    direct = DirectCudaResource()
    stream = new_stream()
    old = direct.allocate(4096, stream)
    direct.deallocate(old)
    new = direct.allocate(4096, stream)
    assert new.ptr == old.ptr, "the address must be reused for this test to mean anything"
    fill(new, 7, stream)
    with testing.faults.counts() as counted, pytest.raises(UseAfterFree) as caught:
        direct.deallocate(old)
    assert not counted
    assert caught.value.generation == old.generation != new.generation
    assert direct.bytes_outstanding == 4096
    assert (contents(new, stream) == 7).all()
    direct.deallocate(new)


def test_B13_a_forged_block(driver: Any, direct: DirectCudaResource) -> None:
    block = direct.allocate(64)
    forged = cuglue.DeviceBlock(block.ptr, 64, block.alloc_stream)
    with pytest.raises(UseAfterFree):
        direct.deallocate(forged)
    assert direct.live_blocks() == [block]
    direct.deallocate(block)


@pytest.mark.parametrize("bad", [None, 5, "block", object()])
def test_B13_what_is_no_block(direct: DirectCudaResource, bad: Any) -> None:
    with pytest.raises(UsageError, match="block"):
        direct.deallocate(bad)


def test_B13_two_threads_free_one_block_once(driver: Any) -> None:
    direct = DirectCudaResource(mode="sync")
    for _ in range(50):
        block = direct.allocate(64)
        outcomes: list[str] = []
        barrier = threading.Barrier(2)

        def work(block: Any = block, outcomes: Any = outcomes, barrier: Any = barrier) -> None:
            barrier.wait(30)
            try:
                direct.deallocate(block)
                outcomes.append("freed")
            except UseAfterFree:
                outcomes.append("refused")

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(outcomes) == ["freed", "refused"]


def test_B14_B15_ordinal_and_bytes(direct: DirectCudaResource) -> None:
    assert direct.device_ordinal == 0
    blocks = [direct.allocate(100) for _ in range(5)]
    assert direct.bytes_outstanding == 500
    direct.deallocate(blocks.pop())
    assert direct.bytes_outstanding == 400
    for block in blocks:
        direct.deallocate(block)


def test_B16_reap_is_free(direct: DirectCudaResource) -> None:
    direct.deallocate(direct.allocate(64))
    with testing.faults.counts() as counted:
        direct.reap_pending()
        direct.reap_pending(block=False)
    assert not counted


def test_B17_tracking_is_refused_not_pretended(direct: DirectCudaResource) -> None:
    stream = new_stream()
    block = direct.allocate(64)
    with testing.faults.counts() as counted:
        for call in (
            lambda: direct.record_block_use(block, stream),
            lambda: direct.prepare_block_use(block.id, stream, Access.READ),
            lambda: direct.finish_block_use(block.id, stream, Access.WRITE),
            lambda: direct.cancel_block_use(block.id, stream, Access.WRITE),
        ):
            with pytest.raises(StreamMisuse, match="unsupported"):
                call()
    assert not counted
    assert block.state is BlockState.LIVE
    assert direct.bytes_outstanding == 64
    direct.deallocate(block)


def test_B18_it_says_that_it_does_not_track(direct: DirectCudaResource) -> None:
    assert not direct.supports_block_use_tracking()
    assert direct.budget_snapshot() is None


def test_uses_made_by_the_library_are_waited_for(driver: Any) -> None:
    """A block that a command used on another stream is freed after that use, tracking or not."""
    direct = DirectCudaResource(mode="async")
    home, other = (cuglue.as_stream(new_stream()) for _ in range(2))
    block = direct.allocate(64, home)
    block.prepare(other, Access.WRITE)
    fill(block, 1, other)
    block.finish(other, Access.WRITE)
    with testing.trace(only={"stream_wait_event", "free_async"}) as calls:
        direct.deallocate(block)
    assert [call.method for call in calls] == ["stream_wait_event", "free_async"]
    assert calls[0].args[0] == home.handle


def test_ordinals_may_be_of_numpy(driver: Any) -> None:
    resource = DirectCudaResource(np.int64(0), np.uint8(0))  # type: ignore[arg-type] # that is the question
    assert (type(resource.device), type(resource.device_ordinal)) == (int, int)
    assert "device=0" in repr(resource)


def test_a_driver_can_be_named() -> None:
    with cuglue.DirectCudaResource(driver="sim") as resource:
        block = resource.allocate(10)
        assert resource.driver.name == "sim"
        assert block.stream.driver is resource.driver
        resource.deallocate(block)
    for wrong in ("simulated", 3, object()):
        with pytest.raises(UsageError, match="choice of a driver"):
            cuglue.DirectCudaResource(driver=wrong)


def test_released_streams_are_destroyed_without_any_other_call(sim: SimDriver) -> None:
    pool = StreamPool(max_streams=4)
    for _ in range(20):
        pool.release(pool.acquire())
    assert sim.inventory()["streams"] == 0
    number = pool.acquire()
    kept = pool.resolve(number)
    pool.release(number)
    assert sim.inventory()["streams"] == 1, "somebody has it still"
    del kept
    pool.release(pool.acquire())
    assert sim.inventory()["streams"] == 0


@pytest.mark.parametrize("points", [interrupted, interrupted_after])
def test_an_interrupted_acquire_uses_up_no_place(sim: SimDriver, points: Any) -> None:
    for step in itertools.count(1):
        pool = StreamPool(max_streams=4)
        got: list[int] = []

        def acquire(pool: StreamPool = pool, got: list[int] = got) -> None:
            got += (pool.acquire(),)

        where = points(acquire, step, "memory/stream_pool.py")
        assert len(pool) == len(got), where
        if where is None:
            break
    assert step > 3
