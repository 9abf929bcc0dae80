"""What only a removed statement showed: each test here fails if one particular line of the pool goes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import cuglue
from cuglue import AsyncCudaResource, PoolResource
from cuglue.memory.table import BlockTable
from cuglue.testing import SimDriver


@pytest.mark.parametrize("what", ["a block", "an array that is asked about"])
def test_a_block_that_an_interrupt_took_from_its_caller_is_not_live(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = BlockTable.add

    def interrupted(table: BlockTable, block: Any) -> None:
        add(table, block)
        raise KeyboardInterrupt

    with cuglue.use_driver(SimDriver()), PoolResource(AsyncCudaResource()) as pool:
        array = pool.malloc(4096)
        live = pool.bytes_outstanding
        ask = partial(pool.allocate, 4096) if what == "a block" else partial(pool.block_in, array.mem)
        with monkeypatch.context() as patch:
            patch.setattr(BlockTable, "add", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ask()
        assert list(pool._table) == []
        assert pool.bytes_outstanding == live
        del array, ask
