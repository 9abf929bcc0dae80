"""Steps over arrays that CuPy makes of a resource's memory, and the work on them that nobody is told of."""

from __future__ import annotations

from typing import Any

import cuglue
from cuglue import Access

from .block_steps import handle_of, told
from .buffer_steps import CAPTURE, SIZES, pick, room
from .memory import Memory, Piece
from .model import DONE, Draw, Model, Outcome, Thing, need, operation


@operation("exports", 3)
class array:
    """Memory of a CuPy array: on the current stream, through the resource's ``malloc``."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return m.fresh("a"), m.pick_stream(draw), draw.choice(SIZES)

    @staticmethod
    def predict(m: Model, name: str, stream: str | None, size: int) -> Outcome:
        home = room(m, stream)
        memory = Memory(size)
        memory.note(home, write=True)
        m.things[name] = Thing("array", Piece(memory, 0, size), home)
        return DONE

    @staticmethod
    def perform(w: Any, name: str, stream: str | None, size: int) -> None:
        from cupy import ndarray

        if stream is None:
            pointer = w.resource.malloc(size)
        else:
            with w.current(stream):
                pointer = w.resource.malloc(size)
        w.names[name] = ndarray((size,), "u1", pointer)


@operation("exports", 1)
class slice_array:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "array")
        return name and (m.fresh("a"), name, 16 * draw.number(3))

    @staticmethod
    def predict(m: Model, new: str, name: str, start: int) -> Outcome:
        whole = m.live(name, "array")
        need(whole.piece.size > start + 16)
        piece = Piece(whole.piece.memory, whole.piece.start + start, whole.piece.end)
        m.things[new] = Thing("array", piece, whole.home)
        return DONE

    @staticmethod
    def perform(w: Any, new: str, name: str, start: int) -> None:
        w.names[new] = w.names[name][start:]


@operation("exports", 3)
class plain:
    """What a CuPy kernel does: work on the array's home stream, of which nobody is told."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "array")
        return name and (name, m.things[name].home, draw.number(256))

    @staticmethod
    def predict(m: Model, name: str, home: str, value: int) -> Outcome:
        thing = m.live(name, "array")
        need(thing.home == home and (home in m.streams or home == "") and not thing.piece.memory.away)
        m.stream(home or None) if home or not m.current else None
        m.idle(thing.piece.memory)
        need(m.recording is None or m.recording.stream != home)
        thing.piece.fill(value)
        m.use(thing.piece.memory, home, write=False)  # nobody is told that what used it before is over
        return DONE

    @staticmethod
    def perform(w: Any, name: str, home: str, value: int) -> None:
        found = w.names[name]
        number = handle_of(w, home) if home else 0
        w.driver.fill_async(found.data.ptr, value, found.nbytes, number)


@operation("exports", 2)
class use_array:
    """Plain work on another stream, told with ``cuglue.use``."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "array")
        return name and (name, m.pick_stream(draw), draw.number(256))

    @staticmethod
    def predict(m: Model, name: str, stream: str | None, value: int) -> Outcome:
        thing, where = told(m, name, stream, "array")
        if not m.reaches(thing.piece.memory, where, write=True):
            return CAPTURE
        thing.piece.fill(value)
        m.use(thing.piece.memory, where, write=True, ends=False)
        thing.piece.memory.away = True
        return DONE

    @staticmethod
    def perform(w: Any, name: str, stream: str | None, value: int) -> None:
        found = w.names[name]
        cuglue.use(found, w.stream(stream), Access.WRITE)
        w.driver.fill_async(found.data.ptr, value, found.nbytes, handle_of(w, stream))
