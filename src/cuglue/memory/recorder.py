"""Telling of uses that nobody can see: of plain CuPy kernels, and of anybody's launches on blocks.

Owns :func:`use` and :class:`LaunchRecorder` (contracts B35-B40). Must not know kernels: it brackets a launch that the
caller makes.
"""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self
from weakref import ref

from ..core.block import OPEN, BlockId, BlockLife
from ..core.stream import Stream, as_stream
from ..driver.protocol import Access
from ..errors import CuglueError, StreamMisuse, raise_together
from ..lifecycle import BlockState, leave
from .lookup import block_behind, resource_of
from .resource import DeviceMemoryResource
from .table import gone
from .uses import check_access


def use(thing: object, stream: object, access: Access = Access.READ_WRITE) -> None:
    """Tell that work on ``stream`` uses memory, so that no free and no later command runs under it.

    Call it before the launch or after it, once for each launch: all that ``stream`` has got when the memory is freed,
    or used by a command, is waited for.

    Args:
        thing: a map, view, buffer or block, a CuPy array (any view of one), a PyTorch tensor, or anything with
            ``__cuda_array_interface__``.
        stream: anything :func:`~cuglue.as_stream` takes.
        access: what the work does with it.

    Ordering: only enqueues. Work queued on ``stream`` from now on comes after what uses the memory so far, also after
    what CuPy queued on the stream the memory was allocated on.
    Ownership: keeps nothing alive but the stream.

    Raises:
        StreamMisuse: nobody tracks that memory; no stream. ArgumentError: no Access (a ValueError).
        UseAfterFree: a block that was given back.
        CaptureError: one of the streams captures.
    """
    check_access(access)
    block = block_behind(thing)
    if block is None:
        if _is_empty(thing):
            return
        raise StreamMisuse(
            f"use of {type(thing).__name__}",
            got="memory that nobody tracks",
            expected="memory of a cuglue resource, a map, a view or a buffer",
            hint="Let CuPy allocate from one: cupy.cuda.set_allocator(resource.malloc)",
        )
    if block.state is not BlockState.LIVE:
        raise gone(block.ptr, block.generation)
    user = as_stream(stream, device=block.stream.device, driver=block.stream.driver)
    record = getattr(thing, "record", None)
    if callable(record):  # a map: leaving it waits for the stream
        record(user)
    with user.state.ordering:
        user.join(block.stream)
        block.prepare(user, access)
        block.finish(user, access, OPEN)


def _is_empty(thing: object) -> bool:
    """Whether ``thing`` has no bytes, and so no memory."""
    return getattr(thing, "nbytes", None) == 0


class _Tracker(Protocol):
    """Who is told of uses: a resource, or a block that has none."""

    def supports_block_use_tracking(self) -> bool: ...
    def prepare_block_use(self, block_id: BlockId, stream: Any, access: Access) -> None: ...
    def finish_block_use(self, block_id: BlockId, stream: Any, access: Access) -> None: ...
    def cancel_block_use(self, block_id: BlockId, stream: Any, access: Access) -> None: ...


class _Foreign:
    """Uses of memory that is no resource's: of a mapped buffer, say."""

    def __init__(self, block: BlockLife) -> None:
        self._block = ref(block)

    def supports_block_use_tracking(self) -> bool:
        """Always: the block itself keeps them."""
        return True

    def prepare_block_use(self, block_id: BlockId, stream: Stream, access: Access) -> None:
        """See DeviceMemoryResource."""
        self._live(block_id).prepare(stream, access)

    def finish_block_use(self, block_id: BlockId, stream: Stream, access: Access) -> None:
        """See DeviceMemoryResource."""
        self._live(block_id).finish(stream, access)

    def cancel_block_use(self, block_id: BlockId, stream: Stream, access: Access) -> None:
        """See DeviceMemoryResource."""

    def _live(self, block_id: BlockId) -> BlockLife:
        block = self._block()
        if block is None or block.state is not BlockState.LIVE:
            raise gone(block_id.ptr, block_id.generation)
        return block

    def __repr__(self) -> str:
        return "memory of no resource"


class _Use(NamedTuple):
    """One block in a recorder. It holds no block."""

    tracker: _Tracker
    access: Access
    home: Stream | None  # of an array, whose stream gets work that nobody counts


