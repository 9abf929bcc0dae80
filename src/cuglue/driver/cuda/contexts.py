"""Which context is current while a call runs.

Owns the primary contexts, the only ones used, and the table from handles to devices. A runtime call on the device that
is current already needs no context work; a driver-API call always gets its context pushed and popped, since a fresh
thread has none.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from ...errors import UsageError
from .calls import call, call_runtime, cu, runtime, unknown_handle


class Pushed:
    """``with`` this, the context is current on this thread; the former one is back afterwards. Reusable, nests."""

    __slots__ = ("context", "device")

    def __init__(self, device: int) -> None:
        self.device = device
        self.context: Any = call(cu.cuDevicePrimaryCtxRetain, device)

    def __enter__(self) -> None:
        call(cu.cuCtxPushCurrent, self.context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cu.cuCtxPopCurrent()  # can only fail on an empty stack, and this thread pushed


class Contexts:
    """Base of the parts of the driver: contexts by device, devices by handle."""

    def __init__(self) -> None:
        call(cu.cuInit, 0)
        self._count: int = call_runtime(runtime.getDeviceCount)
        # With one device no call needs to ask which one is current.
        self._only = 0 if self._count == 1 else -1
        self._pushed: dict[int, Pushed] = {}
        self._owners: dict[tuple[str, int], int] = {}
        self._lock = threading.RLock()

    def _on(self, device: int) -> Pushed:
        """Context manager under which ``device`` is current."""
        pushed = self._pushed.get(device)
        if pushed is None:
            with self._lock:
                if not 0 <= device < self._count:
                    raise UsageError("device", got=device, expected=f"an ordinal below {self._count}")
                pushed = self._pushed.setdefault(device, Pushed(device))  # retained until the process ends
        return pushed

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

    def _disown(self, kind: str, handle: int) -> None:
        self._owners.pop((kind, handle), None)
