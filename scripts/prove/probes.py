"""Marks sites in a source, so that a run tells which of them a test reaches.

Owns the text that is put in. Must not know who runs it: ``__reached__`` is whatever the builtins have by that name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .sites import Site


def with_probes(source: str, sites: Iterable[tuple[int, Site]]) -> str:
    """``source`` with a call of ``__reached__(number)`` before each site. Lines keep their numbers."""
    lines = source.encode().splitlines(keepends=True)
    inserts: list[tuple[int, int, int, bytes]] = []  # line, column, rank among those at one place, text
    for number, site in sites:
        node = site.node
        first, column = node.lineno, node.col_offset  # type: ignore[attr-defined]
        last, end = node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        extent = (last - first) * 1000 + end - column
        if isinstance(node, ast.stmt):
            inserts.append((first, column, -extent, f"__reached__({number}); ".encode()))
        else:  # an outer site opens before an inner one at the same place, and closes after it
            inserts.append((first, column, -extent, f"(__reached__({number}) and (".encode()))
            inserts.append((last, end, extent - 10**9, b"))"))
    for line, column, _, text in sorted(inserts, reverse=True):
        whole = lines[line - 1]
        lines[line - 1] = whole[:column] + text + whole[column:]
    return b"".join(lines).decode()
