"""Steps over captures: beginning, recording, ending, abandoning, replaying; and the last closes of a program."""

from __future__ import annotations

from typing import Any

from cuglue import CopyDescriptor, In, InOut, Out

from .buffer_steps import CAPTURE, apart, nbytes, pick
from .kernels import ADD, SCALE
from .memory import Memory, Piece, pattern
from .model import DONE, Boom, Call, Draw, GraphThing, Model, Outcome, Recording, Skip, Thing, need, operation

KINDS = ("buffer", "view")


@operation("captures", 6)
class begin:
    """A capture begins, after its stream was ordered after what will be recorded; perhaps with a warm-up."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = [n for n in m.named(*KINDS) if not m.things[n].piece.unwritten]
        if m.recording is not None or m.raw_seen or len(names) < 2:
            return None
        streams = [n for n, s in m.streams.items() if s.kind != "raw"]
        users = m.things[draw.choice(list(m.things))].piece.memory.users()
        if draw.number(2):  # what happens to memory that the capturing stream used is what can go wrong
            streams = [n for n in streams if n in users] or streams
        chosen = tuple(dict.fromkeys(draw.choice(names) for _ in range(3)))
        return m.fresh("g"), draw.choice(streams), chosen, draw.number(3) == 0

    @staticmethod
    def predict(m: Model, name: str, stream: str, names: tuple[str, ...], warm: bool) -> Outcome:
        need(m.recording is None and not m.raw_seen and not m.closed_runtime and not m.closed_resource)
        where = m.stream(stream)
        need(where in m.streams)
        found = [m.live(n, *KINDS) for n in names]
        if not found or any(t.piece.unwritten for t in found):
            raise Skip
        if warm:
            whole_device(m)
        ready = []
        for thing in found:
            if thing.piece.memory not in ready:
                ready.append(thing.piece.memory)
            m.use(thing.piece.memory, where, write=True)
        if warm:
            temporary = Piece(Memory(64), 0, 64)
            temporary.scale_from(found[0].piece, 3, 1)
            found[0].piece.scale_from(temporary, 1, 0)
        m.recording = Recording(name, where, ready)
        m.recording.warm = warm
        return DONE

    @staticmethod
    def perform(w: Any, name: str, stream: str, names: tuple[str, ...], warm: bool) -> None:
        where = w.stream(stream)
        with w.rt.command(*(InOut(w.names[n]) for n in names), stream=where) as cmd:
            for n in names:  # written in the name of the command, so that nothing counts as unwritten
                cmd.kernel(ADD, 1, 64, w.names[n], nbytes(w.names[n]), 0)
        w.recording_stream = where
        w.names[name] = capture = w.rt.capture(where)
        capture.__enter__()
        if warm:
            with capture.warmup():
                through(w, names[0], names[0], where, 3, 1)


def whole_device(m: Model) -> None:
    """Skip where memory cannot be had while a stream is prepared."""
    need(not m.whole_device)


def through(w: Any, x: str, y: str, where: Any, factor: int, offset: int) -> None:
    """``x`` to a temporary buffer of 64 bytes, and from there to ``y``."""
    source, target = w.names[x], w.names[y]
    with w.rt.empty(64, stream=where) as middle:
        w.rt.launch(SCALE, 1, 64, In(source), nbytes(source), Out(middle), 64, factor, offset, stream=where)
        w.rt.launch(SCALE, 1, 64, In(middle), 64, Out(target), nbytes(target), 1, 0, stream=where)


def recorded(m: Model, *names: str) -> tuple[Recording, list[Thing]]:
    """The capture under way, and operands that may be recorded."""
    recording = m.recording
    if recording is None:
        raise Skip
    found = [m.live(n, *KINDS) for n in names]
    for thing in found:
        memory = thing.piece.memory
        need(memory in recording.ready or memory in recording.writes)
        need(not thing.piece.unwritten)
    return recording, found


def pick_ready(m: Model, draw: Draw) -> str | None:
    """An operand that may be recorded."""
    if m.recording is None:
        return None
    known = [*m.recording.ready, *m.recording.writes]
    names = [n for n in m.named(*KINDS) if m.things[n].piece.memory in known]
    return draw.choice(names) if names else None


def note(recording: Recording, call: Call) -> None:
    """Remember recorded work."""
    recording.calls.append(call)
    if call.source is not None:
        recording.reads.append(call.source.memory)
        call.source.memory.readers.add(recording.stream)
    call.target.memory.note(recording.stream, write=True)
    recording.writes.append(call.target.memory)
    if call.target.memory not in recording.ready:
        recording.ready.append(call.target.memory)


@operation("captures", 12)
class record:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        x, y = pick_ready(m, draw), pick_ready(m, draw)
        how = draw.choice(("scale", "add", "write", "through"))
        return x and y and (x, y, how, 1 + 2 * draw.number(8), draw.number(250))

    @staticmethod
    def predict(m: Model, x: str, y: str, how: str, factor: int, offset: int) -> Outcome:
        recording, (source, target) = recorded(m, x, y)
        if how == "scale":
            need(apart(source.piece, target.piece))
        if how == "through":
            need(recording.warm and source.piece.memory is target.piece.memory)
            recording.warm = False  # the warm-up used one temporary buffer
        reads = how in ("scale", "through")
        note(recording, Call(how, source.piece if reads else None, target.piece, (factor, offset)))
        return DONE

    @staticmethod
    def perform(w: Any, x: str, y: str, how: str, factor: int, offset: int) -> None:
        where, target = w.recording_stream, w.names[y]
        if how == "scale":
            source = w.names[x]
            w.rt.launch(
                SCALE,
                1,
                64,
                In(source),
                nbytes(source),
                Out(target),
                nbytes(target),
                factor,
                offset,
                stream=where,
            )
        elif how == "add":
            w.rt.launch(ADD, 1, 64, InOut(target), nbytes(target), offset, stream=where)
        elif how == "write":
            size = nbytes(target)
            w.rt.command(stream=where).write_to_gpu(
                CopyDescriptor(target, (size,), (1,), 1), pattern(offset, size)
            )
        else:
            through(w, x, y, where, factor, offset)


@operation("captures", 2)
class forbidden:
    """What a capturing stream may not do; memory that it cannot have dooms the capture."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, *KINDS)
        handles = [n for n, h in m.handles.items() if not h.closed]
        how = draw.choice(("read", "sync", "allocate", "empty", "map"))
        if m.recording is None or name is None or (how == "map" and not handles):
            return None
        return how, draw.choice(handles) if how == "map" else name

    @staticmethod
    def predict(m: Model, how: str, name: str) -> Outcome:
        if m.recording is None:
            raise Skip
        if how == "map":
            need(name in m.handles and not m.handles[name].closed)
        else:
            m.live(name, *KINDS)
        if how == "allocate":
            need(m.resource in ("async", "direct", "budget", "layers"))
        if how == "empty":
            m.recording.doomed = True
        return CAPTURE

    @staticmethod
    def perform(w: Any, how: str, name: str) -> None:
        where = w.recording_stream
        if how == "read":
            w.rt.read(w.names[name], stream=where)
        elif how == "sync":
            w.rt.command(stream=where).sync()
        elif how == "allocate":
            w.resource.allocate(64, where)
        elif how == "empty":
            w.rt.empty(4096, stream=where)
        else:
            w.names[name].map(where)


