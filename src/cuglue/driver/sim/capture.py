"""Stream capture: work recorded as a graph instead of queued, and the graph run node by node.

Owns nodes, their dependencies, the rules for streams joining a capture, and the order check inside a graph. Must not
know handles or driver calls. A launch is one operation of its stream: its nodes carry the clock of the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from ..protocol import CaptureMode
from .hazards import Operation
from .memory import Allocation
from .queues import Queue, StillRunning
from .ranges import Range
from .shadow import Clock, Use, UseLog, join

Report = Callable[[str, Allocation, Range, Operation, Operation], None]


@dataclass(eq=False, slots=True)
class Node:
    """One recorded operation. It runs after the nodes numbered in ``after``."""

    name: str
    run: Callable[[], None]
    uses: tuple[tuple[Allocation, Use], ...]
    after: frozenset[int]
    memory: bool
    operation: Operation


@dataclass(eq=False, slots=True)
class Graph:
    """Recorded nodes, in the order of recording. ``owned`` is memory that the capture allocated."""

    device: int
    nodes: tuple[Node, ...]
    owned: tuple[Allocation, ...]
    holders: int = 1  # the graph's own handle and its executables


@dataclass(eq=False, slots=True)
class Capture:
    """A capture under way, begun on ``origin`` by the thread ``thread``."""

    origin: Queue
    mode: CaptureMode
    thread: int
    report: Report
    nodes: list[Node] = field(default_factory=list)
    owned: list[Allocation] = field(default_factory=list)
    invalid: bool = False
    _tails: dict[Queue, frozenset[int]] = field(default_factory=dict)
    _clocks: dict[Queue, Clock] = field(default_factory=dict)
    _logs: dict[Allocation, UseLog] = field(default_factory=dict)

    def include(self, queue: Queue) -> None:
        """Let ``queue`` record into this capture."""
        queue.capture = self
        self._tails.setdefault(queue, frozenset())
        self._clocks.setdefault(queue, {})

    @property
    def queues(self) -> list[Queue]:
        """The streams that record into this capture."""
        return list(self._tails)

    def add(
        self,
        queue: Queue,
        operation: Operation,
        run: Callable[[], None],
        touches: tuple[tuple[Allocation, Use], ...],
        memory: bool,
    ) -> None:
        """Record one operation of ``queue``, and report the uses inside this capture that it is not ordered with."""
        clock = self._clocks[queue]
        number = clock.get(queue.party, 0) + 1
        clock[queue.party] = number
        for allocation, use in touches:
            log = self._logs.setdefault(allocation, UseLog())
            own = use._replace(owner=queue.party, number=number)
            for old in log.add(own, clock, {}):
                self.report("unordered use inside a graph", allocation, use.range, old.operation, operation)
        self.nodes.append(Node(operation.name, run, touches, self._tails[queue], memory, operation))
        self._tails[queue] = frozenset((len(self.nodes) - 1,))

    def point(self, queue: Queue) -> tuple[Clock, frozenset[int]]:
        """Where ``queue`` is now, for an event."""
        return dict(self._clocks[queue]), self._tails[queue]

    def follow(self, queue: Queue, clock: Clock, tails: frozenset[int]) -> None:
        """Later nodes of ``queue`` come after that point; ``queue`` joins the capture if it was outside."""
        self.include(queue)
        join(self._clocks[queue], clock)
        self._tails[queue] |= tails

    def joined(self) -> bool:
        """True if every node leads back to the origin."""
        reached: set[int] = set()
        todo = list(self._tails[self.origin])
        while todo:
            index = todo.pop()
            if index not in reached:
                reached.add(index)
                todo.extend(self.nodes[index].after)
        return len(reached) == len(self.nodes)

    def leave(self) -> None:
        """All streams are ordinary ones again."""
        for queue in self._tails:
            queue.capture = None


class GraphRun:
    """One run of a graph: a step that does one node each time it is called, in any order the dependencies allow."""

    def __init__(self, graph: Graph, seed: Random) -> None:
        self._nodes = graph.nodes
        self._left = set(range(len(graph.nodes)))
        self._random = seed

    def __call__(self) -> None:
        able = [i for i in sorted(self._left) if not self._nodes[i].after & self._left]
        while able:
            index = able.pop(self._random.randrange(len(able)))
            try:
                self._nodes[index].run()
            except StillRunning:
                continue
            self._left.discard(index)
            break
        if self._left:
            raise StillRunning
        self._left = set(range(len(self._nodes)))  # a graph that contains this one may run it again
