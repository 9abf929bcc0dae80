"""The fault sweep's operations on pools, the memory of streams, decorators of resources, and the rest of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from prove_operations import (
    DATA,
    INCREMENT,
    KEEPS,
    Case,
    Subject,
    close_captured,
    close_runtime,
    integers,
    outstanding,
    runtime,
    warm,
    write_again,
)

import cuglue
from cuglue import Access, Direct, Exclusive, In, InOut, Out, PoolResource, Sliced
from cuglue.core.device import device_state
from cuglue.core.stream import as_stream

MIB = 1 << 20
KEPT = {"keeps": ("events", "streams"), "atomic": False}  # what was trimmed or reclaimed on the way is gone
Make = Callable[[Any], Subject]


# --- pools ------------------------------------------------------------------------------------------------------


def pool(
    layout: Any = None,
    freed: tuple[tuple[int, int], ...] = (),
    limit: int | None = None,
    upstream: Any = None,
) -> Make:
    """A pool with three streams, and memory of (bytes, stream) that was used and given back."""

    def setup(driver: Any) -> Subject:
        made = PoolResource((upstream or cuglue.AsyncCudaResource)(), layout=layout, max_bytes=limit)
        streams = [as_stream(driver.Stream()) for _ in range(3)]
        for nbytes, i in freed:
            block = made.allocate(nbytes, streams[i])
            driver.fill_async(block.ptr, 1, nbytes, streams[i].handle)
            streams[i].submit()
            made.deallocate(block)
        return SimpleNamespace(driver=driver, mr=made, streams=streams, block=None)

    return setup


def with_block(setup: Make, nbytes: int = MIB) -> Make:
    def more(driver: Any) -> Subject:
        subject = setup(driver)
        subject.block = subject.mr.allocate(nbytes, subject.streams[0])
        return subject

    return more


def end_pool(subject: Subject, result: Any = None) -> None:
    for block in (subject.block, result):
        if getattr(block, "state", None) is cuglue.BlockState.LIVE:
            subject.mr.deallocate(block)
    subject.driver.device_synchronize(0)
    device_state(subject.driver, 0).retire.drain(block=True)
    subject.mr.close()


def live(subject: Subject) -> object:
    return subject.mr.bytes_outstanding, sorted(block.ptr for block in subject.mr.live_blocks())


def used_elsewhere(subject: Subject) -> None:
    block, other = subject.block, subject.streams[1]
    if block.state is cuglue.BlockState.LIVE and block.use_count() < 2:
        block.prepare(other, Access.READ)
        block.finish(other, Access.READ)
    subject.mr.deallocate(block)


def pool_cases() -> Iterator[Case]:
    two = ((4 * MIB, 0), (8 * MIB, 1))
    for name, setup, operation, of in (
        ("grow", pool(), lambda s: s.mr.allocate(3 * MIB, s.streams[0]), "LayeredResource.allocate"),
        ("allocate at the limit", pool(freed=((4 * MIB, 1), (7 * MIB, 2)), limit=16 * MIB),
         lambda s: s.mr.allocate(16 * MIB, s.streams[0]), "LayeredResource.allocate"),
        ("sliced: allocate", pool([Sliced(MIB)]),
         lambda s: s.mr.allocate(1000, s.streams[0]), "LayeredResource.allocate"),
        ("exclusive: allocate", pool([Exclusive(4 * MIB)]),
         lambda s: s.mr.allocate(1000, s.streams[0]), "LayeredResource.allocate"),
        ("direct: allocate, reclaiming", pool([Direct(4 * MIB)], ((2 * MIB, 0),)),
         lambda s: s.mr.allocate(3 * MIB, s.streams[0]), "LayeredResource.allocate"),
        ("deallocate after a use elsewhere", with_block(pool()), used_elsewhere, "LayeredResource.deallocate"),
        ("trim", pool(freed=two), lambda s: s.mr.trim(), "PoolResource.trim"),
        ("reap_pending", pool(freed=two), lambda s: s.mr.reap_pending(), "PoolResource.reap_pending"),
        ("install", pool([Sliced(MIB)], ((1000, 0),)),
         lambda s: s.mr.install([Direct()], s.streams[0]), "PoolResource.install"),
        ("cleanup of a stream", pool([Sliced(MIB), Direct()], ((1000, 0), (5 * MIB, 0))),
         lambda s: s.mr.stream_memory(s.streams[0]).cleanup(), "StreamMemory.cleanup"),
        ("reserve and release", pool([Sliced(MIB)]), reserve_and_release, "StreamMemory.reserve"),
        ("expandable: allocate", pool(upstream=cuglue.ExpandableCudaResource),
         lambda s: s.mr.allocate(3 * MIB, s.streams[0]), "LayeredResource.allocate"),
        ("expandable: extend", with_block(pool(upstream=cuglue.ExpandableCudaResource), 50 * MIB),
         lambda s: s.mr.allocate(40 * MIB, s.streams[0]), "ExpandableCudaResource.extend"),
        ("expandable: trim", pool(freed=((20 * MIB, 0),), upstream=cuglue.ExpandableCudaResource),
         lambda s: s.mr.trim(), "PoolResource.trim"),
        ("expandable: trim a part", half_used, lambda s: s.mr.trim(), "ExpandableCudaResource.shrink"),
        ("close", pool(freed=two), lambda s: s.mr.close(), "Owned.close"),
        ("memory of a graph", pool(), graph_memory, "GraphMemory.leave"),
    ):  # fmt: skip
        yield Case(f"pool: {name}", setup, operation, end_pool, accounting=live, options=KEPT, of=(of,))


def half_used(driver: Any) -> Subject:
    """A page with a live block at its beginning, which grew behind that."""
    subject = with_block(pool(upstream=cuglue.ExpandableCudaResource), 3 * MIB)(driver)
    subject.mr.deallocate(subject.mr.allocate(100 * MIB, subject.streams[0]))
    return subject


def graph_memory(subject: Subject) -> None:
    """A block of a graph's own memory, which is given back when the graph is gone."""
    memory: Any = None
    try:
        with subject.mr.graph_memory() as memory:
            subject.mr.deallocate(subject.mr.allocate(MIB, subject.streams[0]))
    finally:
        if memory is not None:
            memory.close()


