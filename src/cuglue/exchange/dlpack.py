"""What a DLPack request asks for: the pure part of ``__dlpack__``.

Owns the rules for ``stream``, ``max_version``, ``dl_device``, ``copy`` and read-only memory (DLPack 1.3, array API
2025.12). Must not know pointers, drivers, streams as objects or capsules: :func:`negotiate` is a table from arguments
to an :class:`ExportPlan`, and is tested as one.

``TypeError`` is raised only for arguments of a wrong type: consumers answer it by asking again with fewer keywords,
which would hide the error. What cannot be exported is a ``BufferError``, a wrong value a ``ValueError``.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from operator import index
from typing import Final, NamedTuple

import numpy as np

from ..arguments import shown
from ..driver.protocol import LEGACY_STREAM, MemoryType

VERSION: Final = (1, 3)  # the newest DLPack whose rules are kept here
NO_ORDER: Final = -1  # the stream number by which a consumer says that it orders itself
CPU: Final = (int(MemoryType.HOST), 0)


class Route(Enum):
    """How the consumer gets at the bytes."""

    VIEW = "view"  # the memory itself
    COPY = "copy"  # a copy on the same device, owned by the consumer
    HOST_COPY = "host_copy"  # a copy of device memory in host memory; made synchronously


class ExportPlan(NamedTuple):
    """What to export.

    Attributes:
        route: the memory itself or which copy.
        versioned: a ``dltensor_versioned`` capsule; else the legacy one, which has no flags.
        readonly: set the READ_ONLY flag.
        stream: handle of the consumer's stream that has to come after the pending work; None: order nothing.
    """

    route: Route
    versioned: bool
    readonly: bool
    stream: int | None


def negotiate(
    device: tuple[int, int],
    *,
    stream: object = None,
    max_version: object = None,
    dl_device: object = None,
    copy: object = None,
    readonly: bool = False,
    legacy_readonly: bool = False,
) -> ExportPlan:
    """The plan for one ``__dlpack__`` call.

    Args:
        device: DLPack ``(type, id)`` of the memory.
        stream, max_version, dl_device, copy: as the consumer gave them.
        readonly: the memory may not be written.
        legacy_readonly: give read-only memory also to consumers that cannot be told so.

    Raises:
        TypeError: an argument has a type that the protocol does not know.
        ValueError: a stream number that it does not allow.
        BufferError: this memory cannot be exported as asked.
    """
    if (
        copy is dl_device is None
        and not readonly
        and type(stream) is int
        and (stream > 0 or stream == NO_ORDER)
        and device[0] != MemoryType.HOST
    ):
        return _view_for(stream, is_versioned(max_version))  # what PyTorch, CuPy and JAX ask, every time
    handle = _stream(stream, on_host=device[0] == MemoryType.HOST)
    versioned = is_versioned(max_version)
    if copy is not None and not isinstance(copy, bool | np.bool_):
        raise TypeError(f"copy: got {shown(copy)}, expected True, False or None")
    route = _route(device, _device(dl_device), copy)
    if route is not Route.VIEW:
        readonly = False  # the consumer owns the copy
    elif readonly and not versioned:
        if not legacy_readonly:
            raise BufferError(
                "This memory is read-only, and a DLPack capsule without a version cannot say so. "
                "Ask with max_version=(1, 0), copy=True, or export .view(legacy_readonly=True)"
            )
        readonly = False
    # A host copy is waited for by the host, whatever stream the consumer named (PyTorch names one).
    return ExportPlan(route, versioned, readonly, None if route is Route.HOST_COPY else handle)


@lru_cache(maxsize=64)
def _view_for(stream: int, versioned: bool) -> ExportPlan:
    return ExportPlan(Route.VIEW, versioned, False, None if stream == NO_ORDER else stream)


def _stream(stream: object, *, on_host: bool) -> int | None:
    """The handle to order, or None for "order nothing"."""
    if stream is None:
        return None if on_host else LEGACY_STREAM  # the producer has to assume the legacy default stream
    try:
        if isinstance(stream, bool | np.bool_):
            raise TypeError
        number = index(stream)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"stream: got {shown(stream)}, expected None or an integer stream handle") from None
    if on_host:
        raise ValueError(f"stream: got {number}, expected None: this memory is on the host")
    if number == 0:
        raise ValueError("stream: 0 is not allowed; 1 is the legacy default stream, 2 the per-thread one")
    if number < NO_ORDER:
        raise ValueError(f"stream: got {number}, expected -1 (order nothing), 1, 2 or a stream handle")
    return None if number == NO_ORDER else number


def is_versioned(max_version: object) -> bool:
    """Whether a consumer that says so gets a ``dltensor_versioned`` capsule. Raises TypeError: no pair of ints."""
    if max_version is None:
        return False
    if (
        type(max_version) is tuple
        and len(max_version) == 2
        and type(max_version[0]) is type(max_version[1]) is int
    ):
        major: int = max_version[0]
    else:
        major, _ = _pair("max_version", max_version)
    return major >= VERSION[0]  # the consumer of a later major has to take our newest one


def _device(dl_device: object) -> tuple[int, int] | None:
    return None if dl_device is None else _pair("dl_device", dl_device)


def _pair(name: str, value: object) -> tuple[int, int]:
    try:
        if not isinstance(value, tuple):
            raise TypeError
        first, second = value
        return index(first), index(second)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {shown(value)}, expected None or a tuple of two integers") from None


def _route(own: tuple[int, int], wanted: tuple[int, int] | None, copy: object) -> Route:
    if wanted is None or wanted == own:
        return Route.COPY if copy else Route.VIEW
    if wanted != CPU:
        raise BufferError(f"dl_device: got {wanted}, expected {own} (where the memory is) or {CPU} (host)")
    if copy is not None and not copy:
        raise BufferError(f"Memory of DLPack device {own} cannot be had on the host without a copy")
    return Route.HOST_COPY
