"""Steps over blocks of a memory resource."""

from __future__ import annotations

from typing import Any

import numpy as np

import cuglue
from cuglue import Access, LaunchRecorder, as_stream
from cuglue.driver.protocol import CopyKind

from .buffer_steps import CAPTURE, SIZES, pick, room
from .memory import Memory, Piece
from .model import DONE, Draw, Model, Outcome, Thing, need, operation

MISUSE = Outcome(error="StreamMisuse")


def handle_of(w: Any, stream: str | None) -> int:
    """The driver's number of a stream."""
    handle: int = as_stream(w.stream(stream), driver=w.driver).handle
    return handle


@operation("blocks", 3)
class allocate:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return m.fresh("k"), m.pick_stream(draw, raw=True), draw.choice(SIZES)

    @staticmethod
    def predict(m: Model, name: str, stream: str | None, size: int) -> Outcome:
        home = room(m, stream)
        memory = Memory(size)
        memory.note(home, write=True)
        m.things[name] = Thing("block", Piece(memory, 0, size), home)
        return DONE

    @staticmethod
    def perform(w: Any, name: str, stream: str | None, size: int) -> None:
        w.names[name] = w.resource.allocate(size, w.stream(stream), "program")


def told(m: Model, name: str, stream: str | None, kind: str = "block") -> tuple[Thing, str]:
    """A block or array, and a stream on which work with it may be told of."""
    where = m.stream(stream)
    thing = m.live(name, kind)
    if m.recording is not None:  # its home stream is waited for, whatever the uses
        need(thing.home != m.recording.stream)
    return thing, where


@operation("blocks", 4)
class fill:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "block")
        how = draw.choice(("recorder", "prepare", "use"))
        return name and (name, m.pick_stream(draw, raw=True), draw.number(256), how)

    @staticmethod
    def predict(m: Model, name: str, stream: str | None, value: int, how: str) -> Outcome:
        thing, where = told(m, name, stream)
        if how != "use" and not m.tracking:
            return MISUSE
        if not m.reaches(thing.piece.memory, where, write=True):
            return CAPTURE
        thing.piece.fill(value)
        m.use(thing.piece.memory, where, write=True, ends=how != "use")
        return DONE

    @staticmethod
    def perform(w: Any, name: str, stream: str | None, value: int, how: str) -> None:
        block, where = w.names[name], w.stream(stream)
        number = handle_of(w, stream)
        if how == "recorder":
            with LaunchRecorder(where).write(block):
                w.driver.fill_async(block.ptr, value, block.nbytes, number)
        elif how == "prepare":
            w.resource.prepare_block_use(block.id, where, Access.WRITE)
            w.driver.fill_async(block.ptr, value, block.nbytes, number)
            w.resource.finish_block_use(block.id, where, Access.WRITE)
        else:
            cuglue.use(block, where, Access.WRITE)
            w.driver.fill_async(block.ptr, value, block.nbytes, number)


@operation("blocks", 3)
class copy:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = m.named("block")
        found = names and (draw.choice(names), draw.choice(names))
        return found and (*found, m.pick_stream(draw, raw=True))

    @staticmethod
    def predict(m: Model, source: str, target: str, stream: str | None) -> Outcome:
        need(source != target)
        (one, where), (other, _) = told(m, source, stream), told(m, target, stream)
        if not m.tracking:
            return MISUSE
        reach = m.reaches(one.piece.memory, where, write=False)
        if not (m.reaches(other.piece.memory, where, write=True) and reach):
            return CAPTURE
        other.piece.copy_from(one.piece)
        m.use(one.piece.memory, where, write=False)
        m.use(other.piece.memory, where, write=True)
        return DONE

    @staticmethod
    def perform(w: Any, source: str, target: str, stream: str | None) -> None:
        one, other = w.names[source], w.names[target]
        with LaunchRecorder(w.stream(stream)).read(one).write(other):
            size = min(one.nbytes, other.nbytes)
            w.driver.copy_async(other.ptr, one.ptr, size, CopyKind.D2D, handle_of(w, stream))


