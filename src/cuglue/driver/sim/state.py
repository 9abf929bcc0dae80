"""The state behind every call of the simulated device: devices, addresses, clocks, hazards and faults.

Owns the lock, what is known about memory, and the list of hazards. Must not know queueing or waiting (:mod:`core`) nor
what any call means (the ``*_calls`` modules, mixins over it).
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from ...errors import DevicePoisoned, UsageError
from ..protocol import Access, Capabilities, MemoryType
from . import codes
from .capture import Capture
from .hazards import Hazard, HazardError, Operation, call_site
from .memory import AddressSpace, Allocation, Bytes, Storage, host_bytes
from .queues import Handles, Mark, Queue, Record, Scheduler
from .ranges import Range
from .shadow import HOST, Clock, Use
from .streams import CurrentStreams
from .watch import Watch

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound="State")


#: Questions about the thread: they touch no device, so a forked child may ask them.
_HOST_ONLY = frozenset({"device_current", "stream_current", "capture_status"})


def driver_call(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Count the call and let one thread at a time in."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: C, *args: P.args, **kwargs: P.kwargs) -> R:
        if os.getpid() != self._pid:  # no lock: another thread may have held it at the fork
            if name in _HOST_ONLY:
                return method(self, *args, **kwargs)
            raise codes.refused(
                codes.INITIALIZATION_ERROR,
                name,
                "simulated device of a forked process",
                got=f"process {os.getpid()}",
                expected=f"process {self._pid}, which made it",
            )
        with self._lock:
            self._enter(name)
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]  # wraps() gives up the name of self


class Touch(NamedTuple):
    """An operation's use of bytes of one allocation."""

    allocation: Allocation
    range: Range
    access: Access


class Reach(NamedTuple):
    """Bytes that an operation reaches: ``range`` of ``data``, and the uses that this makes."""

    data: Bytes
    range: Range
    touches: list[Touch]


