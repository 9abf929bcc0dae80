"""What threads may share: a runtime, its buffers and its lanes. The other thread comes in at the worst moment.

Closing or cleaning up beside others gives them ClosedError or done work, never memory that queued work still uses.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cuglue import Direct, InOut, Kernel, Runtime, Sliced
from cuglue.command import buffers, launch, reads, writes
from cuglue.command.lane import Lane
from cuglue.command.operands import Operand
from cuglue.command.slab import Slab
from cuglue.command.staging import DropQueue
from cuglue.core.stream import Stream
from cuglue.driver.sim import SimDriver
from cuglue.errors import ClosedError
from cuglue.testing import Latch

N = 256


@pytest.fixture
def rt(sim: SimDriver) -> Iterator[Runtime]:
    """A runtime on the simulated device, which says what was not ordered."""
    with Runtime(driver=sim) as runtime:
        yield runtime


class Beside:
    """Runs something on another thread, once, and waits for it as long as it can go on beside this one."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._thread: threading.Thread | None = None
        self.failed: list[BaseException] = []

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001 - asked by the test
            self.failed.append(error)

    def __call__(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run)
            self._thread.start()
            self._thread.join(0.3)  # it may have to wait for a lock that this thread holds

    def end(self) -> None:
        """It has run by now."""
        assert self._thread is not None
        self._thread.join()
        assert self.failed == []


def after(function: Callable[..., Any], then: Callable[[], object]) -> Callable[..., Any]:
    """``function`` with ``then()`` behind it."""

    def both(*arguments: Any, **keywords: Any) -> Any:
        made = function(*arguments, **keywords)
        then()
        return made

    return both


def before(function: Callable[..., Any], first: Callable[[], object]) -> Callable[..., Any]:
    """``function`` with ``first()`` before it."""

    def both(*arguments: Any, **keywords: Any) -> Any:
        first()
        return function(*arguments, **keywords)

    return both


# --- what copies leave ----------------------------------------------------------------------------------------------


