"""Steps over commands of several operations, and over the runtime as a whole."""

from __future__ import annotations

from typing import Any

from cuglue import CopyDescriptor, In, Out

from .buffer_steps import CAPTURE, OPERANDS, UNWRITTEN, apart, nbytes, ordered, room, two
from .kernels import SCALE
from .memory import Memory, Piece
from .model import DONE, Boom, Draw, Expected, Model, Outcome, need, operation


@operation("buffers", 4)
class batch:
    """A command of two kernels and a temporary buffer; it may be left by an exception before or after they ran."""

    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        names = two(m, draw)
        raised = draw.choice(("", "", "", "before", "after"))
        return names and (m.fresh("f"), *names, m.pick_stream(draw), draw.number(256), raised)

    @staticmethod
    def predict(
        m: Model, future: str, x: str, y: str, stream: str | None, offset: int, raised: str
    ) -> Outcome:
        where = room(m, stream)
        source, target = m.live(x, *OPERANDS), m.live(y, *OPERANDS)
        need(apart(source.piece, target.piece) and not target.readonly)
        need(source.piece.memory is not target.piece.memory)
        ordered(m, source, where)
        ordered(m, target, where)
        reach = m.reaches(source.piece.memory, where, write=False)
        if not (reach and m.reaches(target.piece.memory, where, write=True)):
            return CAPTURE
        if raised == "before":
            target.piece.spoil()
            return Outcome(error="Boom")
        if source.piece.unwritten:
            target.piece.spoil()
            return Outcome(error="Boom" if raised else UNWRITTEN.error)
        middle = Piece(Memory(source.piece.size), 0, source.piece.size)
        middle.scale_from(source.piece, 3, offset)
        target.piece.scale_from(middle, 5, 1)
        m.use(source.piece.memory, where, write=False)
        m.use(target.piece.memory, where, write=True)
        source.piece.memory.away = target.piece.memory.away = False
        if raised:
            return Outcome(error="Boom")
        m.futures[future] = Expected(target.piece.holds())
        return DONE

    @staticmethod
    def perform(w: Any, future: str, x: str, y: str, stream: str | None, offset: int, raised: str) -> None:
        source, target = w.names[x], w.names[y]
        m, n = nbytes(source), nbytes(target)
        with w.rt.command(In(source), Out(target), stream=w.stream(stream)) as cmd:
            if raised == "before":
                raise Boom
            with cmd.empty(m) as middle:
                cmd.kernel(SCALE, 1, 64, source, m, Out(middle), m, 3, offset)
                cmd.kernel(SCALE, 1, 64, In(middle), m, target, n, 5, 1)
            if raised == "after":
                raise Boom
            w.names[future] = cmd.read_async(CopyDescriptor(target, (n,), (1,), 1))


@operation("buffers", 1)
class synchronize:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return ()

    @staticmethod
    def predict(m: Model) -> Outcome:
        m.outside()
        need(not m.closed_runtime)
        return DONE

    @staticmethod
    def perform(w: Any) -> None:
        w.rt.synchronize()


@operation("buffers", 1)
class clean_up:
    @staticmethod
    def choose(m: Model, draw: Draw) -> Any:
        return ()

    @staticmethod
    def predict(m: Model) -> Outcome:
        m.outside()
        need(not m.closed_runtime and not m.closed_resource)
        return DONE

    @staticmethod
    def perform(w: Any) -> None:
        w.rt.command().memory_cleanup()
