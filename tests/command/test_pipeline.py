"""Large uploads in chunks: cut exactly, ordered like one copy, and safe when one of them fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver_calls import Calls
from hypothesis import given
from hypothesis import strategies as st

from cuglue import Runtime
from cuglue.command import copies, pipeline
from cuglue.command.pipeline import chunks
from cuglue.driver.sim import SimDriver
from cuglue.errors import DriverError, UnwrittenError
from cuglue.layout import CopyShape
from cuglue.testing.faults import fail


@given(st.integers(1, 1000), st.integers(1, 300))
def test_linear_copies_are_cut_into_ranges(width: int, nbytes: int) -> None:
    pieces = list(chunks(CopyShape(width, 1, width), nbytes))
    assert [p.source for p in pieces] == [p.target for p in pieces] == list(range(0, width, nbytes))
    assert sum(p.shape.nbytes for p in pieces) == width
    assert all(p.shape.linear and p.shape.nbytes <= nbytes for p in pieces)


@given(st.integers(1, 60), st.integers(2, 60), st.integers(0, 9), st.integers(1, 300))
def test_pitched_copies_are_cut_into_whole_rows(width: int, height: int, pad: int, nbytes: int) -> None:
    source = np.arange(width * height, dtype="u2")
    target = np.zeros((height, width + pad), "u2")
    for piece in chunks(CopyShape(width, height, width + pad), nbytes):
        rows = piece.shape.height
        assert piece.target % (width + pad) == 0
        first = piece.target // (width + pad)
        target[first : first + rows, :width] = source[piece.source :][: rows * width].reshape(rows, width)
        assert piece.shape.nbytes <= max(nbytes, width)
    np.testing.assert_array_equal(target[:, :width], source.reshape(height, width))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "CHUNK", 4096)
    monkeypatch.setattr(copies, "PIPELINE_FROM", 10_000)


@pytest.mark.usefixtures("small_chunks")
def test_a_large_upload_arrives_whole_and_its_source_may_change_at_once(rt: Runtime, calls: Calls) -> None:
    data = np.random.default_rng(1).integers(0, 256, 300_001, "u1")
    expected = data.tobytes()
    x = rt.create(data)
    data[:] = 0
    assert calls.count("copy_async") == 74
    assert bytes(rt.read(x).result()) == expected


@pytest.mark.usefixtures("small_chunks")
def test_padded_rows_in_chunks(rt: Runtime) -> None:
    x = rt.create(np.zeros((100, 256), "u1"))
    rows = np.random.default_rng(2).integers(0, 256, (100, 200), "u1")
    with rt.command() as cmd:
        cmd.write_to_gpu(x.descriptor((100, 200), "u1", (256, 1)), rows)
    result = np.asarray(rt.read(x, (100, 256)).result())
    np.testing.assert_array_equal(result[:, :200], rows)
    assert not result[:, 200:].any()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("method", ["copy_async", "event_record", "event_synchronize"])
@pytest.mark.parametrize("on", [1, 5])
def test_a_failing_chunk_leaves_all_of_it_unwritten(sim: SimDriver, method: str, on: int) -> None:
    with Runtime() as rt:
        x = rt.create(np.zeros(200_000, "u1"))
        rt.synchronize()
        with rt.command() as cmd:
            with fail(method, on=on), pytest.raises(DriverError):
                cmd.write_to_gpu(x.descriptor(200_000), np.ones(200_000, "u1"))
            with pytest.raises(UnwrittenError):
                cmd.read_async(x.part(199_999).descriptor(1))
            cmd.write_to_gpu(x.descriptor(200_000), np.full(200_000, 3, "u1"))
        assert set(rt.read(x).result()) == {3}


@pytest.mark.usefixtures("small_chunks")
def test_the_ring_is_bounded(sim: SimDriver) -> None:
    with Runtime() as rt:
        x = rt.empty(4096 * 200)
        rt.command().write_to_gpu(x.descriptor(4096 * 200), np.ones(4096 * 200, "u1"))
        assert sim.inventory()["host_alloc"] <= 16
        assert set(rt.read(x).result()) == {1}


@pytest.mark.gpu
def test_sixty_four_mebibytes() -> None:
    data: Any = np.random.default_rng(3).integers(0, 256, 64 << 20, "u1")
    with Runtime(driver="cuda") as rt:
        np.testing.assert_array_equal(np.asarray(rt.read(rt.create(data)).result()), data)
