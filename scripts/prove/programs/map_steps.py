"""Steps over graphics objects: registering, drawing, mapping, leaving and closing."""

from __future__ import annotations

from typing import Any

import cuglue
from cuglue import InOut

from .buffer_steps import pick
from .kernels import ADD
from .memory import Memory, Piece, pattern
from .model import DONE, Boom, Draw, Handle, Model, Outcome, Thing, need, operation

CLOSED = Outcome(error="ClosedError")
CONFLICT = Outcome(error="MapConflictError")
MODES = ("read", "read", "readonly", "write", "write", "overwrite")


def handle_of(m: Model, name: str) -> Handle:
    """A handle by its name."""
    need(name in m.handles)
    return m.handles[name]


def pick_handle(m: Model, draw: Draw, *, mapped: bool | None = None) -> str | None:
    """An open handle."""
    names = [n for n, h in m.handles.items() if not h.closed and mapped in (None, bool(h.maps))]
    return draw.choice(names) if names else None


def reachable(m: Model, h: Handle, stream: str | None) -> str:
    """The stream of a map, if no capture has to do with the object."""
    where = m.stream(stream)
    if m.recording is not None:
        users = h.streams | h.own.users() | (h.copy.users() if h.copy is not None else set())
        need(m.recording.stream not in users | {m.current})
    return where


def refused(m: Model, h: Handle, write: bool, alias: bool = False) -> Outcome | None:
    """Why a map is refused, if it is."""
    if h.closed:
        return CLOSED
    writers = any(m.things[name].writes for name in h.maps)
    if h.kind == "image" and not alias and (writers or (write and h.maps)):
        return CONFLICT
    return None


def enter(m: Model, h: Handle, handle: str, name: str, stream: str, mode: str, alias: bool = False) -> None:
    """A map of ``h``."""
    if h.kind == "image":
        if h.copy is None:
            h.copy = Memory(h.own.data.size)
            if mode != "overwrite":
                h.copy.take(h.own)
        elif alias and mode != "overwrite":
            h.copy.take(h.own)
    memory = h.copy if h.copy is not None else h.own
    thing = Thing("map", Piece(memory, 0, memory.data.size), stream, source=handle)
    thing.writes, thing.readonly = mode in ("write", "overwrite"), mode == "readonly"
    h.maps.append(name)
    h.streams |= {stream, m.current}
    m.use(memory, stream, write=False)
    m.things[name] = thing


def leave(m: Model, name: str, stream: str, *, publish: bool) -> Outcome:
    """The end of a map, on ``stream``."""
    thing = m.things[name]
    h = m.handles[thing.source]
    thing.closed = True
    h.maps.remove(name)
    h.streams |= thing.piece.memory.users() | {m.current, stream}
    if h.kind == "image" and thing.writes and publish and h.copy is not None:
        h.own.take(h.copy)
    exported = any(t.kind == "export" and t.source == name and not t.copied for t in m.things.values())
    if not h.maps:
        if h.kind == "image":
            h.copy = None
        h.own.unwritten[:] = False  # its owner may write it from now on, and nobody would tell us
        if h.kind == "buffer":
            h.own.writer, h.own.readers = None, set()
    for thing in m.things.values():
        if thing.kind == "export" and thing.source == name and not thing.copied:
            thing.closed = True
    return Outcome(warning="DanglingExportWarning" if exported and h.kind == "buffer" else "")


@operation("maps", 8)
class map_object:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick_handle(m, draw)
        alias = draw.number(6) == 0
        return name and (m.fresh("m"), name, m.pick_stream(draw), draw.choice(MODES), alias)

    @staticmethod
    def predict(m: Model, new: str, name: str, stream: str | None, mode: str, alias: bool) -> Outcome:
        h = handle_of(m, name)
        where = reachable(m, h, stream)
        no = refused(m, h, mode in ("write", "overwrite"), alias)
        if no is None:
            enter(m, h, name, new, where, mode, alias)
        return no or DONE

    @staticmethod
    def perform(w: Any, new: str, name: str, stream: str | None, mode: str, alias: bool) -> None:
        handle, where = w.names[name], w.stream(stream)
        if mode in ("write", "overwrite"):
            w.names[new] = handle.map_mut(where, overwrite=mode == "overwrite", alias=alias)
        else:
            w.names[new] = handle.map(where, readonly=mode == "readonly", alias=alias)


@operation("maps", 6)
class release:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "map")
        how = draw.choice(("release", "release", "raise", "cancel"))
        return name and (name, how, m.pick_stream(draw) if how == "release" else None)

    @staticmethod
    def predict(m: Model, name: str, how: str, stream: str | None) -> Outcome:
        thing = m.live(name, "map")
        h = m.handles[thing.source]
        where = m.stream(stream)
        reachable(m, h, None)
        m.idle(thing.piece.memory)
        found = leave(m, name, where, publish=how != "cancel")
        return found._replace(error="Boom") if how == "raise" else found

    @staticmethod
    def perform(w: Any, name: str, how: str, stream: str | None) -> None:
        found = w.names[name]
        if how == "cancel":
            found.cancel()
        elif how == "raise":
            with found:
                raise Boom
        else:
            found.release(w.stream(stream))


