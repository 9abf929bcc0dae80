"""Steps over graphics objects: registering, drawing, reading and writing them whole, and closing their handles."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .map_steps import CLOSED, handle_of, pick_handle, reachable, refused
from .memory import Memory, Piece, pattern
from .model import DONE, Draw, Handle, Model, Outcome, need, operation


@operation("maps", 4)
class register:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        kind = draw.choice(("buffer", "buffer", "image", "image", "external"))
        if len(m.handles) > 6:
            return None
        return (
            m.fresh("x" if kind == "external" else "h"),
            kind,
            draw.choice((64, 128, 256)),
            draw.number(250),
        )

    @staticmethod
    def predict(m: Model, name: str, kind: str, size: int, number: int) -> Outcome:
        m.outside()
        m.handles[name] = Handle(kind, Memory(size, pattern(number, size)))
        return DONE

    @staticmethod
    def perform(w: Any, name: str, kind: str, size: int, number: int) -> None:
        data = pattern(number, size)
        if kind == "external":
            w.names[name] = w.external(name, size, data)
        else:
            w.names[name], w.objects[name] = w.graphics.register(kind, size, data)


@operation("maps", 2)
class draw:
    """The object's owner replaces what it holds."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = [n for n, h in m.handles.items() if not h.maps]
        return (draw.choice(names), draw.number(250)) if names else None

    @staticmethod
    def predict(m: Model, name: str, number: int) -> Outcome:
        h = handle_of(m, name)
        need(not h.maps)
        if h.kind == "external":
            m.outside()
        Piece(h.own, 0, h.own.data.size).write(pattern(number, h.own.data.size))
        return DONE

    @staticmethod
    def perform(w: Any, name: str, number: int) -> None:
        if name.startswith("x"):
            w.driver.device_synchronize(0)
            os.pwrite(w.objects[name], pattern(number, w.sizes[name]).tobytes(), 256)
        else:
            w.graphics.put(w.objects[name], pattern(number, w.graphics.made[w.objects[name]][1]))


@operation("maps", 2)
class look_at_object:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = [n for n, h in m.handles.items() if not h.maps]
        return (draw.choice(names),) if names else None

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        h = handle_of(m, name)
        need(not h.maps)
        if h.kind == "external":
            m.outside()
        return Outcome(Piece(h.own, 0, h.own.data.size).holds())

    @staticmethod
    def perform(w: Any, name: str) -> Any:
        if name.startswith("x"):
            w.driver.device_synchronize(0)
            return np.frombuffer(os.pread(w.objects[name], w.sizes[name], 256), np.uint8)
        return w.graphics.get(w.objects[name])


@operation("maps", 3)
class read_object:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick_handle(m, draw)
        return name and (name, m.pick_stream(draw))

    @staticmethod
    def predict(m: Model, name: str, stream: str | None) -> Outcome:
        h = handle_of(m, name)
        where = reachable(m, h, stream)
        no = refused(m, h, False)
        if no is not None:
            return no
        m.idle(h.copy if h.copy is not None else h.own)
        h.streams |= {where, m.current}
        memory = h.copy if h.copy is not None else h.own
        m.use(memory, where, write=False)
        return Outcome(Piece(memory, 0, memory.data.size).holds())

    @staticmethod
    def perform(w: Any, name: str, stream: str | None) -> Any:
        return w.names[name].read(w.stream(stream))


@operation("maps", 3)
class write_object:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick_handle(m, draw)
        return name and (name, m.pick_stream(draw), draw.number(250), draw.number(5) == 0)

    @staticmethod
    def predict(m: Model, name: str, stream: str | None, number: int, wrong: bool) -> Outcome:
        h = handle_of(m, name)
        where = reachable(m, h, stream)
        if wrong:
            return Outcome(error="LayoutError")
        no = refused(m, h, True)
        if no is not None:
            return no
        m.idle(h.own)
        h.streams |= {where, m.current}
        size = h.own.data.size
        Piece(h.own, 0, size).write(pattern(number, size))
        return DONE

    @staticmethod
    def perform(w: Any, name: str, stream: str | None, number: int, wrong: bool) -> None:
        handle = w.names[name]
        data = pattern(number, handle.size + wrong)
        w.names[name].write(data if wrong else data.reshape(handle.shape), w.stream(stream))


@operation("closes", 2)
class close_handle:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick_handle(m, draw)
        return name and (name,)

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        h = handle_of(m, name)
        reachable(m, h, None)
        h.closed = True
        return DONE

    @staticmethod
    def perform(w: Any, name: str) -> None:
        w.names[name].close()


@operation("closes", 1)
class map_closed:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = [n for n, h in m.handles.items() if h.closed]
        return (draw.choice(names),) if names else None

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        need(handle_of(m, name).closed)
        m.stream(None)
        return CLOSED

    @staticmethod
    def perform(w: Any, name: str) -> None:
        w.names[name].map()
