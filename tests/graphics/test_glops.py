"""GL calls reach their context's thread, or say at once why they cannot (contracts A3)."""

from __future__ import annotations

import gc
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from cuglue.errors import BusyError, ClosedError, NoContextError, UsageError, WrongThreadError
from cuglue.graphics import glops, glqueue, glworker
from cuglue.graphics.glcontext import GlContext, headless
from cuglue.graphics.glcurrent import current_context
from cuglue.graphics.glops import GlOps

pytestmark = pytest.mark.gl

SECONDS = 20  # no wait in these tests is meant to last; one that does fails here


@pytest.fixture
def inline() -> Iterator[GlContext]:
    with headless() as context:
        yield context


@pytest.fixture
def worker() -> Iterator[GlContext]:
    with headless(thread="worker") as context:
        yield context


def in_thread(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returned, or the error it raised, on another thread."""
    result: list[Any] = []

    def body() -> None:
        try:
            result.append(fn())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            result.append(error)

    thread = threading.Thread(target=body, name="other")
    thread.start()
    thread.join(SECONDS)
    assert result, "the thread did not come back"
    return result[0]


def here() -> tuple[int, Any]:
    return threading.get_ident(), current_context()


# --- inline ---------------------------------------------------------------------------------------------------


def test_inline_calls_run_here(inline: GlContext) -> None:
    ops = inline.ops
    assert ops.call(here) == (threading.get_ident(), inline.id)
    assert ops.call(divmod, 7, 2) == (3, 1)
    assert ops.alive
    assert ops.context_id == inline.id
    with pytest.raises(KeyError, match="nothing"):
        ops.call({}.__getitem__, "nothing")


def test_reports_28_inline_on_another_thread_names_both(inline: GlContext) -> None:
    error = in_thread(lambda: inline.ops.call(here))
    assert isinstance(error, WrongThreadError)
    assert error.owner.ident == threading.get_ident()
    assert error.caller.name == "other"
    assert "'MainThread'" in str(error)
    assert "'other'" in str(error)
    assert "thread='worker'" in str(error)


def test_reports_30_inline_without_a_context_is_refused_before_any_call(inline: GlContext) -> None:
    inline.release()
    try:
        with pytest.raises(
            NoContextError, match=r"no OpenGL context is current.*asked: .*EGL.*Make the context"
        ):
            inline.ops.call(pytest.fail)
        with pytest.raises(NoContextError, match="no OpenGL context is current"):
            GlOps.inline()
    finally:
        inline.make_current()
    assert inline.ops.call(int) == 0


def test_reports_7_inline_in_another_context_names_both(inline: GlContext) -> None:
    with headless() as other:
        with pytest.raises(NoContextError) as caught:
            inline.ops.call(pytest.fail)
        assert str(inline.id) in str(caught.value)
        assert str(other.id) in str(caught.value)
        with pytest.raises(NoContextError, match="another OpenGL context"):
            GlOps.inline(inline)
        assert GlOps.inline().context_id == other.id
        assert GlOps.inline(other.id).call(int) == 0


def test_inline_follows_a_context_that_moves_to_another_thread(inline: GlContext) -> None:
    inline.release()

    def there() -> object:
        inline.make_current()
        try:
            return inline.ops.call(here), inline.thread
        finally:
            inline.release()

    (ident, context), thread = in_thread(there)
    assert (ident, context) == (thread.ident, inline.id)
    assert ident != threading.get_ident()
    inline.make_current()
    assert inline.ops.call(here) == here()


def test_inline_whose_thread_ended_is_dead(inline: GlContext) -> None:
    inline.release()
    ops = in_thread(lambda: (inline.make_current(), GlOps.inline(), inline.release())[1])
    assert not ops.alive
    with pytest.raises(ClosedError, match="has lost its thread"):
        ops.call(pytest.fail)
    inline.make_current()


def test_inline_calls_end_with_the_interpreter(inline: GlContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread runs exit functions after it has ended; nothing may run once the interpreter comes apart."""
    monkeypatch.setattr(threading.current_thread(), "is_alive", lambda: False)
    assert inline.ops.call(here)[0] == threading.get_ident()
    with monkeypatch.context() as ending:
        ending.setattr(sys, "is_finalizing", lambda: True)
        with pytest.raises(ClosedError, match="has lost its thread"):
            inline.ops.call(here)
        ending.setattr(threading.current_thread(), "is_alive", lambda: True)
        assert inline.ops.call(here)[0] == threading.get_ident()


def test_inline_drops_what_was_posted_where_its_context_is_not_current(
    inline: GlContext, caplog: pytest.LogCaptureFixture
) -> None:
    inline.ops.post(pytest.fail)
    inline.release()
    inline.ops.close()
    assert "queued GL work was dropped" in caplog.text
    inline.make_current()
    caplog.clear()
    elsewhere = GlOps.inline(inline)
    elsewhere.post(pytest.fail)
    in_thread(elsewhere.close)
    assert "queued GL work was dropped" in caplog.text
    assert not elsewhere.alive
    elsewhere.close()


def test_inline_runs_what_was_posted_before_the_next_call_and_on_close(inline: GlContext) -> None:
    ran: list[Any] = []
    in_thread(lambda: inline.ops.post(lambda: ran.append(here())))
    assert ran == []
    inline.ops.call(lambda: ran.append("call"))
    assert ran == [here(), "call"]
    inline.ops.post(lambda: ran.append(inline.ops.call(lambda: "nested")))
    inline.ops.close()
    assert ran[2:] == ["nested"]


# --- worker ---------------------------------------------------------------------------------------------------


def test_A3_worker_calls_run_on_one_thread_with_its_context(worker: GlContext) -> None:
    idents = {worker.ops.call(here), in_thread(lambda: worker.ops.call(here))}
    assert idents == {(worker.thread.ident, worker.id)}  # type: ignore[union-attr]
    assert threading.get_ident() != worker.thread.ident  # type: ignore[union-attr]
    assert current_context() != worker.id


def test_A3_worker_runs_inline_when_already_there(worker: GlContext) -> None:
    assert worker.ops.call(lambda: worker.ops.call(lambda: worker.ops.call(here))) == worker.ops.call(here)


def test_worker_gives_back_what_was_raised(worker: GlContext) -> None:
    for error in (ValueError("mine"), SystemExit(3), KeyboardInterrupt()):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            worker.ops.call(fail)
        assert caught.value is error
    assert worker.ops.call(int) == 0  # and lives on


def test_worker_puts_its_context_back_after_a_call_that_changed_it(worker: GlContext) -> None:
    other = worker.ops.call(headless)
    assert worker.ops.call(current_context) == worker.id
    worker.ops.call(other.make_current)
    worker.ops.call(other.close)
    assert worker.ops.call(current_context) == worker.id


def test_worker_takes_over_a_context_current_here(inline: GlContext) -> None:
    ops = GlOps.worker(inline)
    assert inline.ops is ops
    assert current_context() is None
    assert ops.call(current_context) == inline.id
    with pytest.raises(WrongThreadError, match="belongs to its worker"):
        inline.make_current()
    ops.close()
    assert inline.closed
    inline.close()


def test_worker_that_cannot_begin_raises_and_leaves_nothing() -> None:
    before = threading.active_count()

    def fail() -> GlContext:
        raise RuntimeError("no display")

    with pytest.raises(RuntimeError, match="no display"):
        GlOps.worker(fail)
    wait_for(lambda: threading.active_count() == before)


def test_a_context_that_cannot_be_taken_over_stays_current(inline: GlContext, monkeypatch: Any) -> None:
    native = inline.native
    real, calls = type(native).make_current, [0]

    def fail_there(self: Any) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("busy")
        real(self)

    monkeypatch.setattr(type(native), "make_current", fail_there)
    with pytest.raises(RuntimeError, match="busy"):
        GlOps.worker(inline)
    assert current_context() == inline.id
    assert inline.ops.call(int) == 0


def test_A3_calls_to_a_worker_that_is_gone_are_refused_at_once() -> None:
    context = headless(thread="worker")
    ops = context.ops
    context.close()
    assert not ops.alive
    begin = time.monotonic()
    with pytest.raises(ClosedError, match="is closed"):
        ops.call(pytest.fail)
    ops.post(pytest.fail)
    assert time.monotonic() - begin < 1
    ops.close()


def test_worker_runs_what_was_posted_before_it_ends() -> None:
    context, ran = headless(thread="worker"), []
    for n in range(3):
        context.ops.post(lambda n=n: ran.append((n, context.ops.call(current_context))))
    context.close()
    assert ran == [(n, context.id) for n in range(3)]


def test_a_call_that_comes_as_the_worker_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread empties its queue for the last time just before the call arrives there."""
    context = headless(thread="worker")
    ops = context.ops
    context.close()
    monkeypatch.setattr(ops, "_check_alive", lambda: None)
    result = in_thread(lambda: ops.call(pytest.fail))
    assert isinstance(result, ClosedError)


def test_post_never_raises_and_its_failure_is_logged(
    worker: GlContext, caplog: pytest.LogCaptureFixture
) -> None:
    worker.ops.post(lambda: 1 / 0)
    assert worker.ops.call(int) == 0
    assert "queued GL work failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_no_call_is_lost_or_hangs_while_a_worker_closes() -> None:
    """Callers race with close(): each one has an answer or a ClosedError."""
    for _ in range(20):
        context = headless(thread="worker")
        outcomes: list[Any] = []

        def hammer(ops: GlOps = context.ops, outcomes: list[Any] = outcomes) -> None:
            try:
                while True:
                    outcomes.append(ops.call(int))
            except ClosedError:
                outcomes.append("closed")

        threads = [threading.Thread(target=hammer, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        context.close()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        assert outcomes.count("closed") == 4


def test_closing_from_the_worker_itself_does_not_wait_for_itself() -> None:
    context = headless(thread="worker")
    context.ops.call(context.close)
    wait_for(lambda: not context.ops.alive and context.native.destroyed)
    assert context.closed


def test_closing_while_a_call_runs_says_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    context = headless(thread="worker")
    entered, leave = threading.Event(), threading.Event()

    def long() -> str:
        entered.set()
        leave.wait(SECONDS)
        return "done"

    result: list[str] = []
    caller = threading.Thread(target=lambda: result.append(context.ops.call(long)))
    caller.start()
    entered.wait(SECONDS)
    monkeypatch.setattr(glops, "JOIN_SECONDS", 0.05)
    with pytest.raises(BusyError, match="a GL call still running"):
        context.close()
    monkeypatch.undo()
    leave.set()
    caller.join(SECONDS)
    context.close()
    assert context.closed
    assert result == ["done"]


def test_an_interrupted_wait_withdraws_the_call() -> None:
    request = glqueue.Request(pytest.fail, ())

    class Interrupted:
        def wait(self, seconds: float | None) -> bool:
            raise KeyboardInterrupt

    request.done = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        request.wait()
    request.run()  # does nothing: it was withdrawn


def test_a_worker_keeps_no_hold_on_what_its_calls_used(worker: GlContext) -> None:
    class Thing:
        pass

    thing = Thing()
    seen = weakref.ref(thing)
    worker.ops.call(lambda thing: None, thing)
    del thing
    wait_for(lambda: seen() is None)


def test_a_fork_is_told_that_the_context_is_not_there(inline: GlContext, worker: GlContext) -> None:
    read, write = os.pipe()
    pumped = GlOps.pumped()
    pid = os.fork()
    if not pid:
        words = []
        for ops in (inline.ops, worker.ops, pumped):
            try:
                ops.call(int)
                words.append("ran")
            except UsageError as error:
                words.append("forked" if "in a forked child" in str(error) and not ops.alive else str(error))
            ops.post(int)
            ops.close()
        os.write(write, " ".join(words).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    assert os.read(read, 4096) == b"forked forked forked"
    os.close(read)
    pumped.close()


def test_at_exit_nothing_hangs_and_nothing_is_printed() -> None:
    program = """
import atexit
atexit.register(lambda: print("alive after cuglue's own exit:", context.ops.alive))
from cuglue.graphics.glcontext import headless
from cuglue.errors import ClosedError
context = headless(thread="worker")
atexit.register(lambda: print("alive at exit:", context.ops.call(int)))

class Late:
    def __del__(self):
        try:
            self.ops.call(int)
        except ClosedError:
            print("refused when Python ends", flush=True)

late = Late()
late.ops = context.ops
forgotten = headless(thread="worker")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "alive at exit: 0",
        "alive after cuglue's own exit: False",
        "refused when Python ends",
    ]
    assert done.returncode == 0


