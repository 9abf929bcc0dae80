"""Steps that let go: closing and dropping buffers, uses of what is closed, and the ends of runtime and resource."""

from __future__ import annotations

from typing import Any

from cuglue import CopyDescriptor, InOut

from .buffer_steps import pick
from .kernels import ADD
from .model import DONE, Draw, Model, Outcome, Skip, need, operation

CLOSED = Outcome(error="ClosedError")


@operation("closes", 3)
class close_buffer:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "buffer")
        return name and (name,)

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        m.thing(name, "buffer").closed = True
        return DONE

    @staticmethod
    def perform(w: Any, name: str) -> None:
        w.names[name].close()


@operation("closes", 2)
class use_closed:
    """A use of what was closed: refused by name, and nothing happens."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = m.named("buffer", "map", closed=True)
        return (draw.choice(names), draw.choice(("launch", "read", "write"))) if names else None

    @staticmethod
    def predict(m: Model, name: str, how: str) -> Outcome:
        m.stream(None)
        need(m.thing(name, "buffer", "map").closed and not m.closed_runtime)
        return CLOSED

    @staticmethod
    def perform(w: Any, name: str, how: str) -> None:
        array = w.names[name]
        if how == "launch":
            w.rt.launch(ADD, 1, 64, InOut(array), 1, 1)
        elif how == "read":
            w.rt.read(array, 16)
        else:
            w.rt.command().write_to_gpu(CopyDescriptor(array, (16,), (1,), 1), bytes(16))


@operation("closes", 1)
class use_unbound:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return ()

    @staticmethod
    def predict(m: Model) -> Outcome:
        m.stream(None)
        need(not m.closed_runtime)
        return Outcome(error="StorageHandleNotFound")

    @staticmethod
    def perform(w: Any) -> None:
        w.rt.read(w.rt.buffer(64))


@operation("drops", 6)
class drop:
    """Forget a name: whatever it stands for goes with its last reference."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        name = pick(m, draw, "buffer", "buffer", "view", "array", "export")
        return name and (name,)

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        m.thing(name, "buffer", "view", "array", "export")
        del m.things[name]
        return DONE

    @staticmethod
    def perform(w: Any, name: str) -> None:
        del w.names[name]


@operation("drops", 3)
class drop_future:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return (draw.choice(list(m.futures)),) if m.futures else None

    @staticmethod
    def predict(m: Model, future: str) -> Outcome:
        if m.futures.pop(future, None) is None:
            raise Skip
        return DONE

    @staticmethod
    def perform(w: Any, future: str) -> None:
        del w.names[future]


@operation("drops", 1)
class collect:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return ()

    @staticmethod
    def predict(m: Model) -> Outcome:
        return DONE

    @staticmethod
    def perform(w: Any) -> None:
        w.collect()


# --- the end ------------------------------------------------------------------------------------------------------
@operation("closes", 0)
class close_runtime:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return ()

    @staticmethod
    def predict(m: Model) -> Outcome:
        m.outside()
        m.closed_runtime = True
        return DONE

    @staticmethod
    def perform(w: Any) -> None:
        w.rt.close()


_HOLDERS = ("buffer", "view", "array", "block", "export")


@operation("closes", 0)
class close_resource:
    """With memory alive, which is freed under its users: they learn of it by name."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return ()

    @staticmethod
    def predict(m: Model) -> Outcome:
        m.outside()
        m.closed_resource = True
        held = bool(m.graphs) or any(t.kind in _HOLDERS and not t.closed for t in m.things.values())
        for thing in m.things.values():
            if thing.kind == "block":
                thing.closed = True
        return Outcome(maybe="ResourceWarning" if held else "")

    @staticmethod
    def perform(w: Any) -> None:
        w.settle()
        w.resource.close()
