"""Whether traced calls came in a partial order: what a test means, and not more.

Owns the matching. Must not know the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .tracing import Call

#: A call by its method, or by method and first arguments, with ``...`` for any.
Pattern = str | tuple[Any, ...]


def in_order(calls: Sequence[Call], *steps: Pattern | Iterable[Pattern]) -> None:
    """Check that each step is among the calls, after all of the step before it. Other calls may come in between.

    Args:
        calls: what :func:`~cuglue.testing.trace` gave.
        steps: each a pattern, or a list or set of patterns that may come in any order. A pattern is the name of a
            method, or a tuple of a name and first arguments, of which ``...`` stands for any one.

    Raises:
        AssertionError: a step is missing or came too early; the message shows the calls.
    """
    at = 0
    for number, step in enumerate(steps, 1):
        wanted = [step] if isinstance(step, str | tuple) else list(step)
        ends = [at]
        taken: set[int] = set()
        for pattern in wanted:
            found = next(
                (i for i in range(at, len(calls)) if i not in taken and _matches(calls[i], pattern)), None
            )
            if found is None:
                shown = "\n".join(f"  {i:3} {call.method}{call.args}" for i, call in enumerate(calls))
                raise AssertionError(f"step {number}: no {pattern!r} after call {at - 1} of\n{shown}")
            taken.add(found)
            ends.append(found + 1)
        at = max(ends)


def _matches(call: Call, pattern: Pattern) -> bool:
    if isinstance(pattern, str):
        return call.method == pattern
    name, *arguments = pattern
    if call.method != name or len(arguments) > len(call.args):
        return False
    return all(want is ... or want == got for want, got in zip(arguments, call.args, strict=False))