def reserve_and_release(subject: Subject) -> None:
    reservation = subject.mr.stream_memory(subject.streams[0]).reserve(1000)
    try:
        reservation.resolve()
    finally:
        reservation.release()


# --- other parts of memory --------------------------------------------------------------------------------------


def layered(make: Callable[[], Any], quarantined: int = 0) -> Make:
    def setup(driver: Any) -> Subject:
        streams = [as_stream(driver.Stream()) for _ in range(3)]
        subject = SimpleNamespace(driver=driver, mr=make(), streams=streams, block=None)
        for _ in range(quarantined):
            subject.mr.deallocate(subject.mr.allocate(100, streams[0]))
        return subject

    return setup


def end_layers(subject: Subject, result: Any = None) -> None:
    if subject.block is not None and subject.block.state is cuglue.BlockState.LIVE:
        subject.mr.deallocate(subject.block)
    if getattr(result, "state", None) is cuglue.BlockState.LIVE:
        subject.mr.deallocate(result)
    device_state(subject.driver, 0).retire.drain(block=True)
    mr = subject.mr
    mr.reap_pending()
    while mr is not None:
        mr.close()
        mr = getattr(mr, "upstream", None)


def guard() -> Any:
    return cuglue.DebugGuardResource(cuglue.AsyncCudaResource())


def layers() -> Any:
    budget = cuglue.GlobalDeviceBudget(cuglue.AsyncCudaResource(), 1 << 20)
    return cuglue.LoggingResource(cuglue.StatisticsResource(budget), cuglue.NullSink())


def use_through_layers(subject: Subject) -> None:
    mr, block, stream = subject.mr, subject.block, subject.streams[1]
    mr.prepare_block_use(block.id, stream, Access.READ)
    mr.finish_block_use(block.id, stream, Access.READ)


def recorded(subject: Subject) -> None:
    block, stream = subject.block, subject.streams[1]
    with cuglue.LaunchRecorder(stream).write(block):
        subject.driver.fill_async(block.ptr, 1, 100, stream.handle)
        stream.submit()


