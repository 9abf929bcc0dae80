"""Taint: what failed work never wrote, and who hears of it (contracts C30)."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_kernels import INCREMENT, SAXPY

import cuglue
from cuglue import In, InOut, Kernel, Out, Runtime
from cuglue.command.perform import Skipped
from cuglue.command.taint import HOPS, Claims, Failure
from cuglue.driver.sim import SimDriver
from cuglue.errors import DriverError, LaunchError, SeveralErrors, UnwrittenError
from cuglue.testing.faults import fail

N = 64


def failed(text: str = "first") -> Failure:
    return Failure(RuntimeError(text))


# --- claims -----------------------------------------------------------------------------------------------------


def test_C30_1_ranges_are_claimed_cleared_and_fused() -> None:
    claims, a, b = Claims(), failed("a"), failed("b")
    claims.claim(10, 20, a)
    claims.claim(20, 30, a)
    assert claims.ranges == [(10, 30, a)]
    claims.claim(10, 30, a)
    assert claims.ranges == [(10, 30, a)]
    claims.claim(15, 18, b)
    assert claims.ranges == [(10, 15, a), (15, 18, b), (18, 30, a)]
    claims.clear(12, 25)
    assert claims.ranges == [(10, 12, a), (25, 30, a)]
    claims.claim(5, 5, b)
    claims.clear(7, 7)
    assert claims.ranges == [(10, 12, a), (25, 30, a)]
    assert list(claims.within(0, 11)) == [a]
    assert list(claims.within(12, 25)) == []
    claims.clear(0, 100)
    assert claims.ranges == []


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 20), st.integers(0, 2)), max_size=40)
)
def test_C30_1_claims_know_every_byte(steps: list[tuple[bool, int, int, int]]) -> None:
    claims, owners = Claims(), [failed(str(i)) for i in range(3)]
    model: list[Failure | None] = [None] * 64
    for claims_it, start, length, owner in steps:
        if claims_it:
            claims.claim(start, start + length, owners[owner])
        else:
            claims.clear(start, start + length)
        model[start : start + length] = [owners[owner] if claims_it else None] * length
        for low, high in [(0, 64), (start, start + length), (start + 1, start + 3)]:
            expected = list(dict.fromkeys(f for f in model[low:high] if f is not None))
            assert list(claims.within(low, high)) == expected
        assert all(low < high for low, high, _ in claims.ranges)
        for (_, end, one), (start_, _, other) in zip(claims.ranges, claims.ranges[1:], strict=False):
            assert end < start_ or (end == start_ and one is not other)


# --- launches ---------------------------------------------------------------------------------------------------


def _two(grid: Any, block: Any, a: Any, b: Any, c: Any, n: Any) -> None:
    b[:n] = c[:n] = a[:n]


TWO = Kernel(
    "two",
    """extern "C" __global__ void two(const float* a, float* b, float* c, int n) {
        int i = threadIdx.x; if (i < n) b[i] = c[i] = a[i]; }""",
    sim=_two,
)


def fail_launch(rt: Runtime, *args: Any, kernel: Any = TWO) -> None:
    with pytest.raises(LaunchError):
        rt.launch(kernel, 1, 4096, *args)


@pytest.fixture
def four(rt: Runtime) -> list[cuglue.Buffer]:
    return [rt.create(np.full(N, i, "f4")) for i in range(4)]


def values(rt: Runtime, buffer: cuglue.Buffer, **keywords: Any) -> set[float]:
    return set(rt.read(buffer, dtype="f4", **keywords).result().tolist())


def test_C30_a_failed_launch_claims_what_it_would_have_written(rt: Runtime, four: Any) -> None:
    a, b, c, d = four
    fail_launch(rt, In(a), Out(b), Out(c), N)
    for buffer in (b, c):
        for stream in (None, rt.stream(1)):
            with pytest.raises(UnwrittenError, match="4096") as caught:
                rt.read(buffer, stream=stream)
            assert isinstance(caught.value.root, LaunchError)
            assert caught.value.__cause__ is caught.value.root
    assert values(rt, a) == {0.0}
    assert values(rt, d) == {3.0}
    with rt.command() as cmd:
        cmd.write_to_gpu(b.descriptor(N, "f4"), np.full(N, 7, "f4"))
    assert values(rt, b) == {7.0}
    with pytest.raises(UnwrittenError):
        rt.read(c)
    rt.launch(TWO, 1, N, In(a), Out(b), Out(c), N)
    assert values(rt, c) == {0.0}


def test_C30_reads_name_every_failure(rt: Runtime, four: Any) -> None:
    a, b, _, _ = four
    for half in (b.part(0, 2 * N), b.part(2 * N)):
        fail_launch(rt, In(a), Out(half), 1.0, N // 2, kernel=SAXPY)
    with pytest.raises(SeveralErrors) as caught:
        rt.read(b)
    assert [type(e) for e in caught.value.errors] == [UnwrittenError, UnwrittenError]
    assert values(rt, a) == {0.0}


def test_C30_1_a_part_that_was_written_can_be_read(rt: Runtime, four: Any) -> None:
    a, b, _, _ = four
    fail_launch(rt, In(a), Out(b), 1.0, N, kernel=SAXPY)
    rt.launch(SAXPY, 1, N, In(a), Out(b.part(0, 2 * N)), 1.0, N // 2)
    assert values(rt, b.part(0, 2 * N)) == {0.0}
    with pytest.raises(UnwrittenError):
        rt.read(b)


def test_C30_1_pitched_writes_clear_their_rows_alone(rt: Runtime) -> None:
    x = rt.create(np.zeros(64, "u1"))
    fail_launch(rt, Out(x), 16, 1, kernel=INCREMENT)
    with rt.command() as cmd:
        cmd.write_to_gpu(x.descriptor((8, 4), "u1", (8, 1)), np.ones((8, 4), "u1"))
        assert set(cmd.read_async(x.descriptor((8, 4), "u1", (8, 1))).result().ravel()) == {1}  # type: ignore[union-attr]
        for start in (4, 12, 60):
            with pytest.raises(UnwrittenError):
                cmd.read_async(x.part(start, 63 - start).descriptor(1))


def test_C30_3_work_that_would_read_it_is_skipped_with_the_same_failure(rt: Runtime, four: Any) -> None:
    a, b, c, d = four
    fail_launch(rt, In(a), Out(b), 1.0, N, kernel=SAXPY)
    skipped = rt.launch(SAXPY, 1, N, In(b), Out(c), 1.0, N)
    assert isinstance(skipped, Skipped)
    assert isinstance(skipped.root, LaunchError)
    assert skipped.chain == ("saxpy",)
    assert isinstance(rt.launch(INCREMENT, 1, N, InOut(c), N, 1), Skipped)
    with pytest.raises(UnwrittenError) as caught:
        rt.read(c)
    assert caught.value.chain == ("saxpy", "increment")
    assert caught.value.root is skipped.root
    assert rt.launch(SAXPY, 1, N, In(a), Out(d), 1.0, N) is None


def test_C30_3_the_newest_hops_are_kept(rt: Runtime, four: Any) -> None:
    a, b, _, _ = four
    fail_launch(rt, In(a), Out(b), 1.0, N, kernel=SAXPY)
    for _ in range(HOPS + 5):
        rt.launch(INCREMENT, 1, N, InOut(b), N, 1)
    with pytest.raises(UnwrittenError) as caught:
        rt.read(b)
    assert len(caught.value.chain) == HOPS


def _launch(rt: Runtime, a: Any, b: Any) -> None:
    rt.launch(SAXPY, 1, N, In(a), Out(b), 1.0, N, stream=rt.stream(1))


def _write(rt: Runtime, a: Any, b: Any) -> None:
    rt.command().write_to_gpu(b.descriptor(N, "f4"), np.zeros(N, "f4"))


@pytest.mark.parametrize(
    ("method", "work"),
    [("kernel_launch", _launch), ("copy_async", _write), ("stream_wait_event", _launch)],
)
def test_C30_2_whatever_fails_on_the_way(rt: Runtime, driver: Any, four: Any, method: str, work: Any) -> None:
    a, b, _, _ = four
    with fail(method, driver=driver), pytest.raises(DriverError) as caught:
        work(rt, a, b)
    assert "trust" in caught.value.__notes__[0]
    with pytest.raises(UnwrittenError):
        rt.read(b)


def _torn(rt: Runtime, a: Any, b: Any, c: Any) -> None:
    with rt.command(In(a), Out(b), InOut(c)) as cmd:
        cmd.kernel(SAXPY, 1, N, a, b, 1.0, N)
        raise ZeroDivisionError


def test_C30_2_an_exception_out_of_a_command_claims_what_it_should_have_written(
    rt: Runtime, four: Any
) -> None:
    a, b, c, d = four
    with pytest.raises(ZeroDivisionError):
        _torn(rt, a, b, c)
    assert values(rt, a) == values(rt, b) == {0.0}  # b was written before
    with pytest.raises(UnwrittenError) as caught:
        rt.read(c)
    assert isinstance(caught.value.root, ZeroDivisionError)
    with rt.command(In(a), Out(d)):
        pass  # nothing failed
    assert values(rt, d) == {3.0}


def test_arguments_that_do_not_fit_claim_nothing(rt: Runtime, four: Any) -> None:
    a, b, _, _ = four
    with pytest.raises(LaunchError):
        rt.launch(SAXPY, 1, N, In(a), Out(b), 1.0)
    assert values(rt, b) == {1.0}


def test_trust_takes_the_bytes_as_they_are(rt: Runtime, four: Any) -> None:
    a, b, _, _ = four
    fail_launch(rt, In(a), Out(b), 1.0, N, kernel=SAXPY)
    b.part(0, 2 * N).trust()
    assert values(rt, b.part(0, 2 * N)) == {1.0}
    with pytest.raises(UnwrittenError):
        rt.read(b)
    b.trust()
    assert values(rt, b) == {1.0}
    assert b.block.taint is None


def test_C30_4_freed_memory_drops_its_claims(sim: SimDriver) -> None:
    with Runtime() as rt:
        x = rt.create(np.zeros(N, "f4"))
        fail_launch(rt, Out(x), N, 1, kernel=INCREMENT)
        assert isinstance(x.block.taint, Claims)
        gone = weakref.ref(x.block.taint)
        address = x.ptr
        x.close()
        y = rt.create(np.zeros(N, "f4"))
        assert y.ptr == address  # the same memory, or this proves nothing
        assert values(rt, y) == {0.0}
        gc.collect()  # what the caught error held
        assert gone() is None


def test_C17_binding_trusts(rt: Runtime) -> None:
    with rt.command() as cmd:
        reserved, new = cmd.reserve(4 * N), rt.buffer(4 * N)
        fail_launch(rt, Out(reserved), N, 1, kernel=INCREMENT)
        cmd.bind(reserved, new)
    rt.read(new).result()


# --- the oracle -------------------------------------------------------------------------------------------------


class Model:
    """Bytes as they should be, and for each byte whether work that succeeded wrote it last."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(nbytes, "u1")
        self.good = np.ones(nbytes, bool)