class Fault(Exception):
    """A kernel did what faults on a real device; ``code`` says what. Never leaves the simulated device."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


@dataclass(eq=False, slots=True)
class Device:
    """One simulated device."""

    ordinal: int
    limit: int  # bytes of memory
    used: int = 0  # bytes live and pooled
    pooled: list[tuple[Allocation, Use, Mark]] = field(default_factory=list)
    legacy: Queue | None = None
    per_thread: list[Queue] = field(default_factory=list)
    fault: DevicePoisoned | None = None
    fault_seen: bool = False
    context_waits: list[Record] = field(default_factory=list)
    gone: Clock = field(
        default_factory=dict
    )  # what destroyed streams had queued: a wait for the device covers it


class State:
    """State of the simulated device. See :class:`cuglue.driver.sim.SimDriver` for the public face."""

    def __init__(
        self,
        seed: int,
        devices: int,
        *,
        memory_bytes: int,
        wait_limit: float,
        disable: Collection[str],
    ) -> None:
        self._pid = os.getpid()
        unknown = set(disable) - set(Capabilities.__dataclass_fields__)
        if unknown or devices < 1:
            raise UsageError(
                "SimDriver",
                got=f"disable={sorted(unknown)}, devices={devices}",
                expected="fields of Capabilities and at least one device",
            )
        self.seed = seed
        self.wait_limit = wait_limit
        self.counts: Counter[str] = Counter()
        self._disabled = frozenset(disable)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._devices = [Device(i, memory_bytes) for i in range(devices)]
        self._space = AddressSpace()
        self._storage = Storage(self._space.forget)
        self._scheduler = Scheduler(seed)
        self._graph_random = Random(seed)
        self._streams: Handles[Queue] = Handles(0x5000_0000, 64)
        self._current = CurrentStreams()
        self._dropped: deque[int] = deque()  # streams whose objects are gone
        self._parties = HOST  # newest party of the clocks
        self._host: Clock = {}
        self._captures: list[Capture] = []
        self._watched: dict[int, Allocation] = {}
        self._hazards: list[Hazard] = []
        self._unreported: list[Hazard] = []
        self._local = threading.local()
        self._callback_threads: set[int] = set()
        self._executing: int | None = None

    # --- entering a call ------------------------------------------------------------------------------------------
    def _enter(self, call: str) -> None:
        if self._callback_threads or self._executing is not None:
            thread = threading.get_ident()
            if thread in self._callback_threads or self._executing == thread:
                raise codes.refused(
                    codes.NOT_PERMITTED, call, "driver call from a host callback or a sim function"
                )
        if self._dropped:
            self._destroy_dropped()
        self.counts[call] += 1

    def _destroy_dropped(self) -> None:
        """Destroy the streams whose objects were dropped."""
        while self._dropped:
            self._forget_stream(self._dropped.popleft())

    def _forget_stream(self, handle: int) -> None:
        """Destroy a stream, whatever state its device is in (``stream_calls``)."""
        raise NotImplementedError

    def _device(self, ordinal: int, call: str) -> Device:
        """The device, unless it is poisoned."""
        if not 0 <= ordinal < len(self._devices):
            self._check_ordinal(ordinal, call)
        device = self._devices[ordinal]
        if device.fault is not None and device.fault_seen:
            raise codes.poisoned(device.fault.code, call, f"device {ordinal}: {device.fault.what}")
        return device

    def _check_ordinal(self, ordinal: int, call: str) -> None:
        if not 0 <= ordinal < len(self._devices):
            raise codes.refused(
                codes.INVALID_DEVICE, call, f"device {ordinal}", expected=f"0 to {len(self._devices) - 1}"
            )

    def _needs(self, capability: str, call: str) -> None:
        if capability in self._disabled:
            raise codes.refused(codes.NOT_SUPPORTED, call, f"capability {capability} is switched off")

    # --- hazards and faults -----------------------------------------------------------------------------------------
    def _hazard(
        self, kind: str, allocation: Allocation, range: Range, first: Operation, second: Operation
    ) -> None:
        self._note(kind, allocation.ptr + range.start, range.nbytes, first, second)

    def _note(self, kind: str, ptr: int, nbytes: int, first: Operation, second: Operation) -> None:
        """Note a hazard, once for its two lines until it is raised: a loop would repeat it."""
        hazard = Hazard(kind, ptr, nbytes, first, second)
        lines = (kind, first.site, second.site)
        if all((h.kind, h.first.site, h.second.site) != lines for h in self._unreported):
            self._hazards.append(hazard)
            self._unreported.append(hazard)

    def _host_use(self, allocation: Allocation, range: Range, access: Access, name: str) -> Operation:
        """The host reads or writes now: whatever it has not waited for is a hazard."""
        operation = Operation(name, None, call_site())
        if self._lives(Touch(allocation, range, access), operation):
            for old in allocation.log.conflicts(range, access, self._host):
                self._hazard("host access that nothing orders", allocation, range, old.operation, operation)
        return operation

    def _watch(self, allocation: Allocation) -> Watch:
        if allocation.watch is None:
            allocation.watch = Watch(
                allocation.data, lambda kind, range, a, b: self._hazard(kind, allocation, range, a, b)
            )
            self._watched[id(allocation)] = allocation
        return allocation.watch

    def _lives(self, touch: Touch, operation: Operation) -> bool:
        allocation = touch.allocation
        if allocation.live:
            return True
        kind = "use after unmap" if allocation.kind == "mapped" else "use after free"
        self._hazard(kind, allocation, touch.range, allocation.end or allocation.began, operation)
        return False

    def _reveal(self, devices: Iterable[int], call: str) -> None:
        for ordinal in devices:
            device = self._devices[ordinal]
            if device.fault is not None:
                device.fault_seen = True
                error = codes.poisoned(device.fault.code, call, f"device {ordinal}: {device.fault.what}")
                raise error from device.fault.__cause__

    def _raise_hazards(self) -> None:
        if self._unreported:
            found, self._unreported = tuple(self._unreported), []
            raise HazardError("work that nothing orders", hazards=found)

    def _poison(self, device: int, code: int, what: str, cause: BaseException | None) -> None:
        own = self._devices[device]
        if own.fault is None:
            own.fault = codes.poisoned(code, "kernel_launch", what)
            own.fault.__cause__ = cause
        self._scheduler.drop_work(device)

    # --- addresses ------------------------------------------------------------------------------------------------
    def _reach(self, ptr: int, range: Range, access: Access, call: str) -> Reach:
        """``range`` (from ``ptr`` on) of the memory there, which may be mapped in several pieces side by side."""
        pieces = self._pieces(ptr, range)
        if len(pieces) < 2:
            touch = self._touch(ptr, range, access, call)
            return Reach(touch.allocation.data, touch.range, [touch])
        base, end = pieces[0].ptr, pieces[-1].ptr + pieces[-1].nbytes
        own = range.shifted(ptr - base)
        touches = [
            Touch(piece, part.shifted(base - piece.ptr), access)
            for piece in pieces
            for part in own.within(piece.ptr - base, piece.ptr - base + piece.nbytes)
        ]
        return Reach(host_bytes(base, end - base), own, touches)

    def _pieces(self, ptr: int, range: Range) -> list[Allocation]:
        """The mapped pieces that hold ``range``; none where something else lies there, or nothing at some of it."""
        at, end = ptr + range.start, ptr + range.end
        found: list[Allocation] = []
        while at < end:
            piece = self._space.find(at)
            if piece is None or piece.kind != "vmm":
                return []
            found.append(piece)
            at = piece.ptr + piece.nbytes
        return found

    def _touch(self, ptr: int, range: Range, access: Access, call: str) -> Touch:
        """``range`` (from ``ptr`` on) as a use of the allocation that holds it."""
        allocation = self._space.find(ptr)
        if allocation is None:
            raise codes.refused(
                codes.INVALID_VALUE, call, "address", got=f"{ptr:#x}", expected="memory of a device"
            )
        own = range.shifted(ptr - allocation.ptr)
        if own.start < 0 or own.end > allocation.nbytes:
            raise codes.refused(
                codes.INVALID_VALUE,
                call,
                f"range of {range.nbytes} bytes at {ptr:#x}",
                expected=f"within the {allocation.nbytes} bytes at {allocation.ptr:#x}",
            )
        return Touch(allocation, own, access)

    def _operation(self, name: str, queue: Queue | None = None) -> Operation:
        return Operation(name, queue.handle if queue is not None else None, call_site())

    def _admit(self, data: Bytes, device: int, type: MemoryType, kind: str, began: Operation) -> Allocation:
        """A live allocation over ``data``."""
        allocation = Allocation(data.ctypes.data, data.nbytes, device, type, kind, data, began)
        self._space.add(allocation)
        return allocation

    def _end(self, allocation: Allocation, operation: Operation) -> None:
        """The life of ``allocation`` ends for whoever queues work from now on."""
        allocation.live = False
        allocation.end = operation
        if allocation.watch is not None:
            allocation.watch.check()
            self._watched.pop(id(allocation), None)