# --- pumped ---------------------------------------------------------------------------------------------------


def test_pumped_calls_wait_for_the_pump(inline: GlContext) -> None:
    ops = GlOps.pumped()
    assert ops.call(here) == here()  # on the pumping thread: at once
    result: list[Any] = []
    caller = threading.Thread(target=lambda: result.append(ops.call(here)))
    caller.start()
    assert ops.pump(timeout=SECONDS) == 1
    caller.join(SECONDS)
    assert result == [here()]
    assert ops.pump() == 0
    ops.post(lambda: result.append("posted"))
    assert ops.pump() == 1
    assert result[1:] == ["posted"]
    ops.close()


def test_reports_34_pumped_ops_meet_their_context_in_the_first_pump() -> None:
    """An engine owns the context and has it current in its own callback only."""
    ops = GlOps.pumped()
    assert ops.context_id is None
    assert ops.thread is None
    with pytest.raises(NoContextError):
        ops.call(pytest.fail)
    with pytest.raises(NoContextError):
        ops.pump()
    result: list[Any] = []
    caller = threading.Thread(target=lambda: result.append(ops.call(current_context)))
    caller.start()
    with headless() as context:
        assert ops.pump(timeout=SECONDS) == 1
        caller.join(SECONDS)
        assert result == [context.id]
        assert ops.context_id == context.id
        context.release()
        with pytest.raises(NoContextError):  # outside the callback, on its thread: waiting would never end
            ops.call(pytest.fail)
        context.make_current()
    ops.close()


