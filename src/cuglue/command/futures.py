"""Futures: results that are there once the device is done, for threads and for asyncio.

Owns :class:`Future` and the one thread that tells waiting callbacks and event loops. Must not know what is computed.

Waiting for a result blocks in the driver. Callbacks and ``await`` cost no waiting thread: the driver calls back when
the work is done. A driver's callback never comes if the device faults before it, and a simulated device does nothing
while nobody looks, so futures with callbacks are looked at now and then as well.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from ..arguments import seconds, shown
from ..core.event import Event
from ..errors import CuglueError, DriverError, UsageError, forget_frames

T = TypeVar("T")
_log = logging.getLogger(__name__)

_LOOK_AGAIN = 0.05  # seconds between looks at futures whose driver calls back
_LOOK_SIMULATED = 0.0005  # the simulated device moves one step a look
_IDLE = 1.0  # seconds that the thread waits for more before it ends
_RLock = type(threading.RLock())  # without the function in Python around it


class Future(Generic[T]):
    """A result of the device. Made by reads and syncs; safe to drop: what the device writes to stays alive.

    Args:
        event: completes when the result is there.
        value: makes the result, once, after ``event``; None: :meth:`_make` does.
    """

    __slots__ = ("__weakref__", "_callbacks", "_error", "_event", "_lock", "_result", "_state", "_value")

    def __init__(self, event: Event, value: Callable[[], T] | None) -> None:
        self._event: Event | None = event
        self._state = event.stream.state
        self._value: Callable[[], T] | None = value
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future[T]], object]] = []
        self._lock = _RLock()

    def done(self) -> bool:
        """Whether the result (or a failure) is there. Never blocks."""
        event = self._event
        if event is None:
            return True
        try:
            if not event.query():
                return False
        except DriverError as error:
            self._settle(error)
        else:
            self._settle(None)
        return True

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result. Any thread may ask, and ask again.

        Args:
            timeout: seconds; None waits as long as it takes.

        Ordering: blocks the host until this work is done, not for work queued later. Releases the GIL.

        Raises:
            TimeoutError: not yet. Nothing is given up: ask again.
            DriverError: the fault that the wait revealed.
        """
        event = self._event
        if event is not None:
            if timeout is None:
                try:
                    event.synchronize()
                except DriverError as error:
                    self._settle(error)
                else:
                    self._settle(None)
            elif not self._poll(seconds("timeout", timeout)):
                raise TimeoutError(
                    f"{self!r} of {event.stream!r}: got no result after {timeout} s, expected the work before it to be "
                    f"done by then. Ask again, or wait as long as it takes: result()"
                )
        if self._error is not None:
            try:
                raise self._error.with_traceback(None)  # without the frames of who asked before
            finally:
                del self  # else the error and this frame keep each other alive
        return self._result  # type: ignore[return-value]

    def _poll(self, timeout: float) -> bool:
        """Look until done or ``timeout``; short waits first."""
        deadline = time.monotonic() + timeout
        pause = 20e-6
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LOOK_SIMULATED)
        return True

    def add_done_callback(self, function: Callable[[Future[T]], object]) -> None:
        """Call ``function(self)`` once done, at once if it is: on a thread of the library, which may use the device.

        What it raises is logged.

        Raises:
            UsageError: it cannot be called.
        """
        if not callable(function):
            raise UsageError(
                "callback of a future", got=shown(function)[:80], expected="a function of the future"
            )
        with self._lock:
            if self._event is not None:
                self._callbacks.append(function)
                if len(self._callbacks) == 1:
                    _watcher.watch(self)
                return
        _call(function, self)

    def __await__(self) -> Generator[Any, None, T]:
        """The result, for ``await``. Cancelling gives nothing up on the device."""
        if not self.done():
            loop = asyncio.get_running_loop()
            arrived: asyncio.Future[None] = loop.create_future()

            def tell(_: Future[T]) -> None:
                if not loop.is_closed():  # nobody waits any more
                    loop.call_soon_threadsafe(_wake, arrived)

            self.add_done_callback(tell)
            yield from arrived
        return self.result()

    def _settle(self, error: BaseException | None) -> None:
        """Take the result, once, and call back."""
        with self._lock:
            if self._event is None:
                return
            if error is None:
                try:
                    self._result = self._make()
                except Exception as failed:  # noqa: BLE001 - it is the result
                    error = failed
            if error is not None:
                forget_frames(error)
            self._error = error
            self._event = self._value = None
            callbacks, self._callbacks = self._callbacks, []
        for function in callbacks:
            _call(function, self)

    def _make(self) -> T:
        """The result, once the device is done. Called again if it was interrupted."""
        return self._value()  # type: ignore[misc] # it goes when the result is there

    def __repr__(self) -> str:
        state = "pending" if self._event is not None else "failed" if self._error is not None else "done"
        return f"Future({state})"


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():  # it may have been cancelled
        waiting.set_result(None)


def _call(function: Callable[[Future[T]], object], future: Future[T]) -> None:
    try:
        function(future)
    except Exception:  # noqa: BLE001 - a callback of somebody else; logged
        _log.exception("callback %r of %r failed", function, future)


class _Watcher:
    """The thread that looks at futures with callbacks. It lives while there are any."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._woken = False
        self._watched: list[tuple[Future[Any], float]] = []
        self._thread: threading.Thread | None = None

    def watch(self, future: Future[Any]) -> None:
        """Look at ``future`` until it is done."""
        pause = _LOOK_AGAIN if self._ask_driver(future) else _LOOK_SIMULATED
        with self._wake:
            self._watched.append((future, pause))
            self._woken = True
            if self._thread is None or not self._thread.is_alive():  # a forked child has no thread
                self._thread = threading.Thread(target=self._run, name="cuglue-futures", daemon=True)
                self._thread.start()
            self._wake.notify()

    def _ask_driver(self, future: Future[Any]) -> bool:
        """Have the driver wake us; False where it cannot.

        On a stream of its own, which waits for this event alone and not for what was queued after it. Destroying the
        stream at once is right: what is queued there still runs.
        """
        event, state = future._event, future._state
        if event is None or not state.capabilities.host_callbacks or state.capabilities.simulated:
            return False
        driver = state.driver
        try:
            side = driver.stream_create(state.device)
            try:
                driver.stream_wait_event(side, event.handle)
                driver.stream_callback(side, self._notify)
            finally:
                driver.stream_destroy(side)
        except CuglueError:
            return False  # looking often does it too
        return True

    def _notify(self) -> None:
        with self._wake:
            self._woken = True
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                watched = list(self._watched)
            # Outside the lock: looking calls the driver and what the user gave.
            finished = [entry for entry in watched if entry[0].done()]
            pause = min((pause for _, pause in watched), default=_IDLE)
            del watched
            with self._wake:
                for entry in finished:
                    self._watched.remove(entry)
                del finished
                if not self._woken and not self._wake.wait(pause) and not self._watched and pause == _IDLE:
                    self._thread = None
                    return
                self._woken = False


_watcher = _Watcher()
