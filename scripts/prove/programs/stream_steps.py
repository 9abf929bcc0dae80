"""Steps over streams: making, dropping, destroying behind the library's back, and waiting."""

from __future__ import annotations

from typing import Any

from cuglue import as_stream

from .model import DONE, Draw, Model, Outcome, StreamThing, need, operation


@operation("streams", 3)
class new_stream:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return (m.fresh("s"),) if len(m.streams) < 6 else None

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        m.streams[name] = StreamThing("user")
        return DONE

    @staticmethod
    def perform(w: Any, name: str) -> None:
        w.streams[name] = w.driver.Stream()


@operation("drops", 3)
class drop_stream:
    """The stream object goes with its last reference, and its handle is the next one given out."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = [n for n, s in m.streams.items() if s.kind == "user"]
        return (draw.choice(names),) if names else None

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        need(name in m.streams and m.streams[name].kind == "user")
        need(m.recording is None or m.recording.stream != name)
        del m.streams[name]
        return DONE

    @staticmethod
    def perform(w: Any, name: str) -> None:
        del w.streams[name]


@operation("streams", 1)
class raw_stream:
    """A stream that only its handle is known of."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return (m.fresh("r"),) if m.raw_allowed and len(m.streams) < 7 else None

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        m.outside()
        m.raw_seen = True
        m.streams[name] = StreamThing("raw")
        return DONE

    @staticmethod
    def perform(w: Any, name: str) -> None:
        w.streams[name] = w.raw_stream()


@operation("streams", 2)
class destroy_raw:
    """Its owner destroys it without a word: what was used there is freed all the same."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = [n for n, s in m.streams.items() if s.kind == "raw"]
        return (draw.choice(names),) if names else None

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        need(name in m.streams and m.streams[name].kind == "raw")
        del m.streams[name]
        return DONE

    @staticmethod
    def perform(w: Any, name: str) -> None:
        w.destroy_raw(w.streams.pop(name))


@operation("streams", 2)
class make_current:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return (draw.choice(["", *(n for n, s in m.streams.items() if s.kind == "user")]),)

    @staticmethod
    def predict(m: Model, name: str) -> Outcome:
        need(name == "" or (name in m.streams and m.streams[name].kind == "user"))
        m.current = name
        return DONE

    @staticmethod
    def perform(w: Any, name: str) -> None:
        w.current(name)


@operation("streams", 2)
class join:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return m.pick_stream(draw), m.pick_stream(draw), draw.number(2) == 1

    @staticmethod
    def predict(m: Model, one: str | None, other: str | None, event: bool) -> Outcome:
        m.stream(one), m.stream(other)
        return DONE

    @staticmethod
    def perform(w: Any, one: str | None, other: str | None, event: bool) -> None:
        waiting = as_stream(w.stream(one), driver=w.driver)
        origin = as_stream(w.stream(other), driver=w.driver)
        if event:
            waiting.wait(origin.record())
        else:
            waiting.join(origin)


@operation("streams", 2)
class wait_for_stream:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return m.pick_stream(draw), draw.number(2) == 1

    @staticmethod
    def predict(m: Model, stream: str | None, block: bool) -> Outcome:
        m.stream(stream)
        return DONE

    @staticmethod
    def perform(w: Any, stream: str | None, block: bool) -> None:
        found = as_stream(w.stream(stream), driver=w.driver)
        if block:
            found.synchronize()
        else:
            found.query()