def from_a_reservation(subject: Subject) -> Any:
    with subject.mr.reserve(4096) as reservation:
        return reservation.allocate(1000, subject.streams[0])


def pool_of_streams(driver: Any) -> Subject:
    return SimpleNamespace(driver=driver, streams=cuglue.StreamPool(), number=None)


def acquire(subject: Subject) -> Any:
    return subject.streams.acquire()


def acquired(subject: Subject) -> Subject:
    subject.number = subject.streams.acquire()
    return subject


def viewed(subject: Subject) -> Any:
    return np.array(subject.mr.view(subject.block))


def layer_cases() -> Iterator[Case]:
    loose = {"atomic": False}
    for name, setup, operation, of, options in (
        ("guard: check", with_block(layered(guard), 100), lambda s: s.mr.check(), "DebugGuardResource.check", loose),
        ("guard: flush", layered(guard, 2), lambda s: s.mr.flush(), "DebugGuardResource.flush", loose),
        ("guard: close", layered(guard, 2), lambda s: s.mr.close(), "DebugGuardResource.close", loose),
        ("recorder", with_block(layered(cuglue.AsyncCudaResource), 100), recorded, "LaunchRecorder.commit", loose),
        ("recorder over a guard", with_block(layered(guard), 100), recorded, "LaunchRecorder.preflight", loose),
        ("guard: reap_pending", layered(guard, 2), lambda s: s.mr.reap_pending(),
         "DebugGuardResource.reap_pending", loose),
        ("guard: record_block_use", with_block(layered(guard), 100),
         lambda s: s.mr.record_block_use(s.block, s.streams[1]), "DebugGuardResource.record_block_use", loose),
        ("layers: prepare and finish", with_block(layered(layers), 100), use_through_layers,
         "Adaptor.prepare_block_use", loose),
        ("layers: record_block_use", with_block(layered(layers), 100),
         lambda s: s.mr.record_block_use(s.block, s.streams[1]), "Adaptor.record_block_use", loose),
        ("layers: reap_pending", layered(layers, 2), lambda s: s.mr.reap_pending(),
         "LoggingResource.reap_pending", loose),
        ("layers: close", layered(layers, 2), lambda s: s.mr.close(), "Adaptor.close", loose),
        ("pinned: reap_pending", layered(cuglue.PinnedHostResource, 2), lambda s: s.mr.reap_pending(),
         "PinnedHostResource.reap_pending", loose),
        ("use", with_block(layered(cuglue.AsyncCudaResource), 100),
         lambda s: cuglue.use(s.block, s.streams[1], Access.WRITE), "use", {}),
        ("record_block_use", with_block(layered(cuglue.AsyncCudaResource), 100),
         lambda s: s.mr.record_block_use(s.block, s.streams[1]), "TracksUses.record_block_use", {}),
        ("budget: reserve and allocate",
         layered(lambda: cuglue.GlobalDeviceBudget(cuglue.AsyncCudaResource(), 1 << 20)),
         from_a_reservation, "BudgetReservation.allocate", {}),
        ("pinned: view", with_block(layered(cuglue.PinnedHostResource), 100), viewed,
         "_Lends.view", {}),
        ("managed: view", with_block(layered(cuglue.ManagedResource), 100), viewed,
         "_Lends.view", {}),
    ):  # fmt: skip
        yield Case(name, setup, operation, end_layers, options=options, of=(of,))
    yield Case(
        "StreamPool.acquire",
        pool_of_streams,
        acquire,
        lambda s, number: s.streams.release(number),
        of=("StreamPool.acquire",),
    )
    yield Case(
        "StreamPool.release",
        lambda driver: acquired(pool_of_streams(driver)),
        lambda s: s.streams.release(s.number),
        of=("StreamPool.release",),
    )


# --- commands ---------------------------------------------------------------------------------------------------


def configured(driver: Any) -> Subject:
    rt = cuglue.Runtime(memory=cuglue.MemoryConfiguration([Sliced(MIB), Direct()]))
    subject = SimpleNamespace(driver=driver, rt=rt, one=driver.Stream(), two=driver.Stream())
    rt.create(DATA, stream=subject.one).close()
    return subject


