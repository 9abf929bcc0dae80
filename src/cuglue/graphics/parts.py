"""A registration given away: the functions and counts by which another library maps it, in Python or in C.

Owns :class:`CudaClientParts` (contracts A20-A21): who has the registration, that it ends once, and how long the
functions live. Must not know what is behind the functions (:mod:`channel`), nor how they look to C (:mod:`cparts`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from ..arguments import shown
from ..errors import AlreadyTransferredError, LayoutError, UsageError
from ..exchange.tokens import call_site
from ..lifecycle import Owned
from .cparts import ClientParts, c_functions, python_functions

MapFunction = Callable[[int], tuple[int, int] | None]
EndFunction = Callable[[int], None]


class NotTransferableError(UsageError, TypeError):
    """Only a registered GL buffer can be given away; the handle stays as it was."""


class Channel(Protocol):
    """How long the functions live: as long as somebody has retained them."""

    def retain(self) -> None:
        """One more owner."""

    def release(self) -> None:
        """One less; the last one ends the functions."""


class CudaClientParts(Owned):
    """A registered GL buffer as three functions, taken out of its handle by :meth:`CudaHandle.into_client_parts`.

    Give it to :meth:`Tensor.attach`, to :meth:`CudaHandle.from_client_parts`, or as :meth:`as_ctypes` to a C library:
    whoever takes it ends the registration. If nobody does, closing it does.

    :meth:`retain` and :meth:`release` count the owners of the functions, never of the buffer. The parts begin with one
    count; a callee takes its own before it returns.

    Attributes:
        resource: the registered resource, which every function is given.
        size: bytes of the buffer.
        map_fn: gives ``(address, bytes)``, or None where it cannot be mapped; for use on any stream.
        unmap_fn: gives it back; all streams of the device are waited for on the GPU.
        unregister_fn: ends the registration.
        device: ordinal of the CUDA device that the buffer is registered with; None: the giver does not say.

    Ownership: close it, also after it was taken.
    """

    def __init__(
        self,
        *,
        resource: int,
        size: int,
        map_fn: MapFunction,
        unmap_fn: EndFunction,
        unregister_fn: EndFunction,
        channel: Channel,
        post: Callable[[Callable[[], object]], None] | None = None,
        device: int | None = None,
    ) -> None:
        """Parts that another library gave; those of a handle come from it.

        Args:
            resource, size, map_fn, unmap_fn, unregister_fn, device: as the attributes.
            channel: counts the owners of the functions.
            post: brings what a finaliser left to where it can be done; None: nobody can.
        """
        self.resource = resource
        self.size = size
        self.map_fn = map_fn
        self.unmap_fn = unmap_fn
        self.unregister_fn = unregister_fn
        self.channel = channel
        self.device = device
        self._post = post
        self._taken = False
        self._ended = False
        self._counts = 1
        self._lock = threading.RLock()
        self._own()
        self._created_at = "{}:{}".format(*call_site())

    @property
    def transferred(self) -> bool:
        """Whether somebody has taken the registration."""
        return self._taken

    def retain(self) -> None:
        """One more owner of the functions."""
        with self._lock:
            self.channel.retain()
            self._counts += 1

    def release(self) -> None:
        """One owner less: give back what :meth:`retain` took, or the count that these parts began with."""
        with self._lock:
            if not self._counts:
                raise UsageError(f"{self!r}", got="release()", expected="a count that was retained")
            self.channel.release()
            self._counts -= 1

    def check(self) -> None:
        """Refuse parts that cannot be taken. Calls and changes nothing.

        Raises:
            AlreadyTransferredError: somebody has taken them.
            ClosedError: they were closed.
            UsageError: a function or the channel is missing.
            LayoutError: no resource, or no size.
        """
        if self._taken:
            raise AlreadyTransferredError(
                f"{self!r} has an owner already", got="a second one", expected="parts that nobody has taken"
            )
        self._check_open()
        names = ("map_fn", "unmap_fn", "unregister_fn", "channel")
        missing = [name for name in names if not getattr(self, name)]
        if missing:
            raise UsageError(
                f"{self!r}", got=f"no {', '.join(missing)}", expected=f"all of {', '.join(names)}"
            )
        if not isinstance(self.resource, int) or not self.resource:
            raise LayoutError(f"{self!r}", got=f"resource {self.resource!r}", expected="one that is not 0")
        if not isinstance(self.size, int) or self.size < 0:
            raise LayoutError(f"{self!r}", got=f"{self.size!r} bytes", expected="0 or more")

    def device_for(self, device: int | None) -> int:
        """The device of who takes them: ``device``, or None for the one that they say, else the first.

        Raises:
            UsageError: they are of another.
        """
        if device is not None and self.device not in (None, device):
            raise UsageError(
                f"{self!r}, device {self.device}", got=f"device={shown(device)}", expected="its own"
            )
        return (self.device or 0) if device is None else device

    def take(self) -> None:
        """Become the owner of the registration, and retain the functions for that.

        For callees in Python; one in C retains by itself, and its caller says so with :meth:`mark_transferred`.

        Raises: as :meth:`check`.
        """
        with self._lock:
            self.check()
            self.channel.retain()
            self._taken = True

    def mark_transferred(self) -> None:
        """Say that a callee in C took the registration. Raises AlreadyTransferredError if somebody has it."""
        with self._lock:
            self.check()
            self._taken = True

    def as_ctypes(self) -> ClientParts:
        """The parts as a C structure of function pointers: see ``cparts.py`` for its declaration in C.

        The pointers are good as long as the functions are retained; they may be called on any thread.
        """
        self._check_open()
        return c_functions(self)

    @classmethod
    def from_ctypes(cls, parts: ClientParts) -> CudaClientParts:
        """Parts that a C library gives; it keeps its own count.

        Raises:
            UsageError: a null context or function; nothing was called.
        """
        return cls(**python_functions(parts))

    def _end(self) -> None:
        """End the registration, if nobody took it, once; then the count of these parts."""
        with self._lock:
            if not self._taken and not self._ended:
                self.unregister_fn(self.resource)
                self._ended = True
            if self._counts:
                self.channel.release()
                self._counts -= 1

    def _close(self) -> None:
        self._end()

    def _forgotten(self) -> None:
        if self._post is not None:
            self._post(self._end)

    def __repr__(self) -> str:
        state = ", transferred" if self._taken else ", closed" if self.closed else ""
        return f"CudaClientParts(size={self.size}{state})"


class TakenOps:
    """The functions of parts that were taken, as a handle's ops: the end of the registration gives the channel back."""

    def __init__(self, parts: CudaClientParts) -> None:
        self._map, self._unmap, self._unregister = parts.map_fn, parts.unmap_fn, parts.unregister_fn
        self._channel = parts.channel
        self._ended = False

    def map(self, res: int) -> tuple[int, int] | None:
        """Inherited."""
        return self._map(res)

    def unmap(self, res: int) -> None:
        """Inherited."""
        self._unmap(res)

    def unregister(self, res: int) -> None:
        """Inherited. Once each, also where the second step failed and is tried again."""
        if not self._ended:
            self._unregister(res)
            self._ended = True
        self._channel.release()
