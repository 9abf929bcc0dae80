"""What is alive in a random program, and what each step must give: the rules, without the library.

Owns the names of a program and the state behind them: streams, buffers, blocks, arrays, handles, maps, exports, futures
and graphs. The rules of each step stand with the step (``*_steps``). Shares no code with the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from .memory import Memory, Piece

T = TypeVar("T")
Arguments = tuple[Any, ...]


class Skip(Exception):
    """The step means nothing here: what it names was taken out of the program, or is in another state."""


class Boom(Exception):
    """What a user's code raises in the middle of something."""


class Outcome(NamedTuple):
    """What a step must give.

    Attributes:
        value: a :class:`~.memory.Known`, or any value to be equal to; None: not looked at.
        error: name of the error that it must raise.
        warning: name of a warning that it must issue.
        maybe: name of a warning that it may issue.
    """

    value: Any = None
    error: str = ""
    warning: str = ""
    maybe: str = ""


DONE = Outcome()


class Draw(Protocol):
    """Where choices come from: a seed, or hypothesis."""

    def choice(self, options: Sequence[T]) -> T:
        """One of them."""

    def number(self, below: int) -> int:
        """0 to ``below`` - 1."""


@dataclass(eq=False, slots=True)
class StreamThing:
    """A stream: "own" of the runtime, "user" an object of the driver, "raw" a handle without an object."""

    kind: str


@dataclass(eq=False, slots=True)
class Thing:
    """Memory with a name: "buffer", "view", "array", "block", "map" or "export".

    Attributes:
        closed: closed, released, freed.
        home: stream it was made on.
        source: what it was made from: of an export its view or map, of a map its handle.
        readonly: may not be written. writes: of a map, leaving publishes. copied: of an export, memory of its own.
    """

    kind: str
    piece: Piece
    home: str = ""
    closed: bool = False
    source: Any = None
    readonly: bool = False
    writes: bool = False
    copied: bool = False


@dataclass(eq=False, slots=True)
class Handle:
    """A registered object: "buffer" (mapped itself), "image" (mapped as a copy), "external" (always there).

    Attributes:
        own: what the object holds.
        copy: what live maps of an image see.
        maps: names of live maps.
        streams: every stream that ever used it.
    """

    kind: str
    own: Memory
    copy: Memory | None = None
    closed: bool = False
    maps: list[str] = field(default_factory=list)
    streams: set[str] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Expected:
    """A future, or host memory that a copy is on its way to."""

    value: Any
    seen: bool = False


class Call(NamedTuple):
    """One recorded launch."""

    name: str
    source: Piece | None
    target: Piece
    numbers: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Recording:
    """A capture under way.

    Attributes:
        ready: memory that the stream is ordered after already.
        reads, writes: memory that recorded work uses.
        doomed: there will be no graph.
        warm: a temporary buffer of the warm-up is left.
    """

    name: str
    stream: str
    ready: list[Memory]
    calls: list[Call] = field(default_factory=list)
    reads: list[Memory] = field(default_factory=list)
    writes: list[Memory] = field(default_factory=list)
    doomed: bool = False
    warm: bool = False


@dataclass(eq=False, slots=True)
class GraphThing:
    """A graph that can be replayed."""

    home: str
    calls: list[Call]
    inputs: list[Piece]