def test_pumped_calls_have_a_time_limit_and_never_run_late(inline: GlContext) -> None:
    ops = GlOps.pumped(time_limit=0.05)
    error = in_thread(lambda: ops.call(pytest.fail))
    assert isinstance(error, TimeoutError)
    assert "within 0.05 s" in str(error)
    assert "ops.pump()" in str(error)
    ops.pump()  # withdrawn: does not run it
    ops.close()


def test_pumped_ops_meet_the_context_current_where_they_were_made() -> None:
    ops = GlOps.pumped()
    with headless() as context:
        assert ops.call(current_context) == context.id
        assert ops.context_id == context.id
        with headless():
            with pytest.raises(NoContextError, match="another OpenGL context"):
                ops.call(pytest.fail)
        context.make_current()
        ops.close()


def test_pumping_waits_for_a_first_call_and_a_call_for_a_late_pump(inline: GlContext) -> None:
    ops = GlOps.pumped(time_limit=SECONDS)
    timer = threading.Timer(0.1, ops.post, [int])
    timer.start()
    assert ops.pump(timeout=SECONDS) == 1
    timer.join()
    result: list[Any] = []
    caller = threading.Thread(target=lambda: result.append(ops.call(int)))
    caller.start()
    time.sleep(2.5 * glops.ALIVE_CHECK_SECONDS)  # it has looked twice whether this thread still lives
    assert ops.pump() == 1
    caller.join(SECONDS)
    assert result == [0]
    ops.close()


