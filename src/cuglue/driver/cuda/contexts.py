"""Which context is current while a call runs.

Owns the primary contexts, the only ones used, and the table from handles to devices. A driver-API call gets its context
pushed and popped unless it is current already: a fresh thread has none. A runtime call on the current device needs
nothing, and gives a thread that has no context the primary one, as everywhere in CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from ...errors import UsageError
from .calls import CUDADriverError, call, call_runtime, cu, cupy_driver, runtime, unknown_handle


class Primary:
    """The context of a device, retained until the process ends.

    ``with`` it, the context is current on this thread and the former one is back afterwards. Reusable, nests.
    """

    __slots__ = ("context", "number")

    def __init__(self, device: int) -> None:
        self.context: Any = call(cu.cuDevicePrimaryCtxRetain, device)
        self.number = int(self.context)

    def __enter__(self) -> None:
        call(cu.cuCtxPushCurrent, self.context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cu.cuCtxPopCurrent()  # can only fail on an empty stack, and this thread pushed


class _Current:
    """What stands for a context that is current already: ``with`` it, nothing happens."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


_CURRENT = _Current()
_RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class Relaxed:
    """``with Relaxed():`` a call that CUDA calls unsafe leaves alone what other threads capture in global mode.

    Without it an allocation on one thread ends every such capture of the process.
    """

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        refused, mode = cu.cuThreadExchangeStreamCaptureMode(_RELAXED)
        self._mode = None if refused else mode

    def __exit__(self, *exception: object) -> None:
        if self._mode is not None:
            cu.cuThreadExchangeStreamCaptureMode(self._mode)


class Contexts:
    """Base of the parts of the driver: contexts by device, devices by handle."""

    def __init__(self) -> None:
        call(cu.cuInit, 0)
        self._count: int = call_runtime(runtime.getDeviceCount)
        # With one device no call needs to ask which one is current.
        self._only = 0 if self._count == 1 else -1
        self._primaries: dict[int, Primary] = {}
        self._sole = -1  # number of the only context, once it is there
        self._owners: dict[tuple[str, int], int] = {}
        self._lock = threading.RLock()

    def _primary(self, device: int) -> Primary:
        primary = self._primaries.get(device)
        if primary is None:
            with self._lock:
                if not 0 <= device < self._count:
                    raise UsageError("device", got=device, expected=f"an ordinal below {self._count}")
                if device not in self._primaries:
                    self._primaries[device] = Primary(device)
                    if self._only == device:
                        self._sole = self._primaries[device].number
                primary = self._primaries[device]
        return primary

    def _on(self, device: int) -> Primary | _Current:
        """Context manager under which ``device`` is current."""
        primary = self._primary(device)
        _, current = cu.cuCtxGetCurrent()  # an eighth of what push and pop cost
        return _CURRENT if int(current) == primary.number else primary

    def _here(self, device: int) -> bool:
        """True if a call for ``device`` needs no :meth:`_on`: for calls that every frame makes."""
        primary = self._primaries.get(device)
        return primary is not None and int(cu.cuCtxGetCurrent()[1]) == primary.number

    def _here_alone(self) -> bool:
        """True if the only device there is needs no :meth:`_on`: the cheapest question, for what every frame does."""
        try:  # CuPy gives a number, the bindings an object
            return bool(cupy_driver.ctxGetCurrent() == self._sole)
        except CUDADriverError:
            return False  # a forked child, as the call itself will say

    def _elsewhere(self, device: int) -> bool:
        """True if a runtime call for ``device`` needs :meth:`_on` first."""
        return device != self._only and runtime.getDevice() != device

    # Handles that come back without their device. Those of foreign make run on the current device.

    def _own(self, kind: str, handle: int, device: int) -> int:
        self._owners[kind, handle] = device
        return handle

    def _owner(self, kind: str, handle: int, call_name: str | None = None) -> int:
        """Device of a handle. With ``call_name`` the handle must be ours."""
        device = self._owners.get((kind, handle))
        if device is None:
            if call_name is not None:
                raise unknown_handle(kind, handle, call_name)
            device = runtime.getDevice()
        return device

    @contextmanager
    def _disowning(self, kind: str, handle: int, call_name: str | None = None) -> Iterator[None]:
        """On the handle's device, around the call that frees it.

        The handle is given up before the call, which may let another thread in: the driver can give the same number
        out again at once, and the new owner's entry must not be the one that goes. A refused call takes it back.
        """
        device = self._owner(kind, handle, call_name)
        known = self._owners.pop((kind, handle), None) is not None
        try:
            with self._on(device):
                yield
        except BaseException:
            if known:
                self._owners[kind, handle] = device
            raise
