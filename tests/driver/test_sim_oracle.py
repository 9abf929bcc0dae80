"""The oracle against a slow one: random programs, judged by vector clocks and by paths among all operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cuglue.driver.protocol import Access, CopyKind
from cuglue.driver.sim import HazardError, SimDriver

STREAMS, EVENTS, BUFFERS, SIZE = 3, 3, 3, 64

stream = st.integers(0, STREAMS - 1)
event = st.integers(0, EVENTS - 1)
part = st.tuples(st.integers(0, BUFFERS - 1), st.sampled_from([0, 16]), st.sampled_from([16, 32, 48]))
actions = st.one_of(
    st.tuples(st.just("fill"), stream, part),
    st.tuples(st.just("copy"), stream, part, part),
    st.tuples(st.just("record"), event, stream),
    st.tuples(st.just("wait"), stream, event),
    st.tuples(st.just("sync"), stream),
    st.tuples(st.just("event_sync"), event),
    st.tuples(st.just("view"), part, st.booleans()),
    st.tuples(st.just("context"), event),
)


@dataclass
class Paths:
    """Who comes before whom, as sets of all predecessors: slow and plain."""

    uses: list[tuple[tuple[int, int, int], Access, frozenset[int], int]] = field(default_factory=list)
    known: list[set[int]] = field(
        default_factory=lambda: [set() for _ in range(STREAMS)]
    )  # before a stream's next
    events: list[frozenset[int]] = field(default_factory=lambda: [frozenset()] * EVENTS)
    host: set[int] = field(default_factory=set)
    number: int = 0
    unordered: set[tuple[int, int]] = field(default_factory=set)

    def use(self, parts: list[tuple[tuple[int, int, int], Access]], before: set[int], number: int) -> None:
        for where, access in parts:
            for other, other_access, _, earlier in self.uses:
                same = (
                    where[0] == other[0] and where[1] < other[1] + other[2] and other[1] < where[1] + where[2]
                )
                if (
                    same
                    and (access.writes or other_access.writes)
                    and earlier not in before
                    and earlier != number
                ):
                    self.unordered.add((earlier, number))

    def queue(self, stream: int, parts: list[tuple[tuple[int, int, int], Access]]) -> None:
        self.number += 1
        self.known[stream] |= self.host
        self.use(parts, self.known[stream], self.number)
        self.uses += [(w, a, frozenset(self.known[stream]), self.number) for w, a in parts]
        self.known[stream].add(self.number)


def clip(part: tuple[int, int, int]) -> tuple[int, int, int]:
    return part[0], part[1], min(part[2], SIZE - part[1])


def perform(sim: SimDriver, handles: dict[str, list[int]], action: tuple[Any, ...], paths: Paths) -> None:
    streams, events, buffers = handles["streams"], handles["events"], handles["buffers"]
    match action:
        case ("fill", s, part):
            b, offset, n = clip(part)
            sim.fill_async(buffers[b] + offset, paths.number % 256, n, streams[s])
            paths.queue(s, [((b, offset, n), Access.WRITE)])
        case ("copy", s, to, source):
            (tb, to_offset, n), (sb, from_offset, m) = clip(to), clip(source)
            n = min(n, m)
            if tb == sb:
                return
            sim.copy_async(buffers[tb] + to_offset, buffers[sb] + from_offset, n, CopyKind.D2D, streams[s])
            paths.queue(s, [((sb, from_offset, n), Access.READ), ((tb, to_offset, n), Access.WRITE)])
        case ("record", e, s):
            sim.event_record(events[e], streams[s])
            paths.events[e] = frozenset(paths.known[s])
        case ("wait", s, e):
            sim.stream_wait_event(streams[s], events[e])
            paths.known[s] |= paths.events[e]
        case ("sync", s):
            sim.stream_synchronize(streams[s])
            paths.host |= paths.known[s]
        case ("event_sync", e):
            sim.event_synchronize(events[e])
            paths.host |= paths.events[e]
        case ("context", e):
            sim.context_record(events[e], 0)
            paths.events[e] = frozenset(set().union(*paths.known))
        case ("view", part, writable):
            b, offset, n = clip(part)
            sim.host_view(buffers[b] + offset, n, writable)
            access = Access.READ_WRITE if writable else Access.READ
            paths.use([((b, offset, n), access)], paths.host, -1)


@settings(max_examples=400, deadline=None)
@given(st.lists(actions, min_size=4, max_size=40), st.integers(0, 1000))
def test_a_hazard_is_found_if_and_only_if_there_is_one(program: list[tuple[Any, ...]], seed: int) -> None:
    sim, paths = SimDriver(seed), Paths()
    handles = {
        "streams": [sim.stream_create(0) for _ in range(STREAMS)],
        "events": [sim.event_create(0) for _ in range(EVENTS)],
        "buffers": [sim.malloc(SIZE, 0) for _ in range(BUFFERS)],
    }
    for action in program:
        try:
            perform(sim, handles, action, paths)
        except HazardError:
            pass
        assert bool(sim.hazards) == bool(paths.unordered), action
        if paths.unordered:
            return


@settings(max_examples=100, deadline=None)
@given(st.lists(actions, min_size=4, max_size=40), st.integers(0, 1000), st.integers(0, 1000))
def test_programs_without_hazards_give_the_same_bytes_in_every_order(
    program: list[tuple[Any, ...]], one: int, other: int
) -> None:
    results = []
    for seed in (one, other):
        sim, paths = SimDriver(seed), Paths()
        handles = {
            "streams": [sim.stream_create(0) for _ in range(STREAMS)],
            "events": [sim.event_create(0) for _ in range(EVENTS)],
            "buffers": [sim.malloc(SIZE, 0) for _ in range(BUFFERS)],
        }
        for number, ptr in enumerate(handles["buffers"]):
            sim.fill_async(ptr, number + 10, SIZE, handles["streams"][0])
        sim.device_synchronize(0)
        for action in program:
            try:
                perform(sim, handles, action, paths)
            except HazardError:
                break
            if paths.unordered:
                break
        if paths.unordered:
            return
        sim.device_synchronize(0)
        results.append([bytes(sim.host_view(ptr, SIZE, False)) for ptr in handles["buffers"]])
    assert results[0] == results[1]