def on(stream: str, operation: Callable[[Any], Any]) -> Callable[[Subject], Any]:
    """An operation of a command that uses nothing yet."""

    def run(subject: Subject) -> Any:
        with subject.rt.command(stream=getattr(subject, stream)) as cmd:
            return operation(cmd)

    return run


def close_result(subject: Subject, result: Any) -> None:
    if hasattr(result, "close"):
        result.close()
    close_runtime(subject, None)


def warmed_up(subject: Subject) -> Any:
    with subject.rt.capture(subject.two) as capture:
        with capture.warmup():
            subject.rt.launch(INCREMENT, 1, 64, InOut(subject.x), 64, 0, stream=subject.two)
        subject.rt.launch(INCREMENT, 1, 64, InOut(subject.x), 64, 5, stream=subject.two)
    return capture.graph


def profiled(subject: Subject) -> Any:
    with subject.rt.profile() as profile:
        subject.rt.launch(INCREMENT, 1, 64, InOut(subject.x), 64, 0, stream=subject.two)
    return profile


def begun_after(subject: Subject) -> float:
    return profiled(subject).begins_after(profiled(subject))


def synced(subject: Subject) -> None:
    with subject.rt.command(In(subject.x), stream=subject.two) as cmd:
        cmd.sync().result()


def in_persistent(cmd: Any) -> Any:
    with cmd.persistent():
        return cmd.reserve(1000)


def uploaded(subject: Subject) -> None:
    with subject.rt.command(Out(subject.x), stream=subject.two) as cmd:
        cmd.write_to_gpu(subject.x.descriptor((64,), "i4"), DATA)


def command_cases() -> Iterator[Case]:
    loose: dict[str, Any] = {"keeps": KEEPS, "atomic": False}
    for name, setup, operation, of in (
        ("Command.reserve", runtime(), on("one", lambda c: c.reserve(64)), "MemoryCalls.reserve"),
        ("Command.reserve_cpu", runtime(), on("one", lambda c: c.reserve_cpu(64)), "MemoryCalls.reserve_cpu"),
        ("Command.create_with_data", runtime(), on("one", lambda c: c.create_with_data(DATA)),
         "MemoryCalls.create_with_data"),
        ("Command.memory_cleanup", runtime(x=integers), on("one", lambda c: c.memory_cleanup()),
         "MemoryCalls.memory_cleanup"),
        ("Command.flush_drops", runtime(x=integers), on("one", lambda c: c.flush_drops()),
         "MemoryCalls.flush_drops"),
        ("Command.install_memory_pools", configured, on("one", lambda c: c.install_memory_pools([Direct()])),
         "MemoryCalls.install_memory_pools"),
        ("Command.persistent", configured, on("one", in_persistent), "MemoryCalls.persistent"),
        ("configured pools: create", configured, lambda s: s.rt.create(DATA, stream=s.two), "Runtime.create"),
        ("configured pools: cleanup", configured, on("one", lambda c: c.memory_cleanup()),
         "MemoryCalls.memory_cleanup"),
        ("Command.sync", runtime(x=integers), synced, "Command.sync"),
        ("Command.write_to_gpu", runtime(x=integers), uploaded, "Command.write_to_gpu"),
        ("Runtime.synchronize", runtime(x=integers), lambda s: s.rt.synchronize(), "Runtime.synchronize"),
        ("Runtime.stream", runtime(), lambda s: s.rt.stream(3), "Runtime.stream"),
        ("Profile.begins_after", runtime(x=integers, warm=warm), begun_after, "Profile.begins_after"),
        ("Profile", runtime(x=integers, warm=warm), profiled, "Profile.__exit__"),
    ):  # fmt: skip
        yield Case(name, setup, operation, close_result, accounting=outstanding, options=loose, of=(of,))
    yield Case(
        "Capture.warmup",
        runtime(x=integers, warm=warm),
        warmed_up,
        close_captured,
        options={**loose, "recover": write_again},
        of=("Capture.warmup",),
    )


SECTIONS = {
    "pools": [*pool_cases()],
    "guards, budgets, recorders, stream pools": [*layer_cases()],
    "memory of commands, profiles": [*command_cases()],
}
CASES = [case for cases in SECTIONS.values() for case in cases]
