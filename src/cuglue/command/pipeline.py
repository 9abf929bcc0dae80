"""Large uploads from ordinary memory: copied aside in chunks by several threads, each sent as soon as it is filled.

Owns the chunks, the threads and the ring of pinned buffers. Must not know descriptors or what orders the copies.

One core copies 5 to 7 GB/s and the bus takes 55; so a single copy aside is what an upload waits for. Eight threads and
chunks of 8 MiB came to 25 GB/s.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.event import Event
from ..layout import CopyShape
from .hostmem import HostBuffer, address_of
from .lane import Lane

CHUNK = 8 << 20
#: Uploads from this size on are cut into chunks.
PIPELINE_FROM = 2 * CHUNK
_THREADS = 8


class Chunk(NamedTuple):
    """A piece of an upload: where it begins in the source and in the destination (bytes), and what is copied."""

    source: int
    target: int
    shape: CopyShape


def chunks(shape: CopyShape, nbytes: int) -> Iterator[Chunk]:
    """Cut a copy into pieces of about ``nbytes`` bytes: ranges of a linear one, whole rows of any other."""
    if shape.linear:
        for start in range(0, shape.width, nbytes):
            size = min(nbytes, shape.width - start)
            yield Chunk(start, start, CopyShape(size, 1, size))
        return
    rows = max(1, nbytes // shape.width)
    for row in range(0, shape.height, rows):
        height = min(rows, shape.height - row)
        yield Chunk(row * shape.width, row * shape.pitch, CopyShape(shape.width, height, shape.pitch))


def upload(
    lane: Lane, source: npt.NDArray[np.uint8], shape: CopyShape, send: Callable[[int, Chunk], None]
) -> None:
    """Copy ``source`` aside and send it, chunk by chunk.

    Args:
        lane: where.
        source: the bytes, without gaps.
        shape: what is copied.
        send: ``send(host address, chunk)`` enqueues the copy of one chunk.

    Ordering: blocks the host until the source was read, not until it was sent.
    Ownership: the ring of pinned buffers is kept by the lane until the device has read it.
    """
    pool, threads = _threads()
    ring: list[HostBuffer] = []
    sent: dict[int, Event] = {}  # by place in the ring
    filling: deque[tuple[int, Chunk, Future[Any]]] = deque()

    def send_oldest() -> None:
        place, chunk, filled = filling.popleft()
        filled.result()
        send(address_of(ring[place]), chunk)
        sent[place] = lane.stream.record()

    try:
        for number, chunk in enumerate(chunks(shape, CHUNK)):
            place = number % (2 * threads)
            if place == len(ring):
                ring.append(lane.take_host(max(CHUNK, chunk.shape.nbytes)))
            elif place in sent:
                sent[place].synchronize()
                lane.host.note_access(address_of(ring[place]), ring[place].nbytes)
            piece = source[chunk.source : chunk.source + chunk.shape.nbytes]
            target = ring[place][: chunk.shape.nbytes]
            filling.append((place, chunk, pool.submit(np.copyto, target, piece)))
            if len(filling) >= threads:
                send_oldest()
        while filling:
            send_oldest()
    finally:
        for _, _, filled in filling:
            filled.cancel() or filled.exception()  # nobody writes to the ring any more
        for buffer in ring:
            lane.hold(buffer, buffer.nbytes)


@cache
def _threads() -> tuple[ThreadPoolExecutor, int]:
    count = max(1, min(_THREADS, os.cpu_count() or 1))
    return ThreadPoolExecutor(count, thread_name_prefix="cuglue-staging"), count