class LaunchRecorder:
    """Orders one launch: note what it uses, :meth:`preflight`, launch, :meth:`commit`; or use it in ``with``.

    ``with LaunchRecorder(stream).read(a).write(b): kernel(...)``
    """

    def __init__(self, stream: object = None, *, strict: bool = True) -> None:
        """Make a recorder.

        Args:
            stream: where the launch will be queued.
            strict: refuse memory that nobody tracks; else leave it out.
        """
        self.stream = as_stream(stream)
        self.strict = strict
        self._uses: dict[BlockId, _Use] = {}
        self._rejected: str | None = None  # the first thing that nobody tracks
        self._prepared: list[BlockId] | None = None  # frozen by a successful preflight
        self._closed = False

    # --- what it uses -------------------------------------------------------------------------------------------
    def read(self, thing: object) -> Self:
        """The launch reads it."""
        return self._note(thing, Access.READ)

    def write(self, thing: object) -> Self:
        """The launch writes it."""
        return self._note(thing, Access.WRITE)

    def read_write(self, thing: object) -> Self:
        """The launch reads and writes it."""
        return self._note(thing, Access.READ_WRITE)

    @property
    def recorded_count(self) -> int:
        """Different blocks noted."""
        return len(self._uses)

    def _note(self, thing: object, access: Access) -> Self:
        if self._closed or self._prepared is not None:
            raise StreamMisuse(
                repr(self),
                got=f"{type(thing).__name__} recorded after preflight",
                expected="all uses before it",
                hint="Use one recorder for each launch",
            )
        block = block_behind(thing)
        if block is None:
            if self.strict and not _is_empty(thing) and self._rejected is None:
                self._rejected = type(thing).__name__
            return self
        known = self._uses.get(block.id)
        merged = access if known is None else known.access | access
        tracker = resource_of(block) or _Foreign(block)
        home = block.stream if getattr(block, "PLAIN", False) else None
        self._uses[block.id] = _Use(tracker, merged, home)
        return self

    # --- around the launch --------------------------------------------------------------------------------------
    def preflight(self, resource: DeviceMemoryResource | None = None) -> None:
        """Queue the waits that the launch needs, and freeze what it uses. If it fails, uses may still be added.

        Args:
            resource: the one that all memory has to be of, if given.

        Ordering: only enqueues. Waits queued before a failure stay: they are order too much, never too little.

        Raises:
            StreamMisuse: memory that nobody tracks (strict), or of another resource; a resource that cannot track.
            UseAfterFree: a block was given back meanwhile.
        """
        self._check_open("preflight")
        for use in self._uses.values():
            if resource is not None and use.tracker is not resource:
                raise StreamMisuse(
                    repr(self),
                    got=f"memory of another resource: {use.tracker!r}",
                    expected=f"memory of {resource!r}",
                )
        if self._rejected is not None:
            raise StreamMisuse(
                repr(self),
                got=f"untracked buffer rejected: {self._rejected}",
                expected="memory of a cuglue resource",
                hint="Allocate it from one, or use strict=False",
            )
        for use in self._uses.values():
            if not use.tracker.supports_block_use_tracking():
                raise StreamMisuse(
                    repr(self),
                    got=f"memory of {use.tracker!r}, where block use tracking is unsupported",
                    expected="a resource that tracks uses",
                    hint="Use AsyncCudaResource, or a pool over it",
                )
        prepared: list[BlockId] = []
        try:
            for block, use in self._uses.items():
                if use.home is not None:
                    self.stream.join(use.home)
                use.tracker.prepare_block_use(block, self.stream, use.access)
                prepared.append(block)
        except BaseException:
            _cancel({block: self._uses[block] for block in prepared}, self.stream)
            raise
        self._prepared = prepared

    def commit(self) -> None:
        """Note the launch, which is enqueued by now. The recorder is done.

        Ordering: only enqueues; where noting fails, blocks the host until the launch is done, so that no free can run
        under it.

        Raises:
            StreamMisuse: no successful preflight, or committed before.
            UseAfterFree: a block was given back between preflight and commit; all others are noted.
        """
        self._check_open("commit")
        if self._prepared is None:
            if self._uses or self._rejected is not None:  # also a launch on strangers alone
                raise StreamMisuse(
                    repr(self),
                    got="commit() without a successful preflight",
                    expected="preflight() before the launch",
                )
            self._closed = True
            return
        self._closed = True
        errors: list[BaseException] = []
        for block in self._prepared:
            use = self._uses[block]
            try:
                use.tracker.finish_block_use(block, self.stream, use.access)
                if use.home is not None:
                    use.home.join(self.stream)
            except CuglueError as error:
                errors.append(error)
        if errors:
            try:
                self.stream.synchronize()
            except CuglueError as error:
                errors.append(error)
        raise_together(f"committing {self!r}", errors)

    def __enter__(self) -> Self:
        self.preflight()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception too: the launch may be in flight.
        leave(self.commit, error, "committing", self)

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise StreamMisuse(
                repr(self), got=f"{call}() after commit()", expected="a recorder for each launch"
            )

    def __del__(self) -> None:
        prepared = getattr(self, "_prepared", None)
        if prepared and not self._closed:  # never launched, for all we know: nobody need wait for it
            self.stream.state.retire.forget(partial(_cancel, dict(self._uses), self.stream))

    def __repr__(self) -> str:
        return f"LaunchRecorder({self.stream!r}, {len(self._uses)} blocks)"


def _cancel(uses: dict[BlockId, _Use], stream: Stream) -> None:
    for block, use in uses.items():
        try:
            use.tracker.cancel_block_use(block, stream, use.access)
        except CuglueError:
            pass  # the block is gone, and its ticket with it
