"""Every error cuglue raises, as one tree.

Owns the tree and the shape of a message: *object, got, expected, way out*. Knows no CuPy and no driver: where a
foreign class must be raised too (CuPy's ``OutOfMemoryError``) the raise site builds a private subclass.

The constructor is the same everywhere: ``Error("GLTexture 7", got="RGB10_A2", expected="a colour format that
registers", hint="copy it to RGBA8")``. Typed fields come as keywords and stay readable as attributes, so nobody
has to parse a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class CuglueError(Exception):
    """Base of every error of this library.

    Args:
        what: the object and what went wrong with it.
        got: what was given or found.
        expected: what would have been right.
        hint: the way out, as one imperative sentence.
        **fields: the typed fields named in ``FIELDS``; they become attributes.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        what: str = "",
        *,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
        **fields: Any,
    ) -> None:
        unknown = set(fields) - set(self.FIELDS)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {sorted(unknown)}; fields: {self.FIELDS}")
        super().__init__(what)
        self.what = what
        self.got = got
        self.expected = expected
        self.hint = hint
        for name in self.FIELDS:
            setattr(self, name, fields.get(name))

    def __str__(self) -> str:
        text = self.what
        if self.got is not None:
            text += f": got {self.got}"
        if self.expected is not None:
            text += f", expected {self.expected}" if self.got is not None else f": expected {self.expected}"
        if self.hint:
            text += f". {self.hint}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what), dict(self.__dict__)


def _rebuild(cls: type[CuglueError], what: str) -> CuglueError:
    """Make the instance that pickle then fills from its ``__dict__``."""
    return cls(what)


# --- misuse: the caller's fault -------------------------------------------------------------------------------


class UsageError(CuglueError):
    """The call itself is wrong here: an argument, an order, a state or a thread."""


class ArgumentError(UsageError, ValueError):
    """An argument of the right type that cannot be used here: of another runtime, or already bound."""


class ClosedError(UsageError):
    """The object was closed (or a map released) before this call. Also known as HandleClosed."""


class BusyError(UsageError):
    """Somebody still uses the object: live maps, a capture under way, a buffer in flight."""


class MapConflictError(UsageError):
    """A map was asked for that would lose or tear data of a live one; ``held`` names the live kind."""

    FIELDS = ("held",)


class WrongThreadError(UsageError):
    """The call must run on another thread; ``owner`` and ``caller`` name both."""

    FIELDS = ("owner", "caller")


class NoContextError(UsageError):
    """No OpenGL context (or not the right one) is current on the thread that needs it."""


class LayoutError(UsageError, ValueError):
    """Shape, strides or sizes do not describe memory that this operation can use."""


class SizeTypeError(LayoutError, TypeError):
    """A size that is not an int."""


class NotAllocatedError(UsageError):
    """The GL object has no storage yet, so there is nothing to register."""


class StaleHandleError(UsageError):
    """The GL object was resized or deleted after it was registered."""


class AlreadyTransferredError(UsageError):
    """The registration was handed to another owner; only that owner may use it."""


class StreamMisuse(UsageError):
    """A stream, or a block on a stream, is used against the stream-ordered contract."""


# --- this machine or driver cannot ----------------------------------------------------------------------------


class UnsupportedError(CuglueError):
    """The driver, device, format or platform cannot do this; ``reason`` is a short stable word."""

    FIELDS = ("reason",)


class MapUnavailableError(CuglueError):
    """A handle cannot be mapped now. ``reason`` is one of :data:`MAP_REASONS`."""

    FIELDS = ("reason",)


#: Why a map was not given: the stable words of ``MapUnavailableError.reason``.
MAP_REASONS = (
    "no_runtime",
    "no_handle",
    "ops_failed",
    "unordered_write",
    "alloc_failed",
    "copy_failed",
    "sync_failed",
)


class PublishError(CuglueError):
    """Leaving a writable map could not copy the data back; the map stays releasable, so it can be retried."""


# --- the driver refused ---------------------------------------------------------------------------------------


class DriverError(CuglueError):
    """A driver call failed: ``code`` (int), ``name`` of the code, ``call``, ``findings`` about the likely cause."""

    FIELDS = ("code", "name", "call", "findings")
    code: int
    name: str
    call: str
    findings: Mapping[str, str] | Sequence[str] | None

    def __str__(self) -> str:
        text = super().__str__()
        if self.call:
            text = (
                f"{text}: {self.call} returned {self.name} ({self.code})"
                if text
                else (f"{self.call} returned {self.name} ({self.code})")
            )
        findings = self.findings or ()
        lines = (
            [f"{k}: {v}" for k, v in findings.items()] if isinstance(findings, Mapping) else list(findings)
        )
        return text + "".join(f"\n  - {line}" for line in lines)


class DevicePoisoned(DriverError):
    """A kernel faulted: every later call on this device fails until the process ends."""


