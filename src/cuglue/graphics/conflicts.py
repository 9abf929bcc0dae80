"""Who may have an object mapped beside whom: readers share, and whoever writes is alone.

Owns that rule and its error. Must not know what a map is.
"""

from __future__ import annotations

from ..errors import MapConflictError


def held_for(maps: int, writers: int) -> str | None:
    """ "write" or "read", as so many live maps hold an object; None: there are none."""
    return "write" if writers else "read" if maps else None


def refuse_conflict(
    what: object,
    held: str | None,
    wish: str,
    *,
    writes: bool,
    by: str = "",
    hint: str = "Leave that map first",
) -> None:
    """Raise MapConflictError if ``what`` is held for writing, or at all and the wish writes.

    Args:
        what: the object, for the message.
        held: as :func:`held_for` says.
        wish: the call that is to be allowed or refused.
        writes: whether it would write.
        by: who holds it, if that is to be said.
        hint: the way out.
    """
    if held == "write" or (writes and held):
        raise MapConflictError(
            f"{what} is mapped{by} for {'writing' if held == 'write' else 'reading'}",
            got=wish,
            expected=f"no live map{'' if writes else ' that writes'} of the same memory",
            hint=hint,
            held=held,
        )