@operation("blocks", 3)
class look_at_block:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "block")
        return name and (name, m.pick_stream(draw, raw=True), draw.number(2) == 1)

    @staticmethod
    def predict(m: Model, name: str, stream: str | None, record: bool) -> Outcome:
        thing, where = told(m, name, stream)
        if record and not m.tracking:
            return MISUSE
        if not m.reaches(thing.piece.memory, where, write=False):
            return CAPTURE
        m.use(thing.piece.memory, where, write=False, ends=record)
        return Outcome(thing.piece.holds())

    @staticmethod
    def perform(w: Any, name: str, stream: str | None, record: bool) -> Any:
        block, where = w.names[name], as_stream(w.stream(stream), driver=w.driver)
        host = np.zeros(block.nbytes, np.uint8)
        if record:
            w.resource.prepare_block_use(block.id, where, Access.READ)
            w.driver.copy_async(host.ctypes.data, block.ptr, host.nbytes, CopyKind.D2H, where.handle)
            w.resource.cancel_block_use(block.id, where, Access.READ)
            w.resource.record_block_use(block, where)
        else:
            cuglue.use(block, where, Access.READ)
            w.driver.copy_async(host.ctypes.data, block.ptr, host.nbytes, CopyKind.D2H, where.handle)
        where.synchronize()
        return host


@operation("blocks", 3)
class deallocate:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "block")
        return name and (name,)

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        thing = m.thing(name, "block")
        if thing.closed:
            return Outcome(error="UseAfterFree")
        told(m, name, m.elsewhere())
        m.idle(thing.piece.memory)
        if m.whole_device:
            m.outside()
        thing.closed = True
        return DONE

    @staticmethod
    def perform(w: Any, name: str) -> None:
        w.resource.deallocate(w.names[name])


@operation("blocks", 3)
class recycle:
    """A block is given back and another one of its size written at once: it may be the same memory."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "block")
        return name and (m.fresh("k"), name, m.things[name].home, draw.number(256))

    @staticmethod
    def predict(m: Model, new: str, name: str, home: str, value: int) -> Outcome:
        thing = m.live(name, "block")
        need(thing.home == home and home in m.streams and m.tracking)
        room(m, home)
        told(m, name, home)
        m.idle(thing.piece.memory)
        thing.closed = True
        memory = Memory(thing.piece.size)
        made = m.things[new] = Thing("block", Piece(memory, 0, thing.piece.size), home)
        made.piece.fill(value)
        m.use(memory, home, write=True)
        return DONE

    @staticmethod
    def perform(w: Any, new: str, name: str, home: str, value: int) -> None:
        size = w.names[name].nbytes
        w.resource.deallocate(w.names[name])
        w.names[new] = w.resource.allocate(size, w.stream(home), "program")
        fill.perform(w, new, home, value, "recorder")


@operation("closes", 1)
class deallocate_again:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = m.named("block", closed=True)
        return (draw.choice(names),) if names else None

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        need(m.thing(name, "block").closed)
        return Outcome(error="UseAfterFree")

    perform = deallocate.perform


@operation("blocks", 1)
class reap:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return (draw.number(2) == 1,)

    @staticmethod
    def predict(m: Model, block: bool) -> Outcome:
        need(not m.closed_resource)
        if m.resource == "guard":  # its quarantine ends, and says what cannot be given back now
            m.outside()
        return DONE

    @staticmethod
    def perform(w: Any, block: bool) -> None:
        w.resource.reap_pending(block=block)


@operation("blocks", 1)
class trim:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return () if m.resource.startswith("pool") else None

    @staticmethod
    def predict(m: Model) -> Outcome:
        m.outside()
        need(not m.closed_resource and m.resource.startswith("pool"))
        return DONE

    @staticmethod
    def perform(w: Any) -> None:
        w.resource.trim()
