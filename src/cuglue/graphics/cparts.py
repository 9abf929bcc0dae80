"""Client parts as C sees them: the structure, the function pointers, and how long those live.

    typedef struct {
        void *context;                                  /* first argument of every function */
        void (*retain)(void *context);
        void (*release)(void *context);
        int (*map)(void *context, void *resource, void **address, size_t *nbytes);
        int (*unmap)(void *context, void *resource);
        int (*unregister)(void *context, void *resource);
        void *resource;
        size_t size;
    } cuglue_client_parts;

The three functions answer 0, or -1 where they failed: why is logged. They may be called on any thread that does not
hold Python's lock, as long as the context is retained.

Owns these and their conversion, both ways. Must not know who owns a registration.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import DriverError, UsageError

if TYPE_CHECKING:
    from .parts import CudaClientParts

_log = logging.getLogger(__name__)
_COUNT = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_MAP = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
)
_END = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

_numbers = itertools.count(1)
#: Channels that somebody has retained, by the number that C knows them by.
_kept: dict[int, CountedChannel] = {}
#: The last ones that ended: C may be inside the very pointer whose call ended them, so they are let go of later.
_ending: deque[CountedChannel] = deque(maxlen=16)


class ClientParts(ctypes.Structure):
    """``cuglue_client_parts``."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("retain", _COUNT),
        ("release", _COUNT),
        ("map", _MAP),
        ("unmap", _END),
        ("unregister", _END),
        ("resource", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
    )


class CountedChannel:
    """A channel that counts in Python. C knows it by a number, under which it is kept while somebody has retained it.

    Args:
        ended: called once when the last owner is gone.
    """

    def __init__(self, ended: Callable[[], None] | None = None) -> None:
        self.count = 1
        self.number = next(_numbers)
        self.pointers: tuple[Any, ...] = ()
        self._ended = ended
        self._lock = threading.Lock()
        _kept[self.number] = self

    def retain(self) -> None:
        """One more owner."""
        with self._lock:
            if not self.count:
                raise UsageError(
                    "callback channel", got="retain()", expected="a channel that was not given up"
                )
            self.count += 1

    def release(self) -> None:
        """One less; the last one ends the functions."""
        with self._lock:
            if not self.count:
                raise UsageError(
                    "callback channel", got="release()", expected="a channel that was not given up"
                )
            self.count -= 1
            last = not self.count
        if last:
            _ending.append(_kept.pop(self.number))
            if self._ended is not None:
                self._ended()


def c_functions(parts: CudaClientParts) -> ClientParts:
    """The structure for C. Its pointers live as long as the parts' channel is retained."""
    channel = parts.channel
    if not isinstance(channel, CountedChannel):
        raise UsageError(f"{parts!r} came from C", got="as_ctypes()", expected="parts of a handle")
    if not channel.pointers:
        channel.pointers = _pointers(parts, channel.number)
    return ClientParts(channel.number, *channel.pointers, parts.resource, parts.size)


def _pointers(parts: CudaClientParts, number: int) -> tuple[Any, ...]:
    """``(retain, release, map, unmap, unregister)``. They refer to the functions, not to the parts."""
    map_fn, unmap_fn, unregister_fn = parts.map_fn, parts.unmap_fn, parts.unregister_fn
    retain, release = parts.channel.retain, parts.channel.release

    def c_map(context: int, resource: int, address: Any, nbytes: Any) -> int:
        answer: list[tuple[int, int] | None] = []
        if _run("map", lambda: answer.append(map_fn(resource))) or answer[0] is None:
            return -1
        address[0], nbytes[0] = answer[0]
        return 0

    return (
        _COUNT(lambda context: _quiet("retain", retain)),
        _COUNT(lambda context: _quiet("release", release)),
        _MAP(c_map),
        _END(lambda context, resource: _run("unmap", lambda: unmap_fn(resource))),
        _END(lambda context, resource: _run("unregister", lambda: unregister_fn(resource))),
    )


def _run(name: str, function: Callable[[], object]) -> int:
    """0, or -1 where ``function`` failed: no exception can leave through C."""
    try:
        function()
    except Exception:  # noqa: BLE001 - logged, and answered with -1
        _log.exception("client parts: %s failed", name)
        return -1
    return 0


def _quiet(name: str, function: Callable[[], object]) -> None:
    _run(name, function)


class _CChannel:
    """The channel of a C library."""

    def __init__(self, parts: ClientParts) -> None:
        self._context, self._retain, self._release = parts.context, parts.retain, parts.release

    def retain(self) -> None:
        """Inherited."""
        self._retain(self._context)

    def release(self) -> None:
        """Inherited."""
        self._release(self._context)


def python_functions(parts: ClientParts) -> dict[str, Any]:
    """What :class:`CudaClientParts` takes, of a structure that C filled in. It has its own count afterwards.

    Raises:
        UsageError: a null context or function; nothing was called.
    """
    names = ("context", "retain", "release", "map", "unmap", "unregister", "resource")
    missing = [name for name in names if not getattr(parts, name)]
    if missing:
        raise UsageError(
            "client parts", got=f"null: {', '.join(missing)}", expected=f"all of {', '.join(names)}"
        )
    context, c_map = parts.context, parts.map

    def map_fn(resource: int) -> tuple[int, int] | None:
        address, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
        if c_map(context, resource, ctypes.byref(address), ctypes.byref(nbytes)):
            return None
        return address.value or 0, nbytes.value

    def ending(name: str) -> Callable[[int], None]:
        function = getattr(parts, name)

        def end(resource: int) -> None:
            answer = function(context, resource)
            if answer:
                raise DriverError(f"client parts: {name} failed", code=answer, name="", call=name)

        return end

    channel = _CChannel(parts)
    channel.retain()
    return {
        "resource": parts.resource,
        "size": parts.size,
        "map_fn": map_fn,
        "unmap_fn": ending("unmap"),
        "unregister_fn": ending("unregister"),
        "channel": channel,
    }