@operation("drops", 2)
class drop_map:
    """A map that nobody left goes with its last reference: it is left, and publishes, before the object's next call."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "map")
        return name and (name,)

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        thing = m.live(name, "map")
        h = m.handles[thing.source]
        need(not any(t.kind == "export" and t.source == name and not t.copied for t in m.things.values()))
        reachable(m, h, None)
        m.idle(thing.piece.memory)
        leave(m, name, thing.home, publish=True)
        del m.things[name]
        return Outcome(warning="ResourceWarning")

    @staticmethod
    def perform(w: Any, name: str) -> None:
        backing = w.names.pop(name)._life.backing
        w.collect()
        backing.call(int)


@operation("maps", 4)
class map_together:
    """Two handles mapped by one call, and left by one."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        one, other = pick_handle(m, draw), pick_handle(m, draw)
        if one is None or one == other:
            return None
        return (
            m.fresh("m"),
            m.fresh("m"),
            one,
            other,
            m.pick_stream(draw),
            draw.number(2) == 1,
            draw.number(250),
        )

    @staticmethod
    def predict(
        m: Model, a: str, b: str, one: str, other: str, stream: str | None, write: bool, number: int
    ) -> Outcome:
        h, g = handle_of(m, one), handle_of(m, other)
        need(one != other)
        where = reachable(m, h, stream)
        reachable(m, g, stream)
        no = refused(m, h, write) or refused(m, g, write)
        if no is not None:
            for own in h, g:  # the one that was not refused was mapped, and left again
                own.streams |= {where, m.current}
            return no
        for new, name, own in (a, one, h), (b, other, g):
            enter(m, own, name, new, where, "write" if write else "read")
            if write:
                m.things[new].piece.write(pattern(number, own.own.data.size))
                m.use(m.things[new].piece.memory, where, write=True)
            leave(m, new, where, publish=True)
            del m.things[new]
        return DONE

    @staticmethod
    def perform(
        w: Any, a: str, b: str, one: str, other: str, stream: str | None, write: bool, number: int
    ) -> None:
        with cuglue.map_all([w.names[one], w.names[other]], w.stream(stream), mutable=write) as maps:
            for found in maps if write else ():
                size = found.size
                w.rt.command(stream=w.stream(stream)).write_to_gpu(
                    cuglue.CopyDescriptor(found, (size,), (1,), 1), pattern(number, size)
                )


@operation("maps", 6)
class frames:
    """One or two handles mapped, written and left again and again on the current stream, as a renderer does it.

    From the second time on buffers go the short way of a plan. The last frame may be written on another stream.
    """

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = [n for n, h in m.handles.items() if not h.closed and not h.maps and h.kind != "external"]
        busy = m.recording.stream if m.recording is not None else None
        streams = [n for n, s in m.streams.items() if s.kind == "user" and n != busy]
        if not names or not streams:
            return None
        buffers = [n for n in names if m.handles[n].kind == "buffer"]
        chosen = tuple(buffers if len(buffers) > 1 and draw.number(4) else [draw.choice(names)])
        stream = draw.choice(streams)
        last = m.pick_stream(draw) if draw.number(2) else stream
        return chosen, stream, last, 2 + draw.number(3), draw.number(250)

    @staticmethod
    def predict(
        m: Model, names: tuple[str, ...], stream: str, last: str | None, count: int, number: int
    ) -> Outcome:
        need(stream in m.streams and m.streams[stream].kind == "user" and not m.closed_runtime)
        handles = [handle_of(m, name) for name in names]
        former, m.current = m.current, stream
        try:
            for h in handles:
                need(not h.closed and not h.maps and not h.own.unwritten.any())
                reachable(m, h, stream)
                reachable(m, h, last)
                m.idle(h.own)
            for name, h in zip(names, handles, strict=True):
                for frame in range(count):
                    enter(m, h, name, "frame", stream, "write")
                    piece = m.things["frame"].piece
                    piece.add(number)
                    m.use(piece.memory, m.stream(last if frame == count - 1 else stream), write=True)
                    leave(m, "frame", stream, publish=True)
                    del m.things["frame"]
        finally:
            m.current = former
        return Outcome(Piece(handles[0].own, 0, handles[0].own.data.size).holds())

    @staticmethod
    def perform(
        w: Any, names: tuple[str, ...], stream: str, last: str | None, count: int, number: int
    ) -> Any:
        handles = [w.names[name] for name in names]
        with w.current(stream):
            for frame in range(count):
                together = cuglue.map_all(handles, mutable=True) if len(handles) > 1 else None
                with together or handles[0].map_mut() as found:
                    for one in found if together else [found]:
                        where = w.stream(last if frame == count - 1 else stream)
                        w.rt.launch(ADD, 1, 64, InOut(one), one.size, number, stream=where)
            return handles[0].read()