def test_pumped_ops_run_what_was_posted_when_closed_on_their_thread(
    inline: GlContext, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[Any] = []
    ops, dropped = GlOps.pumped(), GlOps.pumped()
    ops.post(lambda: ran.append(current_context()))
    ops.close()
    assert ran == [inline.id]
    dropped.post(pytest.fail)
    in_thread(dropped.close)
    assert "queued GL work was dropped" in caplog.text


def test_a_call_that_comes_as_pumped_ops_close_is_refused_at_once(
    inline: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glops, "ALIVE_CHECK_SECONDS", 10 * SECONDS)
    ops = GlOps.pumped(time_limit=10 * SECONDS)
    ops.close()
    monkeypatch.setattr(ops, "_check_alive", lambda: None)
    assert isinstance(in_thread(lambda: ops.call(pytest.fail)), ClosedError)


def test_a_pumped_call_that_has_started_is_waited_for(inline: GlContext) -> None:
    ops = GlOps.pumped(time_limit=0.2)
    result: list[Any] = []
    caller = threading.Thread(target=lambda: result.append(ops.call(time.sleep, 0.6)))
    caller.start()
    ops.pump(timeout=SECONDS)
    caller.join(SECONDS)
    assert result == [None]
    ops.close()


def test_a_pumped_call_that_has_started_is_waited_for_asleep(
    inline: GlContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past its time limit it cannot be withdrawn: there is nothing to look at until it ends."""
    looks: list[float | None] = []
    wait = glqueue.Request.wait

    def counted(request: Any, seconds: float | None = None) -> bool:
        looks.append(seconds)
        return wait(request, seconds)

    monkeypatch.setattr(glqueue.Request, "wait", counted)
    ops = GlOps.pumped(time_limit=0.05)
    caller = threading.Thread(target=lambda: ops.call(time.sleep, 0.4))
    caller.start()
    ops.pump(timeout=SECONDS)
    caller.join(SECONDS)
    assert looks.count(None) == 1
    assert len(looks) < 10
    ops.close()


def test_one_pump_runs_all_that_waits(inline: GlContext) -> None:
    ops = GlOps.pumped()
    ran: list[int] = []
    for number in range(3):
        ops.post(lambda number=number: ran.append(number))  # type: ignore[misc] # its own number
    assert ops.pump() == 3
    assert ran == [0, 1, 2]
    assert ops.pump() == 0
    ops.close()


class Native:
    """A native context that is always current."""

    id = None
    destroyed = False

    def make_current(self) -> None:
        pass

    def destroy(self) -> None:
        self.destroyed = True


def served(*items: Any) -> Native:
    """A worker's whole life with these items in its queue."""
    waiting: Any = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    native, ended = Native(), threading.Event()
    start = glworker.Start(SimpleNamespace(native=native))  # type: ignore[arg-type] # as much as is used

    def body() -> None:
        with suppress(SystemExit):
            glworker.serve(waiting, ended, start)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(SECONDS)
    assert ended.is_set()
    assert native.destroyed
    return native


def test_a_worker_that_is_stopped_still_runs_what_finalisers_left() -> None:
    ran: list[int] = []
    late: glqueue.Request[None] = glqueue.Request(lambda: ran.append(2), ())
    served(None, glqueue.Posted(lambda: ran.append(1)), late)
    assert ran == [1]
    with pytest.raises(ClosedError):
        late.answer()


def test_a_worker_that_is_thrown_out_refuses_what_waits() -> None:
    def leave() -> None:
        raise SystemExit

    late: glqueue.Request[None] = glqueue.Request(pytest.fail, ("ran",))
    served(glqueue.Posted(leave), late)
    with pytest.raises(ClosedError):
        late.answer()


def test_pumping_on_another_thread_or_context_is_refused(inline: GlContext) -> None:
    ops = GlOps.pumped()
    assert isinstance(in_thread(ops.pump), WrongThreadError)
    with headless():
        with pytest.raises(NoContextError, match="another OpenGL context"):
            ops.pump()
    inline.make_current()
    ops.close()
    with pytest.raises(ClosedError):
        ops.pump()


def test_pumped_calls_end_when_the_ops_close_or_their_thread_does(inline: GlContext) -> None:
    ops = GlOps.pumped()
    outcome: list[Any] = []
    caller = threading.Thread(target=lambda: outcome.append(in_thread(lambda: ops.call(pytest.fail))))
    caller.start()
    wait_for(lambda: not ops._queue.empty())
    in_thread(ops.close)  # from elsewhere: nothing can run any more
    caller.join(SECONDS)
    assert isinstance(outcome[0], ClosedError)

    inline.release()
    ready = threading.Event()
    box: list[GlOps] = []

    def engine() -> None:
        inline.make_current()
        box.append(GlOps.pumped())
        inline.release()
        ready.wait(SECONDS)

    thread = threading.Thread(target=engine)
    thread.start()
    wait_for(lambda: bool(box))
    caller = threading.Thread(target=lambda: outcome.append(in_thread(lambda: box[0].call(pytest.fail))))
    caller.start()
    wait_for(lambda: not box[0]._queue.empty())
    ready.set()
    thread.join(SECONDS)
    caller.join(SECONDS)
    assert isinstance(outcome[1], ClosedError)
    assert "has lost its thread" in str(outcome[1])
    inline.make_current()


# --- forgetting -----------------------------------------------------------------------------------------------


def test_a_forgotten_worker_is_reported_and_ends() -> None:
    held = [headless(thread="worker")]
    native, ident = held[0].native, held[0].thread.ident  # type: ignore[union-attr]

    def forget() -> None:
        held.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match=r"GlContext .* made at .*test_glops\.py:\d+, was never closed"):
        forget()
    wait_for(lambda: native.destroyed and ident not in {t.ident for t in threading.enumerate()})


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
