"""The public operations of several driver calls, as the fault sweep takes them.

One :class:`Case` each: what is there before, the operation, what it must have done, and how everything is given back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from sample_kernels import INCREMENT, SAXPY

import cuglue
from cuglue import Access, In, InOut, Out
from cuglue.core.block import Block
from cuglue.core.stream import as_stream
from cuglue.driver.protocol import MemoryType
from cuglue.driver.sim import SimDriver
from cuglue.exchange.copies import copy_on_device
from cuglue.exchange.owner import BlockOwner
from cuglue.exchange.view import ArrayView
from cuglue.layout import Layout
from cuglue.testing import SweepReport, sweep

Subject = Any
N = 256  # bytes of most blocks


def nothing(subject: Subject, result: Any = None) -> None:
    """Neither checks nor gives back."""


@dataclass(frozen=True)
class Case:
    """One operation. ``of`` names public functions that it goes through, beside the one that gives it its name."""

    name: str
    setup: Callable[[Any], Subject]
    operation: Callable[[Subject], Any]
    teardown: Callable[[Subject, Any], None] = nothing
    check: Callable[[Subject, Any], None] = nothing
    accounting: Callable[[Subject], object] = nothing
    options: dict[str, Any] = field(default_factory=dict)
    of: tuple[str, ...] = ()

    def sweep(self) -> SweepReport:
        return sweep(
            self.operation,
            name=self.name,
            setup=self.setup,
            check=self.check,
            teardown=self.teardown,
            accounting=self.accounting,
            **self.options,
        )


# --- streams ----------------------------------------------------------------------------------------------------


def streams(driver: Any) -> Subject:
    """Two streams that write and read two allocations."""
    one, two = as_stream(driver.Stream()), as_stream(driver.Stream())
    a, b = driver.malloc(N, 0), driver.malloc(N, 0)
    driver.fill_async(a, 7, N, one.handle)
    one.submit()
    driver.fill_async(b, 1, N, two.handle)
    two.submit()
    return SimpleNamespace(driver=driver, one=one, two=two, a=a, b=b, event=None)


def read_on_two(subject: Subject, result: Any = None) -> None:
    """Correct only if the second stream comes after the first; the oracle says so."""
    subject.driver.fill_async(subject.a, 9, N, subject.two.handle)
    subject.two.submit()
    subject.two.synchronize()
    assert bytes(subject.driver.host_view(subject.a, N, False)) == bytes([9]) * N


def free_both(subject: Subject, result: Any = None) -> None:
    subject.driver.device_synchronize(0)
    subject.event = None
    for ptr in subject.a, subject.b:
        subject.driver.free(ptr, 0)


def record_and_wait(subject: Subject) -> None:
    subject.two.wait(subject.one.record())


def done(subject: Subject) -> None:
    while not subject.one.done(1):
        pass


def no_context_events() -> SimDriver:
    return SimDriver(disable=["context_events"])


def stream_cases() -> Iterator[Case]:
    for name, operation, options in [
        ("stream.wait_for", lambda s: s.two.wait_for(s.one, 1), {}),
        ("stream.join", lambda s: s.two.join(s.one), {}),
        ("stream.record, wait", record_and_wait, {}),
        ("stream.join_context", lambda s: s.two.join_context(), {}),
        (
            "stream.join_context, no context events",
            lambda s: s.two.join_context(),
            {"driver": no_context_events},
        ),
        ("stream.hold_context", lambda s: s.one.hold_context(), {}),
        (
            "stream.hold_context, no context events",
            lambda s: s.one.hold_context(),
            {"driver": no_context_events},
        ),
        ("stream.synchronize", lambda s: s.one.synchronize(), {}),
    ]:
        yield Case(name, streams, operation, free_both, read_on_two, options=options)
    yield Case("stream.done", streams, done, free_both)


# --- memory -----------------------------------------------------------------------------------------------------


def make_resource(driver: Any, kind: str) -> Any:
    if kind == "async":
        return cuglue.AsyncCudaResource()
    return cuglue.DirectCudaResource(mode="async" if kind == "direct" else "sync")


RESOURCES = ("direct", "sync", "async")


def resource(kind: str, **more: Any) -> Callable[[Any], Subject]:
    """A resource, a stream, and a second one."""

    def setup(driver: Any) -> Subject:
        return SimpleNamespace(
            driver=driver, one=driver.Stream(), two=driver.Stream(), mr=make_resource(driver, kind), block=None,
            streams=[], **more,
        )  # fmt: skip

    return setup


def with_block(kind: str, used: bool = False) -> Callable[[Any], Subject]:
    """A block too; ``used`` on other streams than its own, with nothing waiting for that yet."""

    def setup(driver: Any) -> Subject:
        subject = resource(kind)(driver)
        subject.block = block = subject.mr.allocate(N, subject.one)
        fill(subject, block, subject.one)
        if used:
            for own in (subject.two, driver.Stream()):
                stream = as_stream(own)
                subject.streams.append(own)  # as its user does, until it is no longer needed
                block.prepare(stream, Access.READ)
                other = driver.malloc_async(N, stream.handle, 0)
                driver.copy_async(other, block.ptr, N, cuglue.driver.protocol.CopyKind.D2D, stream.handle)
                driver.free_async(other, stream.handle, 0)
                block.finish(stream, Access.READ)
        return subject

    return setup


def fill(subject: Subject, block: Any, stream: Any) -> None:
    subject.driver.fill_async(block.ptr, 3, N, stream.ptr)
    record = as_stream(stream)
    block.finish(record, Access.WRITE)


def account(subject: Subject) -> object:
    block = subject.block
    return (
        subject.mr.bytes_outstanding,
        [b.generation for b in subject.mr.live_blocks()],
        sum(subject.mr.pending_per_stream().values()),
        block and (block.state, block.use_count()),
    )


def close_resource(subject: Subject, result: Any = None) -> None:
    subject.driver.device_synchronize(0)
    if result is not None:
        subject.mr.deallocate(result)
    elif subject.block is not None and subject.block.state is cuglue.BlockState.LIVE:
        subject.mr.deallocate(subject.block)
    subject.mr.reap_pending()
    assert subject.mr.bytes_outstanding == 0
    subject.mr.close()


def is_live(subject: Subject, result: Any) -> None:
    assert result.state is cuglue.BlockState.LIVE
    fill(subject, result, subject.one)
    assert subject.mr.bytes_outstanding == N


def is_gone(subject: Subject, result: Any) -> None:
    assert subject.block.state is not cuglue.BlockState.LIVE
    subject.mr.reap_pending()
    assert subject.mr.bytes_outstanding == 0


def use(subject: Subject) -> None:
    mr, block, stream = subject.mr, subject.block, subject.two
    mr.prepare_block_use(block.id, stream, Access.READ_WRITE)
    try:
        subject.driver.fill_async(block.ptr, 5, N, stream.ptr)
    except cuglue.errors.CuglueError:
        mr.cancel_block_use(block.id, stream, Access.READ_WRITE)
        raise
    mr.finish_block_use(block.id, stream, Access.READ_WRITE)


def close_with_block(subject: Subject) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # that a block was live is the point
        subject.mr.close()


def short_of_memory(driver: Any) -> Subject:
    """Half of the memory is given back and not yet free, so that the next allocation has to see to it."""
    subject = resource("async")(driver)
    for stream in subject.one, subject.two:
        subject.mr.deallocate(subject.mr.allocate(300 << 10, stream))
    return subject


def memory_cases() -> Iterator[Case]:
    for kind in RESOURCES:
        yield Case(
            f"{kind}: allocate",
            resource(kind),
            lambda s: s.mr.allocate(N, s.one),
            close_resource,
            is_live,
            account,
        )
        for used in (False, True):
            yield Case(
                f"{kind}: deallocate" + (", used on two more streams" if used else ""),
                with_block(kind, used),
                lambda s: s.mr.deallocate(s.block),
                close_resource,
                is_gone,
                account,
            )
        yield Case(
            f"{kind}: close with a live block",
            with_block(kind, used=True),
            close_with_block,
            options={"atomic": False},
        )
    yield Case("async: prepare, work, finish", with_block("async"), use, close_resource, accounting=account)
    yield Case(
        "async: reap_pending",
        given_back,
        lambda s: s.mr.reap_pending(),
        close_resource,
        is_gone,
        options={"atomic": False},  # what one stream gave back stays so when another fails
    )
    yield Case(
        "async: allocate, short of memory",
        short_of_memory,
        lambda s: s.mr.allocate(600 << 10, s.one),
        close_resource,
        options={"driver": lambda: SimDriver(memory_bytes=1 << 20), "atomic": False},
    )


STACKS: dict[str, Callable[[], Any]] = {
    "pinned": lambda: cuglue.PinnedHostResource(),
    "managed": lambda: cuglue.ManagedResource(),
    "budget": lambda: cuglue.GlobalDeviceBudget(cuglue.AsyncCudaResource(), 1 << 20),
    "logging": lambda: cuglue.LoggingResource(cuglue.AsyncCudaResource(), cuglue.InMemorySink()),
    "statistics": lambda: cuglue.StatisticsResource(cuglue.AsyncCudaResource()),
    "tracking": lambda: cuglue.TrackingResource(cuglue.AsyncCudaResource()),
    "guard": lambda: cuglue.DebugGuardResource(cuglue.AsyncCudaResource()),
    "failure callback": lambda: cuglue.FailureCallbackResource(
        cuglue.AsyncCudaResource(), lambda failure: False
    ),
    "pool": lambda: cuglue.PoolResource(cuglue.AsyncCudaResource()),
    "budget over logging": lambda: cuglue.GlobalDeviceBudget(
        cuglue.LoggingResource(cuglue.AsyncCudaResource(), cuglue.NullSink()), 1 << 20
    ),
}


def stack(name: str, live: bool) -> Callable[[Any], Subject]:
    """A stack of resources, and if ``live`` a block of it that a second stream used."""

    def setup(driver: Any) -> Subject:
        mr = STACKS[name]()
        one, two = driver.Stream(), driver.Stream()
        subject = SimpleNamespace(driver=driver, one=one, two=two, mr=mr, block=None)
        if live:
            block = subject.block = mr.allocate(N, one)
            record = as_stream(two)
            block.prepare(record, Access.WRITE)
            driver.fill_async(block.ptr, 3, N, two.ptr)
            block.finish(record, Access.WRITE)
        return subject

    return setup


def stack_account(subject: Subject) -> object:
    mr, block = subject.mr, subject.block
    mr.reap_pending()  # what was given back on the way is pending until then
    return mr.bytes_outstanding, mr.budget_snapshot(), block and block.state


def close_stack(subject: Subject, result: Any = None) -> None:
    subject.driver.device_synchronize(0)
    mr = subject.mr
    if result is not None:
        mr.deallocate(result)
    mr.reap_pending()
    while mr is not None:
        mr.close()
        mr = getattr(mr, "upstream", None)


def usable(subject: Subject, result: Any) -> None:
    assert result.state is cuglue.BlockState.LIVE
    fill(subject, result, subject.one)


def stack_cases() -> Iterator[Case]:
    for name in STACKS:
        yield Case(
            f"{name}: allocate",
            stack(name, live=False),
            lambda s: s.mr.allocate(N, s.one),
            close_stack,
            usable,
            stack_account,
            options={"atomic": name != "pool"},  # a page that was taken stays for the next attempt
        )
        yield Case(
            f"{name}: deallocate",
            stack(name, live=True),
            lambda s: s.mr.deallocate(s.block),
            close_stack,
            accounting=stack_account,
            options={"atomic": name != "guard"},  # what left the quarantine to make room is gone
        )


def given_back(driver: Any) -> Subject:
    """Three blocks given back on three streams."""
    subject = with_block("async")(driver)
    subject.streams += [subject.two, driver.Stream()]
    for stream in subject.streams:
        subject.mr.deallocate(subject.mr.allocate(N, stream))
    subject.mr.deallocate(subject.block)
    return subject


# --- exports ----------------------------------------------------------------------------------------------------


def exported(type: MemoryType) -> Callable[[Any], Subject]:
    """A view of a block that another stream wrote."""

    def setup(driver: Any) -> Subject:
        streams = [driver.Stream() for _ in range(3)]
        home, writer, consumer = map(as_stream, streams)
        ptr = driver.malloc(N, 0)
        block = Block(ptr, N, home)
        driver.fill_async(ptr, 4, N, writer.handle)
        block.finish(writer, Access.WRITE)
        owner = BlockOwner(block, memory_type=type)
        view = ArrayView(owner, ptr, Layout.of((N,), "u1"))
        return SimpleNamespace(
            driver=driver, block=block, owner=owner, view=view, consumer=consumer, streams=streams
        )

    return setup


def exports(subject: Subject) -> object:
    return len(subject.owner.ledger.live()), subject.block.state


def free_exported(subject: Subject, result: Any) -> None:
    subject.driver.device_synchronize(0)
    del result
    subject.driver.free(subject.block.ptr, 0)


def holds_fours(subject: Subject, result: Any) -> None:
    assert (np.asarray(result) == 4).all()
    assert len(result) == N


def export_cases() -> Iterator[Case]:
    host, device = exported(MemoryType.HOST), exported(MemoryType.DEVICE)
    yield Case(
        "export: numpy.asarray", host, lambda s: np.asarray(s.view), free_exported, holds_fours, exports
    )
    yield Case(
        "export: numpy.from_dlpack",
        host,
        lambda s: np.from_dlpack(s.view),
        free_exported,
        holds_fours,
        exports,
    )
    yield Case(
        "export: numpy() of device memory",
        device,
        lambda s: s.view.numpy(),
        free_exported,
        holds_fours,
        exports,
    )
    yield Case(
        "export: copy on the device",
        device,
        lambda s: copy_on_device(s.owner, s.block.ptr, N, s.consumer),
        free_exported,
        accounting=exports,
        options={"atomic": False},  # a copy that failed goes back in stream order
    )


# --- commands ---------------------------------------------------------------------------------------------------

DATA = np.arange(64, dtype="i4")


def runtime(**given: Callable[[Any], Any]) -> Callable[[Any], Subject]:
    """A runtime and, by name, what is made with it."""

    def setup(driver: Any) -> Subject:
        rt = cuglue.Runtime()
        subject = SimpleNamespace(driver=driver, rt=rt, one=driver.Stream(), two=driver.Stream())
        for name, make in given.items():
            setattr(subject, name, make(subject))
        return subject

    return setup


def integers(subject: Subject) -> Any:
    return subject.rt.create(DATA, stream=subject.one)


def close_runtime(subject: Subject, result: Any) -> None:
    del result
    for name in ("x", "y", "z"):
        if hasattr(subject, name):
            getattr(subject, name).close()
    subject.rt.close()


def read(subject: Subject, buffer: Any, dtype: str = "i4") -> Any:
    return np.asarray(subject.rt.read(buffer, dtype=dtype).result())


def outstanding(subject: Subject) -> object:
    return subject.rt.resource.bytes_outstanding


def equals(expected: Any, name: str = "") -> Callable[[Subject, Any], None]:
    def check(subject: Subject, result: Any) -> None:
        np.testing.assert_array_equal(read(subject, getattr(subject, name) if name else result), expected)

    return check


def result_equals(expected: Any) -> Callable[[Subject, Any], None]:
    def check(subject: Subject, result: Any) -> None:
        np.testing.assert_array_equal(np.asarray(result), expected)

    return check


def launch_across(subject: Subject) -> None:
    """Reads on a second stream what was written on a first one."""
    subject.rt.launch(SAXPY, 1, 64, In(subject.x), Out(subject.y), 2.0, 64, stream=subject.two)


def floats(subject: Subject) -> Any:
    return subject.rt.create(DATA.astype("f4"), stream=subject.one)


def results(subject: Subject) -> Any:
    return subject.rt.empty(256, stream=subject.one)


def command(subject: Subject) -> Any:
    """Everything that a command can do, in one."""
    with subject.rt.command(InOut(subject.x), stream=subject.two) as cmd:
        scratch = cmd.create_with_data(DATA)
        cmd.kernel(INCREMENT, 1, 64, InOut(scratch), 64, 5)
        cmd.write_to_gpu(subject.x.descriptor((64,), "i4"), DATA + 1)
        futures = cmd.read_async([scratch.descriptor((64,), "i4"), subject.x.descriptor((64,), "i4")])
        cmd.sync().result()
        scratch.close()
    return [np.array(part) for part in futures.result()]


def check_command(subject: Subject, result: Any) -> None:
    np.testing.assert_array_equal(result, [DATA + 5, DATA + 1])


def write_to_cpu(subject: Subject) -> Any:
    out = np.zeros(64, "i4")
    with subject.rt.command(In(subject.x), stream=subject.two) as cmd:
        cmd.write_to_cpu(subject.x.descriptor((64,), "i4"), out)
        cmd.synchronize()
    return out


def captured(subject: Subject) -> Any:
    with subject.rt.capture(subject.two) as capture:
        subject.rt.launch(INCREMENT, 1, 64, InOut(subject.x), 64, 5, stream=subject.two)
    return capture.graph


def write_again(subject: Subject) -> None:
    """What failed work would have written counts as never written until somebody writes it."""
    with subject.rt.command(Out(subject.x), stream=subject.two) as cmd:
        cmd.write_to_gpu(subject.x.descriptor((64,), "i4"), DATA)


def close_graph(subject: Subject, result: Any) -> None:
    subject.graph.close()
    close_runtime(subject, None)


def close_captured(subject: Subject, result: Any) -> None:
    result.close()
    close_runtime(subject, None)


def warm(subject: Subject) -> Any:
    subject.rt.launch(INCREMENT, 1, 64, InOut(subject.x), 64, 0, stream=subject.two)
    subject.rt.synchronize()
    return subject.x


KEEPS = ("kernels",)  # compiled once for the driver's life, unless the runtime is closed


def command_cases() -> Iterator[Case]:
    plain = {"keeps": KEEPS}
    unkept = {
        "keeps": KEEPS,
        "atomic": False,
    }  # a kernel that was compiled, a pinned buffer, stays for the next time
    yield Case(
        "Runtime.create",
        runtime(),
        lambda s: s.rt.create(DATA, stream=s.one),
        close_runtime,
        equals(DATA),
        outstanding,
        unkept,
    )
    yield Case(
        "Runtime.empty",
        runtime(),
        lambda s: s.rt.empty(64, stream=s.one),
        close_runtime,
        nothing,
        outstanding,
        plain,
    )
    yield Case(
        "Runtime.launch across streams", runtime(x=floats, y=results), launch_across, close_runtime,
        lambda s, r: np.testing.assert_array_equal(read(s, s.y, "f4"), 2 * DATA.astype("f4")), outstanding, unkept,
    )  # fmt: skip
    yield Case(
        "Runtime.read",
        runtime(x=integers),
        lambda s: np.array(s.rt.read(s.x, dtype="i4", stream=s.two).result()),
        close_runtime,
        result_equals(DATA),
        outstanding,
        unkept,
    )
    yield Case(
        "command with several operations",
        runtime(x=integers),
        command,
        close_runtime,
        check_command,
        nothing,
        unkept,
    )
    yield Case(
        "Command.write_to_cpu",
        runtime(x=integers),
        write_to_cpu,
        close_runtime,
        result_equals(DATA),
        outstanding,
        unkept,
    )
    again = {**unkept, "recover": write_again}
    yield Case("capture", runtime(x=integers, warm=warm), captured, close_captured, options=again)
    yield Case(
        "Graph.replay on another stream",
        runtime(x=integers, warm=warm, graph=captured),
        lambda s: s.graph.replay(s.one),
        close_graph,
        equals(DATA + 5, "x"),
        options=again,
    )
    yield Case(
        "Graph.close",
        runtime(x=integers, warm=warm, graph=captured, ran=lambda s: s.graph.replay(s.one)),
        lambda s: s.graph.close(),
        close_runtime,
        options=unkept,
    )
    yield Case(
        "Buffer.close after use on another stream",
        runtime(x=integers, seen=lambda s: s.rt.read(s.x, stream=s.two)),
        lambda s: s.x.close(),
        close_runtime,
        options={"keeps": KEEPS, "atomic": False},
    )
    yield Case(
        "Runtime.close",
        runtime(
            x=integers,
            seen=lambda s: s.rt.read(s.x, stream=s.two).result() is None,
            gone=lambda s: s.x.close(),
        ),
        lambda s: s.rt.close(),
        options={"keeps": KEEPS, "atomic": False},
    )


SECTIONS = {
    "streams": [*stream_cases()],
    "memory from the driver": [*memory_cases()],
    "layers over it: allocate, deallocate": [*stack_cases()],
    "exports": [*export_cases()],
    "commands, launches, captures": [*command_cases()],
}
CASES = [case for cases in SECTIONS.values() for case in cases]
