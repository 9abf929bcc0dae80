"""Random programs: they hold what they promise, they find defects that are planted, and make them small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from prove.programs import replay
from prove.programs.check import run
from prove.programs.generate import MINIMUM, STEPS, Program, generate
from prove.programs.mesa import MesaGraphics
from prove.programs.model import FEATURES, OPERATIONS, Outcome, Step
from prove.programs.report import many
from prove.programs.shrink import script, shrink, smallest

from cuglue.command.hostmem import HostBuffer
from cuglue.command.staging import DropQueue
from cuglue.command.storage import Storage
from cuglue.core.block import BlockLife
from cuglue.core.stream import Stream
from cuglue.driver.protocol import Access
from cuglue.graphics.images import ImageBacking
from cuglue.graphics.plan import Plan
from cuglue.memory.pool.resource import PoolResource


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_programs(first: int) -> None:
    tally = many(20, 1, 10_000 + first, real=False)
    assert tally.failures == [], tally.text()
    assert tally.programs == 20
    for feature, count in MINIMUM.items():
        assert tally.least[feature] >= count


@pytest.mark.gl
@pytest.mark.parametrize("seed", range(20_000, 20_005))
def test_programs_with_opengl(seed: int) -> None:
    verdict = run(generate(seed), graphics=MesaGraphics)
    assert verdict.failure is None, script(generate(seed), verdict.failure)


def test_every_program_has_its_steps_and_features() -> None:
    operations: Counter[str] = Counter()
    for seed in range(200):
        program = generate(seed)
        closing = [step.name for step in program.steps].index("close_runtime")
        features = Counter(OPERATIONS[step.name].feature for step in program.steps[:closing])
        assert closing >= STEPS
        assert all(features[feature] >= count for feature, count in MINIMUM.items())
        assert program == generate(seed)
        operations.update(step.name for step in program.steps)
    assert set(OPERATIONS) == set(operations), "no operation is out of reach"
    assert {operation.feature for operation in OPERATIONS.values()} == set(FEATURES)


def test_programs_go_the_short_way_of_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the random programs would say nothing of plans."""
    taken: Counter[tuple[str, bool]] = Counter()

    def counted(name: str) -> Any:
        method = getattr(Plan, name)

        def call(plan: Plan, *args: Any) -> Any:
            found = method(plan, *args)
            taken[name, len(plan.backings) > 1] += bool(found)
            return found

        return call

    for name in ("map", "leave"):
        monkeypatch.setattr(Plan, name, counted(name))
    for seed in range(100):
        run(generate(seed))
    assert min(taken["map", False], taken["leave", False]) >= 20, taken
    assert min(taken["map", True], taken["leave", True]) >= 2, taken


# --- defects ------------------------------------------------------------------------------------------------------
def sometimes_no_wait(method: Any) -> Any:
    def wait_for(stream: Stream, origin: Stream, seq: int) -> bool:
        return seq % 3 != 0 and bool(method(stream, origin, seq))

    return wait_for


def no_note_of_reads(method: Any) -> Any:
    def finish(block: Any, stream: Any, access: Access, *more: Any) -> None:
        if access & Access.WRITE:
            method(block, stream, access, *more)

    return finish


def nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def pinned_goes_at_once(method: Any) -> Any:
    def push(drops: DropQueue, thing: Any, nbytes: int) -> None:
        if not isinstance(thing, HostBuffer):  # else queued work writes over memory of Python's own
            method(drops, thing, nbytes)

    return push


def always_free(pool: Any, block: Any, stream: Any) -> bool:
    return True


DEFECTS: dict[str, tuple[type, str, Callable[[Any], Any], str]] = {
    "a wait is skipped now and then": (Stream, "wait_for", sometimes_no_wait, "hazard"),
    "reads are not noted": (BlockLife, "finish", no_note_of_reads, "hazard"),
    "memory is freed without a join": (BlockLife, "join_uses", lambda method: nothing, "hazard"),
    "what was written is not published": (ImageBacking, "publish", lambda method: nothing, "wrong bytes"),
    "a retired block is handed out": (PoolResource, "_order", lambda method: always_free, "hazard"),
    "pinned memory is let go at once": (DropQueue, "push", pinned_goes_at_once, "hazard"),
    "memory is kept": (Storage, "__del__", lambda method: nothing, "unexpected ResourceWarning"),
    "a capture is not refused": (Stream, "refuse_capture", lambda method: nothing, ""),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found_and_made_small(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, make, wanted = DEFECTS[defect]
    monkeypatch.setattr(kind, name, make(getattr(kind, name)))
    for seed in range(100):
        program = generate(seed)
        failure = run(program).failure
        if failure is not None and failure.kind.startswith(wanted):
            break
    else:
        pytest.fail("not found in 100 programs")
    small, failure = shrink(program, failure)
    text = script(small, failure)
    assert len(small.steps) <= 12, text
    assert failure.kind.startswith(wanted)
    with pytest.raises(AssertionError):
        exec(text.replace("scripts.prove", "prove"), {})
    monkeypatch.undo()
    exec(text.replace("scripts.prove", "prove"), {})  # without the defect the same program is right


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Outcome(error="ClosedError"), "no ClosedError"),
        (Outcome(warning="ResourceWarning"), "no ResourceWarning"),
        (Outcome(False), "None in place of False"),
    ],
)
def test_what_does_not_come_is_a_failure(
    outcome: Outcome, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OPERATIONS["collect"], "predict", staticmethod(lambda m: outcome))
    failure = run(Program(0, "async", (Step("collect", ()),))).failure
    assert failure is not None
    assert failure.kind == kind


