"""Small transfers: the short way where nothing stands in the way, the general one for all else, one slab for both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from driver_calls import Calls, recorded
from racing import race
from sample_kernels import INCREMENT

from cuglue import Buffer, InOut, Out, Runtime
from cuglue.command import short
from cuglue.command.command import Command
from cuglue.command.hostmem import HostPool
from cuglue.command.slab import Slab
from cuglue.driver.protocol import CaptureMode
from cuglue.driver.sim import SimDriver
from cuglue.errors import CaptureError, DriverError, LayoutError, StorageHandleNotFound, UnwrittenError
from cuglue.testing import Latch
from cuglue.testing.faults import fail

N = 256


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each transfer went the short way."""
    taken: list[bool] = []

    def watch(name: str) -> None:
        real = getattr(short, name)

        def noted(*arguments: Any) -> bool:
            taken.append(False)
            taken[-1] = real(*arguments)
            return taken[-1]

        monkeypatch.setattr(short, name, noted)

    watch("send")
    watch("fetch")
    return taken


@pytest.fixture
def x(rt: Runtime) -> Buffer:
    """A buffer that the runtime's first stream wrote last."""
    buffer = rt.create(np.zeros(N, "u1"), stream=rt.stream(0))
    rt.synchronize()
    return buffer


@pytest.fixture
def cmd(rt: Runtime) -> Command:
    """A command on that stream."""
    return rt.command(stream=rt.stream(0))


def bytes_of(rt: Runtime, buffer: Buffer, stream: int = 0) -> list[int]:
    return rt.read(buffer, stream=rt.stream(stream)).result().tolist()


# --- which way ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype"), [((N,), "u1"), ((N // 4,), "f4"), ((8, N // 16), "i2"), ((2, 2, N // 32), "c8")]
)
def test_whole_arrays_of_any_type_go_the_short_way(
    rt: Runtime, cmd: Command, x: Buffer, ways: list[bool], shape: Any, dtype: str
) -> None:
    data = np.random.default_rng(1).integers(0, 256, N, "u1").view(dtype).reshape(shape).copy()
    expected, target = data.tobytes(), np.zeros_like(data)
    cmd.write_to_gpu(x.descriptor(shape, dtype), data)
    data.fill(0)
    cmd.write_to_cpu(x.descriptor(shape, dtype), target)
    assert target.tobytes() == expected == bytes(bytes_of(rt, x))
    assert ways == [True, True]


def test_an_array_with_gaps_is_sent_in_order(rt: Runtime, cmd: Command, x: Buffer, ways: list[bool]) -> None:
    data = np.asfortranarray(np.arange(N, dtype="u1").reshape(16, 16)).copy(order="F")
    cmd.write_to_gpu(x.descriptor(N), data)
    assert bytes_of(rt, x) == data.ravel(order="C").tolist()
    target = np.zeros((16, 16), "u1", order="F")
    with pytest.raises(LayoutError):
        cmd.write_to_cpu(x.descriptor(N), target)
    assert ways == [True, False]


