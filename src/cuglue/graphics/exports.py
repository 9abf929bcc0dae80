"""The way of an export that nearly every frame makes: a view of a map's memory, for the stream of one consumer.

Owns what is left of :meth:`~cuglue.exchange.view.Exporter.__dlpack__` for that. Must not know copies, read-only memory,
other element types, other devices or the host: where one of its questions has another answer than it needs it does
nothing, and the general way decides everything anew.

What both ways keep alike:
    * The memory was exported before, the general way, which asked what it is. Whether the map is live and the
      consumer's stream captures is asked each time, by the same functions and with the same errors.
    * Nobody but the map's stream and the consumer's may use the memory: then one event and one wait, or none if the two
      are one stream, order the consumer after all of it.
    * The lock is held from the wait to the stamp; the token comes before the capsule that keeps it, the stamp after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.event import follow
from ..driver.protocol import Access, CaptureStatus
from ..exchange.capsule import capsule_of, known_view
from ..exchange.dlpack import is_versioned
from ..exchange.owner import consumer_stream

if TYPE_CHECKING:
    from .users import MapUsers

_NO_CAPTURE, _READ_WRITE = CaptureStatus.NONE, Access.READ_WRITE


def export_again(m: MapUsers, number: int, max_version: object) -> Any:
    """A DLPack capsule of the map's memory; None: the general way has to be gone, and nothing was done.

    Args:
        m: the map.
        number: the consumer's stream.
        max_version: as the consumer gave it.

    Ordering: only enqueues. Raises: as :meth:`Exporter.__dlpack__`.
    """
    origin, share, layout = m.stream, m.share, m.layout
    view = known_view(share.ptr, layout, m.device)
    if view is None or m.readonly or number <= 0:
        return None
    m.check_exportable()
    versioned = is_versioned(max_version)
    consumer = consumer_stream(m, number)
    with consumer.state.ordering:
        users = m._consumers
        if users is not None and (len(users) != 1 or consumer not in users):
            return None
        if consumer is not origin:
            if not origin.nameable() or m.driver.capture_status(origin.handle) is not _NO_CAPTURE:
                return None
            follow(consumer, origin)
        share.prepare(consumer, _READ_WRITE)
        token = (m._ledger or m.ledger).issue(m, "DLPack", 2)
        capsule = capsule_of(view, layout, keep=token, versioned=versioned)
        m.note_consumer(consumer)
    return capsule
