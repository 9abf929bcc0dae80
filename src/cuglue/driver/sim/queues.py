"""Queued work: steps in streams, marks that other streams wait for, and the seeded scheduler that runs them.

Owns when things really run. Must not know what a step does, or whether its order is right: that is judged when work
is queued (:mod:`core`), never by the order that the seed happens to choose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Generic, TypeVar

from .hazards import Site
from .shadow import Clock

if TYPE_CHECKING:
    from .capture import Capture

T = TypeVar("T")
STEP_MILLISECONDS = 0.001  # of the virtual clock


class StillRunning(Exception):
    """Raised by a ``sim`` function (or a step) that is not done yet: it is called again at a later step."""


class Mark:
    """A point in a stream: reached when everything queued before it has run."""

    __slots__ = ("_issued", "_queue")

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._issued = queue.issued

    @property
    def reached(self) -> bool:
        """True once the stream ran up to here."""
        return self._queue.finished >= self._issued


@dataclass(eq=False, slots=True)
class Record:
    """What an event (or semaphore) stands for: marks to reach and the clock that a waiter joins."""

    marks: tuple[Mark, ...]
    clock: Clock
    capture: Capture | None = None
    tails: frozenset[int] = frozenset()  # of a captured record: nodes it follows
    time: float | None = None  # virtual milliseconds at which it ran

    @property
    def reached(self) -> bool:
        """True once all work it covers has run."""
        return all(mark.reached for mark in self.marks)


@dataclass(eq=False, slots=True)
class Step:
    """One piece of queued work. It may run when ``ready`` says so."""

    name: str
    site: Site
    run: Callable[[], None]
    ready: Callable[[], bool] | None = None


@dataclass(eq=False, slots=True)
class Queue:
    """A stream: its party in the clocks, what it waited for so far, and its steps."""

    handle: int
    device: int
    party: int
    clock: Clock = field(default_factory=dict)
    steps: deque[Step] = field(default_factory=deque)
    issued: int = 0
    finished: int = 0
    capture: Capture | None = None
    running: bool = False
    closed: bool = False  # destroyed: forgotten once it is empty

    def push(self, step: Step) -> None:
        """Put a step at the end."""
        self.steps += (step,)  # and no call up to the next line: an interrupt would part the two
        self.issued += 1

    def tick(self) -> int:
        """Number of the operation that is being queued now."""
        count = self.clock.get(self.party, 0) + 1
        self.clock[self.party] = count
        return count


class Handles(Generic[T]):
    """Handles of one kind of object. A freed handle is the next one given out."""

    def __init__(self, first: int, stride: int) -> None:
        self._next = first
        self._stride = stride
        self._free: list[int] = []
        self._objects: dict[int, T] = {}
        #: The object, or None for a handle that names nothing.
        self.get = self._objects.get

    def reserve(self) -> int:
        """A handle for :meth:`put`."""
        if self._free:
            return self._free.pop()
        handle, self._next = self._next, self._next + self._stride
        return handle

    def put(self, handle: int, value: T) -> None:
        """Let ``handle`` name ``value``."""
        self._objects[handle] = value

    def add(self, value: T) -> int:
        """Give ``value`` a handle."""
        handle = self.reserve()
        self.put(handle, value)
        return handle

    def pop(self, handle: int) -> None:
        """Forget the object; the handle is given out next."""
        del self._objects[handle]
        self._free.append(handle)

    def values(self) -> list[T]:
        """All objects alive."""
        return list(self._objects.values())

    def __len__(self) -> int:
        return len(self._objects)


class Scheduler:
    """Runs steps, one at a time, of a stream that the seed chooses among those that can go on."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._queues: list[Queue] = []
        self.time = 0.0

    def add(self, queue: Queue) -> None:
        """Let ``queue`` take part."""
        self._queues.append(queue)

    def retire(self, queue: Queue) -> None:
        """Forget ``queue`` once it is empty."""
        queue.closed = True
        if not queue.steps:
            self._queues.remove(queue)

    def step(self) -> bool:
        """Run one step; False if no stream can go on."""
        able = [q for q in self._queues if q.steps and not q.running]
        while able:
            queue = able.pop(int(self._random.random() * len(able)))
            head = queue.steps[0]
            if head.ready is not None and not head.ready():
                continue
            queue.running = True
            try:
                head.run()
            except StillRunning:
                continue
            finally:
                queue.running = False
            if queue.steps and queue.steps[0] is head:  # a fault threw the work away
                del queue.steps[0]  # as in push: a step less than finished was waited for ever
                queue.finished += 1
            if queue.closed and not queue.steps:
                self._queues.remove(queue)
            self.time += STEP_MILLISECONDS
            return True
        return False

    def queues(self, device: int) -> list[Queue]:
        """The streams of a device, destroyed ones with work left included."""
        return [q for q in self._queues if q.device == device]

    def drop_work(self, device: int) -> None:
        """Throw away what is queued on a poisoned device."""
        for queue in self._queues:
            if queue.device == device:
                queue.finished += len(queue.steps)
                queue.steps.clear()

    def blocked(self) -> list[Step]:
        """The step at the head of each stream that has one."""
        return [q.steps[0] for q in self._queues if q.steps]
