"""The error for a request that nothing helped: which bytes are live, which are free, and in which pieces.

Owns its text. Must not change anything.
"""

from __future__ import annotations

from ...errors import OutOfMemory, PoolCapacityExceeded
from .. import report
from ..block import LARGEST
from ..cupy_plug import cupy_error
from .figures import PoolFigures


def explain(pool: PoolFigures, nbytes: int, error: OutOfMemory) -> OutOfMemory:
    """``error`` with figures: what is live, what is free and in which pieces."""
    tried = ["merged free memory", "took over that of other streams", "gave unused pages back",
             "waited for the device", "collected garbage"] if nbytes <= LARGEST else []  # fmt: skip
    found = report.explain(pool, nbytes, tried)
    limit = {"capacity": error.capacity} if isinstance(error, PoolCapacityExceeded) else {}  # type: ignore[attr-defined]
    kind = type(error) if limit or type(error).FIELDS == OutOfMemory.FIELDS else OutOfMemory
    told = kind(
        f"{nbytes} bytes of device memory for {pool!r}",
        got=str(found),
        expected=None if not limit else f"at most {error.capacity} bytes in all",  # type: ignore[attr-defined]
        hint="Free arrays, or raise the limit"
        if limit
        else "Free arrays, or trim other pools of this device",
        requested=nbytes,
        in_use=found.live,
        report=found,
        **limit,
    )
    return cupy_error(told)