def inputs(calls: list[Call]) -> list[Piece]:
    """The bytes that a graph reads before it writes them."""
    found: list[Piece] = []
    written: list[Piece] = []
    for call in calls:
        read = (
            call.source if call.name in ("scale", "through") else call.target if call.name == "add" else None
        )
        if read is not None and not any(
            w.memory is read.memory and w.start <= read.start and read.end <= w.end for w in written
        ):
            found.append(read)
        written.append(call.target)
    return found


@operation("captures", 8)
class end:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return (m.recording.name,) if m.recording is not None and m.recording.calls else None

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        recording = m.recording
        if recording is None or recording.name != name:
            raise Skip
        m.recording = None
        if recording.doomed:
            for call in recording.calls:
                call.target.spoil()
            return CAPTURE
        m.graphs[name] = GraphThing(recording.stream, recording.calls, inputs(recording.calls))
        return DONE

    @staticmethod
    def perform(w: Any, name: str) -> None:
        w.recording_stream = None
        w.names[name] = w.names.pop(name).end()


@operation("captures", 1)
class abandon:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return (m.recording.name,) if m.recording is not None else None

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        recording = m.recording
        if recording is None or recording.name != name:
            raise Skip
        m.recording = None
        for call in recording.calls:
            call.target.spoil()
        return DONE

    @staticmethod
    def perform(w: Any, name: str) -> None:
        w.recording_stream = None
        error = Boom()
        w.names.pop(name).__exit__(Boom, error, None)


@operation("captures", 14)
class replay:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = list(m.graphs)
        return (draw.choice(names), m.pick_stream(draw)) if names else None

    @staticmethod
    def predict(m: Model, name: str, stream: str | None) -> Outcome:
        need(name in m.graphs and not m.closed_runtime)
        graph = m.graphs[name]
        where = graph.home if stream is None else m.stream(stream)
        need(m.recording is None or m.recording.stream != where)
        for call in graph.calls:
            for piece in (call.source, call.target):
                if piece is not None:
                    m.idle(piece.memory)
        if any(piece.unwritten for piece in graph.inputs):
            for call in graph.calls:
                call.target.spoil()
            return Outcome(True)
        for call in graph.calls:
            run(call)
            if call.source is not None:
                m.use(call.source.memory, where, write=False)
        for call in graph.calls:
            call.target.written()
            m.use(call.target.memory, where, write=True)
        return Outcome(False)

    @staticmethod
    def perform(w: Any, name: str, stream: str | None) -> bool:
        return w.names[name].replay(w.stream(stream)) is not None


def run(call: Call) -> None:
    """What a recorded call does at a replay."""
    factor, offset = call.numbers
    if call.name == "add":
        call.target.add(offset)
    elif call.name == "write":
        call.target.write(pattern(offset, call.target.size))
    elif call.source is not None and call.name == "scale":
        call.target.scale_from(call.source, factor, offset)
    elif call.source is not None:
        middle = Piece(Memory(64), 0, 64)
        middle.scale_from(call.source, factor, offset)
        call.target.scale_from(middle, 1, 0)


@operation("closes", 2)
class close_graph:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return (draw.choice(list(m.graphs)),) if m.graphs else None

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        need(m.graphs.pop(name, None) is not None)
        return DONE

    @staticmethod
    def perform(w: Any, name: str) -> None:
        w.names.pop(name).close()


@operation("drops", 2)
class drop_graph:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return (draw.choice(list(m.graphs)),) if m.graphs else None

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        need(m.graphs.pop(name, None) is not None)
        return Outcome(maybe="ResourceWarning")

    @staticmethod
    def perform(w: Any, name: str) -> None:
        del w.names[name]
