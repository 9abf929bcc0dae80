"""The same operations as a state machine of hypothesis, which looks for short programs of its own."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from prove.programs.check import end, listening, one
from prove.programs.generate import model_for
from prove.programs.model import OPERATIONS, Operation, Skip
from prove.programs.world import RESOURCES, World

from cuglue.core.block import BlockLife

T = TypeVar("T")
BUDGET = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class Drawn:
    """Choices of hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def choice(self, options: Sequence[T]) -> T:
        return self._data.draw(st.sampled_from(options))

    def number(self, below: int) -> int:
        return self._data.draw(st.integers(0, below - 1))


class Programs(RuleBasedStateMachine):
    """One rule for each operation; the model says what it must give."""

    world: World | None = None
    broken = False

    @initialize(resource=st.sampled_from(list(RESOURCES)), seed=st.integers(0, 1 << 16))
    def start(self, resource: str, seed: int) -> None:
        gc.freeze()  # what hypothesis keeps is not for the collector, which each program calls
        self.stack = ExitStack()
        self.noise = self.stack.enter_context(listening())
        self.model = model_for(resource)
        self.world = World(seed, resource)
        self.stack.callback(self.world.abandon)

    def step(self, operation: Operation, data: st.DataObject) -> None:
        args = operation.choose(self.model, Drawn(data))
        if not isinstance(args, tuple):
            return
        try:
            wanted = operation.predict(self.model, *args)
        except Skip:
            return
        assert self.world is not None
        failure = one(operation.perform, self.world, args, wanted, self.noise)
        if failure is not None:
            self.broken = True
        assert failure is None, "\n".join(failure)

    def teardown(self) -> None:
        if self.world is not None:
            world, self.world = self.world, None
            with self.stack:
                failure = None if self.broken else end(world, self.noise, 0)
            assert failure is None, failure.text


def _rule_for(operation: Operation) -> Any:
    def step(self: Programs, data: st.DataObject) -> None:
        self.step(operation, data)

    step.__name__ = operation.name
    return precondition(lambda self: self.world is not None)(rule(data=st.data())(step))


for _operation in OPERATIONS.values():
    if _operation.weight:  # else it belongs to the end
        setattr(Programs, _operation.name, _rule_for(_operation))


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    with listening():  # to what broken programs leave behind
        yield
        gc.unfreeze()
        gc.collect()


def test_any_program() -> None:
    run_state_machine_as_test(Programs, settings=BUDGET)


def test_a_planted_defect_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockLife, "prepare", lambda block, stream, access: 0)
    with pytest.raises(AssertionError, match=r"unordered access|instead of|nothing orders"):
        run_state_machine_as_test(
            Programs, settings=settings(BUDGET, max_examples=200, phases=[Phase.generate])
        )
