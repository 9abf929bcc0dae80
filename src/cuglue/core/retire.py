"""The retire queue: what must happen later, once the device is done with something.

Owns: pending frees, host bytes of copies in flight, pins, surface objects and whatever else waits for uses to
complete. Must not know what its actions do. Finalisers call :meth:`RetireQueue.forget`, which only appends: no lock,
no driver call, no exception; the next call on our side drains it.

What leaves one line for another does so without a call between, so that an interrupt comes before it or after it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import CaptureError, raise_together
from . import process

if TYPE_CHECKING:
    from .device import DeviceState
    from .stream import Stream

Use = tuple["Stream", int]
#: What a finaliser leaves: something to call, or a list whose first item is to be called with the list.
Left = Callable[[], None] | list[Any]
_log = logging.getLogger(__name__)


class Retired:
    """One thing waiting: run ``action`` once every use is done, on ``thread`` if one is named."""

    __slots__ = ("action", "nbytes", "thread", "uses")

    def __init__(
        self, uses: tuple[Use, ...], action: Callable[[], None], nbytes: int, thread: int | None
    ) -> None:
        self.uses = uses
        self.action = action
        self.nbytes = nbytes
        self.thread = thread

    def ready(self) -> bool:
        """Whether every use is done; never blocks."""
        self.uses = tuple((s, q) for s, q in self.uses if not s.done(q))
        return not self.uses


class RetireQueue:
    """What waits on one device. Reached as ``device_state(driver, device).retire``."""

    def __init__(self, state: DeviceState) -> None:
        #: What finalisers left. An allocation sees with one test that there is nothing.
        self.forgotten: deque[Left] = deque()
        self.deferred: deque[Left] = deque()  # of these, what a capture is in the way of
        self._state = state
        self._life = process.life
        self._inbox: deque[Retired] = deque()
        self._waiting: list[Retired] = []
        self._draining: Any = threading.RLock()  # held by the thread that drains now

    def push(
        self,
        uses: Iterable[Use],
        action: Callable[[], None],
        *,
        nbytes: int = 0,
        thread: int | None = None,
    ) -> None:
        """Run ``action`` after ``uses`` are done, at a later drain. Only appends; queues and blocks nothing.

        Args:
            uses: (stream, seq) pairs.
            action: called once; if it raises, it stays queued and the error leaves the drain.
            nbytes: bytes that it holds, for :attr:`bytes_waiting`.
            thread: ident of the only thread that may run it.
        """
        self._inbox.append(Retired(tuple(uses), action, nbytes, thread))

    def forget(self, action: Left) -> None:
        """Run ``action`` at the next drain. The one call a finaliser may make."""
        self.forgotten.append(action)

    def run_forgotten(self) -> None:
        """Run what finalisers left. Never raises and never waits, so that an allocation may call it.

        What a capture is in the way of is tried again later. What fails is kept: the next :meth:`drain` tries it again
        and reports it.
        """
        if self._life is not process.life:
            return  # a forked child: everything belongs to the parent
        if self.deferred and not self._state.capturing:
            self._resume()
        while self.forgotten:
            try:
                action = self.forgotten[0]
                del self.forgotten[0]  # and no call up to the next try: an interrupt would lose it
            except IndexError:
                return  # another thread was quicker
            try:
                _call(action)
            except BaseException as error:  # noqa: BLE001
                self.keep(action, error)

    def keep(self, action: Left, error: BaseException) -> None:
        """Keep what failed with ``error`` for another attempt; raises what is no ``Exception``."""
        if isinstance(error, CaptureError):
            self.deferred.append(action)
        elif isinstance(error, Exception):
            # As text: a log record with the exception would keep frames alive, and with them arrays.
            _log.warning("giving back memory failed, it is tried again: %s", str(error))
            self._inbox.append(Retired((), partial(_call, action), 0, None))
        else:
            self.forgotten.append(action)
            raise error

    def _resume(self) -> None:
        """What was deferred may run again, before what came later."""
        try:
            while self.deferred:
                action = self.deferred[-1]
                del self.deferred[-1]
                self.forgotten.appendleft(action)
        except IndexError:
            pass  # another thread was quicker

    def __len__(self) -> int:
        return len(self.forgotten) + len(self.deferred) + len(self._inbox) + len(self._waiting)

    @property
    def bytes_waiting(self) -> int:
        """Bytes held by what waits."""
        return sum(r.nbytes for r in (*self._inbox, *self._waiting))

    def drain(self, *, block: bool = False) -> int:
        """Run every action whose uses are done; the number run.

        Args:
            block: wait for all uses first (blocks the host), except those of capturing streams.

        Every entry is tried; failing ones stay queued.

        Raises:
            SeveralErrors: two or more actions or waits failed; a single error is raised as it is.
        """
        if (
            not self.forgotten and not self.deferred and not self._inbox and not self._waiting
        ) or self._life is not process.life:
            return 0
        lock = self._draining
        if lock._is_owned():  # as threading.Condition asks
            return 0  # a drain inside a drain does nothing
        errors: list[BaseException] = []
        try:
            if not lock.acquire(blocking=block):
                return 0
            done = self._run(block, errors)
        except BaseException:  # an interrupt
            if lock._is_owned():  # else it ended the wait for the lock
                lock.release()
            raise
        lock.release()
        raise_together("draining the retire queue", errors)
        return done

    def _run(self, block: bool, errors: list[BaseException]) -> int:
        """:meth:`drain`, with the lock held; what fails is added to ``errors``."""
        me = threading.get_ident()
        done = 0
        kept: list[Retired] = []
        pending = deque(self._waiting)
        self._waiting = []
        try:
            while self._take_arrivals(pending) or pending:  # finalisers may append while actions run
                item = pending[0]
                del pending[0]
                try:
                    if block:
                        _wait(item)
                    if (item.thread is not None and item.thread != me) or not item.ready():
                        kept += (item,)
                        continue
                    item.action()
                    done += 1
                except CaptureError:
                    kept += (item,)  # not a failure: its time comes when the capture is over
                except Exception as error:  # noqa: BLE001 - every entry is tried; raised below
                    kept += (item,)
                    errors.append(error)
                except BaseException:
                    kept += (item,)  # interrupted: nothing that still waits may be lost
                    raise
        finally:
            self._waiting = [*kept, *pending]
        return done

    def _take_arrivals(self, into: deque[Retired]) -> bool:
        """Move what arrived (also by finalisers that ran meanwhile) to ``into``; True if there was anything."""
        found = False
        while self._inbox:
            into += (self._inbox[0],)
            del self._inbox[0]
            found = True
        for queue in self.deferred, self.forgotten:
            while queue:
                try:
                    action = queue[0]
                    del queue[0]
                except IndexError:  # another thread ran it
                    break
                try:
                    item = Retired((), partial(_call, action), 0, None)
                except BaseException:  # interrupted
                    queue.appendleft(action)
                    raise
                into += (item,)
                found = True
        return found


def _call(action: Left) -> None:
    if isinstance(action, list):
        action[0](action)
    else:
        action()


def _wait(item: Retired) -> None:
    """Block until the uses of ``item`` are done, stream by stream, skipping streams that capture."""
    for stream, seq in item.uses:
        if stream.completed < seq and not stream.capturing:
            stream.synchronize()
