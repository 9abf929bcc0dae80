"""Configurations are checked: contracts C10."""

from __future__ import annotations

from typing import Any

import pytest

from cuglue.errors import LayoutError
from cuglue.memory.pool.layouts import Direct, Exclusive, MemoryConfiguration, Persistent, Sliced


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ([], "no pools"),
        ([Direct()] * 255, "255 pools"),
        ([Sliced(0)], "page_size"),
        ([Sliced(-512)], "page_size"),
        ([Sliced(4096, 0)], "max_slice_size"),
        ([Sliced(4096, 8192)], "at most a page"),
        ([Sliced(4096, 4096, 2048)], "at least a page"),
        ([Sliced(512, 512, 512 * 65536)], "65536 pages"),
        ([Exclusive(0)], "max_alloc_size"),
        ([Exclusive(4096, 0)], "dealloc_period"),
        ([Direct(0)], "reclaim_at"),
        ([Sliced(4096.0)], "page_size"),  # type: ignore[arg-type]
        ([Sliced(True)], "page_size"),
        (["sliced"], "Sliced, Exclusive, Direct or Persistent"),
        (MemoryConfiguration((Direct(),), persistent="sometimes"), "persistent"),
    ],
)
def test_C10_invalid_layouts_raise_value_errors(layout: object, words: str) -> None:
    with pytest.raises(LayoutError, match=words) as caught:
        MemoryConfiguration.of(layout)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


def test_C10_the_limits_themselves_are_valid() -> None:
    assert len(MemoryConfiguration.of([Direct()] * 254).pools) == 254
    assert MemoryConfiguration.of([Sliced(512, 512, 512 * 65535)])


def test_C10_sizes_are_rounded_up_to_the_alignment() -> None:
    (pool,) = MemoryConfiguration.of([Sliced(1000, 700, 5000)]).pools
    assert pool == Sliced(1024, 1024, 4096 + 1024)
    (pool,) = MemoryConfiguration.of([Exclusive(1000, 3)]).pools
    assert pool == Exclusive(1024, 3)


def test_a_configuration_is_taken_as_it_is() -> None:
    given = MemoryConfiguration((Sliced(512), Persistent()), dry_run=True, persistent="enforced")
    made = MemoryConfiguration.of(given)
    assert (made.dry_run, made.persistent) == (True, "enforced")
    assert made.pools == (Sliced(512, 512), Persistent())


@pytest.mark.parametrize("pools", [1.5, -1, True, object(), None, {Direct()}])
def test_pools_that_are_no_list(pools: Any) -> None:
    with pytest.raises(LayoutError):
        MemoryConfiguration.of(MemoryConfiguration(pools))


@pytest.mark.parametrize("dry", [None, "yes", 1, float("nan")])
def test_a_dry_run_is_wanted_or_not(dry: Any) -> None:
    with pytest.raises(LayoutError, match="dry_run"):
        MemoryConfiguration.of(MemoryConfiguration((Direct(),), dry_run=dry))
