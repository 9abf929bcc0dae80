"""Which process and which thread this is, as objects that end with them; and how a forked child ends.

Owns one object that changes in a forked child (device handles do not survive a fork, and a child must not free what its
parent uses), and one per thread (idents are reused). Comparing them costs a fraction of asking the system.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import cast

from ..errors import UsageError

#: Stands for this process; keep it with what belongs to the process and compare by identity.
life = object()
_threads = threading.local()


def _forked() -> None:
    global life
    life = object()


os.register_at_fork(after_in_child=_forked)


def skip_exit_handlers() -> None:
    """Let this process, a forked child, end without what libraries had asked the C library before to do at its exit.

    Python ends as ever, what C code has written is flushed, and the exit status stays. Does nothing without glibc.
    """
    try:
        c = ctypes.CDLL(None)
        c.on_exit(c._exit, None)  # called with the status, and before all that was registered earlier
        c.__cxa_atexit(c.fflush, None, None)  # called before that
    except (OSError, AttributeError):
        return


class ThreadToken:
    """Stands for a thread: its per-thread default stream must not change hands with the ident."""

    __slots__ = ()


def this_thread() -> ThreadToken:
    """The token of the calling thread."""
    try:
        return cast(ThreadToken, _threads.token)
    except AttributeError:
        token = _threads.token = ThreadToken()
        return token


def forked_child(who: object) -> UsageError:
    """The error for a call on something of the device in a process that was forked since it was made."""
    return UsageError(
        repr(who),
        got="a call in a forked child",
        expected="the process that made it",
        hint="Start workers with the 'spawn' or 'forkserver' method and make resources there",
    )
