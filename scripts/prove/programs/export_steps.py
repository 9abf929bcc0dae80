"""Steps over views of buffers, and NumPy arrays made from views and maps."""

from __future__ import annotations

from typing import Any

import numpy as np

from .buffer_steps import pick
from .map_steps import reachable
from .memory import Memory, Piece, pattern
from .model import DONE, Draw, Model, Outcome, Thing, need, operation


@operation("exports", 3)
class view:
    """An array over a buffer; it keeps the memory when the buffer is closed."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "buffer")
        return name and (m.fresh("v"), name)

    @staticmethod
    def predict(m: Model, new: str, name: str) -> Outcome:
        found = m.live(name, "buffer")
        m.things[new] = Thing("view", found.piece, found.home)
        return DONE

    @staticmethod
    def perform(w: Any, new: str, name: str) -> None:
        w.names[new] = w.names[name].array()


@operation("exports", 6)
class export:
    """A NumPy array over a view or a map (on a copy of it), compared at once, and kept."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "view", "map")
        return name and (m.fresh("e"), name, draw.choice(("asarray", "from_dlpack", "numpy")))

    @staticmethod
    def predict(m: Model, new: str, name: str, how: str) -> Outcome:
        found = m.live(name, "view", "map")
        m.idle(found.piece.memory)
        if found.kind == "map":
            reachable(m, m.handles[found.source], None)
        held = found.piece.holds()
        made = Thing("export", found.piece, found.home, source=name, readonly=found.readonly)
        if how == "numpy":
            made.copied = True
            memory = Memory(held.data.size, held.data)
            memory.known[...] = held.known
            made.piece = Piece(memory, 0, held.data.size)
        m.things[new] = made
        return Outcome(held)

    @staticmethod
    def perform(w: Any, new: str, name: str, how: str) -> Any:
        found = w.names[name]
        made = found.numpy() if how == "numpy" else getattr(np, how)(found)
        w.names[new] = made
        return made.copy()


@operation("exports", 3)
class look_at_export:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "export")
        return name and (name,)

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        m.outside()
        return Outcome(m.live(name, "export").piece.holds())

    @staticmethod
    def perform(w: Any, name: str) -> Any:
        w.driver.device_synchronize(0)
        return w.names[name].copy()


@operation("exports", 3)
class poke:
    """The host writes through an export, once the device is done."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "export")
        return name and (name, draw.number(250))

    @staticmethod
    def predict(m: Model, name: str, number: int) -> Outcome:
        m.outside()
        found = m.live(name, "export")
        need(not found.readonly)
        piece = found.piece
        piece.memory.data[piece.start : piece.end] = pattern(number, piece.size)
        piece.memory.known[piece.start : piece.end] = True
        return DONE

    @staticmethod
    def perform(w: Any, name: str, number: int) -> None:
        w.driver.device_synchronize(0)
        found = w.names[name]
        found[...] = pattern(number, found.size).reshape(found.shape)