class Model:
    """The state of a program.

    Args:
        resource: name of the memory resource (:data:`.world.RESOURCES`).
        tracking: it is told of uses of its blocks.
        whole_device: its driver calls concern the whole device.
    """

    def __init__(self, resource: str, *, tracking: bool, whole_device: bool) -> None:
        self.resource = resource
        self.tracking = tracking
        self.whole_device = whole_device
        self.raw_allowed = True
        self.quiet = False  # steps that block the host are chosen less often
        self.streams: dict[str, StreamThing] = {f"own{i}": StreamThing("own") for i in range(2)}
        self.things: dict[str, Thing] = {}
        self.handles: dict[str, Handle] = {}
        self.futures: dict[str, Expected] = {}
        self.graphs: dict[str, GraphThing] = {}
        self.recording: Recording | None = None
        self.current = ""  # name of the current stream; "" is the legacy default one
        self.closed_runtime = False
        self.closed_resource = False
        self.raw_seen = False
        self._names = 0

    # --- names ----------------------------------------------------------------------------------------------------
    def fresh(self, prefix: str) -> str:
        """A name that was never given."""
        self._names += 1
        return f"{prefix}{self._names}"

    def named(self, *kinds: str, closed: bool = False) -> list[str]:
        """Names of things of these kinds."""
        return [n for n, t in self.things.items() if t.kind in kinds and t.closed is closed]

    def thing(self, name: str, *kinds: str) -> Thing:
        """What a name stands for; Skip if it is gone or of another kind."""
        found = self.things.get(name)
        if found is None or (kinds and found.kind not in kinds):
            raise Skip(name)
        return found

    def live(self, name: str, *kinds: str) -> Thing:
        """:meth:`thing`, not closed."""
        found = self.thing(name, *kinds)
        need(not found.closed)
        return found

    def stream(self, name: str | None) -> str:
        """``name`` (None: the current stream), if work may be queued there now."""
        if name is None:
            name = self.current
        elif name not in self.streams:
            raise Skip(name)
        need(self.recording is None or self.recording.stream != name)
        return name

    def elsewhere(self) -> str:
        """A stream that does not capture."""
        recording = self.recording
        return next(n for n in self.streams if recording is None or n != recording.stream)

    # --- order ----------------------------------------------------------------------------------------------------
    def reaches(self, memory: Memory, stream: str, *, write: bool) -> bool:
        """Whether work on ``stream`` can be ordered with what used ``memory``: not if that is recorded work, or goes on
        on the capturing stream.

        Raises:
            Skip: it is earlier work of the capturing stream, which may be waited for if somebody asked before.
        """
        recording = self.recording
        if recording is None or stream == recording.stream:
            return True
        if memory in recording.writes or (write and memory in recording.reads):
            return False
        if recording.stream in memory.going_on and (write or memory.going_on[recording.stream]):
            return False
        need(memory.writer != recording.stream and not (write and recording.stream in memory.readers))
        return True

    def use(self, memory: Memory, stream: str, *, write: bool, ends: bool = True) -> None:
        """Note a use by work on ``stream``."""
        memory.note(stream, write=write, ends=ends)
        if self.recording is not None:
            self.recording.ready = [m for m in self.recording.ready if m is not memory]

    def idle(self, memory: Memory) -> None:
        """Skip, if a capture under way has to do with ``memory``."""
        recording = self.recording
        if recording is not None:
            need(recording.stream not in memory.users())
            need(memory not in recording.reads and memory not in recording.writes)

    def outside(self) -> None:
        """Skip, while a capture is under way."""
        need(self.recording is None)

    # --- choices --------------------------------------------------------------------------------------------------
    def pick_stream(self, draw: Draw, *, raw: bool = False) -> str | None:
        """A stream that does not capture; sometimes None, which is the current one."""
        busy = self.recording.stream if self.recording is not None else None
        names = [n for n, s in self.streams.items() if n != busy and (raw or s.kind != "raw")]
        if busy != self.current:
            names.append("")
        found = draw.choice(names)
        return found or None


def recent(draw: Draw, names: Sequence[T]) -> T:
    """One of them, rather a newer one: what is used again soon is what can go wrong."""
    return names[max(draw.number(len(names)), draw.number(len(names)))]


def need(condition: bool) -> None:
    """Skip unless ``condition``."""
    if not condition:
        raise Skip


class Operation(Protocol):
    """One kind of step."""

    name: str
    feature: str
    weight: int

    def choose(self, m: Model, draw: Draw) -> Arguments | None:
        """Arguments of such a step now; None if there is none."""

    def predict(self, m: Model, *args: Any) -> Outcome:
        """Do it in the model. Raises Skip where it means nothing; then nothing has changed."""

    def perform(self, w: Any, *args: Any) -> Any:
        """Do it with the library."""


OPERATIONS: dict[str, Operation] = {}
#: Steps in which the host waits for the device.
BLOCKING = frozenset({
    "result", "synchronize", "clean_up", "look_at_block", "look_at_object", "look_at_export", "export", "poke",
    "read_object", "write_object", "wait_for_stream", "reap", "begin",
})  # fmt: skip
FEATURES = ("maps", "blocks", "buffers", "captures", "streams", "exports", "closes", "drops")


def operation(feature: str, weight: int = 2) -> Callable[[type], type]:
    """Make an operation of a class with three static methods."""

    def add(cls: type) -> type:
        made: Any = cls
        made.name, made.feature, made.weight = cls.__name__, feature, weight
        OPERATIONS[cls.__name__] = made
        return cls

    return add


class Step(NamedTuple):
    """One step of a program: an operation and its arguments."""

    name: str
    args: Arguments

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.args))})"


def choices(m: Model, draw: Draw, feature: str | None = None) -> Iterator[Step]:
    """Possible steps, of one feature or any, in a drawn order; not always all there are."""
    deck = _decks.get(feature)
    if deck is None:
        fitting = [o for o in OPERATIONS.values() if feature in (None, o.feature)]
        deck = _decks[feature] = [o for o in fitting for _ in range(o.weight)]
    tried: list[Operation] = []
    for _ in range(12):
        chosen = draw.choice(deck)
        if m.quiet and chosen.name in BLOCKING and draw.number(6):
            continue  # each wait of the host hides what no stream waits for
        if chosen not in tried:
            tried.append(chosen)
            args = chosen.choose(m, draw)
            if isinstance(args, tuple):
                yield Step(chosen.name, args)


_decks: dict[str | None, list[Operation]] = {}
