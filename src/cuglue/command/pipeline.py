"""Large transfers of ordinary memory: in chunks, copied aside by several threads while the bus moves others.

Owns the chunks, the threads and the ring of pinned buffers. Must not know descriptors or what orders the copies.

One core copies 5 to 10 GB/s and the bus takes 55; so a single copy aside is what a transfer waits for. Eight threads
came to 27 GB/s.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.event import Event
from ..layout import CopyShape
from .hostmem import HostBuffer, address_of
from .lane import Lane

#: Bytes of a chunk: a 16th of the transfer, within these bounds.
SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 20, 8 << 20
#: Uploads and downloads from these sizes on are cut into chunks; below, waking threads costs more than they save.
UPLOAD_FROM, DOWNLOAD_FROM = 2 << 20, 8 << 20
_THREADS = 8

#: ``move(host address, chunk)`` enqueues the copy of one chunk.
Move = Callable[[int, "Chunk"], None]
#: ``tell(bytes)``: so much is through.
Tell = Callable[[int], None]


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
    lane: Lane, source: npt.NDArray[np.uint8], shape: CopyShape, send: Move, tell: Tell | None = None
) -> None:
    """Copy ``source`` aside and send it, chunk by chunk.

    Args:
        lane: where.
        source: the bytes, without gaps.
        shape: what is copied.
        send: enqueues the copy of a chunk to the device.
        tell: called with the bytes of ``source`` that are not needed any more.

    Ordering: blocks the host until the source was read, not until it was sent.
    Ownership: the ring of pinned buffers is kept by the lane until the device has read it.
    """
    pool, threads = _threads()
    size = _chunk_size(source.nbytes)
    ring: list[HostBuffer] = []
    sent: dict[int, Event] = {}  # by place in the ring
    filling: deque[tuple[int, Chunk, Future[Any]]] = deque()

    def send_oldest() -> None:
        place, chunk, filled = filling.popleft()
        filled.result()
        send(address_of(ring[place]), chunk)
        sent[place] = lane.stream.record()
        if tell is not None:
            tell(chunk.source + chunk.shape.nbytes)

    try:
        for number, chunk in enumerate(chunks(shape, size)):
            place = number % (2 * threads)
            if place == len(ring):
                ring.append(lane.take_host(max(size, chunk.shape.nbytes)))
            elif place in sent:
                sent[place].synchronize()
                lane.host.note_use(ring[place])
            piece = source[chunk.source : chunk.source + chunk.shape.nbytes]
            target = ring[place][: chunk.shape.nbytes]
            filling.append((place, chunk, pool.submit(np.copyto, target, piece)))
            if len(filling) >= threads:
                send_oldest()
        while filling:
            send_oldest()
    finally:
        _end([copied for _, _, copied in filling])
        for buffer in ring:
            lane.hold(buffer, buffer.nbytes)


def download(
    lane: Lane, target: npt.NDArray[np.uint8], shape: CopyShape, fetch: Move, tell: Tell | None = None
) -> None:
    """Fetch chunk by chunk, and copy each to ``target`` while others come.

    Args:
        lane: where.
        target: where the bytes go, without gaps.
        shape: what is copied.
        fetch: enqueues the copy of a chunk from the device.
        tell: called with the bytes that have arrived.

    Ordering: blocks the host until ``target`` is written.
    Ownership: after a failure the ring of pinned buffers is kept by the lane until the device has written it.
    """
    pool, threads = _threads()
    size = _chunk_size(target.nbytes)
    ring: list[HostBuffer] = []
    coming: deque[tuple[int, Chunk, Event]] = deque()
    copying: deque[tuple[int, Future[Any]]] = deque()  # (where the chunk ends, its copy), oldest first

    def copy_oldest() -> None:
        place, chunk, arrived = coming.popleft()
        arrived.synchronize()
        lane.host.note_use(ring[place])
        end = chunk.source + chunk.shape.nbytes
        piece = target[chunk.source : end]
        copying.append((end, pool.submit(np.copyto, piece, ring[place][: chunk.shape.nbytes])))

    def finish_oldest() -> None:
        end, copied = copying.popleft()
        copied.result()
        if tell is not None:
            tell(end)

    try:
        for number, chunk in enumerate(chunks(shape, size)):
            place = number % (2 * threads)
            if place == len(ring):
                ring.append(lane.take_host(max(size, chunk.shape.nbytes)))
            else:
                finish_oldest()  # the one that had this place
            fetch(address_of(ring[place]), chunk)
            coming.append((place, chunk, lane.stream.record()))
            if len(coming) >= threads:
                copy_oldest()
        while coming:
            copy_oldest()
        while copying:
            finish_oldest()
    except BaseException:
        for buffer in ring:
            lane.hold(buffer, buffer.nbytes)
        raise
    finally:
        _end([copied for _, copied in copying])


def _end(copies: Iterable[Future[Any]]) -> None:
    """Cancel what has not begun and wait for the rest: nobody touches ring, source or target any more."""
    for copied in copies:
        copied.cancel() or copied.exception()


def _chunk_size(nbytes: int) -> int:
    return min(max(nbytes // (2 * _THREADS), SMALLEST_CHUNK), LARGEST_CHUNK)


@cache
def _threads() -> tuple[ThreadPoolExecutor, int]:
    count = max(1, min(_THREADS, os.cpu_count() or 1))
    return ThreadPoolExecutor(count, thread_name_prefix="cuglue-staging"), count
