"""A registered object of somebody else, as its user sees it.

Owns the public calls of a handle and what they check before any device is asked. Must not know how an object is opened
(:mod:`backings`, :mod:`images`), how it was registered (:mod:`gl`), nor who else has it mapped (:mod:`life`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..arguments import seconds, whole
from ..core.stream import Stream, as_stream
from ..errors import ClosedError, MapUnavailableError, StreamMisuse, UsageError
from ..exchange.tokens import call_site
from ..formats import Format
from ..lifecycle import Owned
from .backings import WHOLE, Part
from .fences import check_value
from .image_copy import CopyPath
from .life import Life, Wish
from .makers import HandleMakers
from .mapping import CudaMap
from .transfer import WholeContents
from .users import is_record_of

T = TypeVar("T")
_BASE = 0


class CudaHandle(HandleMakers, WholeContents, Owned):
    """A GL buffer, GL image or other foreign object, registered so that it can be mapped as device memory.

    Made by :func:`cuglue.register_buffer`, :func:`cuglue.register_texture` and their kin, or the ``from_`` methods.
    Registering costs hundreds of microseconds, mapping a few: keep the handle as long as the object lives.

    Any thread may call it; calls that need the object's own thread are routed there. Close it before the object.

    Attributes:
        keep: something that has to live as long as the handle: the library object that owns the GL name.
    """

    def __init__(self, life: Life, *, no_runtime: str | None = None) -> None:
        """One more user of ``life``. ``no_runtime`` says why nothing can be mapped here, if so."""
        self._life = life
        self._no_runtime = no_runtime
        self._closed = True  # until it counts as a user, with which it is whole
        self.keep: object = None
        self._own()
        self._created_at = "{}:{}".format(*call_site())  # the caller's line, not ours
        life.add_user(self)
        self._closed = False

    # --- what it is -----------------------------------------------------------------------------------------------
    @property
    def kind(self) -> str:
        """What the object is: "GlBuffer", "GlImage", "ExternalMem", "D3d11" or "Array"."""
        return self._life.backing.kind

    @property
    def size(self) -> int:
        """Bytes of a map of the object (of an image: level 0, one layer, tight rows)."""
        return self._life.backing.size

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of such a map: (bytes,), or (height, width, channels)."""
        return self._life.backing.layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of such a map."""
        return self._life.backing.layout.dtype

    @property
    def format(self) -> Format | None:
        """Format of an image; None for plain bytes."""
        return self._life.backing.format

    @property
    def device(self) -> int:
        """Ordinal of the CUDA device that maps it."""
        return self._life.backing.state.device

    @property
    def copy_path(self) -> CopyPath | None:
        """How maps of an image copy level 0: by our surface kernels or by the driver; None for what is not copied."""
        return self._life.backing.copy_path

    @property
    def closed(self) -> bool:
        """True after :meth:`close`, also while live maps defer the end."""
        return self._closed or self._life.closed

    def __repr__(self) -> str:
        return self._life.name

    # --- maps -----------------------------------------------------------------------------------------------------
    def map(
        self,
        stream: Any = None,
        *,
        level: int = 0,
        layer: int = 0,
        readonly: bool = False,
        alias: bool = False,
        in_place: bool = False,
        timeout: float | None = None,
        join: bool = True,
    ) -> CudaMap:
        """Map the object for reading; use the result in ``with``.

        Of a buffer this is the object's own memory, which may be written too. Of an image it is a copy with tight
        rows, and what is written to it is lost.

        Args:
            stream: anything :func:`~cuglue.as_stream` takes; None: the array library's current stream. Work queued
                there sees what OpenGL did before this call.
            level: mipmap level of a texture.
            layer: array layer, cube map face or slice of a 3D texture.
            readonly: exports say that the memory may not be written; there is no CUDA array interface then.
            in_place: no copy of an image: kernels work on it through ``m.surface()`` and ``m.texture()``, and there is
                no array.
            alias: share the memory with a live writer instead of refusing; its unpublished bytes are overwritten.
            timeout: seconds to wait on the host for a write that was recorded (:meth:`record_write`); None: it is
                waited for on the GPU only.
            join: where PyTorch, Numba, JAX, Warp or PyCUDA is loaded, order all streams of the device after the map,
                so that readers of the CUDA array interface need no stream. False, and while any of those streams
                captures a graph: they are told the map's stream.

        Ordering: only enqueues.
        Ownership: of an image, memory of one copy is kept by the handle; readers share it.

        Raises:
            MapUnavailableError: it cannot be mapped now; ``reason`` says why.
            MapConflictError: a live map of the same image, or of its tensor on the host, would lose or tear data.
            StaleHandleError: the object was resized or deleted since it was registered.
            TimeoutError: a recorded write was not done in time; nothing was queued.
            ClosedError, CaptureError, StreamMisuse, UsageError, DriverError: as they say; nothing is mapped.
        """
        plan = self._life.plan
        if plan is not None and level is layer is _BASE and not (in_place or alias) and timeout is None:
            planned = plan.map((self,), stream, False, readonly, join)
            if planned is not None:
                return planned[0]
        part = self._part(level, layer, in_place)
        return self._map(stream, Wish(part, False, True, readonly, alias, join), timeout)

    def map_mut(
        self,
        stream: Any = None,
        *,
        level: int = 0,
        layer: int = 0,
        overwrite: bool = False,
        alias: bool = False,
        in_place: bool = False,
        timeout: float | None = None,
        join: bool = True,
    ) -> CudaMap:
        """Map the object for writing; leaving the map publishes what was written.

        Args:
            stream, level, layer, alias, in_place, timeout, join: as for :meth:`map`.
            overwrite: every byte will be written, so an image is not copied in; unwritten bytes are undefined.

        Ordering: only enqueues; so does leaving. Ownership, Raises: as for :meth:`map`.
        """
        plan = self._life.plan
        if plan is not None and level is layer is _BASE and not (in_place or alias) and timeout is None:
            planned = plan.map((self,), stream, True, False, join)
            if planned is not None:
                return planned[0]
        part = self._part(level, layer, in_place)
        return self._map(stream, Wish(part, True, not overwrite, False, alias, join), timeout)

    def try_map(self, stream: Any = None, **options: Any) -> CudaMap | None:
        """:meth:`map`, or None where it raises MapUnavailableError. Ordering: as there."""
        try:
            return self.map(stream, **options)
        except MapUnavailableError:
            return None

    def try_map_mut(self, stream: Any = None, **options: Any) -> CudaMap | None:
        """:meth:`map_mut`, or None where it raises MapUnavailableError. Ordering: as there."""
        try:
            return self.map_mut(stream, **options)
        except MapUnavailableError:
            return None

    def record_write(self, value: int) -> None:
        """The object's owner queued a write that signals ``value`` on the handle's fence when it is done.

        Maps from now on wait for the largest value recorded, on the GPU; 0, or an older value, changes nothing. Where
        it cannot be waited for, they raise MapUnavailableError (reason "unordered_write"). Objects that OpenGL hands
        over need no such record: it is kept, and changes nothing.

        Ordering: queues nothing, blocks nothing. Any thread may call it.

        Raises:
            UsageError: not an int of 0 to 2**64 - 1.
            ClosedError: the handle was closed.
        """
        check_value(self, value)
        self._check_open()
        writes = self._life.backing.writes
        if writes is not None:
            writes.record(value)

    @property
    def handed_back(self) -> int:
        """The value that the newest publishing signalled on the handle's fence: the owner waits for it; 0: none."""
        writes = self._life.backing.writes
        return 0 if writes is None else writes.handed_back

    def _part(self, level: object, layer: object, in_place: bool) -> Part:
        if type(level) is type(layer) is int and not (level or layer or in_place):
            return WHOLE
        level_, layer_ = whole(level), whole(layer)
        if level_ is None or layer_ is None:
            raise UsageError(f"{self!r}", got=f"level {level!r}, layer {layer!r}", expected="two ints")
        return Part(level_, layer_, bool(in_place))

    def _stream(self, stream: Any) -> Stream:
        if self._no_runtime is not None:
            raise MapUnavailableError(f"{self!r}", got=self._no_runtime, reason="no_runtime")
        state, last = self._life.backing.state, self._life.backing.last_stream
        if last is not None and stream is not None and is_record_of(last, stream):
            return last
        return as_stream(stream, device=state.device, driver=state.driver)

    def _map(self, stream: Any, wish: Wish, timeout: float | None) -> CudaMap:
        """Check what needs no device, then map where the object's calls run."""
        if timeout is not None:
            timeout = seconds(f"{self!r}: timeout", timeout)
        wish = self._allowed(wish)
        where = self._stream(stream)
        where.refuse_capture("map a graphics object")
        self._check_thread(where)
        backing = self._life.backing
        backing.state.retire.drain()
        if timeout is not None and backing.writes is not None:
            backing.writes.poll(timeout, self)
        m = self._call(self._life.map, where, wish)
        m.handle = self
        return m

    def _allowed(self, wish: Wish) -> Wish:
        """``wish`` as far as the handle is open and was registered for it."""
        self._check_open()
        if not self._life.backing.readonly:
            return wish
        if wish.writable:
            raise UsageError(f"{self!r} was registered for reading", got="map_mut()", expected="map()")
        return wish._replace(readonly=True)

    def _check_thread(self, stream: Stream) -> None:
        """Raise StreamMisuse if the thread where the object is mapped cannot name the stream."""
        if stream.thread is not None and self._life.backing.routed:
            raise StreamMisuse(
                f"{self!r} is mapped on another thread",
                got="the per-thread default stream of this one",
                expected="a stream that both threads can name",
                hint="Map on a stream object",
            )

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Map by ``function`` where the object's calls run."""
        backing = self._life.backing
        try:
            return backing.call(function, *args)
        except ClosedError as error:
            if backing.alive:
                raise
            raise MapUnavailableError(
                f"{self!r}", got="an OpenGL context that is gone", hint="Keep it open", reason="ops_failed"
            ) from error

    # --- the end --------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """End the registration, unless another handle of the same object is open. Closing again does nothing.

        With maps live, the last of them ends it when it is left.

        Ordering: does not wait for queued work; memory goes once nothing uses it.
        Ownership: close a handle before the graphics object is deleted. If the object's context is gone, so is the
        registration, and nothing is done.

        Raises:
            BusyError: a tensor's host map is open, which would lose what it holds.
            DriverError, WrongThreadError: it could not be ended; the handle can be closed again.
        """
        if self._owned_pid != os.getpid():
            return
        if self._closed:
            self._life.finish()
        else:
            self._life.close(self)
            self._closed = True
        if self._no_runtime is None:
            self._life.backing.state.retire.drain()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(
                f"{self!r} is closed",
                got="a call",
                expected="an open handle",
                hint="Register the object again",
            )

    def _forgotten(self) -> None:
        self._life.backing.post(self._life.close_here)