class LaunchError(DriverError):
    """The driver refused a kernel launch (nothing ran), or the arguments do not fit the kernel."""


# --- device memory --------------------------------------------------------------------------------------------


class ResourceError(CuglueError, RuntimeError):
    """A device memory resource could not do what was asked."""


class OutOfMemory(ResourceError, MemoryError):
    """No memory: ``requested`` bytes, ``in_use`` bytes live, and what was tried before giving up."""

    FIELDS: ClassVar[tuple[str, ...]] = ("requested", "in_use", "report")
    requested: int
    in_use: int | None
    report: Any  # where the memory is (memory.report.ShortageReport), or None


class OutOfBudget(OutOfMemory):
    """A budget refused: fields ``current``, ``requested``, ``required``, ``limit``, ``remaining`` (bytes)."""

    FIELDS = ("current", "requested", "required", "limit", "remaining", "in_use", "report")

    def __init__(
        self,
        what: str = "device memory budget",
        *,
        current: int = 0,
        requested: int = 0,
        limit: int = 0,
        **rest: Any,
    ) -> None:
        fields = {k: rest.pop(k) for k in ("in_use", "report") if k in rest}
        super().__init__(
            what,
            current=current,
            requested=requested,
            required=current + requested,
            limit=limit,
            remaining=max(0, limit - current),
            **fields,
            **rest,
        )

    def __str__(self) -> str:
        figures = ", ".join(f"{n}={getattr(self, n)}" for n in self.FIELDS[:5])
        text = f"{self.what} exceeded: {figures} bytes. {self.hint or 'Free arrays or raise the limit'}"
        _, _, rest = str(self.report or "").partition("\n")  # after how much was asked for
        return f"{text}\n{rest}" if rest else text


class BufferTooBig(OutOfMemory):
    """No device or pool of this runtime could ever hold ``requested`` bytes; retrying cannot help."""


class PoolCapacityExceeded(OutOfMemory):
    """A capped pool is full: ``requested``, ``capacity`` and ``in_use`` bytes."""

    FIELDS = ("requested", "capacity", "in_use", "report")


class UseAfterFree(ResourceError):
    """The block of this ``generation`` was freed, or never belonged to the resource."""

    FIELDS = ("generation",)


class OutOfBounds(ResourceError):
    """Bytes beside the block of this ``generation`` were overwritten (a guard canary is broken)."""

    FIELDS = ("generation",)


class StorageHandleNotFound(ResourceError, LookupError):
    """A binding names no live allocation."""


class PoolsInUse(ResourceError):
    """Pools cannot be replaced while ``bytes_in_use`` bytes (or ``number_allocs`` blocks) are live in them."""

    FIELDS = ("bytes_in_use", "number_allocs")


class StreamPoolCapacity(ResourceError):
    """A :class:`StreamPool` already handed out its ``max_streams`` streams."""

    FIELDS = ("max_streams",)


# --- commands -------------------------------------------------------------------------------------------------


class CaptureError(CuglueError):
    """The call cannot happen while (or before, or after) a stream captures a graph."""


class UnwrittenError(CuglueError):
    """The bytes read were never written: a launch that should have written them failed or was skipped.

    ``root`` is the first failure, ``chain`` the launches skipped because of it, newest last.
    """

    FIELDS = ("root", "chain")


class SeveralErrors(CuglueError):
    """More than one failure; ``errors`` holds them in order, the first one is also the ``__cause__``."""

    FIELDS = ("errors",)

    def __init__(
        self, what: str = "several failures", *, errors: Sequence[BaseException] = (), **rest: Any
    ) -> None:
        super().__init__(what, errors=tuple(errors), **rest)

    def __str__(self) -> str:
        lines = "".join(f"\n  {i}. {type(e).__name__}: {e}" for i, e in enumerate(self.errors, 1))
        return super().__str__() + lines

    errors: tuple[BaseException, ...]


def raise_together(what: str, errors: list[BaseException]) -> None:
    """Raise what was collected: nothing, a single error as it is, or :class:`SeveralErrors`.

    Empties the list. An error that lies in a variable of a frame which its traceback names keeps that frame alive, and
    with it every array in it, until the collector comes.
    """
    if not errors:
        return
    found = tuple(errors)
    errors.clear()
    try:
        if len(found) == 1:
            raise found[0]
        raise SeveralErrors(what, errors=found) from found[0]
    finally:
        del found


def forget_frames(error: BaseException | None) -> None:
    """Take the tracebacks of ``error`` and of what it comes from away: who keeps it must keep nobody's arrays alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class DanglingExportWarning(UserWarning):
    """A map was left while arrays made from it are alive and its memory goes away; names the line that made them."""


# Names used by the seed documents for the same things.
HandleClosed = ClosedError
NoGLContext = NoContextError
UnsupportedStrides = LayoutError
