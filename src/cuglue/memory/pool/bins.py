"""Size classes, and the stacks of free spans that wait for requests of a class: bins.

Owns which class a request belongs to and which bins serve it. Must not know heaps, pages or streams. Nothing here needs
a lock: a stack is popped and appended to in one step each.
"""

from __future__ import annotations

from collections.abc import Callable

from .spans import ALIGN, Span, padded

SMALL = 128 << 10  # bytes; up to here requests share small pages
LARGE = 8 << 20  # from here on a page is kept for requests of nearly its size
EXACT = 4 << 10  # up to here every multiple of the alignment is a class
# Above, so many classes lie between a power of two and the next, and the bins of so many larger ones serve it too: of
# middle sizes those up to 2.5 or 3 times as large, or 5/4 once memory was short.
CLASSES_SMALL, CLASSES_MIDDLE, CLASSES_LARGE = 8, 16, 64
NEAR_SMALL, NEAR_MIDDLE, NEAR_LARGE = 2, 24, 2
NEAR_WHEN_SHORT = 4
_KEYS = 1 << 14  # sizes whose bin is known by the size itself

Stack = list[Span]


def class_size(nbytes: int) -> int:
    """Bytes that a request of ``nbytes`` gets: at most an eighth (small), 1/16 (middle) or 1/64 (large) more."""
    if nbytes <= EXACT:
        return padded(nbytes) or ALIGN
    step = _step(nbytes)
    return padded((nbytes + step - 1) & -step)


def class_below(size: int) -> int:
    """The largest class whose requests fit into a span of ``size`` bytes."""
    return size if size <= EXACT else size & -max(_step(size), ALIGN)


def _step(nbytes: int) -> int:
    """Bytes between the classes around ``nbytes``."""
    power: int = 1 << ((nbytes - 1).bit_length() - 1)
    return power // (
        CLASSES_SMALL if nbytes <= SMALL else CLASSES_MIDDLE if nbytes <= LARGE else CLASSES_LARGE
    )


class Late(list[Span]):
    """The bin of a closed pool: it serves no request, and says of each span that it came back.

    Args:
        came: called with nothing, on any thread and in finalisers.
    """

    def __init__(self, came: Callable[[], None]) -> None:
        super().__init__()
        self._came = came

    def append(self, span: Span) -> None:
        """Take a span, as any bin."""
        super().append(span)
        self._came()


class Bins:
    """The free spans of one owner that wait for a request of nearly their size.

    Attributes:
        bins: by size in alignments, the stacks of spans for it: its own, which near sizes share, and those of larger
            classes that serve it too, the smallest first.
        late: the bin for all that comes back to a closed pool; None: it is open.
    """

    def __init__(self) -> None:
        self.bins: dict[int, tuple[Stack, tuple[Stack, ...]]] = {}
        self._stacks: dict[int, Stack] = {}
        self._serving: dict[int, tuple[Stack, tuple[Stack, ...]]] = {}  # by class
        self._near_middle = NEAR_MIDDLE
        self.late: Stack | None = None

    def pop(self, nbytes: int) -> Span | None:
        """A span from the bins that serve ``nbytes`` bytes."""
        stack, larger = self.bins.get((nbytes + ALIGN - 1) // ALIGN) or self._open(nbytes)
        for one in (stack, *larger):
            if one:
                try:
                    return one.pop()
                except IndexError:
                    pass  # another thread was quicker
        return None

    def knows(self, nbytes: int) -> bool:
        """Whether :attr:`bins` has an entry for ``nbytes`` bytes, which a request has looked at then."""
        return (nbytes + ALIGN - 1) // ALIGN in self.bins

    def bin_of(self, nbytes: int) -> Stack:
        """The stack that spans for ``nbytes`` bytes go back to."""
        if self.late is not None:
            return self.late
        return (self.bins.get((nbytes + ALIGN - 1) // ALIGN) or self._open(nbytes))[0]

    def bin_for(self, size: int) -> Stack:
        """The stack that a span of ``size`` bytes fits best."""
        if self.late is not None:
            return self.late
        stack = self._stacks.get(size)  # a span that was cut has the size of its class
        return self._stacks.setdefault(class_below(size), []) if stack is None else stack

    def _open(self, nbytes: int) -> tuple[Stack, tuple[Stack, ...]]:
        """The stacks for ``nbytes`` bytes, known to :attr:`bins` from now on."""
        size = class_size(nbytes)
        found = self._serving.get(size)
        if found is None:
            sizes = [size]
            for _ in range(self._near(size)):
                sizes.append(class_size(sizes[-1] + 1))
            stack, *larger = (self._stacks.setdefault(one, []) for one in sizes)
            found = self._serving[size] = stack, tuple(larger)
        if len(self.bins) >= _KEYS:
            self.bins.clear()
        self.bins[(nbytes + ALIGN - 1) // ALIGN] = found
        return found

    def _near(self, size: int) -> int:
        """How many classes above ``size`` serve its requests too."""
        if size <= EXACT:
            return 0
        return NEAR_SMALL if size <= SMALL else self._near_middle if size < LARGE else NEAR_LARGE

    def memory_is_short(self) -> None:
        """From now on give no request what is much larger."""
        if self._near_middle != NEAR_WHEN_SHORT:
            self._near_middle = NEAR_WHEN_SHORT
            self._serving.clear()
            self.bins.clear()

    def seal(self, came: Callable[[], None]) -> None:
        """The pool closes: whatever is handed out from now on comes back to :attr:`late`."""
        self.late = self._stacks.setdefault(0, Late(came))

    def binned_spans(self) -> list[Span]:
        """The spans in bins."""
        return [span for stack in list(self._stacks.values()) for span in list(stack)]

    def binned_at_least(self, most: int | None = None) -> int:
        """Bytes in bins, of those of classes up to ``most`` alone if given; of each span what its class needs of it."""
        stacks = list(self._stacks.items())
        return sum([size * len(stack) for size, stack in stacks if stack and (most is None or size <= most)])

    @property
    def any_binned(self) -> bool:
        """Whether anything lies in bins."""
        return any(list(self._stacks.values()))

    def empty_into(self, found: list[Span], small: bool | None = None) -> None:
        """Move everything out of the bins (of small classes, of large ones, or all) to the end of ``found``."""
        for size, stack in list(self._stacks.items()):
            if stack and (small is None or (size <= SMALL) is small):
                try:
                    found.extend(
                        iter(stack.pop, None)
                    )  # in one call: an interrupt in between would lose a span
                except IndexError:
                    pass  # it is empty