def test_views_of_ordinary_arrays_do(rt: Runtime, cmd: Command, x: Buffer, ways: list[bool]) -> None:
    frames = np.random.default_rng(5).integers(0, 256, (3, N // 2), "u2").view("u1")
    targets = np.zeros_like(frames)
    for frame, target in zip(frames, targets, strict=True):
        cmd.write_to_gpu(x.descriptor(N), frame)
        cmd.write_to_cpu(x.descriptor(N), target)
    cmd.write_to_cpu(x.descriptor(N // 2, "u2"), targets.view("u2")[2])
    assert targets.tolist() == frames.tolist()
    assert ways == [True] * 7


def test_a_view_with_gaps_is_no_place_for_a_read(rt: Runtime, cmd: Command, x: Buffer) -> None:
    with pytest.raises(LayoutError):
        cmd.write_to_cpu(x.descriptor(N), np.zeros(2 * N, "u1")[::2])


def unusual_source(rt: Runtime, cmd: Command, x: Buffer, data: Any) -> None:
    cmd.write_to_gpu(x.descriptor(N), data.tobytes())


def view_of_bytes(rt: Runtime, cmd: Command, x: Buffer, data: Any) -> None:
    cmd.write_to_gpu(x.descriptor(N), np.frombuffer(data.tobytes(), "u1"))


def view_with_gaps(rt: Runtime, cmd: Command, x: Buffer, data: Any) -> None:
    cmd.write_to_gpu(x.descriptor(N), np.repeat(data, 3)[1::3])


def view_of_pinned(rt: Runtime, cmd: Command, x: Buffer, data: Any) -> None:
    memory = cmd.reserve_cpu(2 * N)
    memory[:N] = data
    for view in (memory[:N], np.asarray(memory)[:N]):
        cmd.write_to_gpu(x.descriptor(N), view)


def pinned(rt: Runtime, cmd: Command, x: Buffer, data: Any) -> None:
    memory = cmd.reserve_cpu(N)
    memory[:] = data
    cmd.write_to_gpu(x.descriptor(N), memory)


def by_rows(rt: Runtime, cmd: Command, x: Buffer, data: Any) -> None:
    cmd.write_to_gpu(
        x.descriptor((4, N // 8), "u1", (N // 4, 1)), data.reshape(4, N // 4)[:, : N // 8].copy()
    )
    cmd.write_to_gpu(
        x.part(N // 8).descriptor((4, N // 8), "u1", (N // 4, 1)), data.reshape(4, N // 4)[:, N // 8 :].copy()
    )


def declared(rt: Runtime, cmd: Command, x: Buffer, data: Any) -> None:
    with rt.command(Out(x), stream=rt.stream(0)) as own:
        own.write_to_gpu(x.descriptor(N), data)


def on_another_stream(rt: Runtime, cmd: Command, x: Buffer, data: Any) -> None:
    rt.command(stream=rt.stream(1)).write_to_gpu(x.descriptor(N), data)


def read_elsewhere(rt: Runtime, cmd: Command, x: Buffer, data: Any) -> None:
    rt.read(x, stream=rt.stream(1))
    cmd.write_to_gpu(x.descriptor(N), data)


def with_progress(rt: Runtime, cmd: Command, x: Buffer, data: Any) -> None:
    told: list[tuple[int, int]] = []
    cmd.write_to_gpu(x.descriptor(N), data, progress=lambda *done: told.append(done))
    assert told == [(N, N)]


@pytest.mark.parametrize(
    ("write", "short_of"),
    [
        (unusual_source, [False]),
        (view_of_bytes, [False]),
        (view_with_gaps, [False]),
        (view_of_pinned, [False, False]),
        (pinned, [False]),
        (by_rows, [False, False]),
        (declared, [False]),
        (on_another_stream, [False]),
        (read_elsewhere, [False]),
        (with_progress, []),
    ],
)
def test_all_else_goes_the_general_way_and_arrives(
    rt: Runtime, cmd: Command, x: Buffer, ways: list[bool], write: Any, short_of: list[bool]
) -> None:
    data = np.random.default_rng(2).integers(0, 256, N, "u1")
    write(rt, cmd, x, data)
    assert ways == short_of
    assert bytes_of(rt, x) == data.tolist()


def test_the_largest_and_the_one_above(
    rt: Runtime, ways: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slab, "LARGEST", N)
    for nbytes in (N, N + 1):
        data, target = np.full(nbytes, 7, "u1"), np.zeros(nbytes, "u1")
        buffer = rt.empty(nbytes, stream=rt.stream(0))
        with rt.command(stream=rt.stream(0)) as cmd:
            cmd.write_to_gpu(buffer.descriptor(nbytes), data)
            cmd.write_to_cpu(buffer.descriptor(nbytes), target)
        assert target.tolist() == data.tolist()
    assert ways == [True, True, False, False]


def test_C20_nothing_is_asked_for_no_bytes(rt: Runtime, cmd: Command, x: Buffer, calls: Calls) -> None:
    cmd.write_to_gpu(x.descriptor(0), np.empty(0, "u1"))
    cmd.write_to_cpu(x.descriptor(0), np.empty(0, "u1"))
    assert calls.of("copy_async", "stream_synchronize") == []


def test_what_does_not_fit_is_refused_as_ever(rt: Runtime, cmd: Command, x: Buffer, calls: Calls) -> None:
    calls.clear()
    for transfer in (cmd.write_to_gpu, cmd.write_to_cpu):
        with pytest.raises(LayoutError):
            transfer(x.descriptor(N), np.zeros(N - 1, "u1"))
        with pytest.raises(LayoutError):
            transfer(x.descriptor(N + 1), np.zeros(N + 1, "u1"))
        with pytest.raises(StorageHandleNotFound):
            transfer(rt.buffer(N).descriptor(N), np.zeros(N, "u1"))
    fixed = np.zeros(N, "u1")
    fixed.flags.writeable = False
    with pytest.raises(LayoutError):
        cmd.write_to_cpu(x.descriptor(N), fixed)
    assert calls.count("copy_async") == 0


@pytest.mark.parametrize("name", ["write_to_gpu", "write_to_cpu"])
def test_a_capture_of_somebody_else_is_not_touched(sim: SimDriver, name: str) -> None:
    with Runtime(driver=sim) as rt:
        stream = rt.stream(0)
        x = rt.create(np.zeros(N, "u1"), stream=stream)
        rt.synchronize()
        with rt.command(stream=stream) as cmd, recorded(sim) as calls:
            sim.capture_begin(stream.handle, CaptureMode.RELAXED)
            with pytest.raises(CaptureError):
                getattr(cmd, name)(x.descriptor(N), np.zeros(N, "u1"))
            sim.graph_destroy(sim.capture_end(stream.handle))
        assert calls.count("copy_async") == calls.count("stream_synchronize") == 0


def test_in_a_capture_of_ours_the_graph_has_bytes_of_its_own(
    rt: Runtime, x: Buffer, ways: list[bool]
) -> None:
    stream = rt.stream(0)
    data, target = np.full(N, 5, "u1"), np.zeros(N, "u1")
    with rt.capture(stream) as capture, rt.command(stream=stream) as cmd:
        cmd.write_to_gpu(x.descriptor(N), data)
        cmd.write_to_cpu(x.descriptor(N), target)
        data[:] = 6
    assert ways == [False, False]
    for _ in range(2):
        rt.command(stream=stream).write_to_gpu(x.descriptor(N), np.full(N, 9, "u1"))
        capture.graph.replay(stream)
        stream.synchronize()
        assert set(target.tolist()) == {5}
    capture.graph.close()


def test_a_memory_that_others_use_goes_the_general_way(
    rt: Runtime, cmd: Command, x: Buffer, ways: list[bool]
) -> None:
    """Their streams wait for the write, and it for them."""
    x.storage.note_consumer(rt.stream(1))
    cmd.write_to_gpu(x.descriptor(N), np.full(N, 3, "u1"))
    cmd.write_to_cpu(x.descriptor(N), np.zeros(N, "u1"))
    assert ways == [False, False]


# --- faults ---------------------------------------------------------------------------------------------------------


def test_a_refused_write_leaves_its_bytes_unwritten(
    rt: Runtime, cmd: Command, x: Buffer, ways: list[bool]
) -> None:
    half, target = x.descriptor(N // 2), np.zeros(N // 2, "u1")
    with fail("copy_async", driver=rt.driver), pytest.raises(DriverError):
        cmd.write_to_gpu(half, np.ones(N // 2, "u1"))
    with pytest.raises(UnwrittenError):
        cmd.write_to_cpu(half, target)
    cmd.write_to_cpu(x.part(N // 2).descriptor(N // 2), target)
    cmd.write_to_gpu(half, np.ones(N // 2, "u1"))
    cmd.write_to_cpu(half, target)
    assert set(target.tolist()) == {1}
    assert ways == [False, False, False, False, True]


def test_a_refused_read_claims_nothing(rt: Runtime, cmd: Command, x: Buffer, ways: list[bool]) -> None:
    target = np.ones(N, "u1")
    for call in ("copy_async", "stream_synchronize"):
        with fail(call, driver=rt.driver), pytest.raises(DriverError):
            cmd.write_to_cpu(x.descriptor(N), target)
        assert set(target.tolist()) == {1}
    cmd.write_to_cpu(x.descriptor(N), target)
    assert set(target.tolist()) == {0}
    assert ways == [False, False, True]


# --- order ----------------------------------------------------------------------------------------------------------


def test_work_elsewhere_comes_after_a_short_write_and_before_the_next(rt: Runtime, ways: list[bool]) -> None:
    first, second = rt.stream(0), rt.stream(1)
    x = rt.create(np.zeros(N // 4, "i4"), stream=first)
    rt.synchronize()
    with rt.command(stream=first) as cmd:
        for turn in range(4):
            cmd.write_to_gpu(x.descriptor(N // 4, "i4"), np.full(N // 4, turn, "i4"))
            rt.launch(INCREMENT, 1, N // 4, InOut(x), N // 4, 1, stream=second)
            future = rt.read(x, dtype="i4", stream=second)
            cmd.write_to_gpu(x.descriptor(N // 4, "i4"), np.full(N // 4, 99, "i4"))
            assert set(future.result().tolist()) == {turn + 1}
            assert set(rt.read(x, dtype="i4", stream=first).result().tolist()) == {99}


def test_a_write_elsewhere_comes_after_a_short_read(
    rt: Runtime, cmd: Command, x: Buffer, calls: Calls, ways: list[bool]
) -> None:
    """And a write here need not wait for the read here, nor one elsewhere for a read before the last write."""
    stream = rt.stream(0)
    for _ in range(2):
        before = stream.seq
        cmd.write_to_cpu(x.descriptor(N), np.zeros(N, "u1"))
        assert x.block.reads == {stream: before + 1}
        calls.clear()
        cmd.write_to_gpu(x.descriptor(N), np.zeros(N, "u1"))
        assert calls.count("stream_wait_event") == 0
        assert (x.block.reads, x.block.write_seq) == (None, before + 2)
    assert ways == [True] * 4


def test_a_read_elsewhere_comes_after_a_short_write(
    rt: Runtime, cmd: Command, x: Buffer, ways: list[bool]
) -> None:
    other, target = rt.command(stream=rt.stream(1)), np.zeros(N, "u1")
    for turn in range(1, 4):
        cmd.write_to_gpu(x.descriptor(N), np.full(N, turn, "u1"))
        other.write_to_cpu(x.descriptor(N), target)
        assert set(target.tolist()) == {turn}
    assert ways == [True, False, False, False, False, False]


# --- the slab -------------------------------------------------------------------------------------------------------


def sources(calls: Calls) -> list[int]:
    return [call.args[1] for call in calls.of("copy_async")]


def test_places_begin_again_once_the_device_is_done(
    rt: Runtime, cmd: Command, x: Buffer, calls: Calls
) -> None:
    cmd.synchronize()
    calls.clear()
    for _ in range(3):
        for _ in range(2):
            cmd.write_to_gpu(x.descriptor(N), np.zeros(N, "u1"))
        cmd.write_to_gpu(x.descriptor(N), bytes(N))  # the general way
        cmd.synchronize()
    first = rt._lanes.lane(rt.stream(0)).slab.address
    assert sources(calls) == [first, first + N, first + 2 * N] * 3


def test_places_of_reads_begin_again(rt: Runtime, cmd: Command, x: Buffer, calls: Calls) -> None:
    cmd.synchronize()
    calls.clear()
    for target in (np.zeros(N, "u1"), bytearray(N)):
        for _ in range(3):
            cmd.write_to_cpu(x.descriptor(N), target)
    assert len({call.args[0] for call in calls.of("copy_async")}) == 1


def test_no_place_begins_again_before(sim: SimDriver) -> None:
    """What was queued is not done; and of work whose stamp is missing nobody knows whether it is."""
    with Runtime(driver=sim) as rt:
        stream = rt.stream(0)
        x = rt.create(np.zeros(N, "u1"), stream=stream)
        cmd, slab = rt.command(stream=stream), rt._lanes.lane(stream).slab
        cmd.synchronize()
        with Latch(stream) as latch:
            cmd.write_to_gpu(x.descriptor(N), np.full(N, 1, "u1"))
            assert slab.place(N) == N
            latch.release()
        cmd.synchronize()
        assert slab.place(N) == 2 * N  # nobody has said what was done with the place before
        slab.until = stream.seq
        assert slab.place(N) == 0
        assert bytes_of(rt, x) == [1] * N


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs with room for twice two places."""
    monkeypatch.setattr(Slab, "HALF", 2 * N)
    monkeypatch.setattr(Slab, "LARGEST", N)


@pytest.mark.usefixtures("halves")
def test_a_half_comes_again_when_the_device_is_done_with_it(rt: Runtime, cmd: Command, calls: Calls) -> None:
    """Though it is not known to be done with the other, so that memory in use does not grow with what is queued."""
    x = rt.create(np.zeros(N, "u1"), stream=rt.stream(0))
    slab = rt._lanes.lane(rt.stream(0)).slab
    calls.clear()
    for number in range(1, 9):
        cmd.write_to_gpu(x.descriptor(N), np.full(N, number, "u1"))
        if number % 2 == 0:
            rt.synchronize()  # which says nothing of a stream
    first = slab.address
    assert [start - first for start in sources(calls)] == [N * place for place in (1, 2, 3, 0, 1, 2, 3, 0)]
    assert (calls.count("event_record"), calls.count("host_alloc")) == (4, 0)
    assert rt._lanes.lane(rt.stream(0)).drops.staged == ()
    assert bytes_of(rt, x) == [8] * N


@pytest.mark.usefixtures("halves")
def test_a_half_that_the_device_still_reads_does_not_come_again(sim: SimDriver) -> None:
    with Runtime(driver=sim) as rt:
        stream = rt.stream(0)
        buffers = [rt.empty(N, stream=stream) for _ in range(12)]
        lane = rt._lanes.lane(stream)
        with Latch(stream) as latch, rt.command(stream=stream) as cmd:
            for number, x in enumerate(buffers):
                cmd.write_to_gpu(x.descriptor(N), np.full(N, number, "u1"))
            assert [thing.nbytes for thing in lane.drops.staged + lane.drops.pending] == [4 * N, 4 * N]
            latch.release()
        assert [set(bytes_of(rt, x)) for x in buffers] == [{number} for number in range(12)]


@pytest.mark.usefixtures("halves")
def test_a_half_that_somebody_copies_from_does_not_come_again(rt: Runtime, cmd: Command) -> None:
    slab, drops = rt._lanes.lane(rt.stream(0)).slab, rt._lanes.lane(rt.stream(0)).drops
    x = rt.empty(N, stream=rt.stream(0))
    for number in range(6):
        slab.readers = 1
        cmd.write_to_gpu(x.descriptor(N), np.full(N, number, "u1"))
        cmd.synchronize()
    assert [thing.nbytes for thing in drops.staged + drops.pending] == [4 * N]
    assert slab.readers == 1


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("call", ["event_record", "event_query"])
def test_a_device_that_cannot_say_how_far_it_is_gives_no_place(rt: Runtime, cmd: Command, call: str) -> None:
    x = rt.empty(N, stream=rt.stream(0))
    with fail(call, driver=rt.driver, persistent=True):
        for number in range(8):
            try:
                cmd.write_to_gpu(x.descriptor(N), np.full(N, number, "u1"))
            except DriverError:
                break
        else:
            raise AssertionError("the call was not made")
    rt.synchronize()
    assert bytes_of(rt, x) == [number - 1] * N
    for number in range(8):
        cmd.write_to_gpu(x.descriptor(N), np.full(N, number, "u1"))
        assert bytes_of(rt, x) == [number] * N


@pytest.mark.parametrize("kind", [lambda: np.zeros(N, "u1"), lambda: bytearray(N)], ids=["short", "general"])
def test_no_place_begins_again_while_somebody_copies_from_it(
    sim: SimDriver, monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Any]
) -> None:
    with Runtime(driver=sim) as rt:
        stream = rt.stream(0)
        x = rt.create(np.full(N, 1, "u1"), stream=stream)
        y = rt.create(np.zeros(N, "u1"), stream=stream)
        cmd, other = rt.command(stream=stream), rt.command(stream=stream)
        slab, real = rt._lanes.lane(stream).slab, HostPool.note_use
        target, inside = kind(), []

        def between(pool: HostPool, buffer: Any) -> None:
            """After the wait, before the bytes are copied out: another write comes, as from another thread."""
            real(pool, buffer)
            if not inside:
                inside.append(True)
                other.write_to_gpu(y.descriptor(N), np.full(N, 2, "u1"))
                other.synchronize()
                other.write_to_gpu(y.descriptor(N), np.full(N, 3, "u1"))

        cmd.synchronize()
        slab.until = stream.seq
        with monkeypatch.context() as patch:
            copy_out = Slab.copy_out

            def watched(*arguments: Any) -> None:
                patch.setattr(HostPool, "note_use", between)
                copy_out(*arguments)
                patch.setattr(HostPool, "note_use", real)

            patch.setattr(Slab, "copy_out", watched)
            cmd.write_to_cpu(x.descriptor(N), target)
        assert inside == [True]
        assert bytes(target) == b"\1" * N
        assert slab.readers == 0
        assert bytes_of(rt, y) == [3] * N


def test_a_reader_of_a_slab_that_was_let_go_is_no_reader_of_the_next(
    sim: SimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Runtime(driver=sim) as rt:
        stream = rt.stream(0)
        x = rt.create(np.full(N, 1, "u1"), stream=stream)
        cmd, slab, copy_out = rt.command(stream=stream), rt._lanes.lane(stream).slab, Slab.copy_out

        def after_it_went(*arguments: Any) -> None:
            slab.close()
            slab.place(N)
            copy_out(*arguments)

        target = np.zeros(N, "u1")
        monkeypatch.setattr(Slab, "copy_out", after_it_went)
        cmd.write_to_cpu(x.descriptor(N), target)
        assert set(target.tolist()) == {1}
        assert slab.readers == 0
        assert slab.bytes.size


def test_threads_that_wait_for_each_transfer_share_the_slab(sim: SimDriver) -> None:
    """Whoever waits lets the places begin again, while another thread copies from one."""
    with Runtime(driver=sim) as rt:
        stream, wrong = rt.stream(0), []
        buffers = [rt.create(np.zeros(N, "u1"), stream=stream) for _ in range(4)]
        rt.synchronize()

        def work(number: int) -> None:
            target, whole = np.zeros(N, "u1"), buffers[number].descriptor(N)
            with rt.command(stream=stream) as cmd:
                for turn in range(200):
                    cmd.write_to_gpu(whole, np.full(N, (turn + 50 * number) % 256, "u1"))
                    if turn % 3 == 0:
                        cmd.synchronize()
                    cmd.write_to_cpu(whole, target)
                    if set(target.tolist()) != {(turn + 50 * number) % 256}:
                        wrong.append((number, turn))

        race(work)
        assert wrong == []


# --- what it costs --------------------------------------------------------------------------------------------------


def python_calls(work: Callable[[], object]) -> list[str]:
    """Functions in Python, ours, that one more call takes; the simulated device's own are not counted."""
    work()
    made: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "/cuglue/" in file and "/driver/" not in file:
            made.append(frame.f_code.co_qualname)

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return made


def test_a_small_transfer_and_its_wait_are_few_calls(sim: SimDriver) -> None:
    """Of Python: a write was 27, write_to_cpu 35, a read 36 and with rt.read 45."""
    with Runtime(driver=sim) as rt:
        own = rt.stream(0)
        x = rt.create(np.zeros(N, "u1"), stream=own)
        cmd, whole = rt.command(stream=own), x.descriptor(N)
        data = np.zeros(N, "u1")

        def send() -> None:
            cmd.write_to_gpu(whole, data)
            cmd.synchronize()

        for work, most in (
            (send, 13),
            (lambda: cmd.write_to_cpu(whole, data), 13),
            (lambda: cmd.read_async(whole).result(), 30),
            (lambda: rt.read(x, stream=own).result(), 30),
        ):
            made = [name for name in python_calls(work) if "note_use" not in name and "root_of" not in name]
            assert 5 < len(made) <= most, made


def test_a_small_transfer_asks_the_driver_for_no_more_than_it_needs(
    rt: Runtime, cmd: Command, x: Buffer, calls: Calls
) -> None:
    cmd.write_to_gpu(x.descriptor(N), np.zeros(N, "u1"))
    for transfer, needed in (
        (cmd.write_to_gpu, ["capture_status", "copy_async"]),
        (cmd.write_to_cpu, ["capture_status", "copy_async", "capture_status", "stream_synchronize"]),
    ):
        calls.clear()
        transfer(x.descriptor(N), np.zeros(N, "u1"))
        assert [call.method for call in calls.made if call.method != "host_view"] == needed
