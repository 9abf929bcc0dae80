"""Queueing and waiting: the two things that all calls of the simulated device share.

Owns how an operation is queued, judged and run, how the host waits, and what a capture forbids. Must not know what an
operation does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from ...errors import DriverError
from ..protocol import Access, CaptureMode, DeviceStream
from . import codes
from .capture import Capture
from .hazards import DeviceHangs, Operation, Site, call_site
from .memory import Allocation
from .queues import Mark, Queue, Record, Step
from .ranges import Range
from .shadow import Clock, Use, join
from .state import Device, Fault, State, Touch

_POLL = 0.001  # seconds between looks at what another thread or process must release


_NOTHING = Range(0, 0)
Uses = tuple[tuple[Allocation, Use], ...]


def _nothing() -> None:
    """What a wait does when it runs."""


def _of_another(call: str, own: int, device: int | None) -> DriverError:
    return codes.refused(
        codes.INVALID_RESOURCE_HANDLE, call, f"stream of device {own}", expected=f"device {device}"
    )


class Core(State):
    """Queueing and waiting over :class:`State`."""

    # --- streams by handle ----------------------------------------------------------------------------------------
    def _queue(self, handle: int, call: str, device: int | None = None) -> Queue:
        """The stream that a handle names.

        0, 1 and 2 are the default ones of ``device``, else of the device that the handle says, else of the current one.
        """
        if isinstance(handle, DeviceStream) and device not in (None, handle.device):
            raise _of_another(call, handle.device, device)
        if handle in (0, 1, 2):
            own = self._device(self._device_of(handle) if device is None else device, call)
            return self._default_queue(own, handle)
        queue = self._streams.get(handle)
        if queue is None:
            raise codes.refused(codes.INVALID_RESOURCE_HANDLE, call, "stream", got=f"{handle:#x}")
        if device is not None and queue.device != device:
            raise _of_another(call, queue.device, device)
        if self._devices[queue.device].fault is not None:
            self._device(queue.device, call)
        return queue

    def _device_of(self, handle: int) -> int:
        """The device of a call that takes nothing but a stream: that which the handle says, else the current one."""
        return handle.device if isinstance(handle, DeviceStream) else self._current.device

    def _default_queue(self, device: Device, handle: int) -> Queue:
        if handle == 2:
            own: dict[int, Queue] = self._local.__dict__.setdefault("per_thread", {})
            if device.ordinal not in own:
                own[device.ordinal] = self._new_queue(2, device)
                device.per_thread.append(own[device.ordinal])
            return own[device.ordinal]
        if device.legacy is None:
            device.legacy = self._new_queue(1, device)
        return device.legacy

    def _new_queue(self, handle: int, device: Device) -> Queue:
        self._parties += 1
        queue = Queue(handle, device.ordinal, self._parties)
        self._scheduler.add(queue)
        device.context_waits = [record for record in device.context_waits if not record.reached]
        for record in device.context_waits:
            self._wait_for(queue, record, "context_wait", call_site())
        return queue

    def _queues_of(self, device: int) -> list[Queue]:
        """All streams of a device: what covers the device covers the work of destroyed ones too."""
        return self._scheduler.queues(device)

    # --- queueing -------------------------------------------------------------------------------------------------
    def _submit(
        self,
        queue: Queue,
        name: str,
        run: Callable[[], None],
        touches: Iterable[Touch] = (),
        *,
        memory_node: bool = False,
    ) -> Use:
        """Queue (or record) an operation and judge its order.

        Returns:
            A use of no bytes: the operation as a point in the clocks.
        """
        operation = Operation(name, queue.handle, call_site())
        if queue.capture is not None:
            if queue.capture.invalid:
                raise codes.refused(
                    codes.CAPTURE_INVALIDATED, name, "the capture of this stream was invalidated"
                )
            uses = tuple(
                (t.allocation, Use(t.range, t.access, queue.party, 0, operation))
                for t in touches
                if self._lives(t, operation)
            )
            queue.capture.add(queue, operation, run, uses, memory_node)
            return Use(_NOTHING, Access.READ, queue.party, 0, operation)
        count = self._next(queue, operation.site)
        self._push(queue, operation, run, self._judge(queue, count, [(t, operation) for t in touches]))
        return Use(_NOTHING, Access.READ, queue.party, count, operation)

    def _next(self, queue: Queue, site: Site) -> int:
        """Number of the operation about to be queued, after everything that the host knows is known to its stream."""
        self._implicit_waits(queue, site)
        join(queue.clock, self._host)
        return queue.tick()

    def _judge(self, queue: Queue, count: int, touches: list[tuple[Touch, Operation]]) -> Uses | None:
        """Check each touch against what came before; None if one of them is of memory that is gone."""
        uses: list[tuple[Allocation, Use]] = []
        gone = False
        for touch, operation in touches:
            if not self._lives(touch, operation):
                gone = True
                continue
            allocation = touch.allocation
            use = Use(touch.range, touch.access, queue.party, count, operation)
            if touch.access.writes and allocation.read_only:
                self._hazard(
                    "write to memory mapped read-only", allocation, touch.range, allocation.began, operation
                )
            for old in allocation.log.add(use, queue.clock, self._host):
                self._hazard("unordered access", allocation, touch.range, old.operation, operation)
            if allocation.watch is not None:
                allocation.watch.queued(use)
            uses.append((allocation, use))
        return None if gone else tuple(uses)

    def _push(self, queue: Queue, operation: Operation, run: Callable[[], None], uses: Uses | None) -> None:
        if uses is None:  # these bytes may be somebody else's by now: reported, not run
            queue.push(Step(operation.name, operation.site, _nothing))
        else:
            queue.push(Step(operation.name, operation.site, lambda: self._run(queue.device, run, uses)))

    def _run(self, device: int, run: Callable[[], None], uses: Uses) -> None:
        if self._devices[device].fault is not None:
            return
        watched = [(a.watch, use) for a, use in uses if a.watch is not None]
        for watch, use in watched:
            watch.before_run(use)
        self._executing = threading.get_ident()
        try:
            run()
        except Fault as fault:
            self._poison(device, fault.code, str(fault), fault.__cause__)
        finally:
            self._executing = None
            for watch, use in watched:
                watch.after_run(use)

    def _implicit_waits(self, queue: Queue, site: Site) -> None:
        """The legacy stream and the per-thread ones wait for each other; created streams are non-blocking."""
        if queue.handle > 2:
            return
        device = self._devices[queue.device]
        others = list(device.per_thread) if queue.handle == 1 else [device.legacy]
        for other in others:
            if other is not None and not (mark := Mark(other)).reached:
                self._wait_for(queue, Record((mark,), other.clock), "implicit wait", site)
            elif other is not None:
                join(queue.clock, other.clock)

    def _wait_for(self, queue: Queue, record: Record, name: str, site: Site) -> None:
        """Later work of ``queue`` runs after ``record``."""
        join(queue.clock, record.clock)
        queue.push(Step(name, site, _nothing, lambda: record.reached))

    # --- waiting --------------------------------------------------------------------------------------------------
    def _run_until(self, done: Callable[[], bool], call: str) -> None:
        """Run steps until ``done``; other threads get in while nothing can go on."""
        deadline: float | None = None
        while not done():
            if self._scheduler.step():
                self._changed.notify_all()
                deadline = None
                continue
            now = time.monotonic()
            deadline = deadline or now + self.wait_limit
            if now >= deadline:
                heads = "; ".join(f"{step.name} queued at {step.site}" for step in self._scheduler.blocked())
                raise DeviceHangs(
                    f"{call} waited {self.wait_limit} s",
                    got=f"blocked: {heads or 'nothing'}",
                    hint="Release the latch or signal the semaphore, or raise wait_limit",
                )
            self._changed.wait(_POLL)

    def _drain(self, devices: Iterable[int], call: str) -> None:
        """Run everything that is queued on ``devices`` now."""
        marks = [Mark(queue) for device in devices for queue in self._scheduler.queues(device)]
        self._run_until(lambda: all(mark.reached for mark in marks), call)

    def _fence(self, clock: Clock, devices: Iterable[int], call: str) -> None:
        """The host waited for everything ``clock`` knows; raise what this reveals."""
        self._learn(clock)
        self._raise_hazards()
        self._reveal(devices, call)

    def _learn(self, clock: Clock) -> None:
        """The host knows that everything ``clock`` knows is done."""
        join(self._host, clock)
        for allocation in list(self._watched.values()):
            if allocation.watch is not None:
                allocation.watch.fence(self._host)

    # --- captures -------------------------------------------------------------------------------------------------
    def _refuse_capture(self, capture: Capture, code: int, call: str, what: str) -> DriverError:
        """Invalidate ``capture`` and give the error of the call that did it."""
        capture.invalid = True
        return codes.refused(code, call, what)

    def _lose_capture(self, capture: Capture, queue: Queue) -> None:
        """``queue`` goes away while it records into ``capture`` (``graph_calls``)."""
        raise NotImplementedError

    def _unsafe_in_capture(self, call: str) -> None:
        """Refuse a call that no capture under way allows, and lose those captures, as CUDA does."""
        thread = threading.get_ident()
        for capture in self._captures:
            if capture.mode is CaptureMode.GLOBAL or (
                capture.mode is CaptureMode.THREAD_LOCAL and capture.thread == thread
            ):
                raise self._refuse_capture(
                    capture, codes.CAPTURE_UNSUPPORTED, call, "not allowed while a stream captures"
                )

    def _no_capture(self, queue: Queue, call: str) -> None:
        if queue.capture is not None:
            raise self._refuse_capture(
                queue.capture, codes.CAPTURE_UNSUPPORTED, call, f"stream {queue.handle:#x} captures"
            )
