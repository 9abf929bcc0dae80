"""Makes programs from seeds: so many steps, of so many kinds, and everything closed in some order at the end.

Owns the mix. Must not know the library: a program is made with the model alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple, TypeVar

from . import (
    array_steps,
    block_steps,
    buffer_steps,
    capture_steps,
    command_steps,
    ending_steps,
    export_steps,
    map_steps,
    object_steps,
    stream_steps,
)
from .model import FEATURES, OPERATIONS, Model, Outcome, Skip, Step, choices
from .world import RESOURCES, TRACKING, WHOLE_DEVICE

T = TypeVar("T")
#: Steps of each feature that every program has at least, not counting its end.
MINIMUM = {
    "maps": 6, "blocks": 4, "buffers": 8, "captures": 4, "streams": 3, "exports": 4, "closes": 2, "drops": 3,
}  # fmt: skip
#: Steps that every program has at least, not counting its end.
STEPS = 40
_LONGEST_CAPTURE = 7
#: They fill OPERATIONS.
MODULES = (
    array_steps, block_steps, buffer_steps, capture_steps, command_steps, ending_steps, export_steps, map_steps,
    object_steps, stream_steps,
)  # fmt: skip


class Program(NamedTuple):
    """Steps, and the world that they run in."""

    seed: int
    resource: str
    steps: tuple[Step, ...]


class Seeded:
    """Choices from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def number(self, below: int) -> int:
        return int(self._random.random() * below)


def model_for(resource: str) -> Model:
    """A model of a world with that resource."""
    return Model(resource, tracking=resource in TRACKING, whole_device=resource in WHOLE_DEVICE)


class Writer:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self.draw = Seeded(seed)
        self.seed = seed
        names = list(RESOURCES)
        self.resource = names[seed % len(names)]
        self.model = model_for(self.resource)
        self.model.raw_allowed = False
        self.model.quiet = bool(seed // len(names) % 4)
        self.steps: list[Step] = []
        self.wanted: list[Outcome] = []
        self.features: Counter[str] = Counter()
        self._began = 0

    def add(self, step: Step) -> bool:
        """Add a step, if it means something now."""
        try:
            outcome = OPERATIONS[step.name].predict(self.model, *step.args)
        except Skip:
            return False
        self.steps.append(step)
        self.wanted.append(outcome)
        self.features[OPERATIONS[step.name].feature] += 1
        if step.name == "begin":
            self._began = len(self.steps)
        return True

    def add_some(self, feature: str | None) -> bool:
        """Add a step of a feature, if there is one now."""
        return any(self.add(step) for step in choices(self.model, self.draw, feature))

    def end_capture(self) -> None:
        """End what is captured."""
        recording = self.model.recording
        if recording is not None:
            self.add(Step("end" if recording.calls else "abandon", (recording.name,)))

    def body(self) -> None:
        """The steps of the mix, in a drawn order, and more where those were not possible."""
        deck = [feature for feature, count in MINIMUM.items() for _ in range(count)]
        deck += [self.draw.choice(FEATURES) for _ in range(STEPS + 2 - len(deck))]
        for kind in ("create", "create"):
            operation = OPERATIONS[kind]
            args = operation.choose(self.model, self.draw)
            if args is not None:
                self.add(Step(kind, args))
        for _ in range(20 * STEPS):
            if self.model.recording is not None and len(self.steps) - self._began > _LONGEST_CAPTURE:
                self.end_capture()
            if not deck:
                if len(self.steps) >= STEPS and all(self.features[f] >= n for f, n in MINIMUM.items()):
                    break
                self.add_some(next((f for f, n in MINIMUM.items() if self.features[f] < n), None))
                continue
            if self.model.recording is not None and self.draw.number(2):
                if self.add_some("captures") and "captures" in deck:
                    deck.remove("captures")
                continue
            index = self.draw.number(len(deck))
            if self.add_some(deck[index]):
                deck[index] = deck[-1]
                deck.pop()
            elif self.draw.number(2):
                self.add_some("buffers")
            enough = self.features["captures"] >= MINIMUM["captures"]
            self.model.raw_allowed = self.seed % 3 == 0 and enough and self.model.recording is None

    def last(self) -> None:
        """Everything is looked at, and then closed or dropped in a drawn order."""
        self.end_capture()
        model, draw = self.model, self.draw
        seen: list[object] = []
        for name in model.named(*buffer_steps.OPERANDS):
            piece, future = model.things[name].piece, model.fresh("f")
            where = model.pick_stream(draw)
            if (piece.memory, piece.start) not in seen and self.add(
                Step("read", (future, name, where, False))
            ):
                self.add(Step("result", (future,)))
            seen.append((piece.memory, piece.start))
        ends = [Step("drop_future", (f,)) for f in model.futures if draw.number(2)]
        for name, thing in model.things.items():
            if thing.kind == "map":
                ends.append(Step("release", (name, "release", None)))
            elif thing.kind == "block":
                ends.append(Step("deallocate", (name,)))
            else:
                close = thing.kind == "buffer" and draw.number(2)
                ends.append(Step("close_buffer" if close else "drop", (name,)))
        ends += [Step(("close_graph", "drop_graph")[draw.number(2)], (name,)) for name in model.graphs]
        ends += [Step("close_handle", (name,)) for name in model.handles]
        ends += [Step("drop_stream", (name,)) for name, s in model.streams.items() if s.kind == "user"]
        ends += [Step("destroy_raw", (name,)) for name, s in model.streams.items() if s.kind == "raw"]
        order = []
        while ends:
            order.append(ends.pop(draw.number(len(ends))))
        order.insert(draw.number(len(order) + 1), Step("close_runtime", ()))
        late = draw.number(2) * draw.number(len(order) // 3 + 1)
        order.insert(len(order) - late, Step("close_resource", ()))
        looks = [Step("look_at_object", (name,)) for name in model.handles]
        for step in (*order, *looks):
            self.add(step)


def generate(seed: int) -> Program:
    """The program of a seed."""
    return generate_with_outcomes(seed)[0]


def generate_with_outcomes(seed: int) -> tuple[Program, list[Outcome]]:
    """The program of a seed, and its :func:`outcomes`, which the model gave when it was written."""
    writer = Writer(seed)
    writer.body()
    writer.last()
    return Program(seed, writer.resource, tuple(writer.steps)), writer.wanted


def outcomes(program: Program) -> Iterator[Outcome | None]:
    """What each step must give; None for one that means nothing where it stands."""
    model = model_for(program.resource)
    for step in program.steps:
        try:
            yield OPERATIONS[step.name].predict(model, *step.args)
        except Skip:
            yield None
