"""Happens-before of the simulated device: vector clocks, and the uses of each allocation that still matter.

Owns the order of operations as the program stated it. It shares no code with the library's own stream arithmetic,
since it exists to judge that. Must not know queues, memory or when anything really runs.

Every stream and the host (owner 0) is a party. A clock says, per party, how much of its work is known to be done
before what comes next. Python threads of the host are one party: the locks between them are the program's business.
"""

from __future__ import annotations

from typing import NamedTuple

from ..protocol import Access
from .hazards import Operation
from .pages import Pages
from .ranges import Range

Clock = dict[int, int]
HOST = 0


def join(clock: Clock, other: Clock) -> None:
    """What ``other`` knows becomes known to ``clock``."""
    for party, number in other.items():
        if clock.get(party, 0) < number:
            clock[party] = number


def knows(clock: Clock, other: Clock) -> bool:
    """True if ``clock`` knows everything that ``other`` knows."""
    return all(clock.get(party, 0) >= number for party, number in other.items())


class Use(NamedTuple):
    """One operation's use of a range; it is the ``number``-th operation of party ``owner``."""

    range: Range
    access: Access
    owner: int
    number: int
    operation: Operation

    def known_to(self, clock: Clock) -> bool:
        """True if ``clock`` knows this use to be done."""
        return clock.get(self.owner, 0) >= self.number


class UseLog:
    """The uses of one allocation that a later operation could still conflict with."""

    __slots__ = ("_enough", "_size", "uses")

    def __init__(self) -> None:
        self.uses: Pages[Use] = Pages()
        self._size = 0
        self._enough = 64

    def conflicts(self, range: Range, access: Access, clock: Clock) -> list[Use]:
        """Uses that touch ``range``, conflict with ``access`` and are not known to ``clock``."""
        return [
            use
            for use in self.uses.around(range)
            if (access.writes or use.access.writes) and not use.known_to(clock) and use.range.overlaps(range)
        ]

    def add(self, new: Use, clock: Clock, host: Clock) -> list[Use]:
        """Note ``new`` and give the uses it conflicts with.

        Dropped are uses that the host knows (all later work is queued by the host, so it is ordered after them) and
        uses that ``new`` hides: whoever is ordered after ``new`` is ordered after those too.
        """
        found = self.conflicts(new.range, new.access, clock)
        self.uses.keep(lambda use: not (use.known_to(host) or self._hides(new, use, clock)), new.range)
        self.uses.add(new.range, new)
        self._size += 1
        if self._size >= self._enough:  # now and then: what lies elsewhere
            self.uses.keep(lambda use: not use.known_to(host))
            self._size = len(self.uses)
            self._enough = 64 + 2 * self._size
        return found

    @staticmethod
    def _hides(new: Use, old: Use, clock: Clock) -> bool:
        if not new.range.covers(old.range) or not old.known_to(clock):
            return False
        return new.access.writes or (old.owner == new.owner and not old.access.writes)