def test_a_fence_lets_nothing_go_that_another_thread_queued_after_it(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flush comes between the record of this one's fence and the note of it."""
    stream = rt.stream(0)
    drops, held = DropQueue(stream), []

    def queue_more() -> None:
        if not held:
            held.append(Latch(stream))
            drops.push("later", 1)

    def other() -> None:
        drops.flush()
        queue_more()  # unless it came while the flush waited
        drops.flush()

    beside, record = Beside(other), Stream.record
    monkeypatch.setattr(Stream, "record", after(record, beside))
    monkeypatch.setattr("cuglue.core.event.Event.synchronize", after(_synchronize, queue_more))
    drops.push("sooner", 1)
    drops.flush()
    beside.end()
    monkeypatch.undo()
    stream.driver.event_synchronize(record(rt.stream(1)).handle)  # the device does what it may
    drops.collect()
    assert "later" in drops.staged + drops.pending
    with held[0] as latch:
        latch.release()
    drops.drain()
    assert drops.staged + drops.pending == ()


def _synchronize(event: Any) -> None:
    event.stream.driver.event_synchronize(event.handle)


def test_what_comes_while_a_fence_is_recorded_stays_staged(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops = DropQueue(rt.stream(0))
    beside = Beside(lambda: drops.push("later", 1))
    monkeypatch.setattr(Stream, "record", after(Stream.record, beside))
    drops.push("sooner", 1)
    drops.flush()
    beside.end()
    assert (drops.pending, drops.staged) == (("sooner",), ("later",))
    drops.drain()


def test_two_threads_that_let_go_at_once_let_go_once(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    drops = DropQueue(rt.stream(0))
    for thing in ("a", "b"):
        drops._seal(lambda: rt.stream(0).record())  # nothing is staged yet
        drops.push(thing, 1)
        drops._seal(rt.stream(0).record)
    beside = Beside(drops.collect)
    monkeypatch.setattr("cuglue.core.event.Event.synchronize", after(_synchronize, beside))
    drops.flush()
    beside.end()
    assert drops.pending == ()


class Emptied(deque[Any]):
    """Another thread takes what is in it between the question whether it is empty and the answer."""

    def __bool__(self) -> bool:
        return True


class EmptiedList(list[Any]):
    """The same as a list."""

    def __bool__(self) -> bool:
        return True


def test_idle_memory_that_another_thread_was_quicker_to_take(rt: Runtime) -> None:
    pool = rt._lanes.host
    pool.returned = Emptied()
    assert pool.idle_bytes == 0
    pool.returned = deque()
    pool._idle[4096], pool._idle_bytes = EmptiedList(), 4096
    pool.trim()
    pool._idle_bytes = 0


# --- copies beside a cleanup ----------------------------------------------------------------------------------------


def send(rt: Runtime, x: Any) -> None:
    rt.command(stream=x.stream).write_to_gpu(x.descriptor(N), np.full(N, 7, "u1"))
    assert set(rt.read(x, stream=x.stream).result().tolist()) == {7}


def fetch(rt: Runtime, x: Any) -> None:
    target = np.zeros(N, "u1")
    rt.command(stream=x.stream).write_to_cpu(x.descriptor(N), target)
    assert set(target.tolist()) == {5}


def fetch_by_the_general_way(rt: Runtime, x: Any) -> None:
    target = bytearray(N)
    rt.command(stream=x.stream).write_to_cpu(x.descriptor(N), target)
    assert set(target) == {5}


def create(rt: Runtime, x: Any) -> None:
    y = rt.create(np.full(N, 9, "u1"), stream=x.stream)
    assert set(rt.read(y, stream=x.stream).result().tolist()) == {9}


@pytest.mark.parametrize("copy", [send, fetch, fetch_by_the_general_way, create])
@pytest.mark.parametrize("end", ["memory_cleanup", "let_go", "close"])
def test_nobody_takes_the_slab_away_between_a_place_and_its_copy(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch, copy: Callable[[Runtime, Any], None], end: str
) -> None:
    x = rt.create(np.full(N, 5, "u1"), stream=rt.stream(0))
    rt.synchronize()
    lane = rt._lanes.lane(x.stream)

    def clean_up() -> None:
        if end == "memory_cleanup":
            lane.cleanup()
        elif end == "let_go":
            lane.let_go()
        else:
            lane.slab.close()

    beside = Beside(clean_up)
    monkeypatch.setattr(Slab, "place", after(Slab.place, beside))
    copy(rt, x)
    beside.end()
    rt.synchronize()


# --- work beside the end of its runtime, or of its lane -------------------------------------------------------------


def late_write(lane: Lane, x: Any) -> None:
    """As a thread does that got the lane before it was closed."""
    writes.write_to_gpu(lane, x.descriptor(N), np.full(N, 7, "u1"))


def late_read(lane: Lane, x: Any) -> None:
    reads.read_async(lane, x.descriptor(N))  # and the future is dropped


@pytest.mark.parametrize("work", [late_write, late_read])
def test_what_a_late_thread_queues_outlives_the_runtime(
    sim: SimDriver, work: Callable[[Lane, Any], None]
) -> None:
    rt = Runtime(driver=sim)
    x = rt.create(np.full(N, 5, "u1"), stream=rt.stream(0))
    lane, state = rt._lanes.lane(x.stream), x.stream.state
    rt.close()
    work(lane, x)
    del lane
    for _ in range(3):  # the lane, its memory, the memory's pool
        state.retire.run_forgotten()
        state.retire.drain()
    sim.device_synchronize(0)  # it has not run before: its host memory must be there still
    sim.check()
    expected = 7 if work is late_write else 5
    assert set(x.array().numpy().tolist()) == {expected}
    x.close()
    state.retire.drain(block=True)
    state.retire.drain(block=True)
    assert sim.inventory()["host_alloc"] == 0


@pytest.mark.parametrize("memory", [None, [Sliced(1 << 16), Direct()]])
def test_a_buffer_that_is_made_as_its_runtime_closes_stays_whole(
    sim: SimDriver, monkeypatch: pytest.MonkeyPatch, memory: Any
) -> None:
    rt = Runtime(driver=sim, memory=memory)
    lanes, made = [rt._lanes.lane(rt.stream(0))], []

    def make() -> None:
        made.append(lanes[0].reserve(N))
        late_write(lanes[0], made[0])

    beside = Beside(make)
    monkeypatch.setattr(type(rt.resource), "close", before(type(rt.resource).close, beside))
    rt.close()  # nothing was handed out just before
    beside.end()
    with pytest.raises(ClosedError):
        lanes[0].reserve(N)
    assert set(made[0].array().numpy().tolist()) == {7}
    state = made[0].stream.state
    made[0].close()
    lanes.clear()
    for _ in range(3):
        state.retire.drain(block=True)
    sim.check()
    assert rt.resource.bytes_outstanding == 0
    del rt
    made.clear()
    gc.collect()
    state.retire.drain(block=True)
    left = sim.inventory()
    assert (left["host_alloc"], left["malloc_async"], left["malloc"], left["bytes"]) == (0, 0, 0, 0)


def test_what_a_thread_queues_on_an_idle_lane_that_goes_outlives_it(sim: SimDriver) -> None:
    with Runtime(driver=sim) as rt:
        stream = sim.Stream()
        x = rt.create(np.full(N, 5, "u1"), stream=stream)
        rt.synchronize()
        lane = rt._lanes.lane(stream)
        for _ in range(3):  # what it held is behind a fence, then gone
            rt._lanes._drop_idle()
        assert rt._lanes.lane(stream) is not lane
        late_write(lane, x)
        del lane
        rt._lanes.host.trim()
        assert set(rt.read(x, stream=stream).result().tolist()) == {7}


def test_a_closed_runtime_makes_no_stream_and_keeps_no_lane(sim: SimDriver) -> None:
    rt = Runtime(driver=sim)
    stream, lanes = sim.Stream(), rt._lanes
    x = rt.create(np.full(N, 5, "u1"), stream=stream)
    rt.close()
    for use in (lambda: lanes.own(0), lambda: rt.create(b"x")):
        with pytest.raises(ClosedError):
            use()
    late_write(lanes.lane(stream), x)  # by who was on the way
    assert lanes.all() == []
    sim.device_synchronize(0)
    assert set(x.array().numpy().tolist()) == {7}


def test_a_graph_is_replayed_on_other_streams_when_its_runtime_is_closed(sim: SimDriver) -> None:
    rt = Runtime(driver=sim)
    x = rt.create(np.full(N, 5, "u1"), stream=rt.stream(0))
    with rt.capture(x.stream) as capture:
        rt.launch(INCREMENT, 1, 1, InOut(x), stream=x.stream)
    rt.close()
    with capture.graph as graph:
        graph.replay()
        graph.replay(sim.Stream())
    assert set(x.array().numpy().tolist()) == {7}


def test_pinned_memory_that_comes_back_to_a_closed_pool_is_freed(sim: SimDriver) -> None:
    """Also what comes back just before: whoever gives it has not seen that the pool is closed."""
    rt = Runtime(driver=sim)
    kept = [rt.command().reserve_cpu(5000) for _ in range(2)]
    pool = rt._lanes.host
    rt.close()
    assert sim.inventory()["host_alloc"] == 2
    kept.pop()
    rt._state.retire.run_forgotten()
    assert sim.inventory()["host_alloc"] == 1
    kept.clear()
    rt._state.retire.run_forgotten()
    assert (sim.inventory()["host_alloc"], pool.idle_bytes) == (0, 0)


# --- a buffer that another thread closes ----------------------------------------------------------------------------


def _increment(grid: Any, block: Any, y: Any) -> None:
    y += 1


INCREMENT = Kernel("inc", 'extern "C" __global__ void inc(unsigned char* y) { }', sim=_increment)


@pytest.mark.parametrize("way", ["launch", "part", "read", "read_async", "write", "short write", "create"])
def test_a_buffer_that_is_closed_between_its_check_and_its_work_is_freed_after(
    sim: SimDriver, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    with Runtime(driver=sim) as rt:
        stream = rt.stream(0)
        x = rt.create(np.full(N, 5, "u1"), stream=stream)
        outer = rt.create(np.full(2 * N, 5, "u1"), stream=stream)
        y = outer.part(N)
        rt.synchronize()
        command = rt.command(stream=stream)
        beside = Beside(lambda: (x.close(), outer.close(), y.close()))
        monkeypatch.setattr(launch, "perform", before(launch.perform, beside))
        monkeypatch.setattr(reads, "transfer", before(reads.transfer, beside))
        monkeypatch.setattr(writes, "transfer", before(writes.transfer, beside))
        monkeypatch.setattr(Slab, "place", before(Slab.place, beside))
        if way == "launch":
            rt.launch(INCREMENT, 1, 1, InOut(x), stream=stream)
        elif way == "part":
            rt.launch(INCREMENT, 1, 1, InOut(y), stream=stream)
        elif way == "read":
            assert set(rt.read(x, stream=stream).result().tolist()) == {5}
        elif way == "read_async":
            assert set(command.read_async(y.descriptor(N)).result().tolist()) == {5}
        elif way == "write":
            command.write_to_gpu(y.descriptor(N), bytes(N))
        elif way == "short write":
            command.write_to_gpu(x.descriptor(N), np.zeros(N, "u1"))
        else:
            writes.fill(rt._lanes.lane(stream), x, np.zeros(N, "u1"))
        beside.end()
        rt.synchronize()
        sim.check()
        rt._state.retire.run_forgotten()
        assert rt.resource.bytes_outstanding == 0
        with pytest.raises(ClosedError):
            rt.launch(INCREMENT, 1, 1, InOut(x), stream=stream)


def test_a_buffer_that_is_closed_while_its_operand_is_made_keeps_nothing(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = rt.create(np.full(N, 5, "u1"), stream=rt.stream(0))
    beside = Beside(x.close)

    def made(*arguments: Any, **keywords: Any) -> Operand:
        beside()
        return Operand(*arguments, **keywords)

    x._operand = None
    monkeypatch.setattr(buffers, "Operand", made)
    rt.launch(INCREMENT, 1, 1, InOut(x), stream=rt.stream(0))
    beside.end()
    rt._state.retire.run_forgotten()
    assert rt.resource.bytes_outstanding == 0


def test_a_buffer_that_is_closed_as_it_is_asked_says_that_it_is_closed(rt: Runtime) -> None:
    x = rt.create(np.full(N, 5, "u1"), stream=rt.stream(0))

    class Cell:
        @property
        def storage(self) -> Any:
            x.close()
            return None

    x._operand, x._cell = None, Cell()  # type: ignore[assignment] # as another thread's close leaves it half way
    with pytest.raises(ClosedError):
        rt.read(x, stream=rt.stream(0))


def test_memory_that_was_bound_elsewhere_is_not_kept_by_its_first_name(rt: Runtime) -> None:
    stream = rt.stream(0)
    with rt.command(stream=stream) as cmd:
        reserved, x = cmd.reserve(N), rt.buffer(N)
        cmd.write_to_gpu(reserved.descriptor(N), bytes(N))
        cmd.bind(reserved, x)
    x.close()
    assert rt.resource.bytes_outstanding == 0


def test_memory_is_counted_beside_a_thread_that_allocates(rt: Runtime) -> None:
    stream = rt.stream(0)
    lane, kept = rt._lanes.lane(stream), []

    class Asked:
        """A storage whose size is asked just as another thread makes a buffer."""

        @property
        def block(self) -> Any:
            kept.append(rt.empty(N, stream=stream))
            return kept[0].block

    x, asked = rt.empty(N, stream=stream), Asked()
    kept.append(x)
    lane._live[id(asked)] = asked  # type: ignore[assignment] # as much of one as is asked for
    assert lane.usage().bytes_in_use == 2 * N


@pytest.mark.parametrize("way", ["launch", "read", "write", "short write"])
def test_neither_a_command_nor_a_cached_operand_keeps_the_memory_of_a_closed_buffer(
    rt: Runtime, way: str
) -> None:
    stream = rt.stream(0)
    x = rt.create(np.full(N, 5, "u1"), stream=stream)
    part, target = x.part(1), np.zeros(N, "u1")
    with rt.command(InOut(x), InOut(part), stream=stream) as cmd:
        if way == "launch":
            cmd.kernel(INCREMENT, 1, 1, x)
            cmd.kernel(INCREMENT, 1, 1, part)
        elif way == "read":
            cmd.write_to_cpu(x.descriptor(N), target)
        elif way == "write":
            cmd.write_to_gpu(x.descriptor(N), bytes(N))
        else:
            cmd.write_to_gpu(x.descriptor(N), target)
        x.close()
        part.close()
        rt._state.retire.run_forgotten()
        assert rt.resource.bytes_outstanding == 0
