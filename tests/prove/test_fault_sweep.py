"""Nothing is lost when a driver call fails: every public operation of several calls, with each failing in turn."""

from __future__ import annotations

import pytest
from prove_operations import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_is_lost(case: Case) -> None:
    case.sweep().check()
