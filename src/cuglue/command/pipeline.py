"""Large transfers of ordinary memory: in chunks, copied aside by several threads while the bus moves others.

Owns the chunks and the ring of pinned places that they go through. Must not know descriptors, threads or what orders
the copies.

Small chunks begin sooner: the first one is there to be sent, or the last one copied, while the others are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.event import Event
from ..layout import CopyShape
from .crew import Crew
from .hostmem import address_of
from .lane import Lane

#: Bytes of a chunk: a 16th of the transfer, within these bounds. See docs/benchmarks.md for a 32nd.
SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 20, 8 << 20
#: Uploads and downloads from these sizes on are cut into chunks; below, waking threads costs more than they save.
UPLOAD_FROM, DOWNLOAD_FROM = 2 << 20, 8 << 20
_PLACES = 16  # chunks under way at once

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


class _Ring:
    """Pinned memory of several chunks.

    Attributes:
        memory: all of it.
        places: how many chunks there is room for.
    """

    def __init__(self, lane: Lane, pieces: list[Chunk]) -> None:
        self.places = min(_PLACES, len(pieces))
        self._size = max(piece.shape.nbytes for piece in pieces)
        self.memory = lane.take_host(self.places * self._size)
        self._bytes: npt.NDArray[np.uint8] = np.asarray(self.memory)
        self._address = address_of(self.memory)

    def address(self, place: int) -> int:
        """Of the first byte of a place."""
        return self._address + place * self._size

    def at(self, place: int, piece: Chunk) -> npt.NDArray[np.uint8]:
        """The bytes of a place that a chunk takes."""
        start = place * self._size
        return self._bytes[start : start + piece.shape.nbytes]


def upload(
    lane: Lane, source: npt.NDArray[np.uint8], shape: CopyShape, send: Move, tell: Tell | None = None
) -> None:
    """Copy ``source`` aside and send it, chunk by chunk.

    Args:
        lane: where.
        source: the bytes, without gaps.
        shape: what is copied.
        send: enqueues the copy of a chunk to the device.
        tell: called with the number of bytes that were read and sent.

    Ordering: blocks the host until the source was read, not until it was sent.
    Ownership: the ring of pinned memory is kept by the lane until the device has read it.
    """
    pieces = list(chunks(shape, _chunk_size(source.nbytes)))
    ring = _Ring(lane, pieces)
    sent: deque[tuple[int, Event]] = deque()  # places that the device reads, oldest first
    waiting = deque(pieces)
    done = 0
    try:
        with Crew() as crew:

            def fill(place: int) -> None:
                piece = waiting.popleft()
                part = source[piece.source : piece.source + piece.shape.nbytes]
                crew.begin((place, piece), ring.at(place, piece), part)

            for place in range(ring.places):
                fill(place)
            for _ in pieces:
                place, piece = crew.end()
                send(ring.address(place), piece)
                done += piece.shape.nbytes
                if tell is not None:
                    tell(done)
                if waiting:
                    sent.append((place, lane.stream.record()))
                if waiting and len(sent) > ring.places // 2:  # the others are being filled
                    place, event = sent.popleft()
                    event.synchronize()
                    lane.host.note_use(ring.at(place, piece))
                    fill(place)
        lane.hold(ring.memory, ring.memory.nbytes)
    except BaseException:
        lane.hold(ring.memory, ring.memory.nbytes)
        raise


def download(
    lane: Lane, target: npt.NDArray[np.uint8], shape: CopyShape, fetch: Move, tell: Tell | None = None
) -> None:
    """Fetch chunk by chunk, and copy each to ``target`` while others come.

    Args:
        lane: where.
        target: where the bytes go, without gaps.
        shape: what is copied.
        fetch: enqueues the copy of a chunk from the device.
        tell: called with the number of bytes that have arrived.

    Ordering: blocks the host until ``target`` is written.
    Ownership: after a failure the ring of pinned memory is kept by the lane until the device has written it.
    """
    pieces = list(chunks(shape, _chunk_size(target.nbytes)))
    ring = _Ring(lane, pieces)
    coming: deque[tuple[int, Chunk, Event]] = deque()
    waiting = deque(pieces)
    copying = done = 0
    try:
        with Crew() as crew:

            def call(place: int) -> None:
                piece = waiting.popleft()
                fetch(ring.address(place), piece)
                coming.append((place, piece, lane.stream.record()))

            for place in range(ring.places):
                call(place)
            while coming or copying:
                if coming:
                    place, piece, event = coming.popleft()
                    event.synchronize()
                    arrived = ring.at(place, piece)
                    lane.host.note_use(arrived)
                    crew.begin((place, piece), target[piece.source : piece.source + arrived.nbytes], arrived)
                    copying += 1
                if not coming or copying > ring.places // 2:
                    place, piece = crew.end()
                    copying -= 1
                    done += piece.shape.nbytes
                    if tell is not None:
                        tell(done)
                    if waiting:
                        call(place)
    except BaseException:
        lane.hold(ring.memory, ring.memory.nbytes)
        raise


def _chunk_size(nbytes: int) -> int:
    return min(max(nbytes // 16, SMALLEST_CHUNK), LARGEST_CHUNK)