# --- making small -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("needed", [{3}, {0, 19}, {4, 5, 6}, set(range(0, 20, 3))])
def test_the_smallest_part_that_fails(needed: set[int]) -> None:
    assert smallest(range(20), lambda part: needed <= set(part)) == sorted(needed)


# --- programs that failed once ------------------------------------------------------------------------------------
ONCE: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "a buffer on a raw stream, read elsewhere, outlives the stream": (
        "pool of sync",
        [
            ("raw_stream", "r1"),
            ("create", "b1", "r1", 96, 70),
            ("read", "f1", "b1", "own0", False),
            ("destroy_raw", "r1"),
            ("drop", "b1"),
            ("collect",),
        ],
    ),
    "a runtime is closed after a stream that it copied to": (
        "pool of sync",
        [
            ("raw_stream", "r1"),
            ("create", "b1", None, 256, 109),
            ("write", "b1", "r1", 84, "bytes"),
            ("destroy_raw", "r1"),
            ("close_runtime",),
        ],
    ),
    "a buffer on a raw stream outlives its resource": (
        "pool of sync",
        [("raw_stream", "r1"), ("create", "b1", "r1", 96, 131), ("close_resource",), ("drop", "b1")],
    ),
    "a future is dropped after its runtime was closed": (
        "pool of sync",
        [
            ("create", "b1", None, 512, 172),
            ("new_stream", "s1"),
            ("read", "f1", "b1", "s1", False),
            ("close_runtime",),
            ("drop_future", "f1"),
        ],
    ),
    "an object is written after a command failed to": (
        "budget",
        [
            ("create", "b1", None, 512, 3),
            ("register", "x1", "external", 256, 142),
            ("map_object", "m1", "x1", "own0", "read", False),
            ("batch", "f1", "b1", "m1", "own1", 208, "before"),
            ("write_object", "x1", "own0", 123, False),
            ("read", "f2", "m1", "own1", False),
            ("result", "f2"),
        ],
    ),
    "an image is mapped again after a command failed to write it": (
        "budget",
        [
            ("create", "b1", None, 512, 3),
            ("register", "h1", "image", 256, 142),
            ("map_object", "m1", "h1", "own0", "write", False),
            ("batch", "f1", "b1", "m1", "own1", 208, "before"),
            ("release", "m1", "cancel", None),
            ("map_object", "m2", "h1", "own0", "read", False),
            ("add", "m2", "own1", 5),
            ("read", "f2", "m2", "own1", False),
            ("result", "f2"),
        ],
    ),
    "the owner writes external memory after a command failed to": (
        "pool",
        [
            ("create", "b1", None, 96, 47),
            ("register", "x1", "external", 64, 109),
            ("map_object", "m1", "x1", "own0", "read", False),
            ("batch", "f1", "b1", "m1", "own0", 241, "before"),
            ("drop_map", "m1"),
            ("draw", "x1", 57),
            ("map_object", "m2", "x1", None, "read", True),
            ("read", "f2", "m2", "own0", False),
            ("result", "f2"),
        ],
    ),
    "a view is written while a copy was taken through another": (
        "budget",
        [
            ("create", "b1", "own0", 512, 104),
            ("view", "v1", "b1"),
            ("export", "e1", "v1", "asarray"),
            ("export", "e2", "v1", "numpy"),
            ("poke", "e1", 203),
            ("look_at_export", "e1"),
        ],
    ),
    "plain work does not end a use that goes on, on a stream that captures now": (
        "guard",
        [
            ("create", "b1", "own0", 96, 134),
            ("array", "a1", "own1", 256),
            ("use_array", "a1", "own0", 109),
            ("read", "f1", "a1", "own1", False),
            ("plain", "a1", "own1", 164),
            ("begin", "g1", "own0", ("b1",), False),
            ("use_array", "a1", None, 57),  # CaptureError
            ("abandon", "g1"),
            ("use_array", "a1", None, 57),
            ("read", "f2", "a1", "own1", False),
            ("result", "f2"),
        ],
    ),
    "a stream known by its number alone comes back to life in the cycle that it went with": (
        "async",
        [
            ("create", "b1", "own1", 512, 26),
            ("view", "v1", "b1"),
            ("register", "h1", "image", 128, 71),
            ("new_stream", "s1"),
            ("raw_stream", "r1"),
            ("array", "a1", "s1", 64),
            ("read", "f1", "a1", "r1", True),
            ("map_object", "m1", "h1", "s1", "read", False),
            ("batch", "f2", "v1", "a1", "s1", 122, "before"),
            ("read", "f3", "a1", None, False),
        ],
    ),
    "a block is used elsewhere while a stream captures on which a use of it goes on": (
        "layers",
        [
            ("create", "b1", "own0", 96, 134),
            ("allocate", "k1", "own0", 64),
            ("fill", "k1", "own1", 3, "use"),
            ("begin", "g1", "own1", ("b1",), False),
            ("fill", "k1", "own0", 4, "recorder"),  # CaptureError
            ("look_at_block", "k1", "own0", True),  # CaptureError
            ("record", "b1", "b1", "add", 1, 5),
            ("end", "g1"),
            ("fill", "k1", "own0", 5, "prepare"),
            ("look_at_block", "k1", "own0", True),
            ("replay", "g1", "own0"),
        ],
    ),
}


@pytest.mark.parametrize("name", ONCE)
def test_programs_that_failed_once(name: str) -> None:
    resource, steps = ONCE[name]
    for seed in range(3):
        replay(seed=seed, resource=resource, steps=steps)
