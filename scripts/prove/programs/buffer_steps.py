"""Steps over buffers: making, launching, copying, reading back, batches, and letting go."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuglue import CopyDescriptor, In, InOut, Out

from .kernels import ADD, SCALE
from .memory import Memory, Piece, pattern
from .model import DONE, Draw, Expected, Model, Outcome, Thing, need, operation, recent

SIZES = (64, 96, 256, 512)
OPERANDS = ("buffer", "view", "array", "map")
CAPTURE = Outcome(error="CaptureError")
CLOSED = Outcome(error="ClosedError")
UNWRITTEN = Outcome(error="UnwrittenError|SeveralErrors")


def ordered(m: Model, thing: Thing, stream: str) -> None:
    """Skip where a command over ``thing`` would have to wait for the stream that captures."""
    recording = m.recording
    if recording is not None and stream != recording.stream:
        if thing.kind == "map":
            need(recording.stream not in m.handles[thing.source].streams)
        if thing.kind == "array":
            need(recording.stream not in (m.current, thing.home))


def apart(one: Piece, other: Piece) -> bool:
    """Whether two pieces have no byte in common."""
    return one.memory is not other.memory or one.end <= other.start or other.end <= one.start


def pick(m: Model, draw: Draw, *kinds: str) -> str | None:
    """A live name of these kinds."""
    names = m.named(*kinds)
    return recent(draw, names) if names else None


def two(m: Model, draw: Draw) -> tuple[str, str] | None:
    """Two live operands."""
    names = m.named(*OPERANDS)
    return (recent(draw, names), recent(draw, names)) if len(names) > 1 else None


def scaled(m: Model, x: Thing, y: Thing, stream: str, factor: int, offset: int) -> Outcome:
    """What one launch of "scale" gives."""
    if y.readonly:
        return Outcome(error="UsageError")
    if x.piece.unwritten:
        y.piece.spoil()
        return Outcome(True)
    reach = m.reaches(x.piece.memory, stream, write=x.piece.memory is y.piece.memory)
    if not (reach and m.reaches(y.piece.memory, stream, write=True)):
        return CAPTURE
    y.piece.scale_from(x.piece, factor, offset)
    m.use(x.piece.memory, stream, write=False)
    m.use(y.piece.memory, stream, write=True)
    x.piece.memory.away = y.piece.memory.away = False
    return Outcome(False)


def launch_scale(w: Any, x: str, y: str, stream: str | None, factor: int, offset: int) -> bool:
    """The launch itself; True if it was skipped."""
    source, target = w.names[x], w.names[y]
    m, n = nbytes(source), nbytes(target)
    where = w.stream(stream)
    return w.rt.launch(SCALE, 1, 64, In(source), m, Out(target), n, factor, offset, stream=where) is not None


def nbytes(array: Any) -> int:
    """Bytes of any operand."""
    found = getattr(array, "nbytes", None)
    return int(array.layout.nbytes if found is None else found)


@operation("buffers", 3)
class create:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return m.fresh("b"), m.pick_stream(draw, raw=True), draw.choice(SIZES), draw.number(250)

    @staticmethod
    def predict(m: Model, name: str, stream: str | None, size: int, number: int) -> Outcome:
        home = room(m, stream)
        memory = Memory(size, pattern(number, size))
        memory.note(home, write=True)
        m.things[name] = Thing("buffer", Piece(memory, 0, size), home)
        return DONE

    @staticmethod
    def perform(w: Any, name: str, stream: str | None, size: int, number: int) -> None:
        w.names[name] = w.rt.create(pattern(number, size), stream=w.stream(stream))


def room(m: Model, stream: str | None) -> str:
    """The stream to allocate on, if that is possible now."""
    need(not m.closed_runtime and not m.closed_resource)
    if m.whole_device:
        m.outside()
    return m.stream(stream)


@operation("buffers", 1)
class empty:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return m.fresh("b"), m.pick_stream(draw), draw.choice(SIZES), draw.number(2) == 1

    @staticmethod
    def predict(m: Model, name: str, stream: str | None, size: int, bind: bool) -> Outcome:
        home = room(m, stream)
        memory = Memory(size)
        memory.note(home, write=True)
        m.things[name] = Thing("buffer", Piece(memory, 0, size), home)
        return DONE

    @staticmethod
    def perform(w: Any, name: str, stream: str | None, size: int, bind: bool) -> None:
        if bind:
            cmd = w.rt.command(stream=w.stream(stream))
            w.names[name] = w.rt.buffer(size)
            cmd.bind(cmd.reserve(size), w.names[name])
        else:
            w.names[name] = w.rt.empty(size, stream=w.stream(stream))


@operation("buffers", 2)
class part:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "buffer")
        return name and (m.fresh("b"), name, 16 * draw.number(3), 16)

    @staticmethod
    def predict(m: Model, new: str, name: str, start: int, end: int) -> Outcome:
        whole = m.live(name, "buffer")
        need(whole.piece.size >= start + end + 16)
        piece = Piece(whole.piece.memory, whole.piece.start + start, whole.piece.end - end)
        m.things[new] = Thing("buffer", piece, whole.home)
        return DONE

    @staticmethod
    def perform(w: Any, new: str, name: str, start: int, end: int) -> None:
        w.names[new] = w.names[name].part(start, end)


@operation("buffers", 8)
class scale:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = two(m, draw)
        return names and (*names, m.pick_stream(draw, raw=True), 1 + 2 * draw.number(8), draw.number(256))

    @staticmethod
    def predict(m: Model, x: str, y: str, stream: str | None, factor: int, offset: int) -> Outcome:
        where = m.stream(stream)
        need(not m.closed_runtime)
        source, target = m.live(x, *OPERANDS), m.live(y, *OPERANDS)
        need(apart(source.piece, target.piece))
        ordered(m, source, where)
        ordered(m, target, where)
        return scaled(m, source, target, where, factor, offset)

    perform = staticmethod(launch_scale)


@operation("buffers", 5)
class add:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, *OPERANDS)
        return name and (name, m.pick_stream(draw, raw=True), 1 + draw.number(255))

    @staticmethod
    def predict(m: Model, name: str, stream: str | None, value: int) -> Outcome:
        where = m.stream(stream)
        need(not m.closed_runtime)
        thing = m.live(name, *OPERANDS)
        ordered(m, thing, where)
        if thing.readonly:
            return Outcome(error="UsageError")
        if thing.piece.unwritten:
            thing.piece.spoil()
            return Outcome(True)
        if not m.reaches(thing.piece.memory, where, write=True):
            return CAPTURE
        thing.piece.add(value)
        m.use(thing.piece.memory, where, write=True)
        thing.piece.memory.away = False
        return Outcome(False)

    @staticmethod
    def perform(w: Any, name: str, stream: str | None, value: int) -> bool:
        array = w.names[name]
        skipped = w.rt.launch(ADD, 1, 64, InOut(array), nbytes(array), value, stream=w.stream(stream))
        return skipped is not None


@operation("buffers", 3)
class write:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "buffer", "view", "map")
        how = draw.choice(("bytes", "bytes", "pinned", "wrong size"))
        return name and (name, m.pick_stream(draw, raw=True), draw.number(250), how)

    @staticmethod
    def predict(m: Model, name: str, stream: str | None, number: int, how: str) -> Outcome:
        where = m.stream(stream)
        need(not m.closed_runtime)
        thing = m.live(name, "buffer", "view", "map")
        need(not thing.readonly)
        ordered(m, thing, where)
        if how == "wrong size":
            return Outcome(error="LayoutError")
        if not m.reaches(thing.piece.memory, where, write=True):
            return CAPTURE
        thing.piece.write(pattern(number, thing.piece.size))
        m.use(thing.piece.memory, where, write=True)
        return DONE

    @staticmethod
    def perform(w: Any, name: str, stream: str | None, number: int, how: str) -> None:
        array = w.names[name]
        size = nbytes(array)
        data: Any = pattern(number, size - (how == "wrong size"))
        cmd = w.rt.command(stream=w.stream(stream))
        if how == "pinned":
            aside = cmd.reserve_cpu(size)
            aside[...] = data
            data = aside
        cmd.write_to_gpu(CopyDescriptor(array, (size,), (1,), 1), data)
        if how == "bytes":
            data[...] = 0  # it was copied aside


def readable(m: Model, name: str, stream: str | None) -> tuple[Thing, str]:
    """An operand and a stream to read it on."""
    where = m.stream(stream)
    need(not m.closed_runtime)
    thing = m.live(name, *OPERANDS)
    ordered(m, thing, where)
    return thing, where


class Landing:
    """Host memory that a copy is on its way to, with the interface of a future."""

    def __init__(self, done: Any, target: Any) -> None:
        self._done = done
        self._target = target

    def result(self) -> Any:
        """The bytes, once they are there."""
        self._done.result()
        return self._target

    def done(self) -> bool:
        """Whether they are there."""
        return bool(self._done.done())


@operation("buffers", 5)
class read:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, *OPERANDS)
        return name and (m.fresh("f"), name, m.pick_stream(draw, raw=True), draw.number(3) == 0)

    @staticmethod
    def predict(m: Model, future: str, name: str, stream: str | None, into: bool) -> Outcome:
        thing, where = readable(m, name, stream)
        if thing.piece.unwritten:
            return UNWRITTEN
        if not m.reaches(thing.piece.memory, where, write=False):
            return CAPTURE
        m.use(thing.piece.memory, where, write=False)
        m.futures[future] = Expected(thing.piece.holds())
        thing.piece.memory.away = False
        return DONE

    @staticmethod
    def perform(w: Any, future: str, name: str, stream: str | None, into: bool) -> None:
        array, where = w.names[name], w.stream(stream)
        if into:
            cmd = w.rt.command(stream=where)
            size = nbytes(array)
            target = np.zeros(size, np.uint8)
            cmd.write_to_cpu(CopyDescriptor(array, (size,), (1,), 1), target)
            w.names[future] = Landing(cmd.sync(), target)
        else:
            w.names[future] = w.rt.read(array, stream=where)


@operation("buffers", 5)
class result:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return (draw.choice(list(m.futures)),) if m.futures else None

    @staticmethod
    def predict(m: Model, future: str) -> Outcome:
        need(future in m.futures)
        return Outcome(m.futures[future].value)

    @staticmethod
    def perform(w: Any, future: str) -> Any:
        return w.names[future].result()


@operation("buffers", 2)
class poll:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return (draw.choice(list(m.futures)),) if m.futures else None

    @staticmethod
    def predict(m: Model, future: str) -> Outcome:
        need(future in m.futures)
        return DONE

    @staticmethod
    def perform(w: Any, future: str) -> None:
        w.names[future].done()