def run_oracle(driver: Any, seed: int, operations: int) -> None:
    """A read succeeds iff every byte it returns was last written by work that succeeded (C30.1)."""
    choose = random.Random(seed)
    counted = dict.fromkeys(
        ("write", "failed write", "launch", "failed launch", "skipped", "read", "refused"), 0
    )
    with Runtime(driver=driver) as rt:
        streams = [rt.stream(i) for i in range(3)]
        buffers = [rt.create(np.zeros(N, "u1"), stream=streams[0]) for _ in range(3)]
        models = [Model(N) for _ in buffers]
        for _ in range(operations):
            stream = choose.choice(streams)
            which, other = choose.sample(range(len(buffers)), 2)
            start = choose.randrange(0, N - 4, 4)
            end = choose.randrange(start + 4, N + 1, 4)
            part, model = buffers[which].part(start, N - end), models[which]
            source, from_ = buffers[other].part(start, N - end), models[other]
            kind = choose.choice(("write", "launch", "launch", "read", "read", "fault"))
            fails = choose.random() < 0.3
            if kind == "write":
                data = np.frombuffer(choose.randbytes(end - start), "u1")
                try:
                    with fail("copy_async", persistent=not fails, on=1 if fails else 10**9, driver=driver):
                        rt.command(stream=stream).write_to_gpu(part.descriptor(end - start), data)
                    model.bytes[start:end], model.good[start:end] = data, True
                    counted["write"] += 1
                except DriverError:
                    model.good[start:end] = False
                    counted["failed write"] += 1
            elif kind in ("launch", "fault"):
                threads = 4096 if fails else N
                ready = bool(from_.good[start:end].all())
                try:
                    skipped = rt.launch(
                        COPY_BYTES, 1, threads, In(source), Out(part), end - start, stream=stream
                    )
                except LaunchError:
                    assert fails
                    assert ready
                    model.good[start:end] = False
                    counted["failed launch"] += 1
                    continue
                assert (skipped is None) is ready
                if ready:
                    model.bytes[start:end], model.good[start:end] = from_.bytes[start:end], True
                    counted["launch"] += 1
                else:
                    model.good[start:end] = False
                    counted["skipped"] += 1
            else:
                try:
                    result = rt.read(part, stream=stream).result()
                except (UnwrittenError, SeveralErrors):
                    assert not model.good[start:end].all()
                    counted["refused"] += 1
                    continue
                assert model.good[start:end].all()
                np.testing.assert_array_equal(np.asarray(result), model.bytes[start:end])
                counted["read"] += 1
    assert all(counted.values()), counted


COPY_BYTES = Kernel(
    "copy_bytes",
    """extern "C" __global__ void copy_bytes(const unsigned char* a, unsigned char* b, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) b[i] = a[i]; }""",
    sim=lambda grid, block, a, b, n: b.__setitem__(slice(n), a[:n]),
)


@pytest.mark.parametrize("seed", range(40))
def test_C30_1_the_oracle(seed: int) -> None:
    driver = SimDriver(seed=seed)
    with cuglue.use_driver(driver):
        run_oracle(driver, seed, 300)
    driver.check()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_C30_1_the_oracle_on_cuda(seed: int) -> None:
    run_oracle(cuglue.current_driver(), seed, 300)
