"""Random inputs: some here, many more by ``python -m scripts.prove --fuzz 20000``."""

from __future__ import annotations

import random

import pytest
from prove.fuzz import fuzz
from prove_fuzz import TARGETS

from cuglue.errors import UsageError

SLOW = {"array views": 40, "copy descriptors": 40, "pool configurations": 60}


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_is_right_or_refused(name: str) -> None:
    done = fuzz(name, TARGETS[name], range(SLOW.get(name, 200)))
    assert done.faults == {}
    assert done.accepted, "a target that accepts nothing tests nothing"
    assert done.accepted < done.inputs or name == "log files"


def test_faults_are_told_once_with_the_input_that_brings_them_back() -> None:
    def target(choose: object) -> bool:
        number = choose.randrange(3)  # type: ignore[attr-defined]
        if number == 1:
            raise ValueError("not ours")
        return number == 2

    done = fuzz("sample", target, range(50))
    ((text, first),) = done.faults.items()
    assert "ValueError: not ours at test_fuzz.py" in text
    with pytest.raises(ValueError, match="not ours"):
        target(random.Random(first))
    assert 0 < done.accepted < 50


def test_an_error_of_ours_that_a_target_lets_through_is_a_fault() -> None:
    def target(choose: object) -> bool:
        raise UsageError("sample", got=1, expected=2)

    assert len(fuzz("sample", target, range(3)).faults) == 1
