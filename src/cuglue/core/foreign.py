"""Streams in the words of others: what their objects say of themselves, and the number that tells them of one of ours.

Owns the ways of asking (CuPy's, PyTorch's, the protocol, a number) and the one of telling. Must not know what records
are for, nor import any of those libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ..arguments import shown, whole
from ..driver.protocol import LEGACY_STREAM, PER_THREAD_STREAM, DeviceStream
from ..errors import StreamMisuse, UsageError

if TYPE_CHECKING:
    from .stream import Stream

_LOWEST_ADDRESS = 4096  # the driver's handles are addresses, and nothing lies in the first page


def check_driver(obj: object, own: object, driver: object) -> None:
    """Refuse a stream of another driver, whose handle means some other stream here, or none.

    Raises:
        StreamMisuse: it is one.
    """
    if own is not driver:
        raise StreamMisuse(
            f"stream {shown(obj)}",
            got=f"a stream of {shown(own)}",
            expected=f"one of {shown(driver)}",
            hint="Make it with the driver that is used here",
        )


def handle_of(obj: object, driver: object) -> tuple[int, int | None, object]:
    """``(handle, device or None, owner or None)`` of a foreign stream; a number owns nothing.

    Raises:
        StreamMisuse: no stream, or one of another simulated device than ``driver``.
    """
    if type(obj) is not int:  # every export by DLPack names one
        ptr = getattr(obj, "ptr", None)  # CuPy and the simulated device
        if isinstance(ptr, int):
            where = getattr(obj, "device_id", None)
            if where is None:  # not CuPy's
                where = getattr(obj, "device", None)
                own = getattr(obj, "driver", None)
                if type(own) is type(driver):
                    check_driver(obj, own, driver)
            return ptr, where if isinstance(where, int) and where >= 0 else None, obj
        ptr = getattr(obj, "cuda_stream", None)  # PyTorch
        if isinstance(ptr, int):
            return ptr, cast("int | None", getattr(getattr(obj, "device", None), "index", None)), obj
    number = whole(obj)
    if number is not None:
        if not (0 <= number <= PER_THREAD_STREAM or _LOWEST_ADDRESS <= number < 2**64):
            raise StreamMisuse(
                "stream handle",
                got=shown(number),
                expected="0, 1 or 2 (a default stream), an address that the driver gave, or a stream object",
            )
        return number, obj.device if isinstance(obj, DeviceStream) else None, None
    protocol = getattr(obj, "__cuda_stream__", None)
    if protocol is not None:
        said = protocol() if callable(protocol) else protocol
        pair = tuple(said) if isinstance(said, tuple | list) else ()
        handle = whole(pair[1]) if len(pair) == 2 else None
        if handle is None or pair[0] != 0:
            got = shown(said) if handle is None else f"version {pair[0]}"
            raise UsageError(f"__cuda_stream__ of {shown(obj)}", got=got, expected="version 0: (0, handle)")
        return handle, None, obj
    raise StreamMisuse(
        "stream", got=shown(obj), expected="None, a CuPy or PyTorch stream, __cuda_stream__ or an int handle"
    )


def interface_number(stream: Stream) -> int | None:
    """``stream`` of the CUDA array interface where work may be pending on ours; never 0.

    The interface says no device, so that a reader takes the number of a default stream for one of the current device.
    Where that is another, this blocks the host until the work is done, and the answer is None.
    """
    handle = stream.handle
    if type(handle) is DeviceStream:
        if handle <= PER_THREAD_STREAM and stream.driver.device_current() != handle.device:
            stream.synchronize()
            return None
        handle = int(handle)
    return handle or LEGACY_STREAM
